// SPDX-License-Identifier: Apache-2.0
//
// Files, buffers and blocking calls for the tests of the I/O engine.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
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

inline std::vector<IoBackend> backends()
{
    return has_io_uring() ? std::vector<IoBackend>{IoBackend::kIoUring, IoBackend::kThreads}
                          : std::vector<IoBackend>{IoBackend::kThreads};
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

inline IoOptions options(IoBackend backend, unsigned queue_depth = 8,
                         std::uint64_t block_bytes = 8192)
{
    IoOptions chosen;
    chosen.backend = backend;
    chosen.queue_depth = queue_depth;
    chosen.block_bytes = block_bytes;
    chosen.num_threads = queue_depth < 4 ? queue_depth : 4;
    return chosen;
}

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
