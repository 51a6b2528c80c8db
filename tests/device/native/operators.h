// SPDX-License-Identifier: Apache-2.0
// Operators of the stand-in device: the CPU's kernels, launched late on a stream.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <map>

#include "memory.h"

namespace standin {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

int current_stream();
void set_current_stream(int stream);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
void resize_storage(const c10::Storage& storage, size_t bytes);
void register_operators();  // those for which torch prefers a composition although the CPU has a
                            // kernel

// How often what was done, by name. Names of copies say direction, lateness and stream.
std::map<std::string, int64_t> counters();

}  // namespace standin
