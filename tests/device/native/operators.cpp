// SPDX-License-Identifier: Apache-2.0
// Every operator by one fallback: what comes out is known from the first call of its kind, so that
// the script has its tensors before the kernel runs.
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <future>
#include <unordered_map>

namespace standin {

using c10::IValue;
using torch::jit::Stack;

namespace {

// ---- what is known of an operator from its schema ----------------------------------------------

struct Operator {
    bool is_view = false;
    bool is_dynamic = false;   // results' sizes follow from values: the host must wait
    bool indexes = false;      // dynamic only where an index is a mask
    bool may_draw = false;     // random numbers
    bool draws = false;        // fills its one tensor with random numbers
    std::vector<int> returns;  // the argument that is returned, or -1 for a new value
};

Operator facts_from(const c10::OperatorHandle& op)
{
    Operator facts;
    const auto& schema = op.schema();
    // The CPU's fused attention draws nothing: with dropout another kernel is chosen.
    facts.may_draw = op.hasTag(at::Tag::nondeterministic_seeded) &&
                     schema.name() != "aten::_scaled_dot_product_flash_attention_for_cpu";
    facts.indexes = schema.name() == "aten::index";
    facts.is_dynamic = op.hasTag(at::Tag::data_dependent_output) || facts.may_draw ||
                       (op.hasTag(at::Tag::dynamic_output_shape) && !facts.indexes);
    const auto is_tensor = [](const c10::TypePtr& type) {
        return type->isSubtypeOf(*c10::TensorType::get());
    };
    for (const auto& each : schema.returns()) {
        facts.returns.push_back(-1);
        if (const auto* info = each.alias_info()) {
            facts.is_view = facts.is_view || !info->isWrite();
            for (size_t i = 0; i < schema.arguments().size(); ++i) {
                const auto* other = schema.arguments()[i].alias_info();
                if (other && *other == *info) facts.returns.back() = int(i);
            }
        }
        const auto list = each.type()->cast<c10::ListType>();
        if (!is_tensor(list ? list->getElementType() : each.type())) facts.is_dynamic = true;
    }
    const auto num_tensors =
        std::count_if(schema.arguments().begin(), schema.arguments().end(),
                      [&](const c10::Argument& each) { return is_tensor(each.type()); });
    facts.draws = facts.may_draw && num_tensors == 1 && facts.returns == std::vector<int>{0};
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

// ---- tensors among the values of a call ---------------------------------------------------------

template <class Change>
IValue each_tensor(const IValue& value, const Change& change)
{
    if (value.isTensor())
        return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
    if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
    c10::List<IValue> out = value.toList().copy();
    for (size_t i = 0; i < out.size(); ++i) out.set(i, each_tensor(out.get(i), change));
    return out;
}

std::vector<Tensor> tensors_of(at::ArrayRef<IValue> values)
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
Stack replaced(const Stack& given, c10::DeviceType type, Tensor (*change)(const Tensor&))
{
    Stack out;
    for (const IValue& value : given) {
        if (value.isDevice() && value.toDevice().type() == kDevice)
            out.emplace_back(c10::Device(type));
        else
            out.push_back(each_tensor(value, [&](const Tensor& each) {
                if (is_ours(each)) return change(each);
                const bool is_number = each.unsafeGetTensorImpl()->is_wrapped_number();
                return is_number ? each : each.detach().clone();
            }));
    }
    return out;
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
Tensor made_like(const Tensor& tensor)
{
    return new_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// ---- a call -------------------------------------------------------------------------------------

struct Call {
    const c10::OperatorHandle op;
    const Stack given;
    const Operator& facts = facts_of(op);
    const char* name = op.schema().name().c_str();
    const bool left_out = settings.skip && settings.leaves_out(bytes());

    size_t bytes() const
    {
        size_t out = 0;
        for (const Tensor& each : tensors_of(given)) out += is_ours(each) ? each.nbytes() : 0;
        return out;
    }

    // What the call returns: its own arguments, and new tensors like those in `like`. An out= that
    // came without elements gets its size.
    Stack results(const Stack& like) const
    {
        Stack out;
        for (size_t i = 0; i < facts.returns.size(); ++i) {
            const int argument = facts.returns[i];
            out.push_back(argument < 0 ? each_tensor(like[i], made_like) : given[argument]);
            if (argument >= 0 && out[i].isTensor() && out[i].toTensor().numel() == 0)
                out[i].toTensor().resize_(like[i].toTensor().sizes());
        }
        return out;
    }

    // Tensors among what it or a kernel returned which are not arguments.
    std::vector<Tensor> fresh(const Stack& returned) const
    {
        std::vector<Tensor> out;
        for (size_t i = 0; i < facts.returns.size(); ++i)
            if (facts.returns[i] < 0)
                for (const Tensor& each : tensors_of(returned[i])) out.push_back(each);
        return out;
    }

    double secs(const std::vector<Tensor>& made) const;
};

double product_flops(const std::string& name, const std::vector<Tensor>& all)
{
    const auto product = [&](size_t a, size_t b, int64_t dim) {
        return 2.0 * double(all[a].numel()) * double(all[b].size(dim));
    };
    if (name == "aten::mm" || name == "aten::bmm") return product(0, 1, -1);
    if (name == "aten::addmm" || name == "aten::baddbmm") return product(1, 2, -1);
    if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") return 2 * product(0, 1, -2);
    if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward")
        return 5 * product(1, 2, -2);
    return 0;
}

double Call::secs(const std::vector<Tensor>& made) const
{
    if (!settings.timed) return 0;
    const std::vector<Tensor> all = tensors_of(given);
    auto moved = double(bytes());
    for (const Tensor& each : made) moved += double(each.nbytes());
    // The rows that are read are as many as come out.
    if (op.schema().name() == "aten::embedding") moved -= double(all[0].nbytes());
    return std::max(product_flops(op.schema().name(), all) / settings.flops,
                    moved / settings.memory_rate);
}

std::vector<Tensor> aliases_of(std::vector<Tensor> tensors)
{
    for (Tensor& each : tensors) each = aliased(each);
    return tensors;
}

void store(const std::vector<Tensor>& found, const std::vector<Tensor>& targets)
{
    TORCH_CHECK(found.size() == targets.size(), "an operator returned other tensors than before");
    for (size_t i = 0; i < found.size(); ++i) {
        TORCH_CHECK(found[i].sizes() == targets[i].sizes() &&
                        found[i].scalar_type() == targets[i].scalar_type(),
                    "an operator's result is not what it was the first time");
        Tensor(targets[i]).copy_(found[i]);
    }
}

// ---- known results ------------------------------------------------------------------------------

// Metadata follow from this: the operator, metadata of its tensors, and whatever is no
// floating-point number.
using Key = std::vector<int64_t>;

void add(Key& key, const IValue& value)
{
    const auto append = [&](at::IntArrayRef numbers) {
        key.insert(key.end(), numbers.begin(), numbers.end());
    };
    if (value.isTensor() && value.toTensor().defined()) {
        const Tensor& tensor = value.toTensor();
        append({is_ours(tensor) ? 't' : 'h', int64_t(tensor.scalar_type()), tensor.dim(),
                tensor.unsafeGetTensorImpl()->is_wrapped_number()});
        append(tensor.sizes());
        append(tensor.strides());
    } else if (value.isList()) {
        append({'l', int64_t(value.toListRef().size())});
        for (const IValue& each : value.toListRef()) add(key, each);
    } else if (value.isInt()) {
        append({'i', value.toInt()});
    } else if (value.isBool()) {
        append({'b', value.toBool()});
    } else if (value.isString()) {
        append({'s', int64_t(std::hash<std::string>()(value.toStringRef()))});
    } else {
        append({value.isNone() ? 'n' : value.isDouble() ? 'd' : '?'});
    }
}

// What a call of this kind makes, without values: tried once on zeros, by the CPU's kernel. (Meta
// kernels, which serve where nothing is computed, do not agree with it on every dtype.)
Stack tried(const Call& call)
{
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (call.left_out) {
        Stack values = replaced(call.given, at::kMeta, without_values);
        try {
            call.op.callBoxed(&values);
            return values;
        } catch (const c10::Error&) {
            count("operators without a meta kernel");
        }
    }
    Stack values = replaced(call.given, at::kCPU, zeros_on_host);
    call.op.callBoxed(&values);
    for (IValue& each : values) each = each_tensor(each, without_values);
    return values;
}

const Stack& known(const Call& call)
{
    static std::mutex& mutex = *new std::mutex;
    static auto& all = *new std::map<Key, Stack>;
    Key key{int64_t(&call.op.schema())};
    for (const IValue& each : call.given) add(key, each);
    {
        std::lock_guard<std::mutex> hold(mutex);
        const auto found = all.find(key);
        if (found != all.end()) return found->second;
    }
    Stack made = tried(call);
    std::lock_guard<std::mutex> hold(mutex);
    return all.emplace(std::move(key), std::move(made)).first->second;
}

// ---- random numbers -----------------------------------------------------------------------------

// Inside, the CPU's kernels, which ask the host's generator, draw the device's numbers.
class Drawing {
  public:
    explicit Drawing(bool draws) : draws_(draws && settings.own_generator)
    {
        if (draws_) exchange();
    }
    ~Drawing()
    {
        if (draws_) exchange();
    }
    Drawing(const Drawing&) = delete;
    Drawing& operator=(const Drawing&) = delete;

  private:
    static void exchange()
    {
        at::Generator host = at::detail::getDefaultCPUGenerator();
        at::Generator own = generator();
        const std::scoped_lock hold(host.mutex(), own.mutex());
        const Tensor before = host.get_state();
        host.set_state(own.get_state());
        own.set_state(before);
    }

    const bool draws_;
};

// ---- three ways to run --------------------------------------------------------------------------

Stack run_late(const Call& call)
{
    Stack out = call.results(known(call));
    const std::vector<Tensor> made = call.fresh(out);
    std::vector<Tensor> targets = aliases_of(made);
    if (call.left_out) {  // what is small may be asked for
        std::erase_if(targets,
                      [](const Tensor& each) { return !Settings::is_small(each.nbytes()); });
        launch(call.name, Engine::compute, call.secs(made), [targets] {
            for (Tensor each : targets) each.zero_();
        });
    } else {
        const auto there = std::make_shared<Call>(
            Call{call.op, replaced(call.given, at::kCPU, aliased), call.facts});
        launch(call.name, Engine::compute, call.secs(made), [there, targets] {
            Stack values = there->given;
            there->op.callBoxed(&values);
            store(there->fresh(values), targets);
        });
    }
    return out;
}

// For results that depend on values the host waits; under `skip` the values are zeros.
Stack run_now(const Call& call)
{
    Stack values = replaced(call.given, at::kCPU, call.left_out ? zeros_on_host : aliased);
    compute_now(call.name, [&] {
        const Drawing drawing(call.facts.may_draw);
        call.op.callBoxed(&values);
    });
    Stack out = call.results(values);
    const std::vector<Tensor> made = call.fresh(out);
    launch(call.name, Engine::compute, call.secs(made),
           [found = call.fresh(values), targets = aliases_of(made)] { store(found, targets); });
    return out;
}

// The host draws at once, so that numbers come in the order of the script.
Stack draw(const Call& call)
{
    std::function<void()> run;
    if (!call.left_out) {
        const Drawing drawing(true);
        Stack values = replaced(call.given, at::kCPU, zeros_on_host);
        call.op.callBoxed(&values);
        run = [drawn = values[0].toTensor(), target = aliased(call.given[0].toTensor())] {
            store({drawn}, {target});
        };
    }
    launch(call.name, Engine::compute, call.secs({}), std::move(run));
    return {call.given[0]};
}

bool has_mask(const Stack& given)
{
    const std::vector<Tensor> all = tensors_of(given);
    return std::any_of(all.begin() + 1, all.end(), [](const Tensor& each) {
        return each.scalar_type() == at::kBool || each.scalar_type() == at::kByte;
    });
}

}  // namespace

at::Generator generator()
{
    static const at::Generator& own = *new at::Generator(at::detail::createCPUGenerator());
    return settings.own_generator ? own : at::detail::getDefaultCPUGenerator();
}

bool is_view(const c10::OperatorHandle& op)
{
    return facts_of(op).is_view;
}

void compute_now(const char* name, const std::function<void()>& run)
{
    std::packaged_task<void()> task(run);
    raise_failure();
    push(current_stream, {.name = name, .run = [&task] { task(); }});
    wait_stream(current_stream, name);
    task.get_future().get();
}

void run_operator(const c10::OperatorHandle& op, Stack* stack)
{
    const auto begin = stack->end() - int64_t(op.schema().arguments().size());
    const Call call{op, Stack(begin, stack->end())};
    TORCH_CHECK(!call.facts.is_view, "the stand-in device has no kernel of the view ",
                op.operator_name());
    const bool needs_values = call.facts.is_dynamic || (call.facts.indexes && has_mask(call.given));
    const Stack out = call.facts.draws ? draw(call) : needs_values ? run_now(call) : run_late(call);
    stack->erase(begin, stack->end());
    stack->insert(stack->end(), out.begin(), out.end());
}

}  // namespace standin
