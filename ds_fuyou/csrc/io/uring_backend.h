// SPDX-License-Identifier: Apache-2.0
//
// The io_uring backend: threads that submit, reap and run completions, with a ring each.
#pragma once

#include <memory>

#include "io_backend.h"

namespace fuyou {

// Throws std::system_error where the kernel refuses io_uring (EPERM, ENOSYS, ENOMEM, ...).
std::unique_ptr<Backend> make_uring_backend(IoQueue& queue, const IoOptions& options);

}  // namespace fuyou
