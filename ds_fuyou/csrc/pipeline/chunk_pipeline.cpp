// SPDX-License-Identifier: Apache-2.0
#include "pipeline/chunk_pipeline.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace fuyou {
namespace {

double now_secs()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// The file ranges of the first `num_bytes` of `ranges`, placed in memory from `memory` on.
std::vector<IoExtent> place(const FileRanges& ranges, char* memory, std::uint64_t num_bytes)
{
    std::vector<IoExtent> extents;
    for (const FileRange& range : ranges) {
        if (num_bytes == 0) break;
        const std::uint64_t part = std::min(range.num_bytes, num_bytes);
        extents.push_back({range.fd, range.offset, memory, part});
        memory += part;
        num_bytes -= part;
    }
    if (num_bytes != 0) throw std::logic_error("file ranges are shorter than the bytes to move");
    return extents;
}

void append(std::vector<IoExtent>& all, std::vector<IoExtent> more)
{
    all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

struct ChunkPipeline::Job {
    ChunkUpdate update;
    JobState state = JobState::kQueued;
    bool cancelled = false;
    bool published = false;
    bool gradient_read = false;          // nothing will read the gradient any more
    bool gradient_read_pending = false;  // released while its state was still being read
    int target_slot = 0;
    char* staging = nullptr;      // state block, then P16 and G16 areas when they are on storage
    char* state_block = nullptr;  // state block in use: staging or resident memory
    char* param16 = nullptr;      // where the new P16 goes
    const char* gradient = nullptr;
    double begin_secs = 0.0;
    BlockSums sums;
};

struct ChunkPipeline::Chunk {
    ChunkSpec spec;
    int slot = 0;
    bool zero_moments = true;
    // Sum over the state block in each slot, where an update of this run wrote it.
    std::array<std::uint64_t, 2> sums = {0, 0};
    std::array<bool, 2> has_sum = {false, false};
    std::int64_t published_generation = 0;
    std::shared_ptr<Job> job;

    bool resident() const { return spec.resident_state != nullptr; }
    bool param_on_storage() const { return spec.param_memory[0] == nullptr; }
    std::uint64_t part_bytes() const { return StateBlock::part_bytes(spec.numel); }
    std::uint64_t state_bytes() const
    {
        return part_bytes() * static_cast<std::uint64_t>(1 + spec.num_moments);
    }
    std::uint64_t param_bytes() const
    {
        return round_up_to_page(spec.numel * element_bytes(spec.param_type));
    }
    std::uint64_t grad_bytes() const
    {
        return round_up_to_page(spec.numel * element_bytes(spec.grad_type));
    }
};

ChunkPipeline::ChunkPipeline(IoEngine* io, AlignedPool* staging, int num_update_threads)
    : io_(io), staging_(staging), num_update_threads_(std::max(1, num_update_threads))
{
    worker_ = std::thread([this] { run(); });
}

ChunkPipeline::~ChunkPipeline()
{
    stop();
}

std::size_t ChunkPipeline::add_chunk(const ChunkSpec& spec)
{
    std::lock_guard<std::mutex> lock(mutex_);
    Chunk chunk;
    chunk.spec = spec;
    const std::uint64_t staging_bytes = (chunk.resident() ? 0 : chunk.state_bytes()) +
                                        (chunk.param_on_storage() ? chunk.param_bytes() : 0) +
                                        (spec.grad_slot.empty() ? 0 : chunk.grad_bytes());
    if (staging_bytes > staging_->capacity_bytes()) {
        throw std::invalid_argument("one chunk needs " + std::to_string(staging_bytes) +
                                    " bytes of staging memory, the pool has " +
                                    std::to_string(staging_->capacity_bytes()));
    }
    chunks_.push_back(std::move(chunk));
    return chunks_.size() - 1;
}

void ChunkPipeline::set_position(std::size_t chunk, std::int64_t position)
{
    std::lock_guard<std::mutex> lock(mutex_);
    chunks_.at(chunk).spec.position = position;
}

void ChunkPipeline::set_zero_moments(std::size_t chunk, bool zero)
{
    std::lock_guard<std::mutex> lock(mutex_);
    chunks_.at(chunk).zero_moments = zero;
    chunks_.at(chunk).has_sum = {false, false};  // the block was written from outside
}

void ChunkPipeline::set_slot(std::size_t chunk, int slot)
{
    std::lock_guard<std::mutex> lock(mutex_);
    chunks_.at(chunk).slot = slot;
}

int ChunkPipeline::slot(std::size_t chunk) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return chunks_.at(chunk).slot;
}

void ChunkPipeline::require_running_locked() const
{
    if (failed_) throw std::runtime_error("the optimizer pipeline has failed: " + failure_.what);
    if (stopping_) throw std::runtime_error("the optimizer pipeline is stopped");
}

void ChunkPipeline::enqueue(ChunkUpdate update)
{
    std::lock_guard<std::mutex> lock(mutex_);
    require_running_locked();
    const Chunk& chunk = chunks_.at(update.chunk);
    const auto key =
        std::make_pair(update.generation, std::make_pair(chunk.spec.position, update.chunk));
    if ((chunk.job && !chunk.job->cancelled && chunk.job->update.generation >= update.generation) ||
        queue_.count(key) != 0) {
        throw std::logic_error("chunk " + std::to_string(update.chunk) +
                               " already has an update of generation " +
                               std::to_string(update.generation) + " or later");
    }
    auto job = std::make_shared<Job>();
    job->update = std::move(update);
    queue_.emplace(key, job);
    changed_.notify_all();
}

void ChunkPipeline::release(std::size_t chunk_index, std::vector<UpdateSegment> segments,
                            float multiplier, const char* gradient, ElementType gradient_type,
                            int param_version)
{
    std::lock_guard<std::mutex> lock(mutex_);
    require_running_locked();
    auto fill = [&](Job& job) {
        job.update.segments = std::move(segments);
        job.update.multiplier = multiplier;
        job.update.gradient = gradient;
        job.update.gradient_type = gradient_type;
        job.update.param_version = param_version;
        job.update.held = false;
    };
    for (auto& entry : queue_) {
        if (entry.second->update.chunk == chunk_index && entry.second->update.held) {
            fill(*entry.second);
            changed_.notify_all();
            return;
        }
    }
    const std::shared_ptr<Job> job = chunks_.at(chunk_index).job;
    if (!job || !job->update.held) throw std::logic_error("no held update to release");
    fill(*job);
    job->gradient = gradient;
    if (gradient == nullptr) {
        job->gradient = job->staging + grad_offset(chunks_.at(chunk_index));
        if (job->state == JobState::kReady) {
            read_gradient_locked(job);
        } else {
            job->gradient_read_pending = true;
        }
    }
    changed_.notify_all();
}

// Reads the gradient of a job that was admitted before its gradient was final.
void ChunkPipeline::read_gradient_locked(const std::shared_ptr<Job>& job)
{
    const Chunk& chunk = chunks_[job->update.chunk];
    job->gradient_read_pending = false;
    job->begin_secs = now_secs();
    io_->submit(IoKind::kRead,
                place(chunk.spec.grad_slot, job->staging + grad_offset(chunk), chunk.grad_bytes()),
                io_priority(*job),
                [this, job](const IoOutcome& outcome) { on_read(job, outcome); });
    job->state = JobState::kReading;
}

// The caller wants its gradient memory back: what has not been read yet is read from storage
// instead.
void ChunkPipeline::read_gradient_from_storage(std::size_t chunk_index, const char* buffer)
{
    std::unique_lock<std::mutex> lock(mutex_);
    for (auto& entry : queue_) {
        ChunkUpdate& update = entry.second->update;
        if (update.chunk == chunk_index && update.gradient == buffer) {
            update.gradient = nullptr;
            return;
        }
    }
    const std::shared_ptr<Job> job = chunks_.at(chunk_index).job;
    if (!job) return;
    changed_.wait(lock, [&] { return job->state != JobState::kUpdating; });
    if (job->gradient_read || job->cancelled || job->update.held || job->gradient != buffer) return;
    job->update.gradient = nullptr;
    job->gradient = job->staging + grad_offset(chunks_[chunk_index]);
    if (job->state == JobState::kReady) {
        read_gradient_locked(job);
    } else {
        job->gradient_read_pending = true;
    }
}

// The staging block of a job is [state | P16 | G16]; parts that live in DRAM are absent.
std::uint64_t ChunkPipeline::grad_offset(const Chunk& chunk) const
{
    return (chunk.resident() ? 0 : chunk.state_bytes()) +
           (chunk.param_on_storage() ? chunk.param_bytes() : 0);
}

std::int64_t ChunkPipeline::io_priority(const Job& job) const
{
    return (job.update.generation << 24) + chunks_[job.update.chunk].spec.position;
}

void ChunkPipeline::invalidate(std::size_t chunk_index)
{
    std::unique_lock<std::mutex> lock(mutex_);
    for (auto it = queue_.begin(); it != queue_.end();) {
        if (it->second->update.chunk == chunk_index && it->second->update.generation > published_) {
            ++stats_.num_discarded;
            it = queue_.erase(it);
        } else {
            ++it;
        }
    }
    std::shared_ptr<Job> job = chunks_.at(chunk_index).job;
    if (!job || job->cancelled || job->update.generation <= published_) return;
    ++stats_.num_discarded;
    job->cancelled = true;
    if (job->state == JobState::kWriting && job->staging == nullptr)
        finish_locked(job);  // already written
    changed_.notify_all();
    // Only a running update reads the gradient; everything else drops it at once.
    changed_.wait(lock, [&] { return job->state != JobState::kUpdating; });
}

void ChunkPipeline::discard_all()
{
    std::vector<std::size_t> pending;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (std::size_t i = 0; i < chunks_.size(); ++i) pending.push_back(i);
    }
    for (std::size_t chunk : pending) invalidate(chunk);
}

void ChunkPipeline::publish(std::int64_t generation)
{
    std::lock_guard<std::mutex> lock(mutex_);
    require_running_locked();
    published_ = generation;
    for (Chunk& chunk : chunks_) {
        const std::shared_ptr<Job> job = chunk.job;  // may still be the job of an older generation
        if (!job || job->cancelled || job->update.generation != generation) continue;
        job->published = true;
        if (job->state == JobState::kWriting && job->staging == nullptr) {
            finish_locked(job);  // ended before its publication
        } else if (job->state >= JobState::kUpdated && !chunk.param_on_storage()) {
            chunk.published_generation = generation;
        }
    }
    changed_.notify_all();
}

void ChunkPipeline::set_committed(std::int64_t generation)
{
    std::lock_guard<std::mutex> lock(mutex_);
    committed_ = generation;
    changed_.notify_all();
}

template <class Predicate>
bool ChunkPipeline::wait_locked(std::unique_lock<std::mutex>& lock, double timeout_secs,
                                Predicate done)
{
    const auto timeout = std::chrono::duration<double>(timeout_secs);
    changed_.wait_for(lock, timeout, [&] { return failed_ || stopping_ || done(); });
    if (!done()) require_running_locked();
    return done();
}

bool ChunkPipeline::is_published(std::size_t chunk, std::int64_t generation) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return chunks_.at(chunk).published_generation >= generation;
}

bool ChunkPipeline::wait_published(std::size_t chunk, std::int64_t generation, double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    return wait_locked(lock, timeout_secs,
                       [&] { return chunks_.at(chunk).published_generation >= generation; });
}

bool ChunkPipeline::wait_durable(std::int64_t generation, double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    return wait_locked(lock, timeout_secs, [&] {
        if (published_ < generation) return false;
        for (const auto& entry : queue_)
            if (entry.second->update.generation <= generation) return false;
        for (const auto& job : active_)
            if (!job->cancelled && job->update.generation <= generation) return false;
        return true;
    });
}

bool ChunkPipeline::wait_gradient_read(std::size_t chunk_index, std::int64_t generation,
                                       double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    const auto reads = [&](const Job& job) {
        return job.update.chunk == chunk_index && job.update.generation <= generation;
    };
    return wait_locked(lock, timeout_secs, [&] {
        for (const auto& entry : queue_)
            if (reads(*entry.second)) return false;
        const auto& job = chunks_.at(chunk_index).job;
        return !job || !reads(*job) || job->gradient_read ||
               (job->cancelled && job->state != JobState::kUpdating);
    });
}

bool ChunkPipeline::wait_idle(std::size_t chunk_index, double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    return wait_locked(lock, timeout_secs, [&] { return !chunks_.at(chunk_index).job; });
}

bool ChunkPipeline::has_job(std::size_t chunk_index) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : queue_)
        if (entry.second->update.chunk == chunk_index) return true;
    const auto& job = chunks_.at(chunk_index).job;
    return job && !job->cancelled;
}

bool ChunkPipeline::failed() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return failed_;
}

PipelineFailure ChunkPipeline::failure() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

PipelineStats ChunkPipeline::stats() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
}

void ChunkPipeline::set_tracing(bool on)
{
    std::lock_guard<std::mutex> lock(mutex_);
    tracing_ = on;
}

std::vector<LaneEvent> ChunkPipeline::take_events()
{
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(events_, {});
}

void ChunkPipeline::set_checksum(bool on)
{
    std::lock_guard<std::mutex> lock(mutex_);
    checksum_ = on;
}

bool ChunkPipeline::state_holds(std::size_t index, char* memory) const
{
    std::uint64_t written = 0;
    StateBlock block{memory, 0, 0};
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const Chunk& chunk = chunks_.at(index);
        const std::size_t slot = static_cast<std::size_t>(chunk.slot);
        if (!checksum_ || chunk.resident() || !chunk.has_sum[slot]) return true;
        written = chunk.sums[slot];
        block.numel = chunk.spec.numel;
        block.num_moments = chunk.spec.num_moments;
    }
    return block.sum(0, block.numel) == written;
}

// Compares what was read with what this run wrote last; remembers what will be written.
bool ChunkPipeline::checksum_holds_locked(const Job& job)
{
    Chunk& chunk = chunks_[job.update.chunk];
    if (!checksum_ || chunk.resident() || job.cancelled) return true;
    const std::size_t source = static_cast<std::size_t>(chunk.slot);
    const bool holds = !chunk.has_sum[source] || chunk.sums[source] == job.sums.read;
    const std::size_t target = static_cast<std::size_t>(job.target_slot);
    chunk.sums[target] = job.sums.updated;
    chunk.has_sum[target] = true;
    return holds;
}

void ChunkPipeline::trace_locked(int lane, const Job& job, double begin, double end)
{
    if (tracing_) events_.push_back({lane, job.update.chunk, job.update.generation, begin, end});
}

void ChunkPipeline::fail_locked(const std::string& what, int error, int fd, std::uint64_t offset)
{
    if (!failed_) {
        failed_ = true;
        failure_ = {error, fd, offset, what};
    }
    changed_.notify_all();
}

void ChunkPipeline::fail(const std::string& what, int error)
{
    std::lock_guard<std::mutex> lock(mutex_);
    fail_locked(what, error, -1, 0);
}

void ChunkPipeline::stop()
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    if (worker_.joinable()) worker_.join();
}

// The worker, until it is stopped and no transfer needs its memory any more.
void ChunkPipeline::run()
{
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        try {
            if (!failed_ && !stopping_ && advance(lock)) continue;
        } catch (const std::exception& exception) {
            fail_locked(std::string("the optimizer's worker failed: ") + exception.what(), 0, -1,
                        0);
        }
        const bool idle = std::none_of(active_.begin(), active_.end(), [](const auto& job) {
            return job->state == JobState::kReading ||
                   (job->state == JobState::kWriting && job->staging != nullptr);
        });
        if (stopping_ && idle) {
            for (const auto& job : active_)
                if (job->staging != nullptr)
                    staging_->release(std::exchange(job->staging, nullptr));
            return;
        }
        changed_.wait(lock);
    }
}

// Starts every write and read that may start, then runs one update. Whether there was one.
bool ChunkPipeline::advance(std::unique_lock<std::mutex>& lock)
{
    start_writes_locked();
    admit_jobs_locked();
    const std::shared_ptr<Job> job = next_ready_locked();
    if (!job) return false;
    job->state = JobState::kUpdating;
    const double begin = now_secs();
    lock.unlock();
    std::string error;
    try {
        update(*job);
    } catch (const std::exception& exception) {
        error = exception.what();
    }
    lock.lock();
    const double end = now_secs();
    job->state = JobState::kUpdated;
    job->gradient_read = true;
    stats_.update_busy_secs += end - begin;
    stats_.num_updates += 1;
    trace_locked(1, *job, begin, end);
    Chunk& chunk = chunks_[job->update.chunk];
    stats_.num_updated_elements += chunk.spec.numel;
    if (!error.empty())
        fail_locked(
            "the update of chunk " + std::to_string(job->update.chunk) + " failed: " + error, 0, -1,
            0);
    if (!checksum_holds_locked(*job)) {
        const FileRange& range =
            chunk.spec.state_slots[static_cast<std::size_t>(chunk.slot)].front();
        fail_locked("verifying the state of chunk " + std::to_string(job->update.chunk), EBADMSG,
                    range.fd, range.offset);
    }
    if (job->update.generation <= published_ && !job->cancelled) {
        job->published = true;
        if (!chunk.param_on_storage()) chunk.published_generation = job->update.generation;
    }
    changed_.notify_all();
    return true;
}

void ChunkPipeline::admit_jobs_locked()
{
    // A later chunk may go ahead of one whose previous job still runs; a younger generation may
    // not.
    bool one_waits = false;
    std::int64_t waiting_generation = 0;
    for (auto it = queue_.begin(); it != queue_.end();) {
        const std::shared_ptr<Job> job = it->second;
        if (one_waits && job->update.generation != waiting_generation) break;
        if (chunks_[job->update.chunk].job) {
            one_waits = true;
            waiting_generation = job->update.generation;
            ++it;
            continue;
        }
        if (!admit_locked(job)) break;
        it = queue_.erase(it);
    }
}

// Takes staging memory and starts the read. False when there is no memory now.
bool ChunkPipeline::admit_locked(const std::shared_ptr<Job>& job)
{
    Chunk& chunk = chunks_[job->update.chunk];
    const bool grad_from_storage =
        !chunk.spec.grad_slot.empty() && job->update.gradient == nullptr && !job->update.held;
    const std::uint64_t state_bytes = chunk.resident() ? 0 : chunk.state_bytes();
    const std::uint64_t grad_bytes = chunk.spec.grad_slot.empty() ? 0 : chunk.grad_bytes();
    if (grad_offset(chunk) + grad_bytes > 0) {
        job->staging = staging_->try_allocate(grad_offset(chunk) + grad_bytes);
        if (job->staging == nullptr) return false;
    }
    job->begin_secs = now_secs();
    job->state_block = chunk.resident() ? chunk.spec.resident_state : job->staging;
    job->param16 = chunk.param_on_storage() ? job->staging + state_bytes : nullptr;
    job->gradient = grad_from_storage ? job->staging + grad_offset(chunk) : job->update.gradient;
    job->target_slot = chunk.spec.num_slots == 2 ? 1 - chunk.slot : 0;
    chunk.job = job;
    active_.push_back(job);

    std::vector<IoExtent> extents;
    if (!chunk.resident()) {
        const std::uint64_t num_bytes =
            chunk.zero_moments ? chunk.part_bytes() : chunk.state_bytes();
        append(extents, place(chunk.spec.state_slots[static_cast<std::size_t>(chunk.slot)],
                              job->staging, num_bytes));
        stats_.state_bytes_read += num_bytes;
    }
    if (grad_from_storage) {
        append(extents, place(chunk.spec.grad_slot, job->staging + grad_offset(chunk), grad_bytes));
    }
    if (extents.empty()) {
        job->state = JobState::kReady;
        return true;
    }
    io_->submit(IoKind::kRead, std::move(extents), io_priority(*job),
                [this, job](const IoOutcome& outcome) { on_read(job, outcome); });
    job->state = JobState::kReading;  // only now: nothing waits for the end of what did not begin
    return true;
}

void ChunkPipeline::on_read(const std::shared_ptr<Job>& job, const IoOutcome& outcome)
{
    std::lock_guard<std::mutex> lock(mutex_);
    job->state = JobState::kReady;
    trace_locked(0, *job, job->begin_secs, now_secs());
    if (job->gradient_read_pending && outcome.error == 0 && !job->cancelled && !stopping_) {
        try {
            read_gradient_locked(job);
            return;
        } catch (const std::exception& exception) {  // this is the I/O engine's thread
            fail_locked(exception.what(), 0, -1, 0);
        }
    }
    if (outcome.error != 0) {
        fail_locked("reading the state of chunk " + std::to_string(job->update.chunk) + " failed",
                    outcome.error, outcome.fd, outcome.offset);
    }
    changed_.notify_all();
}

std::shared_ptr<ChunkPipeline::Job> ChunkPipeline::next_ready_locked()
{
    std::shared_ptr<Job> best;
    for (const std::shared_ptr<Job>& job : active_) {
        if (job->state != JobState::kReady || job->cancelled || job->update.held) continue;
        const auto key = [this](const Job& j) {
            return std::make_pair(j.update.generation, chunks_[j.update.chunk].spec.position);
        };
        if (!best || key(*job) < key(*best)) best = job;
    }
    return best;
}

void ChunkPipeline::update(Job& job)
{
    const Chunk& chunk = chunks_[job.update.chunk];
    StateBlock block{job.state_block, chunk.spec.numel, chunk.spec.num_moments};
    if (!chunk.resident() && chunk.zero_moments) block.clear_moments();
    BlockUpdate how;
    how.gradient = job.gradient != nullptr ? job.gradient : job.update.gradient;
    how.gradient_type = job.update.gradient_type;
    how.multiplier = job.update.multiplier;
    how.param16 = job.param16 != nullptr
                      ? job.param16
                      : chunk.spec.param_memory[static_cast<std::size_t>(job.update.param_version)];
    how.param_type = chunk.spec.param_type;
    how.checked = checksum_ && !chunk.resident();
    job.sums = update_block(block, job.update.segments, how, num_update_threads_);
}

void ChunkPipeline::start_writes_locked()
{
    for (auto it = active_.begin(); it != active_.end();) {
        const std::shared_ptr<Job> job = *it++;
        if (job->state != JobState::kReady && job->state != JobState::kUpdated) continue;
        if (job->cancelled) {  // before admission: the chunk's next job may wait for this end
            finish_locked(job);
            continue;
        }
        if (job->state == JobState::kReady) continue;
        const Chunk& chunk = chunks_[job->update.chunk];
        // Parked: the slot to be overwritten still holds the last committed state.
        if (chunk.spec.num_slots == 2 && job->update.generation > committed_ + 1) continue;
        std::vector<IoExtent> extents;
        const std::size_t target = static_cast<std::size_t>(job->target_slot);
        if (!chunk.resident()) {
            append(extents,
                   place(chunk.spec.state_slots[target], job->staging, chunk.state_bytes()));
            stats_.state_bytes_written += chunk.state_bytes();
        }
        if (chunk.param_on_storage()) {
            append(extents,
                   place(chunk.spec.param_slots[target], job->param16, chunk.param_bytes()));
        }
        job->begin_secs = now_secs();
        const bool has_transfer = !extents.empty();
        if (has_transfer)
            io_->submit(IoKind::kWrite, std::move(extents), io_priority(*job),
                        [this, job](const IoOutcome& outcome) { on_write(job, outcome); });
        job->state = JobState::kWriting;
        if (has_transfer) continue;
        if (job->staging != nullptr)  // it held the gradient only
            staging_->release(std::exchange(job->staging, nullptr));
        if (job->published) finish_locked(job);
    }
}

void ChunkPipeline::on_write(const std::shared_ptr<Job>& job, const IoOutcome& outcome)
{
    std::lock_guard<std::mutex> lock(mutex_);
    trace_locked(2, *job, job->begin_secs, now_secs());
    staging_->release(std::exchange(job->staging, nullptr));
    if (outcome.error != 0) {
        fail_locked("writing the state of chunk " + std::to_string(job->update.chunk) + " failed",
                    outcome.error, outcome.fd, outcome.offset);
    } else if (job->cancelled || job->published) {
        finish_locked(job);
    }  // else: a speculative job that publish() or invalidate() will end
    changed_.notify_all();
}

// The end of a job: a published one moves the chunk on, a cancelled one leaves it as it was.
void ChunkPipeline::finish_locked(const std::shared_ptr<Job>& job)
{
    Chunk& chunk = chunks_[job->update.chunk];
    if (job->staging != nullptr) staging_->release(std::exchange(job->staging, nullptr));
    if (!job->cancelled) {
        if (!chunk.resident() || chunk.param_on_storage()) chunk.slot = job->target_slot;
        chunk.zero_moments = false;
        chunk.published_generation = job->update.generation;
    }
    active_.remove(job);
    if (chunk.job == job) chunk.job.reset();
    changed_.notify_all();
}

}  // namespace fuyou
