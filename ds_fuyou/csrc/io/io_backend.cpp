// SPDX-License-Identifier: Apache-2.0
#include "io_backend.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

namespace fuyou {
namespace {

thread_local const Backend* backend_of_this_thread = nullptr;

}  // namespace

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
