// SPDX-License-Identifier: Apache-2.0
// Operators with a kernel of their own: memory, metadata, and where torch would not choose what the
// CPU does.
#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

#include "operators.h"

namespace standin {

Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype)
{
    return at::detail::empty_strided_generic(
        sizes, strides, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

Tensor aliased(const Tensor& tensor)
{
    const void* storage = tensor.storage().data_ptr().get();
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

namespace {

// A device without a number is the current one.
void require_own(const std::optional<at::Device>& device)
{
    if (!device || !device->has_index())
        require_own_device("memory");
    else
        require(device->index() == settings.index,
                "stand-in device: memory of another rank's device");
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format)
{
    require_own(device);
    TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
    return at::detail::empty_generic(sizes, &device_memory,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool> pin)
{
    require_own(device);
    TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
    return new_tensor(sizes, strides, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes,
                      std::optional<at::MemoryFormat> format)
{
    TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous,
                "the stand-in device resizes to contiguous only");
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
    if (bytes > self.storage().nbytes()) device_memory.resize(self.storage(), bytes);
    return self;
}

at::Scalar item(const Tensor& self)
{
    Tensor value;
    compute_now("item", [&, here = aliased(self)] { value = here.clone(); });
    return value.item();
}

void record_stream(Tensor& self, at::Stream stream)
{
    if (!left_out("tensor.record_stream"))
        device_memory.used_by(self.storage().data_ptr(), int(stream.id()));
}

Tensor& set_nothing(Tensor& self)
{
    const c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_memory.allocate(0),
                            &device_memory, true);
    return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}

// param.data = a tensor of the other device
bool may_share(const Tensor&, const Tensor&)
{
    return true;
}

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
        return is_ours(each) ? aliased(each).set_requires_grad(each.requires_grad()) : each;
    };
    const auto there = mask ? std::optional<Tensor>(on_host(*mask)) : mask;
    return at::_fused_sdp_choice(on_host(query), on_host(key), on_host(value), there, dropout,
                                 is_causal, scale, enable_gqa);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library)
{
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library)
{
    library.impl("empty.memory_format", TORCH_FN(empty));
    library.impl("empty_strided", TORCH_FN(empty_strided));
    library.impl("_copy_from", TORCH_FN(copy_from));
    library.impl("_local_scalar_dense", TORCH_FN(item));
    library.impl("resize_", TORCH_FN(resize_));
    library.impl("record_stream", TORCH_FN(record_stream));
    library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    library.impl("view", TORCH_FN(at::native::view));
    library.impl("unfold", TORCH_FN(at::native::unfold));
    library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    library.impl("set_.source_Storage",
                 static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
    library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
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
    using enum c10::DispatchKey;
    static auto& library =
        *new torch::Library(torch::Library::IMPL, "aten", PrivateUse1, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findSchema(name);
        if (name.getNamespace() != "aten" || !op) continue;
        const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
        const bool is_composed = has(CompositeExplicitAutograd) ||
                                 has(CompositeExplicitAutogradNonFunctional) ||
                                 has(CompositeImplicitAutograd);
        if (is_composed && has(CPU) && !has(PrivateUse1) && !is_view(*op))
            library.impl(toString(name).c_str() + std::strlen("aten::"),
                         torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    }
}

}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::attention_choice)
}
