// SPDX-License-Identifier: Apache-2.0
#include "kernels/gradient_norm.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels/float16.h"

namespace fuyou {
namespace {

struct Float32 {
    using Stored = float;
    static double load(float value) { return value; }
    template <std::size_t kLanes>
    static void load_lanes(const float* from, double* to)
    {
        for (std::size_t lane = 0; lane < kLanes; ++lane) to[lane] = from[lane];
    }
};

struct Float16 {
    using Stored = std::uint16_t;
    static double load(std::uint16_t bits) { return static_cast<double>(half_to_float(bits)); }
    template <std::size_t kLanes>
    static void load_lanes(const std::uint16_t* from, double* to)
    {
#if defined(__F16C__)
        if constexpr (kLanes % 4 == 0) {  // one by one the compiler converts them ten times slower
            for (std::size_t lane = 0; lane < kLanes; lane += 4) {
                float wide[4];
                _mm_storeu_ps(
                    wide,
                    _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + lane))));
                for (std::size_t i = 0; i < 4; ++i) to[lane + i] = wide[i];
            }
            return;
        }
#endif
        for (std::size_t lane = 0; lane < kLanes; ++lane) to[lane] = load(from[lane]);
    }
};

struct BFloat16 {
    using Stored = std::uint16_t;
    static double load(std::uint16_t bits)
    {
        const std::uint32_t wide = std::uint32_t{bits} << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
    template <std::size_t kLanes>
    static void load_lanes(const std::uint16_t* from, double* to)
    {
        for (std::size_t lane = 0; lane < kLanes; ++lane) to[lane] = load(from[lane]);
    }
};

template <class Format, std::size_t kLanes>
double sum_in_lanes(const std::vector<ValueRun>& runs)
{
    std::size_t total = 0;
    for (const ValueRun& run : runs) total += run.numel;
    const std::size_t num_in_vectors = total - total % kLanes;
    std::array<double, kLanes> lanes{};
    std::array<double, kLanes> rest{};
    std::size_t num_rest = 0;
    std::size_t at = 0;  // place in the gradient
    const auto add_one = [&](double value) {
        if (at < num_in_vectors) {
            lanes[at % kLanes] += value * value;
        } else {
            rest[num_rest++] = value * value;
        }
        ++at;
    };
    for (const ValueRun& run : runs) {
        const auto* values = static_cast<const typename Format::Stored*>(run.values);
        std::size_t i = 0;
        while (i < run.numel && at % kLanes != 0) add_one(Format::load(values[i++]));
        std::array<double, kLanes> sums = lanes;
        const std::size_t whole = i + (run.numel - i) / kLanes * kLanes;
        at += whole - i;
        for (; i < whole; i += kLanes) {
            double wide[kLanes];
            Format::template load_lanes<kLanes>(values + i, wide);
            for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += wide[lane] * wide[lane];
        }
        lanes = sums;
        while (i < run.numel) add_one(Format::load(values[i++]));
    }
    double sum = lanes[0];
    for (std::size_t lane = 1; lane < kLanes; ++lane) sum += lanes[lane];
    for (std::size_t i = 0; i < num_rest; ++i) sum += rest[i];
    return sum;
}

template <class Format>
double sum_with_width(const std::vector<ValueRun>& runs, int num_lanes)
{
    switch (num_lanes) {
        case 2:
            return sum_in_lanes<Format, 2>(runs);
        case 4:
            return sum_in_lanes<Format, 4>(runs);
        case 8:
            return sum_in_lanes<Format, 8>(runs);
        default:
            throw std::invalid_argument("num_lanes must be 2, 4 or 8, got " +
                                        std::to_string(num_lanes));
    }
}

}  // namespace

double sum_of_squares(ElementType type, const std::vector<ValueRun>& runs, int num_lanes)
{
    switch (type) {
        case ElementType::kFloat32:
            return sum_with_width<Float32>(runs, num_lanes);
        case ElementType::kFloat16:
            return sum_with_width<Float16>(runs, num_lanes);
        case ElementType::kBFloat16:
            return sum_with_width<BFloat16>(runs, num_lanes);
    }
    throw std::invalid_argument("unknown element type");
}

}  // namespace fuyou
