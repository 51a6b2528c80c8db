// SPDX-License-Identifier: Apache-2.0
//
// The checksum of zip archives, hence of checkpoint files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuyou {

// Whether crc32() multiplies polynomials; else zlib's is faster.
bool crc32_is_fast();

// As zlib's crc32(): of what had the checksum `crc` (0: nothing), followed by these bytes.
std::uint32_t crc32(std::uint32_t crc, const void* bytes, std::size_t num_bytes);

}  // namespace fuyou
