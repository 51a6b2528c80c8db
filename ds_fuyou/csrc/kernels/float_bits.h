// SPDX-License-Identifier: Apache-2.0
//
// A float as its bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace fuyou {

constexpr std::uint32_t kMagnitude = 0x7fffffffU, kNan = 0x7fc00000U;

inline float from_bits(std::uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint32_t to_bits(float value)
{
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

}  // namespace fuyou
