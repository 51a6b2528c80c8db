// SPDX-License-Identifier: Apache-2.0
// Operators of the stand-in device: the CPU's kernels, launched late on a stream.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "memory.h"

namespace standin {

using at::Tensor;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

inline bool is_ours(const Tensor& tensor)
{
    return tensor.defined() && tensor.device().type() == kDevice;
}
Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// The same values as workers reach them. As a launched kernel's arguments it keeps nothing alive.
Tensor aliased(const Tensor& tensor);

// For what the host needs at once: computed in the stream's order, also where nothing else is.
void compute_now(const char* name, const std::function<void()>& run);

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking);

// Any operator that the CPU has and that is no view (operators.cpp).
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);
bool is_view(const c10::OperatorHandle& op);

// Of random numbers: the host's, or under `own_generator` the device's.
at::Generator generator();

// Prefers those to compositions of torch's (kernels.cpp).
void register_operators();

// Whether a call that orders something is to do nothing: what a test's callback says of it.
bool left_out(const char* what);

}  // namespace standin
