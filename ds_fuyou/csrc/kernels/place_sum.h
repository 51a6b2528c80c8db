// SPDX-License-Identifier: Apache-2.0
//
// The checksum of everything that is written and read back.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuyou {

// The sum mod 2^64 of num_words 32-bit words, each times an odd number that no other place below
// 2^32 has; the first word has the place `first`. One flipped bit is always noticed, and so are two
// within a page of 4 KiB. Farther apart, two are noticed but for a chance, as are runs that were
// exchanged, moved, torn or left as they were. Sums of neighbouring runs add up to the sum of both,
// and zeros add nothing. Exact integers: every order of summation, hence every processor, gives the
// same. Not cryptographic.
std::uint64_t place_sum(const void* words, std::size_t num_words, std::uint64_t first);

}  // namespace fuyou
