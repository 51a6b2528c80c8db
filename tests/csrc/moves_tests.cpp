// SPDX-License-Identifier: Apache-2.0
//
// Chunks that move between memory and storage by way of their updates.
#include "harness.h"
#include "pipeline_fixture.h"

using namespace fixture;

namespace {

// All of the chunk's places, with its state in its memory, or on storage, where everything else is.
ChunkSpec places(World* world, std::size_t chunk, bool in_memory)
{
    ChunkSpec made = world->spec(chunk);
    made.state_slots = {};
    made.resident_state = in_memory ? world->resident[chunk].data() : nullptr;
    const bool needs_slots = !in_memory || world->given.params == Place::kStorage;
    made.num_slots = needs_slots ? world->given.num_slots : 1;
    for (int slot = 0; !in_memory && slot < world->given.num_slots; ++slot)
        made.state_slots[static_cast<std::size_t>(slot)] = {world->state_range(chunk, slot)};
    return made;
}

// Publishes a generation of which the chunks whose turn it is move to the other place.
void step(World* world, std::int64_t generation, std::vector<bool>* in_memory)
{
    world->pipeline->publish(generation);
    for (std::size_t i = world->given.num_chunks; i-- > 0;) {
        if ((static_cast<std::size_t>(generation) + i) % 3 == 0 &&
            world->pipeline->wait_moved(i, kPatienceSecs)) {
            (*in_memory)[i] = !(*in_memory)[i];
            world->pipeline->set_destination(i, places(world, i, (*in_memory)[i]));
        }
        world->pipeline->enqueue(world->update(i, generation));
    }
}

bool holds(World* world, std::size_t chunk, bool in_memory, float param, float moment)
{
    std::vector<char> bytes(3 * world->part), block(world->stored.num_bytes);
    StateBlock source{block.data(), world->stored};
    if (in_memory) {
        source = {world->resident[chunk].data(), world->spec(chunk).in_memory};
    } else {
        world->read_file(world->state_range(chunk, world->pipeline->slot(chunk)), block.data());
    }
    if (!decode_block(source, nullptr, {bytes.data(), world->spec(chunk).whole})) return false;
    return world->all_equal(bytes.data(), param) &&
           world->all_equal(bytes.data() + world->part, moment) &&
           world->all_equal(bytes.data() + 2 * world->part, moment);
}

// P16 in memory, and states in any layout; P16 on storage, and masters whole.
std::vector<WorldOptions> layouts(std::size_t num_chunks)
{
    std::vector<WorldOptions> found;
    for (const auto moments : {MomentType::kFloat32, MomentType::kBFloat16, MomentType::kInt8}) {
        for (const Place params : {Place::kDram, Place::kStorage}) {
            WorldOptions made;
            made.params = params;
            made.num_chunks = num_chunks;
            made.moments = moments;
            found.push_back(made);
        }
        const WorldOptions in_memory = found[found.size() - 2];
        for (const Masters masters : {Masters::kSplit, Masters::kBFloat16}) {
            found.push_back(in_memory);
            found.back().masters = masters;
            found.back().bfloat16_params = true;
        }
    }
    return found;
}

}  // namespace

TEST(moves_lose_no_update)
{
    for (WorldOptions options : layouts(7)) {
        for (const int num_slots : {1, 2}) {
            options.num_slots = num_slots;
            World world(options);
            world.pipeline->set_checksum(true);
            std::vector<bool> in_memory(7, false);
            for (std::int64_t generation = 1; generation <= 12; ++generation) {
                step(&world, generation, &in_memory);
                // A commit is late now and then: updates of two generations are in flight.
                if (generation % 2 == 0) {
                    world.finish(generation - 1);
                    world.finish(generation);
                }
            }
            for (std::size_t i = 0; i < 7; ++i) {
                CHECK(world.pipeline->is_resident(i) == in_memory[i]);
                CHECK(holds(&world, i, in_memory[i], -12.0F, 12.0F));
            }
            CHECK(world.pipeline->state_sums().size() == 7);
        }
    }
}

TEST(moves_end_behind_the_commit_of_the_step_before)
{
    World world({.num_chunks = 2});
    std::vector<bool> in_memory(2, false);
    step(&world, 1, &in_memory);
    world.finish(1);
    step(&world, 2, &in_memory);  // chunk 1 comes to memory
    CHECK(in_memory[1]);
    CHECK(world.pipeline->wait_published(1, 2, kPatienceSecs));
    CHECK(world.pipeline->wait_durable(2, kPatienceSecs));
    step(&world, 5, &in_memory);  // and leaves it; the commit of what was before has not come
    CHECK(!in_memory[1]);
    CHECK(world.pipeline->wait_published(1, 5, kPatienceSecs));
    CHECK(!world.pipeline->wait_moved(1, 0.05));
    CHECK(world.pipeline->is_resident(1));
    world.pipeline->set_committed(4);
    CHECK(world.pipeline->wait_moved(1, kPatienceSecs));
    CHECK(!world.pipeline->is_resident(1));
}

TEST(moves_that_cannot_be_written_leave_the_state_in_memory)
{
    for (const WorldOptions& options : layouts(2)) {
        World world(options);
        std::vector<bool> in_memory(2, false);
        step(&world, 1, &in_memory);
        world.finish(1);
        step(&world, 2, &in_memory);
        world.finish(2);
        IoFault fault;
        fault.kind = IoKind::kWrite;
        fault.effect = IoFault::Effect::kError;
        fault.error = 28;
        fault.count = 100;
        for (int slot : {0, 1}) {
            fault.offset_begin = world.state_range(1, slot).offset;
            fault.offset_end = fault.offset_begin + world.state_range(1, slot).num_bytes;
            world.engine->add_fault(fault);
        }
        step(&world, 5, &in_memory);
        world.pipeline->set_committed(4);
        if (options.params == Place::kStorage) {  // nobody knows what of P16 was written
            CHECK_THROWS(std::runtime_error, world.pipeline->wait_durable(5, kPatienceSecs));
            continue;
        }
        world.finish(5);
        CHECK(world.pipeline->is_resident(1));
        CHECK(holds(&world, 1, true, -3.0F, 3.0F));
        CHECK(!world.pipeline->failed());
    }
}

TEST(moves_are_of_published_updates)
{
    World world({.num_chunks = 1});
    world.pipeline->set_destination(0, places(&world, 0, true));
    CHECK_THROWS(std::logic_error, world.pipeline->enqueue(world.update(0, 1)));
}

TEST(staging_is_exchanged_when_none_is_in_use)
{
    World world({.num_chunks = 3});
    std::vector<bool> in_memory(3, false);
    step(&world, 1, &in_memory);
    world.finish(1);
    AlignedPool small(4096), large(64 * world.part);
    CHECK_THROWS(std::invalid_argument, world.pipeline->set_staging(&small));
    world.pipeline->set_staging(&large);
    step(&world, 2, &in_memory);
    world.finish(2);
    CHECK(large.peak_bytes() > 0);
    world.pipeline->stop();
    for (std::size_t i = 0; i < 3; ++i) CHECK(holds(&world, i, in_memory[i], -2.0F, 2.0F));
}

TEST(p16_and_g16_are_elsewhere_between_two_updates)
{
    for (const Masters masters : {Masters::kWhole, Masters::kBFloat16}) {
        WorldOptions options;
        options.num_chunks = 3;
        options.params = options.gradients = Place::kStorage;
        options.masters = masters;
        options.bfloat16_params = true;
        World world(options);
        world.pipeline->set_checksum(true);  // without, upper halves have to be in the slot
        std::vector<std::uint16_t> halves(world.short_part / 2, 0x3C00);
        for (std::size_t i = 0; i < 3; ++i) world.store_gradient(i, 0x3C00);
        world.pipeline->publish(1);
        world.enqueue_all(1);
        world.finish(1);
        for (std::size_t i = 0; i < 3; ++i) {  // to memory
            char* memory = reinterpret_cast<char*>(world.params[i].data());
            std::vector<char> values(world.short_part);
            world.read_file(world.param_range(i, world.pipeline->slot(i)), values.data());
            std::memcpy(memory, values.data(), 2 * world.given.numel);
            ChunkSpec made = world.spec(i);
            made.param_slots = {};
            made.grad_slot = {};
            made.param_memory = {memory, nullptr};
            world.pipeline->set_places(i, made);
        }
        world.pipeline->publish(2);
        for (std::size_t i = 0; i < 3; ++i) {
            ChunkUpdate update = world.update(i, 2);
            update.gradient = reinterpret_cast<const char*>(halves.data());
            world.pipeline->enqueue(update);
        }
        world.finish(2);
        for (std::size_t i = 0; i < 3; ++i) {  // and back
            const auto* values = reinterpret_cast<const std::uint16_t*>(world.params[i].data());
            CHECK(values[0] == 0xC000 && values[world.given.numel - 1] == 0xC000);
            std::vector<std::uint16_t> written(world.short_part / 2, 0xC000);
            world.write_file(world.param_range(i, world.pipeline->slot(i)),
                             reinterpret_cast<const char*>(written.data()));
            world.pipeline->set_places(i, world.spec(i));
        }
        world.pipeline->publish(3);
        world.enqueue_all(3);
        world.finish(3);
        for (std::size_t i = 0; i < 3; ++i) CHECK(world.stored_param_is(i, 0xC040));
        ChunkUpdate held = world.update(0, 4);
        held.held = true;
        world.pipeline->enqueue(held);
        CHECK_THROWS(std::logic_error, world.pipeline->set_places(0, world.spec(0)));
        world.pipeline->invalidate(0);
        CHECK(world.pipeline->wait_idle(0, kPatienceSecs));
        world.pipeline->set_places(0, world.spec(0));
    }
}
