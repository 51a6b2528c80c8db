// SPDX-License-Identifier: Apache-2.0
#include "kernels/moments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

#include "kernels/code_numbers.h"
#include "kernels/elementwise.h"

namespace fuyou {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffU, kInfinity = 0x7f800000U, kNan = 0x7fc00000U;
constexpr float kLeastScale = 1e-12F;

float from_bits(std::uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

std::uint32_t to_bits(float value)
{
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The numbers, and codes by the upper half of a quotient.
class CodeMap {
  public:
    explicit CodeMap(bool is_signed)
    {
        const std::uint32_t* bits = is_signed ? kSignedNumbers : kUnsignedNumbers;
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = from_bits(bits[i]);
        make_buckets();
    }

    // The code of `quotient`, the slow way, which says what a code is.
    std::uint32_t nearest(float quotient) const
    {
        std::uint32_t code = 0;  // the last number that is not above; of NaN the first
        for (std::uint32_t half = 128; half > 0; half /= 2)
            if (quotient >= numbers[code + half]) code += half;
        const std::uint32_t next = std::min<std::uint32_t>(code + 1, 255);
        const float distance = quotient - numbers[code];
        return distance >= (numbers[next] - numbers[code]) * 0.5F ? next : code;
    }

    // As nearest(). Without a condition in its body, so that compilers can make it one of vectors.
    void encode(const float* values, float scale, std::uint8_t* codes, std::size_t numel) const
    {
        std::size_t i = encode_vectors(values, scale, codes, numel);
        for (; i < numel; ++i) {
            const std::uint32_t bits = to_bits(values[i] / scale), magnitude = bits & kMagnitude;
            const std::int32_t sign = static_cast<std::int32_t>(bits) >> 31;  // 0 or -1
            const std::int32_t place = static_cast<std::int32_t>(magnitude >> 16) - kFirst;
            const std::int32_t bucket = std::min(std::max(place, 0), kBuckets - 1);
            const std::uint32_t entry = buckets_[bucket + (sign & kBuckets)];
            const std::int32_t is_past = (magnitude & 0xffffU) >= (entry & kPlaceMask) ? 1 : 0;
            const std::int32_t step = (is_past ^ sign) - sign;  // codes fall as negatives grow
            codes[i] =
                static_cast<std::uint8_t>(static_cast<std::int32_t>(entry >> kPlaceBits) + step);
        }
    }

    void decode(const std::uint8_t* codes, float scale, float* values, std::size_t numel) const
    {
        std::size_t i = decode_vectors(codes, scale, values, numel);
        for (; i < numel; ++i) values[i] = numbers[codes[i]] * scale;
    }

    alignas(64) std::array<float, 256> numbers;

  private:
#if defined(__AVX512BW__)

    // What follows does as many whole vectors as there are, and says how many elements these were.
    std::size_t encode_vectors(const float* values, float scale, std::uint8_t* codes,
                               std::size_t numel) const
    {
        const __m512 divisor = _mm512_set1_ps(scale);
        const __m512i magnitudes = _mm512_set1_epi32(static_cast<int>(kMagnitude));
        const __m512i first = _mm512_set1_epi32(kFirst), last = _mm512_set1_epi32(kBuckets - 1);
        const __m512i lower = _mm512_set1_epi32(0xffff), other = _mm512_set1_epi32(kBuckets);
        const __m512i places = _mm512_set1_epi32(static_cast<int>(kPlaceMask));
        const __m512i one = _mm512_set1_epi32(1), none = _mm512_setzero_si512();
        const std::size_t num_done = numel / 16 * 16;
        for (std::size_t i = 0; i < num_done; i += 16) {
            const __m512 quotient = _mm512_div_ps(_mm512_loadu_ps(values + i), divisor);
            const __m512i bits = _mm512_castps_si512(quotient);
            const __m512i magnitude = _mm512_and_si512(bits, magnitudes);
            const __mmask16 is_negative = _mm512_movepi32_mask(bits);
            const __m512i place = _mm512_sub_epi32(_mm512_srli_epi32(magnitude, 16), first);
            const __m512i bucket = _mm512_min_epi32(_mm512_max_epi32(place, none), last);
            const __m512i at = _mm512_mask_add_epi32(bucket, is_negative, bucket, other);
            const __m512i entry = _mm512_i32gather_epi32(at, buckets_.data(), 4);
            const __mmask16 is_past = _mm512_cmpge_epu32_mask(_mm512_and_si512(magnitude, lower),
                                                              _mm512_and_si512(entry, places));
            const __m512i begin = _mm512_srli_epi32(entry, kPlaceBits);
            const __mmask16 is_more = is_past & static_cast<__mmask16>(~is_negative);
            const __m512i more = _mm512_mask_add_epi32(begin, is_more, begin, one);
            const __m512i code = _mm512_mask_sub_epi32(more, is_past & is_negative, more, one);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
        }
        return num_done;
    }

    // All numbers are in registers: looked up there, not in memory.
    std::size_t decode_vectors(const std::uint8_t* codes, float scale, float* values,
                               std::size_t numel) const
    {
        __m512 table[16];
        for (int i = 0; i < 16; ++i) table[i] = _mm512_load_ps(numbers.data() + 16 * i);
        const __m512 factor = _mm512_set1_ps(scale);
        const std::size_t num_done = numel / 16 * 16;
        for (std::size_t i = 0; i < num_done; i += 16) {
            const __m512i code =
                _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
            const auto bit = [&](int value) {
                return _mm512_test_epi32_mask(code, _mm512_set1_epi32(value));
            };
            const __mmask16 by32 = bit(32), by64 = bit(64), by128 = bit(128);
            const auto of = [&](int pair) {  // the 32 numbers of two registers
                return _mm512_permutex2var_ps(table[2 * pair], code, table[2 * pair + 1]);
            };
            const auto of64 = [&](int pair) {
                return _mm512_mask_blend_ps(by32, of(pair), of(pair + 1));
            };
            const auto of128 = [&](int pair) {
                return _mm512_mask_blend_ps(by64, of64(pair), of64(pair + 2));
            };
            const __m512 number = _mm512_mask_blend_ps(by128, of128(0), of128(4));
            _mm512_storeu_ps(values + i, _mm512_mul_ps(number, factor));
        }
        return num_done;
    }

#else

    std::size_t encode_vectors(const float*, float, std::uint8_t*, std::size_t) const { return 0; }
    std::size_t decode_vectors(const std::uint8_t*, float, float*, std::size_t) const { return 0; }

#endif

    // Upper halves from that of the smallest number's half on, up to that of one; what is smaller
    // is in the first bucket, and NaN in the last.
    static constexpr std::int32_t kFirst = 0x33ff, kBuckets = 0x3f80 - kFirst + 2;
    static constexpr int kPlaceBits = 17;  // of the lower half where the next code begins
    static constexpr std::uint32_t kPlaceMask = (1U << kPlaceBits) - 1, kNoPlace = 0x10000U;

    void make_buckets()
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

    alignas(64) std::array<std::uint32_t, 2 * kBuckets> buckets_;
};

const CodeMap& map_of(bool is_signed)
{
    static const CodeMap with(true), without(false);
    return is_signed ? with : without;
}

std::uint32_t largest_magnitude(const float* values, std::size_t numel)
{
    std::uint32_t largest = 0;  // magnitudes are ordered as their bits are, NaN above all
    for (std::size_t i = 0; i < numel; ++i)
        largest = std::max(largest, to_bits(values[i]) & kMagnitude);
    return largest;
}

float scale_of(const float* values, std::size_t numel)
{
    const std::uint32_t largest = std::max(largest_magnitude(values, numel), to_bits(kLeastScale));
    return from_bits(largest > kInfinity ? kNan : largest);
}

// Whether `values` are codes under `scale`; `codes` are nearest to them in any case.
bool are_codes(const CodeMap& map, const float* values, float scale, std::uint8_t* codes,
               std::size_t numel)
{
    float found[kCodeBlock];
    map.encode(values, scale, codes, numel);
    map.decode(codes, scale, found, numel);
    return std::memcmp(found, values, numel * sizeof(float)) == 0;
}

// One block of values from outside; its scale.
float encode_exactly(const CodeMap& map, const float* values, std::uint8_t* codes,
                     std::size_t numel)
{
    const float scale = scale_of(values, numel);
    if (are_codes(map, values, scale, codes, numel)) return scale;
    // The largest number is one or, of negatives, somewhat less: the scale was larger.
    const float end = -map.numbers[0];
    if (end > 0.0F && std::isfinite(scale)) {
        const std::uint32_t near = to_bits(scale / end);
        for (std::uint32_t bits = near - 2; bits <= near + 2; ++bits)
            if (are_codes(map, values, from_bits(bits), codes, numel)) return from_bits(bits);
    }
    map.encode(values, scale, codes, numel);
    return scale;
}

template <class Each>  // Each(block, first element, elements)
void for_blocks(std::size_t numel, const Each& each)
{
    for (std::size_t begin = 0; begin < numel; begin += kCodeBlock)
        each(begin / kCodeBlock, begin, std::min(kCodeBlock, numel - begin));
}

}  // namespace

const float* code_values(bool is_signed)
{
    return map_of(is_signed).numbers.data();
}

void load_moment(const StoredMoment& from, float* to, std::size_t numel)
{
    switch (from.type) {
        case MomentType::kFloat32:
            std::memcpy(to, from.values, numel * sizeof(float));
            break;
        case MomentType::kBFloat16:
            widen_bfloat16(reinterpret_cast<const std::uint16_t*>(from.values), to, numel);
            break;
        case MomentType::kInt8: {
            const CodeMap& map = map_of(from.is_signed);
            const auto* codes = reinterpret_cast<const std::uint8_t*>(from.values);
            for_blocks(numel, [&](std::size_t block, std::size_t begin, std::size_t num) {
                const float scale = from.scales[block];
                if (scale == 0.0F) {
                    std::fill_n(to + begin, num, 0.0F);
                } else {
                    map.decode(codes + begin, scale, to + begin, num);
                }
            });
            break;
        }
    }
}

void store_moment(float* values, const StoredMoment& to, std::size_t numel)
{
    switch (to.type) {
        case MomentType::kFloat32:
            std::memcpy(to.values, values, numel * sizeof(float));
            break;
        case MomentType::kBFloat16: {
            auto* stored = reinterpret_cast<std::uint16_t*>(to.values);
            narrow_parameter(ElementType::kBFloat16, values, stored, numel);
            widen_bfloat16(stored, values, numel);
            break;
        }
        case MomentType::kInt8: {
            const CodeMap& map = map_of(to.is_signed);
            auto* codes = reinterpret_cast<std::uint8_t*>(to.values);
            for_blocks(numel, [&](std::size_t block, std::size_t begin, std::size_t num) {
                const float scale = scale_of(values + begin, num);
                map.encode(values + begin, scale, codes + begin, num);
                map.decode(codes + begin, scale, values + begin, num);
                to.scales[block] = scale;
            });
            break;
        }
    }
}

void store_moment_exactly(const float* values, const StoredMoment& to, std::size_t numel)
{
    if (to.type == MomentType::kFloat32) {
        std::memcpy(to.values, values, numel * sizeof(float));
    } else if (to.type == MomentType::kBFloat16) {
        narrow_parameter(ElementType::kBFloat16, values, to.values, numel);
    } else {
        const CodeMap& map = map_of(to.is_signed);
        auto* codes = reinterpret_cast<std::uint8_t*>(to.values);
        for_blocks(numel, [&](std::size_t block, std::size_t begin, std::size_t num) {
            to.scales[block] = encode_exactly(map, values + begin, codes + begin, num);
        });
    }
}

void copy_moment(const StoredMoment& from, const StoredMoment& to, std::size_t numel)
{
    const std::size_t bytes_each = from.type == MomentType::kFloat32    ? 4
                                   : from.type == MomentType::kBFloat16 ? 2
                                                                        : 1;
    std::memcpy(to.values, from.values, numel * bytes_each);
    if (from.type == MomentType::kInt8)
        std::copy_n(from.scales, (numel + kCodeBlock - 1) / kCodeBlock, to.scales);
}

}  // namespace fuyou
