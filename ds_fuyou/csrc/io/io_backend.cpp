// SPDX-License-Identifier: Apache-2.0
#include "io_backend.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace fuyou {
namespace {

thread_local const Backend* backend_of_this_thread = nullptr;

}  // namespace

std::int64_t transfer(const IoPiece& piece)
{
    const auto offset = static_cast<off_t>(piece.next_offset());
    const ssize_t count =
        piece.kind() == IoKind::kRead
            ? pread(piece.fd, piece.next_buffer(), piece.next_num_bytes(), offset)
            : pwrite(piece.fd, piece.next_buffer(), piece.next_num_bytes(), offset);
    return count < 0 ? -errno : count;
}

bool Backend::is_engine_thread() const
{
    return backend_of_this_thread == this;
}

std::thread Backend::start_thread(std::function<void()> body)
{
    // A new thread inherits the mask of the one that starts it.
    sigset_t all_signals;
    sigset_t callers_signals;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &callers_signals);
    struct Restore {
        const sigset_t& signals;
        ~Restore() { pthread_sigmask(SIG_SETMASK, &signals, nullptr); }
    } restore{callers_signals};
    std::thread thread([this, body = std::move(body)]() noexcept {
        backend_of_this_thread = this;
        body();
    });
    pthread_setname_np(thread.native_handle(), "fuyou-io");
    return thread;
}

}  // namespace fuyou
