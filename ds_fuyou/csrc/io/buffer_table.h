// SPDX-License-Identifier: Apache-2.0
//
// Which memory is registered with a ring, and under which index. Private to io/; used by the ring's
// thread alone.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "uring_ring.h"

namespace fuyou {

class BufferTable {
  public:
    explicit BufferTable(UringRing& ring) : ring_(ring) {}

    // Registers a range, cut where the kernel's limit of 1 GiB a slot demands it; all or nothing.
    bool insert(char* address, std::uint64_t num_bytes);
    // Forgets the slots that overlap the range.
    void erase(char* address, std::uint64_t num_bytes);
    // The slot that holds all of the range, or -1.
    int find(const char* address, std::uint64_t num_bytes) const;

  private:
    struct Slot {
        std::uint64_t num_bytes;
        unsigned index;
    };

    bool create();

    UringRing& ring_;
    bool is_created_ = false;
    std::vector<unsigned> free_indices_;
    std::map<std::uintptr_t, Slot> slots_;  // by first address; they do not overlap
};

}  // namespace fuyou
