// SPDX-License-Identifier: Apache-2.0
//
// IEEE half precision as its bits, rounded to nearest even. _Float16 is a type of g++ 12 and later
// on x86, and of any on aarch64; g++ 11 has the instructions, through F16C, and not the type.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__F16C__) && !defined(__FLT16_MAX__)
#include <immintrin.h>
#endif

#include "kernels/float_bits.h"

namespace fuyou {

inline float half_to_float_portable(std::uint16_t half)
{
    const std::uint32_t sign = (half & 0x8000U) << 16, mantissa = half & 0x3ffU;
    const std::uint32_t exponent = (half >> 10) & 0x1fU;
    if (exponent == 0) return from_bits(sign | to_bits(static_cast<float>(mantissa) * 0x1p-24F));
    if (exponent < 31) return from_bits(sign | (exponent + 112U) << 23 | mantissa << 13);
    const std::uint32_t quiet = mantissa != 0 ? 0x400000U : 0U;
    return from_bits(sign | 0x7f800000U | mantissa << 13 | quiet);
}

inline std::uint16_t float_to_half_portable(float value)
{
    const std::uint32_t bits = to_bits(value), magnitude = bits & kMagnitude;
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    std::uint32_t half;
    if (magnitude > 0x7f800000U) {
        half = 0x7e00U | ((magnitude >> 13) & 0x1ffU);
    } else if (magnitude >= 0x477ff000U) {  // the tie above the largest one
        half = 0x7c00U;
    } else if (magnitude < 0x38800000U) {  // the sum's last bit is the smallest subnormal one
        half = to_bits(from_bits(magnitude) + 0.5F) - 0x3f000000U;
    } else {
        half = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
}

inline float half_to_float(std::uint16_t bits)
{
#if defined(__FLT16_MAX__)
    _Float16 half;
    std::memcpy(&half, &bits, sizeof half);
    return static_cast<float>(half);
#elif defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    return half_to_float_portable(bits);
#endif
}

inline std::uint16_t float_to_half(float value)
{
#if defined(__FLT16_MAX__)
    const _Float16 half = static_cast<_Float16>(value);
    std::uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
#elif defined(__F16C__)
    return static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
    return float_to_half_portable(value);
#endif
}

}  // namespace fuyou
