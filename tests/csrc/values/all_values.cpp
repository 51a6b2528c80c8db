// SPDX-License-Identifier: Apache-2.0
//
// Every one of the 2^32 bit patterns of P32, split by an update and put together again; the 8-bit
// code of every quotient, by vectors and without: `make values`.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/code_map.h"
#include "pipeline/state_block.h"

using namespace fuyou;

namespace {

constexpr std::uint64_t kNumel = 1 << 16;  // all lower halves of one upper half

class NoRule final : public UpdateRule {
  public:
    void apply(float*, float*, float* const*, std::size_t) const override {}
};

struct Counts {
    std::uint64_t wrong = 0;       // came back otherwise
    std::uint64_t misrounded = 0;  // P16 is not what an update of a whole block leaves
    std::uint64_t joints = 0;
    std::uint64_t kept = 0;  // blocks that had too many, and kept their upper halves
};

void check(std::uint32_t high, Counts& counts)
{
    // One moment, as Lion has: [P32 | moment], [high | joints | low | moment].
    const std::uint64_t part = kNumel * 4, half = kNumel * 2, low = half + kPageBytes;
    const BlockLayout whole{kNumel, 1, false, 0, 0, 0, {part, 0}, 2 * part};
    const BlockLayout split{kNumel, 1, true, 0, half, low, {low + half, 0}, low + half + part};
    thread_local std::vector<char> from(whole.num_bytes), to(split.num_bytes), back(part);
    thread_local std::vector<float> gradient(kNumel);
    thread_local std::vector<std::uint16_t> param16(kNumel), rounded(kNumel);
    auto* bits = reinterpret_cast<std::uint32_t*>(from.data());
    for (std::uint32_t i = 0; i < kNumel; ++i) bits[i] = high << 16 | i;
    BlockUpdate how;
    how.from = {from.data(), whole};
    how.to = {to.data(), split};
    how.gradient = reinterpret_cast<const char*>(gradient.data());
    how.gradient_type = ElementType::kFloat32;
    how.param16 = reinterpret_cast<char*>(param16.data());
    const BlockForm form = update_block(how, {{0, kNumel, std::make_shared<NoRule>()}}).form;
    const char* params = form.has_high ? nullptr : how.param16;
    BlockLayout alone = whole;
    alone.num_moments = 0;
    if (!decode_block(how.to, params, {back.data(), alone})) counts.wrong += kNumel;
    for (std::uint64_t i = 0; i < kNumel; ++i)
        counts.wrong += std::memcmp(&bits[i], back.data() + i * 4, 4) != 0;
    narrow_parameter(ElementType::kBFloat16, reinterpret_cast<float*>(from.data()), rounded.data(),
                     kNumel);
    for (std::uint64_t i = 0; i < kNumel; ++i) counts.misrounded += rounded[i] != param16[i];
    counts.joints += form.is_joinable ? how.to.joints()->num : 0;
    counts.kept += form.has_high ? 1 : 0;
}

// Quotients, those from 0 to 1 and their negatives, that a path of vectors codes otherwise than the
// portable one, which is compared with what defines codes.
std::uint64_t num_miscoded(bool is_signed)
{
    constexpr std::int32_t kNumRuns = (0x3f800000 >> 16) + 1;
    const CodeMap& map = CodeMap::of(is_signed);
    std::uint64_t wrong = 0;
#pragma omp parallel for reduction(+ : wrong)
    for (std::int32_t high = 0; high < kNumRuns; ++high) {
        thread_local std::vector<float> quotients(kNumel);
        thread_local std::vector<std::uint8_t> expected(kNumel), codes(kNumel);
        for (std::uint32_t sign = 0; sign < 2; ++sign) {
            for (std::uint32_t low = 0; low < kNumel; ++low) {
                const std::uint32_t bits = static_cast<std::uint32_t>(high) << 16 | low;
                const std::uint32_t one = sign << 31 | (bits < 0x3f800000U ? bits : 0x3f800000U);
                std::memcpy(&quotients[low], &one, sizeof one);
            }
            map.encode(quotients.data(), 1.0F, expected.data(), kNumel, CodePath::kPortable);
            for (std::uint64_t i = 0; i < kNumel; ++i)
                wrong += expected[i] != map.nearest(quotients[i]);
            for (const CodePath path : {CodePath::kAvx2, CodePath::kAvx512, CodePath::kVbmi}) {
                if (path > best_code_path()) continue;
                map.encode(quotients.data(), 1.0F, codes.data(), kNumel, path);
                for (std::uint64_t i = 0; i < kNumel; ++i) wrong += codes[i] != expected[i];
            }
        }
    }
    return wrong;
}

}  // namespace

int main()
{
    const std::uint64_t miscoded = num_miscoded(true) + num_miscoded(false);
    std::printf("all quotients: %llu got another code\n",
                static_cast<unsigned long long>(miscoded));
    Counts all;
#pragma omp parallel
    {
        Counts own;
#pragma omp for
        for (std::int32_t high = 0; high < 1 << 16; ++high)
            check(static_cast<std::uint32_t>(high), own);
#pragma omp critical
        {
            all.wrong += own.wrong;
            all.misrounded += own.misrounded;
            all.joints += own.joints;
            all.kept += own.kept;
        }
    }
    std::printf(
        "2^32 values: %llu came back otherwise, %llu were rounded otherwise; %llu joints, "
        "%llu blocks with upper halves\n",
        static_cast<unsigned long long>(all.wrong), static_cast<unsigned long long>(all.misrounded),
        static_cast<unsigned long long>(all.joints), static_cast<unsigned long long>(all.kept));
    const bool is_right = miscoded == 0 && all.wrong == 0 && all.misrounded == 0;
    return is_right && all.joints > 0 && all.kept > 0 ? 0 : 1;
}
