// SPDX-License-Identifier: Apache-2.0
#include "thread_backend.h"

#include <stdexcept>
#include <string>

namespace fuyou {
namespace {

constexpr unsigned kMaxThreads = 256;

}  // namespace

ThreadBackend::ThreadBackend(IoQueue& queue, unsigned num_threads) : queue_(queue)
{
    if (num_threads < 1 || num_threads > kMaxThreads) {
        throw std::invalid_argument("num_threads must be between 1 and " +
                                    std::to_string(kMaxThreads) + "; got " +
                                    std::to_string(num_threads));
    }
    try {
        for (unsigned i = 0; i < num_threads; ++i) {
            threads_.push_back(start_thread([this] { run_pieces(); }));
        }
    } catch (...) {
        queue_.close();
        join();
        throw;
    }
}

ThreadBackend::~ThreadBackend()
{
    join();
}

void ThreadBackend::join()
{
    for (std::thread& thread : threads_) {
        if (thread.joinable()) {
            thread.join();
        }
    }
}

void ThreadBackend::run_pieces()
{
    while (IoPiece* piece = queue_.take_or_wait()) {
        PieceStep step = queue_.begin(*piece);
        while (step == PieceStep::kTransfer) {
            step = queue_.settle(*piece, transfer(*piece));
        }
        if (step == PieceStep::kDone) {
            queue_.finish(piece);
        }
    }
}

}  // namespace fuyou
