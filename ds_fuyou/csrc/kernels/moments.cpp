// SPDX-License-Identifier: Apache-2.0
#include "kernels/moments.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/code_map.h"
#include "kernels/elementwise.h"
#include "kernels/float_bits.h"

namespace fuyou {
namespace {

constexpr std::uint32_t kInfinity = 0x7f800000U;
constexpr float kLeastScale = 1e-12F;

std::uint32_t largest_magnitude(const float* values, std::size_t numel)
{
    std::uint32_t largest = 0;  // magnitudes are ordered as their bits are, NaN above all
    for (std::size_t i = 0; i < numel; ++i)
        largest = std::max(largest, to_bits(values[i]) & kMagnitude);
    return largest;
}

float scale_of(const float* values, std::size_t numel)
{
    const std::uint32_t largest = std::max(largest_magnitude(values, numel), to_bits(kLeastScale));
    return from_bits(largest > kInfinity ? kNan : largest);
}

// Whether `values` are codes under `scale`; `codes` are nearest to them in any case.
bool are_codes(const CodeMap& map, const float* values, float scale, std::uint8_t* codes,
               std::size_t numel)
{
    float found[kCodeBlock];
    map.encode(values, scale, codes, numel, best_code_path());
    map.decode(codes, scale, found, numel, best_code_path());
    return std::memcmp(found, values, numel * sizeof(float)) == 0;
}

// One block of values from outside; its scale.
float encode_exactly(const CodeMap& map, const float* values, std::uint8_t* codes,
                     std::size_t numel)
{
    const float scale = scale_of(values, numel);
    if (are_codes(map, values, scale, codes, numel)) return scale;
    // The largest number is one or, of negatives, somewhat less: the scale was larger.
    const float end = -map.numbers[0];
    if (end > 0.0F && std::isfinite(scale)) {
        const std::uint32_t near = to_bits(scale / end);
        for (std::uint32_t bits = near - 2; bits <= near + 2; ++bits)
            if (are_codes(map, values, from_bits(bits), codes, numel)) return from_bits(bits);
    }
    map.encode(values, scale, codes, numel, best_code_path());
    return scale;
}

template <class Each>  // Each(scale, the block's first element of the run, elements)
void for_blocks(const StoredMoment& run, std::size_t numel, const Each& each)
{
    CodeCuts cuts = run.cuts;
    float* scale = run.scales;
    const std::uint64_t end = cuts.begin + numel;
    for (std::uint64_t at = cuts.begin; at < end; ++scale) {
        std::uint64_t next = std::min(end, (at / kCodeBlock + 1) * kCodeBlock);
        if (cuts.next != cuts.end && *cuts.next < next) next = *cuts.next++;
        each(*scale, static_cast<std::size_t>(at - cuts.begin),
             static_cast<std::size_t>(next - at));
        at = next;
    }
}

}  // namespace

const float* code_values(bool is_signed)
{
    return CodeMap::of(is_signed).numbers.data();
}

void load_moment(const StoredMoment& from, float* to, std::size_t numel)
{
    switch (from.type) {
        case MomentType::kFloat32:
            std::memcpy(to, from.values, numel * sizeof(float));
            break;
        case MomentType::kBFloat16:
            widen_bfloat16(reinterpret_cast<const std::uint16_t*>(from.values), to, numel);
            break;
        case MomentType::kInt8: {
            const CodeMap& map = CodeMap::of(from.is_signed);
            const auto* codes = reinterpret_cast<const std::uint8_t*>(from.values);
            for_blocks(from, numel, [&](float& scale, std::size_t begin, std::size_t num) {
                if (scale == 0.0F) {
                    std::fill_n(to + begin, num, 0.0F);
                } else {
                    map.decode(codes + begin, scale, to + begin, num, best_code_path());
                }
            });
            break;
        }
    }
}

void store_moment(const float* values, const StoredMoment& to, std::size_t numel)
{
    switch (to.type) {
        case MomentType::kFloat32:
            std::memcpy(to.values, values, numel * sizeof(float));
            break;
        case MomentType::kBFloat16:
            narrow_parameter(ElementType::kBFloat16, values, to.values, numel);
            break;
        case MomentType::kInt8: {
            const CodeMap& map = CodeMap::of(to.is_signed);
            auto* codes = reinterpret_cast<std::uint8_t*>(to.values);
            for_blocks(to, numel, [&](float& scale, std::size_t begin, std::size_t num) {
                scale = scale_of(values + begin, num);
                map.encode(values + begin, scale, codes + begin, num, best_code_path());
            });
            break;
        }
    }
}

void store_moment_exactly(const float* values, const StoredMoment& to, std::size_t numel)
{
    if (to.type != MomentType::kInt8) {
        store_moment(values, to, numel);
        return;
    }
    const CodeMap& map = CodeMap::of(to.is_signed);
    auto* codes = reinterpret_cast<std::uint8_t*>(to.values);
    for_blocks(to, numel, [&](float& scale, std::size_t begin, std::size_t num) {
        scale = encode_exactly(map, values + begin, codes + begin, num);
    });
}

void copy_moment(const StoredMoment& from, const StoredMoment& to, std::size_t numel)
{
    const std::size_t bytes_each = from.type == MomentType::kFloat32    ? 4
                                   : from.type == MomentType::kBFloat16 ? 2
                                                                        : 1;
    std::memcpy(to.values, from.values, numel * bytes_each);
    float* scales = to.scales;
    if (from.type == MomentType::kInt8)
        for_blocks(from, numel, [&](float& scale, std::size_t, std::size_t) { *scales++ = scale; });
}

}  // namespace fuyou
