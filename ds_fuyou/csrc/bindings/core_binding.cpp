// SPDX-License-Identifier: Apache-2.0
//
// Python's view of the core. Every call that may wait or compute releases the GIL. Objects that own
// threads or memory are kept alive by the Python objects that use them (keep_alive).
#include <torch/extension.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "io/io_engine.h"
#include "kernels/crc32.h"
#include "kernels/elementwise.h"
#include "kernels/gradient_norm.h"
#include "kernels/place_sum.h"
#include "kernels/update_rule.h"
#include "memory/aligned_pool.h"
#include "pipeline/chunk_pipeline.h"

namespace py = pybind11;
using namespace fuyou;

namespace {

using RangeTuple = std::tuple<int, std::uint64_t, std::uint64_t>;  // fd, offset, bytes
using NoGil = py::call_guard<py::gil_scoped_release>;

FileRanges to_ranges(const std::vector<RangeTuple>& tuples)
{
    FileRanges ranges;
    ranges.reserve(tuples.size());
    for (const auto& [fd, offset, num_bytes] : tuples) ranges.push_back({fd, offset, num_bytes});
    return ranges;
}

char* address(std::uintptr_t value)
{
    return reinterpret_cast<char*>(value);
}

// How an operation ended, which is told by a thread of the engine.
class IoEnd {
  public:
    void tell(const IoOutcome& outcome)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        outcome_ = outcome;
        is_told_ = true;
        told_.notify_all();
    }
    bool is_told() const
    {
        std::lock_guard<std::mutex> lock(mutex_);
        return is_told_;
    }
    bool wait(double timeout_secs)
    {
        std::unique_lock<std::mutex> lock(mutex_);
        return told_.wait_for(lock, std::chrono::duration<double>(timeout_secs),
                              [this] { return is_told_; });
    }
    IoOutcome outcome() const
    {
        std::lock_guard<std::mutex> lock(mutex_);
        return outcome_;
    }

  private:
    mutable std::mutex mutex_;
    std::condition_variable told_;
    bool is_told_ = false;
    IoOutcome outcome_;
};

// One asynchronous operation seen from Python: wait() once, or poll done(). It owns the memory, and
// whoever drops it waits for the end: freed, memory may be somebody else's when the bytes come, and
// a place on storage may be written anew. That happens wherever an error, or what a signal handler
// raises, makes Python drop it, so it is not left to Python, where a handler may run before any
// line. Handlers run after it. In a forked child nothing ends, and nothing is written to its
// memory.
class IoTicket {
  public:
    IoTicket(py::object memory, std::string what)
        : memory_(std::move(memory)), what_(std::move(what))
    {
    }
    IoTicket(const IoTicket&) = delete;
    IoTicket& operator=(const IoTicket&) = delete;
    ~IoTicket()
    {
        if (pid_ != getpid() || done()) return;
        const py::gil_scoped_release no_gil;
        // Not by Python's stderr: a handler would run in it, and what it raises be lost.
        for (double secs = report_secs; !wait(report_secs); secs += report_secs)
            std::fprintf(stderr, "ds_fuyou: still waiting for %s, which was given up (%.0f s)\n",
                         what_.c_str(), secs);
    }
    void begun() { pid_ = getpid(); }
    const std::shared_ptr<IoEnd>& end() const { return end_; }
    bool done() const { return end_->is_told(); }
    bool wait(double timeout_secs) { return end_->wait(timeout_secs); }
    IoOutcome outcome() const { return end_->outcome(); }

    double report_secs = 30.0;  // who drops it and waits longer says so, and again after as long

  private:
    py::object memory_;
    std::string what_;
    std::shared_ptr<IoEnd> end_ = std::make_shared<IoEnd>();
    pid_t pid_ = 0;  // 0: it was refused, and nothing will end
};

std::unique_ptr<IoTicket> submit(IoEngine& engine, IoKind kind,
                                 const std::vector<RangeTuple>& ranges, std::uintptr_t buffer,
                                 std::int64_t priority, py::object memory, std::string what)
{
    std::vector<IoExtent> extents;
    char* cursor = address(buffer);
    for (const auto& [fd, offset, num_bytes] : ranges) {
        extents.push_back({fd, offset, cursor, num_bytes});
        cursor += num_bytes;
    }
    auto ticket = std::make_unique<IoTicket>(std::move(memory), std::move(what));
    engine.submit(kind, std::move(extents), priority,
                  [end = ticket->end()](const IoOutcome& outcome) { end->tell(outcome); });
    ticket->begun();
    return ticket;
}

// Memory of the pool as a byte tensor; the block returns to the pool when the last alias is gone,
// so a tensor that autograd saved keeps its bytes.
py::object allocate_tensor(const std::shared_ptr<AlignedPool>& pool, std::uint64_t num_bytes)
{
    char* block = pool->try_allocate(num_bytes);
    if (block == nullptr) return py::none();
    auto release = [pool](void* pointer) { pool->release(static_cast<char*>(pointer)); };
    return py::cast(
        torch::from_blob(block, {static_cast<std::int64_t>(num_bytes)}, release, torch::kUInt8));
}

void bind_kernels(py::module_& m)
{
    py::enum_<ElementType>(m, "ElementType")
        .value("FLOAT32", ElementType::kFloat32)
        .value("FLOAT16", ElementType::kFloat16)
        .value("BFLOAT16", ElementType::kBFloat16);
    py::class_<UpdateRule, std::shared_ptr<UpdateRule>>(m, "UpdateRule")
        .def(
            "apply",
            [](const UpdateRule& rule, torch::Tensor param, torch::Tensor grad,
               std::vector<torch::Tensor> moments) {
                float* pointers[2] = {moments.at(0).data_ptr<float>(),
                                      moments.size() > 1 ? moments[1].data_ptr<float>() : nullptr};
                rule.apply(param.data_ptr<float>(), grad.data_ptr<float>(), pointers,
                           static_cast<std::size_t>(param.numel()));
            },
            NoGil());
    py::class_<OptimizerClock>(m, "OptimizerClock")
        .def("increment", &OptimizerClock::increment)
        .def("advance", &OptimizerClock::advance)
        .def("rule",
             [](const OptimizerClock& clock, float lr, float eps, float weight_decay,
                bool bias_correction) {
                 return std::const_pointer_cast<UpdateRule>(
                     clock.rule(lr, eps, weight_decay, bias_correction));
             })
        .def("clone", &OptimizerClock::clone);
    py::enum_<NarrowStates>(m, "NarrowStates")
        .value("none", NarrowStates::kNone)
        .value("param", NarrowStates::kParam)
        .value("param_and_moments", NarrowStates::kParamAndMoments);
    m.def("make_adam_clock", &make_adam_clock, py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
          py::arg("eps"), py::arg("weight_decay"), py::arg("adamw_mode"),
          py::arg("narrow") = NarrowStates::kNone);
    m.def("make_lion_clock", &make_lion_clock);
    m.def("make_adagrad_clock", &make_adagrad_clock);
    m.def(
        "sum_of_squares",
        [](ElementType type, const std::vector<std::pair<std::uintptr_t, std::size_t>>& runs,
           int num_lanes) {
            std::vector<ValueRun> gradient;
            gradient.reserve(runs.size());
            for (const auto& [source, numel] : runs) gradient.push_back({address(source), numel});
            return sum_of_squares(type, gradient, num_lanes);
        },
        NoGil());
    m.def(
        "place_sum",
        [](std::uintptr_t words, std::size_t num_words, std::uint64_t first) {
            return place_sum(address(words), num_words, first);
        },
        NoGil());
    m.def(
        "crc32",
        [](std::uintptr_t bytes, std::size_t num_bytes) {
            return crc32(0, address(bytes), num_bytes);
        },
        NoGil());
    m.attr("crc32_is_fast") = crc32_is_fast();
    m.def(
        "scale_gradient",
        [](ElementType type, std::uintptr_t source, std::uintptr_t target, std::size_t numel,
           float multiplier) {
            scale_gradient(type, address(source), reinterpret_cast<float*>(target), numel,
                           multiplier);
        },
        NoGil());
    m.def(
        "narrow_parameter",
        [](ElementType type, std::uintptr_t source, std::uintptr_t target, std::size_t numel) {
            narrow_parameter(type, reinterpret_cast<const float*>(source), address(target), numel);
        },
        NoGil());
}

void bind_io(py::module_& m)
{
    py::enum_<IoKind>(m, "IoKind").value("READ", IoKind::kRead).value("WRITE", IoKind::kWrite);
    py::enum_<IoBackend>(m, "IoBackend")
        .value("AUTO", IoBackend::kAuto)
        .value("IO_URING", IoBackend::kIoUring)
        .value("THREADS", IoBackend::kThreads);
    py::enum_<IoFault::Effect>(m, "IoFaultEffect")
        .value("ERROR", IoFault::Effect::kError)
        .value("SHORT", IoFault::Effect::kShort)
        .value("DELAY", IoFault::Effect::kDelay)
        .value("HOLD", IoFault::Effect::kHold);
    py::class_<IoOutcome>(m, "IoOutcome")
        .def_readonly("error", &IoOutcome::error)
        .def_readonly("fd", &IoOutcome::fd)
        .def_readonly("offset", &IoOutcome::offset);
    py::class_<IoLaneStats>(m, "IoLaneStats")
        .def_readonly("num_operations", &IoLaneStats::num_operations)
        .def_readonly("num_bytes", &IoLaneStats::num_bytes)
        .def_readonly("busy_secs", &IoLaneStats::busy_secs);
    py::class_<IoTicket>(m, "IoTicket")
        .def("done", &IoTicket::done)
        .def("wait", &IoTicket::wait, NoGil())
        .def("outcome", &IoTicket::outcome)
        .def_readwrite("report_secs", &IoTicket::report_secs);
    py::class_<IoEngine, std::shared_ptr<IoEngine>>(m, "IoEngine")
        .def(py::init([](IoBackend backend, unsigned queue_depth, std::uint64_t block_bytes,
                         unsigned num_threads, unsigned num_rings) {
                 IoOptions options;
                 options.backend = backend;
                 options.queue_depth = queue_depth;
                 options.block_bytes = block_bytes;
                 options.num_threads = num_threads;
                 options.num_rings = num_rings;
                 return std::make_shared<IoEngine>(options);
             }),
             py::arg("backend"), py::arg("queue_depth"), py::arg("block_bytes"),
             py::arg("num_threads"), py::arg("num_rings"))
        .def("submit", &submit, py::arg("kind"), py::arg("ranges"), py::arg("buffer"),
             py::arg("priority"), py::arg("memory"), py::arg("what"))
        .def(
            "register_buffer",
            [](IoEngine& engine, std::uintptr_t buffer, std::uint64_t num_bytes) {
                return engine.register_buffer(address(buffer), num_bytes);
            },
            NoGil())
        .def(
            "unregister_buffer",
            [](IoEngine& engine, std::uintptr_t buffer, std::uint64_t num_bytes) {
                engine.unregister_buffer(address(buffer), num_bytes);
            },
            NoGil())
        .def("watch_pages", &IoEngine::watch_pages)
        .def("forget_pages", &IoEngine::forget_pages)
        .def("page_digest",
             [](const IoEngine& engine, const std::vector<RangeTuple>& ranges) {
                 return engine.page_digest(to_ranges(ranges));
             })
        .def("expect_pages",
             [](IoEngine& engine, const std::vector<RangeTuple>& ranges, std::uint64_t digest) {
                 engine.expect_pages(to_ranges(ranges), digest);
             })
        .def("set_throttle", &IoEngine::set_throttle)
        .def(
            "add_fault",
            [](IoEngine& engine, IoKind kind, IoFault::Effect effect, int error, double delay_secs,
               std::uint64_t first, std::uint64_t count, int fd, std::uint64_t offset_begin,
               std::uint64_t offset_end) {
                engine.add_fault(
                    {kind, effect, error, delay_secs, first, count, fd, offset_begin, offset_end});
            },
            py::arg("kind"), py::arg("effect"), py::arg("error") = 5, py::arg("delay_secs") = 0.0,
            py::arg("first") = 0, py::arg("count") = 1, py::arg("fd") = -1,
            py::arg("offset_begin") = 0, py::arg("offset_end") = UINT64_MAX)
        .def("clear_faults", &IoEngine::clear_faults)
        .def("stats", &IoEngine::stats)
        .def_property_readonly("backend", &IoEngine::backend)
        .def_property_readonly("backend_reason", &IoEngine::backend_reason)
        .def_property_readonly("num_in_flight", &IoEngine::num_in_flight)
        .def("close", py::overload_cast<double>(&IoEngine::close), py::arg("timeout_secs"),
             NoGil());
    py::class_<AlignedPool, std::shared_ptr<AlignedPool>>(m, "AlignedPool")
        .def(py::init<std::uint64_t, bool>(), py::arg("num_bytes"), py::arg("inherited") = true)
        .def("allocate_tensor",
             [](const std::shared_ptr<AlignedPool>& pool, std::uint64_t num_bytes) {
                 return allocate_tensor(pool, num_bytes);
             })
        .def_property_readonly(
            "base",
            [](const AlignedPool& pool) { return reinterpret_cast<std::uintptr_t>(pool.base()); })
        .def_property_readonly("capacity_bytes", &AlignedPool::capacity_bytes)
        .def_property_readonly("used_bytes", &AlignedPool::used_bytes)
        .def_property_readonly("peak_bytes", &AlignedPool::peak_bytes)
        .def_property_readonly("largest_free_bytes", &AlignedPool::largest_free_bytes);
}

using SegmentTuple = std::tuple<std::uint64_t, std::uint64_t, std::shared_ptr<UpdateRule>>;

std::vector<UpdateSegment> to_segments(const std::vector<SegmentTuple>& tuples)
{
    std::vector<UpdateSegment> segments;
    segments.reserve(tuples.size());
    for (const auto& [begin, end, rule] : tuples) segments.push_back({begin, end, rule});
    return segments;
}

ChunkSpec make_chunk(const BlockLayout& whole, const BlockLayout& resident,
                     const BlockLayout& stored, std::int64_t position, ElementType param_type,
                     ElementType grad_type, const std::vector<std::vector<RangeTuple>>& state_slots,
                     const std::vector<std::vector<RangeTuple>>& param_slots,
                     const std::vector<RangeTuple>& grad_slot, int num_slots,
                     std::uintptr_t resident_state, std::uintptr_t spare_state,
                     const std::vector<std::uintptr_t>& param_memory)
{
    ChunkSpec spec;
    spec.position = position;
    spec.whole = whole;
    spec.in_memory = resident;
    spec.stored = stored;
    spec.param_type = param_type;
    spec.grad_type = grad_type;
    for (std::size_t i = 0; i < state_slots.size(); ++i)
        spec.state_slots.at(i) = to_ranges(state_slots[i]);
    for (std::size_t i = 0; i < param_slots.size(); ++i)
        spec.param_slots.at(i) = to_ranges(param_slots[i]);
    spec.grad_slot = to_ranges(grad_slot);
    spec.num_slots = num_slots;
    spec.resident_state = address(resident_state);
    spec.spare_state = address(spare_state);
    for (std::size_t i = 0; i < param_memory.size(); ++i)
        spec.param_memory.at(i) = address(param_memory[i]);
    return spec;
}

void bind_blocks(py::module_& m)
{
    py::enum_<MomentType>(m, "MomentType")
        .value("fp32", MomentType::kFloat32)
        .value("bf16", MomentType::kBFloat16)
        .value("int8", MomentType::kInt8);
    m.def(
        "store_codes",
        [](std::uintptr_t values, std::uintptr_t codes, std::uintptr_t scales, std::size_t numel,
           bool is_signed) {
            store_moment(reinterpret_cast<const float*>(values),
                         {MomentType::kInt8,
                          is_signed,
                          address(codes),
                          reinterpret_cast<float*>(scales),
                          {}},
                         numel);
        },
        NoGil());
    py::class_<BlockLayout>(m, "BlockLayout")
        .def(py::init([](std::uint64_t numel, int num_moments, bool is_split, std::uint64_t high,
                         std::uint64_t joints, std::uint64_t master, MomentType moment_type,
                         const std::vector<std::uint64_t>& moments,
                         const std::vector<std::uint64_t>& scales, std::uint64_t num_bytes,
                         bool has_low, const std::vector<std::uint64_t>& cuts) {
                 BlockLayout layout{numel,  num_moments, is_split,    high,   joints,  master,
                                    {0, 0}, num_bytes,   moment_type, {0, 0}, has_low, nullptr};
                 if (!cuts.empty())
                     layout.cuts = std::make_shared<const std::vector<std::uint64_t>>(cuts);
                 for (std::size_t i = 0; i < moments.size(); ++i) {
                     layout.moments.at(i) = moments[i];
                     layout.scales.at(i) = scales.at(i);
                 }
                 return layout;
             }),
             py::kw_only(), py::arg("numel"), py::arg("num_moments"), py::arg("is_split"),
             py::arg("high"), py::arg("joints"), py::arg("master"), py::arg("moment_type"),
             py::arg("moments"), py::arg("scales"), py::arg("num_bytes"), py::arg("has_low"),
             py::arg("cuts"));
    m.def(
        "decode_block",
        [](const BlockLayout& from_layout, std::uintptr_t from, std::uintptr_t param16,
           const BlockLayout& to_layout, std::uintptr_t to) {
            return decode_block({address(from), from_layout}, address(param16),
                                {address(to), to_layout});
        },
        py::arg("from_layout"), py::arg("from"), py::arg("param16"), py::arg("to_layout"),
        py::arg("to"), NoGil());
    m.def(
        "encode_block",
        [](const BlockLayout& from_layout, std::uintptr_t from, const BlockLayout& to_layout,
           std::uintptr_t to) {
            encode_block({address(from), from_layout}, {address(to), to_layout});
        },
        py::arg("from_layout"), py::arg("from"), py::arg("to_layout"), py::arg("to"), NoGil());
}

void bind_pipeline(py::module_& m)
{
    py::class_<PipelineFailure>(m, "PipelineFailure")
        .def_readonly("error", &PipelineFailure::error)
        .def_readonly("fd", &PipelineFailure::fd)
        .def_readonly("offset", &PipelineFailure::offset)
        .def_readonly("what", &PipelineFailure::what);
    py::class_<PipelineStats>(m, "PipelineStats")
        .def_readonly("update_busy_secs", &PipelineStats::update_busy_secs)
        .def_readonly("num_updates", &PipelineStats::num_updates)
        .def_readonly("num_updated_elements", &PipelineStats::num_updated_elements);
    py::class_<ChunkSpec>(m, "ChunkSpec")
        .def(py::init(&make_chunk), py::kw_only(), py::arg("whole"), py::arg("resident"),
             py::arg("stored"), py::arg("position"), py::arg("param_type"), py::arg("grad_type"),
             py::arg("state_slots"), py::arg("param_slots"), py::arg("grad_slot"),
             py::arg("num_slots"), py::arg("resident_state"), py::arg("spare_state"),
             py::arg("param_memory"));
    py::class_<ChunkPipeline, std::shared_ptr<ChunkPipeline>>(m, "ChunkPipeline")
        .def(py::init([](std::shared_ptr<IoEngine> io, std::shared_ptr<AlignedPool> staging,
                         int num_update_threads) {
                 // A child of fork() has no worker to join, and its locks may be held for ever.
                 const auto leave_to_owner = [owner = getpid()](ChunkPipeline* pipeline) {
                     if (getpid() == owner) delete pipeline;
                 };
                 return std::shared_ptr<ChunkPipeline>(
                     new ChunkPipeline(io.get(), staging.get(), num_update_threads),
                     leave_to_owner);
             }),
             py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
        .def("add_chunk", &ChunkPipeline::add_chunk)
        .def("set_destination", &ChunkPipeline::set_destination)
        .def("set_places", &ChunkPipeline::set_places)
        .def("wait_moved", &ChunkPipeline::wait_moved, NoGil())
        .def("is_resident", &ChunkPipeline::is_resident)
        .def("resident_state",
             [](const ChunkPipeline& pipeline, std::size_t chunk) {
                 return reinterpret_cast<std::uintptr_t>(pipeline.resident_state(chunk));
             })
        .def("set_staging",
             [](ChunkPipeline& pipeline, const std::shared_ptr<AlignedPool>& staging) {
                 pipeline.set_staging(staging.get(), staging);
             })
        .def("set_position", &ChunkPipeline::set_position)
        .def(
            "replace_state",
            [](ChunkPipeline& pipeline, std::size_t chunk, std::uintptr_t block, bool has_moments) {
                pipeline.replace_state(chunk, address(block), has_moments);
            },
            py::arg("chunk"), py::arg("block"), py::kw_only(), py::arg("has_moments"), NoGil())
        .def(
            "take_over",
            [](ChunkPipeline& pipeline, std::size_t chunk, bool has_moments,
               std::optional<std::pair<std::uint64_t, std::uint64_t>> sums,
               std::uint64_t param_digest) {
                TakenOver state{has_moments, sums.has_value(), {}, param_digest};
                if (sums) state.sums = {sums->first, sums->second};
                pipeline.take_over(chunk, state);
            },
            py::arg("chunk"), py::kw_only(), py::arg("has_moments"), py::arg("sums"),
            py::arg("param_digest"))
        .def("slot", &ChunkPipeline::slot)
        .def("params_edited", &ChunkPipeline::params_edited)
        .def("has_high", &ChunkPipeline::has_high)
        .def("set_has_high", &ChunkPipeline::set_has_high)
        .def(
            "enqueue",
            [](ChunkPipeline& pipeline, std::size_t chunk, std::int64_t generation,
               const std::vector<SegmentTuple>& segments, float multiplier, std::uintptr_t gradient,
               ElementType gradient_type, int param_version, bool held) {
                pipeline.enqueue({chunk, generation, to_segments(segments), multiplier,
                                  address(gradient), gradient_type, param_version, held});
            },
            py::kw_only(), py::arg("chunk"), py::arg("generation"), py::arg("segments"),
            py::arg("multiplier"), py::arg("gradient"), py::arg("gradient_type"),
            py::arg("param_version"), py::arg("held"))
        .def(
            "release",
            [](ChunkPipeline& pipeline, std::size_t chunk,
               const std::vector<SegmentTuple>& segments, float multiplier, std::uintptr_t gradient,
               ElementType gradient_type, int param_version) {
                pipeline.release(chunk, to_segments(segments), multiplier, address(gradient),
                                 gradient_type, param_version);
            },
            py::kw_only(), py::arg("chunk"), py::arg("segments"), py::arg("multiplier"),
            py::arg("gradient"), py::arg("gradient_type"), py::arg("param_version"))
        .def("invalidate", &ChunkPipeline::invalidate, NoGil())
        .def("publish", &ChunkPipeline::publish, NoGil())
        .def("set_committed", &ChunkPipeline::set_committed, NoGil())
        .def("is_published", &ChunkPipeline::is_published)
        .def("wait_published", &ChunkPipeline::wait_published, NoGil())
        .def("is_updated", &ChunkPipeline::is_updated)
        .def("wait_updated", &ChunkPipeline::wait_updated, NoGil())
        .def(
            "copy_updated",
            [](ChunkPipeline& pipeline, std::size_t chunk, std::uint64_t begin,
               std::uint64_t num_bytes, std::uintptr_t destination) {
                return pipeline.copy_updated(chunk, begin, num_bytes, address(destination));
            },
            NoGil())
        .def("wait_durable", &ChunkPipeline::wait_durable, NoGil())
        .def("wait_gradient_read", &ChunkPipeline::wait_gradient_read, NoGil())
        .def(
            "read_gradient_from_storage",
            [](ChunkPipeline& pipeline, std::size_t chunk, std::uintptr_t buffer) {
                pipeline.read_gradient_from_storage(chunk, address(buffer));
            },
            NoGil())
        .def("wait_idle", &ChunkPipeline::wait_idle, NoGil())
        .def("fail", &ChunkPipeline::fail)
        .def_property_readonly("failed", &ChunkPipeline::failed)
        .def_property_readonly("failure", &ChunkPipeline::failure)
        .def("stats", &ChunkPipeline::stats)
        .def("set_tracing", &ChunkPipeline::set_tracing)
        .def("set_checksum", &ChunkPipeline::set_checksum)
        .def(
            "state_holds",
            [](const ChunkPipeline& pipeline, std::size_t chunk, std::uintptr_t block,
               bool with_moments) {
                return pipeline.state_holds(chunk, address(block), with_moments);
            },
            py::arg("chunk"), py::arg("block"), py::kw_only(), py::arg("with_moments") = true,
            NoGil())
        .def("keep_states", &ChunkPipeline::keep_states)
        .def("lend_buffer", [](ChunkPipeline& pipeline,
                               std::uintptr_t buffer) { pipeline.lend_buffer(address(buffer)); })
        .def(
            "take_kept",
            [](ChunkPipeline& pipeline, double timeout_secs,
               bool may_read) -> std::optional<std::tuple<std::size_t, int, std::uintptr_t, bool>> {
                KeptState taken;
                {
                    const py::gil_scoped_release no_gil;
                    if (!pipeline.take_kept(timeout_secs, may_read, &taken)) return std::nullopt;
                }
                return std::make_tuple(taken.chunk, taken.slot,
                                       reinterpret_cast<std::uintptr_t>(taken.buffer),
                                       taken.is_wanted);
            })
        .def(
            "kept_holds",
            [](const ChunkPipeline& pipeline, std::size_t chunk, std::uintptr_t block) {
                return pipeline.kept_holds(chunk, address(block));
            },
            NoGil())
        .def("release_kept", &ChunkPipeline::release_kept, NoGil())
        .def("drop_kept", &ChunkPipeline::drop_kept, NoGil())
        .def("state_sums",
             [](const ChunkPipeline& pipeline) {
                 std::vector<std::uint64_t> numbers;
                 for (const StateSums& sums : pipeline.state_sums()) {
                     numbers.push_back(sums.param);
                     numbers.push_back(sums.moments);
                 }
                 return py::bytes(reinterpret_cast<const char*>(numbers.data()),
                                  numbers.size() * sizeof(std::uint64_t));
             })
        .def("param_digests",
             [](const ChunkPipeline& pipeline) {
                 std::vector<std::uint64_t> numbers;
                 {
                     py::gil_scoped_release unlocked;
                     numbers = pipeline.param_digests();
                 }
                 return py::bytes(reinterpret_cast<const char*>(numbers.data()),
                                  numbers.size() * sizeof(std::uint64_t));
             })
        .def("half_read_params", &ChunkPipeline::half_read_params, NoGil())
        .def("take_events",
             [](ChunkPipeline& pipeline) {
                 std::vector<std::tuple<int, std::size_t, std::int64_t, double, double>> events;
                 for (const LaneEvent& event : pipeline.take_events()) {
                     events.emplace_back(event.lane, event.chunk, event.generation,
                                         event.begin_secs, event.end_secs);
                 }
                 return events;
             })
        .def("stop", py::overload_cast<double>(&ChunkPipeline::stop), py::arg("timeout_secs"),
             NoGil());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.doc() =
        "Out-of-core core of ds_fuyou: I/O engine, aligned pool, optimizer pipeline, kernels.";
    bind_kernels(m);
    bind_io(m);
    bind_blocks(m);
    bind_pipeline(m);
}
