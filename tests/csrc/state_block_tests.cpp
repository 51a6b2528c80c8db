// SPDX-License-Identifier: Apache-2.0
//
// One update of a block in memory: segments that meet anywhere, sums, tiles.
#include <memory>
#include <random>

#include "harness.h"
#include "kernels/place_sum.h"
#include "pipeline_fixture.h"
#include "teams.h"

using namespace fixture;

namespace {

// Like a vector kernel: what is left of a call after its last whole block gets other bits.
class TailRule final : public UpdateRule {
  public:
    explicit TailRule(float rate) : rate_(rate) {}
    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        const std::size_t whole = numel / 16 * 16;
        for (std::size_t i = 0; i < numel; ++i) {
            param[i] -= rate_ * grad[i] + (i < whole ? 0.0F : 1000.0F);
            moments[0][i] += param[i];
            moments[1][i] -= moments[0][i];
        }
    }

  private:
    float rate_;
};

struct Values {
    explicit Values(std::uint64_t numel)
        : block{nullptr, whole_layout(numel)},
          memory(block.layout.num_bytes),
          gradient(numel),
          param16(numel)
    {
        block.memory = memory.data();
        for (std::uint64_t i = 0; i < numel; ++i) {
            gradient[i] = static_cast<float>(i % 7);
            for (int part = 0; part < 3; ++part)
                field(part)[i] = static_cast<float>((i + static_cast<unsigned>(part)) % 5);
        }
    }
    BlockSums update(const std::vector<UpdateSegment>& segments)
    {
        BlockUpdate how;
        how.from = how.to = block;
        how.gradient = reinterpret_cast<const char*>(gradient.data());
        how.gradient_type = ElementType::kFloat32;
        how.param16 = reinterpret_cast<char*>(param16.data());
        how.param_type = ElementType::kFloat32;
        how.checked = true;
        return update_block(how, segments, &team_of_two());
    }
    bool element_is(std::uint64_t i, const Values& other) const
    {
        for (int part = 0; part < 3; ++part)
            if (field(part)[i] != other.field(part)[i]) return false;
        return param16[i] == block.master()[i];
    }
    float* field(int which) const { return which == 0 ? block.master() : block.moment(which - 1); }

    StateBlock block;
    std::vector<char> memory;
    std::vector<float> gradient;
    std::vector<float> param16;
};

}  // namespace

TEST(update_gives_every_element_the_bits_of_its_rule_over_the_whole_chunk)
{
    const std::vector<std::shared_ptr<const UpdateRule>> rules = {
        nullptr, std::make_shared<TailRule>(2.0F), std::make_shared<TailRule>(3.0F)};
    std::mt19937 random(7);
    for (const std::uint64_t numel : {1U, 15U, 127U, 128U, 1000U, 16384U + 40U, 70001U}) {
        std::vector<Values> whole;
        for (const auto& rule : rules) {
            whole.emplace_back(numel);
            whole.back().update({{0, numel, rule}});
        }
        for (int attempt = 0; attempt < 20; ++attempt) {
            std::vector<UpdateSegment> segments;
            std::vector<std::size_t> rule_of(numel);
            for (std::uint64_t at = 0; at < numel;) {
                const std::uint64_t end = std::min<std::uint64_t>(
                    numel, at + 1 + random() % (attempt % 2 == 0 ? 9000 : 90));
                const std::size_t which = random() % rules.size();
                segments.push_back({at, end, rules[which]});
                for (; at < end; ++at) rule_of[at] = which;
            }
            Values cut(numel);
            const StateSums before = cut.block.sums(0, numel);
            const BlockSums sums = cut.update(segments);
            std::uint64_t num_other = 0;
            for (std::uint64_t i = 0; i < numel; ++i)
                num_other += !cut.element_is(i, whole[rule_of[i]]);
            CHECK(num_other == 0);
            CHECK(sums.read == before);
            CHECK(sums.updated == cut.block.sums(0, numel));
        }
    }
}

TEST(update_refuses_segments_that_do_not_cover_the_chunk)
{
    Values values(1000);
    const auto rule = std::make_shared<TailRule>(1.0F);
    CHECK_THROWS(std::invalid_argument, values.update({}));
    CHECK_THROWS(std::invalid_argument, values.update({{0, 999, rule}}));
    CHECK_THROWS(std::invalid_argument, values.update({{0, 400, rule}, {401, 1000, rule}}));
    CHECK_THROWS(std::invalid_argument, values.update({{0, 1001, rule}}));
}

TEST(sums_of_a_block_tell_its_parts_and_places_apart)
{
    Values values(3000);
    const StateSums whole = values.block.sums(0, 3000);
    StateSums added = values.block.sums(0, 1024);
    added += values.block.sums(1024, 3000);
    CHECK(added == whole);
    std::swap_ranges(values.field(1), values.field(1) + 3000, values.field(2));
    CHECK(!(values.block.sums(0, 3000) == whole));
    std::swap_ranges(values.field(1), values.field(1) + 3000, values.field(2));
    CHECK(values.block.sums(0, 3000) == whole);
    std::swap_ranges(values.field(0), values.field(0) + 1024, values.field(0) + 1024);
    CHECK(!(values.block.sums(0, 3000) == whole));
    std::fill_n(values.field(1), 3000, 0.0F);
    std::fill_n(values.field(2), 3000, 0.0F);
    CHECK(values.block.sums(0, 3000).moments == 0);
}
