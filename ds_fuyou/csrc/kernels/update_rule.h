// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of one optimizer update, as the pipeline sees it. The implementations call
// DeepSpeed's own CPU kernels, so results are DeepSpeed's to the bit; this header needs neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fuyou {

// Results depend on where a run of elements is cut: the kernels' scalar tail rounds differently
// from their vector body. Cuts at multiples of this many elements, counted from the start of a
// stock sub-group, are invisible (the widest body handles 16 lanes x 8 vectors).
constexpr std::uint64_t kKernelBlockElements = 128;

// A frozen set of hyperparameters, bias corrections included. Immutable and shared between threads.
class UpdateRule {
  public:
    virtual ~UpdateRule() = default;
    // In-place update of `numel` elements; `grad` is fp32, already unscaled and clipped. Moments: 2
    // for Adam, 1 for Lion and Adagrad. A rule of bfloat16 states takes bfloat16 values, gives
    // such, and rounds the gradient.
    virtual void apply(float* param, float* grad, float* const* moments,
                       std::size_t numel) const = 0;
};

// The hidden, history-dependent part of a stock optimizer object: DeepSpeed keeps one for a whole
// optimizer, and its running products of the betas depend on the order of calls.
class OptimizerClock {
  public:
    virtual ~OptimizerClock() = default;
    // The call the stock optimizer makes for one sub-group: advances to `step`.
    virtual void increment(std::size_t step, float beta1, float beta2) = 0;
    // These calls for `num_steps` steps from `first` on, of sub-groups with these betas.
    void advance(std::size_t first, std::size_t num_steps,
                 const std::vector<std::pair<float, float>>& betas)
    {
        for (std::size_t step = first; step < first + num_steps; ++step)
            for (const auto& [beta1, beta2] : betas) increment(step, beta1, beta2);
    }
    virtual std::shared_ptr<const UpdateRule> rule(float lr, float eps, float weight_decay,
                                                   bool bias_correction) const = 0;
    virtual std::unique_ptr<OptimizerClock> clone() const = 0;
};

// What of a state stock's kernel is given in bfloat16; the gradient is of the parameter's type.
enum class NarrowStates { kNone = 0, kParam = 1, kParamAndMoments = 2 };

std::unique_ptr<OptimizerClock> make_adam_clock(float lr, float beta1, float beta2, float eps,
                                                float weight_decay, bool adamw_mode,
                                                NarrowStates narrow);
std::unique_ptr<OptimizerClock> make_lion_clock(float lr, float beta1, float beta2,
                                                float weight_decay);
std::unique_ptr<OptimizerClock> make_adagrad_clock(float lr, float eps, float weight_decay);

}  // namespace fuyou
