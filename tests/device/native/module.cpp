// SPDX-License-Identifier: Apache-2.0
// What torch wants of a device: its guard and its hooks; and what tests want of this one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>

#include "operators.h"

namespace standin {
namespace {

c10::Device the_device()
{
    return {kDevice, 0};
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void* at) const override { return host_memory.is_pinned(at); }
    at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    at::Device getDeviceFromPtr(void*) const override { return the_device(); }
    // The host's generator serves, so that the device draws the numbers that the CPU would.
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
        resize_storage(storage, bytes);
    }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }
    static MarkPtr& mark(void* event) { return *static_cast<MarkPtr*>(event); }

    c10::DeviceType type() const override { return kDevice; }
    c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
    c10::Device getDevice() const override { return the_device(); }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }

    c10::Stream getStream(c10::Device) const override { return stream(current_stream()); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
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
        const c10::Stream before = stream(current_stream());
        set_current_stream(int(next.id()));
        return before;
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
        if (!*event) *event = new MarkPtr;
        mark(*event) = standin::record(int(on.id()));
    }
    void block(void* event, const c10::Stream& on) const override
    {
        if (event && !left_out("stream.wait_event")) wait_for(int(on.id()), mark(event));
    }
    bool queryEvent(void* event) const override
    {
        raise_failure();
        return !event || left_out("event.query") || mark(event)->reached();
    }
    void synchronizeEvent(void* event) const override
    {
        if (event && !left_out("event.synchronize")) wait_mark(mark(event), "event");
    }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override
    {
        delete static_cast<MarkPtr*>(event);
    }
    double elapsedTime(void* first, void* second, c10::DeviceIndex) const override
    {
        TORCH_CHECK(mark(first)->reached() && mark(second)->reached(),
                    "an event of elapsed_time has not been reached yet");
        return double(mark(second)->wait() - mark(first)->wait()) / 1e6;
    }
    void recordDataPtrOnStream(const c10::DataPtr& of, const c10::Stream& on) const override
    {
        device_memory.used_by(of.get(), int(on.id()));
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void configure(const std::map<std::string, double>& changes)
{
    const std::map<std::string, double*> rates{
        {"delay_secs", &settings.delay_secs},
        {"delayed_share", &settings.delayed_share},
        {"slow_compute_secs", &settings.slow_compute_secs},
        {"slow_up_secs", &settings.slow_up_secs},
        {"slow_down_secs", &settings.slow_down_secs},
        {"flops", &settings.flops},
        {"memory_rate", &settings.memory_rate},
        {"up_rate", &settings.up_rate},
        {"down_rate", &settings.down_rate},
        {"launch_secs", &settings.launch_secs},
    };
    const std::map<std::string, bool*> switches{
        {"watch", &settings.watch},
        {"timed", &settings.timed},
        {"skip", &settings.skip},
        {"zeros", &settings.zeros}};
    for (const auto& [name, value] : changes) {
        if (rates.contains(name))
            *rates.at(name) = value;
        else if (switches.contains(name))
            *switches.at(name) = value != 0;
        else if (name == "seed")
            settings.seed = uint64_t(value);
        else if (name == "capacity")
            settings.capacity = int64_t(value);
        else
            throw std::invalid_argument("the stand-in device has no setting " + name);
    }
}

}  // namespace
}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    using namespace standin;
    device_memory.open();
    c10::SetAllocator(kDevice, device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::globalContext().lazyInitDevice(kDevice);
    register_operators();
    const py::call_guard<py::gil_scoped_release> released;
    module.def("configure", &configure);
    module.def("current_stream", &current_stream);
    module.def("set_current_stream", &set_current_stream);
    module.def("synchronize", [] {
        if (!left_out("device.synchronize")) wait_all("device");
    });
    module.def("ask_before_ordering", [](const py::object& callable) {
        ask_before_ordering(py::object(callable).release().ptr());
    });
    module.def("register_host_memory",
               [](uintptr_t at, size_t bytes) { host_memory.add(at, bytes); });
    module.def("unregister_host_memory", [](uintptr_t at) { host_memory.remove(at); });
    module.def("is_pinned",
               [](uintptr_t at, size_t bytes) { return host_memory.is_pinned((void*)at, bytes); });
    module.def("empty_cache", [] { device_memory.empty_cache(); }, released);
    module.def("reset_peaks", [] { device_memory.reset_peaks(); });
    module.def("memory", [] {
        const auto now = device_memory.statistics();
        return std::map<std::string, int64_t>{
            {"allocated", now.allocated},     {"peak", now.peak},
            {"reserved", now.reserved},       {"peak_reserved", now.peak_reserved},
            {"num_flushes", now.num_flushes}, {"capacity", settings.capacity}};
    });
    module.def("num_flights", [] { return host_memory.num_flights(); });
    module.def("counters", &counters);
    module.def("busy_secs", &busy_secs);
    module.def("now_ns", &now_ns);
    module.def("hold", &hold);
    module.def("let_go", &let_go);
    module.def("fail_copy", &fail_copy);
    module.def("clear_failure", &clear_failure);
    module.def("take_trips", [] {
        std::vector<std::pair<std::string, std::string>> out;
        for (const Trip& each : take_trips()) out.emplace_back(each.what, text_of(each.launched));
        return out;
    });
    module.def("take_waits", [] {
        std::vector<std::tuple<std::string, bool, double, std::string>> out;
        for (const HostWait& each : take_waits())
            out.emplace_back(each.what, each.blocked, each.secs, text_of(each.stack));
        return out;
    });
}
