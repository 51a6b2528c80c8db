// SPDX-License-Identifier: Apache-2.0
//
// The part of the I/O engine that both backends share: the queue of operations by (priority,
// sequence), their cutting into pieces, and the accounting of what came back. Private to io/.
//
// [Note: life of a piece]
// take() cuts the next piece and lends it to the calling backend, which is its only user until
// finish(). begin() says whether it needs I/O at all; after every transfer settle() says whether
// the piece is done, has a rest to transfer, or was put back for later.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "device_model.h"
#include "io_engine.h"
#include "page_sums.h"

namespace fuyou {

struct IoOperation {
    IoKind kind;
    std::vector<IoExtent> extents;
    std::int64_t priority;
    std::uint64_t sequence;
    IoCompletion done;

    // Cursor: the first byte that belongs to no piece yet. Guarded by the queue's mutex, as is all
    // below except `failed`.
    std::size_t next_extent = 0;
    std::uint64_t next_byte = 0;
    std::uint64_t num_pieces_cut = 0;
    std::uint64_t num_pieces_in_flight = 0;
    std::uint64_t failed_piece = UINT64_MAX;
    IoOutcome outcome;
    std::atomic<bool> failed{false};
};

struct IoPiece {
    std::shared_ptr<IoOperation> operation;
    std::uint64_t index = 0;  // within its operation
    int fd = -1;
    std::uint64_t offset = 0;
    char* buffer = nullptr;
    std::uint64_t num_bytes = 0;

    std::uint64_t num_bytes_done = 0;
    int error = 0;
    unsigned num_retries = 0;  // transfers in a row that moved nothing
    PieceFate fate;            // what the fault seam has in store for its first transfer

    IoKind kind() const { return operation->kind; }
    std::uint64_t next_offset() const { return offset + num_bytes_done; }
    char* next_buffer() const { return buffer + num_bytes_done; }
    std::uint64_t next_num_bytes() const;
};

enum class PieceStep {
    kTransfer,  // issue (the rest of) the piece
    kDone,      // hand it to finish()
    kPutBack,   // take() returns it again later; the backend forgets it
};

class IoQueue {
  public:
    explicit IoQueue(const IoOptions& options);

    // Queues one operation; true when a piece of it could be started at once, so that a sleeping
    // backend has to be woken. Throws std::runtime_error after close().
    bool submit(IoKind kind, std::vector<IoExtent> extents, std::int64_t priority,
                IoCompletion done);

    // The next piece that may start now, or nullptr; `next_due` is then when to ask again (max():
    // when something is submitted or finished).
    IoPiece* take(IoClock::time_point* next_due);
    // The same, blocking; nullptr once the queue is closed and drained.
    IoPiece* take_or_wait();
    // Whether another taker has something to do: to start a piece, or to wait until one is due.
    bool has_more() const;

    PieceStep begin(IoPiece& piece);
    // `result` is the count of a transfer, or a negative errno.
    PieceStep settle(IoPiece& piece, std::int64_t result);
    // Gives the piece back, and runs the operation's completion when this was its last piece.
    void finish(IoPiece* piece) noexcept;

    void close();
    // Waits until it is drained; false if that lasts longer.
    bool wait_drained(double timeout_secs);
    bool is_drained() const;  // closed, and every accepted operation is complete

    PageSums& page_sums() { return page_sums_; }
    void set_throttle(double read_bytes_per_sec, double write_bytes_per_sec);
    void add_fault(const IoFault& fault);
    void clear_faults();
    IoLaneStats stats(IoKind kind) const;
    std::uint64_t num_in_flight() const;

  private:
    struct Lane {
        IoLaneStats stats;
        std::uint64_t num_active = 0;  // operations with a piece started
        IoClock::time_point busy_since;
    };
    struct Earlier {
        bool operator()(const std::shared_ptr<IoOperation>& a,
                        const std::shared_ptr<IoOperation>& b) const
        {
            return a->priority != b->priority ? a->priority < b->priority
                                              : a->sequence < b->sequence;
        }
    };

    IoPiece* take_locked(IoClock::time_point* next_due);
    bool has_more_locked() const;
    IoPiece* cut_piece(IoClock::time_point now, IoClock::time_point* not_before);
    PieceStep settle_error(IoPiece& piece, int error);
    void put_back(IoPiece& piece, IoClock::time_point not_before);
    void record_piece(IoPiece& piece);
    void record_operation(const IoOperation& operation);
    Lane& lane(IoKind kind) { return lanes_[kind == IoKind::kRead ? 0 : 1]; }

    const std::uint64_t block_bytes_;
    mutable std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable drained_;
    PageSums page_sums_;
    bool closed_ = false;
    std::uint64_t next_sequence_ = 0;
    std::uint64_t num_in_flight_ = 0;
    std::set<std::shared_ptr<IoOperation>, Earlier> waiting_;  // operations with bytes left to cut
    std::multimap<IoClock::time_point, IoPiece*> delayed_;
    std::vector<IoPiece> pieces_;  // queue_depth of them, each free or lent
    std::vector<IoPiece*> free_pieces_;
    DeviceModel device_;
    Lane lanes_[2];
};

}  // namespace fuyou
