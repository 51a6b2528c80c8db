// SPDX-License-Identifier: Apache-2.0
// Memory of the stand-in device, and host memory that it copies from and to while the host goes on.
#pragma once

#include <map>
#include <set>

#include "streams.h"

namespace standin {

struct OutOfMemory : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One file in memory, mapped twice: the addresses of tensors have no access rights, the device's
// workers use the other mapping. Pages that nobody wrote take no memory of the host.
//
// Blocks are handed on in the order of the stream they were allocated on, as a caching allocator of
// CUDA does: a freed block serves its own stream at once, work of other streams on it must have
// been recorded. It is overwritten on its stream, so that work nobody recorded reads 0xA5.
class DeviceMemory {
  public:
    void open();
    void* allocate(size_t bytes, int stream);
    void release(void* place);
    void used_by(void* place, int stream);
    void empty_cache();
    char* real(const void* place) const
    {
        return static_cast<char*>(const_cast<void*>(place)) + offset_;
    }

    struct Statistics {
        int64_t allocated, peak, reserved, peak_reserved, num_flushes;
    };
    Statistics statistics();
    void reset_peaks();

  private:
    struct Block {
        size_t bytes;
        int stream;
        bool is_free = false;
        std::set<int> users = {};
        std::vector<MarkPtr> pending = {};  // freed, and still used by other streams
    };
    using Blocks = std::map<char*, Block>;
    Blocks::iterator take(size_t bytes, int stream);
    void make_free(Blocks::iterator at);
    void free_reached();
    bool flush(std::unique_lock<std::mutex>& hold);

    std::mutex mutex_;
    char* seen_ = nullptr;
    ptrdiff_t offset_ = 0;
    int file_ = -1;
    size_t next_ = 0;
    Blocks blocks_;
    std::map<int, std::set<std::pair<size_t, char*>>> free_;  // by stream
    std::set<char*> segments_;                                // blocks never merge across these
    std::set<char*> freed_later_;
    int64_t allocated_ = 0, peak_ = 0, reserved_ = 0, peak_reserved_ = 0, num_flushes_ = 0;
};
extern DeviceMemory& device_memory;

// Pinned host memory: pages are registered as a whole and once, as CUDA wants it; and copies of
// them in flight.
class HostMemory {
  public:
    void* allocate(size_t bytes);  // pinned; what copies in flight still use is not handed on
    void release(void* place);
    void add(uintptr_t at, size_t bytes);
    void remove(uintptr_t at);
    bool is_pinned(const void* at, size_t bytes = 1);

    struct Flight {
        uintptr_t at;
        size_t bytes;
        PythonStack launched;
    };
    // Watches the host side of a late copy where no other copy of the same memory is in flight.
    int64_t begin(const void* at, size_t bytes, bool is_up);
    void arrive(int64_t flight);  // called by the worker before it moves anything
    void end(int64_t flight);
    size_t num_flights();

  private:
    struct Watched : Flight {
        bool is_up;
        std::vector<char> before;  // what a copy up is to read
        size_t filled = 0;         // bytes of the target of a copy down that hold kFill
    };
    bool overlaps(uintptr_t at, size_t bytes) const;

    std::mutex mutex_;
    std::map<uintptr_t, size_t> pinned_;
    std::map<void*, size_t> sizes_;
    std::map<size_t, std::vector<void*>> free_;
    std::map<int64_t, Watched> flights_;
    int64_t next_flight_ = 0;
};
extern HostMemory& host_memory;

// What trip wires found: text and where the copy was launched.
struct Trip {
    std::string what;
    PythonStack launched;
};
std::vector<Trip> take_trips();

}  // namespace standin
