// SPDX-License-Identifier: Apache-2.0
//
// The fp32 state of one chunk in memory, and its update. Knows no storage and no threads but
// OpenMP's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/update_rule.h"
#include "memory/aligned_pool.h"

namespace fuyou {

// Checksums of a state block: place_sum() of P32, and of the moments, the second one of which
// weighs differently, so that exchanged moments are noticed. Those of disjoint runs add up; moments
// that are all zero add nothing.
struct StateSums {
    std::uint64_t param = 0;
    std::uint64_t moments = 0;

    StateSums& operator+=(const StateSums& other)
    {
        param += other.param;
        moments += other.moments;
        return *this;
    }
    bool operator==(const StateSums& other) const
    {
        return param == other.param && moments == other.moments;
    }
};

// [P32 | moment 0 | moment 1], each part padded to pages. Does not own the memory.
struct StateBlock {
    char* memory;
    std::uint64_t numel;
    int num_moments;

    static std::uint64_t part_bytes(std::uint64_t numel)
    {
        return round_up_to_page(numel * sizeof(float));
    }
    // Part 0 is P32, part 1 and on are the moments.
    float* part(int which) const
    {
        return reinterpret_cast<float*>(memory +
                                        static_cast<std::uint64_t>(which) * part_bytes(numel));
    }
    void clear_moments() const;
    // Over elements [begin, end) of all parts.
    StateSums sums(std::uint64_t begin, std::uint64_t end) const;
};

// One run of a chunk that shares hyperparameters; a null rule leaves the elements as they are.
struct UpdateSegment {
    std::uint64_t begin;
    std::uint64_t end;
    std::shared_ptr<const UpdateRule> rule;
};

struct BlockUpdate {
    const char* gradient = nullptr;  // of the whole chunk
    ElementType gradient_type = ElementType::kBFloat16;
    float multiplier = 1.0F;  // of every gradient, before the rule
    char* param16 = nullptr;  // receives P16 of the whole chunk
    ElementType param_type = ElementType::kBFloat16;
    bool checked = false;  // make the sums
};

struct BlockSums {
    StateSums read;     // over the block as it was
    StateSums updated;  // and as it is now
};

// Segments must cover the chunk, in order. Every element gets the bits that its rule would give it
// if the whole chunk had that rule: where segments meet changes nothing. Throws what a rule throws.
BlockSums update_block(const StateBlock& block, const std::vector<UpdateSegment>& segments,
                       const BlockUpdate& how, int num_threads);

}  // namespace fuyou
