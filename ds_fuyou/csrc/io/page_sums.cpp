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
    auto sums = std::make_unique<Sums>(last - first + 1);
    for (std::atomic<std::uint64_t>& sum : *sums) sum.store(kUnknown, std::memory_order_relaxed);
    ranges_[{fd, first}] = std::move(sums);
}

template <class Use>
void PageSums::for_pages(int fd, std::uint64_t offset, const char* bytes, std::uint64_t num_bytes,
                         Use use) const
{
    if (ranges_.empty() || num_bytes == 0) return;
    const std::uint64_t end = offset + num_bytes;
    auto range = ranges_.upper_bound({fd, offset / kPageBytes});
    if (range != ranges_.begin()) range = std::prev(range);
    for (; range != ranges_.end() && range->first.first <= fd; ++range) {
        if (range->first.first < fd) continue;
        const std::uint64_t begin = range->first.second;
        if (begin * kPageBytes >= end) return;
        Sums& sums = *range->second;
        for (std::uint64_t page = std::max(begin, offset / kPageBytes);
             page < begin + sums.size() && page * kPageBytes < end; ++page) {
            const std::uint64_t at = page * kPageBytes;
            const bool is_whole = at >= offset && at + kPageBytes <= end;
            if (!use(at, sums[page - begin], is_whole ? bytes + (at - offset) : nullptr)) return;
        }
    }
}

void PageSums::remember(int fd, std::uint64_t offset, const char* bytes, std::uint64_t num_bytes)
{
    for_pages(fd, offset, bytes, num_bytes,
              [](std::uint64_t, std::atomic<std::uint64_t>& sum, const char* page) {
                  sum.store(page != nullptr ? sum_of(page) : kUnknown, std::memory_order_relaxed);
                  return true;
              });
}

std::uint64_t PageSums::first_changed(int fd, std::uint64_t offset, const char* bytes,
                                      std::uint64_t num_bytes) const
{
    std::uint64_t found = kNone;
    for_pages(fd, offset, bytes, num_bytes,
              [&](std::uint64_t at, const std::atomic<std::uint64_t>& sum, const char* page) {
                  const std::uint64_t written = sum.load(std::memory_order_relaxed);
                  if (page != nullptr && written != kUnknown && written != sum_of(page)) found = at;
                  return found == kNone;
              });
    return found;
}

}  // namespace fuyou
