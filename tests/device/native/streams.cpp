// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

namespace standin {

Settings settings;
thread_local int current_stream = 0;
thread_local int current_device = 0;

namespace {

using Steady = std::chrono::steady_clock;
using Lock = std::lock_guard<std::mutex>;

// How far the clock of the model may run ahead of the host's before a worker sleeps: sleeping costs
// about as much.
constexpr int64_t kSlackNs = 60'000;
constexpr size_t kMostWaits = 200'000;

struct EngineClock {
    int64_t free_at_ns = 0;
    int64_t busy_ns = 0;
};

// Of the process. Workers run until it ends, so nothing of this is ever destroyed.
struct State {
    std::mutex mutex;
    std::array<EngineClock, kEngines> engines;
    std::string failure;
    std::map<std::string, int64_t> counted;
    std::vector<HostWait> waits;
};
State& state = *new State;
thread_local std::string remembered;
std::atomic<int64_t> copies_until_failure{-1};

uint64_t mixed(uint64_t value)
{
    value = (value ^ (value >> 31)) * 0x7FB5D329728EA185ull;
    value = (value ^ (value >> 27)) * 0x81DADEF4BC2DD44Dull;
    return value ^ (value >> 33);
}

void note_failure(const std::string& what)
{
    Lock hold(state.mutex);
    if (state.failure.empty()) state.failure = what;
}

class Stream {
  public:
    explicit Stream(int id) : id_(id)
    {
        std::thread([this] { work(); }).detach();
    }

    Mark push(Work work)
    {
        work.issued_ns = now_ns();
        Mark end = work.end.get_future().share();
        {
            Lock hold(mutex_);
            queue_.push_back(std::move(work));
        }
        pushed_.notify_one();
        return end;
    }

    bool idle()
    {
        Lock hold(mutex_);
        return queue_.empty();
    }

  private:
    [[noreturn]] void work()
    {
        pthread_setname_np(pthread_self(), ("standin" + std::to_string(id_)).c_str());
        at::init_num_threads();
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        at::NoGradGuard no_grad;
        for (;;) {
            std::unique_lock<std::mutex> hold(mutex_);
            pushed_.wait(hold, [&] { return !queue_.empty(); });
            Work& work = queue_.front();  // stays there, and where it is, until it has ended
            hold.unlock();
            if (work.after.valid()) clock_ns_ = std::max(clock_ns_, work.after.get());
            delay(work.engine);
            const int64_t begin = now_ns();
            execute(work);
            occupy(work, begin);
            hold.lock();
            work.end.set_value(settings.timed ? std::max(clock_ns_, work.issued_ns) : now_ns());
            queue_.pop_front();
        }
    }

    void delay(Engine engine)
    {
        if (engine == Engine::none) return;
        const bool is_kernel = engine == Engine::compute;
        double secs = is_kernel              ? settings.slow_compute_secs
                      : engine == Engine::up ? settings.slow_up_secs
                                             : settings.slow_down_secs;
        const uint64_t stream = uint64_t(id_) << 40;
        const uint64_t drawn = mixed(mixed(uint64_t(settings.seed) + 1) ^ stream ^ num_delayed_++);
        const double chance = settings.delayed_share * (is_kernel ? 0.2 : 1);
        if (double(drawn % 1000) < 1000 * chance)
            secs += settings.delay_secs * double((drawn >> 10) % 1024) / 1024;
        if (secs > 0) std::this_thread::sleep_for(std::chrono::duration<double>(secs));
    }

    void execute(Work& work)
    {
        const bool is_copy = work.engine == Engine::up || work.engine == Engine::down;
        if (is_copy && copies_until_failure > 0 && --copies_until_failure == 0)
            note_failure(std::string("the device failed in a ") + work.name);
        try {
            if (work.run) work.run();
        } catch (const std::exception& error) {
            note_failure(std::string(work.name) + ": " + error.what());
        }
        work.run = nullptr;  // what it owned goes before anybody hears of its end
    }

    void occupy(const Work& work, int64_t begin)
    {
        if (work.engine == Engine::none) return;
        const int64_t cost = settings.timed ? int64_t(work.secs * 1e9) : now_ns() - begin;
        {
            Lock hold(state.mutex);
            EngineClock& engine = state.engines[int(work.engine)];
            engine.busy_ns += cost;
            if (!settings.timed) return;
            engine.free_at_ns = std::max({clock_ns_, work.issued_ns, engine.free_at_ns}) + cost;
            clock_ns_ = engine.free_at_ns + int64_t(work.latency * 1e9);
        }
        if (clock_ns_ - now_ns() > kSlackNs)
            std::this_thread::sleep_until(Steady::time_point(std::chrono::nanoseconds(clock_ns_)));
    }

    const int id_;
    int64_t clock_ns_ = 0;  // of the worker alone, as is the next
    uint64_t num_delayed_ = 0;
    std::mutex mutex_;
    std::condition_variable pushed_;
    std::deque<Work> queue_;  // what runs is its front
};

std::mutex& streams_mutex = *new std::mutex;
std::array<Stream*, kStreams> streams{};

}  // namespace

int64_t now_ns()
{
    return std::chrono::nanoseconds(Steady::now().time_since_epoch()).count();
}

std::vector<double> busy_secs()
{
    Lock hold(state.mutex);
    std::vector<double> out;
    for (const EngineClock& engine : state.engines) out.push_back(double(engine.busy_ns) / 1e9);
    return out;
}

bool reached(const Mark& mark)
{
    return mark.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

Mark push(int stream, Work work)
{
    if (settings.timed && work.secs > 0)
        count(std::string("ns of ") + work.name, std::llround(work.secs * 1e9));
    Stream* on = nullptr;
    {
        Lock hold(streams_mutex);
        if (!streams.at(stream)) streams[stream] = new Stream(stream);
        on = streams[stream];
    }
    return on->push(std::move(work));
}

bool idle(int stream)
{
    Lock hold(streams_mutex);
    return !streams.at(stream) || streams[stream]->idle();
}

void require_own_device(const char* what)
{
    require(current_device == settings.index, "stand-in device: " + std::string(what) +
                                                  " on device " + std::to_string(current_device) +
                                                  " in a process of device " +
                                                  std::to_string(settings.index));
}

void remember_error(const std::string& what)
{
    remembered = what;
}

void launch(const char* name, Engine engine, double secs, std::function<void()> run)
{
    raise_failure();
    if (!remembered.empty())
        throw std::runtime_error("stand-in device, of an earlier call: " +
                                 std::exchange(remembered, {}));
    const double latency = engine == Engine::compute ? settings.launch_secs : 0;
    push(current_stream, {name, engine, secs, latency, std::move(run)});
}

void count(const std::string& name, int64_t n)
{
    Lock hold(state.mutex);
    state.counted[name] += n;
}
std::map<std::string, int64_t> counters()
{
    Lock hold(state.mutex);
    return state.counted;
}

void raise_failure()
{
    Lock hold(state.mutex);
    if (!state.failure.empty()) throw std::runtime_error("stand-in device: " + state.failure);
}
void clear_failure()
{
    remembered.clear();
    Lock hold(state.mutex);
    state.failure.clear();
}
void fail_copy(int64_t nth)
{
    copies_until_failure = nth;
}

// ---- host waits -------------------------------------------------------------------------------

PythonStack python_stack()
{
    return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

void wait_marks(const std::vector<Mark>& marks, const char* what)
{
    const bool blocked = !std::all_of(marks.begin(), marks.end(), reached);
    HostWait waited{what, blocked, 0, python_stack()};
    const int64_t begin = now_ns();
    {
        std::optional<pybind11::gil_scoped_release> released;
        if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
        for (const Mark& mark : marks) mark.wait();
    }
    waited.secs = double(now_ns() - begin) / 1e9;
    {
        Lock hold(state.mutex);
        if (state.waits.size() < kMostWaits) state.waits.push_back(std::move(waited));
    }
    raise_failure();
}

void wait_streams(int first, int last, const char* what)
{
    std::vector<Mark> ends;
    for (int stream = first; stream <= last; ++stream)
        if (!idle(stream)) ends.push_back(push(stream, {.name = "end"}));
    wait_marks(ends, what);
}

std::vector<HostWait> take_waits()
{
    Lock hold(state.mutex);
    return std::exchange(state.waits, {});
}

}  // namespace standin
