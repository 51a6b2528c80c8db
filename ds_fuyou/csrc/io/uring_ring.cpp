// SPDX-License-Identifier: Apache-2.0
#if __has_include(<linux/io_uring.h>)
#include "uring_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace fuyou {
namespace {

// The kernel's interface beyond what old headers declare: the package is built against whatever
// header the machine has and runs on whatever kernel it meets.
constexpr unsigned kSetupCoopTaskrun = 1U << 8;    // Linux 5.19
constexpr unsigned kSetupSingleIssuer = 1U << 12;  // Linux 6.0
constexpr unsigned kSetupDeferTaskrun = 1U << 13;  // Linux 6.1
constexpr unsigned kFeatureSingleMmap = 1U << 0;
constexpr unsigned kFeatureNoDrop = 1U << 1;
constexpr unsigned kFeatureExtArg = 1U << 8;
constexpr unsigned kEnterExtArg = 1U << 3;
constexpr unsigned kUnregisterBuffers = 1;
constexpr unsigned kRegisterBuffers2 = 15;
constexpr unsigned kRegisterBuffersUpdate = 16;

constexpr unsigned kMaxRefusals = 5000;  // in a row, one a millisecond

struct EnterArgument {
    std::uint64_t signal_mask;
    std::uint32_t signal_mask_bytes;
    std::uint32_t padding;
    std::uint64_t timespec;
};

struct KernelTimespec {
    std::int64_t secs;
    long long nanosecs;
};

struct BufferRegister {
    std::uint32_t num_slots;
    std::uint32_t flags;
    std::uint64_t reserved;
    std::uint64_t ranges;
    std::uint64_t tags;
};

struct BufferUpdate {
    std::uint32_t first_slot;
    std::uint32_t reserved;
    std::uint64_t ranges;
    std::uint64_t tags;
    std::uint32_t num_slots;
    std::uint32_t reserved2;
};

std::uint64_t pointer_value(const void* pointer)
{
    return reinterpret_cast<std::uintptr_t>(pointer);
}

template <typename T>
T* at(void* base, unsigned offset)
{
    return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

[[noreturn]] void refuse(int error, const char* what)
{
    throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

UringRing::UringRing(unsigned num_entries)
{
    io_uring_params params;
    const int error = open_ring(num_entries, &params);
    if (error != 0) {
        refuse(error, "io_uring_setup");
    }
    constexpr unsigned kNeeded = kFeatureSingleMmap | kFeatureNoDrop | kFeatureExtArg;
    if ((params.features & kNeeded) != kNeeded) {
        close(fd_);
        refuse(ENOSYS, "io_uring needs Linux 5.11 or newer");
    }
    map_rings(params);
}

// Unregistered by hand: a forked child has the descriptor, and the memory would be held as long as
// it lives.
UringRing::~UringRing()
{
    if (has_buffer_table_) {
        syscall(__NR_io_uring_register, fd_, kUnregisterBuffers, nullptr, 0);
    }
    unmap_rings();
    close(fd_);
}

// One thread submits and reaps, so completions need not interrupt it: ask for that first, and for
// less where the kernel is older and answers EINVAL.
int UringRing::open_ring(unsigned num_entries, io_uring_params* params)
{
    for (const unsigned flags : {kSetupSingleIssuer | kSetupDeferTaskrun, kSetupCoopTaskrun, 0U}) {
        std::memset(params, 0, sizeof *params);
        params->flags = flags;
        fd_ = static_cast<int>(syscall(__NR_io_uring_setup, num_entries, params));
        if (fd_ >= 0) {
            return 0;
        }
        if (errno != EINVAL) {
            break;
        }
    }
    return errno;
}

void UringRing::map_rings(const io_uring_params& params)
{
    rings_bytes_ =
        std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                              params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    constexpr int kProtection = PROT_READ | PROT_WRITE;
    constexpr int kFlags = MAP_SHARED | MAP_POPULATE;
    void* rings = mmap(nullptr, rings_bytes_, kProtection, kFlags, fd_, IORING_OFF_SQ_RING);
    rings_ = rings == MAP_FAILED ? nullptr : rings;
    void* entries = mmap(nullptr, entries_bytes_, kProtection, kFlags, fd_, IORING_OFF_SQES);
    entries_ = entries == MAP_FAILED ? nullptr : static_cast<io_uring_sqe*>(entries);
    if (rings_ == nullptr || entries_ == nullptr) {
        const int error = errno;
        unmap_rings();
        close(fd_);
        refuse(error, "mapping the rings of io_uring");
    }
    submission_head_ = at<unsigned>(rings_, params.sq_off.head);
    submission_tail_ = at<unsigned>(rings_, params.sq_off.tail);
    submission_array_ = at<unsigned>(rings_, params.sq_off.array);
    submission_mask_ = *at<unsigned>(rings_, params.sq_off.ring_mask);
    completion_head_ = at<unsigned>(rings_, params.cq_off.head);
    completion_tail_ = at<unsigned>(rings_, params.cq_off.tail);
    completions_ = at<io_uring_cqe>(rings_, params.cq_off.cqes);
    completion_mask_ = *at<unsigned>(rings_, params.cq_off.ring_mask);
}

void UringRing::unmap_rings()
{
    if (entries_ != nullptr) {
        munmap(entries_, entries_bytes_);
    }
    if (rings_ != nullptr) {
        munmap(rings_, rings_bytes_);
    }
}

io_uring_sqe* UringRing::next_entry()
{
    const unsigned tail = *submission_tail_;
    const unsigned index = tail & submission_mask_;
    submission_array_[index] = index;
    io_uring_sqe* entry = &entries_[index];
    std::memset(entry, 0, sizeof *entry);
    // Only this thread enters the kernel, so it reads the entry after the caller has filled it in.
    __atomic_store_n(submission_tail_, tail + 1, __ATOMIC_RELEASE);
    return entry;
}

int UringRing::enter(std::chrono::nanoseconds timeout)
{
    const auto secs = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    KernelTimespec timespec{secs.count(), (timeout - secs).count()};
    EnterArgument argument{};
    argument.timespec = timeout.count() < 0 ? 0 : pointer_value(&timespec);
    const unsigned num_prepared =
        *submission_tail_ - __atomic_load_n(submission_head_, __ATOMIC_ACQUIRE);
    const long num_submitted =
        syscall(__NR_io_uring_enter, fd_, num_prepared, 1, IORING_ENTER_GETEVENTS | kEnterExtArg,
                &argument, sizeof argument);
    if (num_submitted >= 0 || errno == EINTR || errno == ETIME) {
        num_refusals_ = 0;
        return 0;
    }
    if ((errno == EAGAIN || errno == EBUSY) && ++num_refusals_ < kMaxRefusals) {
        // The kernel is short of memory for requests: those in flight will give some back.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return 0;
    }
    return errno;
}

bool UringRing::next_completion(io_uring_cqe* completion)
{
    const unsigned head = *completion_head_;
    if (head == __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE)) {
        return false;
    }
    *completion = completions_[head & completion_mask_];
    __atomic_store_n(completion_head_, head + 1, __ATOMIC_RELEASE);
    return true;
}

bool UringRing::create_buffer_table(unsigned num_slots)
{
    const std::vector<iovec> empty_slots(num_slots, iovec{nullptr, 0});
    const BufferRegister table{num_slots, 0, 0, pointer_value(empty_slots.data()), 0};
    has_buffer_table_ =
        syscall(__NR_io_uring_register, fd_, kRegisterBuffers2, &table, sizeof table) == 0;
    return has_buffer_table_;
}

bool UringRing::update_buffer_slot(unsigned slot, char* address, std::size_t num_bytes)
{
    const iovec range{address, num_bytes};
    const BufferUpdate update{slot, 0, pointer_value(&range), 0, 1, 0};
    return syscall(__NR_io_uring_register, fd_, kRegisterBuffersUpdate, &update, sizeof update) ==
           1;
}

}  // namespace fuyou
#endif
