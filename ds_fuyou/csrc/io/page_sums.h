// SPDX-License-Identifier: Apache-2.0
//
// What was written to some ranges of files, as one checksum for every 4 KiB page: 8 bytes of memory
// for 4096 on storage. For data that is read back by other ranges than it was written by.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace fuyou {

// watch() comes before the first transfer of its range, from one thread; the others may be called
// from any thread, as long as nobody reads a page while it is written.
class PageSums {
  public:
    // Pages of which [offset, offset + num_bytes) holds a part; ranges must not overlap.
    void watch(int fd, std::uint64_t offset, std::uint64_t num_bytes);
    // These bytes are about to be written. Pages written in part are not known any more.
    void remember(int fd, std::uint64_t offset, const char* bytes, std::uint64_t num_bytes);
    // Offset of the first whole page that was read otherwise than it was written last; kNone.
    std::uint64_t first_changed(int fd, std::uint64_t offset, const char* bytes,
                                std::uint64_t num_bytes) const;

    static constexpr std::uint64_t kNone = UINT64_MAX;

  private:
    using Sums = std::vector<std::atomic<std::uint64_t>>;
    // Calls use(page offset, its sum, bytes of it or null where only a part is there) in order
    // until it returns false.
    template <class Use>
    void for_pages(int fd, std::uint64_t offset, const char* bytes, std::uint64_t num_bytes,
                   Use use) const;

    std::map<std::pair<int, std::uint64_t>, std::unique_ptr<Sums>> ranges_;  // by first page
};

}  // namespace fuyou
