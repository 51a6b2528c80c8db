# SPDX-License-Identifier: Apache-2.0
"""From autograd's hooks to the out-of-core optimizer: reduced by block, kept as G16, updated when complete."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from deepspeed import comm as dist

from ds_fuyou.optimizer.norms import rounds_safely
from ds_fuyou.zero.blocks import block_of
from ds_fuyou.zero.stock import get_norm_dtype, is_boundary

__all__ = ["GradientFlowMixin"]


class GradientFlowMixin:
    """Overrides of stage 3's reduce and partition path. All of it runs in the thread of the autograd hooks."""

    def _init_gradient_flow(self: Any) -> None:
        self._pending: list[Any] = []
        self._pending_ids: set[int] = set()
        self._pending_numel = 0
        self._block_of = {p.ds_id: block_of(n) for n, p in self.module.named_parameters()}
        self._in_copy: deque[tuple[Any, dict[int, Any]]] = deque()
        self._squares: dict[int, float] = {}
        self._fast_norms = self.rank_state.device.is_host and get_norm_dtype() == torch.float64
        self.num_exact_norms = 0

    # ---- reduce -------------------------------------------------------------------------------------------

    def reduce_independent_p_g_buckets_and_remove_grads(self: Any, param: Any) -> None:
        """Stock fills a bucket of ``reduce_bucket_size``; here a block's gradients leave as soon as the next begins."""
        if not getattr(param, "ds_grad_is_ready", True):
            return
        if hasattr(self, "_apply_autoep_folding_tp_correction"):
            self._apply_autoep_folding_tp_correction(param)
        if param.ds_id in self._pending_ids:
            return  # another phase of this backward: autograd added to the gradient that waits here
        if self._pending and self._must_flush_before(param):
            self._flush_pending()
        self._pending.append(param)
        self._pending_ids.add(param.ds_id)
        self._pending_numel += param.ds_numel
        if self._is_alone(param):
            self._flush_pending()

    def _must_flush_before(self: Any, param: Any) -> bool:
        last = self._pending[-1]
        return (
            self._block_of[last.ds_id] != self._block_of[param.ds_id]
            or self._pending_numel + param.ds_numel > self.reduce_bucket_size
            or last.ds_process_group != param.ds_process_group
            or self.get_param_comm_dtype(last) != self.get_param_comm_dtype(param)
        )

    def _is_alone(self: Any, param: Any) -> bool:
        """One rank without scaling around the reduction: the gradient is its own average."""
        return (
            dist.get_world_size(group=param.ds_process_group) == 1
            and self.gradient_predivide_factor == 1.0
            and self.sequence_parallel_size == 1
            and self.all2all_process_group is None
        )

    @torch.no_grad()
    def _flush_pending(self: Any) -> None:
        params, self._pending, self._pending_ids, self._pending_numel = self._pending, [], set(), 0
        if not params:
            return
        comm_dtype = self.get_param_comm_dtype(params[0])
        for param in params:
            if param.grad.numel() != param.ds_numel:
                raise RuntimeError(
                    f"the gradient of a parameter with {param.ds_numel} elements has {param.grad.numel()} elements"
                )
        if self._is_alone(params[0]):
            partitions = [p.grad.view(-1).to(comm_dtype).to(self.gradient_accumulation_dtype) for p in params]
        elif self.contiguous_gradients and not self.reduce_scatter:
            partitions = self._all_reduce_partitions(params, comm_dtype)
        else:
            params.sort(key=lambda p: p.ds_id)
            partitions = self._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(params, comm_dtype)
        self.partition_grads(params, partitions)

    def _all_reduce_partitions(self: Any, params: list[Any], comm_dtype: torch.dtype) -> list[torch.Tensor]:
        """``reduce_scatter: false``: stock's all-reduce over one contiguous bucket."""
        bucket = self.ipg_buckets[comm_dtype]
        bucket.params = params
        if hasattr(bucket, "process_group"):
            bucket.process_group = params[0].ds_process_group
        flat = torch.cat([param.grad.reshape(-1) for param in params])
        try:
            partitions: list[torch.Tensor] = self._DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads(
                flat, comm_dtype
            )
        finally:
            bucket.params = []
        return partitions

    # ---- partition ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def partition_grads(self: Any, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> None:
        """Stores or accumulates partitions; at the boundary takes norms and hands complete chunks on."""
        state = self.rank_state
        boundary, synchronized = is_boundary(self), state.device.is_host
        if boundary:
            state.core.open_window(self._hypers(), self._multiplier(None), managed=not self.planning.holds_updates)
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            self._store_gradient(param, partition, boundary)
            if synchronized:  # one by one: the sooner a chunk is complete, the fewer are in memory
                state.core.complete_gradient(state.span(param))
            elif param.grad is not None:
                param.grad.record_stream(state.device.current_stream())
            param.grad = None
        if not synchronized:
            self._in_copy.append((state.device.record_event(), {param.ds_id: param for param in params_to_release}))
            self._complete_copied(wait=False)

    def _store_gradient(self: Any, param: Any, partition: torch.Tensor, boundary: bool) -> None:
        core, span = self.rank_state.core, self.rank_state.span(param)
        for _, complete in self._in_copy:
            complete.pop(param.ds_id, None)  # it is complete when this gradient has been copied, too
        if hasattr(self, "_offload_boundary_param_ids"):
            self._offload_boundary_param_ids.add(param.ds_id)
        if partition.numel() < span.numel:
            # Padding carries zeros, also where a rank's partition is nothing else: as in stock's buffer, it arrives.
            partition = torch.nn.functional.pad(partition.view(-1), (0, span.numel - partition.numel()))
        views = core.add_gradient(span, partition)
        if boundary:
            self._take_norm(param, views)
        else:
            self._forget_norm(param)

    def _take_norm(self: Any, param: Any, views: list[torch.Tensor]) -> None:
        """Remembers the gradient's norm: from one fast pass on the host, in stock's way on a device."""
        if self._fast_norms:
            squares = sum(self.rank_state.core.sum_of_squares(view) for view in views)
            self._squares[param.ds_id] = squares
            norm = torch.tensor(squares, dtype=torch.float64).sqrt()
        else:
            values = views[0] if len(views) == 1 else torch.cat(views)
            norm = self._constant_buffered_norm2(values.to(self.rank_state.device.torch_device))
        self.norm_for_param_grads[self.get_param_id(param)] = norm

    def _forget_norm(self: Any, param: Any) -> None:
        """The gradient changes after its norm was taken: step() takes it again."""
        self._squares.pop(param.ds_id, None)
        self.norm_for_param_grads.pop(self.get_param_id(param), None)

    def complete_grad_norm_calculation_for_cpu_offload(self: Any, params: list[Any]) -> torch.Tensor:
        """The norm of a sub-group, bit for bit stock's: fast norms serve where rounding cannot tell them apart."""
        fast = [p for p in params if p.ds_id in self._squares]
        if not rounds_safely([self._squares[p.ds_id] for p in fast], [p.partition_numel() for p in fast]):
            self.num_exact_norms += 1
            for param in fast:
                gradient = self.rank_state.core.gradient(self.rank_state.span(param), stored=True)
                self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(gradient)
                self.rank_state.bound_heap()  # of temporaries in fp64
        norm: torch.Tensor = super().complete_grad_norm_calculation_for_cpu_offload(params)  # type: ignore[misc]
        return norm

    def reset_cpu_buffers(self: Any) -> None:
        super().reset_cpu_buffers()  # type: ignore[misc]
        self._squares.clear()

    def _complete_copied(self: Any, *, wait: bool) -> None:
        """Hands on the gradients whose copies to the host have ended."""
        while self._in_copy and (wait or self._in_copy[0][0].query()):
            event, complete = self._in_copy.popleft()
            event.synchronize()
            for param in complete.values():
                self.rank_state.core.complete_gradient(self.rank_state.span(param))

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """As in PyTorch: no gradient of this step is left. Stock keeps its fp32 copies and may update with them."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._pending, self._pending_ids, self._pending_numel = [], set(), 0
        while self._in_copy:
            self._in_copy.popleft()[0].synchronize()
        self.reset_cpu_buffers()
        self._offload_boundary_param_ids: set[int] = set()
        self.rank_state.core.forget_gradients()

    # ---- ends of backward and of the step -----------------------------------------------------------------

    def independent_gradient_partition_epilogue(self: Any) -> None:
        """Backward of a micro-batch (or of one phase of it) has ended. What leaves for storage must have arrived."""
        self._flush_pending()
        self._complete_copied(wait=not all(self.rank_state.core.options.residency.grads))
        self.rank_state.core.end_micro_batch()
        for param_id in self.params_already_reduced:
            self.params_already_reduced[param_id] = False
        self._epilogue_ran_this_backward = True
        self.planning.backward_ended()

    def _finalize_offload_gradient_accumulation(self: Any) -> None:
        """User-managed accumulation: only step() is the boundary, so norms are taken there and updates start after."""
        state = self.rank_state
        self._complete_copied(wait=True)
        state.core.open_window(self._hypers(), self._multiplier(None), managed=False)
        for group in self.fp16_groups:
            for param in group:
                span = state.span(param)
                if param.ds_id in self._offload_boundary_param_ids and state.core.has_arrived(span):
                    self._take_norm(param, [state.core.gradient(span)])
                    state.bound_heap()

    def _finish_gradients(self: Any) -> None:
        """step() begins: every gradient of the step is in host memory, and every one is in the norm.

        A parameter whose gradient came in an earlier micro-batch only is counted here. Stock leaves it out of the norm
        and updates it with an old gradient; PyTorch sums all micro-batches, and so do we.
        """
        self._flush_pending()
        self._complete_copied(wait=True)
        state = self.rank_state
        if not state.device.is_host:
            # What follows overwrites P16 that a forward since backward may still be copying to the device. The norm
            # needs all of this stream's work anyway.
            state.device.current_stream().synchronize()
        for group in self.fp16_groups:
            for param in group:
                span = state.span(param)
                counted = self.get_param_id(param) in self.norm_for_param_grads
                if state.core.has_arrived(span) and not counted and not state.core.is_overridden(span):
                    self._take_norm(param, [state.core.gradient(span, stored=True)])
                    state.bound_heap()
        state.core.end_micro_batch()
