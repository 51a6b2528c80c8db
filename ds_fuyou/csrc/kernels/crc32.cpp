// SPDX-License-Identifier: Apache-2.0
//
// A message is a polynomial over GF(2), its checksum the remainder by a polynomial of degree 32.
// Sixteen bytes that stand D bits before others may be replaced by a product of theirs with x^D,
// reduced to few bits and added to those others: the remainder stays. So four runs of sixteen bytes
// are carried along at once until sixteen are left, and these are taken byte by byte. (Gopal et
// al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.)
// Bits of a byte are in reverse, the highest power first, and so are the constants.
#include "kernels/crc32.h"

#include <array>
#include <cstring>
#if defined(__PCLMUL__) && defined(__SSE4_1__)
#include <immintrin.h>
#endif

namespace fuyou {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320;

constexpr std::array<std::uint32_t, 256> remainders_of_bytes()
{
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t rest = byte;
        for (int bit = 0; bit < 8; ++bit) rest = rest & 1 ? kPolynomial ^ (rest >> 1) : rest >> 1;
        table[byte] = rest;
    }
    return table;
}

constexpr std::array<std::uint32_t, 256> kOfByte = remainders_of_bytes();

std::uint32_t take_bytes(std::uint32_t rest, const unsigned char* bytes, std::size_t num_bytes)
{
    for (std::size_t i = 0; i < num_bytes; ++i)
        rest = kOfByte[(rest ^ bytes[i]) & 0xFF] ^ (rest >> 8);
    return rest;
}

#if defined(__PCLMUL__) && defined(__SSE4_1__)

// x^(D + 32) and x^(D - 32), reduced, for the two halves of sixteen bytes.
struct Shift {
    long long low;
    long long high;
};
constexpr Shift kBy64Bytes = {0x154442bd4, 0x1c6e41596};
constexpr Shift kBy16Bytes = {0x1751997d0, 0x0ccaa009e};

__m128i at(const unsigned char* bytes)
{
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

__m128i moved(__m128i run, __m128i shift)
{
    return _mm_xor_si128(_mm_clmulepi64_si128(run, shift, 0x00),
                         _mm_clmulepi64_si128(run, shift, 0x11));
}

// Of at least 64 bytes, whole sixteens of them; says how many in `num_taken`.
std::uint32_t take_sixteens(std::uint32_t rest, const unsigned char* bytes, std::size_t num_bytes,
                            std::size_t* num_taken)
{
    const __m128i by_64 = _mm_set_epi64x(kBy64Bytes.high, kBy64Bytes.low);
    const __m128i by_16 = _mm_set_epi64x(kBy16Bytes.high, kBy16Bytes.low);
    __m128i runs[4] = {at(bytes), at(bytes + 16), at(bytes + 32), at(bytes + 48)};
    runs[0] = _mm_xor_si128(runs[0], _mm_cvtsi32_si128(static_cast<int>(rest)));
    std::size_t i = 64;
    for (; i + 64 <= num_bytes; i += 64) {
        for (std::size_t k = 0; k < 4; ++k)
            runs[k] = _mm_xor_si128(moved(runs[k], by_64), at(bytes + i + 16 * k));
    }
    __m128i run = runs[0];
    for (std::size_t k = 1; k < 4; ++k) run = _mm_xor_si128(moved(run, by_16), runs[k]);
    for (; i + 16 <= num_bytes; i += 16) run = _mm_xor_si128(moved(run, by_16), at(bytes + i));
    *num_taken = i;
    unsigned char last[16];
    std::memcpy(last, &run, sizeof last);
    return take_bytes(0, last, sizeof last);
}

#endif

}  // namespace

bool crc32_is_fast()
{
#if defined(__PCLMUL__) && defined(__SSE4_1__)
    return true;
#else
    return false;
#endif
}

std::uint32_t crc32(std::uint32_t crc, const void* bytes, std::size_t num_bytes)
{
    const auto* from = static_cast<const unsigned char*>(bytes);
    std::uint32_t rest = ~crc;
#if defined(__PCLMUL__) && defined(__SSE4_1__)
    if (num_bytes >= 64) {
        std::size_t num_taken = 0;
        rest = take_sixteens(rest, from, num_bytes, &num_taken);
        from += num_taken;
        num_bytes -= num_taken;
    }
#endif
    return ~take_bytes(rest, from, num_bytes);
}

}  // namespace fuyou
