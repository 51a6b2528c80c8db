# SPDX-License-Identifier: Apache-2.0
"""From autograd's hooks to the door of the out-of-core optimizer: gradients reduced together, then partitioned.

Which of them together: ``gradient_cuts.py``.

[Note: the stream of gradients]
As in stock, gradients are reduced and copied on a stream of their own if ``overlap_comm`` is set, which it is for stage
3 unless the JSON says otherwise, and on the default stream if not. That stream waits for the computing one at every
hook. Memory of a gradient belongs to the stream that was the computing one when it came (a model may have branches on
streams of its own): it is let go when the event that follows its reduction has passed, or, when more is kept than of
two of the largest block, or a sixteenth of the device, when that stream has waited for that event, on the device. So
the host waits for nothing, and where it runs ahead of the device there are no more gradients than that, those just sent
and those that wait to be. What is left of a micro-batch is let go in the forward of the next. ``step()`` waits for both
streams.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks
from torch.nn import Parameter

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.compute_clock import Phase
from ds_fuyou.log import log_once
from ds_fuyou.optimizer.rules import GroupHyper
from ds_fuyou.zero.blocks import block_of
from ds_fuyou.zero.gradient_cuts import make_cut, why_updates_wait
from ds_fuyou.zero.run.budgets import device_budget
from ds_fuyou.zero.run.rank_state import RankState
from ds_fuyou.zero.stock import get_norm_dtype, is_boundary

__all__ = ["GradientFlow"]

_OF_DEVICE = 16

_CUT_SHORT = (
    "a backward of this step ended with an exception: the gradients that it left are part of the step's, as in PyTorch "
    "without zero_grad(). Where the script goes on after such an exception it should call zero_grad() of the engine's "
    "optimizer (engine.zero_grad() drops nothing that ZeRO has taken) and make all backwards of the step again"
)
_DROPPED = (
    "a gradient that waits to be reduced with others was dropped by the script. After a backward that raised, call "
    "zero_grad() of the engine's optimizer: engine.zero_grad() drops a part of what that backward left"
)


@dataclass
class _Reducing:
    """Gradients on the stream of gradients until ``event``, and the streams whose memory they are."""

    event: Any
    gradients: list[torch.Tensor] = field(default_factory=list)
    streams: list[Any] = field(default_factory=list)
    numel: int = 0

    def add(self, gradient: torch.Tensor, stream: Any) -> None:
        self.gradients.append(gradient)
        self.numel += gradient.numel()
        if stream is not None and stream not in self.streams:
            self.streams.append(stream)


class GradientFlow:
    """Stage 3's reduce and partition path. All of it runs in the thread of the autograd hooks."""

    def __init__(
        self,
        stock: Any,
        state: RankState,
        hypers: Callable[[], Sequence[GroupHyper]],
        multiplier: Callable[[], float],
        holds_updates: Callable[[], bool],
    ) -> None:
        """``stock`` is the stage-3 optimizer; of its class, :data:`compat.REQUIRED` lists what is used.

        ``hypers()`` and ``multiplier()`` are what the step would do if it did not clip; ``holds_updates()``: whether
        backward must not update anything in this step.
        """
        self._stock, self._state, self._core = stock, state, state.core
        self._hypers, self._multiplier, self._holds_updates = hypers, multiplier, holds_updates
        blocks = {param.ds_id: block_of(name) for param, name in state.model.names.items()}
        trained = [param for group in stock.fp16_groups for param in group]
        self._alone = frozenset(param.ds_id for param in trained if _is_alone(stock, param))
        num_ranks = dist.get_world_size()
        self._over_all = frozenset(
            param.ds_id for param in trained if dist.get_world_size(group=param.ds_process_group) == num_ranks
        )
        self._cut = make_cut(stock, state.activation.config.gradients.reduce_by, blocks)
        self._stream = None if state.device.is_host else stock.reduce_and_partition_stream
        self._followed: list[Any] = []  # streams that hooks of the script's launch on, behind ours
        self._starts_anew = False  # the next gradient that comes
        self._backwards: set[int] = set()  # autograd's numbers of those that have brought gradients and not ended
        self._streams: dict[int, Any] = {}  # by ds_id: whose memory a gradient that waits, or is reduced, is
        self._reducing: deque[_Reducing] = deque()
        self._reducing_numel = 0
        numel = sum(param.ds_numel for param in trained)
        of_blocks = _block_numels(trained, blocks)
        self._most_reducing = min(2 * max(of_blocks), _reducing_on(state, trained))
        if len(self._alone) < len(trained):  # one message is on its way, at least, while the next one fills
            message = numel if self.reduce_by == "bucket" else max(of_blocks)
            self._most_reducing = max(self._most_reducing, min(stock.reduce_bucket_size, message))
        if self.reduce_by == "bucket":
            self._tell_what_waits(numel)
        if not state.device.is_host or get_norm_dtype() != torch.float64:
            self._core.intake.norms.take_by(stock._constant_buffered_norm2)

    @property
    def reduce_by(self) -> str:
        """What of ``gradients.reduce_by`` is in force: "bucket" or "block"."""
        return self._cut.reduce_by

    def _tell_what_waits(self, numel: int) -> None:
        """``numel``: elements of all trainable parameters."""
        settings = self._state.activation.config.optimizer
        why = why_updates_wait(self._stock.reduce_bucket_size, numel)
        if why is not None and settings.overlap != "none" and settings.clip_policy != "defer":
            log_once(logging.WARNING, why)

    # ---- reduce -------------------------------------------------------------------------------------------

    def collect(self, param: Parameter) -> None:
        """A gradient is there, or, if it is not ready yet, a part of it."""
        if self._starts_anew:
            self.forget()
        self._note_backward()
        self._wait_for_hooks()
        is_ready, is_followed = getattr(param, "ds_grad_is_ready", True), _is_followed(param)
        if is_ready:
            if hasattr(self._stock, "_apply_autoep_folding_tp_correction"):
                self._stock._apply_autoep_folding_tp_correction(param)
            self._as_in_a_bucket(param, is_followed=is_followed)
            if self._stream is not None:
                self.sweep()
                computing = self._streams[param.ds_id] = self._state.device.current_stream()
                self._stream.wait_stream(computing)
        if is_followed and self._stream is not None:
            self._followed.append(self._state.device.current_stream())
        if param in self._cut:
            return  # another phase of this backward: autograd added to the gradient that waits here
        is_alone = param.ds_id in self._alone
        if is_alone:
            self._reduce_waiting()
        else:
            self._reduce(self._cut.displaced_by(param))  # by one that is not ready too, as in stock
        if not is_ready:
            return
        if is_alone and not is_followed:
            self._reduce([param])
        else:
            self._cut.add(param)
            self._open_window_if_last()  # states are read ahead while the message fills

    def _as_in_a_bucket(self, param: Parameter, *, is_followed: bool) -> None:
        """Stock copies a gradient to its bucket: it is contiguous then, whatever a hook has left, and hooks that come
        behind find the type of the communication.
        """
        gradient, stock = param.grad, self._stock
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise FuyouStateError(
                f"a gradient of layout {gradient.layout}: ZeRO-3 reduces dense ones alone (nn.Embedding(sparse=True)?)"
            )
        if not gradient.is_contiguous():
            gradient.data = gradient.contiguous()
        if is_followed and stock.contiguous_gradients and param.ds_numel <= stock.reduce_bucket_size:
            gradient.data = _as_type(gradient, stock.get_param_comm_dtype(param))

    def _note_backward(self) -> None:
        """One that raises ends without its callbacks: so :meth:`finish` knows."""
        number: int = torch._C._current_graph_task_id()
        if number >= 0 and number not in self._backwards:
            self._backwards.add(number)
            queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue_callback(partial(self._backwards.discard, number))

    def flush(self) -> None:
        """Reduces what waits, as the script's hooks left it, and hands the partitions over."""
        self._wait_for_hooks()
        self._reduce_waiting()

    def _wait_for_hooks(self) -> None:
        """Hooks of what came before have been launched, whether or not what comes is ready."""
        if self._stream is not None and self._followed:
            for stream in dict.fromkeys(self._followed):
                self._stream.wait_stream(stream)
            self._followed.clear()

    def _reduce_waiting(self) -> None:
        for params in self._cut.take_all():
            self._reduce(params)

    def _reduce(self, params: list[Parameter]) -> None:
        """One message. May put ``params`` in order."""
        if any(param.grad is None and param.ds_id not in self._alone for param in params):
            raise FuyouStateError(_DROPPED)  # to leave it out would be another message than other ranks'
        params = [param for param in params if param.grad is not None]
        if not params:
            return
        last = self._open_window_if_last()  # before the collective: see [Note: one generation of all ranks]
        num_bytes = 0
        for param in params:
            gradient: Any = param.grad
            if gradient.numel() != param.ds_numel:
                raise RuntimeError(
                    f"the gradient of a parameter with {param.ds_numel} elements has {gradient.numel()} elements"
                )
            num_bytes += gradient.nbytes
        state = self._state
        waits = state.clock.within(Phase.GRADIENTS) if self._core.gradients.may_wait else nullcontext()
        # Inside of a backward autograd has turned gradients off already.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext(), waits, state.device.stream(self._stream):
            if self._stock.enable_sanity_checks and params[0].ds_id not in self._alone:
                assert_ints_same_as_other_ranks([param.ds_id for param in params])
            self._hand_over(params, self._partitions(params), last=last)
            if params[0].ds_id in self._over_all:
                self._core.summed_over_all()
        state.bound_heap(num_bytes)  # of these gradients

    def _partitions(self, params: list[Parameter]) -> list[torch.Tensor]:
        """This rank's parts of the averaged gradients, in the accumulation dtype. May put ``params`` in order."""
        stock = self._stock
        comm_dtype = stock.get_param_comm_dtype(params[0])
        if params[0].ds_id in self._alone:
            kept_dtype = stock.gradient_accumulation_dtype
            return [_as_type(_as_type(p.grad.view(-1), comm_dtype), kept_dtype) for p in params]
        fits = sum(param.ds_numel for param in params) <= stock.reduce_bucket_size
        if stock.contiguous_gradients and not stock.reduce_scatter and fits:
            return self._all_reduce(params, comm_dtype)
        params.sort(key=lambda p: p.ds_id)
        partitions: list[torch.Tensor] = stock._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(params, comm_dtype)
        return partitions

    def _all_reduce(self, params: list[Parameter], comm_dtype: torch.dtype) -> list[torch.Tensor]:
        """``reduce_scatter: false``: stock's all-reduce over one contiguous bucket."""
        stock = self._stock
        bucket = stock.ipg_buckets[comm_dtype]
        bucket.params = params
        if hasattr(bucket, "process_group"):
            bucket.process_group = params[0].ds_process_group
        flat = torch.cat([param.grad.reshape(-1) for param in params])
        try:
            partitions: list[torch.Tensor] = stock._DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads(
                flat, comm_dtype
            )
        finally:
            bucket.params = []
        return partitions

    # ---- partition ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def hand_over(self, params: Sequence[Parameter], partitions: Sequence[torch.Tensor]) -> None:
        """Partitions (1-D) to the out-of-core optimizer, on the current stream; the gradients are let go."""
        self._hand_over(params, partitions, last=self._open_window_if_last())

    def _hand_over(self, params: Sequence[Parameter], partitions: Sequence[torch.Tensor], *, last: bool) -> None:
        gradients = []
        for param, partition in zip(params, partitions, strict=True):
            span = self._state.span(param)
            if hasattr(self._stock, "_offload_boundary_param_ids"):
                self._stock._offload_boundary_param_ids.add(param.ds_id)
            if partition.numel() < span.numel:
                # Padding carries zeros, and arrives where a rank's partition is nothing else: as in stock's buffer.
                partition = torch.nn.functional.pad(partition, (0, span.numel - partition.numel()))
            gradients.append((span, partition))
        self._core.add_gradients(gradients, last=last)
        self._let_go(params)

    def _open_window_if_last(self) -> bool:
        """Whether this is the last micro-batch of the step."""
        last = bool(is_boundary(self._stock))
        if last and self._core.window.rules is None:
            self._core.open_window(self._hypers(), self._multiplier(), managed=not self._holds_updates())
        return last

    def _let_go(self, params: Iterable[Parameter]) -> None:
        """See [Note: the stream of gradients]."""
        device = self._state.device
        if self._stream is None:
            for param in params:
                param.grad = None
            return
        reducing = _Reducing(device.record_event())
        for param in params:
            stream = self._streams.pop(param.ds_id, None)
            if param.grad is not None:
                reducing.add(param.grad, stream)
                param.grad = None
        self._reducing.append(reducing)
        self._reducing_numel += reducing.numel

    def sweep(self) -> None:
        """Lets go of gradients whose reduction has ended, or comes before what is issued from now on. Waits for
        nothing. To be called in the next forward, too, which has no use for them."""
        while self._reducing:
            oldest = self._reducing[0]
            if not oldest.event.query():
                if self._reducing_numel <= self._most_reducing:
                    return
                for stream in oldest.streams:
                    stream.wait_event(oldest.event)
            self._reducing.popleft()
            self._reducing_numel -= oldest.numel

    # ---- norms --------------------------------------------------------------------------------------------

    def put_norms(self, params: Sequence[Parameter]) -> None:
        """Where stock looks for them: the norms of a sub-group's gradients."""
        state, norms_of = self._state, self._stock.norm_for_param_grads
        norms = self._core.norms(state.span(param) for param in params)
        for param in params:
            norm_id = self._stock.get_param_id(param)
            norms_of.pop(norm_id, None)
            if (index := state.span(param).index) in norms:
                norms_of[norm_id] = norms[index]

    # ---- ends of backward and of the step -----------------------------------------------------------------

    def end_micro_batch(self) -> None:
        """Backward of a micro-batch (or of one phase of it) has ended."""
        self.flush()
        self._core.end_micro_batch(reads_ahead=not self._holds_updates())

    def end_unmanaged(self) -> None:
        """User-managed accumulation: only step() is the boundary, so norms are taken there and updates start after."""
        self._core.open_window(self._hypers(), self._multiplier(), managed=False)
        self._core.close_window(with_overrides=True)
        self._state.bound_heap()

    def finish(self) -> None:
        """step() begins: every gradient of the step is in host memory, and every one is in the norm."""
        if self._backwards:
            self._backwards.clear()
            log_once(logging.WARNING, _CUT_SHORT)
        self.flush()
        self._core.close_window()
        self._state.bound_heap()
        # What follows overwrites P16 that a forward since backward may still be copying to the device, and needs the
        # norms.
        self.rest()

    def rest(self) -> None:
        """Waits until nothing that was reduced is on its way, and lets it go."""
        if self._stream is not None:
            self._state.device.current_stream().synchronize()
            self._stream.synchronize()
            self._reducing.clear()
            self._reducing_numel = 0

    def step_was_cut_short(self) -> None:
        """``step()`` raised (a loss scale at its minimum, a hook of the script's). A script that calls it again has the
        gradients still; one that goes on with another backward does not, as in stock: it lost the ``zero_grad()``."""
        self._starts_anew = True

    def forget(self) -> None:
        """zero_grad(): as in PyTorch no gradient of this step is left. Stock keeps its copies and updates with them."""
        self._starts_anew = False
        self._backwards.clear()
        for params in self._cut.take_all():  # of a backward that raised, or of another engine's
            for param in params:
                param.grad = None
        self._core.forget_gradients()
        self._stock._offload_boundary_param_ids = set()


def _is_alone(stock: Any, param: Parameter) -> bool:
    """One rank without scaling around the reduction: the gradient is its own average."""
    return bool(
        dist.get_world_size(group=param.ds_process_group) == 1
        and stock.gradient_predivide_factor == 1.0
        and stock.sequence_parallel_size == 1
        and stock.all2all_process_group is None
    )


def _as_type(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Asking torch costs 2 µs also where nothing changes."""
    return values if values.dtype is dtype else values.to(dtype)


def _is_followed(param: Parameter) -> bool:
    """Whether a hook of the script's comes behind DeepSpeed's, and may change the gradient yet."""
    hooks: Any = getattr(param, "_post_accumulate_grad_hooks", None)
    return bool(hooks) and not str(getattr(next(reversed(hooks.values())), "__module__", "")).startswith("deepspeed.")


def _block_numels(trained: Iterable[Parameter], blocks: Mapping[int, str]) -> Collection[int]:
    """Elements of the trainable parameters of each block; ``blocks``: names by ``ds_id``."""
    numels: dict[str, int] = {}
    for param in trained:
        block = blocks[param.ds_id]
        numels[block] = numels.get(block, 0) + param.ds_numel
    return numels.values()


def _reducing_on(state: RankState, trained: Iterable[Parameter]) -> int:
    """Elements of gradients that may be on their way where blocks are large beside the device, as those of experts: a
    sixteenth of what a plan has of it, at least two parameters.
    """
    of_device = device_budget(state.activation.config, state.device) // _OF_DEVICE // state.model.param_dtype.itemsize
    return max(of_device, 2 * max(param.ds_numel for param in trained))
