// SPDX-License-Identifier: Apache-2.0
#include "page_sums.h"

#include <algorithm>
#include <iterator>

#include "kernels/place_sum.h"
#include "memory/aligned_pool.h"

namespace fuyou {
namespace {

constexpr std::uint64_t kUnknown = UINT64_MAX;

std::uint64_t sum_of(const char* page)
{
    const std::uint64_t sum = place_sum(page, kPageBytes / 4, 0);
    return sum == kUnknown ? 0 : sum;
}

}  // namespace

void PageSums::watch(int fd, std::uint64_t offset, std::uint64_t num_bytes)
{
    if (num_bytes == 0) return;
    const std::uint64_t first = offset / kPageBytes;
    const std::uint64_t last = (offset + num_bytes - 1) / kPageBytes;
    auto range = std::make_shared<Range>(last - first + 1);
    for (std::atomic<std::uint64_t>& sum : range->sums)
        sum.store(kUnknown, std::memory_order_relaxed);
    std::lock_guard<std::mutex> lock(mutex_);
    forget_locked(fd, first, last);
    ranges_[{fd, first}] = std::move(range);
}

void PageSums::forget(int fd, std::uint64_t offset, std::uint64_t num_bytes)
{
    if (num_bytes == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    forget_locked(fd, offset / kPageBytes, (offset + num_bytes - 1) / kPageBytes);
}

void PageSums::forget_locked(int fd, std::uint64_t first, std::uint64_t last)
{
    auto range = ranges_.upper_bound({fd, first});
    if (range != ranges_.begin()) range = std::prev(range);
    while (range != ranges_.end() && range->first <= std::pair(fd, last)) {
        const bool overlaps =
            range->first.first == fd && range->first.second + range->second->sums.size() > first;
        range = overlaps ? ranges_.erase(range) : std::next(range);
    }
}

// Those that may hold a part of [offset, end), by first page.
std::vector<std::pair<std::uint64_t, PageSums::RangeRef>> PageSums::overlapping(
    int fd, std::uint64_t offset, std::uint64_t end) const
{
    std::vector<std::pair<std::uint64_t, RangeRef>> found;
    std::lock_guard<std::mutex> lock(mutex_);
    auto range = ranges_.upper_bound({fd, offset / kPageBytes});
    if (range != ranges_.begin()) range = std::prev(range);
    for (; range != ranges_.end() && range->first.first <= fd; ++range) {
        if (range->first.first < fd) continue;
        if (range->first.second * kPageBytes >= end) break;
        found.emplace_back(range->first.second, range->second);
    }
    return found;
}

template <class Use>
void PageSums::for_pages(int fd, std::uint64_t offset, const char* bytes, std::uint64_t num_bytes,
                         Use use) const
{
    if (num_bytes == 0) return;
    const std::uint64_t end = offset + num_bytes;
    for (const auto& [begin, range] : overlapping(fd, offset, end)) {
        Sums& sums = range->sums;
        for (std::uint64_t page = std::max(begin, offset / kPageBytes);
             page < begin + sums.size() && page * kPageBytes < end; ++page) {
            const std::uint64_t at = page * kPageBytes;
            const bool is_whole = at >= offset && at + kPageBytes <= end;
            const char* whole = is_whole ? bytes + (at - offset) : nullptr;
            if (!use(at, sums[page - begin], *range, whole)) return;
        }
    }
}

void PageSums::remember(int fd, std::uint64_t offset, const char* bytes, std::uint64_t num_bytes)
{
    for_pages(
        fd, offset, bytes, num_bytes,
        [](std::uint64_t, std::atomic<std::uint64_t>& sum, const Range& range, const char* page) {
            if (range.expected) range.expected->is_void = true;
            sum.store(page != nullptr ? sum_of(page) : kUnknown, std::memory_order_relaxed);
            return true;
        });
}

std::uint64_t PageSums::first_changed(int fd, std::uint64_t offset, const char* bytes,
                                      std::uint64_t num_bytes)
{
    std::uint64_t found = kNone;
    for_pages(fd, offset, bytes, num_bytes,
              [&](std::uint64_t at, std::atomic<std::uint64_t>& sum, const Range& range,
                  const char* page) {
                  if (page == nullptr) return true;
                  std::uint64_t written = sum.load(std::memory_order_relaxed);
                  Expected* expected = range.expected.get();
                  if (expected != nullptr && expected->is_void) expected = nullptr;
                  if (written == kUnknown && expected == nullptr) return true;
                  const std::uint64_t read = sum_of(page);
                  if (written != kUnknown || !sum.compare_exchange_strong(written, read)) {
                      if (written != read) found = at;
                  } else if (--expected->num_unread == 0) {
                      expected->is_wrong = known_digest(expected->runs) != expected->digest;
                  }
                  if (expected != nullptr && expected->is_wrong && !expected->is_void) found = at;
                  return found == kNone;
              });
    return found;
}

PageSums::RangeRef PageSums::find(const FileRange& run) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto range = ranges_.find({run.fd, run.offset / kPageBytes});
    const bool is_it = range != ranges_.end() &&
                       range->second->sums.size() == (run.num_bytes + kPageBytes - 1) / kPageBytes;
    return is_it ? range->second : nullptr;
}

std::uint64_t PageSums::known_digest(const FileRanges& runs) const
{
    std::uint64_t digest = 0, weight = 1;
    for (const FileRange& run : runs) {
        const RangeRef range = find(run);
        if (range == nullptr) return kNone;
        for (const std::atomic<std::uint64_t>& page : range->sums) {
            const std::uint64_t sum = page.load(std::memory_order_relaxed);
            if (sum == kUnknown) return kNone;
            digest += sum * weight;
            weight += 2;
        }
    }
    return digest == kNone ? 0 : digest;
}

std::uint64_t PageSums::digest(const FileRanges& runs) const
{
    const RangeRef first = runs.empty() ? nullptr : find(runs.front());
    if (first == nullptr) return kNone;
    const Expected* expected = first->expected.get();
    if (expected != nullptr && !expected->is_void) return expected->digest;
    return known_digest(runs);
}

void PageSums::expect(const FileRanges& runs, std::uint64_t digest)
{
    auto expected = std::make_shared<Expected>();
    expected->runs = runs;
    expected->digest = digest;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const FileRange& run : runs) {
        const auto range = ranges_.find({run.fd, run.offset / kPageBytes});
        if (range == ranges_.end()) return;
        range->second->expected = expected;
        expected->num_pages += range->second->sums.size();
    }
    expected->num_unread = expected->num_pages;
}

bool PageSums::is_half_read(const FileRanges& runs) const
{
    const RangeRef first = runs.empty() ? nullptr : find(runs.front());
    if (first == nullptr || !first->expected || first->expected->is_void) return false;
    const std::uint64_t num_unread = first->expected->num_unread;
    return first->expected->is_wrong || (num_unread > 0 && num_unread < first->expected->num_pages);
}

}  // namespace fuyou
