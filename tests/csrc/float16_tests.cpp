// SPDX-License-Identifier: Apache-2.0
//
// Half precision without a type or an instruction for it is that of those who have one.
#include "kernels/float16.h"

#include "harness.h"

using namespace fuyou;

TEST(float16_every_half_is_the_same_float_by_arithmetic)
{
    for (std::uint32_t half = 0; half < 0x10000U; ++half) {
        const auto bits = static_cast<std::uint16_t>(half);
        CHECK(to_bits(half_to_float_portable(bits)) == to_bits(half_to_float(bits)));
    }
}

TEST(float16_every_float_is_rounded_to_the_same_half_by_arithmetic)
{
    // All signs, exponents and kept bits of the mantissa; of the others those next to ties.
    for (std::uint32_t high = 0; high < 0x80000U; ++high) {
        for (const std::uint32_t low : {0x0U, 0x1U, 0xfffU, 0x1000U, 0x1001U, 0x1fffU}) {
            const float value = from_bits(high << 13 | low);
            CHECK(float_to_half_portable(value) == float_to_half(value));
        }
    }
    // Subnormal halves drop more bits than that.
    for (std::uint32_t bits = 0x32000000U; bits < 0x39000000U; bits += 0x7fU) {
        CHECK(float_to_half_portable(from_bits(bits)) == float_to_half(from_bits(bits)));
    }
}
