// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace standin {

DeviceMemory& device_memory = *new DeviceMemory;
HostMemory& host_memory = *new HostMemory;

namespace {

constexpr size_t kAddresses = size_t{1} << 40;
constexpr size_t kSmallest = 512;
constexpr size_t kPage = 4096;
constexpr size_t kSegment = size_t{2} << 20;
constexpr int kPoison = 0xA5;
constexpr size_t kMostPoisoned = size_t{32}
                                 << 20;  // of a block: pages that nobody used stay untouched
constexpr char kFill = 0x5A;
constexpr size_t kMostWatched = size_t{8} << 20;

size_t up_to(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

std::mutex& trips_mutex = *new std::mutex;
std::vector<Trip>& trips = *new std::vector<Trip>;

void trip(std::string what, PythonStack launched)
{
    std::lock_guard<std::mutex> hold(trips_mutex);
    trips.push_back({std::move(what), std::move(launched)});
}

}  // namespace

std::vector<Trip> take_trips()
{
    std::lock_guard<std::mutex> hold(trips_mutex);
    return std::exchange(trips, {});
}

// ---- device memory ----------------------------------------------------------------------------

void DeviceMemory::open()
{
    file_ = memfd_create("standin", MFD_CLOEXEC);
    if (file_ < 0 || ftruncate(file_, kAddresses) != 0)
        throw OutOfMemory("the stand-in device found no memory");
    const auto map = [this](int access) {
        void* at = mmap(nullptr, kAddresses, access, MAP_SHARED | MAP_NORESERVE, file_, 0);
        if (at == MAP_FAILED) throw OutOfMemory("the stand-in device cannot map its memory");
        madvise(at, kAddresses, MADV_DONTDUMP);
        return static_cast<char*>(at);
    };
    seen_ = map(PROT_NONE);
    offset_ = map(PROT_READ | PROT_WRITE) - seen_;
}

DeviceMemory::Blocks::iterator DeviceMemory::take(size_t bytes, int stream)
{
    auto& ready = free_[stream];
    const auto best = ready.lower_bound({bytes, nullptr});
    if (best == ready.end()) return blocks_.end();
    const auto at = blocks_.find(best->second);
    ready.erase(best);
    const size_t rest = at->second.bytes - bytes;
    if (rest > 0) {
        at->second.bytes = bytes;
        char* second = at->first + bytes;
        blocks_.emplace(second, Block{rest, stream, true});
        ready.insert({rest, second});
    }
    at->second.is_free = false;
    return at;
}

void* DeviceMemory::allocate(size_t bytes, int stream)
{
    if (bytes == 0) return nullptr;
    const size_t size = up_to(bytes, kSmallest);
    std::unique_lock<std::mutex> hold(mutex_);
    for (bool flushed = false;; flushed = true) {
        free_reached();
        auto at = take(size, stream);
        if (at == blocks_.end()) {
            const size_t segment = std::min(up_to(size, kSegment),
                                            std::max(size, size_t(settings.capacity - reserved_)));
            if (reserved_ + int64_t(segment) <= settings.capacity) {
                if (next_ + segment > kAddresses)
                    throw OutOfMemory("the stand-in device has no address left");
                char* place = seen_ + next_;
                next_ += up_to(segment, kPage);
                reserved_ += int64_t(segment);
                peak_reserved_ = std::max(peak_reserved_, reserved_);
                segments_.insert(place);
                blocks_.emplace(place, Block{segment, stream, true});
                free_[stream].insert({segment, place});
                at = take(size, stream);
            }
        }
        if (at != blocks_.end()) {
            allocated_ += int64_t(size);
            peak_ = std::max(peak_, allocated_);
            return at->first;
        }
        if (flushed || !flush(hold))
            throw OutOfMemory("stand-in device out of memory: tried to allocate " +
                              std::to_string(bytes) + " bytes, " + std::to_string(allocated_) +
                              " of " + std::to_string(settings.capacity) + " bytes are allocated");
    }
}

void DeviceMemory::used_by(void* place, int stream)
{
    std::lock_guard<std::mutex> hold(mutex_);
    const auto at = blocks_.find(static_cast<char*>(place));
    if (at != blocks_.end() && at->second.stream != stream) at->second.users.insert(stream);
}

void DeviceMemory::release(void* place)
{
    if (!place) return;
    std::lock_guard<std::mutex> hold(mutex_);
    const auto at = blocks_.find(static_cast<char*>(place));
    Block& block = at->second;
    allocated_ -= int64_t(block.bytes);
    for (int user : block.users) block.pending.push_back(record(user));
    block.users.clear();
    if (block.pending.empty())
        make_free(at);
    else
        freed_later_.insert(at->first);
}

void DeviceMemory::make_free(Blocks::iterator at)
{
    if (!settings.skip) {
        char* begin = real(at->first);
        const size_t bytes = std::min(at->second.bytes, kMostPoisoned);
        Work work{.name = "poison"};
        work.run = [begin, bytes] { std::memset(begin, kPoison, bytes); };
        push(at->second.stream, std::move(work));
    }
    auto& ready = free_[at->second.stream];
    at->second.is_free = true;
    const auto joins = [this](Blocks::iterator low, Blocks::iterator high) {
        return low->second.is_free && high->second.is_free &&
               low->first + low->second.bytes == high->first && !segments_.contains(high->first);
    };
    const auto next = std::next(at);
    if (next != blocks_.end() && joins(at, next)) {
        ready.erase({next->second.bytes, next->first});
        at->second.bytes += next->second.bytes;
        blocks_.erase(next);
    }
    if (at != blocks_.begin() && joins(std::prev(at), at)) {
        const auto low = std::prev(at);
        ready.erase({low->second.bytes, low->first});
        low->second.bytes += at->second.bytes;
        blocks_.erase(at);
        at = low;
    }
    ready.insert({at->second.bytes, at->first});
}

void DeviceMemory::free_reached()
{
    for (auto each = freed_later_.begin(); each != freed_later_.end();) {
        const auto at = blocks_.find(*each);
        auto& pending = at->second.pending;
        if (std::all_of(pending.begin(), pending.end(),
                        [](const MarkPtr& mark) { return mark->reached(); })) {
            pending.clear();
            make_free(at);
            each = freed_later_.erase(each);
        } else {
            ++each;
        }
    }
}

// Gives whole segments back when all streams have finished; as with CUDA, the host waits for that.
bool DeviceMemory::flush(std::unique_lock<std::mutex>& hold)
{
    hold.unlock();
    wait_all("memory");
    hold.lock();
    free_reached();
    // the poison of these is in the queues
    hold.unlock();
    wait_all("memory");
    hold.lock();
    ++num_flushes_;
    const int64_t before = reserved_;
    for (auto at = blocks_.begin(); at != blocks_.end();) {
        const auto next = std::next(at);
        const bool is_whole = segments_.contains(at->first) &&
                              (next == blocks_.end() || segments_.contains(next->first));
        if (at->second.is_free && is_whole) {
            free_[at->second.stream].erase({at->second.bytes, at->first});
            reserved_ -= int64_t(at->second.bytes);
            fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at->first - seen_,
                      off_t(up_to(at->second.bytes, kPage)));
            segments_.erase(at->first);
            blocks_.erase(at);
        }
        at = next;
    }
    return reserved_ < before;
}

void DeviceMemory::empty_cache()
{
    std::unique_lock<std::mutex> hold(mutex_);
    flush(hold);
}

DeviceMemory::Statistics DeviceMemory::statistics()
{
    std::lock_guard<std::mutex> hold(mutex_);
    return {allocated_, peak_, reserved_, peak_reserved_, num_flushes_};
}
void DeviceMemory::reset_peaks()
{
    std::lock_guard<std::mutex> hold(mutex_);
    peak_ = allocated_;
    peak_reserved_ = reserved_;
}

// ---- host memory ------------------------------------------------------------------------------

bool HostMemory::overlaps(uintptr_t at, size_t bytes) const
{
    return std::any_of(flights_.begin(), flights_.end(), [&](const auto& each) {
        return each.second.at < at + bytes && at < each.second.at + each.second.bytes;
    });
}

void* HostMemory::allocate(size_t bytes)
{
    const size_t size = up_to(std::max<size_t>(bytes, 1), kPage);
    std::lock_guard<std::mutex> hold(mutex_);
    auto& ready = free_[size];
    const auto idle = std::find_if(ready.begin(), ready.end(),
                                   [&](void* at) { return !overlaps(uintptr_t(at), size); });
    void* place = nullptr;
    if (idle != ready.end()) {
        place = *idle;
        ready.erase(idle);
    } else {
        place = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (place == MAP_FAILED)
            throw OutOfMemory("no host memory for " + std::to_string(bytes) + " pinned bytes");
        pinned_[uintptr_t(place)] = size;
    }
    sizes_[place] = size;
    return place;
}
void HostMemory::release(void* place)
{
    if (!place) return;
    std::lock_guard<std::mutex> hold(mutex_);
    free_[sizes_.at(place)].push_back(place);
}

bool HostMemory::is_pinned(const void* at, size_t bytes)
{
    const auto begin = uintptr_t(at);
    std::lock_guard<std::mutex> hold(mutex_);
    auto above = pinned_.upper_bound(begin);
    if (above == pinned_.begin()) return false;
    --above;
    return begin + bytes <= above->first + above->second;
}

void HostMemory::add(uintptr_t at, size_t bytes)
{
    if (bytes == 0) throw std::runtime_error("host memory to register must have bytes");
    const auto pages = [](uintptr_t begin, size_t n) {
        return std::pair(begin / kPage, (begin + n + kPage - 1) / kPage);
    };
    const auto [low, high] = pages(at, bytes);
    std::lock_guard<std::mutex> hold(mutex_);
    for (const auto& [begin, size] : pinned_) {
        const auto [first, last] = pages(begin, size);
        if (first < high && low < last)
            throw std::runtime_error("host memory: its pages are registered already");
    }
    pinned_[at] = bytes;
}

void HostMemory::remove(uintptr_t at)
{
    const PythonStack here = python_stack();
    std::lock_guard<std::mutex> hold(mutex_);
    const auto found = pinned_.find(at);
    if (found == pinned_.end())
        throw std::runtime_error("host memory: this address is not registered");
    for (auto& [id, flight] : flights_)
        if (flight.at < at + found->second && at < flight.at + flight.bytes) {
            trip("host memory was unregistered while a copy of it was in flight", flight.launched);
            break;
        }
    pinned_.erase(found);
}

int64_t HostMemory::begin(const void* at, size_t bytes, bool is_up)
{
    Watched flight;
    flight.at = uintptr_t(at);
    flight.bytes = bytes;
    flight.launched = python_stack();
    flight.is_up = is_up;
    std::lock_guard<std::mutex> hold(mutex_);
    if (settings.watch && !settings.skip && !overlaps(flight.at, bytes)) {
        const size_t watched = std::min(bytes, kMostWatched);
        if (is_up) {
            flight.before.assign(static_cast<const char*>(at),
                                 static_cast<const char*>(at) + watched);
        } else {
            std::memset(const_cast<void*>(at), kFill,
                        watched);  // who reads before the copy has arrived reads this
            flight.filled = watched;
        }
    }
    flights_.emplace(++next_flight_, std::move(flight));
    return next_flight_;
}

void HostMemory::arrive(int64_t id)
{
    std::unique_lock<std::mutex> hold(mutex_);
    Watched& flight = flights_.at(id);  // stays where it is: nobody but this worker removes it
    hold.unlock();
    const char* at = reinterpret_cast<const char*>(flight.at);
    const std::string size = std::to_string(flight.bytes) + " bytes";
    if (!flight.before.empty() && std::memcmp(flight.before.data(), at, flight.before.size()) != 0)
        trip(
            "the host changed the source of a copy to the device, " + size + ", before it was read",
            flight.launched);
    if (!std::all_of(at, at + flight.filled, [](char each) { return each == kFill; }))
        trip("the host wrote into the target of a copy from the device, " + size +
                 ", before it arrived",
             flight.launched);
}

void HostMemory::end(int64_t id)
{
    std::lock_guard<std::mutex> hold(mutex_);
    flights_.erase(id);
}

size_t HostMemory::num_flights()
{
    std::lock_guard<std::mutex> hold(mutex_);
    return flights_.size();
}

}  // namespace standin
