// SPDX-License-Identifier: Apache-2.0
//
// What callers of the I/O engine rely on, with both backends.
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "harness.h"
#include "io_fixture.h"

using namespace fixture;

namespace {

// Whether RLIMIT_MEMLOCK lets anybody register some pages.
bool may_lock()
{
    rlimit limit{};
    return getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur >= (8 << 20);
}

void roundtrip(const Backing& backend, Access access)
{
    constexpr int kNumOperations = 40;
    constexpr std::uint64_t kStride = 24 * 4096;
    TempFile file(access);
    AlignedPool pool(2 * kNumOperations * kStride);
    char* written = pool.try_allocate(kNumOperations * kStride);
    char* read_back = pool.try_allocate(kNumOperations * kStride);
    std::vector<std::uint64_t> sizes;
    std::uint64_t total_bytes = 0;
    for (int i = 0; i < kNumOperations; ++i) {
        sizes.push_back(4096 * (1 + (i * 7) % 23));
        total_bytes += sizes.back();
    }
    IoEngine engine(options(backend));
    for (const IoKind kind : {IoKind::kWrite, IoKind::kRead}) {
        std::vector<std::future<IoOutcome>> outcomes;
        for (int i = 0; i < kNumOperations; ++i) {
            char* buffer = (kind == IoKind::kWrite ? written : read_back) + i * kStride;
            if (kind == IoKind::kWrite) {
                fill(buffer, sizes[i], i);
            }
            outcomes.push_back(start(engine, kind, {{file.fd(), i * kStride, buffer, sizes[i]}}));
        }
        for (int i = 0; i < kNumOperations; ++i) {
            const IoOutcome outcome = outcomes[i].get();
            CHECK(outcome.error == 0);
            CHECK(outcome.num_bytes_done == sizes[i]);
        }
        CHECK(engine.stats(kind).num_operations == kNumOperations);
        CHECK(engine.stats(kind).num_bytes == total_bytes);
        CHECK(engine.stats(kind).busy_secs > 0.0);
    }
    CHECK(engine.num_in_flight() == 0);
    for (int i = 0; i < kNumOperations; ++i) {
        CHECK(std::memcmp(written + i * kStride, read_back + i * kStride, sizes[i]) == 0);
    }
}

}  // namespace

TEST(many_concurrent_operations_come_back_to_the_byte)
{
    for (const Backing& backend : backends()) {
        roundtrip(backend, Access::kDirect);
        roundtrip(backend, Access::kBuffered);
    }
}

TEST(the_backend_asked_for_is_used)
{
    if (has_io_uring()) {
        IoEngine uring(options(IoBackend::kIoUring));
        CHECK(uring.backend() == IoBackend::kIoUring);
        CHECK(uring.backend_reason().empty());
    } else {
        std::printf("io_uring is forbidden here: only the thread backend is tested\n");
    }
    IoEngine threads(options(IoBackend::kThreads));
    CHECK(threads.backend() == IoBackend::kThreads);
    CHECK(!threads.backend_reason().empty());
}

TEST(one_operation_spans_extents_of_two_files)
{
    for (const Backing& backend : backends()) {
        TempFile first(Access::kDirect);
        TempFile second(Access::kDirect);
        AlignedPool pool(64 * 4096);
        char* a = pool.try_allocate(16 * 4096);
        char* b = pool.try_allocate(16 * 4096);
        fill(a, 16 * 4096, 1);
        IoEngine engine(options(backend, 4));
        const auto extents = [&](char* base) {
            return std::vector<IoExtent>{{first.fd(), 8192, base, 5 * 4096},
                                         {second.fd(), 0, base + 5 * 4096, 7 * 4096},
                                         {first.fd(), 0, nullptr, 0},
                                         {first.fd(), 65536, base + 12 * 4096, 4 * 4096}};
        };
        CHECK(run(engine, IoKind::kWrite, extents(a)).error == 0);
        const IoOutcome outcome = run(engine, IoKind::kRead, extents(b));
        CHECK(outcome.error == 0);
        CHECK(outcome.num_bytes_done == 16 * 4096);
        CHECK(std::memcmp(a, b, 16 * 4096) == 0);
    }
}

TEST(buffered_files_take_any_offset_and_length)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered);
        std::vector<char> a(50001);
        std::vector<char> b(50001);
        fill(a.data(), a.size(), 3);
        IoEngine engine(options(backend, 4, 4096));
        CHECK(run(engine, IoKind::kWrite, {{file.fd(), 777, a.data(), a.size()}}).error == 0);
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 777, b.data(), b.size()}}).error == 0);
        CHECK(a == b);
    }
}

TEST(smaller_priority_first_then_order_of_submission)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 4096);
        IoEngine engine(options(backend, 1));
        // Has the only slot until the others are queued.
        engine.add_fault({.kind = IoKind::kRead, .effect = IoFault::Effect::kHold});
        std::vector<std::vector<char>> buffers(6, std::vector<char>(16));
        std::vector<int> order;
        std::promise<void> all_done;
        const std::int64_t priorities[] = {
            std::numeric_limits<std::int64_t>::min(), 5, 1, 5, -3, 1};
        for (int i = 0; i < 6; ++i) {
            engine.submit(IoKind::kRead, {{file.fd(), 0, buffers[i].data(), 16}}, priorities[i],
                          [&order, &all_done, i](const IoOutcome&) {
                              order.push_back(i);  // one slot: completions run one after the other
                              if (order.size() == 6) {
                                  all_done.set_value();
                              }
                          });
        }
        engine.clear_faults();
        all_done.get_future().wait();
        engine.close();
        CHECK((order == std::vector<int>{0, 4, 2, 5, 1, 3}));
    }
}

TEST(a_completion_may_submit)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 65536);
        IoEngine engine(options(backend, 2));
        std::vector<char> buffer(4096);
        std::promise<void> all_done;
        int num_left = 200;
        std::function<void(const IoOutcome&)> next = [&](const IoOutcome& outcome) {
            CHECK(outcome.error == 0);
            if (--num_left == 0) {
                all_done.set_value();
            } else {
                engine.submit(IoKind::kRead, {{file.fd(), 0, buffer.data(), 4096}}, 0, next);
            }
        };
        engine.submit(IoKind::kRead, {{file.fd(), 0, buffer.data(), 4096}}, 0, next);
        all_done.get_future().wait();
        engine.close();
        CHECK(engine.stats(IoKind::kRead).num_operations == 200);
    }
}

TEST(several_threads_submit_at_once)
{
    for (const Backing& backend : backends()) {
        constexpr int kPerThread = 50;
        TempFile file(Access::kDirect, 1 << 20);
        AlignedPool pool(4 * 4 * 8192);
        std::atomic<int> num_full{0};
        {
            IoEngine engine(options(backend));
            std::vector<std::thread> threads;
            for (int t = 0; t < 4; ++t) {
                char* buffer = pool.try_allocate(3 * 4096);
                threads.emplace_back([&, t, buffer] {
                    for (int i = 0; i < kPerThread; ++i) {
                        const std::uint64_t offset = (t * kPerThread + i) % 64 * 4096;
                        const IoOutcome outcome =
                            run(engine, i % 2 == 0 ? IoKind::kWrite : IoKind::kRead,
                                {{file.fd(), offset, buffer, 3 * 4096}});
                        num_full += outcome.error == 0 ? 1 : 0;
                    }
                });
            }
            for (std::thread& thread : threads) {
                thread.join();
            }
        }
        CHECK(num_full == 4 * kPerThread);
    }
}

TEST(counters_may_be_read_while_operations_run)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 65536);
        std::vector<char> buffer(65536);
        IoEngine engine(options(backend, 4, 4096));
        std::atomic<bool> is_over{false};
        std::thread reader([&] {
            std::uint64_t num_bytes = 0;
            while (!is_over) {
                const IoLaneStats stats = engine.stats(IoKind::kRead);
                CHECK(stats.num_bytes >= num_bytes);
                CHECK(engine.num_in_flight() <= 1);
                num_bytes = stats.num_bytes;
                std::this_thread::yield();
            }
        });
        for (int i = 0; i < 100; ++i) {
            CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 65536}}).error == 0);
        }
        is_over = true;
        reader.join();
        CHECK(engine.stats(IoKind::kRead).num_bytes == 100 * 65536);
    }
}

TEST(close_completes_what_was_accepted_and_refuses_the_rest)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 1 << 20);
        std::vector<char> buffer(1 << 20);
        IoEngine engine(options(backend, 4));
        engine.add_fault({.kind = IoKind::kRead,
                          .effect = IoFault::Effect::kDelay,
                          .delay_secs = 0.002,
                          .count = UINT64_MAX});
        std::atomic<int> num_done{0};
        for (int i = 0; i < 30; ++i) {
            engine.submit(IoKind::kRead, {{file.fd(), 0, buffer.data() + i * 20000, 20000}}, i,
                          [&](const IoOutcome& outcome) { num_done += outcome.error == 0; });
        }
        std::thread other([&] { engine.close(); });
        engine.close();
        CHECK(num_done == 30);
        CHECK(engine.num_in_flight() == 0);
        other.join();
        engine.close();
        CHECK_THROWS(std::runtime_error,
                     run(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 1}}));
        CHECK(!engine.register_buffer(buffer.data(), buffer.size()));
    }
}

TEST(close_from_a_completion_is_refused)
{
    for (const Backing& backend : backends()) {
        IoEngine engine(options(backend));
        std::promise<bool> refused;
        engine.submit(IoKind::kRead, {}, 0, [&](const IoOutcome&) {
            try {
                engine.close();
                refused.set_value(false);
            } catch (const std::runtime_error&) {
                refused.set_value(true);
            }
        });
        CHECK(refused.get_future().get());
    }
}

TEST(an_operation_of_no_bytes_is_full_at_once)
{
    for (const Backing& backend : backends()) {
        IoEngine engine(options(backend));
        CHECK(run(engine, IoKind::kWrite, {}).error == 0);
        const IoOutcome outcome = run(engine, IoKind::kRead, {{-1, 0, nullptr, 0}});
        CHECK(outcome.error == 0);
        CHECK(outcome.num_bytes_done == 0);
    }
}

TEST(bad_operations_and_options_are_invalid_arguments)
{
    char byte = 0;
    IoEngine engine(options(IoBackend::kThreads));
    CHECK_THROWS(std::invalid_argument, engine.submit(IoKind::kRead, {{0, 0, &byte, 1}}, 0, {}));
    CHECK_THROWS(std::invalid_argument, run(engine, IoKind::kRead, {{0, 0, nullptr, 1}}));
    CHECK_THROWS(std::invalid_argument, run(engine, IoKind::kRead, {{0, UINT64_MAX, &byte, 1}}));
    CHECK_THROWS(std::invalid_argument, run(engine, IoKind::kRead, {{0, INT64_MAX, &byte, 1}}));
    CHECK(engine.num_in_flight() == 0);
    for (const std::uint64_t block_bytes : {0ULL, 4095ULL, 6144ULL, 1ULL << 31}) {
        CHECK_THROWS(std::invalid_argument, IoEngine(options(IoBackend::kThreads, 8, block_bytes)));
    }
    CHECK_THROWS(std::invalid_argument, IoEngine(options(IoBackend::kIoUring, 0)));
    CHECK_THROWS(std::invalid_argument, IoEngine(options(IoBackend::kIoUring, 4097)));
    IoOptions no_threads = options(IoBackend::kThreads);
    no_threads.num_threads = 0;
    CHECK_THROWS(std::invalid_argument, IoEngine{no_threads});
}

TEST(completions_run_where_signals_are_blocked)
{
    for (const Backing& backend : backends()) {
        IoEngine engine(options(backend));
        std::promise<bool> blocked;
        engine.submit(IoKind::kRead, {}, 0, [&](const IoOutcome&) {
            sigset_t signals;
            pthread_sigmask(SIG_BLOCK, nullptr, &signals);
            blocked.set_value(sigismember(&signals, SIGINT) == 1);
        });
        CHECK(blocked.get_future().get());
    }
    sigset_t signals;
    pthread_sigmask(SIG_BLOCK, nullptr, &signals);
    CHECK(sigismember(&signals, SIGINT) == 0);
}

TEST(registered_buffers_carry_the_same_bytes)
{
    if (!has_io_uring()) {
        return;
    }
    constexpr std::uint64_t kBytes = 64 * 4096;
    TempFile file(Access::kDirect, kBytes);
    AlignedPool pool(3 * kBytes);
    char* a = pool.try_allocate(kBytes);
    char* b = pool.try_allocate(kBytes);
    fill(a, kBytes, 5);
    IoEngine engine(options(IoBackend::kIoUring, 4, 5 * 4096));
    // Half of the read buffer only, so that one piece straddles the end and goes unregistered.
    CHECK(engine.register_buffer(a, kBytes) || !may_lock());
    CHECK(engine.register_buffer(b, kBytes / 2) || !may_lock());
    CHECK(run(engine, IoKind::kWrite, {{file.fd(), 0, a, kBytes}}).error == 0);
    CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, b, kBytes}}).error == 0);
    CHECK(std::memcmp(a, b, kBytes) == 0);

    // A range over both replaces them, and can be forgotten in part and again.
    CHECK(engine.register_buffer(pool.base(), 2 * kBytes) || !may_lock());
    std::memset(b, 0, kBytes);
    CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, b, kBytes}}).error == 0);
    CHECK(std::memcmp(a, b, kBytes) == 0);
    engine.unregister_buffer(b, 4096);
    engine.unregister_buffer(pool.base(), pool.capacity_bytes());
    std::memset(b, 0, kBytes);
    CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, b, kBytes}}).error == 0);
    CHECK(std::memcmp(a, b, kBytes) == 0);
}

TEST(refused_registration_leaves_the_engine_working)
{
    TempFile file(Access::kBuffered, 4096);
    char byte = 1;
    IoEngine engine(options(IoBackend::kAuto));
    CHECK(!engine.register_buffer(reinterpret_cast<char*>(4096), 8192));
    CHECK(!engine.register_buffer(&byte, 0));
    CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, &byte, 1}}).error == 0);
    CHECK(byte == 0);
    IoEngine threads(options(IoBackend::kThreads));
    CHECK(!threads.register_buffer(&byte, 1));
    threads.unregister_buffer(&byte, 1);
}

TEST(a_completion_may_not_register)
{
    for (const Backing& backend : backends()) {
        IoEngine engine(options(backend));
        AlignedPool pool(4096);
        std::promise<bool> is_refused;
        engine.submit(IoKind::kRead, {}, 0, [&](const IoOutcome&) {
            unsigned num_refused = 0;
            try {
                engine.register_buffer(pool.base(), 4096);
            } catch (const std::runtime_error&) {
                ++num_refused;
            }
            try {
                engine.unregister_buffer(pool.base(), 4096);
            } catch (const std::runtime_error&) {
                ++num_refused;
            }
            is_refused.set_value(num_refused == 2);
        });
        CHECK(is_refused.get_future().get());
    }
}

TEST(rings_share_what_is_in_flight)
{
    if (!has_io_uring()) {
        return;
    }
    // Reads of empty pipes stay in the kernel: two of them fill one ring's part of the depth.
    constexpr unsigned kNumRings = 3, kDepth = 6;
    TempFile file(Access::kBuffered, 4096);
    IoEngine engine(options({IoBackend::kIoUring, kNumRings}, kDepth));
    std::vector<Pipe> pipes(kDepth - 1);
    std::vector<char> bytes(kDepth, 1);
    std::vector<std::future<IoOutcome>> held;
    std::mutex mutex;
    std::set<std::thread::id> threads;
    const auto read = [&](int fd, char* buffer) {
        auto ended = std::make_shared<std::promise<IoOutcome>>();
        std::future<IoOutcome> outcome = ended->get_future();
        engine.submit(IoKind::kRead, {{fd, 0, buffer, 1}}, 0,
                      [&mutex, &threads, ended](const IoOutcome& end) {
                          {
                              std::lock_guard<std::mutex> lock(mutex);
                              threads.insert(std::this_thread::get_id());
                          }
                          ended->set_value(end);
                      });
        return outcome;
    };
    for (std::size_t i = 0; i < pipes.size(); ++i) {
        held.push_back(read(pipes[i].end_to_read(), &bytes[i]));
        // Whichever rings are full, another one serves what comes.
        CHECK(read(file.fd(), &bytes[kDepth - 1]).get().error == 0);
    }
    for (std::size_t i = 0; i < pipes.size(); ++i) {
        pipes[i].write_byte(static_cast<char>(10 + i));
        CHECK(held[i].get().error == 0);
        CHECK(bytes[i] == static_cast<char>(10 + i));
    }
    CHECK(threads.size() == kNumRings);
}

TEST(a_ring_that_is_refused_is_done_without)
{
    if (!has_io_uring()) {
        return;
    }
#ifdef __SANITIZE_ADDRESS__
    std::printf("the sanitizer needs descriptors of its own, so none can be refused here\n");
    return;
#endif
    // Descriptors for one ring and two wake-ups. It has the whole depth then: reads of empty pipes
    // take all of it but one.
    CHECK(succeeds_in_child([] {
        constexpr unsigned kDepth = 8;
        TempFile file(Access::kBuffered, 4096);
        std::vector<Pipe> pipes(kDepth - 1);
        const int next = dup(file.fd());
        ::close(next);
        rlimit limit{};
        getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = static_cast<rlim_t>(next) + 3;
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
            return false;
        }
        IoEngine engine(options({IoBackend::kIoUring, 3}, kDepth));
        bool is_good = dup(file.fd()) < 0 || dup(file.fd()) < 0;
        std::vector<char> bytes(kDepth, 1);
        std::vector<std::future<IoOutcome>> held;
        for (std::size_t i = 0; i < pipes.size(); ++i) {
            held.push_back(
                start(engine, IoKind::kRead, {{pipes[i].end_to_read(), 0, &bytes[i], 1}}));
        }
        std::future<IoOutcome> other =
            start(engine, IoKind::kRead, {{file.fd(), 0, &bytes[kDepth - 1], 1}});
        is_good = other.wait_for(std::chrono::seconds(20)) == std::future_status::ready && is_good;
        for (std::size_t i = 0; i < pipes.size(); ++i) {
            pipes[i].write_byte(static_cast<char>(10 + i));
            is_good = held[i].get().error == 0 && bytes[i] == static_cast<char>(10 + i) && is_good;
        }
        return is_good && other.get().error == 0 && bytes[kDepth - 1] == 0;
    }));
}
