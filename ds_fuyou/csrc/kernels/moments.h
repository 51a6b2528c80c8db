// SPDX-License-Identifier: Apache-2.0
//
// The ways in which a moment is kept: fp32, bfloat16, or 8-bit codes with a scale for each block.
//
// [Note: codes]
// As published for 8-bit Adam (arXiv 2110.02861) and as torchao's AdamW8bit has it: the absolute
// maximum of 256 values, 1e-12 at least, is their scale, and the quotients are given the nearest of
// 256 numbers, seven decades of them, of a pair that is equally near the larger one. The first
// moment's numbers have signs, the second's have not. NaN and infinities make NaN of their block,
// or infinities, as there. A block has values of one parameter, as there: where parameters meet, at
// a *cut*, one ends. It is smaller then, and so is the one behind, for blocks end at multiples of
// 256 elements of a chunk all the same, so that they are the same wherever chunks are cut.
//
// Values that were codes once are to be the same codes again, wherever they have been as fp32: in a
// checkpoint, or with a script. The published rule does not give that: numbers with signs end at
// -0.993 and at 1, so a block whose largest value is negative gets a smaller scale. So whoever
// stores values from outside asks for store_moment_exactly(), which first looks for a scale under
// which all of a block are codes; and what no rule has touched is not stored anew.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuyou {

enum class MomentType { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

// Elements that share a scale.
constexpr std::size_t kCodeBlock = 256;

// Elements of a chunk at which a parameter begins that are no multiples of kCodeBlock, ascending;
// of a run of the chunk those behind its first element.
struct CodeCuts {
    const std::uint64_t* next = nullptr;
    const std::uint64_t* end = nullptr;
    std::uint64_t begin = 0;  // the run's first element
};

// Where a run of one moment is kept; one of codes begins with a block of them.
struct StoredMoment {
    MomentType type = MomentType::kFloat32;
    bool is_signed = false;  // codes
    char* values = nullptr;
    float* scales = nullptr;  // of codes
    CodeCuts cuts = {};       // of codes
};

// A scale of 0, as memory has that nobody wrote, is one of zeros.
void load_moment(const StoredMoment& from, float* to, std::size_t numel);
void store_moment(const float* values, const StoredMoment& to, std::size_t numel);
void store_moment_exactly(const float* values, const StoredMoment& to, std::size_t numel);
void copy_moment(const StoredMoment& from, const StoredMoment& to, std::size_t numel);

// The 256 numbers, ascending.
const float* code_values(bool is_signed);

}  // namespace fuyou
