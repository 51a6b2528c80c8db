// SPDX-License-Identifier: Apache-2.0
//
// The life of an admitted job: read, update, write. Runs on the worker and on the I/O engine's
// threads; see the notes in chunk_pipeline.h.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "pipeline/chunk_job.h"
#include "pipeline/chunk_pipeline.h"

namespace fuyou {
namespace {

// Of chunks, that keep storage busy: each is cut into requests.
constexpr std::size_t kEnoughTransfers = 3;

double now_secs()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// The file ranges of bytes [begin, end) of `ranges`, which are those of `memory`.
void place(std::vector<IoExtent>& extents, const FileRanges& ranges, char* memory,
           std::uint64_t begin, std::uint64_t end)
{
    std::uint64_t at = 0;
    for (const FileRange& range : ranges) {
        const std::uint64_t skipped = begin > at ? std::min(begin - at, range.num_bytes) : 0;
        const std::uint64_t stop = std::min(at + range.num_bytes, end);
        if (stop > at + skipped) {
            extents.push_back(
                {range.fd, range.offset + skipped, memory + at + skipped, stop - at - skipped});
        }
        at += range.num_bytes;
        if (at >= end) return;
    }
    throw std::logic_error("file ranges are shorter than the bytes to move");
}

bool lies_in(const FileRanges& ranges, const IoOutcome& outcome)
{
    return std::any_of(ranges.begin(), ranges.end(), [&](const FileRange& range) {
        return range.fd == outcome.fd && outcome.offset >= range.offset &&
               outcome.offset - range.offset < range.num_bytes;
    });
}

}  // namespace

// The worker, until it is stopped and no transfer needs its memory any more.
void ChunkPipeline::run()
{
    stay_single_threaded();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        try {
            if (!failed_ && !stopping_ && advance(lock)) continue;
        } catch (const std::exception& exception) {
            fail_locked(std::string("the optimizer's worker failed: ") + exception.what(), 0, -1,
                        0);
        }
        if (stopping_ && num_transfers_ == 0) break;
        work_.wait(lock);
    }
    for (Chunk& chunk : chunks_)
        if (chunk.job) release_staging_locked(*chunk.job);
    ended_ = true;
    ended_changed_.notify_all();
}

// Starts every write and read that may start, then runs one update. Whether there was one.
bool ChunkPipeline::advance(std::unique_lock<std::mutex>& lock)
{
    while (!parked_.empty() && may_write_locked(*parked_.begin()->second)) {
        const std::shared_ptr<Job> job = parked_.begin()->second;
        parked_.erase(parked_.begin());
        write_locked(job);
    }
    admit_jobs_locked();
    char* copy = nullptr;
    const std::shared_ptr<Job> job = next_ready_locked(&copy);
    if (!job) return false;
    job->state = JobState::kUpdating;
    const double begin = now_secs();
    lock.unlock();
    std::string error;
    try {
        job->copy = copy;
        update(*job);
    } catch (const std::exception& exception) {
        error = exception.what();
    }
    lock.lock();
    job->state = JobState::kHeld;  // until it is known what comes next, should that throw
    const double end = now_secs();
    const std::uint64_t numel = chunks_[job->update.chunk].spec.numel();
    stats_.update_busy_secs += end - begin;
    stats_.num_updates += 1;
    stats_.num_updated_elements += numel;
    update_pace_.add(end - begin, static_cast<double>(numel));
    expect_less_locked(*job, job->num_elements_left, 0);
    end_update_locked(job, error);
    trace_locked(1, *job, begin, end);  // last: where memory is short it throws
    return true;
}

// A later chunk may go ahead of one whose previous job still runs, or which waits for P16 to be
// taken; a younger generation may not.
void ChunkPipeline::admit_jobs_locked()
{
    is_short_of_memory_ = false;
    bool is_wanted = false;  // what of the memory P16 alone might have
    while (true) {
        const bool is_param =
            !is_wanted && !param_queue_.empty() &&
            (queue_.empty() || param_queue_.begin()->first < queue_.begin()->first);
        const JobQueue& queue = is_param ? param_queue_ : queue_;
        if (queue.empty()) return;
        const std::shared_ptr<Job> job = queue.begin()->second;
        if (job->generation() > unadmitted_.begin()->first) return;
        if (admit_locked(job)) continue;
        is_short_of_memory_ = true;
        if (!is_param) return;
        is_wanted = true;
    }
}

// Takes staging memory and starts the read. False when there is no memory now.
bool ChunkPipeline::admit_locked(const std::shared_ptr<Job>& job)
{
    Chunk& chunk = chunks_[job->update.chunk];
    const ChunkSpec& to = chunk.after(*job);
    const std::uint64_t num_bytes = chunk.staging_bytes(to);
    if (num_bytes > 0) {
        job->staging = try_allocate_locked(*job, num_bytes);
        if (job->staging == nullptr) return false;
    }
    place_blocks_locked(chunk, *job);
    job->param16 = to.param_on_storage() ? job->staging + chunk.param_offset(to) : nullptr;
    job->grad_staging =
        chunk.spec.grad_slot.empty() ? nullptr : job->staging + chunk.grad_offset(to);
    job->gradient = job->update.gradient;
    job->target_slot = target_slot_locked(chunk, *job);
    queue_of_locked(*job).erase(job->key);
    chunk.waiting.erase(chunk.waiting.begin());
    chunk.job = job;
    leave_locked(unadmitted_, job->generation());

    job->num_edits = chunk.num_edits;
    job->num_puts = chunk.num_puts;
    choose_halves_locked(chunk, *job);
    std::vector<IoExtent> extents;
    place_state_locked(chunk, *job, extents);
    if (job->gradient_place == GradientPlace::kStorage) {
        job->gradient = job->grad_staging;
        place(extents, chunk.spec.grad_slot, job->grad_staging, 0, chunk.grad_bytes());
        job->gradient_place = GradientPlace::kStaging;
    }
    if (extents.empty()) {
        if (job->gradient_place == GradientPlace::kOpen) {
            job->state = JobState::kHeld;
        } else {
            make_ready_locked(job);
        }
        return true;
    }
    submit_locked(IoKind::kRead, std::move(extents), job);
    return true;
}

// See [Note: P16 that was written].
char* ChunkPipeline::try_allocate_locked(Job& job, std::uint64_t num_bytes)
{
    if (!job.makes_param_alone) return staging_->try_allocate(num_bytes);
    char* found = staging_->try_allocate_beside_wanted(num_bytes);
    // As many as are read, updated and written at once may do without.
    const std::uint64_t most =
        std::max(staging_->capacity_bytes() / 4, (kEnoughTransfers + 1) * num_bytes);
    if (found == nullptr && param_bytes_ + num_bytes <= most)  // where forward comes to last
        found = staging_->try_allocate_last(num_bytes);
    if (found != nullptr) param_bytes_ += job.param_bytes = num_bytes;
    return found;
}

ChunkPipeline::JobQueue& ChunkPipeline::queue_of_locked(const Job& job)
{
    return job.makes_param_alone ? param_queue_ : queue_;
}

void ChunkPipeline::submit_locked(IoKind kind, std::vector<IoExtent> extents,
                                  const std::shared_ptr<Job>& job)
{
    job->num_in_flight = 0;
    for (const IoExtent& extent : extents) job->num_in_flight += extent.num_bytes;
    job->begin_secs = now_secs();
    const bool is_read = kind == IoKind::kRead;
    io_->submit(kind, std::move(extents), io_priority(*job),
                [this, job, is_read](const IoOutcome& outcome) {
                    is_read ? on_read(job, outcome) : on_write(job, outcome);
                });
    // Only now: nothing waits for the end of what did not begin.
    job->state = is_read ? JobState::kReading : JobState::kWriting;
    if (num_transfers_++ == 0) transfers_begin_secs_ = job->begin_secs;
}

// The job's transfer has ended.
void ChunkPipeline::transferred_locked(int lane, Job& job)
{
    const double now = now_secs();
    transfer_pace_.add(now - transfers_begin_secs_, static_cast<double>(job.num_in_flight));
    transfers_begin_secs_ = now;
    --num_transfers_;
    expect_less_locked(job, 0, job.num_in_flight);
    trace_locked(lane, job, job.begin_secs, now);
}

// What a queued job will have to do: roughly, for the halves of a block that are not read, and
// whether its gradient is on storage, are decided later.
void ChunkPipeline::expect_locked(const Chunk& chunk, Job& job)
{
    const ChunkSpec& to = chunk.after(job);
    job.num_elements_left = chunk.spec.numel();
    job.num_bytes_left = (chunk.resident() ? 0 : chunk.spec.stored.num_bytes) +
                         (to.resident() ? 0 : to.stored.num_bytes) +
                         (to.param_on_storage() ? chunk.param_bytes() : 0) +
                         (chunk.spec.grad_slot.empty() ? 0 : chunk.grad_bytes());
    stats_.num_elements_left += job.num_elements_left;
    stats_.num_bytes_left += job.num_bytes_left;
}

// So much of it is done, or will not be.
void ChunkPipeline::expect_less_locked(Job& job, std::uint64_t elements, std::uint64_t bytes)
{
    elements = std::min(elements, job.num_elements_left);
    bytes = std::min(bytes, job.num_bytes_left);
    job.num_elements_left -= elements;
    job.num_bytes_left -= bytes;
    stats_.num_elements_left -= elements;
    stats_.num_bytes_left -= bytes;
}

// See [Note: order of updates]. False as long as no rate is known.
bool ChunkPipeline::storage_ends_last_locked() const
{
    if (!transfer_pace_.is_known() || !update_pace_.is_known()) return false;
    return transfer_pace_.secs_of(static_cast<double>(stats_.num_bytes_left)) >=
           update_pace_.secs_of(static_cast<double>(stats_.num_elements_left));
}

// Where the job finds the state, and where it leaves it.
void ChunkPipeline::place_blocks_locked(const Chunk& chunk, Job& job) const
{
    const ChunkSpec &is = chunk.spec, &to = chunk.after(job);
    const bool passes = is.changes_form();
    job.from = {job.staging, is.stored};
    if (chunk.resident()) {
        job.from = {is.resident_state, is.in_memory};
    } else if (to.resident() && !passes) {
        job.from = {to.resident_state, is.stored};
    }
    job.to = job.from;
    if (to.resident()) {
        job.to = {job.destination || !is.spare_state ? to.resident_state : is.spare_state,
                  is.in_memory};
    } else if (chunk.resident() && passes) {
        job.to = {job.staging, is.stored};
    }
}

// Which halves of a split block's P32 are read, see [Note: halves that are not read].
void ChunkPipeline::choose_halves_locked(const Chunk& chunk, Job& job) const
{
    if (chunk.resident() || !chunk.spec.stored.is_split) return;
    const BlockForm form = chunk.forms[static_cast<std::size_t>(chunk.slot)];
    const bool is_known = (form.has_high || form.is_joinable) && !job.distrusts;
    if (chunk.param_on_storage()) {
        job.reads_high = form.has_high || !is_known;
        job.reads_param = !form.has_high || !is_known;
    } else {
        const bool is_edited = chunk.num_edits != chunk.num_edits_taken;
        job.reads_high = !is_known || !form.is_joinable || is_edited || !checksum_;
    }
}

void ChunkPipeline::place_state_locked(const Chunk& chunk, const Job& job,
                                       std::vector<IoExtent>& extents) const
{
    if (chunk.resident()) return;
    const BlockLayout& layout = chunk.spec.stored;
    const std::size_t slot = static_cast<std::size_t>(chunk.slot);
    const std::uint64_t begin = layout.is_split && !job.reads_high ? layout.joints : 0;
    place(extents, chunk.spec.state_slots[slot], job.from.memory, begin,
          chunk.zero_moments ? layout.master_end() : layout.num_bytes);
    if (job.reads_param)
        place(extents, chunk.spec.param_slots[slot], job.param16, 0, chunk.param_bytes());
}

// Reads the gradient of a job that was admitted before its gradient was on storage.
void ChunkPipeline::read_gradient_locked(const std::shared_ptr<Job>& job)
{
    const Chunk& chunk = chunks_[job->update.chunk];
    std::vector<IoExtent> extents;
    place(extents, chunk.spec.grad_slot, job->grad_staging, 0, chunk.grad_bytes());
    job->gradient = job->grad_staging;
    submit_locked(IoKind::kRead, std::move(extents), job);
    job->gradient_place = GradientPlace::kStaging;
}

void ChunkPipeline::on_read(const std::shared_ptr<Job>& job, const IoOutcome& outcome)
{
    std::lock_guard<std::mutex> lock(mutex_);
    transferred_locked(0, *job);
    job->state = JobState::kHeld;  // until it is known what comes next
    // Nobody wants what a dropped job read. Its gradient may have been written anew meanwhile, so
    // that the bytes are of one sum and the checksums of another: no fault of the disk.
    if (job->dropped) {
        finish_locked(job);
    } else if (outcome.error != 0) {
        const Chunk& chunk = chunks_[job->update.chunk];
        const auto& params = chunk.spec.param_slots[static_cast<std::size_t>(chunk.slot)];
        const char* part = lies_in(chunk.spec.grad_slot, outcome) ? "gradient"
                           : lies_in(params, outcome)             ? "P16"
                                                                  : "state";
        fail_locked(
            std::string("reading the ") + part + " of chunk " + std::to_string(job->update.chunk),
            outcome.error, outcome.fd, outcome.offset);
    } else if (job->gradient_place == GradientPlace::kStorage && !stopping_) {
        try {
            read_gradient_locked(job);
        } catch (const std::exception& exception) {  // this is the I/O engine's thread
            fail_locked(exception.what(), 0, -1, 0);
        }
    } else if (job->gradient_place != GradientPlace::kOpen) {
        make_ready_locked(job);
    }
    if (stopping_) work_.notify_one();
}

void ChunkPipeline::make_ready_locked(const std::shared_ptr<Job>& job)
{
    job->state = JobState::kReady;
    put_ready_locked(job);
}

void ChunkPipeline::put_ready_locked(const std::shared_ptr<Job>& job)
{
    ready_.emplace(job->key, job);
    if (job->staging != nullptr) loaded_.emplace(job->key, job);
    work_.notify_one();
}

void ChunkPipeline::take_ready_locked(const Job& job)
{
    ready_.erase(job.key);
    loaded_.erase(job.key);
}

// See [Note: order of updates]. There is a ready one.
const std::shared_ptr<ChunkPipeline::Job>& ChunkPipeline::next_in_turn_locked() const
{
    const auto& [key, first] = *ready_.begin();
    if (loaded_.empty() || num_transfers_ >= kEnoughTransfers) return first;
    const auto& [loaded_key, loaded] = *loaded_.begin();
    const bool is_as_old = std::get<0>(loaded_key) == std::get<0>(key);
    return is_as_old && may_write_locked(*loaded) && storage_ends_last_locked() ? loaded : first;
}

void ChunkPipeline::update(Job& job)
{
    const Chunk& chunk = chunks_[job.update.chunk];
    BlockUpdate how;
    how.from = job.from;
    how.to = job.to;
    how.zero_moments = !chunk.resident() && chunk.zero_moments;
    how.high_was_read = job.reads_high || chunk.resident();
    how.kept = {job.copy, chunk.spec.whole};
    how.gradient = job.gradient;
    how.gradient_type = job.update.gradient_type;
    how.multiplier = job.update.multiplier;
    const ChunkSpec& to = chunk.after(job);
    how.param16 = job.param16 != nullptr
                      ? job.param16
                      : to.param_memory[static_cast<std::size_t>(job.update.param_version)];
    how.param_type = chunk.spec.param_type;
    if (job.reads_param) how.old_param16 = job.param16;
    if (!chunk.param_on_storage() && !job.reads_high) {
        const bool has_two = chunk.spec.param_memory[1] != nullptr;
        how.old_param16 =
            chunk.spec
                .param_memory[static_cast<std::size_t>(has_two ? 1 - job.update.param_version : 0)];
    }
    const bool is_in_place = !to.changes_form() && (chunk.resident() || to.resident());
    how.keeps_high = !to.param_on_storage() || is_in_place;
    how.narrows_gradient = !chunk.spec.stored.has_low;
    how.checked = checksum_ && !(chunk.resident() && to.resident());
    job.sums = update_block(how, job.update.segments, &team_);
    if (job.param16 != nullptr) {  // what fills the last page is somebody's old memory
        const std::uint64_t used = chunk.spec.numel() * element_bytes(chunk.spec.param_type);
        std::memset(job.param16 + used, 0, chunk.param_bytes() - used);
    }
}

void ChunkPipeline::end_update_locked(const std::shared_ptr<Job>& job, const std::string& error)
{
    Chunk& chunk = chunks_[job->update.chunk];
    if (!error.empty() || !read_holds_locked(*job)) {
        forget_copy_locked(*job, !error.empty());
        if (error.empty() && reads_again_locked(job)) return;
    }
    copied_locked(*job);
    job->state = JobState::kParked;
    job->gradient_place = GradientPlace::kSpent;
    if (!error.empty()) {
        fail_locked(
            "the update of chunk " + std::to_string(job->update.chunk) + " failed: " + error, 0, -1,
            0);
    } else if (job->dropped) {  // before admission: the chunk's next job may wait for this end
        finish_locked(job);
    } else if (!read_holds_locked(*job)) {
        const FileRange& range =
            chunk.spec.state_slots[static_cast<std::size_t>(chunk.slot)].front();
        fail_locked("verifying the state of chunk " + std::to_string(job->update.chunk), EBADMSG,
                    range.fd, range.offset);
    } else {
        note_sums_locked(*job);
        if (is_published_locked(*job)) show_params_locked(chunk, *job);
        if (may_write_locked(*job)) {
            write_locked(job);
        } else {
            parked_.emplace(job->key, job);
        }
    }
    wake_chunk_locked(chunk);
}

// Whether the job has to read the state once more, all of it, and does: it had only a part, and
// that is not what was written.
bool ChunkPipeline::reads_again_locked(const std::shared_ptr<Job>& job)
{
    const Chunk& chunk = chunks_[job->update.chunk];
    if (chunk.resident() || !chunk.spec.stored.is_split || job->distrusts || job->dropped ||
        failed_ || stopping_)
        return false;
    job->distrusts = true;
    choose_halves_locked(chunk, *job);
    std::vector<IoExtent> extents;
    place_state_locked(chunk, *job, extents);
    submit_locked(IoKind::kRead, std::move(extents), job);
    wake_chunk_locked(chunk);
    return true;
}

// Whether what was read is what this run wrote last.
bool ChunkPipeline::read_holds_locked(const Job& job) const
{
    const Chunk& chunk = chunks_[job.update.chunk];
    const std::size_t source = static_cast<std::size_t>(chunk.slot);
    if (!job.sums.is_readable) return false;
    const bool is_known = checksum_ && !chunk.resident() && chunk.has_sums[source];
    return !is_known || chunk.sums[source] == job.sums.read;
}

// Remembers what will be written.
void ChunkPipeline::note_sums_locked(const Job& job)
{
    Chunk& chunk = chunks_[job.update.chunk];
    if (checksum_ && !chunk.after(job).resident()) {
        const std::size_t target = static_cast<std::size_t>(job.target_slot);
        chunk.sums[target] = job.sums.updated;
        chunk.has_sums[target] = true;
    }
}

// Until then the slot to be overwritten holds the last committed state, or the chunk is to be where
// that commit is told it is.
bool ChunkPipeline::may_write_locked(const Job& job) const
{
    const Chunk& chunk = chunks_[job.update.chunk];
    if (chunk.spec.num_slots < 2 && chunk.after(job).num_slots < 2) return true;
    return job.generation() <= committed_ + 1;
}

void ChunkPipeline::write_locked(const std::shared_ptr<Job>& job)
{
    const Chunk& chunk = chunks_[job->update.chunk];
    std::vector<IoExtent> extents;
    const ChunkSpec& to = chunk.after(*job);
    const std::size_t target = static_cast<std::size_t>(job->target_slot);
    if (!to.resident()) {
        const BlockLayout& layout = job->to.layout;
        const bool leaves_high = layout.is_split && !job->sums.form.has_high;
        const std::uint64_t begin = leaves_high ? layout.joints : 0;
        place(extents, to.state_slots[target], job->to.memory, begin, layout.num_bytes);
        stats_.state_bytes_written += layout.num_bytes - begin;
    }
    if (to.param_on_storage())
        place(extents, to.param_slots[target], job->param16, 0, chunk.param_bytes());
    if (!extents.empty()) {
        submit_locked(IoKind::kWrite, std::move(extents), job);
        return;
    }
    release_staging_locked(*job);  // it held the gradient only
    job->state = JobState::kWritten;
    if (is_published_locked(*job)) finish_locked(job);
}

void ChunkPipeline::on_write(const std::shared_ptr<Job>& job, const IoOutcome& outcome)
{
    std::lock_guard<std::mutex> lock(mutex_);
    transferred_locked(2, *job);
    release_staging_locked(*job, outcome.error == 0 && !job->dropped);
    job->state = JobState::kWritten;
    job->stays = outcome.error != 0 && stays_locked(*job);
    if (outcome.error != 0 && !job->stays) {
        fail_locked("writing the state of chunk " + std::to_string(job->update.chunk),
                    outcome.error, outcome.fd, outcome.offset);
    } else if (job->dropped || is_published_locked(*job)) {
        finish_locked(job);
    }  // else: publish() or invalidate() will end it
    if (stopping_) work_.notify_one();
}

// The end of a job: a published one moves the chunk on, a dropped one leaves it as it was.
void ChunkPipeline::finish_locked(const std::shared_ptr<Job>& job)
{
    Chunk& chunk = chunks_[job->update.chunk];
    release_staging_locked(*job);
    expect_less_locked(*job, job->num_elements_left, job->num_bytes_left);
    if (!job->dropped) {
        chunk.written = job->written;
        if (!chunk.after(*job).resident())
            chunk.forms[static_cast<std::size_t>(job->target_slot)] = job->sums.form;
        chunk.num_edits_taken = std::max(chunk.num_edits_taken, job->num_edits);
        if (job->to.memory == chunk.spec.spare_state && chunk.spec.spare_state != nullptr)
            std::swap(chunk.spec.resident_state, chunk.spec.spare_state);
        if (job->destination && !job->stays) arrive_locked(chunk, *job);
        const bool is_in_slots = !chunk.resident() || chunk.param_on_storage();
        if (is_in_slots && job->target_slot != chunk.slot) chunk.publish_in(job->target_slot);
        chunk.zero_moments = false;
        chunk.updated_generation = chunk.published_generation = job->generation();
        leave_locked(open_, job->generation());
    } else {
        unwant_locked(job->written);
    }
    chunk.job.reset();
    offer_locked(chunk);
    wake_chunk_locked(chunk);
}

// The chunk's places are those of the job's destination from now on.
void ChunkPipeline::arrive_locked(Chunk& chunk, const Job& job)
{
    const ChunkSpec& to = *job.destination;
    chunk.spec.state_slots = to.state_slots;
    chunk.spec.param_slots = to.param_slots;
    chunk.spec.grad_slot = to.grad_slot;
    chunk.spec.num_slots = to.num_slots;
    chunk.spec.resident_state = to.resident_state;
    chunk.spec.spare_state = to.spare_state;
    chunk.spec.param_memory = to.param_memory;
}

// A state that was to leave memory could not be written. It is there as it was, and stays if
// nothing but it was written.
bool ChunkPipeline::stays_locked(const Job& job) const
{
    const Chunk& chunk = chunks_[job.update.chunk];
    const ChunkSpec& to = chunk.after(job);
    return chunk.resident() && !to.resident() && !chunk.param_on_storage() &&
           !to.param_on_storage();
}

// What was written stays there, if it `leaves` P16 alone, until somebody is given the memory.
void ChunkPipeline::release_staging_locked(Job& job, bool leaves)
{
    if (job.staging == nullptr || job.num_copies > 0) return;  // the last copy releases it
    Chunk& chunk = chunks_[job.update.chunk];
    if (leaves && job.makes_param_alone) {
        const bool is_past = job.generation() < published_;  // the forward that would take it
        const bool is_wanted = !job.is_taken && !is_past && job.num_puts == chunk.num_puts;
        const auto block = staging_->leave(job.staging, chunk.param_bytes(), is_wanted);
        job.written = Written{block, job.generation(), job.num_puts, !is_wanted};
    } else {
        staging_->release(job.staging);
    }
    job.staging = nullptr;
    param_bytes_ -= std::exchange(job.param_bytes, 0);
    if (is_short_of_memory_) work_.notify_one();
}

std::int64_t ChunkPipeline::io_priority(const Job& job) const
{
    return (job.generation() << 24) + chunks_[job.update.chunk].spec.position;
}

void ChunkPipeline::trace_locked(int lane, const Job& job, double begin, double end)
{
    if (tracing_) events_.push_back({lane, job.update.chunk, job.generation(), begin, end});
}

}  // namespace fuyou
