// SPDX-License-Identifier: Apache-2.0
//
// The pipeline when things are late, are dropped at awkward moments, fail, or are stopped.
#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "harness.h"
#include "pipeline_fixture.h"

using namespace fixture;

namespace {

IoFault fault(IoKind kind, IoFault::Effect effect, const FileRange& where)
{
    IoFault made;
    made.kind = kind;
    made.effect = effect;
    made.count = UINT64_MAX;
    made.offset_begin = where.offset;
    made.offset_end = where.offset + where.num_bytes;
    return made;
}

ChunkUpdate gated(const World& world, std::size_t chunk, std::shared_ptr<const UpdateRule> rule)
{
    ChunkUpdate update = world.update(chunk, 1);
    update.segments = {{0, world.given.numel, std::move(rule)}};
    return update;
}

// Drops chunk 0's first update, redoes it with 1 and wants exactly that.
void redo_and_check(World& world)
{
    world.pipeline->enqueue(world.update(0, 1));
    world.pipeline->publish(1);
    world.finish(1);
    CHECK(world.state_is(0, -1.0F, 1.0F));
    CHECK(world.staging->used_bytes() == 0);
}

// The failure may be there before the last chunk is queued.
void enqueue_until_it_fails(World& world)
{
    try {
        world.enqueue_all(1);
    } catch (const std::runtime_error&) {
    }
}

// Every way to wait or go on must throw, soon, after a failure.
void check_failed_for_all(World& world)
{
    CHECK(world.pipeline->failed());
    CHECK_THROWS(std::runtime_error, world.pipeline->wait_published(0, 9, kPatienceSecs));
    CHECK_THROWS(std::runtime_error, world.pipeline->wait_durable(9, kPatienceSecs));
    CHECK_THROWS(std::runtime_error, world.pipeline->enqueue(world.update(1, 9)));
    CHECK_THROWS(std::runtime_error, world.pipeline->publish(9));
}

}  // namespace

TEST(pipeline_runs_the_earliest_deadline_first)
{
    World world({.staging_chunks = 1});
    world.pipeline->set_tracing(true);
    const auto rule = std::make_shared<GatedRule>();
    world.pipeline->enqueue(gated(world, 4, rule));
    rule->wait_begun();
    for (const std::size_t chunk : {3U, 1U, 2U, 0U})
        world.pipeline->enqueue(world.update(chunk, 1));
    world.pipeline->publish(1);
    rule->open();
    world.finish(1);
    std::vector<std::size_t> order;
    for (const LaneEvent& event : world.pipeline->take_events()) {
        if (event.lane == 1) order.push_back(event.chunk);
    }
    CHECK((order == std::vector<std::size_t>{4, 0, 1, 2, 3}));
}

TEST(pipeline_only_readers_of_a_late_chunk_wait)
{
    for (const Backing& backend : backends()) {
        World world({.backend = backend, .staging_chunks = 5});
        world.engine->add_fault(
            fault(IoKind::kRead, IoFault::Effect::kHold, world.state_range(3, 0)));
        world.enqueue_all(1);
        world.pipeline->publish(1);
        for (const std::size_t chunk : {0U, 1U, 2U, 4U}) {
            CHECK(world.pipeline->wait_published(chunk, 1, kPatienceSecs));
        }
        CHECK(!world.pipeline->is_published(3, 1));
        world.engine->clear_faults();
        CHECK(world.pipeline->wait_published(3, 1, kPatienceSecs));
        world.finish(1);
    }
}

TEST(pipeline_dropped_while_reading)
{
    for (const Backing& backend : backends()) {
        World world({.backend = backend});
        world.engine->add_fault(
            fault(IoKind::kRead, IoFault::Effect::kHold, world.state_range(0, 0)));
        world.pipeline->enqueue(world.update(0, 1, 9.0F));
        while (world.engine->num_in_flight() == 0) std::this_thread::yield();
        world.pipeline->invalidate(0);
        CHECK(world.pipeline->wait_gradient_read(0, 1, kPatienceSecs));
        world.engine->clear_faults();
        redo_and_check(world);
    }
}

TEST(pipeline_dropped_while_reading_what_fails)
{
    // What a dropped job reads may have been written anew meanwhile: an error of it is nobody's.
    World world({});
    const FileRange where = world.state_range(0, 0);
    world.engine->add_fault(fault(IoKind::kRead, IoFault::Effect::kHold, where));
    world.engine->add_fault(fault(IoKind::kRead, IoFault::Effect::kError, where));
    world.pipeline->enqueue(world.update(0, 1, 9.0F));
    while (world.engine->stats(IoKind::kRead).busy_secs == 0.0) std::this_thread::yield();
    world.pipeline->invalidate(0);
    world.engine->clear_faults();  // what was begun fails nonetheless
    CHECK(world.pipeline->wait_idle(0, kPatienceSecs));
    CHECK(!world.pipeline->failed());
    redo_and_check(world);
}

TEST(pipeline_dropped_while_updating)
{
    World world({});
    const auto rule = std::make_shared<GatedRule>();
    world.pipeline->enqueue(gated(world, 0, rule));
    rule->wait_begun();
    std::atomic<bool> has_returned{false};
    std::thread dropper([&] {
        world.pipeline->invalidate(0);
        has_returned = true;
    });
    while (world.pipeline->stats().num_discarded == 0) std::this_thread::yield();
    CHECK(!has_returned);  // the update still reads the gradient
    rule->open();
    dropper.join();
    redo_and_check(world);
}

TEST(pipeline_dropped_while_writing)
{
    for (const Backing& backend : backends()) {
        World world({.backend = backend});
        world.engine->add_fault(
            fault(IoKind::kWrite, IoFault::Effect::kHold, world.state_range(0, 1)));
        world.pipeline->enqueue(world.update(0, 1, 9.0F));
        while (world.pipeline->stats().state_bytes_written == 0) std::this_thread::yield();
        world.pipeline->invalidate(0);
        world.engine->clear_faults();
        redo_and_check(world);
    }
}

TEST(pipeline_dropped_after_it_was_written)
{
    World world({});
    world.pipeline->enqueue(world.update(0, 1, 9.0F));
    while (world.engine->stats(IoKind::kWrite).num_bytes < 3 * world.part)
        std::this_thread::yield();
    world.pipeline->invalidate(0);
    redo_and_check(world);
}

TEST(pipeline_read_failure_reaches_every_waiter)
{
    for (const Backing& backend : backends()) {
        World world({.backend = backend});
        const FileRange where = world.state_range(2, 0);
        world.engine->add_fault(fault(IoKind::kRead, IoFault::Effect::kError, where));
        enqueue_until_it_fails(world);
        CHECK_THROWS(std::runtime_error, world.pipeline->wait_published(2, 1, kPatienceSecs));
        const PipelineFailure failure = world.pipeline->failure();
        CHECK(failure.error == EIO && failure.fd == world.file.fd());
        CHECK(failure.offset >= where.offset && failure.offset < where.offset + where.num_bytes);
        CHECK(failure.what.find("chunk 2") != std::string::npos);
        check_failed_for_all(world);
    }
}

TEST(pipeline_write_failure_reaches_every_waiter)
{
    for (const Backing& backend : backends()) {
        for (const Place params : {Place::kDram, Place::kStorage}) {
            World world({.backend = backend, .params = params});
            const FileRange where = world.state_range(1, 1);
            IoFault full = fault(IoKind::kWrite, IoFault::Effect::kError, where);
            full.error = ENOSPC;
            world.engine->add_fault(full);
            enqueue_until_it_fails(world);
            CHECK_THROWS(std::runtime_error, world.pipeline->wait_durable(1, kPatienceSecs));
            CHECK(world.pipeline->failure().error == ENOSPC);
            CHECK(world.pipeline->failure().offset >= where.offset);
            check_failed_for_all(world);
        }
    }
}

TEST(pipeline_short_transfers_are_completed)
{
    for (const Backing& backend : backends()) {
        World world({.backend = backend});
        for (const IoKind kind : {IoKind::kRead, IoKind::kWrite}) {
            IoFault cut;
            cut.kind = kind;
            cut.effect = IoFault::Effect::kShort;
            cut.count = UINT64_MAX;
            world.engine->add_fault(cut);
        }
        world.enqueue_all(1);
        world.pipeline->publish(1);
        world.finish(1);
        for (std::size_t chunk = 0; chunk < world.given.num_chunks; ++chunk) {
            CHECK(world.state_is(chunk, -1.0F, 1.0F));
        }
    }
}

TEST(pipeline_a_failing_update_and_a_failure_from_outside)
{
    World world({});
    world.pipeline->enqueue(gated(world, 0, std::make_shared<FailingRule>()));
    CHECK_THROWS(std::runtime_error, world.pipeline->wait_published(0, 1, kPatienceSecs));
    CHECK(world.pipeline->failure().error == 0);
    CHECK(world.pipeline->failure().what.find("the rule failed") != std::string::npos);
    world.pipeline->fail("a later failure", EIO);
    CHECK(world.pipeline->failure().error == 0);  // the first one is told

    World other({});
    std::thread committer([&] { other.pipeline->fail("the record cannot be written", EROFS); });
    CHECK_THROWS(std::runtime_error, other.pipeline->wait_published(0, 1, kPatienceSecs));
    committer.join();
    CHECK(other.pipeline->failure().error == EROFS);
    check_failed_for_all(other);
}

TEST(pipeline_work_that_cannot_begin_reaches_every_waiter)
{
    World world({});
    ChunkSpec torn = world.spec(0);
    torn.state_slots[0].front().num_bytes = 4096;
    ChunkUpdate update = world.update(0, 1);
    update.chunk = world.pipeline->add_chunk(torn);
    world.pipeline->enqueue(update);
    CHECK_THROWS(std::runtime_error,
                 world.pipeline->wait_published(update.chunk, 1, kPatienceSecs));
    CHECK(world.pipeline->failure().what.find("file ranges are shorter") != std::string::npos);
    check_failed_for_all(world);
    world.pipeline->stop();
    CHECK(world.staging->used_bytes() == 0);
}

// P16 was edited, so the state has to be read again, and nothing is read any more.
TEST(pipeline_an_update_that_cannot_read_again_is_waited_for_by_nobody)
{
    auto world = std::make_shared<World>(
        WorldOptions{.num_chunks = 1, .bfloat16_params = true, .masters = Masters::kSplit});
    world->pipeline->set_checksum(true);
    world->pipeline->enqueue(world->update(0, 1));
    world->pipeline->publish(1);
    world->finish(1);
    const auto rule = std::make_shared<GatedRule>();
    ChunkUpdate update = gated(*world, 0, rule);
    update.generation = 2;
    update.param_version = 1;
    world->params[0][0] = 7.0F;  // the version that the update reads
    world->pipeline->enqueue(update);
    rule->wait_begun();
    world->engine->close();
    rule->open();
    CHECK_THROWS(std::runtime_error, world->pipeline->wait_published(0, 2, kPatienceSecs));
    CHECK(world->pipeline->failure().what.find("worker failed") != std::string::npos);
    std::promise<void> returned;
    std::future<void> has_returned = returned.get_future();
    std::thread waiter([world, update, returned = std::move(returned)]() mutable {
        world->pipeline->read_gradient_from_storage(0, update.gradient);
        world->pipeline->invalidate(0);
        returned.set_value();
    });
    const bool is_back = has_returned.wait_for(std::chrono::duration<double>(kPatienceSecs)) ==
                         std::future_status::ready;
    CHECK(is_back);
    if (!is_back) {  // with the world, which it keeps
        waiter.detach();
        return;
    }
    waiter.join();
    CHECK(world->pipeline->wait_idle(0, 0.0));
    CHECK(world->staging->used_bytes() == 0);
}

TEST(pipeline_stops_in_the_middle)
{
    for (const Backing& backend : backends()) {
        for (int attempt = 0; attempt < 8; ++attempt) {
            World world({.backend = backend, .params = Place::kStorage});
            world.enqueue_all(1);
            if (attempt % 2 == 1) world.pipeline->publish(1);
            auto waiter = std::async(std::launch::async, [&] {
                try {
                    return world.pipeline->wait_durable(2, kPatienceSecs);
                } catch (const std::runtime_error&) {
                    return true;
                }
            });
            std::this_thread::sleep_for(std::chrono::microseconds(attempt * 200));
            world.pipeline->stop();
            CHECK(waiter.get());  // woken by an exception, not by the end of its patience
            CHECK(world.staging->used_bytes() == 0);
            CHECK_THROWS(std::runtime_error, world.pipeline->enqueue(world.update(0, 3)));
            world.pipeline->stop();  // once more does nothing
        }
    }
}
