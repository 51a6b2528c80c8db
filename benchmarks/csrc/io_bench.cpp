// SPDX-License-Identifier: Apache-2.0
//
// Moves bytes of one existing file through the I/O engine and prints what it took, as JSON:
//     io_bench FILE read|write|mixed|checked NUM_BYTES BLOCK_BYTES QUEUE_DEPTH OPERATION_BYTES
//     ENGINE
// ENGINE is threads, io_uring, or io_uring:N with N rings. NUM_BYTES are moved in all; mixed reads
// half of them and writes the other half, in alternating operations; checked reads from the page
// cache, which no disk slows, and compares checksums. The time runs from the first submission to
// the last completion; opening, registering and touching the buffers is not in it.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "io/io_engine.h"
#include "memory/aligned_pool.h"

namespace {

using namespace fuyou;

struct Job {
    std::string path;
    std::string mode;
    std::uint64_t num_bytes;
    std::uint64_t operation_bytes;
    IoOptions options;
};

// Buffers that are free, and the first error; operations in flight hold the others.
struct Window {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<char*> free_buffers;
    int error = 0;

    char* take()
    {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !free_buffers.empty(); });
        char* buffer = free_buffers.back();
        free_buffers.pop_back();
        return buffer;
    }
    void give_back(char* buffer, int outcome)
    {
        std::lock_guard<std::mutex> lock(mutex);
        free_buffers.push_back(buffer);
        error = error != 0 ? error : outcome;
        changed.notify_one();
    }
    int wait_until_all_free(std::size_t num_buffers)
    {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return free_buffers.size() == num_buffers; });
        return error;
    }
};

Job parse(int argc, char** argv)
{
    if (argc != 8) {
        throw std::invalid_argument(
            "usage: io_bench FILE read|write|mixed|checked NUM_BYTES BLOCK_BYTES QUEUE_DEPTH "
            "OPERATION_BYTES io_uring[:N]|threads");
    }
    Job job{argv[1], argv[2], std::stoull(argv[3]), std::stoull(argv[6]), {}};
    job.options.block_bytes = std::stoull(argv[4]);
    job.options.queue_depth = static_cast<unsigned>(std::stoul(argv[5]));
    const std::string engine = argv[7];
    const std::size_t colon = engine.find(':');
    job.options.backend = engine == "threads" ? IoBackend::kThreads : IoBackend::kIoUring;
    if (colon != std::string::npos) {
        job.options.num_rings = static_cast<unsigned>(std::stoul(engine.substr(colon + 1)));
    }
    return job;
}

double move_bytes(const Job& job, const std::string& mode, IoEngine& engine, int fd, Window& window,
                  std::size_t num_buffers)
{
    const auto begin = std::chrono::steady_clock::now();
    std::uint64_t next_offset[2] = {0, 0};  // of reads, of writes: each sequential
    IoKind kind = mode == "write" ? IoKind::kWrite : IoKind::kRead;
    for (std::uint64_t moved = 0; moved < job.num_bytes; moved += job.operation_bytes) {
        char* buffer = window.take();
        std::uint64_t& offset = next_offset[kind == IoKind::kRead ? 0 : 1];
        engine.submit(kind, {{fd, offset, buffer, job.operation_bytes}}, 0,
                      [&window, buffer](const IoOutcome& outcome) {
                          window.give_back(buffer, outcome.error);
                      });
        offset += job.operation_bytes;
        if (mode == "mixed") {
            kind = kind == IoKind::kRead ? IoKind::kWrite : IoKind::kRead;
        }
    }
    if (const int error = window.wait_until_all_free(num_buffers)) {
        throw std::runtime_error(job.path + ": " + std::strerror(error));
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    return elapsed.count();
}

void bench(const Job& job)
{
    const bool is_checked = job.mode == "checked";
    const int fd = open(job.path.c_str(), O_RDWR | O_CLOEXEC | (is_checked ? 0 : O_DIRECT));
    if (fd < 0) {
        throw std::runtime_error(job.path + ": " + std::strerror(errno));
    }
    // Enough operations that the queue never runs dry while one of them ends.
    const std::uint64_t window_bytes = 2 * job.options.queue_depth * job.options.block_bytes;
    const std::size_t num_buffers =
        std::max<std::size_t>(2, static_cast<std::size_t>(window_bytes / job.operation_bytes));
    AlignedPool pool(num_buffers * job.operation_bytes);
    Window window;
    for (std::size_t i = 0; i < num_buffers; ++i) {
        window.free_buffers.push_back(pool.try_allocate(job.operation_bytes));
    }
    std::memset(pool.base(), 0x5a, pool.capacity_bytes());
    IoEngine engine(job.options);
    const bool is_registered = engine.register_buffer(pool.base(), pool.capacity_bytes());
    if (is_checked) {
        engine.watch_pages(fd, 0, job.num_bytes);
        move_bytes(job, "write", engine, fd, window, num_buffers);
    }
    const double secs =
        move_bytes(job, is_checked ? "read" : job.mode, engine, fd, window, num_buffers);
    engine.close();
    close(fd);
    std::printf("{\"secs\": %.6f, \"num_bytes\": %llu, \"registered\": %s}\n", secs,
                static_cast<unsigned long long>(job.num_bytes), is_registered ? "true" : "false");
}

}  // namespace

int main(int argc, char** argv)
{
    try {
        bench(parse(argc, argv));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "io_bench: %s\n", error.what());
        return 1;
    }
    return 0;
}
