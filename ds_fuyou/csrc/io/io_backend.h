// SPDX-License-Identifier: Apache-2.0
//
// What the engine asks of a backend. Private to io/. A backend starts its threads when it is made;
// they take pieces from the queue until it is closed and drained.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

#include "io_queue.h"

namespace fuyou {

class Backend {
  public:
    virtual ~Backend() = default;  // after join()
    // Something was submitted.
    virtual void wake() = 0;
    // The queue was closed, or what it held back goes on.
    virtual void wake_all() = 0;
    virtual bool register_buffer(char* address, std::uint64_t num_bytes) = 0;
    virtual void unregister_buffer(char* address, std::uint64_t num_bytes) = 0;
    // Waits for the threads; only after IoQueue::close() and wake_all().
    virtual void join() = 0;

    // True on the threads that this backend started.
    bool is_engine_thread() const;

  protected:
    // Starts a thread with every signal blocked: signals belong to the host program's own threads.
    // An exception that leaves `body` ends the process. Throws std::system_error.
    std::thread start_thread(std::function<void()> body);
};

// What is left of a piece, by one system call of this thread: bytes, or a negative errno.
std::int64_t transfer(const IoPiece& piece);

}  // namespace fuyou
