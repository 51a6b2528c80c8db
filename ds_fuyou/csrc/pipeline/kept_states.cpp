// SPDX-License-Identifier: Apache-2.0
//
// States of one generation that a copier takes away while training goes on.
//
// [Note: kept states]
// keep_states() says that every chunk's state as of the last published generation, g, is needed
// until it was copied. It is fixed by then which slot holds it, though its update may be in flight.
//   * With two slots the updates of g + 1 write into the other one and need not wait. Those of
//     g + 2 would write over it.
//   * With one slot, and in host memory, those of g + 1 would.
//   * With three none does: those of g + 2 go into the third, which stands in for that of g from
//     then on. No update waits, none hands its state over, and the copier takes its time.
// An update of a generation after g that would overwrite a kept state waits, ready, until the state
// was copied: it is *wanted*, and copied before all others. An update that has the kept state in
// its memory anyway puts it into a buffer that the copier lent, so that nobody has to read it
// again, and resident states need not be waited for. One that read the state from storage waits for
// a buffer if all are on their way: what the copier would read later costs more than what it
// writes. Not so where it writes slowly, to another machine say: then no step waits but the one
// that must. Owners: a kept state in its place is nobody's to write until it is claimed by
// take_kept() and released by release_kept(). A lent buffer is the pipeline's from lend_buffer()
// until take_kept() gives it back full, or drop_kept() has returned. No chunk moves meanwhile:
// where a kept state lies stays so. Nobody waits in a circle: the copier waits for updates up to g,
// which never wait for it, and for buffers being filled, which is copying. Updates after g wait for
// the copier, which gives every buffer back when it has written it, or ends. It calls nothing of
// the training thread, which may wait for those updates, or for the copier.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "pipeline/chunk_job.h"
#include "pipeline/chunk_pipeline.h"

namespace fuyou {

namespace {

// Of a buffer's way to the checkpoint and back, where four of them go in turn.
constexpr double kLeastSecs = 0.25;
constexpr double kLeastRate = 60e6;  // bytes per second

using Clock = std::chrono::steady_clock;

}  // namespace

void ChunkPipeline::keep_states(std::vector<std::size_t> order)
{
    std::lock_guard<std::mutex> lock(mutex_);
    require_running_locked();
    if (!kept_order_.empty()) throw std::logic_error("states are kept already");
    for (const std::size_t index : order)
        if (chunks_.at(index).is_moving())
            throw std::logic_error("no state is kept while it moves");
    kept_generation_ = published_;
    copier_is_slow_ = false;
    kept_order_ = std::move(order);
    next_kept_ = 0;
    for (const std::size_t index : kept_order_) {
        Chunk& chunk = chunks_[index];
        const auto moves = [this](const std::shared_ptr<Job>& job) {
            return job && !job->dropped && job->generation() <= kept_generation_;
        };
        auto num_moves = std::count_if(chunk.waiting.begin(), chunk.waiting.end(), moves);
        if (moves(chunk.job)) ++num_moves;
        const bool flips = chunk.spec.num_slots >= 2 && num_moves % 2 == 1;
        chunk.kept_slot = flips ? chunk.next_slot : chunk.slot;
        chunk.keep = Keep::kKept;
    }
}

void ChunkPipeline::lend_buffer(char* buffer)
{
    std::lock_guard<std::mutex> lock(mutex_);
    lent_.push_back(buffer);
    const auto away = lent_away_.find(buffer);
    if (away != lent_away_.end()) {
        const double patience =
            kLeastSecs + static_cast<double>(away->second.num_bytes) / kLeastRate;
        const std::chrono::duration<double> away_for = Clock::now() - away->second.since;
        if (away_for.count() > patience) copier_is_slow_ = true;
        lent_away_.erase(away);
    }
    if (short_of_buffer_.empty()) return;
    for (const auto& [key, job] : std::exchange(short_of_buffer_, {})) {
        job->waits_for_copy = false;
        put_ready_locked(job);
    }
}

// The first job that may run, and where it is to copy the state that it replaces. The others wait.
std::shared_ptr<ChunkPipeline::Job> ChunkPipeline::next_ready_locked(char** copy)
{
    while (!ready_.empty()) {
        const std::shared_ptr<Job> job = next_in_turn_locked();
        take_ready_locked(*job);
        if (may_update_locked(job, copy)) return job;
        job->waits_for_copy = true;
        if (awaits_buffer_locked(*job)) {
            short_of_buffer_.emplace(job->key, job);
        } else if (chunks_[job->update.chunk].keep == Keep::kKept) {
            wanted_.emplace(job->key, job->update.chunk);
            kept_changed_.notify_all();
        }
    }
    return nullptr;
}

// Where an update leaves its chunk.
int ChunkPipeline::target_slot_locked(Chunk& chunk, const Job& job) const
{
    const int num_slots = chunk.after(job).num_slots;
    if (num_slots < 2) return 0;
    if (num_slots == 3 && chunk.keep != Keep::kNot && job.generation() > kept_generation_ &&
        chunk.next_slot == chunk.kept_slot)
        std::swap(chunk.next_slot, chunk.spare_slot);
    return chunk.next_slot;
}

bool ChunkPipeline::may_update_locked(const std::shared_ptr<Job>& job, char** copy)
{
    Chunk& chunk = chunks_[job->update.chunk];
    if (chunk.keep == Keep::kNot || job->generation() <= kept_generation_) return true;
    const bool has_kept =
        chunk.resident() || (chunk.spec.num_slots < 3 && chunk.slot == chunk.kept_slot);
    if (has_kept && chunk.keep == Keep::kKept && !lent_.empty()) {
        *copy = lent_.back();
        lent_.pop_back();
        lent_away_[*copy] = {Clock::now(), chunk.spec.whole.num_bytes};
        ++num_capturing_;
        claim_locked(chunk);
        chunk.keep = Keep::kNot;
        return true;
    }
    if (awaits_buffer_locked(*job)) return false;
    return !chunk.resident() && job->target_slot != chunk.kept_slot;
}

// It has a kept state from storage in its memory, and a buffer comes back in which to leave it.
bool ChunkPipeline::awaits_buffer_locked(const Job& job) const
{
    const Chunk& chunk = chunks_[job.update.chunk];
    return chunk.keep == Keep::kKept && !chunk.resident() && chunk.spec.num_slots < 3 &&
           chunk.slot == chunk.kept_slot && !copier_is_slow_ && !lent_away_.empty();
}

void ChunkPipeline::copied_locked(Job& job)
{
    if (job.copy == nullptr) return;
    char* const copy = std::exchange(job.copy, nullptr);
    --num_capturing_;
    captured_.push_back({job.update.chunk, chunks_[job.update.chunk].kept_slot, copy, false});
    kept_changed_.notify_all();
}

// What the update read was not the state, or it failed. The state stands in its place still, unless
// the update has begun to write over it there.
void ChunkPipeline::forget_copy_locked(Job& job, bool has_thrown)
{
    if (job.copy == nullptr) return;
    char* const copy = std::exchange(job.copy, nullptr);
    --num_capturing_;
    kept_changed_.notify_all();
    if (kept_order_.empty()) return;  // by drop_kept(), which waits for it
    Chunk& chunk = chunks_[job.update.chunk];
    if (has_thrown && chunk.resident() && job.from.memory == job.to.memory) {
        has_lost_kept_ = true;
    } else {
        chunk.keep = Keep::kKept;
        next_kept_ = 0;
    }
    lent_away_.erase(copy);
    lent_.push_back(copy);
}

// Updates do not change what is known of the kept slot while they wait for it, but later.
void ChunkPipeline::claim_locked(Chunk& chunk)
{
    const std::size_t slot = static_cast<std::size_t>(chunk.kept_slot);
    chunk.keep = Keep::kClaimed;
    chunk.kept_sums = chunk.sums[slot];
    chunk.has_kept_sums = checksum_ && !chunk.resident() && chunk.has_sums[slot];
}

bool ChunkPipeline::is_kept_in_place_locked() const
{
    return open_.empty() || open_.begin()->first > kept_generation_;
}

// Moves on to the next chunk that nobody has copied.
bool ChunkPipeline::next_kept_locked()
{
    while (next_kept_ < kept_order_.size() && chunks_[kept_order_[next_kept_]].keep != Keep::kKept)
        ++next_kept_;
    return next_kept_ < kept_order_.size();
}

bool ChunkPipeline::take_kept(double timeout_secs, bool may_read, KeptState* taken)
{
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = [&] {
        return !captured_.empty() || !wanted_.empty() ||
               (may_read && is_kept_in_place_locked() && next_kept_locked());
    };
    kept_changed_.wait_for(lock, std::chrono::duration<double>(timeout_secs), [&] {
        return found() || stopping_ || has_lost_kept_ || (failed_ && !is_kept_in_place_locked());
    });
    if (has_lost_kept_) require_running_locked();  // the update's failure was the pipeline's
    if (!found()) {
        if (stopping_ || !is_kept_in_place_locked()) require_running_locked();
        return false;
    }
    if (!captured_.empty()) {
        *taken = captured_.front();
        captured_.pop_front();
        return true;
    }
    const bool is_wanted = !wanted_.empty();
    const std::size_t index = is_wanted ? wanted_.begin()->second : kept_order_[next_kept_];
    if (is_wanted) wanted_.erase(wanted_.begin());
    claim_locked(chunks_[index]);
    reconsider_locked(chunks_[index]);  // one that is short of a buffer needs none any more
    *taken = {index, chunks_[index].kept_slot, nullptr, is_wanted};
    return true;
}

bool ChunkPipeline::kept_holds(std::size_t index, char* memory) const
{
    StateSums kept;
    StateBlock block;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const Chunk& chunk = chunks_.at(index);
        if (!chunk.has_kept_sums) return true;
        kept = chunk.kept_sums;
        block = {memory, chunk.spec.whole};
    }
    return block.sums(0, block.layout.numel) == kept;
}

void ChunkPipeline::release_kept(std::size_t index)
{
    std::lock_guard<std::mutex> lock(mutex_);
    let_update_locked(chunks_.at(index));
}

void ChunkPipeline::let_update_locked(Chunk& chunk)
{
    chunk.keep = Keep::kNot;
    reconsider_locked(chunk);
}

// What the chunk's update waits for has changed.
void ChunkPipeline::reconsider_locked(Chunk& chunk)
{
    const std::shared_ptr<Job>& job = chunk.job;
    if (!job || !job->waits_for_copy) return;
    forget_ready_locked(*job);
    put_ready_locked(job);
}

// A ready job that does not go on to its update now.
void ChunkPipeline::forget_ready_locked(Job& job)
{
    take_ready_locked(job);
    wanted_.erase(job.key);
    short_of_buffer_.erase(job.key);
    job.waits_for_copy = false;
}

void ChunkPipeline::drop_kept()
{
    std::unique_lock<std::mutex> lock(mutex_);
    for (const std::size_t index : kept_order_) let_update_locked(chunks_[index]);
    kept_order_.clear();
    lent_.clear();
    lent_away_.clear();
    kept_changed_.wait(lock, [this] { return num_capturing_ == 0; });
    captured_.clear();
}

}  // namespace fuyou
