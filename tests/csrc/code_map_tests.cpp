// SPDX-License-Identifier: Apache-2.0
//
// Codes by vectors against those by division and a table: around every place where a code begins,
// whatever the scale, and elsewhere. `make values` has every quotient.
#include "kernels/code_map.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "harness.h"

using namespace fuyou;

namespace {

std::vector<CodePath> vector_paths()
{
    std::vector<CodePath> paths;
    for (const CodePath path : {CodePath::kAvx2, CodePath::kAvx512, CodePath::kVbmi})
        if (path <= best_code_path()) paths.push_back(path);
    return paths;
}

// Elements that a path codes, or decodes, otherwise than the portable one does.
std::size_t num_wrong(const CodeMap& map, const std::vector<float>& values, float scale)
{
    const std::size_t numel = values.size();
    std::vector<std::uint8_t> expected(numel), codes(numel);
    std::vector<float> meant(numel), found(numel);
    map.encode(values.data(), scale, expected.data(), numel, CodePath::kPortable);
    map.decode(expected.data(), scale, meant.data(), numel, CodePath::kPortable);
    std::size_t wrong = 0;
    for (const CodePath path : vector_paths()) {
        map.encode(values.data(), scale, codes.data(), numel, path);
        map.decode(expected.data(), scale, found.data(), numel, path);
        for (std::size_t i = 0; i < numel; ++i)
            wrong += codes[i] != expected[i] || std::memcmp(&found[i], &meant[i], 4) != 0;
    }
    return wrong;
}

}  // namespace

TEST(codes_of_vectors_are_those_of_the_portable_path)
{
    std::mt19937 random(9);
    const float inf = std::numeric_limits<float>::infinity();
    std::vector<float> scales = {1.0F,    1e-12F, 0x1p99F,      0x1.fffffep100F,
                                 3.4e38F, inf,    std::nanf("")};
    for (int i = 0; i < 60; ++i)
        scales.push_back(
            std::max(1e-12F, std::ldexp(1.0F + static_cast<float>(random() >> 9) / 8388608.0F,
                                        static_cast<int>(random() % 140) - 40)));
    for (const bool is_signed : {true, false}) {
        const CodeMap& map = CodeMap::of(is_signed);
        for (const float scale : scales) {
            std::vector<float> values = {0.0F, -0.0F, scale, 1e-45F, 1e-38F};
            const auto add = [&](float value) {
                for (const float one : {value, -value})
                    if (!(std::fabs(one) > scale)) values.push_back(one);
            };
            for (std::size_t i = 0; i < 255; ++i) {
                const float middle = (map.numbers[i] + map.numbers[i + 1]) / 2 * scale;
                for (const float edge : {middle, map.numbers[i] * scale}) {
                    float low = edge, high = edge;
                    for (int step = 0; step < 12; ++step) {
                        add(low);
                        add(high);
                        low = std::nextafter(low, -inf);
                        high = std::nextafter(high, inf);
                    }
                }
            }
            for (int i = 0; i < 20000; ++i)
                add(scale * std::ldexp(static_cast<float>(random() >> 8) / 16777216.0F,
                                       -static_cast<int>(random() % 30)));
            values.push_back(-scale);
            CHECK(num_wrong(map, values, scale) == 0);
        }
    }
}

TEST(codes_of_short_runs_touch_nothing_behind)
{
    for (const bool is_signed : {true, false}) {
        const CodeMap& map = CodeMap::of(is_signed);
        for (const CodePath path : vector_paths()) {
            for (std::size_t numel = 0; numel < 140; ++numel) {
                std::vector<float> values(numel, 0.37F), found(numel + 64, 5.0F);
                std::vector<std::uint8_t> codes(numel + 64, 77);
                map.encode(values.data(), 1.0F, codes.data(), numel, path);
                map.decode(codes.data(), 1.0F, found.data(), numel, path);
                const std::uint8_t code = static_cast<std::uint8_t>(map.nearest(0.37F));
                CHECK(std::count(codes.begin(), codes.begin() + static_cast<long>(numel), code) ==
                      static_cast<long>(numel));
                CHECK(std::count(codes.begin() + static_cast<long>(numel), codes.end(), 77) == 64);
                CHECK(std::count(found.begin() + static_cast<long>(numel), found.end(), 5.0F) ==
                      64);
            }
        }
    }
}
