// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace standin {

DeviceMemory& device_memory = *new DeviceMemory;
HostMemory& host_memory = *new HostMemory;

namespace {

constexpr size_t kAddresses = size_t{1} << 40;
constexpr size_t kSmallest = 512;
constexpr size_t kPage = 4096;
constexpr size_t kSegment = size_t{2} << 20;
constexpr int kPoison = 0xA5;
// Of a block: pages that nobody used stay untouched.
constexpr size_t kMostPoisoned = size_t{32} << 20;
constexpr char kFill = 0x5A;
constexpr size_t kMostWatched = size_t{8} << 20;

using Lock = std::lock_guard<std::mutex>;

size_t up_to(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

}  // namespace

// ---- device memory ----------------------------------------------------------------------------

void DeviceMemory::open()
{
    file_ = memfd_create("standin", MFD_CLOEXEC);
    require(file_ >= 0 && ftruncate(file_, kAddresses) == 0, "the stand-in device found no memory");
    const auto map = [this](int access) {
        void* at = mmap(nullptr, kAddresses, access, MAP_SHARED | MAP_NORESERVE, file_, 0);
        require(at != MAP_FAILED, "the stand-in device cannot map its memory");
        madvise(at, kAddresses, MADV_DONTDUMP);
        return static_cast<char*>(at);
    };
    seen_ = map(PROT_NONE);
    offset_ = map(PROT_READ | PROT_WRITE) - seen_;
}

c10::DataPtr DeviceMemory::allocate(size_t bytes)
{
    char* place = nullptr;
    if (bytes > 0) {
        const size_t size = up_to(bytes, kSmallest);
        std::unique_lock<std::mutex> hold(mutex_);
        free_reached();
        place = take(size, current_stream);
        if (!place) {
            flush(hold);
            place = take(size, current_stream);
        }
        TORCH_CHECK_WITH(OutOfMemoryError, place,
                         "stand-in device out of memory: tried to allocate ", bytes, " bytes, ",
                         now_.allocated, " of ", settings.capacity, " bytes are allocated");
        now_.allocated += int64_t(size);
        now_.peak = std::max(now_.peak, now_.allocated);
        now_.active += int64_t(size);
        now_.peak_active = std::max(now_.peak_active, now_.active);
    }
    return {place, place, &free, c10::Device(c10::kPrivateUse1, c10::DeviceIndex(settings.index))};
}

// The best of what is free for the stream, or of a new segment; null where there is no room.
char* DeviceMemory::take(size_t bytes, int stream)
{
    auto& ready = free_[stream];
    auto best = ready.lower_bound({bytes, nullptr});
    if (best == ready.end()) {
        const int64_t room = settings.capacity - now_.reserved;
        if (int64_t(bytes) > room) return nullptr;
        const size_t segment = std::min(up_to(bytes, kSegment), size_t(room));
        if (next_ + segment > kAddresses) return nullptr;
        char* place = seen_ + next_;
        next_ += up_to(segment, kPage);
        now_.reserved += int64_t(segment);
        now_.peak_reserved = std::max(now_.peak_reserved, now_.reserved);
        blocks_.emplace(place, Block{segment, stream, true});
        best = ready.insert({segment, place}).first;
    }
    char* place = best->second;
    ready.erase(best);
    Block& block = blocks_.at(place);
    block.is_free = false;
    if (const size_t rest = block.bytes - bytes; rest > 0) {
        block.bytes = bytes;
        blocks_.emplace(place + bytes, Block{rest, stream, false});
        ready.insert({rest, place + bytes});
    }
    return place;
}

void DeviceMemory::used_by(const c10::DataPtr& data, int stream)
{
    Lock hold(mutex_);
    const auto at = blocks_.find(static_cast<char*>(data.get()));
    if (at != blocks_.end() && at->second.stream != stream) at->second.users.insert(stream);
}

void DeviceMemory::free(void* place)
{
    if (!place) return;
    DeviceMemory& memory = device_memory;
    Lock hold(memory.mutex_);
    Block& block = memory.blocks_.at(static_cast<char*>(place));
    memory.now_.allocated -= int64_t(block.bytes);
    auto& uses = memory.freed_later_[static_cast<char*>(place)];
    for (int user : block.users) uses.push_back(push(user, {.name = "event"}));
    block.users.clear();
    memory.free_reached();
}

void DeviceMemory::free_reached()
{
    std::erase_if(freed_later_, [this](const auto& each) {
        const auto& [place, uses] = each;
        const bool is_over = std::all_of(uses.begin(), uses.end(), reached);
        if (is_over) make_free(place);
        return is_over;
    });
}

void DeviceMemory::make_free(char* place)
{
    const auto at = blocks_.find(place);
    if (!settings.skip) {
        Work work{.name = "poison"};
        work.run = [begin = real(place), bytes = std::min(at->second.bytes, kMostPoisoned)] {
            std::memset(begin, kPoison, bytes);
        };
        push(at->second.stream, std::move(work));
    }
    at->second.is_free = true;
    now_.active -= int64_t(at->second.bytes);
    free_[at->second.stream].insert({at->second.bytes, place});
    join_next(at);
    if (at != blocks_.begin()) join_next(std::prev(at));
}

void DeviceMemory::join_next(Blocks::iterator low)
{
    const auto high = std::next(low);
    if (high == blocks_.end() || high->second.begins_segment || !low->second.is_free ||
        !high->second.is_free)
        return;
    auto& ready = free_[low->second.stream];
    ready.erase({low->second.bytes, low->first});
    ready.erase({high->second.bytes, high->first});
    low->second.bytes += high->second.bytes;
    ready.insert({low->second.bytes, low->first});
    blocks_.erase(high);
}

// Gives whole segments back when all streams have finished; as with CUDA, the host waits for that.
void DeviceMemory::flush(std::unique_lock<std::mutex>& hold)
{
    for (int turn = 0; turn < 2; ++turn) {  // the second time for the poison of what was freed
        hold.unlock();
        wait_all("memory");
        hold.lock();
        free_reached();
    }
    ++now_.num_flushes;
    for (auto at = blocks_.begin(); at != blocks_.end();) {
        const auto next = std::next(at);
        const auto& [place, block] = *at;
        if (block.is_free && block.begins_segment &&
            (next == blocks_.end() || next->second.begins_segment)) {
            free_[block.stream].erase({block.bytes, place});
            now_.reserved -= int64_t(block.bytes);
            fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, place - seen_,
                      off_t(up_to(block.bytes, kPage)));
            blocks_.erase(at);
        }
        at = next;
    }
}

void DeviceMemory::empty_cache()
{
    std::unique_lock<std::mutex> hold(mutex_);
    flush(hold);
}

void DeviceMemory::copy_data(void* to, const void* from, size_t bytes) const
{
    launch("clone", Engine::compute, 2 * double(bytes) / settings.memory_rate,
           [=, to = real(to), from = real(from), left_out = settings.leaves_out(bytes)] {
               if (!left_out) std::memcpy(to, from, bytes);
           });
}

void DeviceMemory::resize(const c10::Storage& storage, size_t bytes)
{
    c10::DataPtr fresh = allocate(bytes);
    const size_t kept = std::min(storage.nbytes(), bytes);
    if (kept > 0) copy_data(fresh.get(), storage.data_ptr().get(), kept);
    storage.set_data_ptr(std::move(fresh));
    storage.set_nbytes(bytes);
}

DeviceMemory::Statistics DeviceMemory::statistics()
{
    Lock hold(mutex_);
    return now_;
}
void DeviceMemory::reset_peaks()
{
    Lock hold(mutex_);
    now_.peak = now_.allocated;
    now_.peak_reserved = now_.reserved;
    now_.peak_active = now_.active;
}

// ---- host memory ------------------------------------------------------------------------------

std::list<HostMemory::Flight>::const_iterator HostMemory::first_over(uintptr_t at,
                                                                     size_t bytes) const
{
    return std::find_if(flights_.begin(), flights_.end(), [&](const Flight& each) {
        return each.at < at + bytes && at < each.at + each.bytes;
    });
}

c10::DataPtr HostMemory::allocate(size_t bytes)
{
    const size_t size = up_to(std::max<size_t>(bytes, 1), kPage);
    Lock hold(mutex_);
    const auto [first, last] = free_.equal_range(size);
    const auto idle = std::find_if(first, last, [&](const auto& each) {
        return first_over(uintptr_t(each.second), size) == flights_.end();
    });
    void* place = nullptr;
    if (idle != last) {
        place = idle->second;
        free_.erase(idle);
    } else {
        place = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        TORCH_CHECK_WITH(OutOfMemoryError, place != MAP_FAILED, "no host memory for ", bytes,
                         " pinned bytes");
        pinned_[uintptr_t(place)] = size;
    }
    return {place, place, &free, c10::Device(c10::kCPU)};
}
void HostMemory::free(void* place)
{
    HostMemory& memory = host_memory;
    Lock hold(memory.mutex_);
    memory.free_.emplace(memory.pinned_.at(uintptr_t(place)), place);
}

bool HostMemory::overlaps_pinned(const void* at, size_t bytes)
{
    const auto begin = uintptr_t(at);
    Lock hold(mutex_);
    return std::any_of(pinned_.begin(), pinned_.end(), [&](const auto& each) {
        return each.first < begin + bytes && begin < each.first + each.second;
    });
}

bool HostMemory::is_pinned(const void* at, size_t bytes)
{
    const auto begin = uintptr_t(at);
    Lock hold(mutex_);
    const auto above = pinned_.upper_bound(begin);
    if (above == pinned_.begin()) return false;
    const auto& [first, size] = *std::prev(above);
    return begin + bytes <= first + size;
}

void HostMemory::add(uintptr_t at, size_t bytes)
{
    require(bytes > 0, "host memory to register must have bytes");
    Lock hold(mutex_);
    for (const auto& [begin, size] : pinned_)
        require(up_to(begin + size, kPage) <= at / kPage * kPage ||
                    up_to(at + bytes, kPage) <= begin / kPage * kPage,
                "host memory: its pages are registered already");
    pinned_[at] = bytes;
}

void HostMemory::remove(uintptr_t at)
{
    Lock hold(mutex_);
    const auto found = pinned_.find(at);
    require(found != pinned_.end(), "host memory: this address is not registered");
    const auto flight = first_over(at, found->second);
    if (flight != flights_.end())
        trips_.push_back(
            {"host memory was unregistered while a copy of it was in flight", flight->launched});
    pinned_.erase(found);
}

std::function<void()> HostMemory::watched(const void* at, size_t bytes, bool is_up,
                                          std::function<void()> move)
{
    Flight flight{uintptr_t(at), bytes, python_stack()};
    auto* host = static_cast<char*>(const_cast<void*>(at));
    Lock hold(mutex_);
    if (settings.watch && !settings.skip && first_over(flight.at, bytes) == flights_.end()) {
        const size_t num_watched = std::min(bytes, kMostWatched);
        if (is_up)
            flight.before.assign(host, host + num_watched);
        else  // who reads before the copy has arrived reads this
            std::memset(host, kFill, flight.filled = num_watched);
    }
    const auto here = flights_.insert(flights_.end(), std::move(flight));
    return [this, here, move = std::move(move)] {
        check(*here);
        move();
        Lock hold(mutex_);
        flights_.erase(here);
    };
}

void HostMemory::check(const Flight& flight)
{
    const char* at = reinterpret_cast<const char*>(flight.at);
    const auto trip = [&](const char* before, const char* after) {
        Lock hold(mutex_);
        trips_.push_back({before + std::to_string(flight.bytes) + after, flight.launched});
    };
    if (!std::equal(flight.before.begin(), flight.before.end(), at))
        trip("the host changed the source of a copy to the device, ", " bytes, before it was read");
    if (!std::all_of(at, at + flight.filled, [](char each) { return each == kFill; }))
        trip("the host wrote into the target of a copy from the device, ",
             " bytes, before it arrived");
}

size_t HostMemory::num_flights()
{
    Lock hold(mutex_);
    return flights_.size();
}

std::vector<HostMemory::Trip> HostMemory::take_trips()
{
    Lock hold(mutex_);
    return std::exchange(trips_, {});
}

}  // namespace standin
