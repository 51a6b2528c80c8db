// SPDX-License-Identifier: Apache-2.0
//
// The seam for tests and storage simulation: injected faults and a device of a given speed.
// Private to io/; not thread-safe, the queue's mutex guards it.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "io_engine.h"

namespace fuyou {

using IoClock = std::chrono::steady_clock;

// What is in store for the first transfer of one piece.
struct PieceFate {
    int error = 0;          // > 0: no I/O, the transfer ends with this errno
    bool is_short = false;  // the transfer moves about half of the piece
};

class DeviceModel {
  public:
    // When a piece may start that is held back until clear_faults().
    static constexpr IoClock::time_point kHeld = IoClock::time_point::max();

    // Throws std::invalid_argument unless both are finite and >= 0.
    void set_throttle(double read_bytes_per_sec, double write_bytes_per_sec);
    void add_fault(const IoFault& fault);
    void clear_faults();

    // Decides the fate of a new piece of `kind` over `extent`, and the earliest time of its first
    // transfer (`now` unless throttled or delayed). Counts the piece in every rule that matches it.
    PieceFate admit(IoKind kind, const IoExtent& extent, IoClock::time_point now,
                    IoClock::time_point* not_before);

  private:
    struct Rule {
        IoFault fault;
        std::uint64_t num_matched = 0;
    };

    double read_bytes_per_sec_ = 0.0;
    double write_bytes_per_sec_ = 0.0;
    IoClock::time_point free_at_;  // when the simulated device has served all it was given
    std::vector<Rule> rules_;
};

}  // namespace fuyou
