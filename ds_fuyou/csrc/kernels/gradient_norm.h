// SPDX-License-Identifier: Apache-2.0
//
// The sum of squares under a gradient's norm, added up in the order in which PyTorch does it.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/elementwise.h"

namespace fuyou {

// A run of elements; several of them, in order, are one gradient.
struct ValueRun {
    const void* values;
    std::size_t numel;
};

// What torch's CPU kernel gives for values.to(float64).norm(2) before the root, without the copy in
// fp64. Element i is squared (exactly: squares of our types fit fp64) and added to lane i %
// num_lanes, in order; then the lanes are added, from the first to the last, then the elements
// beyond the last whole vector, one by one. `num_lanes` is the width of torch's vector of fp64: 2,
// 4 or 8. Not finite if an element is not, or if the sum overflows.
double sum_of_squares(ElementType type, const std::vector<ValueRun>& runs, int num_lanes);

}  // namespace fuyou
