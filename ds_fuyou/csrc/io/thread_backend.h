// SPDX-License-Identifier: Apache-2.0
//
// The fall-back where io_uring is forbidden: a pool of threads that call pread and pwrite.
#pragma once

#include <vector>

#include "io_backend.h"

namespace fuyou {

class ThreadBackend final : public Backend {
  public:
    // Throws std::invalid_argument unless 1 <= num_threads <= 256.
    ThreadBackend(IoQueue& queue, unsigned num_threads);
    ~ThreadBackend() override;

    void wake() override {}  // the threads wait in the queue itself
    void wake_all() override {}
    bool register_buffer(char*, std::uint64_t) override { return false; }
    void unregister_buffer(char*, std::uint64_t) override {}
    void join() override;

  private:
    void run_pieces();

    IoQueue& queue_;
    std::vector<std::thread> threads_;
};

}  // namespace fuyou
