// SPDX-License-Identifier: Apache-2.0
#include "pipeline/update_team.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "harness.h"
#include "pipeline/state_block.h"

using namespace fuyou;

namespace {

// Takes the gradient; where there is none it refuses.
class TakeRule final : public UpdateRule {
  public:
    void apply(float* param, float* gradient, float* const*, std::size_t numel) const override
    {
        for (std::size_t i = 0; i < numel; ++i) {
            if (gradient[i] < 0.0F) throw std::runtime_error("a gradient that is refused");
            param[i] = gradient[i];
        }
    }
};

}  // namespace

TEST(a_team_of_several_works_at_the_same_time)
{
    UpdateTeam team(3);
    std::mutex mutex;
    std::condition_variable came;
    int num_there = 0;
    team.run([&] {
        std::unique_lock<std::mutex> lock(mutex);
        ++num_there;
        came.notify_all();
        came.wait(lock, [&] { return num_there == 3; });
    });
    CHECK(num_there == 3);
}

TEST(everybody_of_a_team_has_left_when_run_returns_and_work_is_done_once)
{
    UpdateTeam team(4);
    for (int round = 0; round < 3000; ++round) {
        std::atomic<int> num_inside{0}, next{0};
        std::vector<int> num_done(static_cast<std::size_t>(round % 7), 0);
        const int num = static_cast<int>(num_done.size());
        team.run([&] {
            ++num_inside;
            for (int i = next++; i < num; i = next++) ++num_done[static_cast<std::size_t>(i)];
            --num_inside;
        });
        CHECK(num_inside == 0);
        CHECK(std::all_of(num_done.begin(), num_done.end(), [](int each) { return each == 1; }));
    }
}

TEST(a_team_of_one_has_no_other_threads)
{
    UpdateTeam team(1), none(0);
    int num_calls = 0;
    team.run([&] { ++num_calls; });
    none.run([&] { ++num_calls; });
    CHECK(num_calls == 2);
}

TEST(a_block_that_a_team_updates_is_updated_everywhere_and_what_one_throws_comes_out)
{
    const std::uint64_t numel = 1'000'003;
    std::vector<float> master(numel), gradient(numel), param(numel);
    for (std::uint64_t i = 0; i < numel; ++i) gradient[i] = static_cast<float>(i + 1);
    BlockUpdate how;
    const BlockLayout layout{numel, 0, false, 0, 0, 0, {}, numel * 4};
    how.from = how.to = {reinterpret_cast<char*>(master.data()), layout};
    how.gradient = reinterpret_cast<const char*>(gradient.data());
    how.gradient_type = ElementType::kFloat32;
    how.param16 = reinterpret_cast<char*>(param.data());
    how.param_type = ElementType::kFloat32;
    UpdateTeam team(3);
    const std::vector<UpdateSegment> all = {{0, numel, std::make_shared<TakeRule>()}};
    update_block(how, all, &team);
    CHECK(master == gradient);
    CHECK(param == gradient);
    gradient[700'000] = -1.0F;
    CHECK_THROWS(std::runtime_error, update_block(how, all, &team));
    gradient[700'000] = 1.0F;
    update_block(how, all, &team);
    CHECK(master == gradient);
}
