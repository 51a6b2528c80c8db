// SPDX-License-Identifier: Apache-2.0
//
// The conversions around an update. Each rounds exactly as the torch operator it stands for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuyou {

enum class ElementType { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr std::size_t element_bytes(ElementType type)
{
    return type == ElementType::kFloat32 ? 4 : 2;
}

// dst = float(src) * multiplier, the product rounded once (torch: grad.float().mul_(multiplier)).
void scale_gradient(ElementType type, const void* src, float* dst, std::size_t numel,
                    float multiplier);

// dst = src in `type`, round to nearest even (torch: param16.copy_(param32)).
void narrow_parameter(ElementType type, const float* src, void* dst, std::size_t numel);

// dst = src, which is bfloat16.
void widen_bfloat16(const std::uint16_t* src, float* dst, std::size_t numel);

// dst = src in bfloat16, rounded as above; of what is bfloat16 the very bits, NaN too.
void upper_halves(const float* src, std::uint16_t* dst, std::size_t numel);

// Bfloat16 P16 of fp32 `src`, its lower halves and, if `high` is not null, its upper ones. Whether
// join_master() gives the same bits back of every one.
bool split_master(const float* src, std::uint16_t* param16, std::uint16_t* low, std::uint16_t* high,
                  std::size_t numel);
void join_master(const std::uint16_t* param16, const std::uint16_t* low, float* dst,
                 std::size_t numel);
void put_halves_together(const std::uint16_t* high, const std::uint16_t* low, float* dst,
                         std::size_t numel);

}  // namespace fuyou
