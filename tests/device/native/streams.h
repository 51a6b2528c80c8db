// SPDX-License-Identifier: Apache-2.0
// Streams of the stand-in device: queues with a worker each, marks in their order, and engines that
// time occupies.
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace standin {

struct Settings {
    int64_t seed = 0;
    double delay_secs = 0;  // the longest random delay of a copy; kernels are delayed less often
    double delayed_share = 0.3;    // of the copies
    double slow_compute_secs = 0;  // every kernel begins this much later
    double slow_up_secs = 0;       // and every copy of a direction
    double slow_down_secs = 0;
    bool watch = true;   // trip wires on host memory of late copies
    bool timed = false;  // work occupies its engine by the rates below
    bool skip = false;   // nothing is computed or moved: shapes, memory and time alone
    bool zeros = false;  // under `skip`, late copies down write zeros: for hosts that sum them
    bool own_generator = false;  // random numbers come from a generator of the device, as a GPU's
    double flops = 1e12;         // a second
    double memory_rate = 1e11;   // bytes a second
    double up_rate = 1e10;
    double down_rate = 1e10;
    double launch_secs = 5e-6;
    int64_t capacity = int64_t{8} << 30;
    int64_t index =
        0;  // of this process's device; those below are other ranks', which it must not use

    // Under `skip` what is small is computed all the same: counts, flags and losses that scripts
    // and DeepSpeed decide by. The rest is left out.
    bool leaves_out(size_t bytes) const { return skip && !is_small(bytes); }
    static bool is_small(size_t bytes) { return bytes <= size_t{16} << 10; }
};
extern Settings settings;

int64_t now_ns();

// Python sees these as RuntimeError, without the C++ stack that TORCH_CHECK adds.
inline void require(bool holds, const std::string& otherwise)
{
    if (!holds) throw std::runtime_error(otherwise);
}

// What executes work: kernels of all streams share one engine, each direction of the link is
// another.
enum class Engine { none, compute, up, down };
constexpr int kEngines = 4;
std::vector<double> busy_secs();  // by engine, since the start

// A moment in the order of a stream: the time at which it was reached, for who waits.
using Mark = std::shared_future<int64_t>;
bool reached(const Mark& mark);

struct Work {
    const char* name = "";
    Engine engine = Engine::none;
    double secs = 0;     // of the engine, by the cost model
    double latency = 0;  // of the stream alone
    std::function<void()> run = {};
    Mark after = {};  // nothing of this begins before
    int64_t issued_ns = 0;
    std::promise<int64_t> end = {};
};

// Stream 0 is the default one. Workers begin with the first work of their stream.
constexpr int kStreams = 33;
extern thread_local int current_stream;

// As CUDA's, a thread begins with the first device of the machine, whoever's that is. Where CUDA's
// runtime takes the current one, this raises unless it is ours: there it would begin to use the
// other.
extern thread_local int current_device;
void require_own_device(const char* what);

// A call that failed is remembered in its thread, as by CUDA's runtime, until the next launch
// there, which is told to have failed.
void remember_error(const std::string& what);
Mark push(int stream, Work work);  // the mark of its end
bool idle(int stream);

// On the current stream. Nothing is launched on a device that failed.
void launch(const char* name, Engine engine, double secs, std::function<void()> run);

// How often what was done, by name. Names of copies say direction, lateness and stream.
void count(const std::string& name, int64_t n = 1);
std::map<std::string, int64_t> counters();

// A failure of work is raised by every later call of the host that launches, asks or waits, until
// it is cleared.
void raise_failure();
void clear_failure();
void fail_copy(int64_t nth);  // the nth copy from now on fails when its turn comes

// Takes the GIL; must not be called with a lock held.
using PythonStack = std::shared_ptr<torch::CapturedTraceback>;
PythonStack python_stack();

// Host waits. Each is counted with what waited, for how long, whether the device was behind, and
// from where.
struct HostWait {
    const char* what;
    bool blocked;
    double secs;
    PythonStack stack;
};
void wait_marks(const std::vector<Mark>& marks, const char* what);
void wait_streams(int first, int last, const char* what);
inline void wait_stream(int stream, const char* what)
{
    wait_streams(stream, stream, what);
}
inline void wait_all(const char* what)
{
    wait_streams(0, kStreams - 1, what);
}
std::vector<HostWait> take_waits();

}  // namespace standin
