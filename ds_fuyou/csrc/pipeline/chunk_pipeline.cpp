// SPDX-License-Identifier: Apache-2.0
//
// The public calls of the pipeline: what the training thread and the committer ask, and wait for.
#include "pipeline/chunk_pipeline.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "pipeline/chunk_job.h"

namespace fuyou {

ChunkPipeline::ChunkPipeline(IoEngine* io, AlignedPool* staging, int num_update_threads)
    : io_(io), staging_(staging), team_(num_update_threads)
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
    require_staging(*staging_, chunk.staging_bytes(spec));
    chunks_.push_back(std::move(chunk));
    return chunks_.size() - 1;
}

void ChunkPipeline::require_staging(const AlignedPool& pool, std::uint64_t num_bytes)
{
    if (num_bytes <= pool.capacity_bytes()) return;
    throw std::invalid_argument("one chunk needs " + std::to_string(num_bytes) +
                                " bytes of staging memory, the pool has " +
                                std::to_string(pool.capacity_bytes()));
}

void ChunkPipeline::set_destination(std::size_t index, const ChunkSpec& places)
{
    std::lock_guard<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(index);
    if (!kept_order_.empty()) throw std::logic_error("no chunk moves while states are kept");
    if (chunk.is_moving()) throw std::logic_error("the chunk moves already");
    Chunk moved;
    moved.spec = places;
    require_staging(*staging_, std::max(chunk.staging_bytes(places), moved.staging_bytes(places)));
    chunk.destination = std::make_shared<const ChunkSpec>(places);
}

void ChunkPipeline::set_places(std::size_t index, const ChunkSpec& places)
{
    std::lock_guard<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(index);
    if (chunk.job || !chunk.waiting.empty() || chunk.destination || chunk.keep != Keep::kNot)
        throw std::logic_error("a chunk that something works on stays where it is");
    Chunk moved;
    moved.spec = places;
    require_staging(*staging_, moved.staging_bytes(places));
    chunk.spec.param_slots = places.param_slots;
    chunk.spec.param_memory = places.param_memory;
    chunk.spec.grad_slot = places.grad_slot;
    chunk.spec.num_slots = places.num_slots;
    params_put_locked(chunk);
}

void ChunkPipeline::set_staging(AlignedPool* staging, std::shared_ptr<const void> owner)
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (staging_->used_bytes() > 0) throw std::logic_error("staging memory is in use");
    for (const Chunk& chunk : chunks_) require_staging(*staging, chunk.staging_bytes(chunk.spec));
    staging_ = staging;
    staging_owner_ = std::move(owner);
}

bool ChunkPipeline::is_resident(std::size_t chunk) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return chunks_.at(chunk).resident();
}

const char* ChunkPipeline::resident_state(std::size_t chunk) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return chunks_.at(chunk).spec.resident_state;
}

void ChunkPipeline::set_position(std::size_t chunk, std::int64_t position)
{
    std::lock_guard<std::mutex> lock(mutex_);
    chunks_.at(chunk).spec.position = position;
}

void ChunkPipeline::replace_state(std::size_t index, char* memory, bool has_moments)
{
    StateBlock block;
    bool checked = false;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const Chunk& chunk = chunks_.at(index);
        block = {memory, chunk.spec.whole};
        if (!has_moments) block.layout.num_moments = 0;
        checked = checksum_ && !chunk.resident();
    }
    const StateSums sums = checked ? block.sums(0, block.layout.numel) : StateSums{};
    std::lock_guard<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_[index];
    const std::size_t slot = static_cast<std::size_t>(chunk.slot);
    chunk.zero_moments = !has_moments;
    chunk.has_sums = {};
    chunk.sums[slot] = sums;
    chunk.has_sums[slot] = checked;
    chunk.forms[slot] = {};
    params_put_locked(chunk);  // P16 comes with it
}

void ChunkPipeline::params_edited(std::size_t index)
{
    std::lock_guard<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(index);
    ++chunk.num_edits;
    params_put_locked(chunk);
}

// What updates have left of the chunk's P16 is not it any more, nor what one under way will leave.
void ChunkPipeline::params_put_locked(Chunk& chunk)
{
    ++chunk.num_puts;
    unwant_locked(chunk.written);
    chunk.written.reset();
}

// Forward will not take it.
void ChunkPipeline::unwant_locked(std::optional<Written>& written)
{
    if (!written || written->is_taken) return;
    written->is_taken = true;
    staging_->unwant(written->block);
    if (is_short_of_memory_) work_.notify_one();
}

bool ChunkPipeline::has_high(std::size_t index) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    const Chunk& chunk = chunks_.at(index);
    return chunk.forms[static_cast<std::size_t>(chunk.slot)].has_high;
}

void ChunkPipeline::set_has_high(std::size_t index)
{
    std::lock_guard<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(index);
    chunk.forms[static_cast<std::size_t>(chunk.slot)] = {true, false};
}

void ChunkPipeline::take_over(std::size_t index, const TakenOver& state)
{
    std::lock_guard<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(index);
    const std::size_t slot = static_cast<std::size_t>(chunk.slot);
    chunk.zero_moments = !state.has_moments;
    chunk.forms[slot] = {};
    if (!checksum_) return;
    chunk.has_sums = {};
    chunk.sums[slot] = state.sums;
    chunk.has_sums[slot] = state.has_sums;
    if (chunk.param_on_storage() && state.param_digest != IoEngine::kNoDigest)
        io_->expect_pages(chunk.spec.param_slots[slot], state.param_digest);
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

bool ChunkPipeline::is_published_locked(const Job& job) const
{
    return !job.dropped && job.generation() <= published_;
}

void ChunkPipeline::enqueue(ChunkUpdate update)
{
    std::lock_guard<std::mutex> lock(mutex_);
    require_running_locked();
    Chunk& chunk = chunks_.at(update.chunk);
    const std::int64_t generation = update.generation;
    if ((chunk.job && !chunk.job->dropped && chunk.job->generation() >= generation) ||
        (!chunk.waiting.empty() && chunk.waiting.back()->generation() >= generation)) {
        throw std::logic_error("chunk " + std::to_string(update.chunk) +
                               " already has an update of generation " +
                               std::to_string(generation) + " or later");
    }
    auto job = std::make_shared<Job>();
    job->key = {generation, chunk.spec.position, update.chunk};
    if (chunk.destination) {
        if (generation > published_)
            throw std::logic_error("only a published update may move a chunk");
        job->destination = std::move(chunk.destination);
    }
    job->gradient_place = update.held                  ? GradientPlace::kOpen
                          : update.gradient != nullptr ? GradientPlace::kMemory
                                                       : GradientPlace::kStorage;
    job->update = std::move(update);
    expect_locked(chunk, *job);
    chunk.waiting.push_back(std::move(job));
    ++unadmitted_[generation];
    ++open_[generation];
    offer_locked(chunk);
}

// The chunk's oldest queued job may be admitted if none of the chunk is.
void ChunkPipeline::offer_locked(Chunk& chunk)
{
    if (chunk.job || chunk.waiting.empty()) return;
    const std::shared_ptr<Job>& job = chunk.waiting.front();
    job->makes_param_alone = chunk.makes_param_alone(chunk.after(*job));
    JobQueue& queue = queue_of_locked(*job);
    const auto offered = queue.emplace(job->key, job);
    // A job that is not the first of its queue changes nothing for a worker that found no memory.
    if (offered.second && (offered.first == queue.begin() || !is_short_of_memory_))
        work_.notify_one();
}

void ChunkPipeline::leave_locked(GenerationCounts& counts, std::int64_t generation)
{
    const auto count = counts.find(generation);
    if (--count->second > 0) return;
    counts.erase(count);
    if (&counts == &open_) {
        durable_.notify_all();
        kept_changed_.notify_all();
    }
    if (&counts == &unadmitted_) work_.notify_one();  // a younger generation may be next
}

void ChunkPipeline::release(std::size_t chunk_index, std::vector<UpdateSegment> segments,
                            float multiplier, const char* gradient, ElementType gradient_type,
                            int param_version)
{
    std::lock_guard<std::mutex> lock(mutex_);
    require_running_locked();
    Chunk& chunk = chunks_.at(chunk_index);
    std::shared_ptr<Job> job = chunk.job;
    for (const std::shared_ptr<Job>& queued : chunk.waiting)
        if (queued->update.held) job = queued;
    if (!job || !job->update.held || job->dropped)
        throw std::logic_error("no held update to release");
    job->update.segments = std::move(segments);
    job->update.multiplier = multiplier;
    job->update.gradient = gradient;
    job->update.gradient_type = gradient_type;
    job->update.param_version = param_version;
    job->update.held = false;
    job->gradient = gradient;
    job->gradient_place = gradient != nullptr ? GradientPlace::kMemory : GradientPlace::kStorage;
    if (job->state != JobState::kHeld) return;  // its admission, or the end of its read, goes on
    if (gradient == nullptr) {
        read_gradient_locked(job);
    } else {
        make_ready_locked(job);
    }
}

void ChunkPipeline::read_gradient_from_storage(std::size_t chunk_index, const char* buffer)
{
    std::unique_lock<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(chunk_index);
    for (const std::shared_ptr<Job>& queued : chunk.waiting) {
        if (queued->gradient_place != GradientPlace::kMemory || queued->update.gradient != buffer)
            continue;
        queued->update.gradient = nullptr;
        queued->gradient_place = GradientPlace::kStorage;
        return;
    }
    const std::shared_ptr<Job> job = chunk.job;
    if (!job) return;
    wait_until_not_updating_locked(lock, chunk, job);
    if (job->gradient_place != GradientPlace::kMemory || job->dropped || job->gradient != buffer)
        return;
    job->update.gradient = nullptr;
    job->gradient_place = GradientPlace::kStorage;
    if (job->state != JobState::kReady) return;  // the end of its read goes on
    forget_ready_locked(*job);
    read_gradient_locked(job);
}

void ChunkPipeline::invalidate(std::size_t chunk_index)
{
    std::unique_lock<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(chunk_index);
    while (!chunk.waiting.empty() && chunk.waiting.back()->generation() > published_) {
        const std::shared_ptr<Job> queued = std::move(chunk.waiting.back());
        chunk.waiting.pop_back();
        queue_of_locked(*queued).erase(queued->key);
        if (is_short_of_memory_) work_.notify_one();  // what is first now may find some
        expect_less_locked(*queued, queued->num_elements_left, queued->num_bytes_left);
        ++stats_.num_discarded;
        leave_locked(unadmitted_, queued->generation());
        leave_locked(open_, queued->generation());
    }
    const std::shared_ptr<Job> job = chunk.job;
    if (job && !job->dropped && job->generation() > published_) {
        ++stats_.num_discarded;
        job->dropped = true;
        leave_locked(open_, job->generation());
        switch (job->state) {
            case JobState::kHeld:
            case JobState::kReady:
            case JobState::kParked:
            case JobState::kWritten:
                forget_ready_locked(*job);
                parked_.erase(job->key);
                finish_locked(job);
                break;
            case JobState::kUpdating:  // only this reads the gradient
                wait_until_not_updating_locked(lock, chunk, job);
                break;
            case JobState::kQueued:
            case JobState::kReading:
            case JobState::kWriting:  // its transfer ends it
                break;
        }
    }
    wake_chunk_locked(chunk);
}

void ChunkPipeline::publish(std::int64_t generation)
{
    std::lock_guard<std::mutex> lock(mutex_);
    require_running_locked();
    published_ = generation;
    transfer_pace_.fade();
    update_pace_.fade();
    for (Chunk& chunk : chunks_) {
        unwant_locked(chunk.written);                // by the forward that came before
        const std::shared_ptr<Job> job = chunk.job;  // may still be the job of an older generation
        if (!job || job->dropped || job->generation() != generation) continue;
        if (job->state == JobState::kWritten) {
            finish_locked(job);  // ended before its publication
        } else if (job->state >= JobState::kParked) {
            show_params_locked(chunk, *job);
        }
    }
    if (is_short_of_memory_) work_.notify_one();
    chunk_changed_.notify_all();
    durable_.notify_all();
}

void ChunkPipeline::set_committed(std::int64_t generation)
{
    std::lock_guard<std::mutex> lock(mutex_);
    committed_ = generation;
    work_.notify_one();
}

void ChunkPipeline::wake_chunk_locked(const Chunk& chunk)
{
    if (chunk.num_waiters > 0) chunk_changed_.notify_all();
}

void ChunkPipeline::wait_until_not_updating_locked(std::unique_lock<std::mutex>& lock, Chunk& chunk,
                                                   const std::shared_ptr<Job>& job)
{
    ++chunk.num_waiters;
    chunk_changed_.wait(lock, [&] { return job->state != JobState::kUpdating; });
    --chunk.num_waiters;
}

template <class Predicate>
bool ChunkPipeline::wait_for_chunk_locked(std::unique_lock<std::mutex>& lock, Chunk& chunk,
                                          double timeout_secs, Predicate done)
{
    ++chunk.num_waiters;
    chunk_changed_.wait_for(lock, std::chrono::duration<double>(timeout_secs),
                            [&] { return failed_ || stopping_ || done(); });
    --chunk.num_waiters;
    if (!done()) require_running_locked();
    return done();
}

bool ChunkPipeline::is_published(std::size_t chunk, std::int64_t generation) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return chunks_.at(chunk).published_generation >= generation;
}

bool ChunkPipeline::wait_published(std::size_t chunk_index, std::int64_t generation,
                                   double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(chunk_index);
    return wait_for_chunk_locked(lock, chunk, timeout_secs,
                                 [&] { return chunk.published_generation >= generation; });
}

// The update of a published job has ended.
void ChunkPipeline::show_params_locked(Chunk& chunk, const Job& job)
{
    chunk.updated_generation = job.generation();
    if (!chunk.after(job).param_on_storage()) chunk.published_generation = job.generation();
}

bool ChunkPipeline::is_updated(std::size_t chunk, std::int64_t generation) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return chunks_.at(chunk).updated_generation >= generation;
}

bool ChunkPipeline::wait_updated(std::size_t chunk_index, std::int64_t generation,
                                 double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(chunk_index);
    return wait_for_chunk_locked(lock, chunk, timeout_secs,
                                 [&] { return chunk.updated_generation >= generation; });
}

bool ChunkPipeline::copy_updated(std::size_t chunk_index, std::uint64_t begin,
                                 std::uint64_t num_bytes, char* destination)
{
    std::unique_lock<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(chunk_index);
    const std::shared_ptr<Job> job = chunk.job;
    if (chunk.updated_generation <= chunk.published_generation)
        return copy_written_locked(lock, chunk, begin, num_bytes, destination);
    // What was to be written and was not is neither in staging nor in its place.
    if (!job || job->staging == nullptr || job->param16 == nullptr) {
        require_running_locked();
        throw std::logic_error("an update that was shown has lost its memory");
    }
    if (begin + num_bytes > chunk.param_bytes()) throw std::invalid_argument("P16 is shorter");
    ++job->num_copies;
    lock.unlock();
    std::memcpy(destination, job->param16 + begin, num_bytes);
    lock.lock();
    --job->num_copies;
    if (begin + num_bytes >= chunk.param_bytes()) job->is_taken = true;
    if (job->state != JobState::kWritten) return true;
    release_staging_locked(*job, true);
    if (chunk.published_generation == job->generation()) {
        chunk.written = job->written;
    } else {
        unwant_locked(job->written);
    }
    return true;
}

// See [Note: P16 that was written].
bool ChunkPipeline::copy_written_locked(std::unique_lock<std::mutex>& lock, Chunk& chunk,
                                        std::uint64_t begin, std::uint64_t num_bytes,
                                        char* destination)
{
    if (failed_ || stopping_ || !chunk.written) return false;
    const Written written = *chunk.written;
    if (written.generation != chunk.published_generation || written.num_puts != chunk.num_puts)
        return false;
    if (begin + num_bytes > chunk.param_bytes()) throw std::invalid_argument("P16 is shorter");
    char* const block = staging_->try_take_back(written.block);
    if (block == nullptr) return false;
    lock.unlock();
    std::memcpy(destination, block + begin, num_bytes);
    lock.lock();
    const bool is_it = chunk.written && chunk.written->generation == written.generation &&
                       written.num_puts == chunk.num_puts;
    if (is_it && begin + num_bytes >= chunk.param_bytes()) chunk.written->is_taken = true;
    const bool is_wanted = is_it && !chunk.written->is_taken;
    const AlignedPool::Left again = staging_->leave(block, chunk.param_bytes(), is_wanted);
    if (is_it) chunk.written->block = again;
    if (is_short_of_memory_) work_.notify_one();
    return true;
}

bool ChunkPipeline::wait_durable(std::int64_t generation, double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    const auto done = [&] {
        return published_ >= generation && (open_.empty() || open_.begin()->first > generation);
    };
    durable_.wait_for(lock, std::chrono::duration<double>(timeout_secs),
                      [&] { return failed_ || stopping_ || done(); });
    if (!done()) require_running_locked();
    return done();
}

bool ChunkPipeline::wait_gradient_read(std::size_t chunk_index, std::int64_t generation,
                                       double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(chunk_index);
    return wait_for_chunk_locked(lock, chunk, timeout_secs, [&] {
        if (!chunk.waiting.empty() && chunk.waiting.front()->generation() <= generation)
            return false;
        const std::shared_ptr<Job>& job = chunk.job;
        return !job || job->generation() > generation ||
               job->gradient_place == GradientPlace::kSpent ||
               (job->dropped && job->state != JobState::kUpdating);
    });
}

bool ChunkPipeline::wait_idle(std::size_t chunk_index, double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(chunk_index);
    return wait_for_chunk_locked(lock, chunk, timeout_secs, [&] { return !chunk.job; });
}

bool ChunkPipeline::wait_moved(std::size_t index, double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    Chunk& chunk = chunks_.at(index);
    return wait_for_chunk_locked(lock, chunk, timeout_secs, [&] { return !chunk.is_moving(); });
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

bool ChunkPipeline::state_holds(std::size_t index, char* memory, bool with_moments) const
{
    StateSums written;
    StateBlock block;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const Chunk& chunk = chunks_.at(index);
        const std::size_t slot = static_cast<std::size_t>(chunk.slot);
        if (!checksum_ || chunk.resident() || !chunk.has_sums[slot]) return true;
        written = chunk.sums[slot];
        block = {memory, chunk.spec.whole};
        if (!with_moments) block.layout.num_moments = 0;
    }
    const StateSums found = block.sums(0, block.layout.numel);
    return found.param == written.param && (!with_moments || found == written);
}

std::vector<StateSums> ChunkPipeline::state_sums() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<StateSums> found;
    if (!checksum_) return found;
    found.reserve(chunks_.size());
    for (const Chunk& chunk : chunks_) {
        const std::size_t slot = static_cast<std::size_t>(chunk.slot);
        if (!chunk.resident() && !chunk.has_sums[slot])
            throw std::logic_error("the state of chunk " + std::to_string(found.size()) +
                                   " was never written through the pipeline or replace_state()");
        found.push_back(chunk.resident() ? StateSums{} : chunk.sums[slot]);
    }
    return found;
}

// Where every chunk's published P16 lies, nothing in DRAM.
std::vector<FileRanges> ChunkPipeline::published_params() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<FileRanges> found(chunks_.size());
    for (std::size_t i = 0; i < (checksum_ ? chunks_.size() : 0); ++i) {
        const Chunk& chunk = chunks_[i];
        if (chunk.param_on_storage())
            found[i] = chunk.spec.param_slots[static_cast<std::size_t>(chunk.slot)];
    }
    return found;
}

std::vector<std::uint64_t> ChunkPipeline::param_digests() const
{
    std::vector<std::uint64_t> found;
    for (const FileRanges& ranges : published_params())
        found.push_back(ranges.empty() ? IoEngine::kNoDigest : io_->page_digest(ranges));
    return found;
}

std::vector<std::size_t> ChunkPipeline::half_read_params() const
{
    std::vector<std::size_t> found;
    const std::vector<FileRanges> params = published_params();
    for (std::size_t chunk = 0; chunk < params.size(); ++chunk)
        if (!params[chunk].empty() && io_->is_half_read(params[chunk])) found.push_back(chunk);
    return found;
}

void ChunkPipeline::fail_locked(const std::string& what, int error, int fd, std::uint64_t offset)
{
    if (!failed_) {
        failed_ = true;
        failure_ = {error, fd, offset, what};
    }
    work_.notify_one();
    chunk_changed_.notify_all();
    durable_.notify_all();
    kept_changed_.notify_all();
}

void ChunkPipeline::fail(const std::string& what, int error)
{
    std::lock_guard<std::mutex> lock(mutex_);
    fail_locked(what, error, -1, 0);
}

bool ChunkPipeline::stop(double timeout_secs)
{
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    work_.notify_one();
    chunk_changed_.notify_all();
    durable_.notify_all();
    kept_changed_.notify_all();
    if (!ended_changed_.wait_for(lock, std::chrono::duration<double>(timeout_secs),
                                 [this] { return ended_; }))
        return false;
    if (worker_.joinable()) {
        std::thread worker = std::move(worker_);  // of callers at a time, one joins
        lock.unlock();
        worker.join();
    }
    return true;
}

void ChunkPipeline::stop()
{
    while (!stop(3600.0)) {
    }
}

}  // namespace fuyou
