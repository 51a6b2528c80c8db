# SPDX-License-Identifier: Apache-2.0
"""``safe_get/set_full_*`` and friends: single states and gradients of single parameters.

Stock's public functions fetch a partition tensor, change it in place and ask for it to be written back. What stands
here keeps that protocol: what was handed out is remembered until the write-back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed import comm as dist
from torch.nn import Parameter

from ds_fuyou.checkpoint.stock_state import DTYPES
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.optimizer.layout import ParamSpan
from ds_fuyou.zero.run.rank_state import RankState

__all__ = ["HpAccess"]


class HpAccess:
    """Behind stage 3's access to fp32 states and gradients.

    Args:
        dtype: of stock's masters and gradients at the end of a step: what is given has it, and what is set is rounded.
        is_boundary: whether this micro-batch is the last of the step.
    """

    def __init__(self, rank_state: RankState, dtype: torch.dtype, is_boundary: Callable[[], bool]) -> None:
        self._rank_state = rank_state
        self._dtype = dtype
        self._is_boundary = is_boundary
        self._state: tuple[ParamSpan, int, torch.Tensor] | None = None
        self._gradient: tuple[ParamSpan, torch.Tensor] | None = None

    def _part_of(self, optim_state_key: str | None) -> int:
        moments: tuple[str, ...] = self._rank_state.core.kind.moments
        if optim_state_key is None:
            return 0
        if optim_state_key not in moments:
            raise KeyError(f"the optimizer keeps {', '.join(moments)}, not {optim_state_key!r}")
        return 1 + moments.index(optim_state_key)

    def state(self, param: Parameter, key: str | None, *, to_write: bool) -> tuple[torch.Tensor, int]:
        """(this rank's values of P32 (None) or a moment, the sub-group); ``to_write``: :meth:`put_state` follows.

        Raises:
            KeyError: the optimizer keeps no such moment.
        """
        self._rank_state.bound_heap()  # scripts read one parameter after another
        span = self._rank_state.span(param)
        part = self._part_of(key)
        saved_as = self._rank_state.core.place.stored.saved_as
        values = self._rank_state.core.states.read_param(span, part).to(DTYPES[saved_as[part]])
        if to_write:
            self._state = (span, part, values)
        return values, span.sub_group

    def put_state(self) -> None:
        """What :meth:`state` handed out last is written back, changed or not."""
        if self._state is None:
            raise FuyouStateError("a state is written back after it was fetched, and none was")
        span, part, values = self._state
        self._rank_state.core.states.write_param(span, part, values)

    def set_state(self, param: Parameter, value: torch.Tensor, key: str | None) -> None:
        """From the full value, which every rank gives; also where it cannot be shared out evenly among them."""
        if not param.requires_grad:
            return
        _require_size(value, param)
        values, _ = self.state(param, key, to_write=True)
        _take_own_part(values, value, dist.get_rank(group=param.ds_process_group))
        self.put_state()

    def set_local_state(self, param: Parameter, value: torch.Tensor, key: str | None) -> None:
        """From this rank's part of it. Stock compares its size with ``ds_tensor``'s, which has one element while the
        parameter is on storage.
        """
        if not param.requires_grad:
            return
        values, _ = self.state(param, key, to_write=True)
        values.copy_(_own_part(value, values, param))
        self.put_state()

    def gradient(self, param: Parameter, *, to_write: bool) -> tuple[torch.Tensor, int]:
        """(a copy of this rank's gradient, between steps of the last one's, zeros where none came; the sub-group)."""
        self._rank_state.bound_heap()
        span, core = self._rank_state.span(param), self._rank_state.core
        if core.has_arrived(span):
            values = core.gradient(span).to(self._dtype, copy=True)
        else:
            last = core.last_gradient(span, self._dtype)
            values = torch.zeros(span.numel, dtype=self._dtype, device="cpu") if last is None else last
        if to_write:
            self._gradient = (span, values)
        return values, span.sub_group

    def put_gradient(self) -> None:
        """What :meth:`gradient` handed out last is the gradient from now on."""
        if self._gradient is None:
            raise FuyouStateError("a gradient is written back after it was fetched, and none was")
        span, values = self._gradient
        core = self._rank_state.core
        core.override_gradient(span, values)
        if self._is_boundary():
            core.complete_gradient(span)

    def set_gradient(self, param: Parameter, value: torch.Tensor) -> None:
        """From the full value, which every rank gives; also where it cannot be shared out evenly among them."""
        if not param.requires_grad:
            return
        _require_size(value, param)
        values, _ = self.gradient(param, to_write=True)
        _take_own_part(values, value, dist.get_rank(group=param.ds_process_group))
        self.put_gradient()

    def set_local_gradient(self, param: Parameter, value: torch.Tensor) -> None:
        """From this rank's part of it, which is in the norm from now on; a full value never is, both as in stock."""
        if not param.requires_grad:
            return
        values, _ = self.gradient(param, to_write=True)
        part = _own_part(value, values, param)
        values.copy_(part)
        self.put_gradient()
        state = self._rank_state
        state.core.intake.norms.take(state.span(param).index, [part.to(state.device.torch_device, torch.float32)])


def _own_part(value: torch.Tensor, own: torch.Tensor, param: Parameter) -> torch.Tensor:
    if value.numel() != own.numel():
        raise FuyouStateError(
            f"a local value for a parameter of shape {tuple(param.ds_shape)} must have the {own.numel()} elements of "
            f"this rank's partition (param.ds_tensor.ds_numel), not {value.numel()}"
        )
    return value.detach().flatten()


def _require_size(value: torch.Tensor, param: Parameter) -> None:
    if value.numel() != param.ds_numel:
        raise FuyouStateError(
            f"a value for a parameter of {param.ds_numel} elements (shape {tuple(param.ds_shape)}) must have as many; "
            f"{value.numel()} were given"
        )


def _take_own_part(own: torch.Tensor, value: torch.Tensor, rank: int) -> None:
    """Copies this rank's part of a full value; the last rank's partition may end in padding, which stays."""
    part = value.flatten()[own.numel() * rank :][: own.numel()]
    own[: part.numel()].copy_(part)
