// SPDX-License-Identifier: Apache-2.0
#include "kernels/code_map.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernels/code_numbers.h"
#include "kernels/float_bits.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12, of its own intrinsics
#endif
#include <immintrin.h>
#define FUYOU_AVX2 __attribute__((target("avx2,fma")))
#define FUYOU_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq")))
#define FUYOU_VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vbmi")))
#endif

namespace fuyou {
namespace {

constexpr std::uint32_t kOne = 0x3f800000U;
// Larger scales have no reciprocal of full precision.
constexpr float kLargestDivisor = 0x1p100F;
// A sum with it is a whole number, in the last bits.
constexpr float kMagic = 0x1p23F;
constexpr std::uint32_t kMagicBits = 0x4b000000U;
// How close to a whole number, in units of 2^-kFraction, a code is not trusted; and how close to
// the begin of a decade, in last bits: these lack four.
constexpr int kNearWhole = 8;
constexpr int kNearBegin = 32;
// From which upper half on decades are told by it, and how many, in units of 2^-16, each makes.
constexpr int kDecadeLeast = 0x3344, kDecadeRate = 152;
constexpr float kSmallest = 0x1p-31F;  // smaller is not told apart: the code of zero

// Of the linear grid that a decade's numbers are the middles of, from a tenth on.
double step_of(int decade, std::uint32_t num)
{
    return 0.9 * std::pow(10.0, decade - 7) / num;
}

// By last bits.
float moved(float value, int by)
{
    return from_bits(to_bits(value) + static_cast<std::uint32_t>(by));
}

}  // namespace

CodePath best_code_path()
{
#if defined(__x86_64__)
    static const bool has_avx512 = __builtin_cpu_supports("avx512f") != 0 &&
                                   __builtin_cpu_supports("avx512bw") != 0 &&
                                   __builtin_cpu_supports("avx512dq") != 0;
    static const bool has_avx2 =
        __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
    static const CodePath best = has_avx512 && __builtin_cpu_supports("avx512vbmi") != 0
                                     ? CodePath::kVbmi
                                 : has_avx512 ? CodePath::kAvx512
                                 : has_avx2   ? CodePath::kAvx2
                                              : CodePath::kPortable;
    return best;
#else
    return CodePath::kPortable;
#endif
}

const CodeMap& CodeMap::of(bool is_signed)
{
    static const CodeMap with(true), without(false);
    return is_signed ? with : without;
}

CodeMap::CodeMap(bool is_signed) : is_signed_(is_signed)
{
    const std::uint32_t* bits = is_signed ? kSignedNumbers : kUnsignedNumbers;
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = from_bits(bits[i]);
    for (std::size_t i = 0; i < 256; ++i) {
        const std::uint32_t number = is_signed ? (i < 128 ? bits[i + 127] : 0) : bits[i];
        for (std::size_t k = 0; k < 4; ++k)
            bytes_[k][i] = static_cast<std::uint8_t>(number >> (8 * k));
    }
    make_buckets();
    make_lines();
#if defined(__x86_64__)
    make_grids();
#endif
}

std::uint32_t CodeMap::nearest(float quotient) const
{
    std::uint32_t code = 0;  // the last number that is not above; of NaN the first
    for (std::uint32_t half = 128; half > 0; half /= 2)
        if (quotient >= numbers[code + half]) code += half;
    const std::uint32_t next = std::min<std::uint32_t>(code + 1, 255);
    const float distance = quotient - numbers[code];
    return distance >= (numbers[next] - numbers[code]) * 0.5F ? next : code;
}

void CodeMap::make_buckets()
{
    for (std::uint32_t sign = 0; sign < 2; ++sign) {
        for (std::int32_t bucket = 0; bucket < kBuckets; ++bucket) {
            const std::uint32_t begin = static_cast<std::uint32_t>(kFirst + bucket) << 16;
            const auto code = [&](std::uint32_t low) {
                if (bucket == kBuckets - 1) return nearest(from_bits(kNan));
                return nearest(from_bits(sign << 31 | begin | low));
            };
            // Smaller quotients are there, too. Above one there is none.
            const bool is_end = bucket == 0 || bucket >= kBuckets - 2;
            const std::uint32_t first = bucket == 0 ? nearest(0.0F) : code(0);
            std::uint32_t place = kNoPlace;
            const std::uint32_t last = is_end ? first : code(0xffffU);
            if (last != first) {
                if (last != (sign != 0 ? first - 1 : first + 1))
                    throw std::logic_error("two codes begin in a bucket");
                std::uint32_t before = 0;
                for (place = 0xffffU; place - before > 1;) {
                    const std::uint32_t middle = before + (place - before) / 2;
                    (code(middle) == first ? before : place) = middle;
                }
            }
            const std::size_t at =
                static_cast<std::size_t>(bucket) + (sign != 0 ? std::size_t{kBuckets} : 0);
            buckets_[at] = first << kPlaceBits | place;
        }
    }
}

// The bits of the least quotient of at least this code, which is that of no negative.
std::uint32_t CodeMap::first_of(std::uint32_t code) const
{
    std::uint32_t below = 0, found = kOne;
    while (found - below > 1) {
        const std::uint32_t middle = below + (found - below) / 2;
        (nearest(from_bits(middle)) < code ? below : found) = middle;
    }
    return found;
}

void CodeMap::make_lines()
{
    const std::uint32_t zero = nearest(0.0F);
    const double unit = 1 << kFraction;
    std::array<std::uint32_t, kDecades> begins = {};
    std::uint32_t code = 0;  // counted from zero's
    for (int decade = 0; decade < kDecades; ++decade) {
        const auto at = static_cast<std::size_t>(decade);
        const bool is_alone = decade == 0 || decade == kDecades - 1;  // zero, one
        const std::uint32_t num = is_alone ? 1 : num_of(decade);
        const double factor = is_alone ? 0.0 : 1.0 / step_of(decade, num);
        const double offset = is_alone ? code + 0.5 : code - num / 9.0;
        lines_.factors[at] = static_cast<float>(factor * unit);
        lines_.offsets[at] = static_cast<float>(offset * unit + kMagic + kNearWhole);
        lines_.most[at] =
            kMagicBits + ((code + num) << kFraction) - (std::uint32_t{1} << (kFraction - 1));
        if (decade > 0) {
            begins[at] = first_of(zero + code);
            const auto begin = static_cast<std::int32_t>(begins[at]);
            lines_.starts[at - 1] = begin - kNearBegin;
            for (const int near : {-kNearBegin, kNearBegin})
                if (((begin + near) / 65536 - kDecadeLeast) * kDecadeRate / 65536 != decade - 1)
                    throw std::logic_error("a decade begins where it is not looked for");
        }
        code += num;
    }
    if (zero + code != 256) throw std::logic_error("decades have not the codes that there are");
    for (std::uint32_t low = 0; low < 32; ++low) {
        const std::uint32_t exponent = 96 + low, first = exponent << 23;
        std::uint32_t decade = 0, begin = first - 2 * kNearBegin;
        for (std::uint32_t d = 1; d < kDecades; ++d) {
            if (begins[d] >> 23 < exponent) decade = d;
            if (begins[d] >> 23 != exponent) continue;
            if (begin >= first) throw std::logic_error("two decades begin in an octave");
            decade = d;
            begin = begins[d];
        }
        lines_.begins[low] = ((begin & ~0xfU) - kNearBegin) | decade;
    }
}

// See [Note: numbers by arithmetic].
void CodeMap::make_grids()
{
    for (int decade = 1; decade < kDecades - 1; ++decade)
        for (int trial = 0; !fit_grid(decade, trial % 5 - 2, trial / 5 - 2);)
            if (++trial == 25)
                throw std::logic_error("the numbers of a decade are not near a line");
    grids_.offsets[grid_of(kDecades - 1)] = 1.0F;
}

// With the factor and the offset moved by so many last bits; false: that line does not do.
bool CodeMap::fit_grid(int decade, int by_factor, int by_offset)
{
    const std::uint32_t num = num_of(decade), first = is_signed_ ? num : num - 1;
    const double step = step_of(decade, num), begin = std::pow(10.0, decade - 8) + step / 2;
    const float factor = moved(static_cast<float>(step), by_factor);
    const float offset = moved(static_cast<float>(begin), by_offset);
    const float* magnitudes = numbers.data() + nearest(0.0F);
    std::array<std::uint32_t, 16> rests = grids_.rests;
    for (std::uint32_t i = 0; i < num; ++i) {
        const float number = std::fma(static_cast<float>(i), factor, offset);
        const std::uint32_t rest = to_bits(magnitudes[first + i]) - to_bits(number);
        if (rest > 3) return false;
        rests[(first + i) / 16] |= rest << (first + i) % 16 * 2;
    }
    grids_.rests = rests;
    grids_.factors[grid_of(decade)] = factor;
    grids_.offsets[grid_of(decade)] = offset;
    return true;
}

void CodeMap::encode(const float* values, float scale, std::uint8_t* codes, std::size_t numel,
                     [[maybe_unused]] CodePath path) const
{
    if (std::isnan(scale)) {  // so is what is divided by it
        std::fill_n(codes, numel, static_cast<std::uint8_t>(nearest(scale)));
        return;
    }
    std::size_t done = 0;
#if defined(__x86_64__)
    if (scale <= kLargestDivisor) {
        if (path >= CodePath::kAvx512) done = encode_avx512(values, scale, codes, numel);
        if (path == CodePath::kAvx2) done = encode_avx2(values, scale, codes, numel);
    }
#endif
    encode_portable(values + done, scale, codes + done, numel - done);
}

void CodeMap::decode(const std::uint8_t* codes, float scale, float* values, std::size_t numel,
                     [[maybe_unused]] CodePath path) const
{
    std::size_t done = 0;
#if defined(__x86_64__)
    if (path == CodePath::kVbmi)
        done = is_signed_ ? decode_signed_vbmi(codes, scale, values, numel)
                          : decode_unsigned_vbmi(codes, scale, values, numel);
    if (path == CodePath::kAvx512)
        done = is_signed_ ? decode_signed_avx512(codes, scale, values, numel)
                          : decode_unsigned_avx512(codes, scale, values, numel);
    if (path == CodePath::kAvx2) done = decode_avx2(codes, scale, values, numel);
#endif
    decode_portable(codes + done, scale, values + done, numel - done);
}

// Without a condition in its body, so that compilers can make it one of vectors.
void CodeMap::encode_portable(const float* values, float scale, std::uint8_t* codes,
                              std::size_t numel) const
{
    for (std::size_t i = 0; i < numel; ++i) {
        const std::uint32_t bits = to_bits(values[i] / scale), magnitude = bits & kMagnitude;
        const std::int32_t sign = static_cast<std::int32_t>(bits) >> 31;  // 0 or -1
        const std::int32_t place = static_cast<std::int32_t>(magnitude >> 16) - kFirst;
        const std::int32_t bucket = std::min(std::max(place, 0), kBuckets - 1);
        const std::uint32_t entry = buckets_[static_cast<std::size_t>(bucket + (sign & kBuckets))];
        const std::int32_t is_past = (magnitude & 0xffffU) >= (entry & kPlaceMask) ? 1 : 0;
        const std::int32_t step = (is_past ^ sign) - sign;  // codes fall as negatives grow
        codes[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(entry >> kPlaceBits) + step);
    }
}

void CodeMap::decode_portable(const std::uint8_t* codes, float scale, float* values,
                              std::size_t numel) const
{
    for (std::size_t i = 0; i < numel; ++i) values[i] = numbers[codes[i]] * scale;
}

#if defined(__x86_64__)

// See [Note: codes by arithmetic].
FUYOU_AVX2 std::size_t CodeMap::encode_avx2(const float* values, float scale, std::uint8_t* codes,
                                            std::size_t numel) const
{
    const auto whole_number = [](std::uint32_t bits) { return static_cast<int>(bits); };
    const __m256 factor = _mm256_set1_ps(1.0F / scale);
    const __m256 factors = _mm256_load_ps(lines_.factors.data());
    const __m256 offsets = _mm256_load_ps(lines_.offsets.data());
    const auto* most_of = reinterpret_cast<const __m256i*>(lines_.most.data());
    const auto* starts_of = reinterpret_cast<const __m256i*>(lines_.starts.data());
    const __m256i most = _mm256_load_si256(most_of), starts = _mm256_load_si256(starts_of);
    const __m256i one_starts = _mm256_set1_epi32(lines_.starts[kDecades - 2]);
    const __m256i one = _mm256_set1_epi32(whole_number(lines_.most[kDecades - 1]));
    const __m256i least = _mm256_set1_epi32(kDecadeLeast);
    const __m256i rate = _mm256_set1_epi32(kDecadeRate), near_begin = _mm256_set1_epi32(kNearBegin);
    const __m256i fraction = _mm256_set1_epi32((1 << kFraction) - 2 * kNearWhole);
    const __m256i starts_end = _mm256_set1_epi32(2 * kNearBegin), none = _mm256_setzero_si256();
    const __m256i magnitudes = _mm256_set1_epi32(whole_number(kMagnitude));
    const __m256i lowest = _mm256_set1_epi32(0xff), zero = _mm256_set1_epi32(127);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const bool is_signed = is_signed_;
    const std::size_t num_done = numel / 32 * 32;
    for (std::size_t i = 0; i < num_done; i += 32) {
        __m256i wholes[4], nearest_start = _mm256_set1_epi32(-1);
        std::uint32_t lanes = 0;
        for (int k = 0; k < 4; ++k) {
            const __m256 quotient = _mm256_mul_ps(_mm256_loadu_ps(values + i + 8 * k), factor);
            const __m256i bits = _mm256_castps_si256(quotient);
            // Without signs whatever is negative has zero's code.
            const __m256i magnitude =
                is_signed ? _mm256_and_si256(bits, magnitudes) : _mm256_max_epi32(bits, none);
            // The number of its decade, or of the one before where that is not half past.
            const __m256i about = _mm256_mulhi_epu16(
                _mm256_subs_epu16(_mm256_srli_epi32(magnitude, 16), least), rate);
            const __m256i past =
                _mm256_sub_epi32(magnitude, _mm256_permutevar8x32_epi32(starts, about));
            const __m256i decade = _mm256_sub_epi32(about, _mm256_cmpgt_epi32(past, near_begin));
            nearest_start = _mm256_min_epu32(nearest_start, past);
            const __m256 sum = _mm256_fmadd_ps(_mm256_castsi256_ps(magnitude),
                                               _mm256_permutevar8x32_ps(factors, decade),
                                               _mm256_permutevar8x32_ps(offsets, decade));
            const __m256i in_decade = _mm256_min_epi32(_mm256_castps_si256(sum),
                                                       _mm256_permutevar8x32_epi32(most, decade));
            const __m256i place =
                _mm256_blendv_epi8(one, in_decade, _mm256_cmpgt_epi32(one_starts, magnitude));
            const __m256i near_whole = _mm256_cmpeq_epi32(_mm256_and_si256(place, fraction), none);
            lanes |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(near_whole)))
                     << (8 * k);
            wholes[k] = _mm256_and_si256(_mm256_srli_epi32(place, kFraction), lowest);
            if (is_signed) {
                // Of negatives there is no number beyond the last; saturation sees to that.
                const __m256i sign = _mm256_srai_epi32(bits, 31);
                const __m256i with_sign = _mm256_sub_epi32(_mm256_xor_si256(wholes[k], sign), sign);
                wholes[k] = _mm256_add_epi32(with_sign, zero);
            }
        }
        const __m256i found = _mm256_packus_epi16(_mm256_packus_epi32(wholes[0], wholes[1]),
                                                  _mm256_packus_epi32(wholes[2], wholes[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                            _mm256_permutevar8x32_epi32(found, order));
        const __m256i is_near =
            _mm256_cmpeq_epi32(_mm256_min_epu32(nearest_start, starts_end), nearest_start);
        if (_mm256_movemask_epi8(is_near) != 0) lanes = UINT32_MAX;
        for (; lanes != 0; lanes &= lanes - 1) {
            const std::size_t at = i + static_cast<std::size_t>(__builtin_ctz(lanes));
            encode_portable(values + at, scale, codes + at, 1);
        }
    }
    return num_done;
}

// See [Note: numbers by arithmetic].
FUYOU_AVX2 std::size_t CodeMap::decode_avx2(const std::uint8_t* codes, float scale, float* values,
                                            std::size_t numel) const
{
    const __m256 factor = _mm256_set1_ps(scale);
    const __m256 factors = _mm256_load_ps(grids_.factors.data());
    const __m256 offsets = _mm256_load_ps(grids_.offsets.data());
    const auto* rests_of = reinterpret_cast<const __m256i*>(grids_.rests.data());
    const __m256i lower_rests = _mm256_load_si256(rests_of);
    const __m256i upper_rests = _mm256_load_si256(rests_of + 1);
    const __m256i zero = _mm256_set1_epi32(127), signs = _mm256_set1_epi32(INT32_MIN);
    const __m256i one = _mm256_set1_epi32(1), none = _mm256_setzero_si256();
    const __m256i even = _mm256_set1_epi32(30), lowest_two = _mm256_set1_epi32(3);
    const __m256 powers = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
    const bool is_signed = is_signed_;
    const std::size_t num_done = numel / 8 * 8;
    for (std::size_t i = 0; i < num_done; i += 8) {
        const __m256i code =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
        const __m256i from_zero = is_signed ? _mm256_sub_epi32(code, zero) : code;
        const __m256i magnitude = is_signed ? _mm256_abs_epi32(from_zero) : code;
        const __m256 place =
            _mm256_cvtepi32_ps(is_signed ? magnitude : _mm256_add_epi32(magnitude, one));
        const __m256 in_decade = _mm256_sub_ps(place, _mm256_and_ps(place, powers));
        const __m256i decade = _mm256_srli_epi32(_mm256_castps_si256(place), 23);
        const __m256 near = _mm256_fmadd_ps(in_decade, _mm256_permutevar8x32_ps(factors, decade),
                                            _mm256_permutevar8x32_ps(offsets, decade));
        const __m256i sixteenth = _mm256_srli_epi32(magnitude, 4);
        __m256i rests = _mm256_permutevar8x32_epi32(lower_rests, sixteenth);
        if (!is_signed) {
            const __m256 upper =
                _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(upper_rests, sixteenth));
            const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 24));
            rests =
                _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rests), upper, is_upper));
        }
        const __m256i shift = _mm256_and_si256(_mm256_add_epi32(magnitude, magnitude), even);
        const __m256i rest = _mm256_and_si256(_mm256_srlv_epi32(rests, shift), lowest_two);
        __m256i number = _mm256_add_epi32(_mm256_castps_si256(near), rest);
        number = _mm256_andnot_si256(_mm256_cmpeq_epi32(magnitude, none), number);
        if (is_signed) number = _mm256_or_si256(number, _mm256_and_si256(from_zero, signs));
        _mm256_storeu_ps(values + i, _mm256_mul_ps(_mm256_castsi256_ps(number), factor));
    }
    return num_done;
}

namespace {

// Codes of 64 elements from those of 16 each, which stand in the lowest bytes of words.
FUYOU_AVX512 inline __m512i packed(const __m512i* codes)
{
    const __m512i lowest = _mm512_set1_epi16(0xff);
    const __m512i low = _mm512_and_si512(_mm512_packus_epi32(codes[0], codes[1]), lowest);
    const __m512i high = _mm512_and_si512(_mm512_packus_epi32(codes[2], codes[3]), lowest);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
}

FUYOU_AVX512 inline __mmask64 joined(const __mmask16* masks)
{
    return _mm512_kunpackd(_mm512_kunpackw(masks[3], masks[2]),
                           _mm512_kunpackw(masks[1], masks[0]));
}

}  // namespace

// See [Note: codes by arithmetic].
FUYOU_AVX512 std::size_t CodeMap::encode_avx512(const float* values, float scale,
                                                std::uint8_t* codes, std::size_t numel) const
{
    const __m512 factor = _mm512_set1_ps(1.0F / scale), smallest = _mm512_set1_ps(kSmallest);
    const __m512i begins[2] = {_mm512_load_si512(lines_.begins.data()),
                               _mm512_load_si512(lines_.begins.data() + 16)};
    const __m512 factors = _mm512_load_ps(lines_.factors.data());
    const __m512 offsets = _mm512_load_ps(lines_.offsets.data());
    const __m512i most = _mm512_load_si512(lines_.most.data());
    const __m512i one = _mm512_set1_epi32(1), near_begin = _mm512_set1_epi32(kNearBegin);
    const __m512i begins_end = _mm512_set1_epi32(2 * kNearBegin);
    const __m512i fraction = _mm512_set1_epi32((1 << kFraction) - 2 * kNearWhole);
    const __m512i zero = _mm512_set1_epi8(127);
    const bool is_signed = is_signed_;
    const std::size_t num_done = numel / 64 * 64;
    for (std::size_t i = 0; i < num_done; i += 64) {
        __m512i wholes[4], nearest_begin = _mm512_set1_epi32(-1);
        __mmask16 negatives[4], near_whole[4];
        for (int k = 0; k < 4; ++k) {
            const __m512 quotient = _mm512_mul_ps(_mm512_loadu_ps(values + i + 16 * k), factor);
            // Without signs whatever is negative has zero's code.
            const __m512 magnitude = is_signed ? _mm512_range_ps(quotient, smallest, 0xb)  // larger
                                               : _mm512_max_ps(quotient, smallest);
            if (is_signed) negatives[k] = _mm512_movepi32_mask(_mm512_castps_si512(quotient));
            const __m512i bits = _mm512_castps_si512(magnitude);
            const __m512i begin =
                _mm512_permutex2var_epi32(begins[0], _mm512_srli_epi32(bits, 23), begins[1]);
            const __m512i past = _mm512_sub_epi32(bits, begin);
            const __mmask16 is_before = _mm512_cmplt_epi32_mask(past, near_begin);
            const __m512i decade = _mm512_mask_sub_epi32(begin, is_before, begin, one);
            const __m512 sum = _mm512_fmadd_ps(magnitude, _mm512_permutexvar_ps(decade, factors),
                                               _mm512_permutexvar_ps(decade, offsets));
            const __m512i place =
                _mm512_min_epi32(_mm512_castps_si512(sum), _mm512_permutexvar_epi32(decade, most));
            nearest_begin = _mm512_min_epu32(nearest_begin, past);
            near_whole[k] = _mm512_testn_epi32_mask(place, fraction);
            wholes[k] = _mm512_srli_epi32(place, kFraction);
        }
        __m512i found = packed(wholes);
        if (is_signed) {
            // Of negatives there is no number beyond the last; saturation sees to that.
            found =
                _mm512_mask_subs_epu8(_mm512_add_epi8(found, zero), joined(negatives), zero, found);
        }
        _mm512_storeu_si512(codes + i, found);
        std::uint64_t lanes = joined(near_whole);
        if (_mm512_cmple_epu32_mask(nearest_begin, begins_end) != 0) lanes = UINT64_MAX;
        for (; lanes != 0; lanes &= lanes - 1) {
            const std::size_t at = i + static_cast<std::size_t>(__builtin_ctzll(lanes));
            encode_portable(values + at, scale, codes + at, 1);
        }
    }
    return num_done;
}

namespace {

// Of 64 numbers in four registers those of codes, whose lower six bits count.
FUYOU_AVX512 inline __m512 one_of_64(const __m512* table, __m512i code, __mmask16 by32)
{
    const __m512 low = _mm512_permutex2var_ps(table[0], code, table[1]);
    const __m512 high = _mm512_permutex2var_ps(table[2], code, table[3]);
    return _mm512_mask_blend_ps(by32, low, high);
}

FUYOU_AVX512 inline __mmask16 has_bit(__m512i code, int bit)
{
    return _mm512_test_epi32_mask(code, _mm512_set1_epi32(bit));
}

FUYOU_AVX512 inline __m512i load_codes(const std::uint8_t* codes)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

}  // namespace

// All numbers are in registers: looked up there, not in memory. Negatives are as positives are.
FUYOU_AVX512 std::size_t CodeMap::decode_signed_avx512(const std::uint8_t* codes, float scale,
                                                       float* values, std::size_t numel) const
{
    __m512 table[8];
    for (int i = 0; i < 8; ++i) table[i] = _mm512_loadu_ps(numbers.data() + 127 + 16 * i);
    const __m512 factor = _mm512_set1_ps(scale), one = _mm512_set1_ps(1.0F);
    const __m512i zero = _mm512_set1_epi32(127), signs = _mm512_set1_epi32(INT32_MIN);
    const std::size_t num_done = numel / 16 * 16;
    for (std::size_t i = 0; i < num_done; i += 16) {
        const __m512i from_zero = _mm512_sub_epi32(load_codes(codes + i), zero);
        const __m512i code = _mm512_abs_epi32(from_zero);
        const __mmask16 by32 = has_bit(code, 32);
        const __m512 number = _mm512_mask_blend_ps(has_bit(code, 64), one_of_64(table, code, by32),
                                                   one_of_64(table + 4, code, by32));
        const __m512 magnitude = _mm512_mask_blend_ps(has_bit(code, 128), number, one);
        const __m512 with_sign = _mm512_castsi512_ps(
            _mm512_or_si512(_mm512_castps_si512(magnitude), _mm512_and_si512(from_zero, signs)));
        _mm512_storeu_ps(values + i, _mm512_mul_ps(with_sign, factor));
    }
    return num_done;
}

FUYOU_AVX512 std::size_t CodeMap::decode_unsigned_avx512(const std::uint8_t* codes, float scale,
                                                         float* values, std::size_t numel) const
{
    __m512 table[16];
    for (int i = 0; i < 16; ++i) table[i] = _mm512_load_ps(numbers.data() + 16 * i);
    const __m512 factor = _mm512_set1_ps(scale);
    const std::size_t num_done = numel / 16 * 16;
    for (std::size_t i = 0; i < num_done; i += 16) {
        const __m512i code = load_codes(codes + i);
        const __mmask16 by32 = has_bit(code, 32), by64 = has_bit(code, 64);
        const __m512 low = _mm512_mask_blend_ps(by64, one_of_64(table, code, by32),
                                                one_of_64(table + 4, code, by32));
        const __m512 high = _mm512_mask_blend_ps(by64, one_of_64(table + 8, code, by32),
                                                 one_of_64(table + 12, code, by32));
        const __m512 number = _mm512_mask_blend_ps(has_bit(code, 128), low, high);
        _mm512_storeu_ps(values + i, _mm512_mul_ps(number, factor));
    }
    return num_done;
}

namespace {

// So that what is put together from bytes stands in order.
FUYOU_VBMI inline __m512i in_order(const std::uint8_t* codes)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes));
}

// Where `mask` says so what `table` has at the lowest six bits of `code`.
FUYOU_VBMI inline __m512i looked_up(__m512i otherwise, __mmask64 mask, __m512i code,
                                    const std::uint8_t* table)
{
    return _mm512_mask_permutexvar_epi8(otherwise, mask, code, _mm512_load_si512(table));
}

// 64 products of numbers, of which there are the bytes, the lowest first.
FUYOU_VBMI inline void put_together(const __m512i* bytes, __m512 factor, float* to)
{
    const __m512i lower[2] = {_mm512_unpacklo_epi8(bytes[0], bytes[1]),
                              _mm512_unpackhi_epi8(bytes[0], bytes[1])};
    const __m512i upper[2] = {_mm512_unpacklo_epi8(bytes[2], bytes[3]),
                              _mm512_unpackhi_epi8(bytes[2], bytes[3])};
    for (int k = 0; k < 2; ++k, to += 32) {
        const __m512i first = _mm512_unpacklo_epi16(lower[k], upper[k]);
        const __m512i second = _mm512_unpackhi_epi16(lower[k], upper[k]);
        _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_castsi512_ps(first), factor));
        _mm512_storeu_ps(to + 16, _mm512_mul_ps(_mm512_castsi512_ps(second), factor));
    }
}

}  // namespace

// Negatives are as positives are; one is none of the 128 magnitudes that are looked up.
FUYOU_VBMI std::size_t CodeMap::decode_signed_vbmi(const std::uint8_t* codes, float scale,
                                                   float* values, std::size_t numel) const
{
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512i zero = _mm512_set1_epi8(127), bit6 = _mm512_set1_epi8(64);
    const __m512i bit7 = _mm512_set1_epi8(INT8_MIN), first_of_one = _mm512_set1_epi8(kOne >> 24);
    const std::size_t num_done = numel / 64 * 64;
    for (std::size_t i = 0; i < num_done; i += 64) {
        const __m512i from_zero = _mm512_sub_epi8(in_order(codes + i), zero);
        const __m512i code = _mm512_abs_epi8(from_zero);
        const __mmask64 by64 = _mm512_test_epi8_mask(code, bit6);
        const __mmask64 is_one = _mm512_movepi8_mask(code);
        __m512i bytes[4];
        for (std::size_t k = 0; k < 4; ++k) {
            const std::uint8_t* table = bytes_[k].data();
            bytes[k] = _mm512_permutexvar_epi8(code, _mm512_load_si512(table));
            bytes[k] = looked_up(bytes[k], by64, code, table + 64);
        }
        bytes[3] = _mm512_or_si512(bytes[3], _mm512_and_si512(from_zero, bit7));
        bytes[3] = _mm512_mask_mov_epi8(bytes[3], is_one, first_of_one);
        bytes[2] = _mm512_mask_mov_epi8(bytes[2], is_one, bit7);
        put_together(bytes, factor, values + i);
    }
    return num_done;
}

FUYOU_VBMI std::size_t CodeMap::decode_unsigned_vbmi(const std::uint8_t* codes, float scale,
                                                     float* values, std::size_t numel) const
{
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512i bit6 = _mm512_set1_epi8(64);
    const std::size_t num_done = numel / 64 * 64;
    for (std::size_t i = 0; i < num_done; i += 64) {
        const __m512i code = in_order(codes + i);
        const __mmask64 by64 = _mm512_test_epi8_mask(code, bit6);
        const __mmask64 by128 = _mm512_movepi8_mask(code);
        __m512i bytes[4];
        for (std::size_t k = 0; k < 4; ++k) {
            const std::uint8_t* table = bytes_[k].data();
            bytes[k] = _mm512_permutexvar_epi8(code, _mm512_load_si512(table));
            bytes[k] = looked_up(bytes[k], by64, code, table + 64);
            bytes[k] = looked_up(bytes[k], by128, code, table + 128);
            bytes[k] = looked_up(bytes[k], by64 & by128, code, table + 192);
        }
        put_together(bytes, factor, values + i);
    }
    return num_done;
}

#endif

}  // namespace fuyou
