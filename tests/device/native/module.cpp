// SPDX-License-Identifier: Apache-2.0
// What torch wants of a device: its guard and its hooks; and what tests want of this one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <variant>

#include "operators.h"

namespace standin {
namespace {

c10::Device own_device()
{
    return {kDevice, c10::DeviceIndex(settings.index)};
}

int exchange_device(int next)
{
    if (next < 0) return current_device;
    require(next <= settings.index, "stand-in device: there is no device " + std::to_string(next));
    return std::exchange(current_device, next);
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex index) const override
    {
        return index == settings.index;
    }
    c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(settings.index + 1); }
    void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
    c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override
    {
        return c10::DeviceIndex(exchange_device(index));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override
    {
        return c10::DeviceIndex(exchange_device(index));
    }
    bool isPinnedPtr(const void* at) const override { return host_memory.is_pinned(at); }
    at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
    at::Device getDeviceFromPtr(void*) const override { return own_device(); }
    // The host's generator serves, so that the device draws the numbers that the CPU would, unless
    // `own_generator` is set, which operators ask.
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override
    {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override
    {
        return at::detail::createCPUGenerator();
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override
    {
        device_memory.resize(storage, bytes);
    }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, own_device(), id); }
    static Mark& mark(void* event) { return *static_cast<Mark*>(event); }

    c10::DeviceType type() const override { return kDevice; }
    c10::Device exchangeDevice(c10::Device next) const override
    {
        return {kDevice, c10::DeviceIndex(exchange_device(next.index()))};
    }
    c10::Device getDevice() const override { return {kDevice, c10::DeviceIndex(current_device)}; }
    void setDevice(c10::Device next) const override { exchange_device(next.index()); }
    void uncheckedSetDevice(c10::Device next) const noexcept override
    {
        current_device = next.index();
    }
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return c10::DeviceIndex(settings.index + 1);
    }

    // Of another device there is the default one, with which nothing is done.
    c10::Stream getStream(c10::Device device) const override
    {
        return device == own_device() ? stream(current_stream) : getDefaultStream(device);
    }
    c10::Stream getDefaultStream(c10::Device device) const override
    {
        return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), 0);
    }
    c10::Stream getNewStream(c10::Device, int) const override
    {
        static std::atomic<int> num_made{0};
        return stream(1 + num_made++ % (kStreams - 1));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override
    {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream next) const override
    {
        if (next.device() != own_device()) return next;
        return stream(std::exchange(current_stream, int(next.id())));
    }
    bool queryStream(const c10::Stream& of) const override
    {
        raise_failure();
        return idle(int(of.id()));
    }
    void synchronizeStream(const c10::Stream& of) const override
    {
        if (!left_out("stream.synchronize")) wait_stream(int(of.id()), "stream");
    }
    void synchronizeDevice(c10::DeviceIndex) const override
    {
        if (!left_out("device.synchronize")) wait_all("device");
    }

    void record(void** event, const c10::Stream& on, c10::DeviceIndex,
                c10::EventFlag) const override
    {
        if (left_out("event.record")) return;
        if (!*event) *event = new Mark;
        mark(*event) = push(int(on.id()), {.name = "event"});
    }
    void block(void* event, const c10::Stream& on) const override
    {
        if (event && !left_out("stream.wait_event"))
            push(int(on.id()), {.name = "wait", .after = mark(event)});
    }
    bool queryEvent(void* event) const override
    {
        raise_failure();
        if (event) require_own_device("an event is asked for");
        return !event || left_out("event.query") || reached(mark(event));
    }
    void synchronizeEvent(void* event) const override
    {
        if (event) require_own_device("an event is waited for");
        if (event && !left_out("event.synchronize")) wait_marks({mark(event)}, "event");
    }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override
    {
        delete static_cast<Mark*>(event);
    }
    double elapsedTime(void* first, void* second, c10::DeviceIndex) const override
    {
        TORCH_CHECK(reached(mark(first)) && reached(mark(second)),
                    "an event of elapsed_time has not been reached yet");
        return double(mark(second).get() - mark(first).get()) / 1e6;
    }
    void recordDataPtrOnStream(const c10::DataPtr& of, const c10::Stream& on) const override
    {
        device_memory.used_by(of, int(on.id()));
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void configure(const std::map<std::string, double>& changes)
{
    Settings& it = settings;
    const std::map<std::string, std::variant<double*, bool*, int64_t*>> places{
        {"seed", &it.seed},
        {"delay_secs", &it.delay_secs},
        {"delayed_share", &it.delayed_share},
        {"slow_compute_secs", &it.slow_compute_secs},
        {"slow_up_secs", &it.slow_up_secs},
        {"slow_down_secs", &it.slow_down_secs},
        {"watch", &it.watch},
        {"timed", &it.timed},
        {"skip", &it.skip},
        {"zeros", &it.zeros},
        {"own_generator", &it.own_generator},
        {"flops", &it.flops},
        {"memory_rate", &it.memory_rate},
        {"up_rate", &it.up_rate},
        {"down_rate", &it.down_rate},
        {"launch_secs", &it.launch_secs},
        {"capacity", &it.capacity},
        {"index", &it.index},
    };
    for (const auto& [name, value] : changes) {
        require(places.contains(name), "the stand-in device has no setting " + name);
        std::visit([value](auto* at) { *at = std::decay_t<decltype(*at)>(value); },
                   places.at(name));
    }
}

// Work that is pushed on the stream after this waits until the result is called: for tests that
// need a certain order.
py::cpp_function hold(int stream)
{
    const auto gate = std::make_shared<std::promise<int64_t>>();
    push(stream, {.name = "hold", .after = gate->get_future().share()});
    return py::cpp_function([gate] { gate->set_value(now_ns()); });
}

std::string text_of(const PythonStack& stack)
{
    std::string out;
    for (const auto& frame : torch::symbolize({stack.get()}).all_frames)
        out += "  " + frame.filename + ":" + std::to_string(frame.lineno) + " in " +
               frame.funcname + "\n";
    return out;
}

// CUDA's runtime remembers what it has said.
template <class Call>
void remembered(const Call& call)
{
    try {
        call();
    } catch (const std::exception& error) {
        remember_error(error.what());
        throw;
    }
}

py::object& asked = *new py::object;

}  // namespace

bool left_out(const char* what)
{
    if (!asked) return false;
    py::gil_scoped_acquire gil;
    return asked(what).cast<bool>();
}

}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    using namespace standin;
    device_memory.open();
    c10::SetAllocator(kDevice, &device_memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::globalContext().lazyInitDevice(kDevice);
    register_operators();
    module.def("configure", &configure);
    module.def("device_count", [] { return settings.index + 1; });
    module.def("current_device", [] { return current_device; });
    module.def("set_device", [](int index) { exchange_device(index); });
    module.def("require_own_device",
               [](const std::string& what) { require_own_device(what.c_str()); });
    module.def("current_stream", [] { return current_stream; });
    module.def("set_current_stream", [](int stream) { current_stream = stream; });
    module.def("synchronize", [] {
        if (!left_out("device.synchronize")) wait_all("device");
    });
    module.def("ask_before_ordering", [](const py::object& callable) { asked = callable; });
    module.def("register_host_memory", [](uintptr_t at, size_t bytes) {
        require_own_device("host memory is registered");
        remembered([&] { host_memory.add(at, bytes); });
    });
    module.def("unregister_host_memory", [](uintptr_t at) {
        require_own_device("host memory is unregistered");
        remembered([&] { host_memory.remove(at); });
    });
    module.def("is_pinned",
               [](uintptr_t at, size_t bytes) { return host_memory.is_pinned((void*)at, bytes); });
    module.def("empty_cache", [] { device_memory.empty_cache(); });
    module.def("reset_peaks", [] { device_memory.reset_peaks(); });
    module.def("memory", [] {
        const auto now = device_memory.statistics();
        return std::map<std::string, int64_t>{
            {"allocated", now.allocated},     {"peak", now.peak},
            {"reserved", now.reserved},       {"peak_reserved", now.peak_reserved},
            {"active", now.active},           {"peak_active", now.peak_active},
            {"num_flushes", now.num_flushes}, {"capacity", settings.capacity}};
    });
    module.def("random_state", [] { return generator().get_state(); });
    module.def("set_random_state", [](const Tensor& state) { generator().set_state(state); });
    module.def("seed", [](uint64_t seed) { generator().set_current_seed(seed); });
    module.def("initial_seed", [] { return generator().current_seed(); });
    module.def("num_flights", [] { return host_memory.num_flights(); });
    module.def("counters", &counters);
    module.def("busy_secs", &busy_secs);
    module.def("now_ns", &now_ns);
    module.def("hold", &hold);
    module.def("aliased", &aliased);
    module.def("fail_copy", &fail_copy);
    module.def("clear_failure", &clear_failure);
    module.def("take_trips", [] {
        std::vector<std::pair<std::string, std::string>> out;
        for (const auto& each : host_memory.take_trips())
            out.emplace_back(each.what, text_of(each.launched));
        return out;
    });
    module.def("take_waits", [] {
        std::vector<std::tuple<std::string, bool, double, std::string>> out;
        for (const HostWait& each : take_waits())
            out.emplace_back(each.what, each.blocked, each.secs, text_of(each.stack));
        return out;
    });
}
