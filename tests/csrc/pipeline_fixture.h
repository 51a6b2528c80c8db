// SPDX-License-Identifier: Apache-2.0
//
// A little world for the pipeline's tests: chunks in a file or in memory, and an update whose
// result is easy to predict.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "io_fixture.h"
#include "pipeline/chunk_pipeline.h"

namespace fixture {

constexpr double kPatienceSecs = 200.0;  // far longer than any wait lasts; a broken one fails

inline std::uint32_t bits_of(float value)
{
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float value_of(std::uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint64_t part_bytes(std::uint64_t numel)
{
    return round_up_to_page(numel * sizeof(float));
}

// As ds_fuyou/state_layout.py describes them; two moments.
inline BlockLayout whole_layout(std::uint64_t numel)
{
    const std::uint64_t part = part_bytes(numel);
    return {numel, 2, false, 0, 0, 0, {part, 2 * part}, 3 * part};
}
inline BlockLayout split_layout(std::uint64_t numel)
{
    const std::uint64_t part = part_bytes(numel), half = round_up_to_page(numel * 2);
    const std::uint64_t low = half + kPageBytes, moments = low + half;
    return {numel, 2, true, 0, half, low, {moments, moments + part}, moments + 2 * part};
}

inline BlockLayout bfloat16_layout(std::uint64_t numel)
{
    const std::uint64_t part = part_bytes(numel), half = round_up_to_page(numel * 2);
    const std::uint64_t moments = half + kPageBytes;
    BlockLayout layout{numel, 2, true, 0, half, 0, {moments, moments + part}, moments + 2 * part};
    layout.has_low = false;
    return layout;
}
enum class Masters { kWhole, kSplit, kBFloat16 };
inline BlockLayout layout_of(Masters masters, std::uint64_t numel)
{
    return masters == Masters::kWhole   ? whole_layout(numel)
           : masters == Masters::kSplit ? split_layout(numel)
                                        : bfloat16_layout(numel);
}

// The same with other moments: fields behind the master begin anew.
inline BlockLayout with_moments(BlockLayout layout, MomentType type,
                                const std::vector<std::uint64_t>& cuts = {})
{
    if (type == MomentType::kFloat32) return layout;
    const bool is_coded = type == MomentType::kInt8;
    std::uint64_t at = layout.moments[0];
    for (std::size_t i = 0; i < 2; ++i) {
        layout.moments[i] = at;
        at += round_up_to_page(layout.numel * (is_coded ? 1 : 2));
        layout.scales[i] = is_coded ? at : 0;
        const std::uint64_t num_scales = (layout.numel + kCodeBlock - 1) / kCodeBlock + cuts.size();
        if (is_coded) at += round_up_to_page(num_scales * 4);
    }
    if (is_coded && !cuts.empty())
        layout.cuts = std::make_shared<const std::vector<std::uint64_t>>(cuts);
    layout.num_bytes = at;
    layout.moment_type = type;
    return layout;
}

// param -= grad; every moment += 1. In small whole numbers, hence exact in every type.
class CountingRule final : public UpdateRule {
  public:
    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        for (std::size_t i = 0; i < numel; ++i) {
            param[i] -= grad[i];
            moments[0][i] += 1.0F;
            moments[1][i] += 1.0F;
        }
    }
};

// An update that says when it has begun and ends when it is told to.
class GatedRule final : public UpdateRule {
  public:
    void apply(float* param, float* grad, float* const* moments, std::size_t numel) const override
    {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            has_begun_ = true;
            changed_.notify_all();
            changed_.wait(lock, [this] { return is_open_; });
        }
        CountingRule().apply(param, grad, moments, numel);
    }
    void wait_begun() const
    {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return has_begun_; });
    }
    void open() const
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_open_ = true;
        changed_.notify_all();
    }

  private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    mutable bool has_begun_ = false;
    mutable bool is_open_ = false;
};

class FailingRule final : public UpdateRule {
  public:
    void apply(float*, float*, float* const*, std::size_t) const override
    {
        throw std::runtime_error("the rule failed");
    }
};

enum class Place { kDram, kStorage };

struct WorldOptions {
    Backing backend = IoBackend::kThreads;
    Place state = Place::kStorage;
    Place params = Place::kDram;
    Place gradients = Place::kDram;
    int num_slots = 2;
    std::size_t num_chunks = 5;
    std::size_t num_in_memory = 0;  // the first ones, whatever `state` says
    std::uint64_t numel = 3000;     // no multiple of anything
    std::size_t staging_chunks = 2;
    bool bfloat16_params = false;
    Masters masters = Masters::kWhole;
    bool has_spares = false;  // of states in memory
    MomentType moments = MomentType::kFloat32;
};

// Chunks [states | P16s | G16] one after the other in one file.
class World {
  public:
    explicit World(const WorldOptions& wanted)
        : given(wanted),
          part(part_bytes(wanted.numel)),
          short_part(round_up_to_page(wanted.numel * 2)),
          stored(with_moments(layout_of(wanted.masters, wanted.numel), wanted.moments)),
          chunk_bytes(kMostSlots * (stored.num_bytes + short_part) + short_part),
          file(Access::kBuffered, chunk_bytes * wanted.num_chunks),
          engine(std::make_unique<IoEngine>(options(wanted.backend))),
          staging(std::make_unique<AlignedPool>(wanted.staging_chunks *
                                                (stored.num_bytes + 2 * short_part))),
          gradients(wanted.num_chunks, std::vector<float>(wanted.numel, 1.0F)),
          params(2 * wanted.num_chunks, std::vector<float>(wanted.numel, -1.0F)),
          resident(2 * wanted.num_chunks, std::vector<char>(3 * part))
    {
        pipeline = std::make_unique<ChunkPipeline>(engine.get(), staging.get(), 2);
        for (std::size_t i = 0; i < given.num_chunks; ++i) pipeline->add_chunk(spec(i));
        for (std::size_t i = 0; i < given.num_chunks; ++i)
            if (on_storage(i)) write_initial(i);
    }
    ~World()
    {
        pipeline->stop();
        engine->close();
    }

    ChunkSpec spec(std::size_t chunk)
    {
        ChunkSpec made;
        made.whole = whole_layout(given.numel);
        const bool is_bfloat16 = given.masters == Masters::kBFloat16;
        made.in_memory = is_bfloat16 ? stored : with_moments(made.whole, given.moments);
        made.stored = stored;
        made.position = static_cast<std::int64_t>(chunk);
        made.param_type = given.bfloat16_params ? ElementType::kBFloat16 : type_of(given.params);
        made.grad_type = type_of(given.gradients);
        made.num_slots = given.num_slots;
        for (int slot = 0; slot < given.num_slots; ++slot) {
            const auto at = static_cast<std::size_t>(slot);
            if (on_storage(chunk)) made.state_slots[at] = {state_range(chunk, slot)};
            if (given.params == Place::kStorage) made.param_slots[at] = {param_range(chunk, slot)};
        }
        if (!on_storage(chunk)) made.resident_state = resident[chunk].data();
        if (given.has_spares) made.spare_state = resident[given.num_chunks + chunk].data();
        if (given.params == Place::kDram) {
            made.param_memory = {reinterpret_cast<char*>(params[chunk].data()),
                                 reinterpret_cast<char*>(params[given.num_chunks + chunk].data())};
        }
        if (given.gradients == Place::kStorage) made.grad_slot = {gradient_range(chunk)};
        return made;
    }

    bool on_storage(std::size_t chunk) const
    {
        return given.state == Place::kStorage && chunk >= given.num_in_memory;
    }
    FileRange state_range(std::size_t chunk, int slot) const
    {
        const auto at = static_cast<std::uint64_t>(slot) * stored.num_bytes;
        return {file.fd(), chunk * chunk_bytes + at, stored.num_bytes};
    }
    FileRange param_range(std::size_t chunk, int slot) const
    {
        const std::uint64_t begin = chunk * chunk_bytes + kMostSlots * stored.num_bytes;
        return {file.fd(), begin + static_cast<std::uint64_t>(slot) * short_part, short_part};
    }
    FileRange gradient_range(std::size_t chunk) const
    {
        return {file.fd(), (chunk + 1) * chunk_bytes - short_part, short_part};
    }

    // All of these types hold the small whole numbers of the tests exactly; parameters and
    // gradients are fp32 in DRAM here and fp16 on storage.
    ElementType type_of(Place place) const
    {
        return place == Place::kDram ? ElementType::kFloat32 : ElementType::kFloat16;
    }

    ChunkUpdate update(std::size_t chunk, std::int64_t generation, float multiplier = 1.0F) const
    {
        ChunkUpdate made;
        made.chunk = chunk;
        made.generation = generation;
        made.segments = {{0, given.numel, std::make_shared<CountingRule>()}};
        made.multiplier = multiplier;
        made.gradient_type = type_of(given.gradients);
        if (given.gradients == Place::kDram) {
            made.gradient = reinterpret_cast<const char*>(gradients[chunk].data());
        }
        return made;
    }
    void enqueue_all(std::int64_t generation, float multiplier = 1.0F)
    {
        for (std::size_t i = given.num_chunks; i-- > 0;)
            pipeline->enqueue(update(i, generation, multiplier));
    }
    void drop_all()
    {
        for (std::size_t i = 0; i < given.num_chunks; ++i) pipeline->invalidate(i);
    }
    void finish(std::int64_t generation)
    {
        if (!pipeline->wait_durable(generation, kPatienceSecs))
            throw std::runtime_error("not durable in time");
        pipeline->set_committed(generation);
    }

    // [P32, moment, moment]: whether every element of the chunk holds these values. Of split ones,
    // with P16 in memory.
    bool state_is(std::size_t chunk, float param, float moment)
    {
        std::vector<char> bytes(3 * part), block(stored.num_bytes);
        const char* from = bytes.data();
        const ChunkSpec spec_of = spec(chunk);
        StateBlock source{resident[chunk].data(), spec_of.in_memory};
        if (given.has_spares && pipeline->resident_state(chunk) == spec_of.spare_state)
            source.memory = spec_of.spare_state;
        if (on_storage(chunk)) {
            const FileRange range = state_range(chunk, pipeline->slot(chunk));
            read_file(range, block.data());
            source = {block.data(), stored};
        }
        if (!decode_block(source, nullptr, {bytes.data(), spec_of.whole})) return false;
        return all_equal(from, param) && all_equal(from + part, moment) &&
               all_equal(from + 2 * part, moment);
    }
    bool all_equal(const char* bytes, float value) const
    {
        std::vector<float> values(given.numel);
        std::memcpy(values.data(), bytes, given.numel * sizeof(float));
        for (float found : values)
            if (found != value) return false;
        return true;
    }
    void read_file(const FileRange& range, char* memory) const
    {
        if (pread(range.fd, memory, range.num_bytes, static_cast<off_t>(range.offset)) !=
            static_cast<ssize_t>(range.num_bytes)) {
            throw std::runtime_error("test file is short");
        }
    }
    void write_file(const FileRange& range, const char* memory) const
    {
        if (pwrite(range.fd, memory, range.num_bytes, static_cast<off_t>(range.offset)) !=
            static_cast<ssize_t>(range.num_bytes)) {
            throw std::runtime_error("test file cannot be written");
        }
    }
    // fp16 one is 0x3C00, two 0x4000: all the tests need.
    void store_gradient(std::size_t chunk, std::uint16_t half)
    {
        std::vector<std::uint16_t> halves(short_part / 2, half);
        write_file(gradient_range(chunk), reinterpret_cast<const char*>(halves.data()));
    }
    bool stored_param_is(std::size_t chunk, std::uint16_t half) const
    {
        std::vector<std::uint16_t> halves(short_part / 2);
        read_file(param_range(chunk, pipeline->slot(chunk)),
                  reinterpret_cast<char*>(halves.data()));
        for (std::uint64_t i = 0; i < given.numel; ++i)
            if (halves[i] != half) return false;
        return true;
    }

    const WorldOptions given;
    const std::uint64_t part;
    const std::uint64_t short_part;
    const BlockLayout stored;
    const std::uint64_t chunk_bytes;
    TempFile file;
    std::unique_ptr<IoEngine> engine;
    std::unique_ptr<AlignedPool> staging;
    std::vector<std::vector<float>> gradients;
    std::vector<std::vector<float>> params;   // version 0 of every chunk, then version 1
    std::vector<std::vector<char>> resident;  // of every chunk, then spare ones
    std::unique_ptr<ChunkPipeline> pipeline;

  private:
    // P32 is zero; the moments hold rubbish that must never be read before they were written.
    void write_initial(std::size_t chunk)
    {
        std::vector<char> state(stored.num_bytes, 0x55);
        std::memset(state.data(), 0, stored.moments[0]);
        if (stored.is_split) StateBlock{state.data(), stored}.joints()->has_high = 1;
        write_file(state_range(chunk, 0), state.data());
    }
};

}  // namespace fixture
