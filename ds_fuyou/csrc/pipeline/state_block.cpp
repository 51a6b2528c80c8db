// SPDX-License-Identifier: Apache-2.0
#include "pipeline/state_block.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace fuyou {
namespace {

// An update runs over tiles that stay in the second-level cache between the passes (scale, update,
// narrow). A multiple of kKernelBlockElements, so that results equal those of one call.
constexpr std::uint64_t kTileElements = 32 * 1024;

struct Tile {
    std::uint64_t begin, end;
    const UpdateRule* rule;
};

std::vector<Tile> tiles_of(const std::vector<UpdateSegment>& segments)
{
    std::vector<Tile> tiles;
    for (const UpdateSegment& segment : segments) {
        for (std::uint64_t begin = segment.begin; begin < segment.end; begin += kTileElements) {
            tiles.push_back(
                {begin, std::min(begin + kTileElements, segment.end), segment.rule.get()});
        }
    }
    return tiles;
}

void apply_rule(const StateBlock& block, const Tile& tile, const BlockUpdate& how)
{
    thread_local std::vector<float> scratch;
    if (scratch.size() < kTileElements) scratch.resize(kTileElements);
    const std::uint64_t numel = tile.end - tile.begin;
    scale_gradient(how.gradient_type, how.gradient + tile.begin * element_bytes(how.gradient_type),
                   scratch.data(), numel, how.multiplier);
    float* moments[2] = {block.part(1) + tile.begin,
                         block.num_moments == 2 ? block.part(2) + tile.begin : nullptr};
    tile.rule->apply(block.part(0) + tile.begin, scratch.data(), moments, numel);
}

}  // namespace

void StateBlock::clear_moments() const
{
    std::memset(part(1), 0, part_bytes(numel) * static_cast<std::uint64_t>(num_moments));
}

std::uint64_t StateBlock::sum(std::uint64_t begin, std::uint64_t end) const
{
    std::uint64_t total = 0;
    for (int which = 0; which <= num_moments; ++which) {
        total +=
            bit_sum(part(which) + begin, end - begin) * static_cast<std::uint64_t>(2 * which + 1);
    }
    return total;
}

BlockSums update_block(const StateBlock& block, const std::vector<UpdateSegment>& segments,
                       const BlockUpdate& how, int num_threads)
{
    const std::vector<Tile> tiles = tiles_of(segments);
    const std::ptrdiff_t num_tiles = static_cast<std::ptrdiff_t>(tiles.size());
    std::uint64_t sum_read = 0, sum_updated = 0;
    std::exception_ptr failure;  // none may leave a parallel region
#pragma omp parallel for schedule(dynamic) reduction(+ : sum_read, sum_updated) \
    num_threads(num_threads) if (num_threads > 1 && num_tiles > 1)
    for (std::ptrdiff_t i = 0; i < num_tiles; ++i) {
        const Tile& tile = tiles[static_cast<std::size_t>(i)];
        if (how.checked) sum_read += block.sum(tile.begin, tile.end);
        if (tile.rule != nullptr) try {
                apply_rule(block, tile, how);
            } catch (...) {
#pragma omp critical(fuyou_update)
                failure = std::current_exception();
            }
        narrow_parameter(how.param_type, block.part(0) + tile.begin,
                         how.param16 + tile.begin * element_bytes(how.param_type),
                         tile.end - tile.begin);
        if (how.checked) sum_updated += block.sum(tile.begin, tile.end);
    }
    if (failure) std::rethrow_exception(failure);
    return {sum_read, sum_updated};
}

}  // namespace fuyou
