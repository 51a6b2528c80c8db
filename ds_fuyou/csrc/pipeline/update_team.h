// SPDX-License-Identifier: Apache-2.0
//
// The threads that share one chunk's update.
//
// [Note: threads of updates]
// Whoever calls run() does the work itself; the others help while there is some. They sleep until
// then: what OpenMP's do, spin for milliseconds behind every region, takes the cores from the model
// that computes beside. Nor does anybody wait for a thread that has not come yet, as at the end of
// a region: where cores are busy, work is done by those that have one. So run() waits only for
// helpers that are inside, which wait for nobody.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fuyou {

class UpdateTeam {
  public:
    // So many threads, the calling one among them.
    explicit UpdateTeam(int num_threads);
    ~UpdateTeam();
    UpdateTeam(const UpdateTeam&) = delete;
    UpdateTeam& operator=(const UpdateTeam&) = delete;

    // work() in this thread, and at the same time in those of the others that come before it has
    // returned here; returns when it has everywhere. It must not throw, and find out itself what is
    // left to do. One caller at a time.
    void run(const std::function<void()>& work);

  private:
    void help();
    void end();

    std::mutex mutex_;
    std::condition_variable has_work_, is_left_;
    const std::function<void()>* work_ = nullptr;  // what follows and this: under mutex_
    std::uint64_t number_ = 0;                     // of the work
    int num_inside_ = 0;                           // helpers
    bool is_over_ = false;
    std::vector<std::thread> helpers_;
};

// What runs in this thread starts no threads by OpenMP: older stock optimizers would for each call.
// Nor does OpenMP bind it to a core (OMP_PROC_BIND): that would be the first one, for all that
// call.
void stay_single_threaded();

}  // namespace fuyou
