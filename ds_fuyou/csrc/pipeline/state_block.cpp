// SPDX-License-Identifier: Apache-2.0
#include "pipeline/state_block.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>

#include "kernels/place_sum.h"

namespace fuyou {
namespace {

// An update runs over tiles that stay in the nearest cache between the passes (put together, sum,
// scale, update, sum, narrow or split); smaller ones would show what a call of the kernel costs. A
// multiple of kKernelBlockElements, so that results equal those of one call.
constexpr std::uint64_t kTileElements = 2048;
constexpr std::uint64_t kElementsAtOnce = 32 * kTileElements;  // that a thread takes
static_assert(kTileElements % kKernelBlockElements == 0);
static_assert(kTileElements % kCodeBlock == 0);

constexpr std::uint64_t kSecondMomentWeight = 0x9E3779B97F4A7C15;  // any odd number

using Segment = std::vector<UpdateSegment>::const_iterator;

// Elements [begin, end) as an update works on them: P32 and moments, the first element's address.
struct Tile {
    std::uint64_t begin;
    std::uint64_t end;
    int num_parts;
    float* parts[3];

    std::size_t numel() const { return static_cast<std::size_t>(end - begin); }
};

// Of a block with fp32 moments.
Tile tile_of(const StateBlock& block, float* master, std::uint64_t begin, std::uint64_t end)
{
    const int num_moments = block.layout.num_moments;
    Tile tile{begin, end, 1 + num_moments, {master, nullptr, nullptr}};
    for (int i = 0; i < num_moments; ++i) tile.parts[1 + i] = block.moment(i) + begin;
    return tile;
}

StateSums sums_of(const Tile& tile)
{
    const std::size_t num_words = tile.numel();
    StateSums sums{place_sum(tile.parts[0], num_words, tile.begin), 0};
    if (tile.num_parts > 1) sums.moments = place_sum(tile.parts[1], num_words, tile.begin);
    if (tile.num_parts > 2)
        sums.moments += place_sum(tile.parts[2], num_words, tile.begin) * kSecondMomentWeight;
    return sums;
}

void load_moments(const StateBlock& from, const Tile& to)
{
    for (int i = 1; i < to.num_parts; ++i)
        load_moment(from.moment_from(i - 1, to.begin), to.parts[i], to.numel());
}

void clear_moments(const Tile& tile)
{
    for (int i = 1; i < tile.num_parts; ++i) std::fill_n(tile.parts[i], tile.numel(), 0.0F);
}

// The segment that holds `element`.
Segment segment_at(const std::vector<UpdateSegment>& segments, std::uint64_t element)
{
    return std::upper_bound(
        segments.begin(), segments.end(), element,
        [](std::uint64_t at, const UpdateSegment& segment) { return at < segment.end; });
}

// Elements [begin, end) of the tile under one rule, in place.
void apply_rule(const Tile& tile, const UpdateRule& rule, float* gradient, std::uint64_t begin,
                std::uint64_t end)
{
    const std::uint64_t at = begin - tile.begin;
    float* moments[2] = {tile.parts[1] + at, tile.num_parts == 3 ? tile.parts[2] + at : nullptr};
    rule.apply(tile.parts[0] + at, gradient, moments, end - begin);
}

// [Note: where segments meet]
// A kernel's scalar tail rounds differently from its vector body, so a call must begin and end at
// multiples of kKernelBlockElements, or with the chunk. A kernel block that holds several segments
// is computed once under the rule of each, from its old values, and every element is taken from
// its own segment's. `first` is the segment that holds `begin`.
void apply_mixed(const Tile& tile, Segment first, Segment last, const float* gradient,
                 std::uint64_t begin, std::uint64_t end)
{
    const std::size_t numel = static_cast<std::size_t>(end - begin);
    float old[3][kKernelBlockElements], tried[3][kKernelBlockElements];
    float scratch[kKernelBlockElements];
    const int num_parts = std::min(tile.num_parts, 3);  // it is; compilers do not know
    for (int part = 0; part < num_parts; ++part)
        std::copy_n(tile.parts[part] + (begin - tile.begin), numel, old[part]);
    for (Segment segment = first; segment != last && segment->begin < end; ++segment) {
        if (segment->rule == nullptr) continue;
        std::memcpy(tried, old, sizeof tried);
        std::copy_n(gradient, numel, scratch);
        float* moments[2] = {tried[1], tile.num_parts == 3 ? tried[2] : nullptr};
        segment->rule->apply(tried[0], scratch, moments, numel);
        const std::uint64_t own_begin = std::max(begin, segment->begin);
        const std::uint64_t own_end = std::min(end, segment->end);
        if (own_begin >= own_end) continue;
        for (int part = 0; part < num_parts; ++part)
            std::copy(tried[part] + (own_begin - begin), tried[part] + (own_end - begin),
                      tile.parts[part] + (own_begin - tile.begin));
    }
}

void apply_segments(const Tile& tile, const std::vector<UpdateSegment>& segments,
                    const BlockUpdate& how)
{
    const std::uint64_t begin = tile.begin, end = tile.end, numel = how.from.layout.numel;
    Segment segment = segment_at(segments, begin);
    if (segment->rule == nullptr && segment->end >= end) return;
    thread_local std::vector<float> gradient(kTileElements);
    const char* from = how.gradient + begin * element_bytes(how.gradient_type);
    if (how.gradient_type == ElementType::kFloat32 && how.narrows_gradient) {
        thread_local std::vector<std::uint16_t> narrow(kTileElements);
        narrow_parameter(ElementType::kBFloat16, reinterpret_cast<const float*>(from),
                         narrow.data(), end - begin);
        scale_gradient(ElementType::kBFloat16, narrow.data(), gradient.data(), end - begin,
                       how.multiplier);
    } else {
        scale_gradient(how.gradient_type, from, gradient.data(), end - begin, how.multiplier);
    }
    for (std::uint64_t at = begin; at < end;) {
        while (segment->end <= at) ++segment;
        const bool is_last = segment->end == numel;
        const std::uint64_t whole =
            is_last ? segment->end : segment->end / kKernelBlockElements * kKernelBlockElements;
        std::uint64_t stop = std::min(end, whole);
        float* scaled = gradient.data() + (at - begin);
        if (stop > at) {
            if (segment->rule != nullptr) apply_rule(tile, *segment->rule, scaled, at, stop);
        } else {
            stop = std::min(end, at + kKernelBlockElements);
            apply_mixed(tile, segment, segments.end(), scaled, at, stop);
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

// P32 of a split block, from what of it is at hand.
class SplitSource {
  public:
    // `param16` may be null, and the upper halves missing.
    SplitSource(const StateBlock& block, const char* param16, bool high_is_there)
        : block_(block), param16_(reinterpret_cast<const std::uint16_t*>(param16))
    {
        const Joints* joints = block.joints();
        has_high_ = high_is_there && joints->has_high != 0;
        if (has_high_ || joints->num > Joints::kMost) return;
        joints_.assign(joints->of, joints->of + joints->num);
        std::sort(joints_.begin(), joints_.end(), is_before);
    }
    bool is_readable() const
    {
        return has_high_ || (param16_ != nullptr && block_.joints()->num <= Joints::kMost);
    }
    void read(std::uint64_t begin, std::uint64_t end, float* to) const
    {
        const std::size_t numel = static_cast<std::size_t>(end - begin);
        if (!block_.layout.has_low) {
            widen_bfloat16((has_high_ ? block_.high() : param16_) + begin, to, numel);
            return;
        }
        if (has_high_) {
            put_halves_together(block_.high() + begin, block_.low() + begin, to, numel);
            return;
        }
        join_master(param16_ + begin, block_.low() + begin, to, numel);
        const auto first = static_cast<std::uint32_t>(begin);
        auto joint = std::lower_bound(joints_.begin(), joints_.end(), Joint{first, 0}, is_before);
        for (; joint != joints_.end() && joint->element < end; ++joint)
            std::memcpy(to + (joint->element - begin), &joint->bits, sizeof joint->bits);
    }

  private:
    static bool is_before(const Joint& one, const Joint& other)
    {
        return one.element < other.element;
    }

    const StateBlock& block_;
    const std::uint16_t* param16_;
    bool has_high_ = false;
    std::vector<Joint> joints_;  // a copy, in order: an update in place writes new ones
};

// Writes a tile into a split block, and notes its joints.
void split_tile(const Tile& tile, const BlockUpdate& how, std::vector<Joint>& joints)
{
    const StateBlock& to = how.to;
    auto* param16 = reinterpret_cast<std::uint16_t*>(how.param16) + tile.begin;
    if (!to.layout.has_low) {
        upper_halves(tile.parts[0], param16, tile.numel());
        if (how.keeps_high) std::copy_n(param16, tile.numel(), to.high() + tile.begin);
        return;
    }
    std::uint16_t* low = to.low() + tile.begin;
    std::uint16_t* high = how.keeps_high ? to.high() + tile.begin : nullptr;
    if (!split_master(tile.parts[0], param16, low, high, tile.numel())) {
        for (std::size_t i = 0; i < tile.numel(); ++i) {
            float found;
            join_master(param16 + i, low + i, &found, 1);
            if (std::memcmp(&found, tile.parts[0] + i, sizeof found) == 0) continue;
            Joint joint{static_cast<std::uint32_t>(tile.begin + i), 0};
            std::memcpy(&joint.bits, tile.parts[0] + i, sizeof joint.bits);
            joints.push_back(joint);
        }
    }
}

// Whose memory an update works in, as far as its types allow.
const StateBlock& worked_on(const BlockUpdate& how)
{
    return how.to.layout.is_split && !how.from.layout.is_split ? how.from : how.to;
}

// The moments of a tile in its block: those of elements [begin, end), whole blocks of codes, as the
// tile has them, or as the block had them.
void put_moments(const Tile& tile, const BlockUpdate& how, std::uint64_t begin, std::uint64_t end,
                 bool is_touched)
{
    if (begin >= end) return;
    const std::size_t numel = static_cast<std::size_t>(end - begin);
    const StateBlock& own = worked_on(how);
    for (int i = 1; i < tile.num_parts; ++i) {
        const StoredMoment place = own.moment_from(i - 1, begin);
        float* values = tile.parts[i] + (begin - tile.begin);
        if (is_touched) {
            if (place.values != reinterpret_cast<char*>(values)) {
                store_moment(values, place, numel);
                if (how.checked && place.type != MomentType::kFloat32)
                    load_moment(place, values, numel);
            }
        } else if (own.memory != how.from.memory) {
            copy_moment(how.from.moment_from(i - 1, begin), place, numel);
        }
        if (own.memory != how.to.memory)
            copy_moment(place, how.to.moment_from(i - 1, begin), numel);
    }
}

// Puts the moments of an updated tile where they go. Where sums are made the tile has what can be
// read there then.
void close_tile(const Tile& tile, const BlockUpdate& how,
                const std::vector<UpdateSegment>& segments)
{
    std::uint64_t done = tile.begin;
    const BlockLayout& layout = how.to.layout;
    if (layout.moment_type == MomentType::kInt8 && !how.zero_moments) {
        // See [Note: codes]: what no rule has touched stays as it is.
        for (Segment segment = segment_at(segments, tile.begin);
             segment != segments.end() && segment->begin < tile.end; ++segment) {
            if (segment->rule == nullptr) continue;
            const std::uint64_t begin = std::max(done, layout.code_begin(segment->begin));
            const std::uint64_t end = std::min(tile.end, layout.code_end(segment->end));
            put_moments(tile, how, done, begin, false);
            put_moments(tile, how, begin, end, true);
            done = std::max(done, end);
        }
        put_moments(tile, how, done, tile.end, false);
    } else {
        put_moments(tile, how, done, tile.end, true);
    }
}

// Lists the joints of a block that was split; where there are too many, its upper halves are kept.
BlockForm list_joints(const BlockUpdate& how, const std::vector<Joint>& joints)
{
    const StateBlock& to = how.to;
    const bool fits = joints.size() <= Joints::kMost;
    if (!fits && !how.keeps_high) {
        const auto* param16 = reinterpret_cast<const std::uint16_t*>(how.param16);
        std::uint16_t* high = to.high();
        for (std::uint64_t i = 0; i < to.layout.numel; ++i)
            high[i] = static_cast<std::uint16_t>(param16[i] - (to.low()[i] > 0x8000U ? 1U : 0U));
        for (const Joint& joint : joints)
            high[joint.element] = static_cast<std::uint16_t>(joint.bits >> 16);
    }
    const BlockForm form{how.keeps_high || !fits, fits};
    Joints* page = to.joints();
    std::memset(page, 0, sizeof *page);
    page->num = fits ? static_cast<std::uint32_t>(joints.size()) : Joints::kTooMany;
    page->has_high = form.has_high ? 1 : 0;
    if (fits) std::copy(joints.begin(), joints.end(), page->of);
    return form;
}

// The elements [begin, end) of the old state, where an update works on them.
Tile open_tile(const BlockUpdate& how, const SplitSource* split, std::uint64_t begin,
               std::uint64_t end)
{
    thread_local std::vector<float> scratch(3 * kTileElements);
    const StateBlock& own = worked_on(how);
    const bool is_split = own.layout.is_split;
    Tile tile{begin, end, 1 + own.layout.num_moments, {}};
    tile.parts[0] = is_split ? scratch.data() : own.master() + begin;
    if (split != nullptr) {
        split->read(begin, end, tile.parts[0]);
    } else if (own.memory != how.from.memory) {
        std::copy_n(how.from.master() + begin, tile.numel(), tile.parts[0]);
    }
    const bool is_float = own.layout.moment_type == MomentType::kFloat32;
    for (int i = 1; i < tile.num_parts; ++i)
        tile.parts[i] = is_float ? own.moment(i - 1) + begin
                                 : scratch.data() + static_cast<std::size_t>(i) * kTileElements;
    if (how.zero_moments) {
        clear_moments(tile);
    } else if (!is_float || how.from.memory != own.memory) {
        load_moments(how.from, tile);
    }
    return tile;
}

struct TileResult {
    BlockSums sums;
    std::vector<Joint> joints;
};

void update_tile(const Tile& tile, const BlockUpdate& how,
                 const std::vector<UpdateSegment>& segments, TileResult& result)
{
    if (how.checked) result.sums.read += sums_of(tile);
    if (how.kept.memory != nullptr) {
        std::copy_n(tile.parts[0], tile.numel(), how.kept.master() + tile.begin);
        for (int i = 1; i < tile.num_parts; ++i)
            std::copy_n(tile.parts[i], tile.numel(), how.kept.moment(i - 1) + tile.begin);
    }
    apply_segments(tile, segments, how);
    close_tile(tile, how, segments);
    if (how.checked) result.sums.updated += sums_of(tile);
    if (how.to.layout.is_split) {
        split_tile(tile, how, result.joints);
    } else {
        narrow_parameter(how.param_type, tile.parts[0],
                         how.param16 + tile.begin * element_bytes(how.param_type), tile.numel());
    }
}

}  // namespace

StoredMoment StateBlock::moment_from(int which, std::uint64_t element) const
{
    const std::size_t number = static_cast<std::size_t>(which);
    char* const begin = memory + layout.moments[number];
    switch (layout.moment_type) {
        case MomentType::kBFloat16:
            return {layout.moment_type, false, begin + element * 2, nullptr, {}};
        case MomentType::kInt8: {
            CodeCuts cuts;
            std::uint64_t block = element / kCodeBlock;
            if (layout.cuts) {
                const std::uint64_t* first = layout.cuts->data();
                cuts.end = first + layout.cuts->size();
                cuts.next = std::upper_bound(first, cuts.end, element);
                block += static_cast<std::uint64_t>(cuts.next - first);
            }
            cuts.begin = element;
            return {layout.moment_type, which == 0, begin + element,
                    at<float>(layout.scales[number]) + block, cuts};
        }
        default:
            return {layout.moment_type, false, begin + element * 4, nullptr, {}};
    }
}

std::uint64_t BlockLayout::code_begin(std::uint64_t element) const
{
    const std::uint64_t begin = element / kCodeBlock * kCodeBlock;
    if (!cuts) return begin;
    const auto behind = std::upper_bound(cuts->begin(), cuts->end(), element);
    return behind == cuts->begin() ? begin : std::max(begin, *std::prev(behind));
}

std::uint64_t BlockLayout::code_end(std::uint64_t element) const
{
    const std::uint64_t end = (element + kCodeBlock - 1) / kCodeBlock * kCodeBlock;
    if (!cuts) return end;
    const auto next = std::lower_bound(cuts->begin(), cuts->end(), element);
    return next == cuts->end() ? end : std::min(end, *next);
}

StateSums StateBlock::sums(std::uint64_t begin, std::uint64_t end) const
{
    return sums_of(tile_of(*this, master() + begin, begin, end));
}

BlockSums update_block(const BlockUpdate& how, const std::vector<UpdateSegment>& segments,
                       UpdateTeam* team)
{
    const std::uint64_t numel = how.from.layout.numel;
    check_segments(segments, numel);
    std::unique_ptr<const SplitSource> split;
    if (how.from.layout.is_split) {
        split = std::make_unique<SplitSource>(how.from, how.old_param16, how.high_was_read);
        if (!split->is_readable()) return {false, {}, {}, {}};
    }
    TileResult whole;
    std::exception_ptr failure;
    std::mutex mutex;  // of both
    std::atomic<std::uint64_t> next{0};
    const auto take_part = [&] {
        try {
            TileResult own;
            while (true) {
                const std::uint64_t first = next.fetch_add(kElementsAtOnce);
                if (first >= numel) break;
                const std::uint64_t last = std::min(first + kElementsAtOnce, numel);
                for (std::uint64_t begin = first; begin < last; begin += kTileElements) {
                    const std::uint64_t end = std::min(begin + kTileElements, last);
                    update_tile(open_tile(how, split.get(), begin, end), how, segments, own);
                }
            }
            std::lock_guard<std::mutex> lock(mutex);
            whole.sums.read += own.sums.read;
            whole.sums.updated += own.sums.updated;
            whole.joints.insert(whole.joints.end(), own.joints.begin(), own.joints.end());
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex);
            failure = std::current_exception();
        }
    };
    if (team != nullptr && numel > kElementsAtOnce) {
        team->run(take_part);
    } else {
        take_part();
    }
    if (failure) std::rethrow_exception(failure);
    if (how.to.layout.is_split) whole.sums.form = list_joints(how, whole.joints);
    return whole.sums;
}

bool decode_block(const StateBlock& from, const char* param16, const StateBlock& to)
{
    const std::uint64_t numel = from.layout.numel;
    if (from.layout.is_split) {
        const SplitSource split(from, param16, true);
        if (!split.is_readable()) return false;
        split.read(0, numel, to.master());
    } else {
        std::copy_n(from.master(), numel, to.master());
    }
    load_moments(from, tile_of(to, to.master(), 0, numel));
    return true;
}

void encode_block(const StateBlock& from, const StateBlock& to)
{
    const std::uint64_t numel = from.layout.numel;
    for (int i = 0; i < to.layout.num_moments; ++i)
        store_moment_exactly(from.moment(i), to.moment_from(i, 0), static_cast<std::size_t>(numel));
    if (!to.layout.is_split) {
        std::copy_n(from.master(), numel, to.master());
        return;
    }
    if (!to.layout.has_low) upper_halves(from.master(), to.high(), numel);
    for (std::uint64_t i = 0; i < numel && to.layout.has_low; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, from.master() + i, sizeof bits);
        to.low()[i] = static_cast<std::uint16_t>(bits);
        to.high()[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    to.joints()->num = Joints::kTooMany;
    to.joints()->has_high = 1;
}

}  // namespace fuyou
