// SPDX-License-Identifier: Apache-2.0
//
// Every way an operation can end other than in one full transfer, with both backends.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <algorithm>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <system_error>
#include <thread>

#include "harness.h"
#include "io/io_queue.h"
#include "io_fixture.h"

using namespace fixture;

namespace {

constexpr std::uint64_t kBlock = 8192;
constexpr IoKind kBothKinds[] = {IoKind::kWrite, IoKind::kRead};

IoFault everywhere(IoKind kind, IoFault::Effect effect, int error = EIO)
{
    return {.kind = kind, .effect = effect, .error = error, .count = UINT64_MAX};
}

bool forbid_io_uring()
{
    sock_filter instructions[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{4, instructions};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Puts /dev/null in the place of every io_uring of this process.
unsigned break_rings()
{
    unsigned num_broken = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code error;
        if (std::filesystem::read_symlink(entry.path(), error) == "anon_inode:[io_uring]") {
            const int null_fd = open("/dev/null", O_RDWR);
            // The ring's thread may close it meanwhile: no race but for who wins, so not by the
            // function that ThreadSanitizer watches.
            const int ring_fd = std::stoi(entry.path().filename());
            num_broken += syscall(SYS_dup3, null_fd, ring_fd, 0) >= 0 ? 1 : 0;
            close(null_fd);
        }
    }
    return num_broken;
}

}  // namespace

TEST(short_transfers_are_continued)
{
    for (const Backing& backend : backends()) {
        for (const Access access : {Access::kDirect, Access::kBuffered}) {
            constexpr std::uint64_t kBytes = 13 * 4096;
            TempFile file(access);
            AlignedPool pool(2 * kBytes);
            char* a = pool.try_allocate(kBytes);
            char* b = pool.try_allocate(kBytes);
            fill(a, kBytes, 9);
            IoEngine engine(options(backend, 3, 2 * 4096));
            for (const IoKind kind : kBothKinds) {
                engine.add_fault(everywhere(kind, IoFault::Effect::kShort));
                char* buffer = kind == IoKind::kWrite ? a : b;
                const IoOutcome outcome = run(engine, kind, {{file.fd(), 0, buffer, kBytes}});
                CHECK(outcome.error == 0);
                CHECK(outcome.num_bytes_done == kBytes);
            }
            CHECK(std::memcmp(a, b, kBytes) == 0);
        }
    }
}

TEST(short_transfers_of_a_few_bytes_are_continued)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered);
        IoEngine engine(options(backend));
        engine.add_fault(everywhere(IoKind::kWrite, IoFault::Effect::kShort));
        char a[] = "abc";
        char b[sizeof a] = {};
        for (std::uint64_t num_bytes = 1; num_bytes <= sizeof a; ++num_bytes) {
            CHECK(run(engine, IoKind::kWrite, {{file.fd(), 0, a, num_bytes}}).num_bytes_done ==
                  num_bytes);
        }
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, b, sizeof b}}).error == 0);
        CHECK(std::memcmp(a, b, sizeof a) == 0);
    }
}

TEST(an_error_cancels_the_rest_and_names_the_piece)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 100 + 8 * kBlock);
        std::vector<char> buffer(8 * kBlock, 'x');
        IoEngine engine(options(backend, 2, kBlock));
        engine.add_fault(
            {.kind = IoKind::kWrite, .effect = IoFault::Effect::kError, .error = EIO, .first = 2});
        std::atomic<int> num_completions{0};
        std::promise<IoOutcome> ended;
        engine.submit(IoKind::kWrite, {{file.fd(), 0, buffer.data(), 8 * kBlock}}, 0,
                      [&](const IoOutcome& outcome) {
                          ++num_completions;
                          ended.set_value(outcome);
                      });
        const IoOutcome outcome = ended.get_future().get();
        engine.close();
        CHECK(num_completions == 1);
        CHECK(outcome.error == EIO);
        CHECK(outcome.fd == file.fd());
        CHECK(outcome.offset == 2 * kBlock);
        CHECK(outcome.num_bytes_done <= 3 * kBlock);
        CHECK(engine.stats(IoKind::kWrite).num_operations == 1);
        CHECK(engine.stats(IoKind::kWrite).num_bytes == outcome.num_bytes_done);
        char last = 'y';
        CHECK(pread(file.fd(), &last, 1, 8 * kBlock - 1) == 1);
        CHECK(last == 0);
    }
}

// Of the queue, which both backends have: there is no telling when one of their threads has met
// the error.
TEST(a_failed_operation_does_not_start_its_delayed_pieces)
{
    std::vector<char> buffer(3 * kBlock, 'x');
    IoOutcome ended;
    IoQueue queue(options(IoBackend::kThreads, 4, kBlock));
    queue.add_fault(
        {.kind = IoKind::kWrite, .effect = IoFault::Effect::kHold, .offset_end = kBlock});
    queue.add_fault({.kind = IoKind::kWrite,
                     .error = ENOSPC,
                     .offset_begin = kBlock,
                     .offset_end = 2 * kBlock});
    queue.submit(IoKind::kWrite, {{0, 0, buffer.data(), 3 * kBlock}}, 0,
                 [&](const IoOutcome& outcome) { ended = outcome; });
    IoPiece* piece = queue.take_or_wait();
    CHECK(piece->offset == kBlock && queue.begin(*piece) == PieceStep::kDone);
    queue.finish(piece);
    IoClock::time_point next_due;
    CHECK(queue.take(&next_due) == nullptr);  // the third is not even cut
    CHECK(next_due == IoClock::time_point::max());
    queue.clear_faults();
    piece = queue.take_or_wait();
    CHECK(piece->offset == 0 && queue.begin(*piece) == PieceStep::kDone);
    queue.finish(piece);
    CHECK(ended.error == ENOSPC && ended.offset == kBlock && ended.num_bytes_done == 0);
}

TEST(what_is_held_goes_on_when_faults_are_cleared)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 65536);
        std::vector<char> buffer(65536, 'x');
        IoEngine engine(options(backend, 4, 4096));
        IoFault hold = everywhere(IoKind::kRead, IoFault::Effect::kHold);
        hold.offset_end = 8192;
        engine.add_fault(hold);
        hold.effect = IoFault::Effect::kDelay;  // beside it, a delay adds nothing
        hold.delay_secs = 1e12;
        engine.add_fault(hold);
        auto held = start(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 65536}});
        while (engine.stats(IoKind::kRead).num_bytes < 65536 - 8192) std::this_thread::yield();
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 8192, buffer.data(), 4096}}).error == 0);
        CHECK(engine.num_in_flight() == 1);
        CHECK(held.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
        engine.clear_faults();
        CHECK(held.get().error == 0);
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 65536}}).error == 0);
    }
}

TEST(other_operations_survive_a_failing_one)
{
    for (const Backing& backend : backends()) {
        TempFile good(Access::kBuffered, 65536);
        TempFile bad(Access::kBuffered, 65536);
        std::vector<char> buffer(20 * 8192);
        IoEngine engine(options(backend, 4, 4096));
        engine.add_fault({.kind = IoKind::kRead, .count = UINT64_MAX, .fd = bad.fd()});
        std::vector<std::future<IoOutcome>> outcomes;
        for (int i = 0; i < 20; ++i) {
            const int fd = i % 3 == 0 ? bad.fd() : good.fd();
            outcomes.push_back(
                start(engine, IoKind::kRead, {{fd, 0, buffer.data() + i * 8192, 8192}}));
        }
        for (int i = 0; i < 20; ++i) {
            CHECK(outcomes[i].get().error == (i % 3 == 0 ? EIO : 0));
        }
        engine.clear_faults();
        CHECK(run(engine, IoKind::kRead, {{bad.fd(), 0, buffer.data(), 8192}}).error == 0);
    }
}

TEST(interrupted_transfers_are_tried_again)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 10 * kBlock);
        std::vector<char> buffer(10 * kBlock, 'x');
        IoEngine engine(options(backend, 3, kBlock));
        engine.add_fault(everywhere(IoKind::kWrite, IoFault::Effect::kError, EINTR));
        engine.add_fault(everywhere(IoKind::kRead, IoFault::Effect::kError, EAGAIN));
        for (const IoKind kind : kBothKinds) {
            const IoOutcome outcome =
                run(engine, kind, {{file.fd(), 0, buffer.data(), buffer.size()}});
            CHECK(outcome.error == 0);
            CHECK(outcome.num_bytes_done == buffer.size());
        }
    }
}

TEST(nothing_is_tried_again_for_ever)
{
    for (const int error : {EAGAIN, EINTR}) {
        char byte = 0;
        IoOutcome ended;
        IoQueue queue(options(IoBackend::kThreads));
        queue.submit(IoKind::kRead, {{0, 0, &byte, 1}}, 0,
                     [&](const IoOutcome& outcome) { ended = outcome; });
        IoPiece* piece = queue.take_or_wait();
        PieceStep step = queue.begin(*piece);
        int num_tries = 0;
        while (step != PieceStep::kDone && num_tries < 100000) {
            ++num_tries;
            step = queue.settle(*piece, -error);
            if (step == PieceStep::kPutBack) {
                CHECK(queue.take_or_wait() == piece);
                step = queue.begin(*piece);
            }
        }
        CHECK(num_tries > 1 && num_tries < 100000);
        queue.finish(piece);
        CHECK(ended.error == error);
    }
}

TEST(the_end_of_a_file_is_an_error)
{
    for (const Backing& backend : backends()) {
        for (const Access access : {Access::kDirect, Access::kBuffered}) {
            // The file ends inside a block of 4096 bytes inside the second piece.
            TempFile file(access, kBlock + 4096 + 100);
            AlignedPool pool(4 * kBlock);
            IoEngine engine(options(backend, 4, kBlock));
            const IoOutcome outcome =
                run(engine, IoKind::kRead, {{file.fd(), 0, pool.base(), 4 * kBlock}});
            CHECK(outcome.error == ENODATA);
            CHECK(outcome.fd == file.fd());
            CHECK(outcome.offset >= kBlock);
            CHECK(outcome.offset % kBlock == 0);
            CHECK(outcome.num_bytes_done <= kBlock + 4096 + 100);
        }
    }
}

TEST(a_full_device_is_an_error)
{
    const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    char byte = 0;
    for (const Backing& backend : backends()) {
        IoEngine engine(options(backend));
        CHECK(run(engine, IoKind::kWrite, {{full, 0, &byte, 1}}).error == ENOSPC);
    }
    close(full);
}

TEST(a_write_without_progress_is_a_full_device)
{
    TempFile file(Access::kBuffered);
    char byte = 0;
    IoOutcome ended;
    IoQueue queue(options(IoBackend::kThreads));
    queue.submit(IoKind::kWrite, {{file.fd(), 0, &byte, 1}}, 0,
                 [&](const IoOutcome& outcome) { ended = outcome; });
    IoPiece* piece = queue.take_or_wait();
    CHECK(queue.begin(*piece) == PieceStep::kTransfer);
    CHECK(queue.settle(*piece, 0) == PieceStep::kDone);
    queue.finish(piece);
    CHECK(ended.error == ENOSPC);
    queue.close();
    CHECK(queue.is_drained());
    CHECK(queue.take_or_wait() == nullptr);
}

TEST(a_bad_descriptor_is_an_error)
{
    char byte = 0;
    for (const Backing& backend : backends()) {
        IoEngine engine(options(backend));
        for (const int fd : {-1, 1000000}) {
            for (const IoKind kind : kBothKinds) {
                const IoOutcome outcome = run(engine, kind, {{fd, 4096, &byte, 1}});
                CHECK(outcome.error == EBADF);
                CHECK(outcome.fd == fd);
                CHECK(outcome.offset == 4096);
            }
        }
    }
}

TEST(a_throttle_holds_transfers_back)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 1 << 20);
        std::vector<char> buffer(1 << 20);
        IoEngine engine(options(backend, 4, 65536));
        engine.set_throttle(16 << 20, 32 << 20);
        // One device: the times of reading and writing a MiB add up to 3/32 of a second.
        const auto begin = std::chrono::steady_clock::now();
        auto written = start(engine, IoKind::kWrite, {{file.fd(), 0, buffer.data(), 1 << 20}});
        std::vector<char> other(1 << 20);
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, other.data(), 1 << 20}}).error == 0);
        CHECK(written.get().error == 0);
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
        CHECK(elapsed.count() >= 0.09);
        CHECK(engine.stats(IoKind::kRead).busy_secs >= 0.06);
        engine.set_throttle(0, 0);
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, other.data(), 1 << 20}}).error == 0);
    }
}

TEST(bad_faults_and_throttles_are_invalid_arguments)
{
    IoEngine engine(options(IoBackend::kThreads));
    CHECK_THROWS(std::invalid_argument, engine.set_throttle(-1.0, 0.0));
    CHECK_THROWS(std::invalid_argument,
                 engine.set_throttle(0.0, std::numeric_limits<double>::quiet_NaN()));
    CHECK_THROWS(std::invalid_argument, engine.add_fault({.error = 0}));
    CHECK_THROWS(std::invalid_argument, engine.add_fault({.delay_secs = -1.0}));
}

TEST(auto_falls_back_where_io_uring_is_forbidden)
{
    CHECK(succeeds_in_child([] {
        if (!forbid_io_uring()) {
            return false;
        }
        TempFile file(Access::kBuffered, 4096);
        IoEngine engine(options(IoBackend::kAuto));
        char byte = 1;
        const bool is_read = run(engine, IoKind::kRead, {{file.fd(), 0, &byte, 1}}).error == 0;
        const std::string reason = engine.backend_reason();
        return is_read && byte == 0 && engine.backend() == IoBackend::kThreads &&
               reason.find("io_uring_setup") != std::string::npos &&
               reason.find("not permitted") != std::string::npos;
    }));
    CHECK(succeeds_in_child([] {
        if (!forbid_io_uring()) {
            return false;
        }
        try {
            IoEngine engine(options(IoBackend::kIoUring));
        } catch (const std::system_error& error) {
            return error.code().value() == EPERM;
        }
        return false;
    }));
}

TEST(a_child_of_fork_cannot_use_the_engine_and_does_not_hang)
{
    for (const Backing& backend : backends()) {
        auto engine = std::make_unique<IoEngine>(options(backend));
        char byte = 1;
        TempFile file(Access::kBuffered, 4096);
        CHECK(succeeds_in_child([&] {
            bool is_refused = false;
            try {
                run(*engine, IoKind::kRead, {{file.fd(), 0, &byte, 1}});
            } catch (const std::runtime_error&) {
                is_refused = true;
            }
            engine->close();
            engine.reset();
            return is_refused;
        }));
        CHECK(run(*engine, IoKind::kRead, {{file.fd(), 0, &byte, 1}}).error == 0);
    }
}

TEST(a_ring_that_dies_is_an_error_of_every_operation)
{
    if (!has_io_uring()) {
        return;
    }
    TempFile file(Access::kBuffered, 65536);
    std::vector<char> buffer(65536);
    for (const unsigned num_rings : {1U, 3U}) {
        IoEngine engine(options({IoBackend::kIoUring, num_rings}, 4));
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 65536}}).error == 0);
        CHECK(break_rings() == num_rings);
        // The threads still wait in the rings they entered; what wakes one is served, or fails.
        run(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 65536}});
        for (int i = 0; i < 3; ++i) {
            CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 65536}}).error != 0);
        }
        CHECK(!engine.register_buffer(buffer.data(), buffer.size()));
        engine.close();
        CHECK(engine.num_in_flight() == 0);
    }
}

TEST(watched_pages_that_changed_behind_our_back_are_errors)
{
    constexpr std::uint64_t kPages = 12, kBytes = kPages * 4096;
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 2 * kBytes);
        std::vector<char> written(kBytes), found(kBytes);
        fill(written.data(), kBytes, 3);
        IoEngine engine(options(backend, 4, 8192));
        engine.watch_pages(file.fd(), kBytes, 5 * 4096);
        engine.watch_pages(file.fd(), kBytes + 5 * 4096, 7 * 4096);
        const auto read = [&](std::uint64_t begin, std::uint64_t end) {
            return run(engine, IoKind::kRead,
                       {{file.fd(), kBytes + begin, found.data(), end - begin}});
        };
        CHECK(read(0, kBytes).error == 0);  // nobody knows what should be there
        CHECK(run(engine, IoKind::kWrite, {{file.fd(), kBytes, written.data(), kBytes}}).error ==
              0);
        CHECK(run(engine, IoKind::kWrite, {{file.fd(), 0, written.data(), kBytes}}).error == 0);
        CHECK(read(0, kBytes).error == 0 && found == written);
        const char other = static_cast<char>(written[6 * 4096 + 9] ^ 16);
        for (const std::uint64_t base : {std::uint64_t{0}, kBytes})
            CHECK(pwrite(file.fd(), &other, 1, static_cast<off_t>(base + 6 * 4096 + 9)) == 1);
        const IoOutcome outcome = read(0, kBytes);
        CHECK(outcome.error == EBADMSG && outcome.fd == file.fd());
        CHECK(outcome.offset == kBytes + 6 * 4096);
        CHECK(read(0, 6 * 4096).error == 0 && read(7 * 4096, kBytes).error == 0);
        CHECK(read(6 * 4096, 7 * 4096).error == EBADMSG);
        CHECK(read(6 * 4096, 6 * 4096 + 100).error == 0);  // no whole page
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, found.data(), kBytes}}).error == 0);
        // Exchanged pages; then both are written again, one of them in part.
        CHECK(pwrite(file.fd(), written.data(), 4096, kBytes + 4096) == 4096);
        CHECK(read(4096, 2 * 4096).error == EBADMSG);
        CHECK(
            run(engine, IoKind::kWrite, {{file.fd(), kBytes + 4096, written.data(), 4096}}).error ==
            0);
        CHECK(read(0, 2 * 4096).error == 0);
        CHECK(run(engine, IoKind::kWrite, {{file.fd(), kBytes + 6 * 4096, written.data(), 2048}})
                  .error == 0);
        CHECK(read(6 * 4096, 7 * 4096).error == 0);
        // Given back: other bytes may be there.
        const char wrong = static_cast<char>(written[8 * 4096] ^ 1);
        CHECK(pwrite(file.fd(), &wrong, 1, static_cast<off_t>(kBytes + 8 * 4096)) == 1);
        CHECK(read(8 * 4096, 9 * 4096).error == EBADMSG);
        engine.forget_pages(file.fd(), kBytes + 6 * 4096, 3 * 4096);  // of the second range
        CHECK(read(0, kBytes).error == 0);
        const char first = static_cast<char>(written[0] ^ 1);
        CHECK(pwrite(file.fd(), &first, 1, static_cast<off_t>(kBytes)) == 1);
        CHECK(read(0, 4096).error == EBADMSG);  // the first range is watched
    }
}

// Space that is leased anew, in other pieces than before.
TEST(watching_anew_forgets_what_was_known_of_any_page_of_it)
{
    constexpr std::uint64_t kPage = 4096, kPages = 12;
    TempFile file(Access::kBuffered, kPages * kPage), other(Access::kBuffered, kPages * kPage);
    std::vector<char> written(kPages * kPage), found(kPages * kPage);
    fill(written.data(), written.size(), 4);
    IoEngine engine(options(IoBackend::kThreads, 4, 8192));
    const auto pages = [&](IoKind kind, const TempFile& of, std::uint64_t begin,
                           std::uint64_t end) {
        char* memory = kind == IoKind::kWrite ? written.data() : found.data();
        return run(engine, kind, {{of.fd(), begin * kPage, memory, (end - begin) * kPage}}).error;
    };
    for (const TempFile* each : {&file, &other}) {
        for (const std::uint64_t begin : {0, 4, 8})
            engine.watch_pages(each->fd(), begin * kPage, 4 * kPage);
        CHECK(pages(IoKind::kWrite, *each, 0, kPages) == 0);
        std::vector<char> zeros(kPages * kPage);
        CHECK(pwrite(each->fd(), zeros.data(), zeros.size(), 0) ==
              static_cast<ssize_t>(zeros.size()));
    }
    engine.watch_pages(file.fd(), 3 * kPage, 2 * kPage);  // the end of one, the begin of the next
    CHECK(pages(IoKind::kRead, file, 0, 8) == 0);
    CHECK(pages(IoKind::kRead, file, 8, 9) == EBADMSG);
    CHECK(pages(IoKind::kRead, other, 0, 1) == EBADMSG);
    CHECK(pages(IoKind::kRead, other, 4, 5) == EBADMSG);
    engine.watch_pages(file.fd(), 8 * kPage, kPage);
    CHECK(pages(IoKind::kRead, file, 8, kPages) == 0);
    engine.watch_pages(file.fd(), 0, kPages * kPage);
    CHECK(pages(IoKind::kWrite, file, 0, kPages) == 0 &&
          pages(IoKind::kRead, file, 0, kPages) == 0);
    CHECK(engine.page_digest({{file.fd(), 3 * kPage, 2 * kPage}}) == IoEngine::kNoDigest);
    CHECK(engine.page_digest({{file.fd(), 0, kPages * kPage}}) != IoEngine::kNoDigest);
}

// Pages of an earlier run, of which one number is known: see page_sums.h.
TEST(pages_taken_over_are_compared_when_the_last_of_them_was_read)
{
    constexpr std::uint64_t kPages = 10, kBytes = kPages * 4096;
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, kBytes);
        const FileRanges ranges = {{file.fd(), 6 * 4096, 4 * 4096}, {file.fd(), 0, 6 * 4096}};
        std::vector<char> written(kBytes), found(kBytes);
        fill(written.data(), kBytes, 5);
        std::uint64_t digest = 0;
        {
            IoEngine engine(options(backend, 4, 8192));
            for (const FileRange& range : ranges)
                engine.watch_pages(range.fd, range.offset, range.num_bytes);
            CHECK(engine.page_digest(ranges) == IoEngine::kNoDigest);
            CHECK(run(engine, IoKind::kWrite, {{file.fd(), 0, written.data(), kBytes}}).error == 0);
            digest = engine.page_digest(ranges);
            CHECK(digest != IoEngine::kNoDigest);
            CHECK(engine.page_digest({ranges[1], ranges[0]}) != digest);
            CHECK(engine.page_digest({{file.fd(), 0, 4096}}) == IoEngine::kNoDigest);
        }
        // 0: as they were; 1: a bit; 2: two pages exchanged; 3: zeros.
        for (int fault = 0; fault < 4; ++fault) {
            std::vector<char> there = written;
            if (fault == 1) there[3 * 4096 + 77] ^= 4;
            if (fault == 2) std::swap_ranges(&there[0], &there[4096], &there[7 * 4096]);
            if (fault == 3) std::fill(&there[2 * 4096], &there[3 * 4096], 0);
            CHECK(pwrite(file.fd(), there.data(), kBytes, 0) == static_cast<ssize_t>(kBytes));
            IoEngine engine(options(backend, 4, 8192));
            for (const FileRange& range : ranges)
                engine.watch_pages(range.fd, range.offset, range.num_bytes);
            engine.expect_pages(ranges, digest);
            CHECK(engine.page_digest(ranges) == digest && !engine.is_half_read(ranges));
            const auto read = [&](std::uint64_t begin, std::uint64_t end) {
                return run(engine, IoKind::kRead,
                           {{file.fd(), begin, found.data() + begin, end - begin}});
            };
            CHECK(read(0, 5 * 4096).error == 0 && read(0, 5 * 4096).error == 0);
            CHECK(engine.is_half_read(ranges));
            CHECK(read(4 * 4096, 9 * 4096).error == 0);
            CHECK(read(0, kBytes).error == (fault == 0 ? 0 : EBADMSG));
            CHECK(engine.is_half_read(ranges) == (fault != 0));
            if (fault != 0) {  // whoever read the last page may not have looked
                CHECK(read(0, 4096).error == EBADMSG && read(8 * 4096, kBytes).error == EBADMSG);
                continue;
            }
            CHECK(engine.page_digest(ranges) == digest);
            there[9 * 4096] ^= 1;  // from now on it is known what each page holds
            CHECK(pwrite(file.fd(), there.data(), kBytes, 0) == static_cast<ssize_t>(kBytes));
            CHECK(read(8 * 4096, kBytes).offset == 9 * 4096);
            CHECK(run(engine, IoKind::kWrite, {{file.fd(), 0, there.data(), kBytes}}).error == 0);
            CHECK(read(0, kBytes).error == 0);
            CHECK(engine.page_digest(ranges) != digest);
        }
        // Written to before all was read: nobody can say what the rest should be.
        IoEngine engine(options(backend, 4, 8192));
        for (const FileRange& range : ranges)
            engine.watch_pages(range.fd, range.offset, range.num_bytes);
        engine.expect_pages(ranges, digest);
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, found.data(), 4096}}).error == 0);
        CHECK(run(engine, IoKind::kWrite, {{file.fd(), 4096, written.data(), 4096}}).error == 0);
        CHECK(!engine.is_half_read(ranges));
        CHECK(engine.page_digest(ranges) == IoEngine::kNoDigest);
        CHECK(run(engine, IoKind::kRead, {{file.fd(), 0, found.data(), kBytes}}).error == 0);
    }
}

TEST(close_says_when_it_lasts)
{
    for (const Backing& backend : backends()) {
        TempFile file(Access::kBuffered, 4096);
        std::vector<char> buffer(4096);
        IoEngine engine(options(backend));
        engine.add_fault({.kind = IoKind::kRead, .effect = IoFault::Effect::kHold});
        auto late = start(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 4096}});
        CHECK(!engine.close(0.01));
        CHECK_THROWS(std::runtime_error,
                     run(engine, IoKind::kRead, {{file.fd(), 0, buffer.data(), 1}}));
        engine.clear_faults();
        CHECK(engine.close(60.0));
        CHECK(late.get().error == 0);
        CHECK(engine.close(0.0));
    }
}
