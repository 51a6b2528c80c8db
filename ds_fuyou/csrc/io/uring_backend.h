// SPDX-License-Identifier: Apache-2.0
//
// The io_uring backend: one thread that submits, reaps and runs completions.
#pragma once

#include <memory>

#include "io_backend.h"

namespace fuyou {

// Throws std::system_error where the kernel refuses io_uring (EPERM, ENOSYS, ENOMEM, ...).
std::unique_ptr<Backend> make_uring_backend(IoQueue& queue, unsigned queue_depth);

}  // namespace fuyou
