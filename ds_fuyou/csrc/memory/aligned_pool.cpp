// SPDX-License-Identifier: Apache-2.0
#include "aligned_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <sstream>
#include <stdexcept>

namespace fuyou {
namespace {

constexpr std::uint64_t kHugePageBytes = 2 * 1024 * 1024;

// Maps `num_bytes` at an address aligned to huge pages: one large page is one segment for the
// block layer and one lookup when the arena is pinned. The surplus on both sides is given back.
char* map_aligned(std::uint64_t num_bytes)
{
    const std::uint64_t padded_bytes = num_bytes + kHugePageBytes;
    void* mapping =
        mmap(nullptr, padded_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) {
        throw std::bad_alloc();
    }
    char* begin = static_cast<char*>(mapping);
    const auto misaligned_bytes = reinterpret_cast<std::uintptr_t>(begin) % kHugePageBytes;
    const std::uint64_t head_bytes = misaligned_bytes == 0 ? 0 : kHugePageBytes - misaligned_bytes;
    if (head_bytes > 0) {
        munmap(begin, head_bytes);
    }
    munmap(begin + head_bytes + num_bytes, kHugePageBytes - head_bytes);
    // A hint: where huge pages are switched off the arena works with small ones.
    madvise(begin + head_bytes, num_bytes, MADV_HUGEPAGE);
    return begin + head_bytes;
}

}  // namespace

AlignedPool::AlignedPool(std::uint64_t num_bytes, bool inherited)
{
    if (num_bytes > UINT64_MAX / 2) {
        throw std::bad_alloc();
    }
    capacity_bytes_ = round_up_to_page(num_bytes);
    if (capacity_bytes_ == 0) {
        return;
    }
    base_ = map_aligned(capacity_bytes_);
    // As above, a hint: old kernels copy.
    if (!inherited) madvise(base_, capacity_bytes_, MADV_WIPEONFORK);
    free_.emplace(0, capacity_bytes_);
}

AlignedPool::~AlignedPool()
{
    if (base_ != nullptr) {
        munmap(base_, capacity_bytes_);
    }
}

char* AlignedPool::try_allocate(std::uint64_t num_bytes)
{
    if (num_bytes > capacity_bytes_) {
        return nullptr;
    }
    // An empty block takes a page too, so that every address handed out is unique.
    const std::uint64_t needed_bytes = round_up_to_page(std::max<std::uint64_t>(num_bytes, 1));
    std::lock_guard<std::mutex> lock(mutex_);
    const auto run = std::find_if(free_.begin(), free_.end(), [needed_bytes](const auto& item) {
        return item.second >= needed_bytes;
    });
    if (run == free_.end()) {
        return nullptr;
    }
    const std::uint64_t offset = run->first;
    const std::uint64_t rest_bytes = run->second - needed_bytes;
    free_.erase(run);
    if (rest_bytes > 0) {
        free_.emplace(offset + needed_bytes, rest_bytes);
    }
    allocated_.emplace(offset, needed_bytes);
    used_bytes_ += needed_bytes;
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
    return base_ + offset;
}

void AlignedPool::release(char* address)
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto address_value = reinterpret_cast<std::uintptr_t>(address);
    const auto base_value = reinterpret_cast<std::uintptr_t>(base_);
    const auto block =
        address_value < base_value ? allocated_.end() : allocated_.find(address_value - base_value);
    if (block == allocated_.end()) {
        std::ostringstream message;
        message
            << "release() takes the start of a block that try_allocate() handed out and that was "
            << "not released yet; got " << static_cast<const void*>(address) << " in a pool of "
            << capacity_bytes_ << " bytes at " << static_cast<const void*>(base_)
            << ": release each block once, by the address it was allocated with";
        throw std::invalid_argument(message.str());
    }
    std::uint64_t offset = block->first;
    std::uint64_t num_bytes = block->second;
    allocated_.erase(block);
    used_bytes_ -= num_bytes;

    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + num_bytes == next->first) {
        num_bytes += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            previous->second += num_bytes;
            return;
        }
    }
    free_.emplace_hint(next, offset, num_bytes);
}

std::uint64_t AlignedPool::used_bytes() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return used_bytes_;
}

std::uint64_t AlignedPool::peak_bytes() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_bytes_;
}

std::uint64_t AlignedPool::largest_free_bytes() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    std::uint64_t largest_bytes = 0;
    for (const auto& [offset, num_bytes] : free_) {
        largest_bytes = std::max(largest_bytes, num_bytes);
    }
    return largest_bytes;
}

}  // namespace fuyou
