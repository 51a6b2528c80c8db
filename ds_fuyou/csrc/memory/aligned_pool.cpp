// SPDX-License-Identifier: Apache-2.0
#include "aligned_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
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
    return try_allocate(num_bytes, Fit::kFirst);
}

char* AlignedPool::try_allocate_beside_wanted(std::uint64_t num_bytes)
{
    return try_allocate(num_bytes, Fit::kBesideWanted);
}

char* AlignedPool::try_allocate_last(std::uint64_t num_bytes)
{
    return try_allocate(num_bytes, Fit::kLast);
}

char* AlignedPool::try_allocate(std::uint64_t num_bytes, Fit fit)
{
    if (num_bytes > capacity_bytes_) {
        return nullptr;
    }
    // An empty block takes a page too, so that every address handed out is unique.
    const std::uint64_t needed_bytes = round_up_to_page(std::max<std::uint64_t>(num_bytes, 1));
    std::lock_guard<std::mutex> lock(mutex_);
    const auto offset = find_locked(needed_bytes, fit);
    return offset ? take_locked(*offset, needed_bytes) : nullptr;
}

std::optional<std::uint64_t> AlignedPool::find_locked(std::uint64_t num_bytes, Fit fit) const
{
    std::optional<std::uint64_t> last;
    for (const auto& [offset, run_bytes] : free_) {
        const std::uint64_t end = offset + run_bytes;
        if (run_bytes < num_bytes) continue;
        if (fit == Fit::kFirst) return offset;
        if (fit == Fit::kLast) {
            last = end - num_bytes;
            continue;
        }
        std::uint64_t begin = offset;
        for (auto left = left_.lower_bound(offset); left != left_.end() && left->first < end;
             ++left) {
            if (left->first >= begin + num_bytes) break;
            if (left->second.is_wanted) begin = left->first + left->second.num_bytes;
        }
        if (end >= begin + num_bytes) return begin;
    }
    return last;
}

// The bytes are free.
char* AlignedPool::take_locked(std::uint64_t offset, std::uint64_t num_bytes)
{
    const auto run = std::prev(free_.upper_bound(offset));
    const std::uint64_t end = offset + num_bytes, run_end = run->first + run->second;
    if (run->first < offset) {
        run->second = offset - run->first;
    } else {
        free_.erase(run);
    }
    if (end < run_end) {
        free_.emplace(end, run_end - end);
    }
    auto left = left_.lower_bound(offset);
    if (left != left_.begin()) {
        const auto before = std::prev(left);
        if (before->first + before->second.num_bytes > offset) left = before;
    }
    while (left != left_.end() && left->first < end) left = left_.erase(left);
    allocated_.emplace(offset, num_bytes);
    used_bytes_ += num_bytes;
    peak_bytes_ = std::max(peak_bytes_, end);
    return base_ + offset;
}

AlignedPool::Left AlignedPool::leave(char* address, std::uint64_t num_bytes, bool is_wanted)
{
    static std::atomic<std::uint64_t> last_number{0};
    std::lock_guard<std::mutex> lock(mutex_);
    const std::uint64_t num_left = std::min(round_up_to_page(num_bytes), release_locked(address));
    const Left left{static_cast<std::uint64_t>(address - base_), ++last_number};
    left_[left.offset] = {num_left, left.number, is_wanted};
    return left;
}

char* AlignedPool::try_take_back(const Left& left)
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find_left_locked(left);
    return found == left_.end() ? nullptr : take_locked(left.offset, found->second.num_bytes);
}

void AlignedPool::unwant(const Left& left)
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find_left_locked(left);
    if (found != left_.end()) found->second.is_wanted = false;
}

AlignedPool::LeftBlocks::iterator AlignedPool::find_left_locked(const Left& left)
{
    const auto found = left_.find(left.offset);
    return found != left_.end() && found->second.number == left.number ? found : left_.end();
}

void AlignedPool::release(char* address)
{
    std::lock_guard<std::mutex> lock(mutex_);
    release_locked(address);
}

// How many bytes it was.
std::uint64_t AlignedPool::release_locked(char* address)
{
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
    const auto [offset, size] = *block;
    std::uint64_t num_bytes = size;
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
            return size;
        }
    }
    free_.emplace_hint(next, offset, num_bytes);
    return size;
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
