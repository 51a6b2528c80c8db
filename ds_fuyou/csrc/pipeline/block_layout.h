// SPDX-License-Identifier: Apache-2.0
//
// Where the fields of one chunk's state block lie. What each version of the layout holds, and why,
// is described in ds_fuyou/state_layout.py alone; offsets come from there.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/moments.h"

namespace fuyou {

// Bytes from the block's begin; every field begins at a page.
struct BlockLayout {
    std::uint64_t numel = 0;
    int num_moments = 0;
    bool is_split = false;
    std::uint64_t high = 0;    // split: upper halves of P32, the first field, which may be missing
    std::uint64_t joints = 0;  // split: one page, see Joints in state_block.h
    std::uint64_t master = 0;  // P32, or split: its lower halves
    std::array<std::uint64_t, 2> moments = {0, 0};
    std::uint64_t num_bytes = 0;
    MomentType moment_type = MomentType::kFloat32;
    std::array<std::uint64_t, 2> scales = {0, 0};  // of 8-bit moments
    bool has_low = true;  // split; else P32 is bfloat16, and its upper halves are all of it
    // Of 8-bit moments, see CodeCuts; or null.
    std::shared_ptr<const std::vector<std::uint64_t>> cuts = nullptr;

    // The begin of the block of codes that holds an element; the first begin, or the end, of one
    // from there on.
    std::uint64_t code_begin(std::uint64_t element) const;
    std::uint64_t code_end(std::uint64_t element) const;
    // The end of what stands there before the first update.
    std::uint64_t master_end() const { return num_moments > 0 ? moments[0] : num_bytes; }
};

}  // namespace fuyou
