// SPDX-License-Identifier: Apache-2.0
//
// DeepSpeed's CPU Adam behind UpdateRule. The installed DeepSpeed's source is compiled into this
// translation unit, so that whichever version is installed defines the arithmetic and the clock.
#include "kernels/deepspeed_prelude.h"

#include "kernels/update_rule.h"

namespace fuyou_deepspeed_adam {
#include "cpu_adam_impl.cpp"
}  // namespace fuyou_deepspeed_adam

namespace fuyou {
namespace {

using Stock = fuyou_deepspeed_adam::Adam_Optimizer;

class AdamRule final : public UpdateRule {
  public:
    explicit AdamRule(const Stock& optimizer) : optimizer_(optimizer) {}

    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        Stock optimizer(optimizer_);  // Step_8 is not const; the copy is a few words
        step_here(optimizer, param, grad, moments[0], moments[1], numel);
    }

  private:
    Stock optimizer_;
};

class AdamClock final : public OptimizerClock {
  public:
    explicit AdamClock(const Stock& optimizer) : optimizer_(optimizer) {}

    void increment(std::size_t step, float beta1, float beta2) override
    {
        optimizer_.IncrementStep(step, beta1, beta2);
    }

    std::shared_ptr<const UpdateRule> rule(float lr, float eps, float weight_decay,
                                           bool bias_correction) const override
    {
        Stock optimizer(optimizer_);
        optimizer.update_state(lr, eps, weight_decay, bias_correction);
        return std::make_shared<AdamRule>(optimizer);
    }

    std::unique_ptr<OptimizerClock> clone() const override
    {
        return std::make_unique<AdamClock>(optimizer_);
    }

  private:
    Stock optimizer_;
};

}  // namespace

std::unique_ptr<OptimizerClock> make_adam_clock(float lr, float beta1, float beta2, float eps,
                                                float weight_decay, bool adamw_mode)
{
    return std::make_unique<AdamClock>(Stock(lr, beta1, beta2, eps, weight_decay, adamw_mode));
}

}  // namespace fuyou
