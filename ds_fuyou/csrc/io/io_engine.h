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
// complete, and joins the threads; it must not be called from a completion.
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

// How an operation ended. Every extent is complete to the byte when error == 0; a short transfer is
// continued until it is full, and one that makes no progress (end of file) is an error (ENODATA for
// reads, ENOSPC for writes).
struct IoOutcome {
    int error = 0;             // errno, 0 when full
    int fd = -1;               // first failing extent
    std::uint64_t offset = 0;  // file offset where the failing piece starts
    std::uint64_t num_bytes_done = 0;
};

struct IoOptions {
    IoBackend backend = IoBackend::kAuto;
    unsigned queue_depth = 32;                    // pieces in flight at once
    std::uint64_t block_bytes = 1024 * 1024;      // an operation is cut into pieces of this size
    unsigned num_threads = 4;                     // thread backend only
};

// Busy time of a lane is the time during which at least one operation of that kind was in flight.
struct IoLaneStats {
    std::uint64_t num_operations = 0;
    std::uint64_t num_bytes = 0;
    double busy_secs = 0.0;
};

// A rule of the fault seam (tests and storage simulation only). It applies to pieces of `kind` whose
// index among the matching pieces lies in [first, first + count).
struct IoFault {
    IoKind kind = IoKind::kRead;
    enum class Effect { kError, kShort, kDelay } effect = Effect::kError;
    int error = 5;              // EIO, for kError
    double delay_secs = 0.0;    // for kDelay
    std::uint64_t first = 0;
    std::uint64_t count = 1;
    int fd = -1;                // -1: any descriptor
    std::uint64_t offset_begin = 0;            // only pieces that touch [offset_begin, offset_end)
    std::uint64_t offset_end = UINT64_MAX;
};

using IoCompletion = std::function<void(const IoOutcome&)>;

class IoEngine {
public:
    explicit IoEngine(const IoOptions& options);
    ~IoEngine();  // close()
    IoEngine(const IoEngine&) = delete;
    IoEngine& operator=(const IoEngine&) = delete;

    // Queues one operation over `extents`. Operations with the smaller `priority` are started first;
    // equal priorities start in the order of submission. Throws std::runtime_error after close().
    void submit(IoKind kind, std::vector<IoExtent> extents, std::int64_t priority, IoCompletion done);

    // Registers [address, address + num_bytes) with io_uring so that pieces inside it are sent as
    // fixed buffers. Returns false (and works without) where the kernel refuses, e.g. RLIMIT_MEMLOCK.
    bool register_buffer(char* address, std::uint64_t num_bytes);

    // Bytes per second for both lanes together, 0 = unlimited (test and simulation seam).
    void set_throttle(double read_bytes_per_sec, double write_bytes_per_sec);
    void add_fault(const IoFault& fault);
    void clear_faults();

    IoLaneStats stats(IoKind kind) const;
    IoBackend backend() const;        // the backend in use, never kAuto
    std::string backend_reason() const;  // why the fall-back is used; empty for io_uring
    std::uint64_t num_in_flight() const; // operations accepted and not yet completed
    void close();

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace fuyou
