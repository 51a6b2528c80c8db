// SPDX-License-Identifier: Apache-2.0
#include <Python.h>

#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

namespace standin {

Settings settings;

namespace {

using Steady = std::chrono::steady_clock;

// How far the clock of the model may run ahead of the host's before a worker sleeps: sleeping costs
// about as much.
constexpr int64_t kSlackNs = 60'000;

struct EngineClock {
    std::mutex mutex;
    int64_t free_at_ns = 0;
    int64_t busy_ns = 0;
};
std::array<EngineClock, kEngines>& engines = *new std::array<EngineClock, kEngines>;

std::mutex& failure_mutex = *new std::mutex;
std::string& failure = *new std::string;
std::atomic<bool> failed{false};
std::atomic<int64_t> copies_until_failure{-1};

uint64_t mixed(uint64_t value)
{
    value = (value ^ (value >> 31)) * 0x7FB5D329728EA185ull;
    value = (value ^ (value >> 27)) * 0x81DADEF4BC2DD44Dull;
    return value ^ (value >> 33);
}

void note_failure(const std::string& what)
{
    std::lock_guard<std::mutex> hold(failure_mutex);
    if (failure.empty()) failure = what;
    failed = true;
}

class Stream {
  public:
    explicit Stream(int id) : id_(id)
    {
        std::thread([this] { work(); }).detach();
    }

    void push(Work work)
    {
        work.issued_ns = now_ns();
        {
            std::lock_guard<std::mutex> hold(mutex_);
            queue_.push_back(std::move(work));
            ++num_pushed_;
        }
        pushed_.notify_one();
    }

    bool idle()
    {
        std::lock_guard<std::mutex> hold(mutex_);
        return num_done_ == num_pushed_;
    }

    void finish()
    {
        std::unique_lock<std::mutex> hold(mutex_);
        const uint64_t target = num_pushed_;
        done_.wait(hold, [&] { return num_done_ >= target; });
    }

  private:
    [[noreturn]] void work()
    {
        pthread_setname_np(pthread_self(), ("standin" + std::to_string(id_)).c_str());
        at::init_num_threads();
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        at::NoGradGuard no_grad;
        for (uint64_t sequence = 0;; ++sequence) {
            Work work;
            {
                std::unique_lock<std::mutex> hold(mutex_);
                pushed_.wait(hold, [&] { return !queue_.empty(); });
                work = std::move(queue_.front());
                queue_.pop_front();
            }
            if (work.after) clock_ns_ = std::max(clock_ns_, work.after->wait());
            delay(work, sequence);
            const int64_t begin = now_ns();
            execute(work);
            work.run = nullptr;  // what it owned goes before anybody hears of its end
            occupy(work, begin);
            if (work.reaches)
                work.reaches->reach(settings.timed ? std::max(clock_ns_, work.issued_ns)
                                                   : now_ns());
            {
                std::lock_guard<std::mutex> hold(mutex_);
                ++num_done_;
            }
            done_.notify_all();
        }
    }

    void delay(const Work& work, uint64_t sequence)
    {
        if (work.engine == Engine::none) return;
        const bool is_kernel = work.engine == Engine::compute;
        double secs = is_kernel                   ? settings.slow_compute_secs
                      : work.engine == Engine::up ? settings.slow_up_secs
                                                  : settings.slow_down_secs;
        const uint64_t drawn = mixed(mixed(settings.seed + 1) ^ (uint64_t(id_) << 40) ^ sequence);
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
        if (!work.run) return;
        try {
            work.run();
        } catch (const std::exception& error) {
            note_failure(std::string(work.name) + ": " + error.what());
        }
    }

    void occupy(const Work& work, int64_t begin)
    {
        if (work.engine == Engine::none) return;
        EngineClock& engine = engines[int(work.engine)];
        if (!settings.timed) {
            std::lock_guard<std::mutex> hold(engine.mutex);
            engine.busy_ns += now_ns() - begin;
            return;
        }
        const auto cost = int64_t(work.secs * 1e9);
        {
            std::lock_guard<std::mutex> hold(engine.mutex);
            const int64_t start = std::max({clock_ns_, work.issued_ns, engine.free_at_ns});
            engine.free_at_ns = start + cost;
            engine.busy_ns += cost;
            clock_ns_ = start + cost + int64_t(work.latency * 1e9);
        }
        if (clock_ns_ - now_ns() > kSlackNs)
            std::this_thread::sleep_until(Steady::time_point(std::chrono::nanoseconds(clock_ns_)));
    }

    const int id_;
    int64_t clock_ns_ = 0;  // of the worker alone
    std::mutex mutex_;
    std::condition_variable pushed_, done_;
    std::deque<Work> queue_;
    uint64_t num_pushed_ = 0, num_done_ = 0;
};

std::mutex& streams_mutex = *new std::mutex;
std::array<Stream*, kStreams> streams{};  // workers run until the process ends

Stream* existing(int id)
{
    std::lock_guard<std::mutex> hold(streams_mutex);
    return streams.at(id);
}
Stream& stream_of(int id)
{
    std::lock_guard<std::mutex> hold(streams_mutex);
    if (!streams.at(id)) streams[id] = new Stream(id);
    return *streams[id];
}

struct ReleasedGil {
    ReleasedGil()
    {
        if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
    }
    ~ReleasedGil()
    {
        if (state) PyEval_RestoreThread(state);
    }
    PyThreadState* state = nullptr;
};

std::mutex& waits_mutex = *new std::mutex;
std::vector<HostWait>& waits = *new std::vector<HostWait>;
constexpr size_t kMostWaits = 200'000;

}  // namespace

int64_t now_ns()
{
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Steady::now().time_since_epoch())
        .count();
}

std::vector<double> busy_secs()
{
    std::vector<double> out;
    for (EngineClock& engine : engines) {
        std::lock_guard<std::mutex> hold(engine.mutex);
        out.push_back(double(engine.busy_ns) / 1e9);
    }
    return out;
}

void Mark::reach(int64_t at_ns)
{
    {
        std::lock_guard<std::mutex> hold(mutex_);
        reached_ = true;
        at_ns_ = at_ns;
    }
    changed_.notify_all();
}
int64_t Mark::wait()
{
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [this] { return reached_; });
    return at_ns_;
}
bool Mark::reached()
{
    std::lock_guard<std::mutex> hold(mutex_);
    return reached_;
}

void push(int stream, Work work)
{
    stream_of(stream).push(std::move(work));
}

MarkPtr record(int stream)
{
    auto mark = std::make_shared<Mark>();
    Work work{.name = "event"};
    work.reaches = mark;
    push(stream, std::move(work));
    return mark;
}

void wait_for(int stream, MarkPtr mark)
{
    Work work{.name = "wait"};
    work.after = std::move(mark);
    push(stream, std::move(work));
}

namespace {
std::mutex& held_mutex = *new std::mutex;
std::array<MarkPtr, kStreams> held;
}  // namespace

void hold(int stream)
{
    std::lock_guard<std::mutex> lock(held_mutex);
    held.at(stream) = std::make_shared<Mark>();
    wait_for(stream, held[stream]);
}
void let_go(int stream)
{
    std::lock_guard<std::mutex> lock(held_mutex);
    if (held.at(stream)) std::exchange(held[stream], nullptr)->reach(now_ns());
}

bool idle(int stream)
{
    Stream* found = existing(stream);
    return !found || found->idle();
}

void raise_failure()
{
    if (!failed) return;
    std::lock_guard<std::mutex> hold(failure_mutex);
    throw DeviceError("stand-in device: " + failure);
}
void clear_failure()
{
    std::lock_guard<std::mutex> hold(failure_mutex);
    failure.clear();
    failed = false;
}
void fail_copy(int64_t nth)
{
    copies_until_failure = nth;
}

// ---- host waits -------------------------------------------------------------------------------

PythonStack python_stack()
{
    PythonStack out;
    if (!Py_IsInitialized()) return out;
    static std::set<void*>& kept =
        *new std::set<void*>;  // code objects named by stacks live for ever
    const PyGILState_STATE state = PyGILState_Ensure();
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame && out.size() < 32) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        out.emplace_back(code, PyFrame_GetLineNumber(frame));
        if (!kept.insert(code).second) Py_DECREF(code);
        PyFrameObject* back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    PyGILState_Release(state);
    return out;
}

std::string text_of(const PythonStack& stack)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    std::string out;
    for (const auto& [code, line] : stack) {
        auto* each = static_cast<PyCodeObject*>(code);
        const char* file = PyUnicode_AsUTF8(each->co_filename);
        const char* name = PyUnicode_AsUTF8(each->co_name);
        out += std::string("  ") + (file ? file : "?") + ":" + std::to_string(line) + " in " +
               (name ? name : "?") + "\n";
    }
    PyErr_Clear();
    PyGILState_Release(state);
    return out;
}

namespace {
std::atomic<PyObject*> asked{nullptr};
}
void ask_before_ordering(void* callable)
{
    asked = static_cast<PyObject*>(callable);
}
bool left_out(const char* what)
{
    if (!asked) return false;
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject* said = PyObject_CallFunction(asked, "s", what);
    const bool out = said && PyObject_IsTrue(said) == 1;
    Py_XDECREF(said);
    if (!said) PyErr_Print();
    PyGILState_Release(state);
    return out;
}

void host_wait(const char* what, const std::function<bool()>& done,
               const std::function<void()>& wait)
{
    HostWait waited{what, !done(), 0, python_stack()};
    const int64_t begin = now_ns();
    {
        ReleasedGil released;
        wait();
    }
    waited.secs = double(now_ns() - begin) / 1e9;
    {
        std::lock_guard<std::mutex> hold(waits_mutex);
        if (waits.size() < kMostWaits) waits.push_back(std::move(waited));
    }
    raise_failure();
}

void wait_stream(int stream, const char* what)
{
    Stream* found = existing(stream);
    if (found)
        host_wait(what, [&] { return found->idle(); }, [&] { found->finish(); });
    else
        host_wait(what, [] { return true; }, [] {});
}

void wait_all(const char* what)
{
    const auto all = [](const std::function<bool(Stream&)>& holds) {
        for (int id = 0; id < kStreams; ++id) {
            Stream* found = existing(id);
            if (found && !holds(*found)) return false;
        }
        return true;
    };
    host_wait(
        what, [&] { return all([](Stream& each) { return each.idle(); }); },
        [&] {
            all([](Stream& each) {
                each.finish();
                return true;
            });
        });
}

void wait_mark(const MarkPtr& mark, const char* what)
{
    host_wait(what, [&] { return mark->reached(); }, [&] { mark->wait(); });
}

std::vector<HostWait> take_waits()
{
    std::lock_guard<std::mutex> hold(waits_mutex);
    return std::exchange(waits, {});
}

}  // namespace standin
