// SPDX-License-Identifier: Apache-2.0
//
// States kept for a copier: taken once each, as they were, whatever updates do meanwhile.
#include <atomic>
#include <chrono>
#include <thread>

#include "harness.h"
#include "pipeline_fixture.h"

using namespace fixture;

namespace {

// Takes all kept states away; whether every one of them holds these values.
class Copier {
  public:
    Copier(World* world, float param, float moment, std::size_t num_lent)
        : lent_(num_lent, std::vector<char>(3 * world->part))
    {
        std::vector<std::size_t> order;
        for (std::size_t i = world->given.num_chunks; i-- > 0;) order.push_back(i);
        world->pipeline->keep_states(order);
        for (std::vector<char>& buffer : lent_) world->pipeline->lend_buffer(buffer.data());
        thread_ = std::thread([this, world, param, moment] {
            std::vector<int> times(world->given.num_chunks);
            bool may_read = false;
            for (std::size_t left = times.size(); left > 0;) {
                KeptState kept;
                may_read = !may_read;
                if (!world->pipeline->take_kept(0.01, may_read, &kept)) continue;
                --left;
                ++times[kept.chunk];
                if (!holds(world, kept, param, moment)) is_right = false;
                if (kept.buffer != nullptr) world->pipeline->lend_buffer(kept.buffer);
            }
            for (const int count : times)
                if (count != 1) is_right = false;
            world->pipeline->drop_kept();
        });
    }
    ~Copier() { join(); }
    void join()
    {
        if (thread_.joinable()) thread_.join();
    }

    std::atomic<bool> is_right{true};

  private:
    static bool holds(World* world, const KeptState& kept, float param, float moment)
    {
        std::vector<char> bytes(3 * world->part);
        if (kept.buffer != nullptr) {
            bytes.assign(kept.buffer, kept.buffer + bytes.size());
        } else {
            if (world->given.state == Place::kDram) {
                bytes = world->resident[kept.chunk];
            } else {
                world->read_file(world->state_range(kept.chunk, kept.slot), bytes.data());
            }
        }
        const bool is_known = world->pipeline->kept_holds(kept.chunk, bytes.data());
        if (kept.buffer == nullptr) world->pipeline->release_kept(kept.chunk);
        return is_known && world->all_equal(bytes.data(), param) &&
               world->all_equal(bytes.data() + world->part, moment) &&
               world->all_equal(bytes.data() + 2 * world->part, moment);
    }

    std::vector<std::vector<char>> lent_;
    std::thread thread_;
};

void step(World& world, std::int64_t generation)
{
    world.enqueue_all(generation);
    world.pipeline->publish(generation);
    world.finish(generation);
}

// Some tiles of a state are updated when it throws.
class FailsHalfWayRule final : public UpdateRule {
  public:
    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        if (++num_calls_ == 40) throw std::runtime_error("the rule failed half way");
        CountingRule().apply(param, grad, moments, numel);
    }

  private:
    mutable std::atomic<int> num_calls_{0};
};

}  // namespace

TEST(kept_states_are_those_of_their_generation_in_every_placement)
{
    for (const Place state : {Place::kStorage, Place::kDram}) {
        for (const int num_slots : {1, 2, 3}) {
            for (const std::size_t num_lent : {0, 1, 3}) {
                World world({.state = state, .num_slots = num_slots, .num_chunks = 9});
                world.pipeline->set_checksum(num_lent != 1);
                step(world, 1);
                for (std::int64_t generation = 2; generation < 8; generation += 3) {
                    world.enqueue_all(generation);
                    world.pipeline->publish(generation);  // in flight while it is kept
                    const float value = static_cast<float>(generation);
                    Copier copier(&world, -value, value, num_lent);
                    world.finish(generation);
                    step(world, generation + 1);
                    step(world, generation + 2);
                    copier.join();
                    CHECK(copier.is_right);
                }
            }
        }
    }
}

TEST(kept_states_let_dropped_updates_go)
{
    World world({.num_chunks = 3});
    step(world, 1);
    step(world, 2);
    world.pipeline->keep_states({0, 1, 2});
    step(world, 3);
    world.enqueue_all(4);  // would write over them
    // Until two are admitted: staging holds no more, and those are not always the most urgent.
    for (std::size_t num_admitted = 0; num_admitted < 2;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        num_admitted = 0;
        for (std::size_t i = 0; i < 3; ++i) num_admitted += !world.pipeline->wait_idle(i, 0.0);
    }
    world.drop_all();
    for (std::size_t i = 0; i < 3; ++i) CHECK(world.pipeline->wait_idle(i, kPatienceSecs));
    for (std::size_t i = 0; i < 3; ++i) {
        KeptState kept;
        CHECK(world.pipeline->take_kept(kPatienceSecs, true, &kept));
        CHECK(kept.chunk == i && !kept.is_wanted);
        world.pipeline->release_kept(kept.chunk);
    }
    KeptState none;
    CHECK(!world.pipeline->take_kept(0.0, true, &none));
    world.pipeline->drop_kept();
    step(world, 4);
    CHECK(world.state_is(1, -4.0F, 4.0F));
}

TEST(kept_states_of_a_pipeline_that_failed_before_they_were_there)
{
    World world({.num_chunks = 2});
    step(world, 1);
    world.enqueue_all(3);  // its writes wait for a commit that does not come
    world.pipeline->publish(3);
    world.pipeline->keep_states({0, 1});
    world.pipeline->fail("something", 5);
    KeptState kept;
    CHECK_THROWS(std::runtime_error, world.pipeline->take_kept(kPatienceSecs, true, &kept));
    world.pipeline->drop_kept();
}

// Updated in its own memory, it is of no generation then; beside that, it is as it was.
TEST(kept_states_whose_update_fails_half_way)
{
    for (const bool has_spares : {false, true}) {
        World world({.state = Place::kDram,
                     .num_slots = 1,
                     .num_chunks = 1,
                     .numel = 200000,  // both threads of the team have some
                     .has_spares = has_spares});
        std::vector<char> buffer(3 * world.part);
        step(world, 1);
        world.pipeline->keep_states({0});
        world.pipeline->lend_buffer(buffer.data());
        ChunkUpdate update = world.update(0, 2);
        update.segments = {{0, world.given.numel, std::make_shared<FailsHalfWayRule>()}};
        world.pipeline->enqueue(update);
        CHECK_THROWS(std::runtime_error, world.pipeline->wait_published(0, 2, kPatienceSecs));
        CHECK(world.state_is(0, -1.0F, 1.0F) == has_spares);
        KeptState kept;
        if (has_spares) {
            CHECK(world.pipeline->take_kept(0.0, true, &kept) && kept.buffer == nullptr);
        } else {
            CHECK_THROWS(std::runtime_error, world.pipeline->take_kept(0.0, true, &kept));
        }
        world.pipeline->drop_kept();
    }
}

TEST(kept_states_have_updates_wait_for_a_buffer)
{
    World world({.num_chunks = 3});
    step(world, 1);
    std::vector<char> buffer(3 * world.part);
    world.pipeline->keep_states({2, 1, 0});
    world.pipeline->lend_buffer(buffer.data());
    world.enqueue_all(2);
    world.pipeline->publish(2);
    KeptState kept;
    CHECK(world.pipeline->take_kept(kPatienceSecs, false, &kept));
    CHECK(kept.buffer == buffer.data());
    CHECK(!world.pipeline->wait_durable(2, 0.05));
    KeptState none;
    CHECK(!world.pipeline->take_kept(0.0, false, &none));
    CHECK(world.pipeline->take_kept(0.0, true, &none));  // whoever is read needs no buffer
    CHECK(none.chunk != kept.chunk && none.buffer == nullptr);
    CHECK(world.pipeline->wait_published(none.chunk, 2, kPatienceSecs));
    world.pipeline->release_kept(none.chunk);
    world.pipeline->drop_kept();
    world.finish(2);
    CHECK(world.state_is(1, -2.0F, 2.0F));
}

TEST(kept_states_have_nobody_wait_for_a_copier_that_is_slow)
{
    World world({.num_chunks = 5});
    step(world, 1);
    std::vector<char> buffer(3 * world.part);
    world.pipeline->keep_states({0, 1, 2, 3, 4});
    world.pipeline->lend_buffer(buffer.data());
    world.enqueue_all(2);
    world.pipeline->publish(2);
    KeptState kept;
    CHECK(world.pipeline->take_kept(kPatienceSecs, false, &kept));
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    CHECK(!world.pipeline->wait_durable(2, 0.0));
    world.pipeline->lend_buffer(buffer.data());
    world.finish(2);  // one takes the buffer, which does not come back
    CHECK(world.pipeline->take_kept(kPatienceSecs, false, &kept));
    CHECK(kept.buffer == buffer.data());
    CHECK(!world.pipeline->take_kept(0.0, false, &kept));
    for (int left = 3; left > 0; --left) {
        CHECK(world.pipeline->take_kept(kPatienceSecs, true, &kept) && kept.buffer == nullptr);
        world.pipeline->release_kept(kept.chunk);
    }
    CHECK(!world.pipeline->take_kept(0.0, true, &kept));
    world.pipeline->drop_kept();
}

// The copier comes when six steps have passed; a second one when none was copied of the first.
TEST(kept_states_in_three_slots_have_no_update_wait)
{
    for (const Place params : {Place::kDram, Place::kStorage}) {
        World world({.params = params, .num_slots = 3, .num_chunks = 4});
        std::vector<char> buffer(3 * world.part);
        world.pipeline->set_checksum(true);
        step(world, 1);
        for (const std::int64_t first : {2, 9}) {
            world.enqueue_all(first);
            world.pipeline->publish(first);
            world.pipeline->keep_states({0, 1, 2, 3});
            world.pipeline->lend_buffer(buffer.data());
            world.finish(first);
            for (std::int64_t generation = first + 1; generation < first + 6; ++generation) {
                world.enqueue_all(generation);  // as those of a step that is skipped, then again
                if (generation % 2 == 0) world.drop_all();
                if (generation % 2 == 0) world.enqueue_all(generation);
                world.pipeline->publish(generation);
                world.finish(generation);
                const float last = static_cast<float>(generation);
                CHECK(world.state_is(1, -last, last));
            }
            for (std::size_t i = 0; i < 4; ++i) {
                KeptState kept;
                CHECK(world.pipeline->take_kept(kPatienceSecs, true, &kept));
                CHECK(kept.buffer == nullptr && kept.chunk == i);
                std::vector<char> bytes(3 * world.part);
                world.read_file(world.state_range(i, kept.slot), bytes.data());
                CHECK(world.pipeline->kept_holds(i, bytes.data()));
                CHECK(world.all_equal(bytes.data(), -static_cast<float>(first)));
                world.pipeline->release_kept(i);
            }
            world.pipeline->drop_kept();
            step(world, first + 6);
        }
    }
}

// As of a checkpoint that fails: whatever waits for it goes on.
TEST(kept_states_are_dropped_at_any_time)
{
    for (const int num_slots : {1, 2, 3}) {
        World world({.num_slots = num_slots, .num_chunks = 7});
        std::vector<std::vector<char>> lent(2, std::vector<char>(3 * world.part));
        step(world, 1);
        for (std::int64_t generation = 2; generation < 26; ++generation) {
            world.pipeline->keep_states({6, 5, 4, 3, 2, 1, 0});
            for (std::vector<char>& buffer : lent) world.pipeline->lend_buffer(buffer.data());
            std::thread copier([&world, generation] {
                for (std::int64_t left = generation % 8; left > 0; --left) {
                    KeptState kept;
                    if (!world.pipeline->take_kept(0.01, left % 2 == 0, &kept)) continue;
                    if (kept.buffer != nullptr) {
                        world.pipeline->lend_buffer(kept.buffer);
                    } else if (left % 3 != 0) {  // else claimed, and never released
                        world.pipeline->release_kept(kept.chunk);
                    }
                }
                world.pipeline->drop_kept();
                world.pipeline->drop_kept();
            });
            step(world, generation);
            copier.join();
        }
        CHECK(world.state_is(0, -25.0F, 25.0F));
    }
}
