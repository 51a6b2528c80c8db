// SPDX-License-Identifier: Apache-2.0
//
// Files, buffers and blocking calls for the tests of the I/O engine.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "io/io_engine.h"
#include "memory/aligned_pool.h"

namespace fixture {

using namespace fuyou;

enum class Access { kBuffered, kDirect };

// Containers often forbid io_uring: there what needs it is not tested, and the first test says so.
inline bool has_io_uring()
{
    static const bool is_there = [] {
        try {
            IoOptions small;
            small.backend = IoBackend::kIoUring;
            IoEngine engine(small);
            return true;
        } catch (const std::system_error&) {
            return false;
        }
    }();
    return is_there;
}

struct Backing {
    Backing(IoBackend backend, unsigned num_rings = 1) : backend(backend), num_rings(num_rings) {}
    IoBackend backend;
    unsigned num_rings;
};

inline std::vector<Backing> backends()
{
    if (!has_io_uring()) {
        return {IoBackend::kThreads};
    }
    return {IoBackend::kIoUring, {IoBackend::kIoUring, 3}, IoBackend::kThreads};
}

// An unlinked file in TMPDIR. Where the file system has no O_DIRECT the file is buffered.
class TempFile {
  public:
    explicit TempFile(Access access, std::uint64_t num_bytes = 0)
    {
        const char* directory = std::getenv("TMPDIR");
        std::string path = std::string(directory ? directory : "/tmp") + "/fuyou-test-XXXXXX";
        fd_ = mkstemp(path.data());
        if (access == Access::kDirect) {
            const int direct = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
            if (direct >= 0) {
                ::close(fd_);
                fd_ = direct;
            }
        }
        unlink(path.c_str());
        if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(num_bytes)) != 0) {
            throw std::runtime_error("cannot make a test file at " + path);
        }
    }
    ~TempFile() { ::close(fd_); }
    TempFile(const TempFile&) = delete;
    TempFile& operator=(const TempFile&) = delete;
    int fd() const { return fd_; }

  private:
    int fd_ = -1;
};

inline IoOptions options(Backing backing, unsigned queue_depth = 8,
                         std::uint64_t block_bytes = 8192)
{
    IoOptions chosen;
    chosen.backend = backing.backend;
    chosen.num_rings = backing.num_rings;
    chosen.queue_depth = queue_depth;
    chosen.block_bytes = block_bytes;
    chosen.num_threads = queue_depth < 4 ? queue_depth : 4;
    return chosen;
}

// Runs `body` in a child, which must end with status 0.
template <typename Body>
inline bool succeeds_in_child(Body body)
{
    const pid_t child = fork();
    if (child == 0) {
        bool is_good = false;
        try {
            is_good = body();
        } catch (...) {
        }
        _exit(is_good ? 0 : 1);
    }
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

class Pipe {
  public:
    Pipe()
    {
        if (pipe2(fds_, O_CLOEXEC) != 0) {
            throw std::runtime_error("cannot make a pipe");
        }
    }
    ~Pipe()
    {
        ::close(fds_[0]);
        ::close(fds_[1]);
    }
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;
    int end_to_read() const { return fds_[0]; }
    void write_byte(char byte)
    {
        if (write(fds_[1], &byte, 1) != 1) {
            throw std::runtime_error("cannot write to a pipe");
        }
    }

  private:
    int fds_[2];
};

inline std::future<IoOutcome> start(IoEngine& engine, IoKind kind, std::vector<IoExtent> extents,
                                    std::int64_t priority = 0)
{
    auto promise = std::make_shared<std::promise<IoOutcome>>();
    std::future<IoOutcome> future = promise->get_future();
    engine.submit(kind, std::move(extents), priority,
                  [promise](const IoOutcome& outcome) { promise->set_value(outcome); });
    return future;
}

inline IoOutcome run(IoEngine& engine, IoKind kind, std::vector<IoExtent> extents)
{
    return start(engine, kind, std::move(extents)).get();
}

inline void fill(char* buffer, std::uint64_t num_bytes, unsigned seed)
{
    std::uint32_t state = seed * 2654435761U + 1;
    for (std::uint64_t i = 0; i < num_bytes; ++i) {
        state = state * 1664525U + 1013904223U;
        buffer[i] = static_cast<char>(state >> 24);
    }
}

}  // namespace fixture
