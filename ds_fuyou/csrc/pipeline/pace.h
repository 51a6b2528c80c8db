// SPDX-License-Identifier: Apache-2.0
// How long a lane takes for a unit of its work, of late.
#pragma once

namespace fuyou {

class Pace {
  public:
    void add(double secs, double amount)
    {
        secs_ += secs;
        amount_ += amount;
    }

    // What was before counts half from now on: drives and cores become slower, and faster again.
    void fade()
    {
        secs_ /= 2;
        amount_ /= 2;
    }

    bool is_known() const { return amount_ > 0; }

    double secs_of(double amount) const { return amount * secs_ / amount_; }

  private:
    double secs_ = 0.0;
    double amount_ = 0.0;
};

}  // namespace fuyou
