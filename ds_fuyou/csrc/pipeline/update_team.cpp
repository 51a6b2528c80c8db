// SPDX-License-Identifier: Apache-2.0
#include "pipeline/update_team.h"

#include <pthread.h>
#include <sched.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace fuyou {

UpdateTeam::UpdateTeam(int num_threads)
{
    try {
        for (int i = 1; i < num_threads; ++i) {
            helpers_.emplace_back([this] { help(); });
            pthread_setname_np(helpers_.back().native_handle(), "fuyou-update");
        }
    } catch (...) {
        end();
        throw;
    }
}

UpdateTeam::~UpdateTeam()
{
    end();
}

void UpdateTeam::end()
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_over_ = true;
    }
    has_work_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

void UpdateTeam::run(const std::function<void()>& work)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        ++number_;
    }
    has_work_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = nullptr;
    is_left_.wait(lock, [this] { return num_inside_ == 0; });
}

void UpdateTeam::help()
{
    stay_single_threaded();
    std::uint64_t last = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        has_work_.wait(lock, [&] { return is_over_ || (work_ != nullptr && number_ != last); });
        if (is_over_) return;
        last = number_;
        const std::function<void()>& work = *work_;
        ++num_inside_;
        lock.unlock();
        work();
        lock.lock();
        if (--num_inside_ == 0) is_left_.notify_one();
    }
}

void stay_single_threaded()
{
#if defined(_OPENMP)
    omp_set_num_threads(1);
    if (omp_get_proc_bind() == omp_proc_bind_false) return;
    cpu_set_t cores;
    const bool is_known = sched_getaffinity(0, sizeof cores, &cores) == 0;
#pragma omp parallel
    {
        omp_get_thread_num();  // it binds a thread in its first region, and never again
    }
    if (is_known) sched_setaffinity(0, sizeof cores, &cores);
#endif
}

}  // namespace fuyou
