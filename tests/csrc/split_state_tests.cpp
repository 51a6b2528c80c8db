// SPDX-License-Identifier: Apache-2.0
//
// Split masters: every value comes back, and a pipeline of split blocks does what one of whole
// blocks does, whatever happens to P16.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "harness.h"
#include "pipeline_fixture.h"
#include "teams.h"

using namespace fixture;

namespace {

class NoRule final : public UpdateRule {
  public:
    void apply(float*, float*, float* const*, std::size_t) const override {}
};

// Nothing about it is exact, so that lower halves are anything.
class DriftRule final : public UpdateRule {
  public:
    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        for (std::size_t i = 0; i < numel; ++i) {
            moments[0][i] = 0.9F * moments[0][i] + 0.1F * grad[i];
            moments[1][i] = 0.99F * moments[1][i] + 0.01F * grad[i] * grad[i];
            param[i] -= 0.01F * moments[0][i] / (std::sqrt(moments[1][i]) + 1e-8F);
        }
    }
};

// A split block of these values as an update leaves it, and what is read of it.
class Coded {
  public:
    explicit Coded(const std::vector<std::uint32_t>& values, bool keeps_high = false)
        : numel(values.size()),
          source_(whole_layout(numel).num_bytes),
          split_(split_layout(numel).num_bytes),
          gradient_(numel),
          param16(numel)
    {
        std::memcpy(source_.data(), values.data(), numel * sizeof(float));
        BlockUpdate how;
        how.from = {source_.data(), whole_layout(numel)};
        how.to = block();
        how.gradient = reinterpret_cast<const char*>(gradient_.data());
        how.gradient_type = ElementType::kFloat32;
        how.param16 = reinterpret_cast<char*>(param16.data());
        how.keeps_high = keeps_high;
        how.checked = true;
        result = update_block(how, {{0, numel, std::make_shared<NoRule>()}}, &team_of_two());
    }
    StateBlock block() { return {split_.data(), split_layout(numel)}; }
    // Of the bits that come back, how many are others.
    std::size_t num_wrong(const std::vector<std::uint32_t>& values, bool with_param16)
    {
        std::vector<char> back(whole_layout(numel).num_bytes);
        const StateBlock whole{back.data(), whole_layout(numel)};
        const char* params = with_param16 ? reinterpret_cast<char*>(param16.data()) : nullptr;
        if (!decode_block(block(), params, whole)) return numel;
        std::size_t num = 0;
        for (std::size_t i = 0; i < numel; ++i) num += bits_of(whole.master()[i]) != values[i];
        return num;
    }

    const std::size_t numel;

  private:
    std::vector<char> source_, split_;
    std::vector<float> gradient_;

  public:
    std::vector<std::uint16_t> param16;
    BlockSums result;
};

std::uint16_t rounded(std::uint32_t bits)
{
    const float value = value_of(bits);
    std::uint16_t half;
    narrow_parameter(ElementType::kBFloat16, &value, &half, 1);
    return half;
}

const std::uint32_t kEdges[] = {0x0000, 0x0001, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};

}  // namespace

TEST(split_gives_every_high_half_back_with_edge_lows)
{
    std::vector<std::uint32_t> values;
    for (std::uint32_t high = 0; high < 1U << 16; ++high)
        for (const std::uint32_t low : kEdges) values.push_back(high << 16 | low);
    Coded many(values);  // far too many ties: upper halves are kept
    CHECK(many.result.form.has_high && !many.result.form.is_joinable);
    CHECK(many.num_wrong(values, false) == 0);
    std::size_t num_joints = 0;
    for (std::size_t begin = 0; begin < values.size(); begin += 1024) {
        const std::vector<std::uint32_t> part(
            values.begin() + static_cast<std::ptrdiff_t>(begin),
            values.begin() + static_cast<std::ptrdiff_t>(begin) + 1024);
        Coded coded(part);
        num_joints += coded.result.form.is_joinable ? coded.block().joints()->num : 0;
        CHECK(coded.num_wrong(part, true) == 0);
        for (std::size_t i = 0; i < part.size(); ++i)
            if (coded.param16[i] != rounded(part[i])) num_joints += 1U << 20;
    }
    CHECK(num_joints > 30000 && num_joints < 1U << 20);
}

TEST(split_needs_high_halves_where_joints_are_too_many)
{
    std::vector<std::uint32_t> values(3000, 0x3f800000U);
    for (std::size_t i = 0; i < Joints::kMost; ++i) values[5 * i] = 0x3f818000U;  // rounded up
    Coded fits(values);
    CHECK(fits.result.form.is_joinable && !fits.result.form.has_high);
    CHECK(fits.block().joints()->num == Joints::kMost);
    CHECK(fits.num_wrong(values, true) == 0);
    CHECK(fits.num_wrong(values, false) == values.size());
    values[2999] = 0x3f818000U;
    Coded exceeds(values);
    CHECK(!exceeds.result.form.is_joinable && exceeds.result.form.has_high);
    CHECK(exceeds.num_wrong(values, false) == 0);
    Coded both(std::vector<std::uint32_t>(100, 0xff801234U), true);
    CHECK(both.result.form.is_joinable && both.result.form.has_high);
}

TEST(split_refuses_a_block_that_contradicts_itself)
{
    const std::vector<std::uint32_t> values(100, 0x3f800000U);
    Coded coded(values);
    coded.block().joints()->num = Joints::kMost + 1;
    CHECK(coded.num_wrong(values, true) == values.size());
}

namespace {

// The same in bfloat16, as such masters need it.
class RoundedDrift final : public UpdateRule {
  public:
    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        DriftRule().apply(param, grad, moments, numel);
        for (std::size_t i = 0; i < numel; ++i)
            param[i] = value_of(std::uint32_t{rounded(bits_of(param[i]))} << 16);
    }
};

const Masters kForms[] = {Masters::kSplit, Masters::kBFloat16};

// Two worlds that get the same updates, whole and split.
class Pair {
  public:
    Pair(Place params, int num_slots, Masters masters = Masters::kSplit)
        : options_{.params = params,
                   .num_slots = num_slots,
                   .num_chunks = 3,
                   .numel = 40000,
                   .bfloat16_params = true}
    {
        whole = std::make_unique<World>(options_);
        options_.masters = masters;
        if (masters == Masters::kSplit) {
            rule_ = std::make_shared<DriftRule>();
        } else {
            rule_ = std::make_shared<RoundedDrift>();
        }
        split = std::make_unique<World>(options_);
        std::mt19937 random(3);
        std::normal_distribution<float> normal;
        for (std::size_t chunk = 0; chunk < options_.num_chunks; ++chunk) {
            std::vector<char> block(3 * whole->part);
            auto* master = reinterpret_cast<float*>(block.data());
            for (std::uint64_t i = 0; i < options_.numel; ++i)
                master[i] = value_of(bits_of(normal(random)) & 0xffff0000U);
            for (World* world : {whole.get(), split.get()}) begin(world, chunk, block.data());
        }
    }
    ChunkUpdate update(World* world, std::size_t chunk, std::int64_t generation, float multiplier)
    {
        ChunkUpdate made = world->update(chunk, generation, multiplier);
        made.segments = {{0, 9999, rule_}, {9999, 12345, nullptr}, {12345, options_.numel, rule_}};
        made.param_version = static_cast<int>(generation % 2);
        return made;
    }
    void enqueue(std::int64_t generation, float multiplier)
    {
        std::mt19937 random(static_cast<unsigned>(generation));
        std::normal_distribution<float> normal;
        for (std::size_t chunk = 0; chunk < options_.num_chunks; ++chunk) {
            for (std::uint64_t i = 0; i < options_.numel; ++i)
                whole->gradients[chunk][i] = split->gradients[chunk][i] =
                    value_of(bits_of(normal(random)) & 0xffff0000U);
            for (World* world : {whole.get(), split.get()})
                world->pipeline->enqueue(update(world, chunk, generation, multiplier));
        }
    }
    void step(std::int64_t generation)
    {
        enqueue(generation, 1.0F);
        for (World* world : {whole.get(), split.get()}) {
            world->pipeline->publish(generation);
            world->finish(generation);
        }
    }
    std::uint16_t* params(World* world, std::size_t chunk, std::int64_t generation)
    {
        const auto version = static_cast<std::size_t>(generation % 2);
        return reinterpret_cast<std::uint16_t*>(
            world->params[version * options_.num_chunks + chunk].data());
    }
    // Chunks whose states or P16 differ after a generation.
    std::size_t num_different(std::int64_t generation)
    {
        std::size_t num = 0;
        for (std::size_t chunk = 0; chunk < options_.num_chunks; ++chunk) {
            std::vector<char> expected(3 * whole->part), found(3 * whole->part);
            whole->read_file(whole->state_range(chunk, whole->pipeline->slot(chunk)),
                             expected.data());
            const std::vector<std::uint16_t> is = params_of(split.get(), chunk, generation);
            if (!decode(chunk, is, found.data())) ++num;
            const std::uint64_t bytes = options_.numel * sizeof(float);
            for (int i = 0; i < 3; ++i)
                if (std::memcmp(expected.data() + static_cast<std::uint64_t>(i) * whole->part,
                                found.data() + static_cast<std::uint64_t>(i) * whole->part,
                                bytes) != 0)
                    ++num;
            if (params_of(whole.get(), chunk, generation) != is) ++num;
            if (!split->pipeline->state_holds(chunk, found.data())) ++num;
        }
        return num;
    }
    // As somebody who has the slot alone.
    bool decode(std::size_t chunk, const std::vector<std::uint16_t>& params16, char* to)
    {
        std::vector<char> block(split->stored.num_bytes);
        split->read_file(split->state_range(chunk, split->pipeline->slot(chunk)), block.data());
        const char* params = options_.params == Place::kStorage
                                 ? reinterpret_cast<const char*>(params16.data())
                                 : nullptr;
        return decode_block({block.data(), split->stored}, params,
                            {to, whole_layout(options_.numel)});
    }
    std::vector<std::uint16_t> params_of(World* world, std::size_t chunk, std::int64_t generation)
    {
        if (options_.params == Place::kDram) {
            const std::uint16_t* from = params(world, chunk, generation);
            return {from, from + options_.numel};
        }
        std::vector<std::uint16_t> stored(world->short_part / 2);
        world->read_file(world->param_range(chunk, world->pipeline->slot(chunk)),
                         reinterpret_cast<char*>(stored.data()));
        stored.resize(options_.numel);
        return stored;
    }

    std::unique_ptr<World> whole, split;

  private:
    void begin(World* world, std::size_t chunk, char* block)
    {
        world->pipeline->set_checksum(true);
        std::vector<char> stored(world->stored.num_bytes, 0x55);
        if (world->stored.is_split) {
            BlockLayout alone = world->stored;
            alone.num_moments = 0;
            encode_block({block, whole_layout(options_.numel)}, {stored.data(), alone});
        } else {
            std::memcpy(stored.data(), block, world->part);
        }
        world->write_file(world->state_range(chunk, 0), stored.data());
        world->pipeline->replace_state(chunk, block, false);
    }

    WorldOptions options_;
    std::shared_ptr<const UpdateRule> rule_;
};

}  // namespace

TEST(split_states_are_those_of_whole_blocks_after_every_step)
{
    for (const Masters masters : kForms) {
        for (const Place params : {Place::kDram, Place::kStorage}) {
            for (const int num_slots : {1, 2}) {
                Pair pair(params, num_slots, masters);
                for (std::int64_t generation = 1; generation <= 5; ++generation) {
                    if (num_slots == 2) {  // prepared in vain, and done again with another factor
                        pair.enqueue(generation, 0.5F);
                        pair.whole->drop_all();
                        pair.split->drop_all();
                    }
                    pair.step(generation);
                    CHECK(pair.num_different(generation) == 0);
                }
            }
        }
    }
}

TEST(split_reads_and_writes_fewer_bytes)
{
    for (const Place params : {Place::kDram, Place::kStorage}) {
        Pair pair(params, 2);
        pair.step(1);
        const auto read = [](World& world) { return world.engine->stats(IoKind::kRead).num_bytes; };
        const auto written = [](World& world) {
            return world.engine->stats(IoKind::kWrite).num_bytes;
        };
        const std::uint64_t before[] = {read(*pair.whole), read(*pair.split), written(*pair.whole),
                                        written(*pair.split)};
        pair.step(2);
        const std::uint64_t high = pair.split->stored.joints;
        const std::uint64_t saved = 3 * (high - kPageBytes);
        const std::uint64_t reads = read(*pair.whole) - before[0],
                            writes = written(*pair.whole) - before[2];
        const std::uint64_t split_reads = read(*pair.split) - before[1];
        const std::uint64_t split_writes = written(*pair.split) - before[3];
        if (params == Place::kDram) {
            CHECK(reads - split_reads == saved);
            CHECK(split_writes - writes == 3 * kPageBytes);
        } else {
            CHECK(split_reads - reads == 3 * kPageBytes);
            CHECK(writes - split_writes == saved);
        }
    }
}

TEST(split_masters_do_not_follow_edits_of_params)
{
    for (const Masters masters : kForms) {
        for (const bool is_told : {false, true}) {
            Pair pair(Place::kDram, 2, masters);
            for (std::int64_t generation = 1; generation <= 4; ++generation) {
                pair.step(generation);
                CHECK(pair.num_different(generation) == 0);
                for (World* world : {pair.whole.get(), pair.split.get()})
                    for (std::uint64_t i = 0; i < 5000; ++i)
                        pair.params(world, 1, generation)[i] ^= 0x0101;
                if (is_told) pair.split->pipeline->params_edited(1);
            }
        }
    }
}

TEST(bfloat16_masters_move_half_as_much_and_keep_every_bit)
{
    std::vector<std::uint32_t> values;  // every value there is, NaN of every kind among them
    for (std::uint32_t high = 0; high < 1U << 16; ++high) values.push_back(high << 16);
    const BlockLayout layout = bfloat16_layout(values.size());
    std::vector<char> source(whole_layout(values.size()).num_bytes), back(source.size());
    std::vector<char> stored(layout.num_bytes);
    std::memcpy(source.data(), values.data(), values.size() * sizeof(float));
    const StateBlock whole{source.data(), whole_layout(values.size())};
    encode_block(whole, {stored.data(), layout});
    CHECK(decode_block({stored.data(), layout}, nullptr, {back.data(), whole.layout}));
    CHECK(source == back);
    for (const bool keeps_high : {false, true}) {
        std::vector<std::uint16_t> param16(values.size());
        std::vector<float> gradient(values.size());
        BlockUpdate how;
        how.from = how.to = {stored.data(), layout};
        how.high_was_read = true;
        how.gradient = reinterpret_cast<const char*>(gradient.data());
        how.gradient_type = ElementType::kFloat32;
        how.narrows_gradient = true;
        how.param16 = reinterpret_cast<char*>(param16.data());
        how.keeps_high = keeps_high;
        const BlockForm form =
            update_block(how, {{0, values.size(), std::make_shared<NoRule>()}}, &team_of_two())
                .form;
        CHECK(form.is_joinable && form.has_high == keeps_high);
        if (!keeps_high) std::fill_n(how.to.high(), values.size(), std::uint16_t{0x5555});
        const char* params = reinterpret_cast<const char*>(param16.data());
        CHECK(keeps_high || !decode_block(how.to, nullptr, {back.data(), whole.layout}));
        CHECK(decode_block(how.to, params, {back.data(), whole.layout}));
        CHECK(source == back);
        if (!keeps_high) encode_block(whole, how.to);
    }
}

TEST(a_gradient_is_rounded_before_it_is_scaled_where_masters_are_bfloat16)
{
    class KeepGradient final : public UpdateRule {
      public:
        void apply(float* param, float* grad, float* const*, std::size_t numel) const override
        {
            std::copy_n(grad, numel, param);
        }
    };
    const float third = 1.0F / 3.0F;
    std::vector<float> gradient(100, third);
    std::vector<std::uint16_t> param16(100);
    std::vector<char> memory(bfloat16_layout(100).num_bytes);
    BlockUpdate how;
    how.from = how.to = {memory.data(), bfloat16_layout(100)};
    how.to.joints()->has_high = 1;
    how.high_was_read = how.keeps_high = how.narrows_gradient = true;
    how.gradient = reinterpret_cast<const char*>(gradient.data());
    how.gradient_type = ElementType::kFloat32;
    how.param16 = reinterpret_cast<char*>(param16.data());
    how.multiplier = 0.7F;
    update_block(how, {{0, 100, std::make_shared<KeepGradient>()}});
    const float narrow = value_of(std::uint32_t{rounded(bits_of(third))} << 16);
    CHECK(param16[99] == rounded(bits_of(narrow * 0.7F)));
    how.narrows_gradient = false;
    how.multiplier = 1.01F;
    update_block(how, {{0, 100, std::make_shared<KeepGradient>()}});
    CHECK(param16[99] == rounded(bits_of(third * 1.01F)));
    CHECK(param16[99] != rounded(bits_of(narrow * 1.01F)));
}

TEST(split_states_of_a_slot_that_lost_its_joints_are_a_fault_of_the_disk)
{
    Pair pair(Place::kStorage, 2);
    pair.step(1);
    FileRange page = pair.split->state_range(2, pair.split->pipeline->slot(2));  // the last
    page.offset += pair.split->stored.joints;
    page.num_bytes = kPageBytes;
    pair.split->write_file(page, std::vector<char>(kPageBytes, 0x7f).data());
    pair.enqueue(2, 1.0F);
    CHECK_THROWS(std::runtime_error, pair.split->finish(2));
    CHECK(pair.split->pipeline->failure().error == EBADMSG);
    pair.whole->pipeline->publish(2);
    pair.whole->finish(2);
}
