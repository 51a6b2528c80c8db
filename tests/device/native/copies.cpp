// SPDX-License-Identifier: Apache-2.0
// Copies: on the device, and across the link.
#include <cstring>

#include "operators.h"

namespace standin {
namespace {

constexpr size_t kTakenAtOnce = size_t{64} << 10;

const char* name_of(bool is_up, bool is_late)
{
    if (is_up) return is_late ? "copy up" : "copy up, waited for";
    return is_late ? "copy down" : "copy down, waited for";
}

bool is_plain(const Tensor& tensor)
{
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// As CUDA's: late where the host's side is pinned, contiguous and of the same type; the host waits
// otherwise. Small pageable sources are taken at once; what is registered in part is refused.
void copy_across(const Tensor& from, const Tensor& to, bool non_blocking)
{
    if (from.scalar_type() != to.scalar_type() || from.sizes() != to.sizes() || !is_plain(from) ||
        !is_plain(to)) {
        const Tensor source = from.to(to.scalar_type()).expand(to.sizes()).resolve_conj();
        const Tensor target = is_plain(to) ? to : at::empty(to.sizes(), to.options());
        copy_across(source.resolve_neg().contiguous(), target, non_blocking);
        if (!target.is_same(to)) to.copy_(target);
        return;
    }
    const bool is_up = is_ours(to);
    const Tensor& host = is_up ? from : to;
    const size_t bytes = host.nbytes();
    const bool is_pinned = host_memory.is_pinned(host.const_data_ptr(), bytes);
    require(is_pinned || !host_memory.overlaps_pinned(host.const_data_ptr(), bytes),
            "stand-in device: invalid argument: a copy of host memory that is pinned in part");
    const bool is_late = non_blocking && is_pinned;
    const bool is_taken = is_up && non_blocking && !is_pinned && bytes <= kTakenAtOnce;
    const std::string way = is_up ? "up" : "down";
    const char* when = is_late ? " late" : is_pinned ? " waited for" : " pageable";
    count("copies " + way + when + " on stream " + std::to_string(current_stream));
    count("bytes " + way, int64_t(bytes));
    raise_failure();  // before: what is refused is not in flight
    const bool left_out = settings.leaves_out(bytes);
    // Who waits reads what is defined.
    const bool is_zeroed = left_out && !is_up && (!is_late || settings.zeros);
    const Tensor source = is_ours(from) ? aliased(from) : is_taken ? from.clone() : from;
    const Tensor target = is_up ? aliased(to) : to;
    const Tensor taken = is_taken ? source : Tensor();  // of a late copy nothing is kept alive
    std::function<void()> move = [taken, read = source.const_data_ptr(),
                                  written = target.mutable_data_ptr(), bytes, left_out, is_zeroed] {
        if (!left_out) std::memcpy(written, read, bytes);
        if (is_zeroed) std::memset(written, 0, bytes);
    };
    if (is_late) move = host_memory.watched(host.const_data_ptr(), bytes, is_up, std::move(move));
    Work work{.name = name_of(is_up, is_late), .engine = is_up ? Engine::up : Engine::down};
    work.secs = double(bytes) / (is_up ? settings.up_rate : settings.down_rate);
    work.run = std::move(move);
    push(current_stream, std::move(work));
    if (!is_late && !is_taken) wait_stream(current_stream, non_blocking ? "pageable copy" : "copy");
}

}  // namespace

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking)
{
    if (to.numel() == 0) return to;
    if (!is_ours(from) || !is_ours(to)) {
        copy_across(from, to, non_blocking);
        return to;
    }
    const size_t bytes = from.nbytes() + to.nbytes();
    launch("copy", Engine::compute, double(bytes) / settings.memory_rate,
           [source = aliased(from), target = aliased(to), left_out = settings.leaves_out(bytes)] {
               if (!left_out) Tensor(target).copy_(source);
           });
    return to;
}

}  // namespace standin
