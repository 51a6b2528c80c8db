// SPDX-License-Identifier: Apache-2.0
//
// DeepSpeed's CPU Adam behind UpdateRule. The installed DeepSpeed's source is compiled into this
// translation unit, so that whichever version is installed defines the arithmetic and the clock.
#include "kernels/deepspeed_prelude.h"

#include <array>

#include "kernels/elementwise.h"
#include "kernels/update_rule.h"

namespace fuyou_deepspeed_adam {
#include "cpu_adam_impl.cpp"
}  // namespace fuyou_deepspeed_adam

namespace fuyou {
namespace {

using Stock = fuyou_deepspeed_adam::Adam_Optimizer;

// What stays in the nearest cache while it is narrowed, updated and widened.
constexpr std::size_t kNarrowElements = 2048;
static_assert(kNarrowElements % kKernelBlockElements == 0);

// A bfloat16 copy of a run, for a kernel that takes and gives such.
struct NarrowRun {
    alignas(64) std::array<c10::BFloat16, kNarrowElements> values;

    c10::BFloat16* take(const float* from, std::size_t numel)
    {
        upper_halves(from, reinterpret_cast<std::uint16_t*>(values.data()), numel);
        return values.data();
    }
    void give(float* to, std::size_t numel) const
    {
        widen_bfloat16(reinterpret_cast<const std::uint16_t*>(values.data()), to, numel);
    }
};

class AdamRule final : public UpdateRule {
  public:
    AdamRule(const Stock& optimizer, NarrowStates narrow) : optimizer_(optimizer), narrow_(narrow)
    {
    }

    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        Stock optimizer(optimizer_);  // Step_8 is not const; the copy is a few words
        if (narrow_ == NarrowStates::kNone) {
            step_here(optimizer, param, grad, moments[0], moments[1], numel);
            return;
        }
        for (std::size_t at = 0; at < numel; at += kNarrowElements)
            apply_narrow(optimizer, param + at, grad + at, moments[0] + at, moments[1] + at,
                         std::min(kNarrowElements, numel - at));
    }

  private:
    void apply_narrow(Stock& optimizer, float* param, const float* grad, float* first,
                      float* second, std::size_t numel) const
    {
        NarrowRun params, gradients, firsts, seconds;
        auto* narrow_param = params.take(param, numel);
        auto* narrow_grad = gradients.take(grad, numel);
        if (narrow_ == NarrowStates::kParam) {
            step_here(optimizer, narrow_param, narrow_grad, first, second, numel);
        } else {
            auto* narrow_first = firsts.take(first, numel);
            auto* narrow_second = seconds.take(second, numel);
            step_here(optimizer, narrow_param, narrow_grad, narrow_first, narrow_second, numel);
            firsts.give(first, numel);
            seconds.give(second, numel);
        }
        params.give(param, numel);
    }

    Stock optimizer_;
    NarrowStates narrow_;
};

class AdamClock final : public OptimizerClock {
  public:
    AdamClock(const Stock& optimizer, NarrowStates narrow) : optimizer_(optimizer), narrow_(narrow)
    {
    }

    void increment(std::size_t step, float beta1, float beta2) override
    {
        optimizer_.IncrementStep(step, beta1, beta2);
    }

    std::shared_ptr<const UpdateRule> rule(float lr, float eps, float weight_decay,
                                           bool bias_correction) const override
    {
        Stock optimizer(optimizer_);
        optimizer.update_state(lr, eps, weight_decay, bias_correction);
        return std::make_shared<AdamRule>(optimizer, narrow_);
    }

    std::unique_ptr<OptimizerClock> clone() const override
    {
        return std::make_unique<AdamClock>(optimizer_, narrow_);
    }

  private:
    Stock optimizer_;
    NarrowStates narrow_;
};

}  // namespace

std::unique_ptr<OptimizerClock> make_adam_clock(float lr, float beta1, float beta2, float eps,
                                                float weight_decay, bool adamw_mode,
                                                NarrowStates narrow)
{
    return std::make_unique<AdamClock>(Stock(lr, beta1, beta2, eps, weight_decay, adamw_mode),
                                       narrow);
}

}  // namespace fuyou
