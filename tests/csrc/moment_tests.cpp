// SPDX-License-Identifier: Apache-2.0
//
// Moments of 16 and 8 bits: every value and code, edge values, short blocks, updates of blocks in
// every layout against one of fp32 whose moments are rounded behind it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "harness.h"
#include "pipeline_fixture.h"
#include "teams.h"

using namespace fixture;

namespace {

constexpr MomentType kTypes[] = {MomentType::kFloat32, MomentType::kBFloat16, MomentType::kInt8};

// As published: the last number that is not above, or the next one if that is not farther.
std::uint8_t published_code(float quotient, const float* numbers)
{
    int code = 0;
    while (code < 255 && quotient >= numbers[code + 1]) ++code;
    const int next = std::min(code + 1, 255);
    const bool is_next = quotient - numbers[code] >= (numbers[next] - numbers[code]) * 0.5F;
    return static_cast<std::uint8_t>(is_next ? next : code);
}

// Codes of values in memory of its own.
struct Codes {
    Codes(std::vector<float> values, bool is_signed)
        : given(std::move(values)),
          codes(given.size()),
          scales((given.size() + kCodeBlock - 1) / kCodeBlock)
    {
        place = {MomentType::kInt8, is_signed, reinterpret_cast<char*>(codes.data()),
                 scales.data()};
    }
    std::vector<float> loaded() const
    {
        std::vector<float> found(given.size());
        load_moment(place, found.data(), found.size());
        return found;
    }

    std::vector<float> given;
    std::vector<std::uint8_t> codes;
    std::vector<float> scales;
    StoredMoment place;
};

bool same_bits(const std::vector<float>& one, const std::vector<float>& other)
{
    return one.size() == other.size() &&
           std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
}

}  // namespace

TEST(moments_are_coded_as_published_whatever_the_quotient)
{
    for (const bool is_signed : {true, false}) {
        const float* numbers = code_values(is_signed);
        CHECK(std::is_sorted(numbers, numbers + 256));
        std::vector<float> values;
        const auto add = [&](float value) {
            if (!(std::fabs(value) <= 1.0F)) return;                      // nor NaN
            if (values.size() % kCodeBlock == 0) values.push_back(1.0F);  // the scale
            values.push_back(value);
        };
        for (int i = 0; i < 256; ++i) {
            const float middle = i < 255 ? (numbers[i] + numbers[i + 1]) / 2 : 1.0F;
            for (const float edge : {numbers[i], middle})
                for (std::uint32_t bits = bits_of(edge) - 4; bits != bits_of(edge) + 5; ++bits)
                    add(value_of(bits));
        }
        for (std::uint32_t high = 0; high < 0x3f80; ++high)
            for (const std::uint32_t low : {0U, 1U, 0x7fffU, 0x8000U, 0xffffU})
                for (const std::uint32_t sign : {0U, 1U})
                    add(value_of(sign << 31 | high << 16 | low));
        std::mt19937 random(5);
        for (int i = 0; i < 300000; ++i)
            add(value_of((random() & 0x80000000U) | (0x33000000U + random() % 0x0c800000U)));
        Codes made(values, is_signed);
        store_moment(made.given.data(), made.place, made.given.size());
        const std::vector<float> loaded = made.loaded();
        std::size_t num_wrong = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
            num_wrong += made.codes[i] != published_code(values[i], numbers);
            num_wrong += bits_of(loaded[i]) != bits_of(numbers[made.codes[i]]);
        }
        CHECK(num_wrong == 0);
    }
}

TEST(moments_of_every_kind_are_stored_as_they_are_loaded)
{
    const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
    const float kinds[] = {0.0F, -0.0F,  1e-45F, 1e-38F, -1e-12F, 9e-13F,
                           1.0F, -0.25F, 3e38F,  inf,    -inf,    nan};
    for (const MomentType type : kTypes) {
        for (const bool is_signed : {true, false}) {
            for (const float one : kinds) {
                for (const float other : kinds) {
                    std::vector<float> values(kCodeBlock + 44, 0.0F);
                    values[3] = values[kCodeBlock + 43] = one;
                    values[100] = other;
                    std::vector<char> memory(values.size() * 4);
                    float scales[2] = {-1.0F, -1.0F};
                    const StoredMoment place{type, is_signed, memory.data(), scales};
                    std::vector<float> loaded(values.size());
                    store_moment(values.data(), place, values.size());
                    load_moment(place, loaded.data(), loaded.size());
                    if (type != MomentType::kInt8) {
                        std::vector<char> again(memory.size());
                        store_moment(loaded.data(), {type, is_signed, again.data()}, loaded.size());
                        CHECK(again == memory);
                        continue;
                    }
                    const bool has_nan = std::isnan(one) || std::isnan(other);
                    CHECK(std::isnan(scales[0]) == has_nan);
                    const float largest = std::max(std::fabs(one), 1e-12F);
                    if (!std::isnan(one)) CHECK(scales[1] == largest);
                }
            }
        }
    }
}

TEST(codes_come_back_from_what_they_mean)
{
    std::mt19937 random(11);
    for (const bool is_signed : {true, false}) {
        const float* numbers = code_values(is_signed);
        for (int attempt = 0; attempt < 2000; ++attempt) {
            const std::size_t numel = attempt % 5 == 0 ? 1 + random() % kCodeBlock : kCodeBlock;
            const float scale =
                std::max(1e-12F, std::ldexp(1.0F + static_cast<float>(random() % 4096) / 4096.0F,
                                            static_cast<int>(random() % 160) - 60));
            std::vector<float> values(numel);
            // One of a block's values was its scale: it has the largest number of its sign.
            const bool ends_below = is_signed && attempt % 2 == 0;
            for (float& value : values) {
                const std::uint32_t code = random() % (ends_below ? 254 : 256);
                value = numbers[code] * scale;
            }
            values[random() % numel] = numbers[ends_below ? 0 : 255] * scale;
            Codes made(values, is_signed);
            store_moment_exactly(made.given.data(), made.place, numel);
            CHECK(same_bits(made.loaded(), values));
        }
    }
}

TEST(memory_that_nobody_wrote_is_zeros_of_a_moment)
{
    for (const MomentType type : kTypes) {
        std::vector<char> memory(5000 * 4);
        std::vector<float> scales(20), values(5000, 7.0F);
        load_moment({type, true, memory.data(), scales.data()}, values.data(), values.size());
        for (const float value : values) CHECK(bits_of(value) == 0);
    }
}

namespace {

// Like a vector kernel, with something of every value in every other.
class MixRule final : public UpdateRule {
  public:
    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        for (std::size_t i = 0; i < numel; ++i) {
            moments[0][i] = 0.9F * moments[0][i] + 0.1F * grad[i];
            moments[1][i] = 0.99F * moments[1][i] + 0.01F * grad[i] * grad[i];
            param[i] -= 0.01F * moments[0][i] / (std::sqrt(moments[1][i]) + 1e-3F);
        }
    }
};

// A block, its P16, and its next update.
struct Trained {
    Trained(std::uint64_t numel, MomentType type, bool splits,
            const std::vector<std::uint64_t>& cuts = {})
        : layout(with_moments(splits ? split_layout(numel) : whole_layout(numel), type, cuts)),
          memory{std::vector<char>(layout.num_bytes), std::vector<char>(layout.num_bytes)},
          param16(numel)
    {
        for (std::vector<char>& each : memory)
            if (splits) StateBlock{each.data(), layout}.joints()->has_high = 1;
    }
    StateBlock block(int which) { return {memory[which].data(), layout}; }
    void update(const std::vector<float>& gradient, const std::vector<UpdateSegment>& segments,
                bool in_place, UpdateTeam* team = nullptr)
    {
        BlockUpdate how;
        how.from = block(at);
        const std::vector<char> before = memory[at];
        if (!in_place && layout.is_split) at = 1 - at;
        how.to = block(at);
        how.high_was_read = true;
        how.keeps_high = true;
        how.gradient = reinterpret_cast<const char*>(gradient.data());
        how.gradient_type = ElementType::kFloat32;
        how.param16 = reinterpret_cast<char*>(param16.data());
        how.checked = true;
        sums = update_block(how, segments, team);
        if (how.from.memory != how.to.memory) CHECK(memory[1 - at] == before);
    }
    std::vector<char> whole()
    {
        const BlockLayout seen = whole_layout(layout.numel);
        std::vector<char> found(seen.num_bytes);
        CHECK(decode_block(block(at), nullptr, {found.data(), seen}));
        return found;
    }

    BlockLayout layout;
    std::vector<char> memory[2];
    std::vector<std::uint16_t> param16;
    int at = 0;
    BlockSums sums;
};

void round_moments(const StateBlock& block, MomentType type,
                   const std::vector<UpdateSegment>& segments,
                   const std::vector<std::uint64_t>& cuts)
{
    const std::uint64_t numel = block.layout.numel;
    std::vector<std::uint64_t> bounds = cuts;
    for (std::uint64_t at = 0; at < numel; at += kCodeBlock) bounds.push_back(at);
    bounds.push_back(numel);
    std::sort(bounds.begin(), bounds.end());
    for (int which : {0, 1}) {
        std::vector<char> memory(numel * 4);
        float scale = 0.0F;
        const StoredMoment place{type, which == 0, memory.data(), &scale};
        for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
            const std::uint64_t begin = bounds[i], end = bounds[i + 1];
            const bool is_touched =
                std::any_of(segments.begin(), segments.end(), [&](const UpdateSegment& segment) {
                    return segment.rule != nullptr && segment.begin < end && segment.end > begin;
                });
            if (!is_touched) continue;
            store_moment(block.moment(which) + begin, place, end - begin);
            load_moment(place, block.moment(which) + begin, end - begin);
        }
    }
}

}  // namespace

TEST(updates_of_rounded_moments_equal_those_that_are_rounded_behind)
{
    std::mt19937 random(3);
    const auto rule = std::make_shared<MixRule>();
    for (const std::uint64_t numel : {1U, 255U, 3000U, 16384U + 300U, 70001U}) {
        for (const MomentType type : kTypes) {
            for (const bool splits : {false, true}) {
                std::vector<std::uint64_t> cuts;
                for (std::uint64_t at = 0; (at += 1 + random() % 700) < numel;)
                    if (at % kCodeBlock != 0) cuts.push_back(at);
                Trained reference(numel, MomentType::kFloat32, false);
                Trained ours(numel, type, splits, cuts);
                for (int step = 0; step < 6; ++step) {
                    std::vector<float> gradient(numel);
                    for (float& value : gradient)
                        value = std::ldexp(static_cast<float>(random() % 2001) - 1000.0F,
                                           -static_cast<int>(random() % 30));
                    std::vector<UpdateSegment> segments;
                    for (std::uint64_t at = 0; at < numel;) {
                        const std::uint64_t end =
                            step < 2 ? numel
                                     : std::min<std::uint64_t>(numel, at + 1 + random() % 900);
                        segments.push_back({at, end, random() % 3 == 0 ? nullptr : rule});
                        at = end;
                    }
                    reference.update(gradient, segments, true);
                    if (type != MomentType::kFloat32)
                        round_moments(reference.block(0), type, segments, cuts);
                    ours.update(gradient, segments, step % 2 == 0,
                                step % 2 == 0 ? nullptr : &team_of_two());
                    CHECK(ours.whole() == reference.whole());
                    CHECK(ours.param16 == reference.param16);
                    CHECK(ours.sums.updated == reference.block(0).sums(0, numel));
                }
            }
        }
    }
}

TEST(a_parameter_that_is_not_updated_keeps_its_moments_whatever_its_neighbours_do)
{
    const std::uint64_t numel = 40000;
    const std::vector<std::uint64_t> cuts = {100, 130, 1000, 16384 + 77, 16384 + 79, 39999};
    const auto rule = std::make_shared<MixRule>();
    for (const bool splits : {false, true}) {
        Trained ours(numel, MomentType::kInt8, splits, cuts);
        std::vector<float> gradient(numel, 1.0F);
        for (std::uint64_t i = 0; i < numel; i += 3) gradient[i] = -2.0F;  // a block's largest
        ours.update(gradient, {{0, numel, rule}}, true);
        const BlockLayout seen = whole_layout(numel);
        std::vector<char> before = ours.whole();
        for (int step = 0; step < 20; ++step) {
            std::vector<UpdateSegment> segments;
            for (std::size_t i = 0; i <= cuts.size(); ++i)
                segments.push_back({i == 0 ? 0 : cuts[i - 1], i == cuts.size() ? numel : cuts[i],
                                    i % 2 == 0 ? nullptr : rule});
            for (float& value : gradient) value *= 1.5F;
            ours.update(gradient, segments, step % 2 == 0);
            std::vector<char> after = ours.whole();
            const StateBlock was{before.data(), seen}, is{after.data(), seen};
            std::size_t num_changed = 0, num_kept = 0;
            for (const UpdateSegment& segment : segments) {
                for (std::uint64_t i = segment.begin; i < segment.end; ++i) {
                    const bool is_same = bits_of(was.moment(0)[i]) == bits_of(is.moment(0)[i]) &&
                                         bits_of(was.moment(1)[i]) == bits_of(is.moment(1)[i]);
                    (segment.rule == nullptr ? num_changed : num_kept) +=
                        is_same != (segment.rule == nullptr) ? 1U : 0U;
                }
            }
            CHECK(num_changed == 0);
            CHECK(num_kept == 0);
            before = after;
        }
    }
}

TEST(blocks_of_codes_end_where_parameters_meet)
{
    const BlockLayout layout =
        with_moments(whole_layout(5000), MomentType::kInt8, {10, 300, 301, 1000});
    const std::uint64_t begins[] = {0, 10, 256, 300, 301, 512, 768, 1000, 1024};
    for (std::size_t i = 0; i + 1 < std::size(begins); ++i) {
        for (std::uint64_t element = begins[i]; element < begins[i + 1]; ++element) {
            CHECK(layout.code_begin(element) == begins[i]);
            CHECK(layout.code_end(element + 1) == begins[i + 1]);
        }
        const StateBlock block{nullptr, layout};
        const auto from = reinterpret_cast<std::uintptr_t>(block.moment_from(1, begins[i]).scales);
        CHECK(from == layout.scales[1] + 4 * i);
    }
}

TEST(whole_masters_that_go_to_a_split_block_are_updated_in_both)
{
    const std::uint64_t numel = 20000;
    const std::vector<float> gradient(numel, 0.3F);
    const std::vector<UpdateSegment> segments = {{0, 700, nullptr},
                                                 {700, numel, std::make_shared<MixRule>()}};
    for (const MomentType type : kTypes) {
        Trained whole(numel, type, false), split(numel, type, true);
        whole.update(gradient, {{0, numel, std::make_shared<MixRule>()}}, true);
        BlockUpdate how;
        how.from = whole.block(0);
        how.to = split.block(0);
        how.keeps_high = true;
        how.gradient = reinterpret_cast<const char*>(gradient.data());
        how.gradient_type = ElementType::kFloat32;
        how.param16 = reinterpret_cast<char*>(split.param16.data());
        update_block(how, segments);
        CHECK(whole.whole() == split.whole());
        how.from = split.block(0);  // and back
        how.to = whole.block(0);
        how.high_was_read = true;
        const std::vector<char> before = split.whole();
        update_block(how, {{0, numel, nullptr}});
        CHECK(whole.whole() == before);
    }
}
