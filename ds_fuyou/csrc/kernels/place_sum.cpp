// SPDX-License-Identifier: Apache-2.0
#include "kernels/place_sum.h"

#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fuyou {
namespace {

// Words at even places p weigh p + 1, those behind them at p + 1 this times kOddPlaces: one vector
// of weights serves both halves of 64-bit lanes, and widening multiplications need 32 bits each.
constexpr std::uint64_t kOddPlaces = 0x9E3779B97F4A7C15;

struct Sums {
    std::uint64_t even = 0;
    std::uint64_t odd = 0;
};

void add_words(const char* from, std::size_t num_words, std::uint64_t first, Sums& sums)
{
    for (std::size_t i = 0; i < num_words; ++i) {
        std::uint32_t word;
        std::memcpy(&word, from + i * sizeof word, sizeof word);
        const std::uint64_t place = first + i;
        (place % 2 == 0 ? sums.even : sums.odd) +=
            std::uint64_t{word} * static_cast<std::uint32_t>(place | 1);
    }
}

// What follows sums as many whole vectors as there are from an even place on, and says how many
// words these were.
#if defined(__AVX512F__)

std::size_t add_vectors(const char* from, std::size_t num_words, std::uint64_t first, Sums& sums)
{
    constexpr std::size_t kStep = 32;
    const std::size_t num_summed = num_words / kStep * kStep;
    const __m512i next = _mm512_set1_epi64(16);
    __m512i weight = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(first + 1)),
                                      _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0));
    __m512i even[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    __m512i odd[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (std::size_t i = 0; i < num_summed; i += kStep) {
        for (int k = 0; k < 2; ++k) {
            const __m512i pairs =
                _mm512_loadu_si512(from + (i + static_cast<std::size_t>(k) * 16) * 4);
            even[k] = _mm512_add_epi64(even[k], _mm512_mul_epu32(pairs, weight));
            odd[k] =
                _mm512_add_epi64(odd[k], _mm512_mul_epu32(_mm512_srli_epi64(pairs, 32), weight));
            weight = _mm512_add_epi64(weight, next);
        }
    }
    sums.even +=
        static_cast<std::uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(even[0], even[1])));
    sums.odd +=
        static_cast<std::uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(odd[0], odd[1])));
    return num_summed;
}

#elif defined(__AVX2__)

std::size_t add_vectors(const char* from, std::size_t num_words, std::uint64_t first, Sums& sums)
{
    constexpr std::size_t kStep = 16;
    const std::size_t num_summed = num_words / kStep * kStep;
    const __m256i next = _mm256_set1_epi64x(8);
    __m256i weight = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(first + 1)),
                                      _mm256_set_epi64x(6, 4, 2, 0));
    __m256i even[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i odd[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (std::size_t i = 0; i < num_summed; i += kStep) {
        for (int k = 0; k < 2; ++k) {
            const __m256i pairs = _mm256_loadu_si256(
                reinterpret_cast<const __m256i*>(from + (i + static_cast<std::size_t>(k) * 8) * 4));
            even[k] = _mm256_add_epi64(even[k], _mm256_mul_epu32(pairs, weight));
            odd[k] =
                _mm256_add_epi64(odd[k], _mm256_mul_epu32(_mm256_srli_epi64(pairs, 32), weight));
            weight = _mm256_add_epi64(weight, next);
        }
    }
    std::uint64_t lanes[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(even[0], even[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes + 4), _mm256_add_epi64(odd[0], odd[1]));
    sums.even += lanes[0] + lanes[1] + lanes[2] + lanes[3];
    sums.odd += lanes[4] + lanes[5] + lanes[6] + lanes[7];
    return num_summed;
}

#else

// Without conditions on the place, which compilers can turn into vectors.
std::size_t add_vectors(const char* from, std::size_t num_words, std::uint64_t first, Sums& sums)
{
    const std::uint32_t weight = static_cast<std::uint32_t>(first + 1);
    std::uint64_t even = 0, odd = 0;
    for (std::size_t i = 0; i + 1 < num_words; i += 2) {
        std::uint32_t pair[2];
        std::memcpy(pair, from + i * 4, sizeof pair);
        const std::uint64_t here = weight + static_cast<std::uint32_t>(i);
        even += pair[0] * (here & 0xffffffffU);
        odd += pair[1] * (here & 0xffffffffU);
    }
    sums.even += even;
    sums.odd += odd;
    return num_words / 2 * 2;
}

#endif

}  // namespace

std::uint64_t place_sum(const void* words, std::size_t num_words, std::uint64_t first)
{
    const char* from = static_cast<const char*>(words);
    Sums sums;
    std::size_t done = num_words > 0 ? static_cast<std::size_t>(first % 2) : 0;
    add_words(from, done, first, sums);
    done += add_vectors(from + done * 4, num_words - done, first + done, sums);
    add_words(from + done * 4, num_words - done, first + done, sums);
    return sums.even + kOddPlaces * sums.odd;
}

}  // namespace fuyou
