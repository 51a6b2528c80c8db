// SPDX-License-Identifier: Apache-2.0
//
// DeepSpeed's CPU Adagrad behind UpdateRule. The installed DeepSpeed's source is compiled into this
// translation unit, so that whichever version is installed defines the arithmetic.
#include "kernels/deepspeed_prelude.h"

#include "kernels/update_rule.h"

namespace fuyou_deepspeed_adagrad {
#include "cpu_adagrad.cpp"
}  // namespace fuyou_deepspeed_adagrad

namespace fuyou {
namespace {

using Stock = fuyou_deepspeed_adagrad::Adagrad_Optimizer;

class AdagradRule final : public UpdateRule {
  public:
    explicit AdagradRule(const Stock& optimizer) : optimizer_(optimizer) {}

    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        Stock optimizer(optimizer_);  // Step_8 is not const; the copy is a few words
        step_here(optimizer, param, grad, moments[0], numel);
    }

  private:
    Stock optimizer_;
};

class AdagradClock final : public OptimizerClock {
  public:
    explicit AdagradClock(const Stock& optimizer) : optimizer_(optimizer) {}

    void increment(std::size_t step, float /*beta1*/, float /*beta2*/) override
    {
        optimizer_.IncrementStep(step);
    }

    std::shared_ptr<const UpdateRule> rule(float lr, float eps, float weight_decay,
                                           bool /*bias_correction*/) const override
    {
        Stock optimizer(optimizer_);
        optimizer.update_state(lr, eps, weight_decay);
        return std::make_shared<AdagradRule>(optimizer);
    }

    std::unique_ptr<OptimizerClock> clone() const override
    {
        return std::make_unique<AdagradClock>(optimizer_);
    }

  private:
    Stock optimizer_;
};

}  // namespace

std::unique_ptr<OptimizerClock> make_adagrad_clock(float lr, float eps, float weight_decay)
{
    return std::make_unique<AdagradClock>(Stock(lr, eps, weight_decay));
}

}  // namespace fuyou
