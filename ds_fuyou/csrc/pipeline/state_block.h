// SPDX-License-Identifier: Apache-2.0
//
// The state of one chunk in memory, and its update. Knows no storage.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/update_rule.h"
#include "memory/aligned_pool.h"
#include "pipeline/block_layout.h"
#include "pipeline/update_team.h"

namespace fuyou {

// Checksums of a state: place_sum() of P32, and of the moments, the second one of which weighs
// differently, so that exchanged moments are noticed. Those of disjoint runs add up; moments that
// are all zero add nothing. They are of the fp32 values, so every layout has the same.
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

// [Note: split masters]
// A split block has P32 as its lower halves, and as P16, which lies elsewhere. Bfloat16 is the
// upper half of P32 rounded to nearest even, so it says the upper half: one less where the lower
// half is above 0x8000. Elements for which that is wrong are *joints*: ties that were rounded up
// (from an odd upper half), and NaN, of which rounding keeps nothing. About one in 2^17 values is
// one; a page of the block lists them with their bits. A block that has more keeps its upper halves
// too, and so does one whose P16 is not, or may not stay, what rounding P32 gives. Then P16 is not
// looked at.
//
// Masters of bfloat16 are P32 whose lower halves are zeros: there are none in the block, and P16 of
// the same step, or the upper halves, say everything. There are no joints, for rounding keeps all.
struct Joint {
    std::uint32_t element;
    std::uint32_t bits;
};

struct Joints {
    static constexpr std::uint32_t kMost = 511;
    static constexpr std::uint32_t kTooMany = UINT32_MAX;

    std::uint32_t num;       // kTooMany: the upper halves have to be read
    std::uint32_t has_high;  // not 0: they are there
    Joint of[kMost];
};
static_assert(sizeof(Joints) == kPageBytes);

// What is known of a split block in its place; neither: nothing, and it says so itself.
struct BlockForm {
    bool has_high = false;
    bool is_joinable = false;  // with P16
};

// A block in memory that it does not own.
struct StateBlock {
    char* memory = nullptr;
    BlockLayout layout;

    float* master() const { return at<float>(layout.master); }  // of a whole block
    float* moment(int which) const                              // of fp32
    {
        return at<float>(layout.moments[static_cast<std::size_t>(which)]);
    }
    // From an element on, where codes begin at one of their blocks. The second moment is a sum of
    // squares.
    StoredMoment moment_from(int which, std::uint64_t element) const;
    std::uint16_t* low() const { return at<std::uint16_t>(layout.master); }  // if it has_low
    std::uint16_t* high() const { return at<std::uint16_t>(layout.high); }
    Joints* joints() const { return at<Joints>(layout.joints); }
    // Of a whole block, over elements [begin, end) of all fields.
    StateSums sums(std::uint64_t begin, std::uint64_t end) const;

  private:
    template <class Value>
    Value* at(std::uint64_t offset) const
    {
        return reinterpret_cast<Value*>(memory + offset);
    }
};

// One run of a chunk that shares hyperparameters; a null rule leaves the elements as they are.
struct UpdateSegment {
    std::uint64_t begin;
    std::uint64_t end;
    std::shared_ptr<const UpdateRule> rule;
};

struct BlockUpdate {
    // Of another memory than `to`, or the same, in one layout: updated in place. Moments are of one
    // type in both. Whole masters that go to a split block are updated in their own, too; else
    // `from` stays.
    StateBlock from;
    StateBlock to;
    bool zero_moments = false;          // those of `from` are, whatever stands there
    const char* old_param16 = nullptr;  // split `from`: of the same step; null: not at hand
    bool high_was_read = false;         // split `from`: whatever it says of itself
    bool keeps_high = false;            // split `to`: its upper halves, too
    StateBlock kept;                    // receives the state as it was, whole, if it has memory

    const char* gradient = nullptr;  // of the whole chunk
    ElementType gradient_type = ElementType::kBFloat16;
    float multiplier = 1.0F;        // of every gradient, before the rule
    bool narrows_gradient = false;  // to bfloat16 before that, as stock's bfloat16 masters have it
    char* param16 = nullptr;        // receives P16 of the whole chunk; may be old_param16
    ElementType param_type = ElementType::kBFloat16;
    bool checked = false;  // make the sums
};

struct BlockSums {
    bool is_readable = true;  // else nothing was done: `from` contradicts itself
    StateSums read;           // over the state as it was
    StateSums updated;        // and as it is now
    BlockForm form;           // of a split `to`
};

// Segments must cover the chunk, in order. Every element gets the bits that its rule would give it
// if the whole chunk had that rule: where segments meet changes nothing. Throws what a rule throws.
// `team`: shares the work; null: this thread does it alone.
BlockSums update_block(const BlockUpdate& how, const std::vector<UpdateSegment>& segments,
                       UpdateTeam* team = nullptr);

// `to`, whole := what `from` holds, in any layout and of as many moments, or none. False if `from`
// contradicts itself, or needs P16 that is null.
bool decode_block(const StateBlock& from, const char* param16, const StateBlock& to);
// `to`, in any layout, with its upper halves where it is split := `from`, whole. What
// decode_block() gave stays the same to the bit; what a layout has no room for is rounded. Of the
// joints the first two words change alone, so that a page that is written over another is one of
// both, wherever a cut of the power leaves it.
void encode_block(const StateBlock& from, const StateBlock& to);

}  // namespace fuyou
