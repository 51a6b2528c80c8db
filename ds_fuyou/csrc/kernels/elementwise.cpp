// SPDX-License-Identifier: Apache-2.0
#include "kernels/elementwise.h"

#include <algorithm>
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

template <class Load>
double sum_run(const Load& load, std::size_t begin, std::size_t end)
{
    constexpr std::size_t kLanes = 16;
    double lanes[kLanes] = {};
    std::size_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const double value = load(i + lane);
            lanes[lane] += value * value;
        }
    }
    double sum = 0.0;
    for (; i < end; ++i) {
        const double value = load(i);
        sum += value * value;
    }
    for (double lane : lanes) sum += lane;
    return sum;
}

template <class Load>
double sum_parallel(const Load& load, std::size_t numel, int num_threads)
{
    constexpr std::size_t kRun = 64 * 1024;
    const std::ptrdiff_t num_runs = static_cast<std::ptrdiff_t>((numel + kRun - 1) / kRun);
    double sum = 0.0;
#pragma omp parallel for num_threads(num_threads) \
    reduction(+ : sum) if (num_threads > 1 && num_runs > 1)
    for (std::ptrdiff_t run = 0; run < num_runs; ++run) {
        const std::size_t begin = static_cast<std::size_t>(run) * kRun;
        sum += sum_run(load, begin, std::min(begin + kRun, numel));
    }
    return sum;
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

double sum_of_squares(ElementType type, const void* src, std::size_t numel, int num_threads)
{
    if (type == ElementType::kFloat32) {
        const float* values = static_cast<const float*>(src);
        return sum_parallel([values](std::size_t i) { return static_cast<double>(values[i]); },
                            numel, num_threads);
    }
    const std::uint16_t* values = static_cast<const std::uint16_t*>(src);
    if (type == ElementType::kFloat16) {
        return sum_parallel(
            [values](std::size_t i) { return static_cast<double>(Float16::load(values[i])); },
            numel, num_threads);
    }
    return sum_parallel(
        [values](std::size_t i) { return static_cast<double>(BFloat16::load(values[i])); }, numel,
        num_threads);
}

}  // namespace fuyou
