// SPDX-License-Identifier: Apache-2.0
//
// One arena of page-aligned memory per rank, cut into exactly sized blocks (multiples of 4096
// bytes, no power-of-two rounding). CUDA-pinned allocations are not promised to be page-aligned, so
// the arena is allocated aligned and may then be registered with CUDA and with io_uring as a whole.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace fuyou {

constexpr std::uint64_t kPageBytes = 4096;

inline std::uint64_t round_up_to_page(std::uint64_t num_bytes)
{
    return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

class AlignedPool {
  public:
    // Reserves `num_bytes` (rounded up to pages) of address space; pages are touched on first use.
    // Throws std::bad_alloc when the mapping is refused. Unless it is `inherited`, a child of
    // fork() finds zeros there: pages that are pinned for transfers would be copied for it at once.
    explicit AlignedPool(std::uint64_t num_bytes, bool inherited = true);
    ~AlignedPool();
    AlignedPool(const AlignedPool&) = delete;
    AlignedPool& operator=(const AlignedPool&) = delete;

    // First fit; nullptr when no free run is large enough.
    char* try_allocate(std::uint64_t num_bytes);
    // The same without a byte of what is left and wanted, see leave(); and the last fit.
    char* try_allocate_beside_wanted(std::uint64_t num_bytes);
    char* try_allocate_last(std::uint64_t num_bytes);
    // The inverse of both. Throws std::invalid_argument for an address they did not hand out.
    void release(char* address);

    // A released block whose bytes are what they were until any of them is handed out.
    struct Left {
        std::uint64_t offset = 0;
        std::uint64_t number = 0;  // of no other block of any pool
    };
    // release(), and the means to have the block's first `num_bytes` again.
    Left leave(char* address, std::uint64_t num_bytes, bool is_wanted);
    // They are the caller's, to be released, with what was in them; nullptr if they have gone.
    char* try_take_back(const Left& left);
    void unwant(const Left& left);

    char* base() const { return base_; }
    std::uint64_t capacity_bytes() const { return capacity_bytes_; }
    std::uint64_t used_bytes() const;
    // What blocks were at most in: the pages behind them were never touched.
    std::uint64_t peak_bytes() const;
    std::uint64_t largest_free_bytes() const;

  private:
    struct LeftBlock {
        std::uint64_t num_bytes;
        std::uint64_t number;
        bool is_wanted;
    };
    using LeftBlocks = std::map<std::uint64_t, LeftBlock>;

    enum class Fit { kFirst, kBesideWanted, kLast };

    char* try_allocate(std::uint64_t num_bytes, Fit fit);
    std::optional<std::uint64_t> find_locked(std::uint64_t num_bytes, Fit fit) const;
    LeftBlocks::iterator find_left_locked(const Left& left);
    char* take_locked(std::uint64_t offset, std::uint64_t num_bytes);
    std::uint64_t release_locked(char* address);

    mutable std::mutex mutex_;
    char* base_ = nullptr;
    std::uint64_t capacity_bytes_ = 0;
    std::uint64_t used_bytes_ = 0;
    std::uint64_t peak_bytes_ = 0;
    std::map<std::uint64_t, std::uint64_t> free_;       // offset -> bytes
    std::map<std::uint64_t, std::uint64_t> allocated_;  // offset -> bytes
    LeftBlocks left_;                                   // by offset: all of it is free
};

}  // namespace fuyou
