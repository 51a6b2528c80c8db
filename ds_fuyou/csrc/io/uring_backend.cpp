// SPDX-License-Identifier: Apache-2.0
#include "uring_backend.h"

#include <cerrno>
#include <system_error>

#if __has_include(<linux/io_uring.h>)

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
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

// The ring belongs to its thread (IORING_SETUP_SINGLE_ISSUER), so the thread makes it, and calls
// that need it are sent there as commands.
class UringBackend final : public Backend {
  public:
    UringBackend(IoQueue& queue, unsigned queue_depth);
    ~UringBackend() override;

    void wake() override;
    bool register_buffer(char* address, std::uint64_t num_bytes) override;
    void unregister_buffer(char* address, std::uint64_t num_bytes) override;
    void join() override;

  private:
    using Command = std::function<bool(BufferTable&)>;
    struct PendingCommand {
        Command command;
        std::promise<bool> result;
    };

    void run(unsigned queue_depth, std::promise<void> started);
    int serve(UringRing& ring);
    void fail_all(int error);
    void arm_wake(UringRing& ring);
    void advance(UringRing& ring, IoPiece* piece, PieceStep step);
    void prepare(UringRing& ring, const IoPiece& piece);
    bool command(Command command);
    void run_commands();
    void refuse_commands();

    IoQueue& queue_;
    const int wake_fd_;
    std::thread thread_;

    std::mutex commands_mutex_;
    std::vector<PendingCommand> commands_;
    bool takes_commands_ = true;

    // Of the ring's thread.
    std::optional<BufferTable> buffers_;
    std::vector<IoPiece*> in_kernel_;
    bool is_wake_armed_ = false;
};

UringBackend::UringBackend(IoQueue& queue, unsigned queue_depth)
    : queue_(queue), wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))
{
    if (wake_fd_ < 0) {
        throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    std::promise<void> started;
    std::future<void> refusal = started.get_future();
    try {
        thread_ =
            start_thread([this, queue_depth,
                          promise = std::make_shared<std::promise<void>>(std::move(started))] {
                run(queue_depth, std::move(*promise));
            });
        refusal.get();
    } catch (...) {
        join();
        close(wake_fd_);
        throw;
    }
}

UringBackend::~UringBackend()
{
    join();
    close(wake_fd_);
}

void UringBackend::wake()
{
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the thread is awake.
    [[maybe_unused]] const ssize_t count = write(wake_fd_, &one, sizeof one);
}

void UringBackend::join()
{
    if (thread_.joinable()) {
        thread_.join();
    }
}

bool UringBackend::register_buffer(char* address, std::uint64_t num_bytes)
{
    return command([=](BufferTable& buffers) { return buffers.insert(address, num_bytes); });
}

void UringBackend::unregister_buffer(char* address, std::uint64_t num_bytes)
{
    command([=](BufferTable& buffers) {
        buffers.erase(address, num_bytes);
        return true;
    });
}

bool UringBackend::command(Command command)
{
    if (is_engine_thread()) {
        return buffers_ && command(*buffers_);
    }
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

void UringBackend::run_commands()
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

void UringBackend::refuse_commands()
{
    std::lock_guard<std::mutex> lock(commands_mutex_);
    takes_commands_ = false;
    for (PendingCommand& pending : commands_) {
        pending.result.set_value(false);
    }
    commands_.clear();
}

void UringBackend::run(unsigned queue_depth, std::promise<void> started)
{
    std::optional<UringRing> ring;
    try {
        ring.emplace(queue_depth + 1);  // one entry for the wake-up
    } catch (const std::system_error&) {
        started.set_exception(std::current_exception());
        return;
    }
    buffers_.emplace(*ring);
    in_kernel_.reserve(queue_depth);
    started.set_value();
    const int error = serve(*ring);
    refuse_commands();
    buffers_.reset();
    ring.reset();
    if (error != 0) {
        fail_all(error);
    }
}

// Takes, submits and reaps until the queue is drained; 0, or the errno that ended the ring.
int UringBackend::serve(UringRing& ring)
{
    while (true) {
        arm_wake(ring);
        run_commands();
        IoClock::time_point next_due;
        while (IoPiece* piece = queue_.take(&next_due)) {
            advance(ring, piece, queue_.begin(*piece));
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
void UringBackend::fail_all(int error)
{
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
void UringBackend::arm_wake(UringRing& ring)
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

void UringBackend::advance(UringRing& ring, IoPiece* piece, PieceStep step)
{
    switch (step) {
        case PieceStep::kTransfer:
            prepare(ring, *piece);
            in_kernel_.push_back(piece);
            break;
        case PieceStep::kDone:
            queue_.finish(piece);
            break;
        case PieceStep::kPutBack:
            break;
    }
}

void UringBackend::prepare(UringRing& ring, const IoPiece& piece)
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

std::unique_ptr<Backend> make_uring_backend(IoQueue& queue, unsigned queue_depth)
{
    return std::make_unique<UringBackend>(queue, queue_depth);
}

}  // namespace fuyou

#else

namespace fuyou {

std::unique_ptr<Backend> make_uring_backend(IoQueue&, unsigned)
{
    throw std::system_error(ENOSYS, std::generic_category(),
                            "built on a machine without <linux/io_uring.h>");
}

}  // namespace fuyou

#endif
