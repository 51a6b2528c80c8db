// SPDX-License-Identifier: Apache-2.0
//
// What was written to some ranges of files, as one checksum for every 4 KiB page: 8 bytes of memory
// for 4096 on storage. For data that is read back by other ranges than it was written by.
//
// [Note: pages that an earlier run wrote]
// Their sums are not known, but one number is that was made of all sums of a run of them
// (digest()). A page leaves its sum when it is read first; the read that completes the run compares
// the number. So nothing is read for the sake of checksums, and no byte of a run that was used
// whole goes unchecked. What was read of a run that was used in part is checked when the rest is
// read.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/io_engine.h"

namespace fuyou {

// watch() and expect() come before the first transfer of their range, while there may be others;
// all may be called from any thread, as long as nobody reads a page while it is written.
class PageSums {
  public:
    // Pages of which [offset, offset + num_bytes) holds a part: nothing is known of them, and
    // ranges that were watched before and hold one of them are forgotten, as a whole.
    void watch(int fd, std::uint64_t offset, std::uint64_t num_bytes);
    // Such ranges are forgotten, and nothing is watched in their place.
    void forget(int fd, std::uint64_t offset, std::uint64_t num_bytes);
    // These bytes are about to be written. Pages written in part are not known any more.
    void remember(int fd, std::uint64_t offset, const char* bytes, std::uint64_t num_bytes);
    // Offset of the first whole page that was read otherwise than it was written last; kNone. Where
    // it is not known which page of an expected run differs, the offset of the last that was read.
    std::uint64_t first_changed(int fd, std::uint64_t offset, const char* bytes,
                                std::uint64_t num_bytes);

    // Of watched data, each run of which was watched as such: a number that changes with every
    // page, and with their order. kNone if it is not known what some page holds.
    std::uint64_t digest(const FileRanges& runs) const;
    // This data, watched and not touched yet, has this digest. See the note above.
    void expect(const FileRanges& runs, std::uint64_t digest);
    // Whether some of its pages were read, and others of them were not: it has yet to be compared.
    // Also if it was, and is wrong: whoever read the last page may not have looked at the outcome.
    bool is_half_read(const FileRanges& runs) const;

    static constexpr std::uint64_t kNone = UINT64_MAX;

  private:
    using Sums = std::vector<std::atomic<std::uint64_t>>;
    struct Expected {
        FileRanges runs;
        std::uint64_t digest = 0;
        std::uint64_t num_pages = 0;
        std::atomic<std::uint64_t> num_unread{0};
        std::atomic<bool> is_wrong{false};  // it was compared: every read of it fails from now on
        std::atomic<bool> is_void{
            false};  // it was written to since: nothing is said of it any more
    };
    struct Range {
        explicit Range(std::uint64_t num_pages) : sums(num_pages) {}
        Sums sums;
        std::shared_ptr<Expected> expected;  // null: of this run alone
    };
    using RangeRef = std::shared_ptr<Range>;  // lives as long as somebody looks at it
    // Calls use(page offset, its sum, its range, bytes of it or null where only a part is there) in
    // order until it returns false.
    template <class Use>
    void for_pages(int fd, std::uint64_t offset, const char* bytes, std::uint64_t num_bytes,
                   Use use) const;
    void forget_locked(int fd, std::uint64_t first, std::uint64_t last);
    RangeRef find(const FileRange& run) const;
    std::vector<std::pair<std::uint64_t, RangeRef>> overlapping(int fd, std::uint64_t offset,
                                                                std::uint64_t end) const;
    std::uint64_t known_digest(const FileRanges& runs) const;

    // Guards the map; nobody watches a range, or expects something of it, that is in use.
    mutable std::mutex mutex_;
    std::map<std::pair<int, std::uint64_t>, RangeRef> ranges_;  // by first page
};

}  // namespace fuyou
