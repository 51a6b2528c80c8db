// SPDX-License-Identifier: Apache-2.0
#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

namespace standin {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

thread_local int the_stream = 0;

std::mutex& counters_mutex = *new std::mutex;
std::map<std::string, int64_t>& counted = *new std::map<std::string, int64_t>;
void count(const std::string& name, int64_t n = 1)
{
    std::lock_guard<std::mutex> hold(counters_mutex);
    counted[name] += n;
}

// ---- allocators -------------------------------------------------------------------------------

class OnDevice final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t bytes) override
    {
        const c10::Device device(kDevice, 0);
        try {
            void* at = device_memory.allocate(bytes, the_stream);
            return {at, at, &release, device};
        } catch (const OutOfMemory& error) {
            C10_THROW_ERROR(OutOfMemoryError, error.what());
        }
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t bytes) const override;

  private:
    static void release(void* at) { device_memory.release(at); }
};

class Pinned final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t bytes) override
    {
        void* at = host_memory.allocate(bytes);
        return {at, at, &release, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t bytes) const override
    {
        std::memcpy(to, from, bytes);
    }

  private:
    static void release(void* at) { host_memory.release(at); }
};

OnDevice& on_device = *new OnDevice;
Pinned& pinned = *new Pinned;

Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype)
{
    return at::detail::empty_strided_generic(
        sizes, strides, &on_device, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

bool is_ours(const Tensor& tensor)
{
    return tensor.defined() && tensor.device().type() == kDevice;
}

// The same values as workers reach them. As a launched kernel's arguments it keeps nothing alive.
Tensor aliased(const Tensor& tensor)
{
    void* storage = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
    char* at = storage ? device_memory.real(storage) + tensor.storage_offset() * tensor.itemsize()
                       : nullptr;
    Tensor out = at::from_blob(at, tensor.sizes(), tensor.strides(),
                               tensor.options().device(at::kCPU).requires_grad(false));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        out.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (tensor.is_conj()) out._set_conj(true);
    if (tensor.is_neg()) out._set_neg(true);
    return out;
}
Tensor unowned(const Tensor& host)
{
    return at::from_blob(const_cast<void*>(host.const_data_ptr()), host.sizes(), host.strides(),
                         host.options().requires_grad(false));
}

void launch(const char* name, Engine engine, double secs, std::function<void()> run)
{
    raise_failure();
    if (settings.timed) count(std::string("ns of ") + name, std::llround(secs * 1e9));
    push(the_stream, {.name = name,
                      .engine = engine,
                      .secs = secs,
                      .latency = engine == Engine::compute ? settings.launch_secs : 0,
                      .run = std::move(run)});
}

// Under `skip` what is small is computed all the same: counts, flags and losses that scripts and
// DeepSpeed decide by. The rest is left out.
constexpr size_t kSmall = size_t{16} << 10;
bool is_left_out(size_t bytes)
{
    return settings.skip && bytes > kSmall;
}

// For what the host needs at once: computed in the stream's order, also where nothing else is.
void compute_now(const char* name, const std::function<void()>& run)
{
    std::exception_ptr failed;
    raise_failure();
    push(the_stream, {.name = name, .run = [&] {
                          try {
                              run();
                          } catch (...) {
                              failed = std::current_exception();
                          }
                      }});
    wait_stream(the_stream, name);
    if (failed) std::rethrow_exception(failed);
}

// ---- copies -----------------------------------------------------------------------------------

void move_bytes(const char* name, char* to, const char* from, size_t bytes)
{
    launch(name, Engine::compute, 2 * double(bytes) / settings.memory_rate,
           [=, left_out = is_left_out(bytes)] {
               if (!left_out) std::memcpy(to, from, bytes);
           });
}

const char* words_of(bool is_up, bool is_late)
{
    if (is_up) return is_late ? "copy up" : "copy up, waited for";
    return is_late ? "copy down" : "copy down, waited for";
}

void copy_late(const Tensor& from, const Tensor& to, bool is_up)
{
    const Tensor& host = is_up ? from : to;
    const double rate = is_up ? settings.up_rate : settings.down_rate;
    const auto bytes = double(host.nbytes());
    raise_failure();  // before: what is refused is not in flight
    const int64_t flight = host_memory.begin(host.const_data_ptr(), host.nbytes(), is_up);
    const Tensor source = is_up ? unowned(from) : aliased(from),
                 target = is_up ? aliased(to) : unowned(to);
    const bool left_out = is_left_out(host.nbytes());
    Work work{.name = words_of(is_up, true), .engine = is_up ? Engine::up : Engine::down};
    work.secs = bytes / rate;
    work.run = [=] {
        host_memory.arrive(flight);
        if (!left_out)
            std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
        else if (!is_up && settings.zeros)
            std::memset(target.mutable_data_ptr(), 0, target.nbytes());
        host_memory.end(flight);
    };
    push(the_stream, std::move(work));
}

// As CUDA's: late where the host's side is pinned, contiguous and of the same type; the host waits
// otherwise. Small pageable sources are taken at once.
void copy_across(const Tensor& from, const Tensor& to, bool non_blocking)
{
    const bool is_up = is_ours(to);
    if (from.scalar_type() != to.scalar_type() || from.sizes() != to.sizes() ||
        !from.is_contiguous() || !to.is_contiguous() || from.is_conj() != to.is_conj() ||
        from.is_neg() != to.is_neg()) {
        const Tensor source =
            from.resolve_conj().resolve_neg().to(to.scalar_type()).expand(to.sizes()).contiguous();
        if (to.is_contiguous()) return copy_across(source, to, non_blocking);
        Tensor between = at::empty(to.sizes(), to.options());
        copy_across(source, between, non_blocking);
        to.copy_(between);
        return;
    }
    const Tensor& host = is_up ? from : to;
    const bool is_pinned = host_memory.is_pinned(host.const_data_ptr(), host.nbytes());
    const bool is_late = non_blocking && is_pinned;
    const std::string way = is_up ? "up" : "down";
    count("copies " + way +
          (is_late     ? " late"
           : is_pinned ? " waited for"
                       : " pageable") +
          " on stream " + std::to_string(the_stream));
    count("bytes " + way, int64_t(host.nbytes()));
    if (is_late) return copy_late(from, to, is_up);
    constexpr size_t kTakenAtOnce = size_t{64} << 10;
    const Engine engine = is_up ? Engine::up : Engine::down;
    const double secs = double(host.nbytes()) / (is_up ? settings.up_rate : settings.down_rate);
    const char* name = words_of(is_up, false);
    if (is_up && non_blocking && host.nbytes() <= kTakenAtOnce) {
        const Tensor staged = from.clone(), target = aliased(to);
        launch(name, engine, secs, [=] {
            std::memcpy(target.mutable_data_ptr(), staged.const_data_ptr(), staged.nbytes());
        });
        return;
    }
    const bool left_out = is_left_out(host.nbytes());
    if (left_out && !is_up) to.zero_();  // the host reads what is defined
    const Tensor source = is_up ? unowned(from) : aliased(from),
                 target = is_up ? aliased(to) : unowned(to);
    launch(name, engine, secs, [=] {
        if (!left_out)
            std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
    });
    wait_stream(the_stream, non_blocking ? "pageable copy" : "copy");
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking)
{
    if (to.numel() == 0) return to;
    if (!is_ours(from) || !is_ours(to)) {
        copy_across(from, to, non_blocking);
        return to;
    }
    const Tensor source = aliased(from), target = aliased(to);
    const size_t bytes = from.nbytes() + to.nbytes();
    const bool left_out = is_left_out(bytes);
    launch("copy", Engine::compute, double(bytes) / settings.memory_rate, [=] {
        Tensor out = target;
        if (!left_out) out.copy_(source);
    });
    return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to)
{
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes,
                      std::optional<at::MemoryFormat> format)
{
    TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous,
                "the stand-in device resizes to contiguous only");
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
    if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
    return self;
}

// ---- every other operator ---------------------------------------------------------------------

// What is known of an operator from its schema.
struct Operator {
    bool is_view = false;
    bool is_dynamic =
        false;  // outputs' sizes follow from values, or numbers are drawn: the host must wait
    std::vector<int> returns;  // the argument that is returned, or -1 for a new value
    bool indexes = false;      // dynamic only where an index is a mask
    bool draws = false;        // fills its one tensor with random numbers
};

Operator facts_from(const c10::OperatorHandle& op)
{
    Operator facts;
    const auto& schema = op.schema();
    facts.indexes = schema.name() == "aten::index";
    // The CPU's fused attention draws nothing: with dropout another kernel is chosen.
    const bool may_draw = op.hasTag(at::Tag::nondeterministic_seeded) &&
                          schema.name() != "aten::_scaled_dot_product_flash_attention_for_cpu";
    facts.is_dynamic = op.hasTag(at::Tag::data_dependent_output) || may_draw ||
                       (op.hasTag(at::Tag::dynamic_output_shape) && !facts.indexes);
    const auto is_tensor = [](const c10::TypePtr& type) {
        return type->kind() == c10::TypeKind::TensorType;
    };
    for (const auto& each : schema.returns()) {
        int argument = -1;
        if (const auto* info = each.alias_info()) {
            facts.is_view = facts.is_view || !info->isWrite();
            for (size_t i = 0; i < schema.arguments().size(); ++i) {
                const auto* other = schema.arguments()[i].alias_info();
                if (other && *other == *info) argument = int(i);
            }
        }
        const auto list = each.type()->cast<c10::ListType>();
        if (!is_tensor(each.type()) && !(list && is_tensor(list->getElementType())))
            facts.is_dynamic = true;
        facts.returns.push_back(argument);
    }
    int num_tensors = 0;
    for (const auto& argument : schema.arguments()) num_tensors += is_tensor(argument.type());
    facts.draws = op.hasTag(at::Tag::nondeterministic_seeded) && num_tensors == 1 &&
                  facts.returns == std::vector<int>{0};
    return facts;
}

const Operator& facts_of(const c10::OperatorHandle& op)
{
    static std::mutex& mutex = *new std::mutex;
    static auto& known = *new std::unordered_map<const void*, Operator>;
    std::lock_guard<std::mutex> hold(mutex);
    const auto found = known.find(&op.schema());
    return found != known.end() ? found->second
                                : known.emplace(&op.schema(), facts_from(op)).first->second;
}

template <class Change>
IValue each_tensor(const IValue& value, const Change& change)
{
    if (value.isTensor())
        return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<Tensor> out;
        for (const Tensor& each : value.toTensorVector())
            out.push_back(each.defined() ? change(each) : each);
        return out;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> out;
        for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
            out.push_back(each && each->defined() ? std::optional<Tensor>(change(*each)) : each);
        return out;
    }
    return value;
}

std::vector<Tensor> tensors_of(const std::vector<IValue>& values)
{
    std::vector<Tensor> out;
    for (const IValue& value : values)
        each_tensor(value, [&](const Tensor& each) {
            out.push_back(each);
            return each;
        });
    return out;
}

// Arguments with our tensors replaced; the host's are taken now, for the host may change them
// before the kernel runs.
template <class Change>
Stack replaced(const std::vector<IValue>& given, c10::DeviceType type, const Change& change)
{
    Stack out;
    for (const IValue& value : given) {
        if (value.isDevice() && value.toDevice().type() == kDevice) {
            out.emplace_back(c10::Device(type));
            continue;
        }
        out.push_back(each_tensor(value, [&](const Tensor& each) {
            if (is_ours(each)) return change(each);
            return each.unsafeGetTensorImpl()->is_wrapped_number() ? each : each.detach().clone();
        }));
    }
    return out;
}
Stack with_aliases(const std::vector<IValue>& given)
{
    return replaced(given, at::kCPU, aliased);
}

// The metadata of a call's results.
struct Shape {
    bool is_defined;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
};
struct Results {
    std::vector<int> lengths;  // by return: of a list, or -1 for a tensor
    std::vector<Shape> fresh;  // of all new tensors in order
    std::vector<std::pair<int, std::vector<int64_t>>>
        resized;  // out= arguments that came without elements
};

// Metadata follow from this: the operator, metadata of its tensors, and whatever is no
// floating-point number.
class Key {
  public:
    explicit Key(const void* op) { number(int64_t(op)); }
    void add(const IValue& value)
    {
        if (value.isTensor()) return tensor(value.toTensor());
        if (value.isInt()) return tagged('i', value.toInt());
        if (value.isBool()) return tagged('b', value.toBool());
        if (value.isString()) {
            tagged('s', int64_t(value.toStringRef().size()));
            text += value.toStringRef();
        } else if (value.isIntList()) {
            tagged('I', int64_t(value.toIntVector().size()));
            for (int64_t each : value.toIntVector()) number(each);
        } else if (value.isBoolList()) {
            const auto all = value.toBoolList();
            tagged('B', int64_t(all.size()));
            for (bool each : all) number(each);
        } else if (value.isTensorList()) {
            tagged('T', int64_t(value.toTensorVector().size()));
            for (const Tensor& each : value.toTensorVector()) tensor(each);
        } else if (value.isOptionalTensorList()) {
            const auto all = value.toOptionalTensorVector();
            tagged('O', int64_t(all.size()));
            for (const std::optional<Tensor>& each : all) tensor(each.value_or(Tensor()));
        } else {
            text.push_back(value.isNone() ? 'n' : value.isDouble() ? 'd' : '?');
        }
    }
    std::string text;

  private:
    void number(int64_t value) { text.append(reinterpret_cast<const char*>(&value), sizeof value); }
    void tagged(char tag, int64_t value)
    {
        text.push_back(tag);
        number(value);
    }
    void tensor(const Tensor& tensor)
    {
        if (!tensor.defined()) return text.push_back('u');
        text.push_back(is_ours(tensor) ? 't' : 'h');
        text.push_back(char(tensor.scalar_type()));
        text.push_back(char('0' + tensor.unsafeGetTensorImpl()->is_wrapped_number()));
        number(tensor.dim());
        for (int64_t each : tensor.sizes()) number(each);
        for (int64_t each : tensor.strides()) number(each);
    }
};

std::vector<Tensor> fresh_of(const Stack& returned, const Operator& facts)
{
    std::vector<Tensor> out;
    for (size_t i = 0; i < facts.returns.size(); ++i) {
        if (facts.returns[i] >= 0) continue;
        if (returned[i].isTensor()) out.push_back(returned[i].toTensor());
        if (returned[i].isTensorList())
            for (const Tensor& each : returned[i].toTensorVector()) out.push_back(each);
    }
    return out;
}

Results results_of(const std::vector<IValue>& given, const Stack& returned, const Operator& facts)
{
    Results out;
    for (size_t i = 0; i < facts.returns.size(); ++i) {
        const int argument = facts.returns[i];
        const bool is_list = argument < 0 && returned[i].isTensorList();
        out.lengths.push_back(is_list ? int(returned[i].toTensorVector().size()) : -1);
        if (argument < 0 || !given[argument].isTensor() || !returned[i].isTensor()) continue;
        const Tensor& was = given[argument].toTensor();
        const Tensor& is = returned[i].toTensor();
        if (is_ours(was) && was.numel() == 0 && is.numel() != 0)
            out.resized.emplace_back(argument, is.sizes().vec());
    }
    for (const Tensor& each : fresh_of(returned, facts)) {
        if (each.defined())
            out.fresh.push_back(
                {true, each.sizes().vec(), each.strides().vec(), each.scalar_type()});
        else
            out.fresh.push_back({false, {}, {}, at::kFloat});
    }
    return out;
}

std::vector<Tensor> make_fresh(const std::vector<IValue>& given, const Results& results)
{
    for (const auto& [argument, sizes] : results.resized)
        resize_(given[argument].toTensor(), sizes, std::nullopt);
    std::vector<Tensor> out;
    for (const Shape& each : results.fresh)
        out.push_back(each.is_defined ? new_tensor(each.sizes, each.strides, each.dtype)
                                      : Tensor());
    return out;
}

double product_flops(const std::string& name, const std::vector<Tensor>& all)
{
    const auto product = [&](size_t a, size_t b) {
        return 2.0 * double(all[a].numel()) * double(all[b].size(-1));
    };
    if (name == "aten::mm" || name == "aten::bmm") return product(0, 1);
    if (name == "aten::addmm" || name == "aten::baddbmm") return product(1, 2);
    if (name == "aten::_scaled_dot_product_flash_attention_for_cpu")
        return 4.0 * double(all[0].numel()) * double(all[1].size(-2));
    if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward")
        return 10.0 * double(all[1].numel()) * double(all[2].size(-2));
    return 0;
}

double cost_of(const c10::OperatorHandle& op, const std::vector<IValue>& given,
               const std::vector<Tensor>& fresh)
{
    if (!settings.timed) return 0;
    const std::string& name = op.schema().name();
    const std::vector<Tensor> all = tensors_of(given);
    double bytes = 0;
    for (const Tensor& each : all) bytes += is_ours(each) ? double(each.nbytes()) : 0;
    for (const Tensor& each : fresh) bytes += each.defined() ? double(each.nbytes()) : 0;
    if (name == "aten::embedding")
        bytes -= double(all[0].nbytes());  // the rows that are read are as many as come out
    return std::max(product_flops(name, all) / settings.flops, bytes / settings.memory_rate);
}

void give_back(Stack* stack, const std::vector<IValue>& given, const Stack* returned,
               const Operator& facts, const Results& results, const std::vector<Tensor>& fresh)
{
    stack->erase(stack->end() - int64_t(given.size()), stack->end());
    size_t next = 0;
    for (size_t i = 0; i < facts.returns.size(); ++i) {
        if (facts.returns[i] >= 0) {
            stack->push_back(given[facts.returns[i]]);
        } else if (results.lengths[i] >= 0) {
            c10::List<Tensor> list;
            for (int k = 0; k < results.lengths[i]; ++k) list.push_back(fresh[next++]);
            stack->emplace_back(std::move(list));
        } else if (returned && !(*returned)[i].isTensor()) {
            stack->push_back((*returned)[i]);
        } else {
            stack->emplace_back(fresh[next++]);
        }
    }
}

Tensor zeros_on_host(const Tensor& tensor)
{
    return at::empty_strided(tensor.sizes(), tensor.strides(),
                             tensor.options().device(at::kCPU).requires_grad(false))
        .zero_();
}
Tensor without_values(const Tensor& tensor)
{
    return at::empty_strided(tensor.sizes(), tensor.strides(),
                             tensor.options().device(at::kMeta).requires_grad(false));
}

size_t bytes_of(const std::vector<IValue>& given)
{
    size_t bytes = 0;
    for (const Tensor& each : tensors_of(given)) bytes += is_ours(each) ? each.nbytes() : 0;
    return bytes;
}

// What a call of this kind makes: tried once on zeros, by the CPU's kernel. (Meta kernels, which
// serve where nothing is computed, do not agree with it on every dtype.)
Results tried(const c10::OperatorHandle& op, const std::vector<IValue>& given,
              const Operator& facts)
{
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (is_left_out(bytes_of(given))) {
        Stack call = replaced(given, at::kMeta, without_values);
        try {
            op.callBoxed(&call);
            return results_of(given, call, facts);
        } catch (const c10::Error&) {
            count("operators without a meta kernel");
        }
    }
    Stack call = replaced(given, at::kCPU, zeros_on_host);
    op.callBoxed(&call);
    return results_of(given, call, facts);
}

std::mutex& known_mutex = *new std::mutex;
auto& known_results = *new std::unordered_map<std::string, std::shared_ptr<const Results>>;

std::shared_ptr<const Results> results_for(const c10::OperatorHandle& op,
                                           const std::vector<IValue>& given, const Operator& facts)
{
    Key key(&op.schema());
    for (const IValue& each : given) key.add(each);
    {
        std::lock_guard<std::mutex> hold(known_mutex);
        const auto found = known_results.find(key.text);
        if (found != known_results.end()) return found->second;
    }
    auto results = std::make_shared<const Results>(tried(op, given, facts));
    std::lock_guard<std::mutex> hold(known_mutex);
    return known_results.emplace(std::move(key.text), std::move(results)).first->second;
}

void store(const std::vector<Tensor>& found, const std::vector<Tensor>& targets)
{
    TORCH_CHECK(found.size() == targets.size(),
                "an operator returned other tensors than the first time");
    for (size_t i = 0; i < found.size(); ++i) {
        TORCH_CHECK(found[i].defined() == targets[i].defined(),
                    "an operator returned other tensors than the first time");
        if (!found[i].defined()) continue;
        TORCH_CHECK(found[i].sizes() == targets[i].sizes() &&
                        found[i].scalar_type() == targets[i].scalar_type(),
                    "an operator's result is not what it was the first time");
        Tensor target = targets[i];
        target.copy_(found[i]);
    }
}

std::vector<Tensor> aliases_of(const std::vector<Tensor>& tensors)
{
    std::vector<Tensor> out;
    for (const Tensor& each : tensors) out.push_back(each.defined() ? aliased(each) : each);
    return out;
}

bool has_mask(const std::vector<IValue>& given)
{
    for (const Tensor& each : tensors_of({given.begin() + 1, given.end()}))
        if (each.scalar_type() == at::kBool || each.scalar_type() == at::kByte) return true;
    return false;
}

// For results that depend on values the host waits; under `skip` the values are zeros.
void run_now(const c10::OperatorHandle& op, Stack* stack, const std::vector<IValue>& given,
             const Operator& facts)
{
    Stack call = is_left_out(bytes_of(given)) ? replaced(given, at::kCPU, zeros_on_host)
                                              : with_aliases(given);
    for (int argument : facts.returns)
        if (argument >= 0 && given[argument].isTensor() && is_ours(given[argument].toTensor()) &&
            given[argument].toTensor().numel() == 0)  // an out= tensor that the kernel may resize
            call[argument] = at::empty({0}, given[argument].toTensor().options().device(at::kCPU));
    const char* name = op.schema().name().c_str();
    compute_now(name, [&] { op.callBoxed(&call); });
    const Results results = results_of(given, call, facts);
    const std::vector<Tensor> fresh = make_fresh(given, results);
    std::vector<Tensor> found = fresh_of(call, facts), targets = aliases_of(fresh);
    for (const auto& [argument, sizes] : results.resized) {
        targets.push_back(aliased(given[argument].toTensor()));
        const auto at =
            std::find(facts.returns.begin(), facts.returns.end(), argument) - facts.returns.begin();
        found.push_back(call[at].toTensor());
    }
    launch(name, Engine::compute, cost_of(op, given, fresh), [=] { store(found, targets); });
    give_back(stack, given, &call, facts, results, fresh);
}

// The host draws at once, so that numbers come in the order of the script.
void draw(const c10::OperatorHandle& op, Stack* stack, const std::vector<IValue>& given,
          const Operator& facts)
{
    Stack call = replaced(given, at::kCPU, zeros_on_host);
    const bool left_out = is_left_out(bytes_of(given));
    if (!left_out) op.callBoxed(&call);
    launch(op.schema().name().c_str(), Engine::compute, cost_of(op, given, {}),
           [left_out, drawn = call[0].toTensor(), target = aliased(given[0].toTensor())] {
               if (!left_out) store({drawn}, {target});
           });
    give_back(stack, given, nullptr, facts, {{-1}, {}, {}}, {});
}

void run_operator(const c10::OperatorHandle& op, Stack* stack)
{
    const std::vector<IValue> given(stack->end() - int64_t(op.schema().arguments().size()),
                                    stack->end());
    const Operator& facts = facts_of(op);
    TORCH_CHECK(!facts.is_view, "the stand-in device has no kernel of the view ",
                op.operator_name());
    if (facts.draws) return draw(op, stack, given, facts);
    if (facts.is_dynamic || (facts.indexes && has_mask(given)))
        return run_now(op, stack, given, facts);
    const auto results = results_for(op, given, facts);
    const std::vector<Tensor> fresh = make_fresh(given, *results);
    const double secs = cost_of(op, given, fresh);
    const char* name = op.schema().name().c_str();
    if (is_left_out(bytes_of(given))) {
        std::vector<Tensor> small;  // these may be asked for
        for (const Tensor& each : fresh)
            if (each.defined() && each.nbytes() <= kSmall) small.push_back(aliased(each));
        launch(name, Engine::compute, secs, [small] {
            for (Tensor each : small) each.zero_();
        });
    } else {
        auto call = std::make_shared<Stack>(with_aliases(given));
        launch(name, Engine::compute, secs, [op, call, targets = aliases_of(fresh), &facts] {
            op.callBoxed(call.get());
            store(fresh_of(*call, facts), targets);
        });
    }
    give_back(stack, given, nullptr, facts, *results, fresh);
}

// ---- kernels of their own ---------------------------------------------------------------------

void refuse_pinned(std::optional<bool> pin)
{
    TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
}
Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format)
{
    refuse_pinned(pin);
    return at::detail::empty_generic(sizes, &on_device,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool> pin)
{
    refuse_pinned(pin);
    return new_tensor(sizes, strides, c10::dtype_or_default(dtype));
}
at::Scalar item(const Tensor& self)
{
    Tensor value;
    compute_now("item", [&, here = aliased(self)] { value = here.clone(); });
    return value.item();
}
void record_stream(Tensor& self, at::Stream stream)
{
    if (left_out("tensor.record_stream")) return;
    device_memory.used_by(
        self.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(),
        int(stream.id()));
}
Tensor& set_at(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
               at::IntArrayRef strides)
{
    return at::native::set_storage_cpu_(self, std::move(storage), offset, sizes, strides);
}
Tensor& set_nothing(Tensor& self)
{
    const c10::Storage none(c10::Storage::use_byte_size_t(), 0, on_device.allocate(0), &on_device,
                            true);
    return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}
bool may_share(const Tensor&, const Tensor&)
{
    return true;
}  // param.data = a tensor of the other device

// torch gives devices a fused kernel of its own; the CPU multiplies by noise.
Tensor dropout(const Tensor& input, double p, bool train)
{
    TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
    if (p == 0 || !train || input.numel() == 0) return input;
    if (p == 1) return input.mul(at::zeros({}, input.options()));
    return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

// The CPU's choice of an attention kernel, from the same sizes.
int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool enable_gqa)
{
    const auto on_host = [](const Tensor& each) {
        return aliased(each).set_requires_grad(each.requires_grad());
    };
    std::optional<Tensor> there;
    if (mask && mask->defined()) there = is_ours(*mask) ? on_host(*mask) : *mask;
    return at::_fused_sdp_choice(on_host(query), on_host(key), on_host(value), there, dropout,
                                 is_causal, scale, enable_gqa);
}

}  // namespace

void OnDevice::copy_data(void* to, const void* from, size_t bytes) const
{
    move_bytes("clone", device_memory.real(to), device_memory.real(from), bytes);
}

int current_stream()
{
    return the_stream;
}
void set_current_stream(int stream)
{
    the_stream = stream;
}
c10::Allocator* device_allocator()
{
    return &on_device;
}
c10::Allocator* pinned_allocator()
{
    return &pinned;
}

std::map<std::string, int64_t> counters()
{
    std::lock_guard<std::mutex> hold(counters_mutex);
    return counted;
}

void resize_storage(const c10::Storage& storage, size_t bytes)
{
    auto* of = storage.unsafeGetStorageImpl();
    c10::DataPtr fresh = on_device.allocate(bytes);
    const size_t kept = std::min(of->nbytes(), bytes);
    if (kept > 0) on_device.copy_data(fresh.get(), of->_mutable_data_ptr_no_checks().get(), kept);
    of->set_data_ptr(std::move(fresh));
    of->set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library)
{
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library)
{
    library.impl("empty.memory_format", TORCH_FN(empty));
    library.impl("empty_strided", TORCH_FN(empty_strided));
    library.impl("_copy_from", TORCH_FN(copy_from));
    library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    library.impl("_local_scalar_dense", TORCH_FN(item));
    library.impl("resize_", TORCH_FN(resize_));
    library.impl("record_stream", TORCH_FN(record_stream));
    library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    library.impl("view", TORCH_FN(at::native::view));
    library.impl("unfold", TORCH_FN(at::native::unfold));
    library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    library.impl("set_.source_Storage",
                 static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
    library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_at));
    library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
    library.impl("set_", TORCH_FN(set_nothing));
    library.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_share));
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library)
{
    library.impl("dropout", TORCH_FN(dropout));
    library.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_share));
}

void register_operators()
{
    using c10::DispatchKey;
    static auto& library = *new torch::Library(torch::Library::IMPL, "aten",
                                               DispatchKey::PrivateUse1, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findSchema(name);
        if (name.getNamespace() != "aten" || !op || !op->hasKernelForDispatchKey(DispatchKey::CPU))
            continue;
        const bool is_composed =
            op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
            op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
            op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
        if (!is_composed || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) ||
            facts_from(*op).is_view)
            continue;
        library.impl(toString(name).c_str() + std::strlen("aten::"),
                     torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    }
}

}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::attention_choice)
}
