// SPDX-License-Identifier: Apache-2.0
//
// Asynchronous file I/O for the out-of-core lanes: one engine serves the storage read lane and
// the storage write lane of one rank.
//
// [Note: who owns what in the I/O engine]
// The caller owns the buffers and file descriptors of an operation until its completion ran. The
// engine owns its queue, its submission/completion rings and its threads. A completion runs exactly
// once, on an engine thread, with no engine lock held, so it may call submit() again; it must not
// block and must not throw. close() refuses new operations, lets every operation that was accepted
// complete, and joins the threads; it must not be called from a completion. A submit() from a
// completion throws, too, once close() began: a completion that submits has to catch that.
//
// [Note: fork]
// The engine's threads do not exist in a child of fork(). There every call that needs them throws
// std::runtime_error, and close() and the destructor leave the engine alone (its memory is leaked).
// A child that lives on keeps the parent's ring, and so the registered memory, until it exits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fuyou {

enum class IoKind { kRead, kWrite };
enum class IoBackend { kAuto, kIoUring, kThreads };

// One contiguous run of bytes of one file. With O_DIRECT descriptors fd offset, address and length
// must be multiples of 4096.
struct IoExtent {
    int fd;
    std::uint64_t offset;
    char* buffer;
    std::uint64_t num_bytes;
};

// A run of bytes of a file, and several of them, in order.
struct FileRange {
    int fd;
    std::uint64_t offset;
    std::uint64_t num_bytes;
};
using FileRanges = std::vector<FileRange>;

// How an operation ended. Every extent is complete to the byte when error == 0; a short transfer is
// continued until it is full, and one that makes no progress (end of file) is an error (ENODATA for
// reads, ENOSPC for writes). After a failure no further piece is started, and the completion runs
// when those in flight came back; num_bytes_done then counts bytes that may lie anywhere in the
// extents.
struct IoOutcome {
    int error = 0;             // errno, 0 when full
    int fd = -1;               // first failing extent
    std::uint64_t offset = 0;  // file offset where the failing piece starts
    std::uint64_t num_bytes_done = 0;
};

struct IoOptions {
    IoBackend backend = IoBackend::kAuto;
    unsigned queue_depth = 32;                // pieces in flight at once
    std::uint64_t block_bytes = 1024 * 1024;  // an operation is cut into pieces of this size
    unsigned num_threads = 4;                 // thread backend only
    unsigned num_rings = 1;  // io_uring only: rings, each served by a thread; fewer where refused
};

// Busy time of a lane is the time during which at least one operation of that kind was in flight,
// from the start of its first piece to its end (time in the queue is not busy time).
struct IoLaneStats {
    std::uint64_t num_operations = 0;
    std::uint64_t num_bytes = 0;
    double busy_secs = 0.0;
};

// A rule of the fault seam (tests and storage simulation only). It applies to pieces of `kind`
// whose index among the matching pieces lies in [first, first + count), and there to the first
// transfer: kError replaces it by an error (EINTR and EAGAIN are retried like real ones), kShort
// cuts it to about half, kDelay starts it later, kHold when clear_faults() is called.
struct IoFault {
    IoKind kind = IoKind::kRead;
    enum class Effect { kError, kShort, kDelay, kHold } effect = Effect::kError;
    int error = 5;            // EIO, for kError
    double delay_secs = 0.0;  // for kDelay
    std::uint64_t first = 0;
    std::uint64_t count = 1;
    int fd = -1;                     // -1: any descriptor
    std::uint64_t offset_begin = 0;  // only pieces that touch [offset_begin, offset_end)
    std::uint64_t offset_end = UINT64_MAX;
};

using IoCompletion = std::function<void(const IoOutcome&)>;

class IoEngine {
  public:
    // Throws std::invalid_argument for options out of range; std::system_error where kIoUring was
    // asked for and the kernel refuses it, or no thread can be started.
    explicit IoEngine(const IoOptions& options);
    ~IoEngine();  // close()
    IoEngine(const IoEngine&) = delete;
    IoEngine& operator=(const IoEngine&) = delete;

    // Queues one operation over `extents`. Operations with the smaller `priority` are started
    // first; equal priorities start in the order of submission. An operation of no bytes is one
    // that is full. Throws std::runtime_error after close(), std::invalid_argument for a null
    // buffer or completion.
    void submit(IoKind kind, std::vector<IoExtent> extents, std::int64_t priority,
                IoCompletion done);

    // Registers [address, address + num_bytes) with io_uring so that pieces inside it are sent as
    // fixed buffers. Returns false (and works without) where the kernel refuses, e.g.
    // RLIMIT_MEMLOCK, which every ring counts by itself: those before it have it then; and with the
    // thread backend. Replaces ranges registered before that overlap it. The memory must stay
    // mapped until unregister_buffer() or close(): after a munmap() the kernel would go on writing
    // to the old pages. Neither is to be called from a completion (std::runtime_error).
    bool register_buffer(char* address, std::uint64_t num_bytes);
    // Forgets every registered range that overlaps; no operation may be in flight in it.
    void unregister_buffer(char* address, std::uint64_t num_bytes);

    // From now on every write to these bytes leaves a checksum a page in memory, and reads of whole
    // pages that hold something else end with EBADMSG, and the page as offset. Before the range is
    // first read or written, and while no operation is in flight.
    void watch_pages(int fd, std::uint64_t offset, std::uint64_t num_bytes);
    // These bytes are given back, or become something else: nothing that was watched there is any
    // more. While no operation is in flight on them.
    void forget_pages(int fd, std::uint64_t offset, std::uint64_t num_bytes);
    // See PageSums: what stands for all checksums of these ranges, each watched as a whole, and
    // what an earlier run said that it is (with the same conditions as watch_pages()).
    std::uint64_t page_digest(const FileRanges& ranges) const;
    void expect_pages(const FileRanges& ranges, std::uint64_t digest);
    bool is_half_read(const FileRanges& ranges) const;
    static constexpr std::uint64_t kNoDigest = UINT64_MAX;

    // A simulated device: each piece takes its bytes / the rate of its kind, and reads and writes
    // add up on one time line. 0 = unlimited (test and simulation seam).
    void set_throttle(double read_bytes_per_sec, double write_bytes_per_sec);
    void add_fault(const IoFault& fault);
    void clear_faults();  // and what kHold holds back goes on

    IoLaneStats stats(IoKind kind) const;
    IoBackend backend() const;            // the backend in use, never kAuto
    std::string backend_reason() const;   // why not io_uring; empty for io_uring
    std::uint64_t num_in_flight() const;  // accepted operations whose completion has not begun
    void close();
    // The same, but returns false when what is in flight lasts longer. Then no operation is
    // accepted any more, and close() has to be called again.
    bool close(double timeout_secs);

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace fuyou
