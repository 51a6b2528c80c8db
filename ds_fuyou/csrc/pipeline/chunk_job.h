// SPDX-License-Identifier: Apache-2.0
//
// What the pipeline keeps of a chunk and of one update of it. Private to pipeline/.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "pipeline/chunk_pipeline.h"

namespace fuyou {

// Where an update stands, and which memory it holds. "Staging" is a block of the pool with room for
// what of the chunk lives on storage: [state | P16 | G16]. A whole state that comes to memory, or
// leaves it, is in its own block instead.
enum class ChunkPipeline::JobState {
    kQueued,   // none; it may name a gradient of the caller's
    kReading,  // staging, which a transfer fills
    kHeld,     // staging with the state: release() will say what becomes of it, or its update ended
    kReady,    // staging and a gradient that is final: the worker may take it
    kUpdating,  // the same, in use by the worker, which does not hold the mutex
    kParked,    // staging with new values, whose write has not begun
    kWriting,   // staging, which a transfer writes to the target slot
    kWritten,   // none; the target slot holds the new values until they are published or dropped
};

// Who has the gradient of an update.
enum class ChunkPipeline::GradientPlace {
    kOpen,     // nobody yet: release() will say
    kMemory,   // the caller, who must keep it until the update has read it
    kStorage,  // the chunk's grad_slot; it has yet to be read
    kStaging,  // a transfer reads, or has read, it into staging
    kSpent,    // the update has read it
};

// Staging memory of an update that was written, P16 alone. Anybody may have taken it since.
struct ChunkPipeline::Written {
    AlignedPool::Left block;
    std::int64_t generation = 0;
    std::uint64_t num_puts = 0;  // the chunk's, when the update was admitted
    bool is_taken = false;       // it was copied to the end, or no forward will
};

// What a copier still has to do with a chunk's kept state.
enum class ChunkPipeline::Keep {
    kNot,      // nothing: none is kept, or a buffer of the copier has it
    kKept,     // it lies in its place, and nobody copies it
    kClaimed,  // the copier reads it there
};

struct ChunkPipeline::Job {
    // Smaller is sooner.
    using Key = std::tuple<std::int64_t, std::int64_t, std::size_t>;

    ChunkUpdate update;
    Key key;
    JobState state = JobState::kQueued;
    GradientPlace gradient_place = GradientPlace::kOpen;
    bool waits_for_copy = false;     // ready, but it would overwrite a kept state
    bool dropped = false;            // by invalidate(): it ends as soon as nothing uses its memory
    bool stays = false;              // it was to move, and could not
    int num_copies = 0;              // of its new P16, under way: they keep the staging memory
    bool is_taken = false;           // its new P16 was copied to the end
    bool makes_param_alone = false;  // in staging; known once it is in a queue
    std::optional<Written> written;  // that memory, released: nothing but P16 was made there
    int target_slot = 0;
    std::shared_ptr<const ChunkSpec> destination;  // where the chunk is after it; null: as before
    char* staging = nullptr;
    std::uint64_t param_bytes = 0;  // of it, where nothing but P16 is made
    char* grad_staging = nullptr;   // a part of it; null: no room, G16 is in memory
    StateBlock from;                // the state that is updated, in staging or its own memory
    StateBlock to;                  // where it goes; in place but for one that changes its form
    char* param16 = nullptr;        // where the new P16 goes; null: the chunk's param_memory
    const char* gradient = nullptr;
    char* copy = nullptr;         // lent by the copier: receives the state as it was
    bool reads_high = false;      // split: the upper halves of P32
    bool reads_param = false;     // split: P16, from storage
    bool distrusts = false;       // P16 in memory, and what is known of the block, were wrong
    std::uint64_t num_edits = 0;  // the chunk's, when it was admitted
    std::uint64_t num_puts = 0;   // the same
    double begin_secs = 0.0;
    std::uint64_t num_in_flight = 0;      // bytes of its transfer
    std::uint64_t num_elements_left = 0;  // to be updated
    std::uint64_t num_bytes_left = 0;     // to be read and written
    BlockSums sums;

    std::int64_t generation() const { return update.generation; }
};

struct ChunkPipeline::Chunk {
    ChunkSpec spec;
    int slot = 0;        // the published one, if there are any
    int next_slot = 1;   // where the next update goes, if there are two
    int spare_slot = 2;  // the third, if there is one
    bool zero_moments = true;
    std::array<BlockForm, kMostSlots> forms;  // of a split block in each slot
    std::uint64_t num_edits = 0;              // of P16 in memory, by others than updates
    std::uint64_t num_edits_taken = 0;        // those that an update has replaced
    std::uint64_t num_puts = 0;               // of P16 by others than updates, wherever it is
    // Of the state block in each slot, once somebody said or made what stands there.
    std::array<StateSums, kMostSlots> sums;
    std::array<bool, kMostSlots> has_sums = {};
    Keep keep = Keep::kNot;
    int kept_slot = 0;
    StateSums kept_sums;  // of the last kept state that was captured or claimed
    bool has_kept_sums = false;
    std::shared_ptr<const ChunkSpec> destination;  // of the next update that is queued
    std::int64_t updated_generation = 0;    // whose P16 can be had: it is in place, or in staging
    std::int64_t published_generation = 0;  // whose P16 is in place
    std::shared_ptr<Job> job;               // admitted and not ended
    std::vector<std::shared_ptr<Job>> waiting;  // queued behind it, the oldest generation first
    std::optional<Written> written;             // of the last job that was not dropped
    int num_waiters = 0;                        // threads that wait for something of this chunk

    void publish_in(int target)
    {
        (target == spare_slot ? spare_slot : next_slot) = slot;
        slot = target;
    }
    bool resident() const { return spec.resident_state != nullptr; }
    bool param_on_storage() const { return spec.param_on_storage(); }
    // Where the chunk's places are once the job has ended.
    const ChunkSpec& after(const Job& job) const
    {
        return job.destination ? *job.destination : spec;
    }
    bool is_moving() const
    {
        return (job && job->destination) ||
               std::any_of(waiting.begin(), waiting.end(), [](const std::shared_ptr<Job>& one) {
                   return one->destination != nullptr;
               });
    }
    std::uint64_t param_bytes() const
    {
        return round_up_to_page(spec.numel() * element_bytes(spec.param_type));
    }
    std::uint64_t grad_bytes() const
    {
        return round_up_to_page(spec.numel() * element_bytes(spec.grad_type));
    }
    // Of a job that leaves the chunk at `to`: where the parts of its staging block begin. What
    // lives in memory is absent.
    std::uint64_t param_offset(const ChunkSpec& to) const
    {
        const bool in_memory = resident() && to.resident();
        const bool in_own_block = !spec.changes_form() && (resident() || to.resident());
        return in_memory || in_own_block ? 0 : spec.stored.num_bytes;
    }
    std::uint64_t grad_offset(const ChunkSpec& to) const
    {
        return param_offset(to) + (to.param_on_storage() ? param_bytes() : 0);
    }
    bool makes_param_alone(const ChunkSpec& to) const
    {
        return to.param_on_storage() && param_offset(to) == 0;
    }
    std::uint64_t staging_bytes(const ChunkSpec& to) const
    {
        return grad_offset(to) + (spec.grad_slot.empty() ? 0 : grad_bytes());
    }
};

}  // namespace fuyou
