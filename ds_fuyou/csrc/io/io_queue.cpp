// SPDX-License-Identifier: Apache-2.0
#include "io_queue.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace fuyou {
namespace {

constexpr std::uint64_t kDirectBytes = 4096;  // offsets and lengths O_DIRECT accepts everywhere
constexpr std::uint64_t kMaxBlockBytes = 1024 * 1024 * 1024;
constexpr unsigned kMaxQueueDepth = 4096;
constexpr unsigned kMaxRings = 64;
// A transfer that the kernel refuses for now is tried again after a pause, about two seconds in
// all.
constexpr unsigned kMaxRetries = 1000;
constexpr auto kRetryPause = std::chrono::milliseconds(2);

std::uint64_t round_down(std::uint64_t num_bytes)
{
    return num_bytes / kDirectBytes * kDirectBytes;
}

bool is_direct(int fd)
{
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
}

std::uint64_t checked_block_bytes(const IoOptions& options)
{
    const std::uint64_t block_bytes = options.block_bytes;
    if (block_bytes < kDirectBytes || block_bytes > kMaxBlockBytes ||
        block_bytes % kDirectBytes != 0) {
        throw std::invalid_argument(
            "block_bytes must be a multiple of 4096 between 4096 and 1 GiB; got " +
            std::to_string(block_bytes));
    }
    if (options.num_rings < 1 || options.num_rings > kMaxRings) {
        throw std::invalid_argument("num_rings must be between 1 and " + std::to_string(kMaxRings) +
                                    "; got " + std::to_string(options.num_rings));
    }
    if (options.queue_depth < 1 || options.queue_depth > kMaxQueueDepth) {
        throw std::invalid_argument("queue_depth must be between 1 and " +
                                    std::to_string(kMaxQueueDepth) + "; got " +
                                    std::to_string(options.queue_depth));
    }
    return block_bytes;
}

void check_operation(const std::vector<IoExtent>& extents, const IoCompletion& done)
{
    if (!done) {
        throw std::invalid_argument("submit() needs a completion; got an empty function");
    }
    constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
    for (std::size_t i = 0; i < extents.size(); ++i) {
        const IoExtent& extent = extents[i];
        if (extent.offset > kMaxOffset || extent.num_bytes > kMaxOffset - extent.offset) {
            throw std::invalid_argument("extent " + std::to_string(i) +
                                        " must end below 2^63; got offset " +
                                        std::to_string(extent.offset) + " and " +
                                        std::to_string(extent.num_bytes) + " bytes");
        }
        if (extent.buffer == nullptr && extent.num_bytes > 0) {
            throw std::invalid_argument("extent " + std::to_string(i) +
                                        " must have a buffer; got a null pointer for " +
                                        std::to_string(extent.num_bytes) + " bytes");
        }
    }
}

void skip_empty_extents(IoOperation& operation)
{
    while (operation.next_extent < operation.extents.size() &&
           operation.next_byte == operation.extents[operation.next_extent].num_bytes) {
        ++operation.next_extent;
        operation.next_byte = 0;
    }
}

bool is_cut_up(const IoOperation& operation)
{
    return operation.num_pieces_cut > 0 && operation.next_extent == operation.extents.size();
}

}  // namespace

std::uint64_t IoPiece::next_num_bytes() const
{
    const std::uint64_t rest_bytes = num_bytes - num_bytes_done;
    if (!fate.is_short) {
        return rest_bytes;
    }
    const std::uint64_t half_bytes = round_down(rest_bytes / 2);
    if (half_bytes > 0) {
        return half_bytes;
    }
    return is_direct(fd) ? rest_bytes : std::max<std::uint64_t>(rest_bytes / 2, 1);
}

IoQueue::IoQueue(const IoOptions& options)
    : block_bytes_(checked_block_bytes(options)), pieces_(options.queue_depth)
{
    for (auto piece = pieces_.rbegin(); piece != pieces_.rend(); ++piece) {
        free_pieces_.push_back(&*piece);
    }
}

bool IoQueue::submit(IoKind kind, std::vector<IoExtent> extents, std::int64_t priority,
                     IoCompletion done)
{
    check_operation(extents, done);
    auto operation = std::make_shared<IoOperation>();
    operation->kind = kind;
    operation->extents = std::move(extents);
    operation->priority = priority;
    operation->done = std::move(done);
    skip_empty_extents(*operation);

    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) {
        throw std::runtime_error(
            "the I/O engine must be open to accept an operation, but close() was called: submit "
            "before close(), or create a new engine");
    }
    operation->sequence = next_sequence_++;
    waiting_.insert(std::move(operation));
    ++num_in_flight_;
    work_.notify_one();
    return !free_pieces_.empty();
}

IoPiece* IoQueue::take(IoClock::time_point* next_due)
{
    std::lock_guard<std::mutex> lock(mutex_);
    return take_locked(next_due);
}

IoPiece* IoQueue::take_or_wait()
{
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        IoClock::time_point next_due;
        if (IoPiece* piece = take_locked(&next_due)) {
            // One submission wakes one thread; each taker wakes the next while there is work.
            if (has_more_locked()) {
                work_.notify_one();
            }
            return piece;
        }
        if (closed_ && num_in_flight_ == 0) {
            return nullptr;
        }
        if (next_due == IoClock::time_point::max()) {
            work_.wait(lock);
        } else {
            work_.wait_until(lock, next_due);
        }
    }
}

bool IoQueue::has_more() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return has_more_locked();
}

bool IoQueue::has_more_locked() const
{
    return !delayed_.empty() || (!waiting_.empty() && !free_pieces_.empty());
}

IoPiece* IoQueue::take_locked(IoClock::time_point* next_due)
{
    const IoClock::time_point now = IoClock::now();
    if (!delayed_.empty() && delayed_.begin()->first <= now) {
        IoPiece* piece = delayed_.begin()->second;
        delayed_.erase(delayed_.begin());
        return piece;
    }
    while (!waiting_.empty() && !free_pieces_.empty()) {
        IoClock::time_point not_before;
        IoPiece* piece = cut_piece(now, &not_before);
        if (not_before <= now) {
            return piece;
        }
        delayed_.emplace(not_before, piece);
    }
    *next_due = delayed_.empty() ? IoClock::time_point::max() : delayed_.begin()->first;
    return nullptr;
}

// Cuts the next piece off the first waiting operation. An operation of no bytes gets one empty
// piece, so that its completion too runs on an engine thread.
IoPiece* IoQueue::cut_piece(IoClock::time_point now, IoClock::time_point* not_before)
{
    const std::shared_ptr<IoOperation> operation = *waiting_.begin();
    IoExtent run{-1, 0, nullptr, 0};
    if (operation->next_extent < operation->extents.size()) {
        run = operation->extents[operation->next_extent];
        run.offset += operation->next_byte;
        run.buffer += operation->next_byte;
        // Cut where the file offset is a multiple of 4096, also in a run that does not start there.
        run.num_bytes = std::min(run.num_bytes - operation->next_byte,
                                 block_bytes_ - run.offset % kDirectBytes);
        operation->next_byte += run.num_bytes;
        skip_empty_extents(*operation);
    }
    if (operation->num_pieces_cut == 0) {
        Lane& active = lane(operation->kind);
        if (active.num_active++ == 0) {
            active.busy_since = now;
        }
    }
    IoPiece* piece = free_pieces_.back();
    free_pieces_.pop_back();
    *piece = IoPiece{};
    piece->operation = operation;
    piece->index = operation->num_pieces_cut++;
    piece->fd = run.fd;
    piece->offset = run.offset;
    piece->buffer = run.buffer;
    piece->num_bytes = run.num_bytes;
    piece->fate = device_.admit(operation->kind, run, now, not_before);
    ++operation->num_pieces_in_flight;
    if (is_cut_up(*operation)) {
        waiting_.erase(waiting_.begin());
    }
    return piece;
}

PieceStep IoQueue::begin(IoPiece& piece)
{
    if (piece.operation->failed) {
        return PieceStep::kDone;  // cancelled: its operation reports the failure that came first
    }
    if (piece.fate.error > 0) {
        return settle(piece, -std::exchange(piece.fate.error, 0));
    }
    if (piece.kind() == IoKind::kWrite)
        page_sums_.remember(piece.fd, piece.offset, piece.buffer, piece.num_bytes);
    return piece.num_bytes == 0 ? PieceStep::kDone : PieceStep::kTransfer;
}

PieceStep IoQueue::settle(IoPiece& piece, std::int64_t result)
{
    if (result < 0) {
        return settle_error(piece, static_cast<int>(-result));
    }
    auto num_bytes = static_cast<std::uint64_t>(result);
    if (piece.num_bytes_done + num_bytes == piece.num_bytes && !piece.fate.is_short) {
        piece.num_bytes_done = piece.num_bytes;
        return PieceStep::kDone;
    }
    if (is_direct(piece.fd)) {
        if (std::exchange(piece.fate.is_short, false) && num_bytes > 512) {
            num_bytes -= 512;  // the worst a device does: it stops inside a block
        }
        // The rest must start on a block again, so the block that is partly there is redone.
        num_bytes = round_down(num_bytes);
    }
    piece.fate.is_short = false;
    piece.num_bytes_done += num_bytes;
    if (num_bytes > 0) {
        piece.num_retries = 0;
        return piece.num_bytes_done == piece.num_bytes ? PieceStep::kDone : PieceStep::kTransfer;
    }
    // Less than a block may be a hiccup once; at the end of a file it stays so for ever.
    if (result > 0 && piece.num_retries++ == 0) {
        return PieceStep::kTransfer;
    }
    piece.error = piece.kind() == IoKind::kRead ? ENODATA : ENOSPC;
    return PieceStep::kDone;
}

PieceStep IoQueue::settle_error(IoPiece& piece, int error)
{
    const bool is_transient = error == EINTR || error == EAGAIN;
    if (!is_transient || ++piece.num_retries > kMaxRetries) {
        piece.error = error;
        return PieceStep::kDone;
    }
    if (error == EINTR) {
        return PieceStep::kTransfer;
    }
    put_back(piece, IoClock::now() + kRetryPause);
    return PieceStep::kPutBack;
}

void IoQueue::put_back(IoPiece& piece, IoClock::time_point not_before)
{
    std::lock_guard<std::mutex> lock(mutex_);
    delayed_.emplace(not_before, &piece);
    work_.notify_one();
}

void IoQueue::finish(IoPiece* piece) noexcept
{
    std::shared_ptr<IoOperation> operation = std::move(piece->operation);
    bool is_complete = false;
    if (operation->kind == IoKind::kRead && piece->error == 0 &&
        piece->num_bytes_done == piece->num_bytes) {
        const std::uint64_t changed =
            page_sums_.first_changed(piece->fd, piece->offset, piece->buffer, piece->num_bytes);
        if (changed != PageSums::kNone) {
            piece->error = EBADMSG;
            piece->offset = changed;
        }
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        piece->operation = operation;
        record_piece(*piece);
        piece->operation.reset();
        free_pieces_.push_back(piece);
        is_complete =
            operation->num_pieces_in_flight == 0 && (operation->failed || is_cut_up(*operation));
        if (is_complete) {
            record_operation(*operation);
        }
        if (closed_ && num_in_flight_ == 0) {
            work_.notify_all();
            drained_.notify_all();
        } else if (!waiting_.empty()) {
            work_.notify_one();
        }
    }
    if (is_complete) {
        operation->done(operation->outcome);
    }
}

void IoQueue::record_piece(IoPiece& piece)
{
    IoOperation& operation = *piece.operation;
    --operation.num_pieces_in_flight;
    operation.outcome.num_bytes_done += piece.num_bytes_done;
    lane(operation.kind).stats.num_bytes += piece.num_bytes_done;
    // Of several failing pieces the first in the operation's order is reported.
    if (piece.error != 0 && piece.index < operation.failed_piece) {
        waiting_.erase(piece.operation);  // what is not cut yet never starts
        operation.failed_piece = piece.index;
        operation.failed = true;
        operation.outcome.error = piece.error;
        operation.outcome.fd = piece.fd;
        operation.outcome.offset = piece.offset;
    }
}

void IoQueue::record_operation(const IoOperation& operation)
{
    --num_in_flight_;
    Lane& active = lane(operation.kind);
    ++active.stats.num_operations;
    if (--active.num_active == 0) {
        active.stats.busy_secs +=
            std::chrono::duration<double>(IoClock::now() - active.busy_since).count();
    }
}

void IoQueue::close()
{
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    work_.notify_all();
}

bool IoQueue::wait_drained(double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    return drained_.wait_for(lock, std::chrono::duration<double>(timeout_secs),
                             [this] { return closed_ && num_in_flight_ == 0; });
}

bool IoQueue::is_drained() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_ && num_in_flight_ == 0;
}

void IoQueue::set_throttle(double read_bytes_per_sec, double write_bytes_per_sec)
{
    std::lock_guard<std::mutex> lock(mutex_);
    device_.set_throttle(read_bytes_per_sec, write_bytes_per_sec);
}

void IoQueue::add_fault(const IoFault& fault)
{
    std::lock_guard<std::mutex> lock(mutex_);
    device_.add_fault(fault);
}

void IoQueue::clear_faults()
{
    std::lock_guard<std::mutex> lock(mutex_);
    device_.clear_faults();
    const IoClock::time_point now = IoClock::now();
    for (auto held = delayed_.lower_bound(DeviceModel::kHeld); held != delayed_.end();
         held = delayed_.erase(held))
        delayed_.emplace(now, held->second);
    work_.notify_all();
}

IoLaneStats IoQueue::stats(IoKind kind) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    const Lane& asked = lanes_[kind == IoKind::kRead ? 0 : 1];
    IoLaneStats stats = asked.stats;
    if (asked.num_active > 0) {
        stats.busy_secs += std::chrono::duration<double>(IoClock::now() - asked.busy_since).count();
    }
    return stats;
}

std::uint64_t IoQueue::num_in_flight() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return num_in_flight_;
}

}  // namespace fuyou
