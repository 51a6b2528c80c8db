// SPDX-License-Identifier: Apache-2.0
#if __has_include(<linux/io_uring.h>)
#include "buffer_table.h"

#include <algorithm>
#include <iterator>

namespace fuyou {
namespace {

constexpr unsigned kNumSlots = 1024;
constexpr std::uint64_t kMaxSlotBytes = 1024 * 1024 * 1024;

}  // namespace

// The table is made when it is first needed. A kernel without one is asked again each time, which
// costs nothing that matters.
bool BufferTable::create()
{
    if (!is_created_ && ring_.create_buffer_table(kNumSlots)) {
        is_created_ = true;
        for (unsigned index = kNumSlots; index > 0; --index) {
            free_indices_.push_back(index - 1);
        }
    }
    return is_created_;
}

bool BufferTable::insert(char* address, std::uint64_t num_bytes)
{
    if (!create()) {
        return false;
    }
    erase(address, num_bytes);
    for (std::uint64_t begin = 0; begin < num_bytes; begin += kMaxSlotBytes) {
        const std::uint64_t slot_bytes = std::min(kMaxSlotBytes, num_bytes - begin);
        if (free_indices_.empty() ||
            !ring_.update_buffer_slot(free_indices_.back(), address + begin, slot_bytes)) {
            erase(address, begin);
            return false;
        }
        slots_[reinterpret_cast<std::uintptr_t>(address + begin)] = {slot_bytes,
                                                                     free_indices_.back()};
        free_indices_.pop_back();
    }
    return num_bytes > 0;
}

void BufferTable::erase(char* address, std::uint64_t num_bytes)
{
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    auto slot = slots_.lower_bound(begin);
    if (slot != slots_.begin()) {
        const auto previous = std::prev(slot);
        slot = previous->first + previous->second.num_bytes > begin ? previous : slot;
    }
    while (num_bytes > 0 && slot != slots_.end() && slot->first < begin + num_bytes) {
        ring_.update_buffer_slot(slot->second.index, nullptr, 0);
        free_indices_.push_back(slot->second.index);
        slot = slots_.erase(slot);
    }
}

int BufferTable::find(const char* address, std::uint64_t num_bytes) const
{
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    auto slot = slots_.upper_bound(begin);
    if (slot == slots_.begin()) {
        return -1;
    }
    --slot;
    const bool is_inside = begin + num_bytes <= slot->first + slot->second.num_bytes;
    return is_inside ? static_cast<int>(slot->second.index) : -1;
}

}  // namespace fuyou
#endif
