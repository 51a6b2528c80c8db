// SPDX-License-Identifier: Apache-2.0
//
// The out-of-core optimizer's worker: read (R), update (U), write (W) of chunks, overlapped.
//
// [Note: threads, waits and why nothing deadlocks]
// Three parties touch this object.
//   * The training thread (and the committer) call the public functions. They may wait: for one
//     chunk on `chunk_changed_`, for a generation on `durable_`.
//   * The worker thread owned here starts reads, runs updates and starts writes. It waits only for
//     "there may be something to do" on `work_`, never for a particular chunk, memory or a commit;
//     and, without the mutex, for those of its team that help it (update_team.h).
//   * The I/O engine's threads run completions; these take the mutex, change a job's state and
//     signal. They never wait.
// Everything below `mutex_` is guarded by it; it is released while an update runs. A job's staging
// memory, and the gradient memory it reads, are owned by the job from admission to its end; the
// states (chunk_job.h) say which memory each holds.
// Progress: a chunk has one admitted job at a time; those behind it stand in the chunk's own list.
// Jobs are admitted in the order (generation, position), but for those that make P16 alone and have
// to spare memory; and none before all older generations are, so a job of an older generation never
// waits for memory that a younger one holds. A parked
// write waits only for the commit of the generation before it; that commit waits only for jobs of
// older generations. An update that is held back waits for release(), which the training thread
// calls when its gradients are there, or drops, in step() at the latest. Held jobs of a generation
// are admitted only when no older job still waits for memory. Hence the oldest generation can
// always finish. A failure of any kind is sticky: it wakes and fails every waiter.
// Updates may also wait for a copier of states, which waits for none of them: see the note in
// kept_states.cpp.
//
// [Note: halves that are not read]
// A split block (state_block.h) needs P16 of its own step to be put together. With P16 on storage
// it is the one in the same slot. With P16 in memory it is the published version, which no update
// writes while there are two, and which it writes behind itself, tile by tile, while there is one;
// the upper halves stand in the slot all the same, so that the slot is a state by itself. What is
// in memory may be edited, by a script that says so (params_edited) or does not. So where the sums
// of what was put together are not those that were written, the block is read again, with its upper
// halves, and updated again; only then is it a fault of the disk. Without sums they are always
// read.
//
// [Note: chunks that move]
// A chunk moves by way of an update, which reads what it needs where it is and leaves what it makes
// at a destination. A whole state that comes to memory is read into the block that will hold it,
// and not written; one that leaves is updated in its block and written from there. A split one
// passes through staging both ways. Otherwise such a job is like any other: it waits for the same
// things, and its end is not before the commit of the generation before, so that no record names a
// place that the chunk had not reached, or had left. The memory at both ends is the caller's, until
// the chunk is idle. Who signals: whoever makes a job ready, frees staging memory, ends a job or
// opens writes wakes the worker; an ended update, publication, drop or job wakes those who wait for
// its chunk, if there are any; the last job of a generation wakes those who wait for it to be
// durable.
//
// [Note: order of updates]
// Ready updates run by deadline, the place of their chunk in the next forward. States in memory
// need no reads, so they stand there all at once, when step() has said what to do; loaded ones that
// come after them in forward would keep their staging memory from the reads, and their writes from
// storage, as long as those take, and a step would last as long as both one after the other. So
// while too few transfers are in flight to keep storage busy, and it would end after the updates by
// the pace of both of late, a loaded one that may be written goes ahead. What is not yet updated
// shrinks meanwhile, what is to be moved does not: so the two end together, and forward has its
// first chunks as soon as that allows. A job goes ahead of no older generation.
//
// [Note: P16 that was written]
// A step's first forward uses P16 in the order of updates. Those of states in memory come just
// before it: they need no reads. What they make is in staging memory, and what one of them has
// written stays there until somebody is given the memory, so that forward need not read it back: it
// would wait behind the writes of later chunks, which would end meanwhile and have to be read, too.
// What is left holds no memory, for all of it is free: whoever asks for some gets it, where it
// would be if nothing were left. Only updates that make nothing but P16 spare what the next forward
// has yet to take, that is, to copy to the chunk's end; so they use all of the memory at first, and
// then follow it. Where nothing else is free they take that, too, as long as they hold no more than
// a quarter of the memory, or four of them: it may be that no forward comes, or that it is slower
// than writes, and needs nothing that is left. Jobs that load states go ahead of those that wait
// for that. What is left is P16 of the chunk as long as that generation is the published one, and
// nobody has put it there or elsewhere, or said that it was edited (params_edited, between the end
// of that update and the write).
//
// [Note: work a chunk]
// Models have tens of thousands of chunks, so nothing that happens once a chunk may walk a list of
// chunks or jobs: queues are ordered maps, and a chunk knows its jobs.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "io/io_engine.h"
#include "kernels/elementwise.h"
#include "memory/aligned_pool.h"
#include "pipeline/pace.h"
#include "pipeline/state_block.h"
#include "pipeline/update_team.h"

namespace fuyou {

constexpr std::size_t kMostSlots = 3;

// A run of one stock sub-group whose fp32 parameter and moments move together, as one StateBlock.
struct ChunkSpec {
    std::int64_t position = 0;  // place in the forward pass: the deadline, smaller is sooner
    BlockLayout whole;          // of a state outside of its places
    BlockLayout in_memory;      // of the state in memory
    BlockLayout stored;         // of the state in a slot
    ElementType param_type = ElementType::kBFloat16;
    ElementType grad_type = ElementType::kBFloat16;
    std::array<FileRanges, kMostSlots> state_slots;  // empty when resident
    std::array<FileRanges, kMostSlots> param_slots;  // empty when P16 is in DRAM
    FileRanges grad_slot;                            // empty when G16 is in DRAM
    int num_slots = 1;  // of three one is left out by turns, but for a state that is kept
    char* resident_state = nullptr;  // state block in DRAM instead of on storage
    char* spare_state = nullptr;  // another one: the next update goes there, and they change places
    std::array<char*, 2> param_memory = {nullptr, nullptr};  // P16 in DRAM, by version

    std::uint64_t numel() const { return whole.numel; }
    bool resident() const { return resident_state != nullptr; }
    bool param_on_storage() const { return param_memory[0] == nullptr; }
    // Masters are split in a slot and whole in memory: a state that moves passes through staging.
    bool changes_form() const { return stored.is_split && !in_memory.is_split; }
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

// What an earlier run's record says of a chunk's published state.
struct TakenOver {
    bool has_moments = false;  // else they are zeros that no update has written yet
    bool has_sums = false;     // else nothing is compared until it is read through replace_state()
    StateSums sums;
    std::uint64_t param_digest = IoEngine::kNoDigest;  // of P16 on storage
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
    std::uint64_t state_bytes_written = 0;
    std::uint64_t num_elements_left = 0;  // of queued and admitted jobs, to be updated
    std::uint64_t num_bytes_left = 0;     // of theirs, to be read and written, roughly
};

// A state that a copier has to copy: in a buffer that it lent, or where the chunk lives.
struct KeptState {
    std::size_t chunk = 0;
    int slot = 0;
    char* buffer = nullptr;  // lent, and the copier's again; nullptr: read it from its place
    bool is_wanted = false;  // an update waits for it
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
    // The published state is, whoever wrote it, `block` (a whole StateBlock's memory). Without
    // moments only P32 stands there and is given: moments are zeros that no update has written yet.
    void replace_state(std::size_t chunk, char* block, bool has_moments);
    // Somebody else than an update wrote the chunk's P16 in memory: P32 does not follow from it.
    void params_edited(std::size_t chunk);
    // Of a split block in the published slot, whether its upper halves are there for certain; and
    // that they are, from now on. Nothing may work on the chunk.
    bool has_high(std::size_t chunk) const;
    void set_has_high(std::size_t chunk);
    // What an earlier run left in the published slot is this run's state: nothing is read, and
    // whoever reads it first compares it. See TakenOver.
    void take_over(std::size_t chunk, const TakenOver& state);
    int slot(std::size_t chunk) const;  // where the published state is

    // The next update that is queued moves the chunk: of `places` those count, and whether there
    // are two slots. It must be published already, for what moves cannot be dropped.
    void set_destination(std::size_t chunk, const ChunkSpec& places);
    bool wait_moved(std::size_t chunk, double timeout_secs);  // it does not move any more
    // P16 and G16 are where `places` says from now on, and as many slots count: published values
    // of P16 are there. Nothing works on the chunk, and its state stays where it is.
    void set_places(std::size_t chunk, const ChunkSpec& places);
    // Whether the state is in memory.
    bool is_resident(std::size_t chunk) const;
    // Where the published state is in memory, null on storage; to be asked while no published
    // update of the chunk is under way.
    const char* resident_state(std::size_t chunk) const;
    // Other staging memory from now on. None of the one before may be in use, and the new one has
    // to hold every chunk. `owner` is kept as long as it is this one.
    void set_staging(AlignedPool* staging, std::shared_ptr<const void> owner = nullptr);
    // Queues one update; at most one per chunk and generation is alive.
    void enqueue(ChunkUpdate update);
    // Gives held jobs of `generation` what step() decided and lets them run.
    void release(std::size_t chunk, std::vector<UpdateSegment> segments, float multiplier,
                 const char* gradient, ElementType gradient_type, int param_version);
    // Drops an unpublished update; returns once nothing reads its gradient in memory any more. A
    // read of it from storage may be in flight still; what it brings is not looked at.
    void invalidate(std::size_t chunk);
    // Makes every live job of `generation` final. Readers then see the new state.
    void publish(std::int64_t generation);
    // Opens the writes of `generation` + 1 (the record of `generation` is durable).
    void set_committed(std::int64_t generation);

    // P16 of the chunk is in place for `generation` (in DRAM, or readable from storage).
    // Each wait returns false after `timeout_secs` so that the caller can say what it waits for.
    bool wait_published(std::size_t chunk, std::int64_t generation, double timeout_secs);
    bool is_published(std::size_t chunk, std::int64_t generation) const;
    // It can be had: it is in place, or copy_updated() gives it before it is written.
    bool wait_updated(std::size_t chunk, std::int64_t generation, double timeout_secs);
    bool is_updated(std::size_t chunk, std::int64_t generation) const;
    // Bytes [begin, begin + num_bytes) of the chunk's P16, which lives on storage, out of the
    // staging memory of the published update, which has yet to write them, or whose memory nobody
    // has needed since. False if there is none: then they are in their place.
    bool copy_updated(std::size_t chunk, std::uint64_t begin, std::uint64_t num_bytes,
                      char* destination);
    bool wait_durable(std::int64_t generation, double timeout_secs);  // every chunk
    // No update of the chunk up to `generation` reads its gradient any more.
    bool wait_gradient_read(std::size_t chunk, std::int64_t generation, double timeout_secs);
    // `buffer` is about to be reused: an update that was to read it reads the chunk's grad_slot
    // instead.
    void read_gradient_from_storage(std::size_t chunk, const char* buffer);
    bool wait_idle(std::size_t chunk,
                   double timeout_secs);  // no transfer of the chunk is in flight

    // Fails every waiter now and later, for a failure met outside (the commit of a generation).
    void fail(const std::string& what, int error);
    bool failed() const;
    PipelineFailure failure() const;
    PipelineStats stats() const;
    void set_tracing(bool on);
    // Blocks that an update reads are compared with what this run wrote. To be set first.
    void set_checksum(bool on);
    // Whether a state block read from the published slot is what this run, or the one that it goes
    // on from, wrote there; without moments: whether its P32 is, which is all that is given.
    bool state_holds(std::size_t chunk, char* block, bool with_moments = true) const;
    // Sums of every chunk's published state, those of resident ones zero; none without checksum.
    // Throws std::logic_error if it is not known what stands in a slot.
    std::vector<StateSums> state_sums() const;
    // Of every chunk's published P16 on storage, IoEngine::page_digest(); kNoDigest where there is
    // none, or it is not known.
    std::vector<std::uint64_t> param_digests() const;
    // Chunks whose P16 was taken over and read in part: to be read whole before what was read
    // becomes part of anything that lasts.
    std::vector<std::size_t> half_read_params() const;
    std::vector<LaneEvent> take_events();

    // States kept for a copier while training goes on; see the note in kept_states.cpp.
    // From now on every chunk's state as last published is kept; `order` is that of copying.
    void keep_states(std::vector<std::size_t> order);
    // Memory for one state block of any chunk, into which an update may put the one it replaces.
    void lend_buffer(char* buffer);
    // The next state to copy, of those kept each once: one that an update handed over, or waits
    // for; if `may_read`, any. False after `timeout_secs`. Throws if the pipeline failed before
    // every kept state was in place, or as an update replaced one in its own memory.
    bool take_kept(double timeout_secs, bool may_read, KeptState* taken);
    // Whether a block is the state of a chunk that take_kept() gave.
    bool kept_holds(std::size_t chunk, char* block) const;
    // A chunk that was read from its place is copied: it may be overwritten.
    void release_kept(std::size_t chunk);
    // Nothing is kept any more, and no lent buffer used. Also after a failure. Idempotent.
    void drop_kept();
    // Begins nothing new, and waits for what is in flight. False if that lasts longer; then it has
    // to be called again before the I/O engine, or memory of a chunk, goes. As often as one likes.
    bool stop(double timeout_secs);
    void stop();  // however long it lasts

  private:
    enum class JobState;
    enum class GradientPlace;
    enum class Keep;
    struct Written;
    struct Job;
    struct Chunk;
    using JobKey = std::tuple<std::int64_t, std::int64_t, std::size_t>;
    using JobQueue = std::map<JobKey, std::shared_ptr<Job>>;
    using GenerationCounts = std::map<std::int64_t, std::size_t>;

    // The worker (chunk_worker.cpp).
    void run();
    bool advance(std::unique_lock<std::mutex>& lock);
    void submit_locked(IoKind kind, std::vector<IoExtent> extents, const std::shared_ptr<Job>& job);
    void transferred_locked(int lane, Job& job);
    bool storage_ends_last_locked() const;
    void expect_locked(const Chunk& chunk, Job& job);
    void expect_less_locked(Job& job, std::uint64_t elements, std::uint64_t bytes);
    void admit_jobs_locked();
    bool admit_locked(const std::shared_ptr<Job>& job);
    char* try_allocate_locked(Job& job, std::uint64_t num_bytes);
    JobQueue& queue_of_locked(const Job& job);
    void read_gradient_locked(const std::shared_ptr<Job>& job);
    void make_ready_locked(const std::shared_ptr<Job>& job);
    void update(Job& job);
    void end_update_locked(const std::shared_ptr<Job>& job, const std::string& error);
    bool read_holds_locked(const Job& job) const;
    void note_sums_locked(const Job& job);
    void place_blocks_locked(const Chunk& chunk, Job& job) const;
    void choose_halves_locked(const Chunk& chunk, Job& job) const;
    void place_state_locked(const Chunk& chunk, const Job& job,
                            std::vector<IoExtent>& extents) const;
    bool reads_again_locked(const std::shared_ptr<Job>& job);
    bool may_write_locked(const Job& job) const;
    void write_locked(const std::shared_ptr<Job>& job);
    void finish_locked(const std::shared_ptr<Job>& job);
    void on_read(const std::shared_ptr<Job>& job, const IoOutcome& outcome);
    void on_write(const std::shared_ptr<Job>& job, const IoOutcome& outcome);
    void release_staging_locked(Job& job, bool leaves = false);
    void params_put_locked(Chunk& chunk);
    void unwant_locked(std::optional<Written>& written);
    bool copy_written_locked(std::unique_lock<std::mutex>& lock, Chunk& chunk, std::uint64_t begin,
                             std::uint64_t num_bytes, char* destination);
    std::int64_t io_priority(const Job& job) const;
    void trace_locked(int lane, const Job& job, double begin, double end);

    std::shared_ptr<Job> next_ready_locked(char** copy);
    const std::shared_ptr<Job>& next_in_turn_locked() const;
    void put_ready_locked(const std::shared_ptr<Job>& job);
    void take_ready_locked(const Job& job);
    int target_slot_locked(Chunk& chunk, const Job& job) const;
    bool may_update_locked(const std::shared_ptr<Job>& job, char** copy);
    bool awaits_buffer_locked(const Job& job) const;
    void copied_locked(Job& job);
    void forget_copy_locked(Job& job, bool has_thrown);
    void claim_locked(Chunk& chunk);
    bool is_kept_in_place_locked() const;
    bool next_kept_locked();
    void let_update_locked(Chunk& chunk);
    void reconsider_locked(Chunk& chunk);
    void forget_ready_locked(Job& job);

    void offer_locked(Chunk& chunk);
    void leave_locked(GenerationCounts& counts, std::int64_t generation);
    void wake_chunk_locked(const Chunk& chunk);
    std::vector<FileRanges> published_params() const;
    void arrive_locked(Chunk& chunk, const Job& job);
    void show_params_locked(Chunk& chunk, const Job& job);
    bool stays_locked(const Job& job) const;
    static void require_staging(const AlignedPool& pool, std::uint64_t num_bytes);
    void fail_locked(const std::string& what, int error, int fd, std::uint64_t offset);
    void require_running_locked() const;
    bool is_published_locked(const Job& job) const;
    void wait_until_not_updating_locked(std::unique_lock<std::mutex>& lock, Chunk& chunk,
                                        const std::shared_ptr<Job>& job);
    template <class Predicate>
    bool wait_for_chunk_locked(std::unique_lock<std::mutex>& lock, Chunk& chunk,
                               double timeout_secs, Predicate done);

    IoEngine* io_;
    AlignedPool* staging_;
    std::shared_ptr<const void> staging_owner_;  // null of the first one
    std::uint64_t param_bytes_ = 0;  // of staging, held by jobs that make nothing but P16 there
    UpdateTeam team_;
    mutable std::mutex mutex_;
    std::condition_variable work_;           // the worker's
    std::condition_variable chunk_changed_;  // of those counted in a chunk's num_waiters
    std::condition_variable durable_;
    std::condition_variable ended_changed_;
    std::vector<Chunk> chunks_;
    JobQueue queue_;        // of every chunk without an admitted job, its oldest queued one
    JobQueue param_queue_;  // those of them that make nothing but P16 in staging
    JobQueue ready_;        // jobs that the worker may update
    JobQueue loaded_;       // those of them that hold staging memory
    JobQueue parked_;       // jobs whose write waits for a commit
    std::map<JobKey, std::size_t> wanted_;  // chunks whose update waits for a copy not begun
    std::int64_t kept_generation_ = 0;
    std::vector<std::size_t> kept_order_;
    std::size_t next_kept_ = 0;   // in kept_order_
    bool has_lost_kept_ = false;  // a failed update left one of them half replaced
    std::vector<char*> lent_;     // buffers of the copier
    struct LentAway {
        std::chrono::steady_clock::time_point since;
        std::uint64_t num_bytes = 0;
    };
    std::map<char*, LentAway> lent_away_;  // that an update took and the copier has to give back
    JobQueue short_of_buffer_;             // ready jobs that wait for one of them
    bool copier_is_slow_ = false;          // so none waits for a buffer
    std::deque<KeptState> captured_;       // lent buffers that updates have filled
    std::size_t num_capturing_ = 0;        // buffers that an update is filling
    std::condition_variable kept_changed_;
    GenerationCounts unadmitted_;    // queued jobs by generation, those behind another included
    GenerationCounts open_;          // jobs by generation that have neither ended nor been dropped
    std::size_t num_transfers_ = 0;  // of jobs, in flight
    double transfers_begin_secs_ = 0.0;  // since there have been some, or one has ended
    Pace transfer_pace_;                 // in bytes; while there are some
    Pace update_pace_;                   // in elements
    bool is_short_of_memory_ = false;    // the first of a queue found no staging, or too much held
    std::int64_t published_ = 0;
    std::int64_t committed_ = 0;
    bool failed_ = false;
    bool stopping_ = false;
    bool ended_ = false;  // the worker has
    bool tracing_ = false;
    bool checksum_ = false;
    PipelineFailure failure_;
    PipelineStats stats_;
    std::vector<LaneEvent> events_;
    std::thread worker_;
};

}  // namespace fuyou
