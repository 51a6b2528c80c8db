// SPDX-License-Identifier: Apache-2.0
//
// One io_uring by raw system calls (no liburing): submission and completion rings, entering the
// kernel, and registered buffers. Private to io/. Every call is made by the thread that made it.
#pragma once

#include <linux/io_uring.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace fuyou {

class UringRing {
  public:
    // Throws std::system_error with the errno of the kernel that refuses; ENOSYS for a kernel
    // before 5.11, which cannot wait with a time-out.
    explicit UringRing(unsigned num_entries);
    ~UringRing();
    UringRing(const UringRing&) = delete;
    UringRing& operator=(const UringRing&) = delete;

    // A zeroed submission entry that goes with the next enter(). The caller keeps to num_entries.
    io_uring_sqe* next_entry();

    // Submits what was prepared and waits for one completion, at most `timeout` (negative: for
    // ever). Returns 0, or an errno that is the ring's end; being interrupted is not one.
    int enter(std::chrono::nanoseconds timeout);

    // Takes the oldest completion; false when there is none.
    bool next_completion(io_uring_cqe* completion);

    // A table of `num_slots` empty slots for registered buffers; false where the kernel has none.
    bool create_buffer_table(unsigned num_slots);
    // Puts [address, address + num_bytes) into a slot, or empties it (nullptr, 0).
    bool update_buffer_slot(unsigned slot, char* address, std::size_t num_bytes);

  private:
    int open_ring(unsigned num_entries, io_uring_params* params);
    void map_rings(const io_uring_params& params);
    void unmap_rings();

    int fd_ = -1;
    bool has_buffer_table_ = false;
    unsigned num_refusals_ = 0;
    void* rings_ = nullptr;
    std::size_t rings_bytes_ = 0;
    io_uring_sqe* entries_ = nullptr;
    std::size_t entries_bytes_ = 0;
    unsigned* submission_head_ = nullptr;
    unsigned* submission_tail_ = nullptr;
    unsigned* submission_array_ = nullptr;
    unsigned submission_mask_ = 0;
    unsigned* completion_head_ = nullptr;
    unsigned* completion_tail_ = nullptr;
    io_uring_cqe* completions_ = nullptr;
    unsigned completion_mask_ = 0;
};

}  // namespace fuyou
