// SPDX-License-Identifier: Apache-2.0
#include "kernels/elementwise.h"

#include <cstring>
#if defined(__F16C__) || defined(__AVX512BW__)
#include <immintrin.h>
#endif

#include "kernels/float16.h"
#include "kernels/float_bits.h"

namespace fuyou {
namespace {

struct BFloat16 {
    static float load(std::uint16_t bits) { return from_bits(std::uint32_t{bits} << 16); }
    static std::uint16_t store(float value)
    {
        const std::uint32_t bits = to_bits(value);
        const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
        const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
        return static_cast<std::uint16_t>(is_nan ? 0x7fc0U : rounded);
    }
};

struct Float16 {
    static float load(std::uint16_t bits) { return half_to_float(bits); }
    static std::uint16_t store(float value) { return float_to_half(value); }
};

template <class Format>
void scale16(const std::uint16_t* src, float* dst, std::size_t numel, float multiplier)
{
    for (std::size_t i = 0; i < numel; ++i) dst[i] = Format::load(src[i]) * multiplier;
}

template <class Format>
void narrow16(const float* src, std::uint16_t* dst, std::size_t numel)
{
    for (std::size_t i = 0; i < numel; ++i) dst[i] = Format::store(src[i]);
}

inline std::uint32_t joined(std::uint16_t param16, std::uint16_t low)
{
    const std::uint32_t high = static_cast<std::uint16_t>(param16 - (low > 0x8000U ? 1U : 0U));
    return high << 16 | low;
}

#if defined(__AVX512BW__)

// What follows splits as many whole vectors as there are, and says how many elements these were.
// Upper halves go past the cache: nothing reads them before they are written to storage.
template <bool keeps_high>
std::size_t split_vectors(const float* src, std::uint16_t* param16, std::uint16_t* low,
                          std::uint16_t* high, std::size_t numel, std::uint32_t* differs)
{
    constexpr std::size_t kStep = 32;
    const std::size_t num_split = numel / kStep * kStep;
    const __m512i one = _mm512_set1_epi32(1), below_half = _mm512_set1_epi32(0x7fff);
    const __m512i half = _mm512_set1_epi16(static_cast<short>(0x8000));
    const __m512i nan16 = _mm512_set1_epi16(0x7fc0), one16 = _mm512_set1_epi16(1);
    std::uint16_t places[kStep];
    for (std::size_t i = 0; i < kStep; ++i) places[i] = static_cast<std::uint16_t>(2 * i);
    const __m512i even = _mm512_loadu_si512(places), odd = _mm512_add_epi16(even, one16);
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(high) % 64 == 0;
    __mmask32 wrong = 0;
    const auto round = [&](__m512i bits) {
        const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        return _mm512_add_epi32(bits, _mm512_add_epi32(below_half, last));
    };
    const auto is_nan = [](__m512i bits) {
        const __m512 values = _mm512_castsi512_ps(bits);
        return std::uint32_t{_mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q)};
    };
    for (std::size_t i = 0; i < num_split; i += kStep) {
        const __m512i first = _mm512_loadu_si512(src + i);
        const __m512i second = _mm512_loadu_si512(src + i + 16);
        const __m512i lows = _mm512_permutex2var_epi16(first, even, second);
        const __m512i highs = _mm512_permutex2var_epi16(first, odd, second);
        const __m512i near = _mm512_permutex2var_epi16(round(first), odd, round(second));
        const __mmask32 nans = is_nan(first) | is_nan(second) << 16;
        const __m512i rounded = _mm512_mask_mov_epi16(near, nans, nan16);
        const __mmask32 was_raised = _mm512_cmpgt_epu16_mask(lows, half);
        const __m512i joined = _mm512_mask_sub_epi16(rounded, was_raised, rounded, one16);
        wrong |= _mm512_cmpneq_epu16_mask(joined, highs);
        _mm512_storeu_si512(param16 + i, rounded);
        _mm512_storeu_si512(low + i, lows);
        if constexpr (keeps_high) {
            if (is_aligned) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(high + i), highs);
            } else {
                _mm512_storeu_si512(high + i, highs);
            }
        }
    }
    if constexpr (keeps_high) _mm_sfence();
    *differs |= wrong;
    return num_split;
}

#else

template <bool keeps_high>
std::size_t split_vectors(const float*, std::uint16_t*, std::uint16_t*, std::uint16_t*, std::size_t,
                          std::uint32_t*)
{
    return 0;
}

#endif

// Without a condition in its body, so that compilers can make it one of vectors.
template <bool keeps_high>
std::uint32_t split(const float* src, std::uint16_t* param16, std::uint16_t* low,
                    std::uint16_t* high, std::size_t numel)
{
    std::uint32_t differs = 0;
    std::size_t i = split_vectors<keeps_high>(src, param16, low, high, numel, &differs);
    for (; i < numel; ++i) {
        const std::uint32_t bits = to_bits(src[i]);
        const std::uint16_t rounded = BFloat16::store(src[i]);
        const std::uint16_t rest = static_cast<std::uint16_t>(bits);
        differs |= joined(rounded, rest) ^ bits;
        param16[i] = rounded;
        low[i] = rest;
        if constexpr (keeps_high) high[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    return differs;
}

}  // namespace

bool split_master(const float* src, std::uint16_t* param16, std::uint16_t* low, std::uint16_t* high,
                  std::size_t numel)
{
    const std::uint32_t differs = high != nullptr ? split<true>(src, param16, low, high, numel)
                                                  : split<false>(src, param16, low, high, numel);
    return differs == 0;
}

void join_master(const std::uint16_t* param16, const std::uint16_t* low, float* dst,
                 std::size_t numel)
{
    for (std::size_t i = 0; i < numel; ++i) dst[i] = from_bits(joined(param16[i], low[i]));
}

void put_halves_together(const std::uint16_t* high, const std::uint16_t* low, float* dst,
                         std::size_t numel)
{
    for (std::size_t i = 0; i < numel; ++i)
        dst[i] = from_bits(std::uint32_t{high[i]} << 16 | low[i]);
}

void scale_gradient(ElementType type, const void* src, float* dst, std::size_t numel,
                    float multiplier)
{
    switch (type) {
        case ElementType::kFloat32: {
            const float* values = static_cast<const float*>(src);
            for (std::size_t i = 0; i < numel; ++i) dst[i] = values[i] * multiplier;
            break;
        }
        case ElementType::kFloat16:
            scale16<Float16>(static_cast<const std::uint16_t*>(src), dst, numel, multiplier);
            break;
        case ElementType::kBFloat16:
            scale16<BFloat16>(static_cast<const std::uint16_t*>(src), dst, numel, multiplier);
            break;
    }
}

void widen_bfloat16(const std::uint16_t* src, float* dst, std::size_t numel)
{
    for (std::size_t i = 0; i < numel; ++i) dst[i] = BFloat16::load(src[i]);
}

void upper_halves(const float* src, std::uint16_t* dst, std::size_t numel)
{
    for (std::size_t i = 0; i < numel; ++i) {
        const std::uint32_t bits = to_bits(src[i]);
        const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
        const bool is_lost = ((bits & 0x7fffffffU) > 0x7f800000U) & ((bits & 0xffffU) != 0);
        dst[i] = static_cast<std::uint16_t>(is_lost ? 0x7fc0U : rounded);
    }
}

void narrow_parameter(ElementType type, const float* src, void* dst, std::size_t numel)
{
    switch (type) {
        case ElementType::kFloat32:
            std::memcpy(dst, src, numel * sizeof(float));
            break;
        case ElementType::kFloat16:
            narrow16<Float16>(src, static_cast<std::uint16_t*>(dst), numel);
            break;
        case ElementType::kBFloat16:
            narrow16<BFloat16>(src, static_cast<std::uint16_t*>(dst), numel);
            break;
    }
}

}  // namespace fuyou
