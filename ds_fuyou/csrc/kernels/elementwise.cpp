// SPDX-License-Identifier: Apache-2.0
#include "kernels/elementwise.h"

#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace fuyou {
namespace {

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

struct BFloat16 {
    static float load(std::uint16_t bits) { return from_bits(std::uint32_t{bits} << 16); }
    static std::uint16_t store(float value)
    {
        const std::uint32_t bits = to_bits(value);
        const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
        const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
        return static_cast<std::uint16_t>(is_nan ? 0x7fc0U : rounded);
    }
};

struct Float16 {
    static float load(std::uint16_t bits)
    {
        _Float16 half;
        std::memcpy(&half, &bits, sizeof half);
        return static_cast<float>(half);
    }
    static std::uint16_t store(float value)
    {
        const _Float16 half = static_cast<_Float16>(value);
        std::uint16_t bits;
        std::memcpy(&bits, &half, sizeof bits);
        return bits;
    }
};

template <class Format>
void scale16(const std::uint16_t* src, float* dst, std::size_t numel, float multiplier)
{
    for (std::size_t i = 0; i < numel; ++i) dst[i] = Format::load(src[i]) * multiplier;
}

template <class Format>
void narrow16(const float* src, std::uint16_t* dst, std::size_t numel)
{
    for (std::size_t i = 0; i < numel; ++i) dst[i] = Format::store(src[i]);
}

}  // namespace

void scale_gradient(ElementType type, const void* src, float* dst, std::size_t numel,
                    float multiplier)
{
    switch (type) {
        case ElementType::kFloat32: {
            const float* values = static_cast<const float*>(src);
            for (std::size_t i = 0; i < numel; ++i) dst[i] = values[i] * multiplier;
            break;
        }
        case ElementType::kFloat16:
            scale16<Float16>(static_cast<const std::uint16_t*>(src), dst, numel, multiplier);
            break;
        case ElementType::kBFloat16:
            scale16<BFloat16>(static_cast<const std::uint16_t*>(src), dst, numel, multiplier);
            break;
    }
}

void narrow_parameter(ElementType type, const float* src, void* dst, std::size_t numel)
{
    switch (type) {
        case ElementType::kFloat32:
            std::memcpy(dst, src, numel * sizeof(float));
            break;
        case ElementType::kFloat16:
            narrow16<Float16>(src, static_cast<std::uint16_t*>(dst), numel);
            break;
        case ElementType::kBFloat16:
            narrow16<BFloat16>(src, static_cast<std::uint16_t*>(dst), numel);
            break;
    }
}

}  // namespace fuyou
