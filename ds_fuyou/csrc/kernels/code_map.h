// SPDX-License-Identifier: Apache-2.0
//
// The 256 numbers that 8-bit codes stand for, and the code of any quotient; see [Note: codes] in
// moments.h.
//
// [Note: codes by arithmetic]
// nearest() says what the code of a quotient is. Every path gives the same codes. The portable one
// divides and looks up, by the upper half of the quotient, a code and the one place where the next
// code begins. Those of vectors multiply by the reciprocal of the scale, which is wrong by some
// last bits. Nor have they a table of codes in memory: the numbers of a decade are the middles of a
// linear grid, so a code is a product and a sum, whose factors are in registers. With AVX2, whose
// registers hold eight of these, the decade is told by a product of the quotient's upper half,
// which changes in the middle of decades, and by where the next one begins.
// Whatever comes close to where another code begins, by more than both can be wrong, is coded the
// portable way, one in some thousand. `make values` compares all quotients.
//
// [Note: numbers by arithmetic]
// Numbers are looked up in registers with AVX-512, and with VBMI byte by byte, which takes half the
// instructions. With AVX2 sixteen registers would not hold them. There a decade has twice the codes
// of the one before, so a code counted from zero's (without signs: from the one before it) is the
// power of two that is its decade, and what is left the place in it. A factor and an offset of the
// decade make of this the number less 0 to 3 last bits, of which there is a table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fuyou {

// Each has what those before it have.
enum class CodePath { kPortable, kAvx2, kAvx512, kVbmi };

// The best that this CPU has.
CodePath best_code_path();

class CodeMap {
  public:
    static const CodeMap& of(bool is_signed);
    explicit CodeMap(bool is_signed);

    // The code of `quotient`, the slow way.
    std::uint32_t nearest(float quotient) const;
    // Of values whose magnitude is `scale` at most, or scale is NaN.
    void encode(const float* values, float scale, std::uint8_t* codes, std::size_t numel,
                CodePath path) const;
    void decode(const std::uint8_t* codes, float scale, float* values, std::size_t numel,
                CodePath path) const;

    alignas(64) std::array<float, 256> numbers;  // ascending

  private:
    // Upper halves from that of the smallest number's half on, up to that of one; what is smaller
    // is in the first bucket, and NaN in the last.
    static constexpr std::int32_t kFirst = 0x33ff, kBuckets = 0x3f80 - kFirst + 2;
    static constexpr int kPlaceBits = 17;  // of the lower half where the next code begins
    static constexpr std::uint32_t kPlaceMask = (1U << kPlaceBits) - 1, kNoPlace = 0x10000U;

    void make_buckets();
    void make_lines();
    void make_grids();
    bool fit_grid(int decade, int by_factor, int by_offset);
    // How many codes it has, of those between zero and one.
    std::uint32_t num_of(int decade) const { return (is_signed_ ? 1U : 2U) << (decade - 1); }
    std::uint32_t first_of(std::uint32_t code) const;

    void encode_portable(const float* values, float scale, std::uint8_t* codes,
                         std::size_t numel) const;
    void decode_portable(const std::uint8_t* codes, float scale, float* values,
                         std::size_t numel) const;
    // What follows does as many whole vectors as there are, and says how many elements these were.
    std::size_t encode_avx2(const float* values, float scale, std::uint8_t* codes,
                            std::size_t numel) const;
    std::size_t decode_avx2(const std::uint8_t* codes, float scale, float* values,
                            std::size_t numel) const;
    std::size_t encode_avx512(const float* values, float scale, std::uint8_t* codes,
                              std::size_t numel) const;
    std::size_t decode_signed_avx512(const std::uint8_t* codes, float scale, float* values,
                                     std::size_t numel) const;
    std::size_t decode_unsigned_avx512(const std::uint8_t* codes, float scale, float* values,
                                       std::size_t numel) const;
    std::size_t decode_signed_vbmi(const std::uint8_t* codes, float scale, float* values,
                                   std::size_t numel) const;
    std::size_t decode_unsigned_vbmi(const std::uint8_t* codes, float scale, float* values,
                                     std::size_t numel) const;

    bool is_signed_;
    // Of numbers, the lowest first; where there are signs, of those from zero on.
    alignas(64) std::array<std::array<std::uint8_t, 256>, 4> bytes_;
    alignas(64) std::array<std::uint32_t, 2 * kBuckets> buckets_;

    // A magnitude in the decade of number d (0: what is nearest to zero, 8: to one) has the code,
    // counted from zero's, that stands before the point of factor * magnitude + offset, in units of
    // 2^-kFraction, `most` at most.
    static constexpr int kFraction = 15, kDecades = 9;
    struct Lines {
        // By the lowest bits of the exponent: where a decade begins, or will have, less kNearBegin;
        // its number in the last four bits.
        alignas(64) std::array<std::uint32_t, 32> begins;
        alignas(64) std::array<float, 16> factors;
        // By its number: where the next one begins, less kNearBegin.
        alignas(64) std::array<std::int32_t, 8> starts;
        // With kMagic, so that sums are whole numbers, and kNearWhole.
        alignas(64) std::array<float, 16> offsets;
        alignas(64) std::array<std::uint32_t, 16> most;  // bits, with kMagic
    };
    Lines lines_;

    // By the lowest bits of the exponent of a place's power of two; and of each code, counted from
    // zero's, what its number is more than the line has, two bits each.
    struct Grids {
        alignas(32) std::array<float, 8> factors;
        alignas(32) std::array<float, 8> offsets;
        alignas(64) std::array<std::uint32_t, 16> rests;
    };
    Grids grids_ = {};
    // Where a decade's are, by the power of two that its places begin with.
    std::size_t grid_of(int decade) const
    {
        return static_cast<std::size_t>(127 + (is_signed_ ? decade - 1 : decade)) % 8;
    }
};

}  // namespace fuyou
