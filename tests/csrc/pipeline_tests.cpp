// SPDX-License-Identifier: Apache-2.0
//
// Generations of chunks through real files: what is published, what is durable, what is dropped.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <map>
#include <optional>
#include <thread>

#include "harness.h"
#include "pipeline_fixture.h"

using namespace fixture;

namespace {

constexpr std::uint16_t kHalfMinusOne = 0xBC00, kHalfMinusTwo = 0xC000, kHalfMinusThree = 0xC200,
                        kHalfOne = 0x3C00, kHalfTwo = 0x4000;

// Runs `count` generations with the generation as multiplier; P32 is then minus their sum.
void run_generations(World& world, std::int64_t count)
{
    float sum = 0.0F;
    for (std::int64_t generation = 1; generation <= count; ++generation) {
        sum += static_cast<float>(generation);
        world.enqueue_all(generation, static_cast<float>(generation));
        world.pipeline->publish(generation);
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            CHECK(world.pipeline->wait_published(chunk, generation, kPatienceSecs));
            if (world.given.params == Place::kDram) {
                CHECK(world.params[chunk].front() == -sum && world.params[chunk].back() == -sum);
            }
        }
        world.finish(generation);
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            CHECK(world.state_is(chunk, -sum, static_cast<float>(generation)));
            CHECK(world.pipeline->wait_gradient_read(chunk, generation, kPatienceSecs));
            CHECK(world.pipeline->wait_idle(chunk, 0.0));
        }
    }
    CHECK(world.staging->used_bytes() == 0);
}

}  // namespace

TEST(pipeline_generations_in_every_placement)
{
    for (const Backing& backend : backends()) {
        for (int placement = 0; placement < 24; ++placement) {
            WorldOptions wanted;
            wanted.moments = static_cast<MomentType>(placement / 8);
            wanted.backend = backend;
            wanted.state = (placement & 1) != 0 ? Place::kStorage : Place::kDram;
            wanted.params = (placement & 2) != 0 ? Place::kStorage : Place::kDram;
            wanted.gradients = (placement & 4) != 0 ? Place::kStorage : Place::kDram;
            World world(wanted);
            if (wanted.gradients == Place::kStorage) {
                for (std::size_t i = 0; i < wanted.num_chunks; ++i)
                    world.store_gradient(i, kHalfOne);
            }
            run_generations(world, 4);
        }
    }
}

TEST(pipeline_spare_block_of_a_state_in_memory)
{
    for (int placement = 0; placement < 12; ++placement) {
        WorldOptions wanted;
        wanted.state = Place::kDram;
        wanted.has_spares = true;
        wanted.moments = static_cast<MomentType>(placement / 4);
        wanted.params = (placement & 1) != 0 ? Place::kStorage : Place::kDram;
        wanted.gradients = (placement & 2) != 0 ? Place::kStorage : Place::kDram;
        World world(wanted);
        if (wanted.gradients == Place::kStorage) {
            for (std::size_t i = 0; i < wanted.num_chunks; ++i) world.store_gradient(i, kHalfOne);
        }
        run_generations(world, 3);  // P32 is -6 then, and all have changed places three times
        const char* const before = world.pipeline->resident_state(0);

        world.enqueue_all(4, 4.0F);  // and nobody publishes it
        for (std::size_t i = 0; i < wanted.num_chunks; ++i)
            CHECK(world.pipeline->wait_gradient_read(i, 4, kPatienceSecs));
        for (std::size_t i = 0; i < wanted.num_chunks; ++i)
            CHECK(world.state_is(i, -6.0F, 3.0F) && world.pipeline->resident_state(0) == before);
        world.drop_all();
        for (std::size_t i = 0; i < wanted.num_chunks; ++i)
            CHECK(world.pipeline->wait_idle(i, kPatienceSecs) && world.state_is(i, -6.0F, 3.0F));

        world.enqueue_all(4, 2.0F);
        world.pipeline->publish(4);
        for (std::size_t i = 0; i < wanted.num_chunks; ++i) {
            CHECK(world.pipeline->wait_published(i, 4, kPatienceSecs));
            CHECK(world.pipeline->wait_idle(i, kPatienceSecs));
            CHECK(world.state_is(i, -8.0F, 4.0F));
        }
        CHECK(world.pipeline->resident_state(0) != before);
    }
}

TEST(pipeline_one_slot_and_one_chunk_of_staging)
{
    WorldOptions wanted;
    wanted.num_slots = 1;
    wanted.staging_chunks = 1;
    World world(wanted);
    run_generations(world, 3);
    CHECK(world.pipeline->slot(0) == 0);
}

TEST(pipeline_refuses_a_chunk_that_staging_cannot_hold)
{
    World world({});
    ChunkSpec large;
    large.whole = large.in_memory = large.stored = whole_layout(1 << 20);
    large.state_slots[0] = {world.state_range(0, 0)};
    CHECK_THROWS(std::invalid_argument, world.pipeline->add_chunk(large));
}

TEST(pipeline_speculated_updates_show_only_when_published)
{
    World world({.staging_chunks = 5});
    world.enqueue_all(1);
    while (world.pipeline->stats().num_updates < world.given.num_chunks) std::this_thread::yield();
    CHECK(!world.pipeline->is_published(0, 1));
    CHECK(!world.pipeline->wait_published(0, 1, 0.01));
    CHECK(world.state_is(0, 0.0F, 0.0F) || world.pipeline->slot(0) == 0);
    world.pipeline->publish(1);
    world.finish(1);
    CHECK(world.pipeline->slot(0) == 1);
    CHECK(world.state_is(0, -1.0F, 1.0F));
}

TEST(pipeline_dropped_updates_leave_the_old_state_and_are_redone)
{
    World world({});
    run_generations(world, 1);
    for (int attempt = 0; attempt < 3; ++attempt) {
        world.enqueue_all(2, 7.0F);
        if (attempt == 1) CHECK(!world.pipeline->wait_published(4, 2, 0.01));
        world.drop_all();
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            CHECK(world.state_is(chunk, -1.0F, 1.0F));
            CHECK(world.pipeline->wait_gradient_read(chunk, 2, kPatienceSecs));
        }
    }
    world.enqueue_all(2, 1.0F);
    world.pipeline->publish(2);
    world.finish(2);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        CHECK(world.state_is(chunk, -2.0F, 2.0F));
    }
    CHECK(world.pipeline->stats().num_discarded == 3 * world.given.num_chunks);
}

TEST(pipeline_some_chunks_kept_others_redone)
{
    World world({});
    world.enqueue_all(1, 3.0F);
    for (const std::size_t chunk : {1U, 3U}) world.pipeline->invalidate(chunk);
    world.pipeline->publish(1);
    for (const std::size_t chunk : {1U, 3U}) world.pipeline->enqueue(world.update(chunk, 1, 2.0F));
    world.finish(1);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        CHECK(world.state_is(chunk, chunk % 2 == 1 ? -2.0F : -3.0F, 1.0F));
        CHECK(world.pipeline->is_published(chunk, 1));
    }
}

TEST(pipeline_writes_wait_for_the_commit_of_the_generation_before)
{
    World world({.staging_chunks = 5});
    world.enqueue_all(1);
    world.pipeline->publish(1);
    CHECK(world.pipeline->wait_durable(1, kPatienceSecs));  // durable, but no record yet
    world.enqueue_all(2);
    world.pipeline->publish(2);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        CHECK(world.pipeline->wait_published(chunk, 2, kPatienceSecs));  // readers do not wait
    }
    CHECK(!world.pipeline->wait_durable(2, 0.05));
    std::vector<char> old(3 * world.part);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        world.read_file(world.state_range(chunk, 0), old.data());
        CHECK(world.all_equal(old.data(), 0.0F));  // what the last record names
    }
    world.pipeline->set_committed(1);
    world.finish(2);
    CHECK(world.state_is(0, -2.0F, 2.0F));
    CHECK(world.pipeline->slot(0) == 0);
}

TEST(pipeline_hands_p16_over_before_it_is_written)
{
    World world({.params = Place::kStorage, .staging_chunks = 5});
    const std::uint64_t half = world.short_part / 2;  // a page of it, the end of the chunk in it
    std::vector<std::uint16_t> halves(world.short_part / 2);
    char* memory = reinterpret_cast<char*>(halves.data());
    CHECK(!world.pipeline->copy_updated(0, 0, half, memory));
    world.enqueue_all(1);
    while (world.pipeline->stats().num_updates < world.given.num_chunks) std::this_thread::yield();
    CHECK(!world.pipeline->is_updated(0, 1));  // it may be dropped still
    CHECK(!world.pipeline->copy_updated(0, 0, half, memory));
    world.pipeline->publish(1);
    CHECK(world.pipeline->wait_durable(1, kPatienceSecs));  // durable, but no record yet
    CHECK(!world.pipeline->copy_updated(0, 0, half, memory));
    world.enqueue_all(2);
    world.pipeline->publish(2);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        CHECK(world.pipeline->wait_updated(chunk, 2, kPatienceSecs));
        CHECK(!world.pipeline->is_published(chunk, 2));
        std::fill(halves.begin(), halves.end(), kHalfOne);
        CHECK(world.pipeline->copy_updated(chunk, half, half, memory));
        for (std::uint64_t i = 0; i < halves.size(); ++i) {
            const std::uint64_t at = half / 2 + i;  // elements of the chunk
            const std::uint16_t wanted = i >= half / 2            ? kHalfOne
                                         : at < world.given.numel ? kHalfMinusTwo
                                                                  : 0;
            CHECK(halves[i] == wanted);
        }
        CHECK_THROWS(std::invalid_argument,
                     world.pipeline->copy_updated(chunk, half, world.short_part, memory));
    }
    CHECK(world.staging->used_bytes() > 0);
    world.pipeline->set_committed(1);
    world.finish(2);
    CHECK(!world.pipeline->copy_updated(0, 0, half, memory));
    CHECK(world.stored_param_is(0, kHalfMinusTwo));
    CHECK(world.staging->used_bytes() == 0);
}

// What copy_updated() gives of a chunk, all of whose elements are the same; none if it gives
// nothing.
std::optional<std::uint16_t> copied_param(World& world, std::size_t chunk)
{
    std::vector<std::uint16_t> halves(world.short_part / 2, kHalfOne);
    char* const memory = reinterpret_cast<char*>(halves.data());
    if (!world.pipeline->copy_updated(chunk, 0, world.short_part, memory)) return std::nullopt;
    const auto end = halves.begin() + static_cast<std::ptrdiff_t>(world.given.numel);
    CHECK(std::all_of(halves.begin(), end, [&](auto half) { return half == halves[0]; }));
    return halves[0];
}

std::size_t num_copied(World& world, std::uint16_t half)
{
    std::size_t num = 0;
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk)
        num += copied_param(world, chunk) == half ? 1 : 0;
    return num;
}

TEST(pipeline_hands_p16_over_until_its_memory_is_needed)
{
    World world(
        {.state = Place::kDram, .params = Place::kStorage, .num_chunks = 20, .has_spares = true});
    ChunkPipeline& pipeline = *world.pipeline;
    const std::size_t most = world.staging->capacity_bytes() / world.short_part;  // are left
    CHECK(most < world.given.num_chunks);
    world.enqueue_all(1);
    CHECK(num_copied(world, kHalfMinusOne) == 0);
    pipeline.publish(1);
    world.finish(1);
    CHECK(world.staging->used_bytes() == 0);
    CHECK(num_copied(world, kHalfMinusOne) == most);
    CHECK(num_copied(world, kHalfMinusOne) == most);  // as often as one likes
    CHECK(world.staging->used_bytes() == 0);
    const auto last_copied = [&world] {
        std::size_t chunk = world.given.num_chunks - 1;
        while (!copied_param(world, chunk)) --chunk;
        return chunk;
    };
    CHECK_THROWS(std::invalid_argument,
                 pipeline.copy_updated(last_copied(), 0, std::uint64_t{99} << 20, nullptr));

    // Written, and not published: it is not what can be had, also not if it is dropped.
    const std::size_t dropped = last_copied();
    const std::uint64_t num_updates = pipeline.stats().num_updates;
    pipeline.enqueue(world.update(dropped, 2));
    while (pipeline.stats().num_updates == num_updates || world.staging->used_bytes() > 0)
        std::this_thread::yield();
    CHECK(copied_param(world, dropped) != kHalfMinusTwo);
    CHECK(num_copied(world, kHalfMinusOne) >= most - 1);
    pipeline.invalidate(dropped);
    CHECK(pipeline.wait_idle(dropped, kPatienceSecs));
    CHECK(copied_param(world, dropped) != kHalfMinusTwo);

    world.enqueue_all(2);
    pipeline.publish(2);
    world.finish(2);
    CHECK(num_copied(world, kHalfMinusTwo) == most);
    const std::size_t edited = last_copied();
    pipeline.params_edited(edited);
    CHECK(!copied_param(world, edited));
    const std::size_t placed = last_copied();
    pipeline.set_places(placed, world.spec(placed));
    CHECK(!copied_param(world, placed));
    const std::size_t replaced = last_copied();
    pipeline.replace_state(replaced, world.resident[replaced].data(), true);
    CHECK(!copied_param(world, replaced));
    CHECK(num_copied(world, kHalfMinusTwo) == most - 3);

    AlignedPool other(world.staging->capacity_bytes());
    pipeline.set_staging(&other);
    CHECK(num_copied(world, kHalfMinusTwo) == 0);
    world.enqueue_all(3);
    pipeline.publish(3);
    world.finish(3);
    CHECK(num_copied(world, kHalfMinusThree) == most);
    char* const all = other.try_allocate(other.capacity_bytes());
    CHECK(all != nullptr);
    CHECK(num_copied(world, kHalfMinusThree) == 0);
    other.release(all);
    pipeline.set_staging(world.staging.get());
}

TEST(pipeline_leaves_no_p16_beside_states)
{
    World world({.params = Place::kStorage});
    world.enqueue_all(1);
    world.pipeline->publish(1);
    world.finish(1);
    CHECK(num_copied(world, kHalfMinusOne) == 0);
}

// No write ends until the engine's faults are cleared.
void hold_writes(World& world)
{
    IoFault hold;
    hold.kind = IoKind::kWrite;
    hold.effect = IoFault::Effect::kHold;
    hold.count = world.given.num_chunks;
    world.engine->add_fault(hold);
}

// The first `num` chunks, of which nothing but P16 is made, leave it in staging: all of them.
void leave_params(World& world, std::size_t num)
{
    for (std::size_t chunk = 0; chunk < num; ++chunk)
        world.pipeline->enqueue(world.update(chunk, 1));
    for (std::size_t chunk = 0; chunk < num; ++chunk)
        CHECK(world.pipeline->wait_published(chunk, 1, kPatienceSecs));
}

TEST(pipeline_updates_that_only_make_p16_spare_what_forward_has_yet_to_take)
{
    World world(
        {.state = Place::kDram, .params = Place::kStorage, .num_chunks = 40, .staging_chunks = 4});
    const std::size_t all = world.staging->capacity_bytes() / world.short_part;
    const std::size_t most = world.staging->capacity_bytes() / 4 / world.short_part;
    CHECK(most > 4 && all + most + 2 < world.given.num_chunks);
    world.pipeline->publish(1);
    leave_params(world, all);
    hold_writes(world);
    for (std::size_t chunk = all; chunk < world.given.num_chunks; ++chunk)
        world.pipeline->enqueue(world.update(chunk, 1));
    const auto num_updated = [&world, all](std::size_t wanted) {
        while (world.pipeline->stats().num_updates < all + wanted) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        return world.pipeline->stats().num_updates - all;
    };
    CHECK(num_updated(most) == most);  // it may be that no forward comes
    CHECK(num_copied(world, kHalfMinusOne) >= all);
    CHECK(num_updated(world.given.num_chunks - all) == world.given.num_chunks - all);
    world.engine->clear_faults();
    world.finish(1);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk)
        CHECK(world.stored_param_is(chunk, kHalfMinusOne));
    world.enqueue_all(2);  // what an older step left is spared by none
    world.pipeline->publish(2);
    world.finish(2);
    CHECK(num_copied(world, kHalfMinusTwo) == all);
}

TEST(pipeline_updates_that_only_make_p16_use_all_memory_where_nothing_is_left)
{
    World world({.state = Place::kDram, .params = Place::kStorage, .num_chunks = 40});
    const std::size_t all = world.staging->capacity_bytes() / world.short_part;
    world.pipeline->publish(1);
    hold_writes(world);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk)
        world.pipeline->enqueue(world.update(chunk, 1));
    CHECK(world.pipeline->wait_updated(all - 1, 1, kPatienceSecs));
    world.engine->clear_faults();
    world.finish(1);
}

TEST(pipeline_states_on_storage_are_read_ahead_of_p16_that_waits)
{
    World world({.params = Place::kStorage, .num_chunks = 24, .num_in_memory = 23});
    const std::size_t last = world.given.num_chunks - 1;
    world.pipeline->publish(1);
    const std::size_t num_left = world.staging->capacity_bytes() / world.short_part;
    leave_params(world, num_left);
    hold_writes(world);
    for (std::size_t chunk = num_left; chunk <= last; ++chunk)
        world.pipeline->enqueue(world.update(chunk, 1));
    CHECK(world.pipeline->wait_updated(last, 1, kPatienceSecs));
    CHECK(!world.pipeline->is_updated(last - 1, 1));
    world.engine->clear_faults();
    world.finish(1);
    for (std::size_t chunk = 0; chunk <= last; ++chunk)
        CHECK(world.stored_param_is(chunk, kHalfMinusOne));
}

// Chunks of which a forward took nothing, and which no later step updates.
TEST(pipeline_spares_nothing_that_the_forward_before_did_not_take)
{
    World world({.state = Place::kDram, .params = Place::kStorage, .num_chunks = 40});
    const std::size_t all = world.staging->capacity_bytes() / world.short_part;
    world.pipeline->publish(1);
    for (std::size_t chunk = 0; chunk < all; ++chunk)
        world.pipeline->enqueue(world.update(chunk, 1));
    world.finish(1);
    world.pipeline->publish(2);
    hold_writes(world);
    for (std::size_t chunk = all; chunk < 2 * all; ++chunk)
        world.pipeline->enqueue(world.update(chunk, 2));
    CHECK(world.pipeline->wait_updated(2 * all - 1, 2, kPatienceSecs));
    world.engine->clear_faults();
    world.finish(2);
}

// Updates that wait for what forward has yet to take go on as soon as it will not: the writes of
// four of them are held.
TEST(pipeline_updates_go_on_when_nothing_is_spared)
{
    enum class End { kPublished, kPut, kDropped };
    for (const End end : {End::kPublished, End::kPut, End::kDropped}) {
        World world({.state = Place::kDram,
                     .params = Place::kStorage,
                     .num_chunks = 19,
                     .has_spares = true});
        const std::size_t all = world.staging->capacity_bytes() / world.short_part;
        CHECK(all == 13);
        const std::int64_t generation = end == End::kDropped ? 2 : 1;
        world.pipeline->publish(1);
        world.pipeline->set_committed(1);
        for (std::size_t chunk = 0; chunk < all; ++chunk)
            world.pipeline->enqueue(world.update(chunk, generation));
        while (world.pipeline->stats().num_updates < all || world.staging->used_bytes() > 0)
            std::this_thread::yield();
        hold_writes(world);
        const std::int64_t next = end == End::kPublished ? 2 : generation;
        for (std::size_t chunk = all; chunk < world.given.num_chunks; ++chunk)
            world.pipeline->enqueue(world.update(chunk, next));
        while (world.pipeline->stats().num_updates < all + 4) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        CHECK(world.pipeline->stats().num_updates == all + 4);
        if (end == End::kPublished) world.pipeline->publish(2);
        for (std::size_t chunk = 0; chunk < all && end != End::kPublished; ++chunk)
            end == End::kPut ? world.pipeline->params_edited(chunk)
                             : world.pipeline->invalidate(chunk);
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(100);
        while (world.pipeline->stats().num_updates < world.given.num_chunks &&
               std::chrono::steady_clock::now() < until)
            std::this_thread::yield();
        CHECK(world.pipeline->stats().num_updates == world.given.num_chunks);
        world.engine->clear_faults();
    }
}

// Written before publication, and dropped: nobody will take it.
TEST(pipeline_spares_nothing_that_was_dropped)
{
    World world(
        {.state = Place::kDram, .params = Place::kStorage, .num_chunks = 13, .has_spares = true});
    for (int round = 0; round < 3; ++round) {
        world.enqueue_all(1);
        while (world.pipeline->stats().num_updates < (round + 1) * world.given.num_chunks ||
               world.staging->used_bytes() > 0)
            std::this_thread::yield();
        world.drop_all();
    }
    const std::uint64_t num_bytes = world.staging->capacity_bytes();
    char* const all = world.staging->try_allocate_beside_wanted(num_bytes);
    CHECK(all != nullptr);
    world.staging->release(all);
}

// Its write ends when the next step is published already: the forward that would take it is over.
TEST(pipeline_spares_nothing_that_is_written_after_the_next_publication)
{
    World world({.state = Place::kDram, .params = Place::kStorage, .num_chunks = 1});
    world.pipeline->publish(1);
    hold_writes(world);
    world.enqueue_all(1);
    CHECK(world.pipeline->wait_updated(0, 1, kPatienceSecs));
    world.pipeline->publish(2);
    world.enqueue_all(2);
    world.engine->clear_faults();
    world.finish(1);
    world.finish(2);
    CHECK(copied_param(world, 0) == kHalfMinusTwo);  // taken
    const std::uint64_t num_bytes = world.staging->capacity_bytes();
    char* const all = world.staging->try_allocate_beside_wanted(num_bytes);
    CHECK(all != nullptr);
    if (all != nullptr) world.staging->release(all);
}

// A split state comes to memory. Of P16, which stays on storage, a copy is under way when its write
// ends: the state is in the begin of its staging memory.
TEST(pipeline_leaves_no_state_that_has_moved)
{
    World world(
        {.params = Place::kStorage, .num_chunks = 1, .numel = 4 << 20, .masters = Masters::kSplit});
    ChunkSpec places = world.spec(0);
    places.state_slots = {};
    places.resident_state = world.resident[0].data();
    world.pipeline->set_destination(0, places);
    world.pipeline->publish(1);
    hold_writes(world);
    world.enqueue_all(1);
    CHECK(world.pipeline->wait_updated(0, 1, kPatienceSecs));
    std::atomic<bool> is_over{false};
    std::thread copier([&] {
        while (!is_over) copied_param(world, 0);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    world.engine->clear_faults();
    world.finish(1);
    is_over = true;
    copier.join();
    CHECK(copied_param(world, 0).value_or(kHalfMinusOne) == kHalfMinusOne);
    CHECK(world.stored_param_is(0, kHalfMinusOne));
}

// A copy under way keeps the memory when the write ends, and leaves it then.
TEST(pipeline_hands_p16_over_that_was_copied_while_its_write_ended)
{
    World world(
        {.state = Place::kDram, .params = Place::kStorage, .num_chunks = 1, .numel = 4 << 20});
    for (const bool is_replaced : {false, true}) {
        const std::int64_t generation = is_replaced ? 2 : 1;
        const std::uint16_t half = is_replaced ? kHalfMinusTwo : kHalfMinusOne;
        world.pipeline->publish(generation);
        hold_writes(world);
        world.enqueue_all(generation);
        CHECK(world.pipeline->wait_updated(0, generation, kPatienceSecs));
        std::atomic<bool> is_over{false};
        std::thread copier([&] {
            while (!is_over) CHECK(copied_param(world, 0).value_or(half) == half);
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        world.engine->clear_faults();
        world.finish(generation);
        is_over = true;
        if (is_replaced) world.pipeline->replace_state(0, world.resident[0].data(), true);
        copier.join();
        CHECK(copied_param(world, 0) == (is_replaced ? std::nullopt : std::optional(half)));
        CHECK(world.staging->used_bytes() == 0);
    }
}

TEST(pipeline_hands_no_p16_over_that_was_replaced_while_it_was_copied)
{
    World world(
        {.state = Place::kDram, .params = Place::kStorage, .num_chunks = 1, .numel = 4 << 20});
    for (std::int64_t generation = 1; generation <= 4; ++generation) {
        world.pipeline->publish(generation);
        world.enqueue_all(generation);
        world.finish(generation);
        std::thread copier([&] { copied_param(world, 0); });
        std::this_thread::sleep_for(std::chrono::microseconds(500 * generation));
        world.pipeline->replace_state(0, world.resident[0].data(), true);
        copier.join();
        CHECK(!copied_param(world, 0));
        CHECK(world.staging->used_bytes() == 0);
    }
}

// P16 comes to memory by a move: what is asked between the update's end and the job's.
TEST(pipeline_hands_no_old_p16_over_while_it_moves_to_memory)
{
    World world({.state = Place::kDram, .params = Place::kStorage, .has_spares = true});
    world.enqueue_all(1);
    world.pipeline->publish(1);
    CHECK(world.pipeline->wait_durable(1, kPatienceSecs));
    const std::size_t chunk = world.given.num_chunks - 1;
    CHECK(copied_param(world, chunk) == kHalfMinusOne);
    std::vector<std::uint16_t> memory(world.short_part / 2);
    ChunkSpec to = world.spec(chunk);
    to.param_slots = {};
    to.param_memory = {reinterpret_cast<char*>(memory.data()), nullptr};
    world.pipeline->publish(2);
    world.pipeline->set_destination(chunk, to);
    world.pipeline->enqueue(world.update(chunk, 2));
    CHECK(world.pipeline->wait_published(chunk, 2, kPatienceSecs));
    CHECK(!copied_param(world, chunk) && memory[0] == kHalfMinusTwo);
    world.pipeline->set_committed(1);
    CHECK(world.pipeline->wait_moved(chunk, kPatienceSecs));
    CHECK(!copied_param(world, chunk));
}

// Whoever copies keeps the memory of an update whose write ends meanwhile.
TEST(pipeline_hands_p16_over_while_it_is_written)
{
    World world({.params = Place::kStorage, .num_chunks = 3, .numel = 300000});
    IoFault hold;  // of the first write of chunk 0: it is copied before
    hold.kind = IoKind::kWrite;
    hold.effect = IoFault::Effect::kHold;
    hold.offset_begin = world.state_range(0, 1).offset;
    hold.offset_end = hold.offset_begin + 1;
    world.engine->add_fault(hold);
    std::vector<std::uint16_t> halves(world.short_part / 2);
    float sum = 0.0F;
    std::uint64_t num_copied = 0;
    for (std::int64_t generation = 1; generation <= 40; ++generation) {
        const float sign = generation % 2 == 1 ? 1.0F : -1.0F;  // P16 is -1 and 0 in turn
        sum += sign;
        world.enqueue_all(generation, sign);
        world.pipeline->publish(generation);
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            CHECK(world.pipeline->wait_updated(chunk, generation, kPatienceSecs));
            const bool is_copied = world.pipeline->copy_updated(
                chunk, 0, world.short_part, reinterpret_cast<char*>(halves.data()));
            if (!is_copied)
                world.read_file(world.param_range(chunk, world.pipeline->slot(chunk)),
                                reinterpret_cast<char*>(halves.data()));
            num_copied += is_copied ? 1 : 0;
            if (num_copied == 1) world.engine->clear_faults();
            for (std::uint64_t i = 0; i < world.given.numel; ++i)
                if (halves[i] != (sum == 1.0F ? kHalfMinusOne : 0)) {
                    CHECK(false);
                    break;
                }
        }
        world.finish(generation);
    }
    CHECK(num_copied > 0);
    CHECK(world.staging->used_bytes() == 0);
}

TEST(pipeline_a_second_update_of_a_generation_is_refused)
{
    World world({});
    world.pipeline->enqueue(world.update(0, 1));
    while (!world.pipeline->wait_gradient_read(0, 1, kPatienceSecs)) {
    }
    CHECK_THROWS(std::logic_error, world.pipeline->enqueue(world.update(0, 1)));
    world.pipeline->enqueue(world.update(0, 2));  // waits for the first to end
    CHECK(world.pipeline->wait_gradient_read(0, 1, 0.0));
    CHECK_THROWS(std::logic_error, world.pipeline->enqueue(world.update(0, 2)));
    CHECK_THROWS(std::logic_error,
                 world.pipeline->release(1, {}, 1.0F, nullptr, ElementType::kFloat32, 0));
}

TEST(pipeline_held_updates_read_ahead_and_run_when_released)
{
    World world({});
    for (std::int64_t generation = 1; generation <= 3; ++generation) {
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            ChunkUpdate held = world.update(chunk, generation);
            held.held = true;
            held.gradient = nullptr;
            held.segments.clear();
            world.pipeline->enqueue(std::move(held));
        }
        if (generation == 2) CHECK(!world.pipeline->wait_durable(2, 0.01));
        if (generation == 3) world.pipeline->invalidate(2);
        world.pipeline->publish(generation);
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            ChunkUpdate now = world.update(chunk, generation);
            if (generation == 3 && chunk == 2) continue;
            world.pipeline->release(chunk, now.segments, 2.0F, now.gradient, now.gradient_type, 1);
        }
        world.finish(generation);
    }
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        const float steps = chunk == 2 ? 2.0F : 3.0F;
        CHECK(world.state_is(chunk, -2.0F * steps, steps));
        CHECK(world.params[world.given.num_chunks + chunk].back() == -2.0F * steps);
        CHECK(world.params[chunk].back() == -1.0F);  // the other version is not touched
    }
}

namespace {

constexpr double kSlowSecsEach = 1e-3 / 2048;

class SlowRule final : public UpdateRule {
  public:
    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // of 2048 elements
        CountingRule().apply(param, grad, moments, numel);
    }
};

struct Contest {
    double storage_bytes_per_sec = 1e6;  // a chunk moves in more time than all are updated
    std::shared_ptr<UpdateRule> rule = std::make_shared<CountingRule>();
    std::size_t num_loaded = 2;  // staging memory holds so many; two more wait for it
    bool may_write = true;       // the generation before is committed
    std::int64_t num_fast = 0;   // generations before, with storage as fast as may be
    std::int64_t num_slow = 1;   // and behind these as it is from then on; now both rates are known
};

constexpr std::size_t kInMemory = 12;

// Updates of states in memory, and of later chunks on storage: the order in which they run.
std::vector<std::size_t> order_of_updates(const Contest& given)
{
    World world({.num_chunks = kInMemory + given.num_loaded + 2,
                 .num_in_memory = kInMemory,
                 .numel = 20'000,
                 .staging_chunks = given.num_loaded});
    const auto update = [&](std::size_t chunk, std::int64_t generation) {
        ChunkUpdate made = world.update(chunk, generation);
        made.segments.front().rule = given.rule;
        return made;
    };
    const std::int64_t last = given.num_fast + given.num_slow;
    double rate = given.num_fast > 0 ? 0.0 : given.storage_bytes_per_sec;
    for (std::int64_t generation = 1; generation <= last; ++generation) {
        if (generation == given.num_fast + 1 && given.num_fast > 0) {
            // Where others slow the updates storage is slower by as much.
            const PipelineStats stats = world.pipeline->stats();
            const double secs_each =
                stats.update_busy_secs / static_cast<double>(stats.num_updated_elements);
            rate = given.storage_bytes_per_sec / std::max(1.0, secs_each / kSlowSecsEach);
        }
        world.engine->set_throttle(rate, rate);
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk)
            world.pipeline->enqueue(update(chunk, generation));
        world.pipeline->publish(generation);
        CHECK(world.pipeline->wait_durable(generation, kPatienceSecs));
        if (generation < last || given.may_write) world.pipeline->set_committed(generation);
    }
    CHECK(world.pipeline->stats().num_elements_left == 0);
    CHECK(world.pipeline->stats().num_bytes_left == 0);
    world.pipeline->set_tracing(true);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        ChunkUpdate held = update(chunk, last + 1);
        held.held = true;
        world.pipeline->enqueue(std::move(held));
    }
    std::vector<LaneEvent> events;
    const auto did = [&](int lane) {  // chunks, in order
        for (const LaneEvent& event : world.pipeline->take_events()) events.push_back(event);
        std::vector<std::size_t> found;
        for (const LaneEvent& event : events)
            if (event.lane == lane) found.push_back(event.chunk);
        return found;
    };
    const auto wait_for = [&](std::size_t num, int lane) {
        for (int waited = 0; did(lane).size() < num; ++waited) {
            if (waited > 1000 * kPatienceSecs) throw std::runtime_error("not done in time");
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    };
    wait_for(given.num_loaded, 0);
    world.pipeline->publish(last + 1);
    const auto release = [&](std::size_t chunk, const std::shared_ptr<UpdateRule>& rule) {
        ChunkUpdate now = update(chunk, last + 1);
        now.segments.front().rule = rule;
        world.pipeline->release(chunk, now.segments, 1.0F, now.gradient, now.gradient_type, 0);
    };
    // The first one runs until all are ready: what goes ahead does so for no want of others.
    const auto gate = std::make_shared<GatedRule>();
    release(0, gate);
    gate->wait_begun();
    for (std::size_t chunk = 1; chunk < world.given.num_chunks; ++chunk) release(chunk, given.rule);
    gate->open();
    wait_for(kInMemory + 2, 1);
    world.pipeline->set_committed(last);
    world.finish(last + 1);
    CHECK(world.pipeline->stats().num_elements_left == 0);
    CHECK(world.pipeline->stats().num_bytes_left == 0);
    const std::vector<std::size_t> updated = did(1);
    CHECK(updated.size() == world.given.num_chunks);
    const auto steps = static_cast<float>(last + 1);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk)
        CHECK(world.state_is(chunk, -steps, steps));
    return updated;
}

// How many loaded ones were updated ahead of the last one in memory.
std::size_t num_ahead(const std::vector<std::size_t>& updated)
{
    const auto last = std::find_if(updated.rbegin(), updated.rend(),
                                   [](std::size_t chunk) { return chunk < kInMemory; });
    return static_cast<std::size_t>(
        std::count_if(last, updated.rend(), [](std::size_t chunk) { return chunk >= kInMemory; }));
}

}  // namespace

TEST(pipeline_a_loaded_update_goes_ahead_where_storage_ends_last)
{
    CHECK(num_ahead(order_of_updates({})) > 0);
}

TEST(pipeline_no_more_loaded_updates_go_ahead_than_keep_storage_busy)
{
    Contest contest;
    contest.num_loaded = 8;
    const std::size_t num = num_ahead(order_of_updates(contest));
    CHECK(num > 0);
    CHECK(num <= 5);  // three, and what a slow machine writes meanwhile
}

TEST(pipeline_updates_run_by_deadline_where_they_end_last)
{
    Contest contest;
    contest.storage_bytes_per_sec = 0.0;  // as fast as may be
    contest.rule = std::make_shared<SlowRule>();
    CHECK(num_ahead(order_of_updates(contest)) == 0);
}

TEST(pipeline_a_loaded_update_that_may_not_be_written_keeps_its_place)
{
    Contest contest;
    contest.may_write = false;
    contest.rule = std::make_shared<SlowRule>();
    CHECK(num_ahead(order_of_updates(contest)) == 0);
}

TEST(pipeline_a_pace_is_that_of_late)
{
    fuyou::Pace pace;
    CHECK(!pace.is_known());
    pace.add(1.0, 100.0);
    CHECK(pace.secs_of(50.0) == 0.5);
    for (int step = 0; step < 3; ++step) {
        pace.fade();
        pace.add(4.0, 100.0);
    }
    CHECK(pace.secs_of(100.0) > 3.5);  // since the start: 3.25
}

// By rates since the start half of those in memory would come before it.
TEST(pipeline_a_drive_that_became_slow_is_believed_after_a_few_steps)
{
    Contest contest;
    contest.rule = std::make_shared<SlowRule>();
    contest.storage_bytes_per_sec = 5e6;  // all that is left moves in twice the time of all updates
    contest.num_fast = 12;
    contest.num_slow = 3;
    bool is_early = false;
    for (int trial = 0; trial < 3 && !is_early; ++trial) {  // others may slow the updates
        const std::vector<std::size_t> updated = order_of_updates(contest);
        const auto first = std::find_if(updated.begin(), updated.end(),
                                        [](std::size_t chunk) { return chunk >= kInMemory; });
        is_early = first - updated.begin() <= 3;
    }
    CHECK(is_early);
}

TEST(pipeline_held_updates_take_their_gradients_from_storage)
{
    World world({.params = Place::kStorage, .gradients = Place::kStorage});
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        ChunkUpdate held = world.update(chunk, 1);
        held.held = true;
        world.pipeline->enqueue(std::move(held));
    }
    // The gradients become final after the state was read ahead.
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        world.store_gradient(chunk, kHalfOne);
    }
    world.pipeline->publish(1);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        const ChunkUpdate now = world.update(chunk, 1);
        world.pipeline->release(chunk, now.segments, 1.0F, nullptr, now.gradient_type, 0);
    }
    world.finish(1);
    for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
        CHECK(world.state_is(chunk, -1.0F, 1.0F));
        CHECK(world.stored_param_is(chunk, kHalfMinusOne));
    }
}

TEST(pipeline_gradient_memory_can_be_taken_back)
{
    for (int attempt = 0; attempt < 20; ++attempt) {
        World world({.gradients = Place::kStorage});
        std::vector<std::uint16_t> halves(world.given.numel, kHalfTwo);
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            world.store_gradient(chunk, kHalfTwo);
            ChunkUpdate update = world.update(chunk, 1);
            update.gradient = reinterpret_cast<const char*>(halves.data());
            world.pipeline->enqueue(std::move(update));
        }
        if (attempt % 2 == 1) CHECK(world.pipeline->wait_gradient_read(0, 1, kPatienceSecs));
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            world.pipeline->read_gradient_from_storage(
                chunk, reinterpret_cast<const char*>(halves.data()));
        }
        std::fill(halves.begin(), halves.end(), kHalfOne);  // nobody reads it any more
        world.pipeline->publish(1);
        world.finish(1);
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            CHECK(world.state_is(chunk, -2.0F, 1.0F));
        }
    }
}

TEST(pipeline_elements_without_a_rule_stay_as_they_are)
{
    World world({});
    ChunkUpdate update = world.update(0, 1);
    const auto rule = update.segments.front().rule;
    update.segments = {{0, 1000, rule}, {1000, 2048, nullptr}, {2048, world.given.numel, rule}};
    world.pipeline->enqueue(std::move(update));
    world.pipeline->publish(1);
    CHECK(world.pipeline->wait_published(0, 1, kPatienceSecs));
    for (std::uint64_t i = 0; i < world.given.numel; ++i) {
        CHECK(world.params[0][i] == (i >= 1000 && i < 2048 ? 0.0F : -1.0F));
    }
}

TEST(pipeline_is_watched_by_other_threads)
{
    World world({});
    std::atomic<bool> over{false};
    std::thread watcher([&] {
        while (!over) {
            for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
                world.pipeline->is_published(chunk, 1);
                world.pipeline->slot(chunk);
            }
            world.pipeline->stats();
            world.pipeline->take_events();
            world.pipeline->failure();
            world.pipeline->set_position(0, 0);
        }
    });
    world.pipeline->set_tracing(true);
    run_generations(world, 6);
    over = true;
    watcher.join();
    CHECK(!world.pipeline->failed());
    CHECK(world.pipeline->stats().num_updates == 6 * world.given.num_chunks);
}

TEST(pipeline_compares_the_first_read_with_what_was_said_to_stand_there)
{
    for (const bool has_moments : {false, true}) {
        for (const bool is_changed : {false, true}) {
            World world({.num_chunks = 1});
            world.pipeline->set_checksum(true);
            CHECK_THROWS(std::logic_error, world.pipeline->state_sums());
            std::vector<char> state(3 * world.part, 0x11);
            world.write_file(world.state_range(0, 0), state.data());
            world.pipeline->replace_state(0, state.data(), has_moments);
            CHECK(world.pipeline->state_sums().size() == 1);
            if (!has_moments) std::memset(state.data() + world.part, 0, 2 * world.part);
            CHECK(world.pipeline->state_holds(0, state.data()));
            state[5] = 0x12;
            CHECK(!world.pipeline->state_holds(0, state.data()));
            if (is_changed) world.write_file(world.state_range(0, 0), state.data());
            world.pipeline->enqueue(world.update(0, 1));
            if (!is_changed) {
                world.pipeline->publish(1);
                world.finish(1);
                std::vector<char> updated(3 * world.part);
                world.read_file(world.state_range(0, 1), updated.data());
                CHECK(world.pipeline->state_holds(0, updated.data()));
                continue;
            }
            // The worker may meet it first: then it is told to whoever publishes.
            CHECK_THROWS(std::runtime_error, (world.pipeline->publish(1),
                                              world.pipeline->wait_durable(1, kPatienceSecs)));
            CHECK(world.pipeline->failure().error == EBADMSG);
        }
    }
}

TEST(pipeline_a_queued_update_behind_another_keeps_younger_generations_waiting)
{
    World world({.staging_chunks = 5});
    IoFault late;
    late.kind = IoKind::kRead;
    late.effect = IoFault::Effect::kHold;
    late.offset_begin = world.state_range(0, 0).offset;
    late.offset_end = late.offset_begin + 1;
    world.engine->add_fault(late);
    world.pipeline->set_tracing(true);
    world.pipeline->enqueue(world.update(0, 1));
    world.pipeline->publish(1);
    world.pipeline->enqueue(world.update(0, 2));  // waits for the one before
    world.pipeline->publish(2);
    world.pipeline->enqueue(world.update(1, 3));  // could go at once, and must not
    world.pipeline->enqueue(world.update(0, 3));
    world.pipeline->enqueue(world.update(2, 4));
    world.pipeline->invalidate(2);
    world.pipeline->publish(3);
    world.pipeline->set_committed(3);
    world.pipeline->enqueue(world.update(4, 1));  // once it is published, all were looked at
    CHECK(world.pipeline->wait_published(4, 1, kPatienceSecs));
    world.engine->clear_faults();
    world.finish(3);
    std::map<double, std::int64_t> reads;  // by when they were submitted
    for (const LaneEvent& event : world.pipeline->take_events())
        // Chunk 2 may be read before it is dropped.
        if (event.lane == 0 && event.chunk != 2 && event.chunk != 4)
            reads[event.begin_secs] = event.generation;
    std::vector<std::int64_t> order;
    for (const auto& [begin, generation] : reads) order.push_back(generation);
    CHECK((order == std::vector<std::int64_t>{1, 2, 3, 3}));
    CHECK(world.state_is(0, -3.0F, 3.0F) && world.state_is(1, -1.0F, 1.0F));
    CHECK(world.state_is(2, 0.0F, 0.0F) || world.pipeline->slot(2) == 0);
    CHECK(world.staging->used_bytes() == 0);
}

TEST(a_state_that_was_taken_over_is_compared_by_its_first_update)
{
    for (const bool is_flipped : {false, true}) {
        WorldOptions options;
        options.num_chunks = 2;
        options.params = Place::kStorage;
        std::vector<StateSums> sums;
        std::vector<std::uint64_t> digests;
        World world(options);
        std::vector<char> zeros(3 * world.part);
        const auto begin = [&] {
            world.pipeline =
                std::make_unique<ChunkPipeline>(world.engine.get(), world.staging.get(), 1);
            world.pipeline->set_checksum(true);
            for (std::size_t i = 0; i < options.num_chunks; ++i)
                world.pipeline->add_chunk(world.spec(i));
        };
        begin();
        for (int slot = 0; slot < 2; ++slot) {
            for (std::size_t i = 0; i < options.num_chunks; ++i) {
                const FileRange range = world.param_range(i, slot);
                world.engine->watch_pages(range.fd, range.offset, range.num_bytes);
            }
        }
        for (std::size_t i = 0; i < options.num_chunks; ++i)
            world.pipeline->replace_state(i, zeros.data(), false);
        for (const std::int64_t generation : {1, 2}) {  // ends in slot 0, where a new one begins
            world.pipeline->set_committed(generation - 1);
            world.enqueue_all(generation);
            world.pipeline->publish(generation);
            world.finish(generation);
        }
        sums = world.pipeline->state_sums();
        digests = world.pipeline->param_digests();
        CHECK(digests.size() == 2 && digests[0] != IoEngine::kNoDigest);
        CHECK(world.pipeline->half_read_params().empty());
        begin();
        for (std::size_t i = 0; i < options.num_chunks; ++i)
            world.pipeline->take_over(i, {true, true, sums[i], digests[i]});
        CHECK(world.pipeline->state_sums()[1] == sums[1]);
        CHECK(world.engine->stats(IoKind::kRead).num_operations == 4);  // of the updates
        const FileRange range = world.state_range(1, 0);
        std::vector<char> state(3 * world.part);
        world.read_file(range, state.data());
        CHECK(world.pipeline->state_holds(1, state.data()));
        CHECK(world.pipeline->state_holds(1, state.data(), false));
        if (is_flipped) {
            state[2 * world.part + 40] ^= 8;  // of a moment
            world.write_file(range, state.data());
            CHECK(!world.pipeline->state_holds(1, state.data()));
            CHECK(world.pipeline->state_holds(1, state.data(), false));
        }
        if (is_flipped) {  // the worker may meet it first
            CHECK_THROWS(std::runtime_error,
                         (world.enqueue_all(1), world.pipeline->publish(1), world.finish(1)));
            CHECK(world.pipeline->failure().error == EBADMSG);
            CHECK(world.pipeline->failure().what == "verifying the state of chunk 1");
            world.pipeline->stop();
            world.read_file(world.state_range(0, 0), state.data());  // what was taken over stays
            CHECK(world.all_equal(state.data(), -2.0F));
        } else {
            world.enqueue_all(1);
            world.pipeline->publish(1);
            world.finish(1);
            CHECK(world.state_is(1, -3.0F, 3.0F));
        }
    }
}
