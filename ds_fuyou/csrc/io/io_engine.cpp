// SPDX-License-Identifier: Apache-2.0
#include "io_engine.h"

#include <unistd.h>

#include <mutex>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "io_queue.h"
#include "thread_backend.h"
#include "uring_backend.h"

namespace fuyou {

struct IoEngine::Impl {
    explicit Impl(const IoOptions& options);

    // A child of fork() has none of the engine's threads, and its locks may be held for ever.
    bool is_ours() const { return getpid() == owner; }
    void check_ours(const char* call) const
    {
        if (!is_ours()) {
            throw std::runtime_error(std::string(call) +
                                     " must be called in the process that made the I/O engine, but "
                                     "this is a child of it by fork(): create an engine here");
        }
    }
    void check_waits(const char* call) const
    {
        if (backend->is_engine_thread()) {
            throw std::runtime_error(std::string(call) +
                                     " must not be called from a completion: it waits for the "
                                     "thread that runs it");
        }
    }

    const pid_t owner = getpid();
    IoQueue queue;
    IoBackend kind = IoBackend::kThreads;
    std::string reason;
    std::unique_ptr<Backend> backend;
    std::mutex close_mutex;
};

IoEngine::Impl::Impl(const IoOptions& options) : queue(options)
{
    if (options.backend == IoBackend::kThreads) {
        reason = "the thread backend was asked for";
    } else {
        try {
            backend = make_uring_backend(queue, options);
            kind = IoBackend::kIoUring;
            return;
        } catch (const std::system_error& error) {
            if (options.backend == IoBackend::kIoUring) {
                throw;
            }
            reason = error.what();
        }
    }
    backend = std::make_unique<ThreadBackend>(queue, options.num_threads);
}

IoEngine::IoEngine(const IoOptions& options) : impl_(std::make_unique<Impl>(options)) {}

IoEngine::~IoEngine()
{
    if (!impl_->is_ours()) {
        static_cast<void>(impl_.release());
        return;
    }
    close();
}

void IoEngine::submit(IoKind kind, std::vector<IoExtent> extents, std::int64_t priority,
                      IoCompletion done)
{
    impl_->check_ours("submit()");
    if (impl_->queue.submit(kind, std::move(extents), priority, std::move(done))) {
        impl_->backend->wake();
    }
}

bool IoEngine::register_buffer(char* address, std::uint64_t num_bytes)
{
    impl_->check_ours("register_buffer()");
    impl_->check_waits("register_buffer()");
    return impl_->backend->register_buffer(address, num_bytes);
}

void IoEngine::unregister_buffer(char* address, std::uint64_t num_bytes)
{
    impl_->check_ours("unregister_buffer()");
    impl_->check_waits("unregister_buffer()");
    impl_->backend->unregister_buffer(address, num_bytes);
}

void IoEngine::set_throttle(double read_bytes_per_sec, double write_bytes_per_sec)
{
    impl_->queue.set_throttle(read_bytes_per_sec, write_bytes_per_sec);
}

void IoEngine::add_fault(const IoFault& fault)
{
    impl_->queue.add_fault(fault);
}

void IoEngine::clear_faults()
{
    impl_->queue.clear_faults();
    impl_->backend->wake_all();
}

IoLaneStats IoEngine::stats(IoKind kind) const
{
    return impl_->queue.stats(kind);
}

IoBackend IoEngine::backend() const
{
    return impl_->kind;
}

std::string IoEngine::backend_reason() const
{
    return impl_->reason;
}

std::uint64_t IoEngine::num_in_flight() const
{
    return impl_->queue.num_in_flight();
}

void IoEngine::watch_pages(int fd, std::uint64_t offset, std::uint64_t num_bytes)
{
    impl_->queue.page_sums().watch(fd, offset, num_bytes);
}

void IoEngine::forget_pages(int fd, std::uint64_t offset, std::uint64_t num_bytes)
{
    impl_->queue.page_sums().forget(fd, offset, num_bytes);
}

std::uint64_t IoEngine::page_digest(const FileRanges& ranges) const
{
    return impl_->queue.page_sums().digest(ranges);
}

void IoEngine::expect_pages(const FileRanges& ranges, std::uint64_t digest)
{
    impl_->queue.page_sums().expect(ranges, digest);
}

bool IoEngine::is_half_read(const FileRanges& ranges) const
{
    return impl_->queue.page_sums().is_half_read(ranges);
}

void IoEngine::close()
{
    while (!close(3600.0)) {
    }
}

bool IoEngine::close(double timeout_secs)
{
    if (!impl_->is_ours()) {
        return true;
    }
    impl_->check_waits("close()");
    std::lock_guard<std::mutex> lock(impl_->close_mutex);
    impl_->queue.close();
    impl_->backend->wake_all();
    if (!impl_->queue.wait_drained(timeout_secs)) {
        return false;
    }
    impl_->backend->join();
    return true;
}

}  // namespace fuyou
