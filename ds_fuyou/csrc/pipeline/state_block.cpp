// SPDX-License-Identifier: Apache-2.0
#include "pipeline/state_block.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "kernels/place_sum.h"

namespace fuyou {
namespace {

// An update runs over tiles that stay in the cache between the passes (sum, scale, update, narrow,
// sum). A multiple of kKernelBlockElements, so that results equal those of one call.
constexpr std::uint64_t kTileElements = 16 * 1024;
static_assert(kTileElements % kKernelBlockElements == 0);

constexpr std::uint64_t kSecondMomentWeight = 0x9E3779B97F4A7C15;  // any odd number

using Segment = std::vector<UpdateSegment>::const_iterator;

// Elements [begin, end) of the block under one rule, in place.
void apply_rule(const StateBlock& block, const UpdateRule& rule, float* gradient,
                std::uint64_t begin, std::uint64_t end)
{
    float* moments[2] = {block.part(1) + begin,
                         block.num_moments == 2 ? block.part(2) + begin : nullptr};
    rule.apply(block.part(0) + begin, gradient, moments, end - begin);
}

// [Note: where segments meet]
// A kernel's scalar tail rounds differently from its vector body, so a call must begin and end at
// multiples of kKernelBlockElements, or with the chunk. A kernel block that holds several segments
// is computed once under the rule of each, from its old values, and every element is taken from
// its own segment's. `first` is the segment that holds `begin`.
void apply_mixed(const StateBlock& block, Segment first, Segment last, const float* gradient,
                 std::uint64_t begin, std::uint64_t end)
{
    const std::size_t numel = static_cast<std::size_t>(end - begin);
    float old[3][kKernelBlockElements], tried[3][kKernelBlockElements];
    float scratch[kKernelBlockElements];
    for (int part = 0; part <= block.num_moments; ++part)
        std::copy_n(block.part(part) + begin, numel, old[part]);
    for (Segment segment = first; segment != last && segment->begin < end; ++segment) {
        if (segment->rule == nullptr) continue;
        std::memcpy(tried, old, sizeof tried);
        std::copy_n(gradient, numel, scratch);
        float* moments[2] = {tried[1], block.num_moments == 2 ? tried[2] : nullptr};
        segment->rule->apply(tried[0], scratch, moments, numel);
        const std::uint64_t own_begin = std::max(begin, segment->begin);
        const std::uint64_t own_end = std::min(end, segment->end);
        if (own_begin >= own_end) continue;
        for (int part = 0; part <= block.num_moments; ++part)
            std::copy(tried[part] + (own_begin - begin), tried[part] + (own_end - begin),
                      block.part(part) + own_begin);
    }
}

void apply_segments(const StateBlock& block, const std::vector<UpdateSegment>& segments,
                    const BlockUpdate& how, std::uint64_t begin, std::uint64_t end)
{
    Segment segment = std::upper_bound(
        segments.begin(), segments.end(), begin,
        [](std::uint64_t at, const UpdateSegment& candidate) { return at < candidate.end; });
    if (segment->rule == nullptr && segment->end >= end) return;
    thread_local std::vector<float> gradient(kTileElements);
    scale_gradient(how.gradient_type, how.gradient + begin * element_bytes(how.gradient_type),
                   gradient.data(), end - begin, how.multiplier);
    for (std::uint64_t at = begin; at < end;) {
        while (segment->end <= at) ++segment;
        const bool is_last = segment->end == block.numel;
        const std::uint64_t whole =
            is_last ? segment->end : segment->end / kKernelBlockElements * kKernelBlockElements;
        std::uint64_t stop = std::min(end, whole);
        float* scaled = gradient.data() + (at - begin);
        if (stop > at) {
            if (segment->rule != nullptr) apply_rule(block, *segment->rule, scaled, at, stop);
        } else {
            stop = std::min(end, at + kKernelBlockElements);
            apply_mixed(block, segment, segments.end(), scaled, at, stop);
        }
        at = stop;
    }
}

void check_segments(const std::vector<UpdateSegment>& segments, std::uint64_t numel)
{
    std::uint64_t at = 0;
    for (const UpdateSegment& segment : segments) {
        if (segment.begin != at || segment.end < segment.begin) break;
        at = segment.end;
    }
    if (at != numel || numel == 0)
        throw std::invalid_argument("the segments of an update must cover its " +
                                    std::to_string(numel) + " elements in order; they end at " +
                                    std::to_string(at));
}

}  // namespace

void StateBlock::clear_moments() const
{
    std::memset(part(1), 0, part_bytes(numel) * static_cast<std::uint64_t>(num_moments));
}

StateSums StateBlock::sums(std::uint64_t begin, std::uint64_t end) const
{
    const std::size_t num_words = static_cast<std::size_t>(end - begin);
    StateSums sums{place_sum(part(0) + begin, num_words, begin), 0};
    if (num_moments > 0) sums.moments = place_sum(part(1) + begin, num_words, begin);
    if (num_moments > 1)
        sums.moments += place_sum(part(2) + begin, num_words, begin) * kSecondMomentWeight;
    return sums;
}

BlockSums update_block(const StateBlock& block, const std::vector<UpdateSegment>& segments,
                       const BlockUpdate& how, int num_threads)
{
    check_segments(segments, block.numel);
    const auto num_tiles =
        static_cast<std::ptrdiff_t>((block.numel + kTileElements - 1) / kTileElements);
    BlockSums sums;
    std::exception_ptr failure;  // none may leave a parallel region
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && num_tiles > 1)
    {
        BlockSums own;
#pragma omp for schedule(dynamic, 4) nowait
        for (std::ptrdiff_t i = 0; i < num_tiles; ++i) {
            const std::uint64_t begin = static_cast<std::uint64_t>(i) * kTileElements;
            const std::uint64_t end = std::min(begin + kTileElements, block.numel);
            if (how.checked) own.read += block.sums(begin, end);
            try {
                apply_segments(block, segments, how, begin, end);
            } catch (...) {
#pragma omp critical(fuyou_update)
                failure = std::current_exception();
            }
            narrow_parameter(how.param_type, block.part(0) + begin,
                             how.param16 + begin * element_bytes(how.param_type), end - begin);
            if (how.checked) own.updated += block.sums(begin, end);
        }
#pragma omp critical(fuyou_update)
        {
            sums.read += own.read;
            sums.updated += own.updated;
        }
    }
    if (failure) std::rethrow_exception(failure);
    return sums;
}

}  // namespace fuyou
