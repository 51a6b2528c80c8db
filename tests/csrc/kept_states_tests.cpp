// SPDX-License-Identifier: Apache-2.0
//
// States kept for a copier: taken once each, as they were, whatever updates do meanwhile.
#include <atomic>
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
            for (std::size_t left = times.size(); left > 0;) {
                KeptState kept;
                if (!world->pipeline->take_kept(0.05, &kept)) continue;
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
            world->pipeline->release_kept(kept.chunk);
        }
        return world->all_equal(bytes.data(), param) &&
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

}  // namespace

TEST(kept_states_are_those_of_their_generation_in_every_placement)
{
    for (const Place state : {Place::kStorage, Place::kDram}) {
        for (const int num_slots : {1, 2}) {
            for (const std::size_t num_lent : {0, 1, 3}) {
                World world({.state = state, .num_slots = num_slots, .num_chunks = 9});
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
    world.enqueue_all(4);                                                 // would write over them
    while (world.pipeline->wait_idle(0, 0.0)) std::this_thread::yield();  // until it is admitted
    world.drop_all();
    CHECK(world.pipeline->wait_idle(0, kPatienceSecs));
    CHECK(world.pipeline->wait_idle(2, kPatienceSecs));
    for (std::size_t i = 0; i < 3; ++i) {
        KeptState kept;
        CHECK(world.pipeline->take_kept(kPatienceSecs, &kept));
        CHECK(kept.chunk == i && !kept.is_wanted);
        world.pipeline->release_kept(kept.chunk);
    }
    KeptState none;
    CHECK(!world.pipeline->take_kept(0.0, &none));
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
    CHECK_THROWS(std::runtime_error, world.pipeline->take_kept(kPatienceSecs, &kept));
    world.pipeline->drop_kept();
}
