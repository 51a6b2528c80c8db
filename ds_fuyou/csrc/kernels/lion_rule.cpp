// SPDX-License-Identifier: Apache-2.0
//
// DeepSpeed's CPU Lion behind UpdateRule. The installed DeepSpeed's source is compiled into this
// translation unit, so that whichever version is installed defines the arithmetic.
#include "kernels/deepspeed_prelude.h"

#include "kernels/update_rule.h"

namespace fuyou_deepspeed_lion {
#include "cpu_lion_impl.cpp"
}  // namespace fuyou_deepspeed_lion

namespace fuyou {
namespace {

using Stock = fuyou_deepspeed_lion::Lion_Optimizer;

class LionRule final : public UpdateRule {
  public:
    explicit LionRule(const Stock& optimizer) : optimizer_(optimizer) {}

    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        Stock optimizer(optimizer_);  // Step_8 is not const; the copy is a few words
        step_here(optimizer, param, grad, moments[0], numel);
    }

  private:
    Stock optimizer_;
};

class LionClock final : public OptimizerClock {
  public:
    explicit LionClock(const Stock& optimizer) : optimizer_(optimizer) {}

    void increment(std::size_t step, float beta1, float beta2) override
    {
        optimizer_.IncrementStep(step, beta1, beta2);
    }

    std::shared_ptr<const UpdateRule> rule(float lr, float /*eps*/, float weight_decay,
                                           bool /*bias_correction*/) const override
    {
        Stock optimizer(optimizer_);
        optimizer.update_state(lr, weight_decay);
        return std::make_shared<LionRule>(optimizer);
    }

    std::unique_ptr<OptimizerClock> clone() const override
    {
        return std::make_unique<LionClock>(optimizer_);
    }

  private:
    Stock optimizer_;
};

}  // namespace

std::unique_ptr<OptimizerClock> make_lion_clock(float lr, float beta1, float beta2,
                                                float weight_decay)
{
    return std::make_unique<LionClock>(Stock(lr, beta1, beta2, weight_decay));
}

}  // namespace fuyou
