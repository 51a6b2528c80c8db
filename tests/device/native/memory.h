// SPDX-License-Identifier: Apache-2.0
// Memory of the stand-in device, and host memory that it copies from and to while the host goes on.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <list>
#include <map>
#include <mutex>
#include <set>

#include "streams.h"

namespace standin {

// One file in memory, mapped twice: the addresses of tensors have no access rights, the device's
// workers use the other mapping. Pages that nobody wrote take no memory of the host.
//
// Blocks are handed on in the order of the stream they were allocated on, as a caching allocator of
// CUDA does: a freed block serves its own stream at once, work of other streams on it must have
// been recorded. It is overwritten on its stream, so that work nobody recorded reads 0xA5.
class DeviceMemory final : public c10::Allocator {
  public:
    void open();
    c10::DataPtr allocate(size_t bytes) override;  // on the current stream
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void* to, const void* from, size_t bytes) const override;
    void resize(const c10::Storage& storage, size_t bytes);
    void used_by(const c10::DataPtr& data, int stream);
    void empty_cache();
    char* real(const void* place) const
    {
        return static_cast<char*>(const_cast<void*>(place)) + offset_;
    }

    struct Statistics {
        int64_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, num_flushes = 0;
        int64_t active = 0, peak_active = 0;  // what other streams still use, too
    };
    Statistics statistics();
    void reset_peaks();

  private:
    struct Block {
        size_t bytes;
        int stream;
        bool begins_segment;  // blocks never merge across these
        bool is_free = true;
        std::set<int> users = {};
    };
    using Blocks = std::map<char*, Block>;
    static void free(void* place);
    char* take(size_t bytes, int stream);
    void make_free(char* place);
    void join_next(Blocks::iterator low);
    void free_reached();
    void flush(std::unique_lock<std::mutex>& hold);

    std::mutex mutex_;
    char* seen_ = nullptr;
    ptrdiff_t offset_ = 0;
    int file_ = -1;
    size_t next_ = 0;
    Blocks blocks_;
    std::map<int, std::set<std::pair<size_t, char*>>> free_;  // by stream
    std::map<char*, std::vector<Mark>> freed_later_;          // other streams still use these
    Statistics now_;
};
extern DeviceMemory& device_memory;

// Pinned host memory: pages are registered as a whole and once, as CUDA wants it; and copies of
// them in flight.
class HostMemory final : public c10::Allocator {
  public:
    // What copies in flight still use is not handed on.
    c10::DataPtr allocate(size_t bytes) override;
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void* to, const void* from, size_t bytes) const override
    {
        default_copy_data(to, from, bytes);
    }
    void add(uintptr_t at, size_t bytes);
    void remove(uintptr_t at);
    bool is_pinned(const void* at, size_t bytes = 1);
    bool overlaps_pinned(const void* at, size_t bytes);

    // A late copy, given what moves its bytes. From now until the result has run its host side is
    // in flight; it is watched unless another copy of the same memory is in flight.
    std::function<void()> watched(const void* at, size_t bytes, bool is_up,
                                  std::function<void()> move);
    size_t num_flights();

    // What trip wires found, and where the copy was launched.
    struct Trip {
        std::string what;
        PythonStack launched;
    };
    std::vector<Trip> take_trips();

  private:
    struct Flight {
        uintptr_t at;
        size_t bytes;
        PythonStack launched;
        std::vector<char> before = {};  // what a copy up is to read
        size_t filled = 0;              // bytes of the target of a copy down that hold the filling
    };
    static void free(void* place);
    std::list<Flight>::const_iterator first_over(uintptr_t at, size_t bytes) const;
    void check(const Flight& flight);

    std::mutex mutex_;
    std::map<uintptr_t, size_t> pinned_;
    std::multimap<size_t, void*> free_;
    std::list<Flight> flights_;
    std::vector<Trip> trips_;
};
extern HostMemory& host_memory;

}  // namespace standin
