// SPDX-License-Identifier: Apache-2.0
// Streams of the stand-in device: queues with a worker each, marks in their order, and engines that
// time occupies.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace standin {

struct Settings {
    uint64_t seed = 0;
    double delay_secs = 0;  // the longest random delay of a copy; kernels are delayed less often
    double delayed_share = 0.3;  // of the copies
    double slow_compute_secs =
        0;  // every kernel, and every copy of a direction, begins this much later
    double slow_up_secs = 0;
    double slow_down_secs = 0;
    bool watch = true;          // trip wires on host memory of late copies
    bool timed = false;         // work occupies its engine by the rates below
    bool skip = false;          // nothing is computed or moved: shapes, memory and time alone
    bool zeros = false;         // under `skip`, late copies down write zeros: for hosts that sum them
    double flops = 1e12;        // a second
    double memory_rate = 1e11;  // bytes a second
    double up_rate = 1e10;
    double down_rate = 1e10;
    double launch_secs = 5e-6;
    int64_t capacity = int64_t{8} << 30;
};
extern Settings settings;

int64_t now_ns();

// What executes work: kernels of all streams share one engine, each direction of the link is
// another.
enum class Engine { none, compute, up, down };
constexpr int kEngines = 4;
std::vector<double> busy_secs();  // by engine, since the start

// A moment in the order of a stream. It is reached once; who waits for it sleeps.
class Mark {
  public:
    void reach(int64_t at_ns);
    int64_t wait();
    bool reached();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
    int64_t at_ns_ = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Work {
    const char* name = "";
    Engine engine = Engine::none;
    double secs = 0;     // of the engine, by the cost model
    double latency = 0;  // of the stream alone
    std::function<void()> run;
    MarkPtr after;    // nothing of this begins before
    MarkPtr reaches;  // when this has ended
    int64_t issued_ns = 0;
};

// Stream 0 is the default one. Workers begin with the first work of their stream.
constexpr int kStreams = 33;
void push(int stream, Work work);
MarkPtr record(int stream);
void wait_for(int stream, MarkPtr mark);
bool idle(int stream);
// What is pushed after this waits until the host lets the stream go on: for tests that need a
// certain order.
void hold(int stream);
void let_go(int stream);

// A failure of work is raised by every later call of the host that launches, asks or waits, until
// it is cleared.
struct DeviceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
void raise_failure();
void clear_failure();
void fail_copy(int64_t nth);  // the nth late copy from now on fails when its turn comes

// Frames of the Python stack (code, line), innermost first. Takes the GIL; must not be called with
// a lock held.
using PythonStack = std::vector<std::pair<void*, int>>;
PythonStack python_stack();
std::string text_of(const PythonStack& stack);

// Whether a call that orders something is to do nothing: what a test's callback says of it and of
// who calls.
bool left_out(const char* what);
void ask_before_ordering(void* callable);  // a PyObject that is kept, or null

// Host waits. Each is counted with what waited, for how long, whether the device was behind, and
// from where.
struct HostWait {
    const char* what;
    bool blocked;
    double secs;
    PythonStack stack;
};
void host_wait(const char* what, const std::function<bool()>& done,
               const std::function<void()>& wait);
void wait_stream(int stream, const char* what);
void wait_all(const char* what);
void wait_mark(const MarkPtr& mark, const char* what);
std::vector<HostWait> take_waits();

}  // namespace standin
