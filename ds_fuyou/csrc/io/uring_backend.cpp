// SPDX-License-Identifier: Apache-2.0
#include "uring_backend.h"

#include <cerrno>
#include <system_error>

#if __has_include(<linux/io_uring.h>)

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "buffer_table.h"
#include "uring_ring.h"

namespace fuyou {
namespace {

constexpr unsigned kOpReadFixed = 4;
constexpr unsigned kOpWriteFixed = 5;
constexpr unsigned kOpPollAdd = 6;
constexpr unsigned kOpRead = 22;       // Linux 5.6
constexpr unsigned kOpWrite = 23;      // Linux 5.6
constexpr std::uint64_t kWakeTag = 0;  // a piece's tag is its address

class UringBackend;

// One ring, and the thread that it belongs to (IORING_SETUP_SINGLE_ISSUER): the thread makes it,
// and calls that need it are sent there as commands.
class RingThread {
  public:
    // Of pieces it has at most `most` in the kernel, and no more than set_window() says.
    RingThread(UringBackend& backend, IoQueue& queue, unsigned most);
    ~RingThread();
    RingThread(const RingThread&) = delete;
    RingThread& operator=(const RingThread&) = delete;

    using Command = std::function<bool(BufferTable&)>;
    // Runs it on the thread, and waits; false where the ring is gone. Not on an engine thread.
    bool command(Command command);
    void run(std::promise<void> started);
    void wake();
    void set_window(unsigned num_pieces) { window_ = num_pieces; }
    bool has_room() const { return num_in_kernel_ < window_; }

    std::thread thread;

  private:
    struct PendingCommand {
        Command command;
        std::promise<bool> result;
    };

    int serve(UringRing& ring);
    void fail_all(int error);
    void arm_wake(UringRing& ring);
    void advance(UringRing& ring, IoPiece* piece, PieceStep step);
    void prepare(UringRing& ring, const IoPiece& piece);
    void run_commands();
    void refuse_commands();

    UringBackend& backend_;
    IoQueue& queue_;
    const unsigned most_;
    const int wake_fd_;
    std::atomic<unsigned> window_;

    std::mutex commands_mutex_;
    std::vector<PendingCommand> commands_;
    bool takes_commands_ = true;

    // Written by the ring's thread alone, as what follows is used by it alone.
    std::atomic<unsigned> num_in_kernel_{0};
    std::optional<BufferTable> buffers_;
    std::vector<IoPiece*> in_kernel_;
    bool is_wake_armed_ = false;
};

// [Note: several rings]
// What a thread does for a piece (its checksums, looking up its pages) bounds what one thread can
// move, so each ring takes a part of the queue depth, and no more. The first ring with room is
// woken for what was submitted; one that is full while there is more wakes the next. So few
// requests are served by one thread, and a thread that falls behind hands on what comes. Nothing
// is forgotten: a ring looks at the queue after every completion that makes room, so where none
// has room when something is submitted, each looks later.
class UringBackend final : public Backend {
  public:
    UringBackend(IoQueue& queue, unsigned queue_depth, unsigned num_rings);
    ~UringBackend() override { join(); }

    void wake() override;
    void wake_all() override;
    bool register_buffer(char* address, std::uint64_t num_bytes) override;
    void unregister_buffer(char* address, std::uint64_t num_bytes) override;
    void join() override;

  private:
    void start(RingThread& ring);

    std::vector<std::unique_ptr<RingThread>> rings_;
    std::mutex buffers_mutex_;  // all rings have the same buffers, but for those that were refused
};

UringBackend::UringBackend(IoQueue& queue, unsigned queue_depth, unsigned num_rings)
{
    // None of them looks at the others yet: nothing is submitted before all are there.
    rings_.reserve(num_rings);
    for (unsigned i = 0; i < num_rings; ++i) {
        try {
            auto ring = std::make_unique<RingThread>(*this, queue, queue_depth);
            start(*ring);
            rings_.push_back(std::move(ring));
        } catch (const std::exception&) {
            if (rings_.empty()) throw;
            break;  // limits of memory, descriptors or threads: fewer share the depth
        }
    }
    const auto num_started = static_cast<unsigned>(rings_.size());
    for (const auto& ring : rings_) {
        ring->set_window((queue_depth + num_started - 1) / num_started);
    }
}

void UringBackend::start(RingThread& ring)
{
    auto started = std::make_shared<std::promise<void>>();
    std::future<void> refusal = started->get_future();
    ring.thread = start_thread([&ring, started] { ring.run(std::move(*started)); });
    try {
        refusal.get();
    } catch (...) {
        ring.thread.join();
        throw;
    }
}

void UringBackend::wake()
{
    for (const auto& ring : rings_) {
        if (ring->has_room()) {
            ring->wake();
            return;
        }
    }
}

void UringBackend::wake_all()
{
    for (const auto& ring : rings_) {
        ring->wake();
    }
}

void UringBackend::join()
{
    for (const auto& ring : rings_) {
        if (ring->thread.joinable()) {
            ring->thread.join();
        }
    }
}

bool UringBackend::register_buffer(char* address, std::uint64_t num_bytes)
{
    std::lock_guard<std::mutex> lock(buffers_mutex_);
    return std::all_of(rings_.begin(), rings_.end(), [=](const auto& ring) {
        return ring->command(
            [=](BufferTable& buffers) { return buffers.insert(address, num_bytes); });
    });
}

void UringBackend::unregister_buffer(char* address, std::uint64_t num_bytes)
{
    std::lock_guard<std::mutex> lock(buffers_mutex_);
    for (const auto& ring : rings_) {
        ring->command([=](BufferTable& buffers) {
            buffers.erase(address, num_bytes);
            return true;
        });
    }
}

RingThread::RingThread(UringBackend& backend, IoQueue& queue, unsigned most)
    : backend_(backend),
      queue_(queue),
      most_(most),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      window_(most)
{
    if (wake_fd_ < 0) {
        throw std::system_error(errno, std::generic_category(), "eventfd");
    }
}

RingThread::~RingThread()
{
    close(wake_fd_);
}

void RingThread::wake()
{
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the thread is awake.
    [[maybe_unused]] const ssize_t count = write(wake_fd_, &one, sizeof one);
}

bool RingThread::command(Command command)
{
    std::future<bool> result;
    {
        std::lock_guard<std::mutex> lock(commands_mutex_);
        if (!takes_commands_) {
            return false;
        }
        commands_.push_back({std::move(command), {}});
        result = commands_.back().result.get_future();
    }
    wake();
    return result.get();
}

void RingThread::run_commands()
{
    std::vector<PendingCommand> commands;
    {
        std::lock_guard<std::mutex> lock(commands_mutex_);
        commands.swap(commands_);
    }
    for (PendingCommand& pending : commands) {
        pending.result.set_value(pending.command(*buffers_));
    }
}

void RingThread::refuse_commands()
{
    std::lock_guard<std::mutex> lock(commands_mutex_);
    takes_commands_ = false;
    for (PendingCommand& pending : commands_) {
        pending.result.set_value(false);
    }
    commands_.clear();
}

void RingThread::run(std::promise<void> started)
{
    std::optional<UringRing> ring;
    try {
        ring.emplace(most_ + 1);  // one entry for the wake-up
    } catch (const std::system_error&) {
        started.set_exception(std::current_exception());
        return;
    }
    buffers_.emplace(*ring);
    in_kernel_.reserve(most_);
    started.set_value();
    const int error = serve(*ring);
    refuse_commands();
    buffers_.reset();
    ring.reset();
    if (error != 0) {
        fail_all(error);
    }
    backend_.wake_all();  // for the others it is the end, too
}

// Takes, submits and reaps until the queue is drained; 0, or the errno that ended the ring.
int RingThread::serve(UringRing& ring)
{
    while (true) {
        arm_wake(ring);
        run_commands();
        IoClock::time_point next_due = IoClock::time_point::max();
        while (has_room()) {
            IoPiece* piece = queue_.take(&next_due);
            if (piece == nullptr) break;
            advance(ring, piece, queue_.begin(*piece));
        }
        if (!has_room() && queue_.has_more()) {
            backend_.wake();
        }
        if (queue_.is_drained()) {
            return 0;
        }
        std::chrono::nanoseconds timeout(-1);
        if (next_due != IoClock::time_point::max()) {
            timeout = std::max<std::chrono::nanoseconds>(next_due - IoClock::now(), {});
        }
        if (const int error = ring.enter(timeout)) {
            return error;
        }
        io_uring_cqe completion;
        while (ring.next_completion(&completion)) {
            if (completion.user_data == kWakeTag) {
                is_wake_armed_ = false;
                continue;
            }
            auto* piece = reinterpret_cast<IoPiece*>(completion.user_data);
            in_kernel_.erase(std::find(in_kernel_.begin(), in_kernel_.end(), piece));
            num_in_kernel_ = static_cast<unsigned>(in_kernel_.size());
            // The kernel gives up what would block where it may start no thread for it (ulimit -u,
            // pids.max). This one can wait instead.
            const bool is_given_up = completion.res == -ECANCELED;
            const std::int64_t result = is_given_up ? transfer(*piece) : completion.res;
            advance(ring, piece, queue_.settle(*piece, result));
        }
    }
}

// The ring died under us (its descriptor was closed by somebody, say). Nothing can be known of the
// pieces in the kernel, so they fail like all that follow: an error in the training thread, no
// hang.
void RingThread::fail_all(int error)
{
    num_in_kernel_ = 0;
    for (IoPiece* piece : std::exchange(in_kernel_, {})) {
        piece->error = error;
        queue_.finish(piece);
    }
    while (IoPiece* piece = queue_.take_or_wait()) {
        piece->error = error;
        queue_.finish(piece);
    }
}

// The wake-up is emptied before it is armed again, and both before commands and the queue are
// looked at: whatever comes after that finds it armed.
void RingThread::arm_wake(UringRing& ring)
{
    if (is_wake_armed_) {
        return;
    }
    std::uint64_t num_wakes = 0;
    [[maybe_unused]] const ssize_t count = read(wake_fd_, &num_wakes, sizeof num_wakes);
    io_uring_sqe* entry = ring.next_entry();
    entry->opcode = kOpPollAdd;
    entry->fd = wake_fd_;
    entry->poll_events = POLLIN;
    entry->user_data = kWakeTag;
    is_wake_armed_ = true;
}

void RingThread::advance(UringRing& ring, IoPiece* piece, PieceStep step)
{
    switch (step) {
        case PieceStep::kTransfer:
            prepare(ring, *piece);
            in_kernel_.push_back(piece);
            num_in_kernel_ = static_cast<unsigned>(in_kernel_.size());
            break;
        case PieceStep::kDone:
            queue_.finish(piece);
            break;
        case PieceStep::kPutBack:
            break;
    }
}

void RingThread::prepare(UringRing& ring, const IoPiece& piece)
{
    const bool is_read = piece.kind() == IoKind::kRead;
    const std::uint64_t num_bytes = piece.next_num_bytes();
    const int slot = buffers_->find(piece.next_buffer(), num_bytes);
    io_uring_sqe* entry = ring.next_entry();
    if (slot >= 0) {
        entry->opcode = is_read ? kOpReadFixed : kOpWriteFixed;
        entry->buf_index = static_cast<std::uint16_t>(slot);
    } else {
        entry->opcode = is_read ? kOpRead : kOpWrite;
    }
    entry->fd = piece.fd;
    entry->off = piece.next_offset();
    entry->addr = reinterpret_cast<std::uintptr_t>(piece.next_buffer());
    entry->len = static_cast<std::uint32_t>(num_bytes);
    entry->user_data = reinterpret_cast<std::uintptr_t>(&piece);
}

}  // namespace

std::unique_ptr<Backend> make_uring_backend(IoQueue& queue, const IoOptions& options)
{
    return std::make_unique<UringBackend>(queue, options.queue_depth, options.num_rings);
}

}  // namespace fuyou

#else

namespace fuyou {

std::unique_ptr<Backend> make_uring_backend(IoQueue&, const IoOptions&)
{
    throw std::system_error(ENOSYS, std::generic_category(),
                            "built on a machine without <linux/io_uring.h>");
}

}  // namespace fuyou

#endif
