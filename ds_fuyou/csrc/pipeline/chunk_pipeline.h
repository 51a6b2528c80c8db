// SPDX-License-Identifier: Apache-2.0
//
// The out-of-core optimizer's worker: read (R), update (U), write (W) of chunks, overlapped.
//
// [Note: threads, waits and why nothing deadlocks]
// Three parties touch this object.
//   * The training thread calls the public functions. It may wait (wait_*, invalidate, discard).
//   * The worker thread owned here starts reads, runs updates and starts writes. It waits only for
//     "something changed" on `changed_`, never for a particular chunk, memory or a commit.
//   * The I/O engine's threads run completions; these take the mutex, change a job's state and
//     signal. They never wait.
// Everything below `mutex_` is guarded by it; it is released while an update runs. A job's staging
// memory, and the gradient memory it reads, are owned by the job from admission to its end.
// Progress: jobs are admitted in the order (generation, position), so a job of an older generation
// never waits for memory that a younger one holds. A parked write waits only for the commit of the
// generation before it; that commit waits only for jobs of older generations. An update that is
// held back waits for release(), which the training thread calls, or drops, in every step(). Held
// jobs of a generation are admitted only when no older job still waits for memory. Hence the oldest
// generation can always finish. A failure of any kind is sticky: it wakes and fails every waiter.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/io_engine.h"
#include "kernels/elementwise.h"
#include "memory/aligned_pool.h"
#include "pipeline/state_block.h"

namespace fuyou {

struct FileRange {
    int fd;
    std::uint64_t offset;
    std::uint64_t num_bytes;
};
using FileRanges = std::vector<FileRange>;

// A run of one stock sub-group whose fp32 parameter and moments move together, as one StateBlock.
struct ChunkSpec {
    std::uint64_t numel = 0;
    std::int64_t position = 0;  // place in the forward pass: the deadline, smaller is sooner
    int num_moments = 2;
    ElementType param_type = ElementType::kBFloat16;
    ElementType grad_type = ElementType::kBFloat16;
    std::array<FileRanges, 2> state_slots;  // empty when resident
    std::array<FileRanges, 2> param_slots;  // empty when P16 is in DRAM
    FileRanges grad_slot;                   // empty when G16 is in DRAM
    int num_slots = 1;
    char* resident_state = nullptr;  // state block in DRAM instead of on storage
    std::array<char*, 2> param_memory = {nullptr, nullptr};  // P16 in DRAM, by version
};

struct ChunkUpdate {
    std::size_t chunk = 0;
    std::int64_t generation = 0;
    std::vector<UpdateSegment> segments;
    float multiplier = 1.0F;
    const char* gradient = nullptr;  // DRAM; nullptr: read the chunk's grad_slot
    ElementType gradient_type = ElementType::kBFloat16;
    int param_version = 0;  // which param_memory receives P16
    bool held = false;      // read ahead now, update after release()
};

struct PipelineFailure {
    int error = 0;  // errno, 0 when not an I/O failure
    int fd = -1;
    std::uint64_t offset = 0;
    std::string what;
};

struct PipelineStats {
    double update_busy_secs = 0.0;
    std::uint64_t num_updates = 0;
    std::uint64_t num_updated_elements = 0;
    std::uint64_t num_discarded = 0;
    std::uint64_t state_bytes_read = 0;
    std::uint64_t state_bytes_written = 0;
};

// One finished piece of lane work, for the trace: seconds on the steady clock.
struct LaneEvent {
    int lane;  // 0 read, 1 update, 2 write
    std::size_t chunk;
    std::int64_t generation;
    double begin_secs;
    double end_secs;
};

class ChunkPipeline {
  public:
    ChunkPipeline(IoEngine* io, AlignedPool* staging, int num_update_threads);
    ~ChunkPipeline();
    ChunkPipeline(const ChunkPipeline&) = delete;
    ChunkPipeline& operator=(const ChunkPipeline&) = delete;

    std::size_t add_chunk(const ChunkSpec& spec);
    void set_position(std::size_t chunk, std::int64_t position);
    void set_zero_moments(std::size_t chunk, bool zero);  // moments are zeros, not yet on storage
    void set_slot(std::size_t chunk, int slot);           // where the published state is
    int slot(std::size_t chunk) const;

    // Queues one update; at most one per chunk and generation is alive.
    void enqueue(ChunkUpdate update);
    // Gives held jobs of `generation` what step() decided and lets them run.
    void release(std::size_t chunk, std::vector<UpdateSegment> segments, float multiplier,
                 const char* gradient, ElementType gradient_type, int param_version);
    // Drops an unpublished update; returns once nothing reads its gradient any more.
    void invalidate(std::size_t chunk);
    void discard_all();
    // Makes every live job of `generation` final. Readers then see the new state.
    void publish(std::int64_t generation);
    // Opens the writes of `generation` + 1 (the record of `generation` is durable).
    void set_committed(std::int64_t generation);

    // P16 of the chunk is in place for `generation` (in DRAM, or readable from storage).
    // Each wait returns false after `timeout_secs` so that the caller can say what it waits for.
    bool wait_published(std::size_t chunk, std::int64_t generation, double timeout_secs);
    bool is_published(std::size_t chunk, std::int64_t generation) const;
    bool wait_durable(std::int64_t generation, double timeout_secs);  // every chunk
    // No update of the chunk up to `generation` reads its gradient any more.
    bool wait_gradient_read(std::size_t chunk, std::int64_t generation, double timeout_secs);
    // `buffer` is about to be reused: an update that was to read it reads the chunk's grad_slot
    // instead.
    void read_gradient_from_storage(std::size_t chunk, const char* buffer);
    bool wait_idle(std::size_t chunk,
                   double timeout_secs);  // no transfer of the chunk is in flight
    bool has_job(std::size_t chunk) const;

    // Fails every waiter now and later, for a failure met outside (the commit of a generation).
    void fail(const std::string& what, int error);
    bool failed() const;
    PipelineFailure failure() const;
    PipelineStats stats() const;
    void set_tracing(bool on);
    // Blocks that an update reads are compared with what the last update of the chunk wrote.
    void set_checksum(bool on);
    // Whether a state block read from the published slot is what the chunk's last update wrote;
    // true as long as no update of this run wrote it.
    bool state_holds(std::size_t chunk, char* block) const;
    std::vector<LaneEvent> take_events();
    void stop();  // finishes nothing new, waits for what is in flight, joins

  private:
    enum class JobState { kQueued, kReading, kReady, kUpdating, kUpdated, kWriting };
    struct Job;
    struct Chunk;

    void run();
    bool advance(std::unique_lock<std::mutex>& lock);
    void admit_jobs_locked();
    bool admit_locked(const std::shared_ptr<Job>& job);
    std::shared_ptr<Job> next_ready_locked();
    void update(Job& job);
    bool checksum_holds_locked(const Job& job);
    void start_writes_locked();
    void read_gradient_locked(const std::shared_ptr<Job>& job);
    std::uint64_t grad_offset(const Chunk& chunk) const;
    std::int64_t io_priority(const Job& job) const;
    void finish_locked(const std::shared_ptr<Job>& job);
    void fail_locked(const std::string& what, int error, int fd, std::uint64_t offset);
    void on_read(const std::shared_ptr<Job>& job, const IoOutcome& outcome);
    void on_write(const std::shared_ptr<Job>& job, const IoOutcome& outcome);
    void trace_locked(int lane, const Job& job, double begin, double end);
    void require_running_locked() const;
    template <class Predicate>
    bool wait_locked(std::unique_lock<std::mutex>& lock, double timeout_secs, Predicate done);

    IoEngine* io_;
    AlignedPool* staging_;
    int num_update_threads_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Chunk> chunks_;
    std::map<std::pair<std::int64_t, std::pair<std::int64_t, std::size_t>>, std::shared_ptr<Job>>
        queue_;
    std::list<std::shared_ptr<Job>> active_;
    std::int64_t published_ = 0;
    std::int64_t committed_ = 0;
    bool failed_ = false;
    bool stopping_ = false;
    bool tracing_ = false;
    bool checksum_ = false;
    PipelineFailure failure_;
    PipelineStats stats_;
    std::vector<LaneEvent> events_;
    std::thread worker_;
};

}  // namespace fuyou
