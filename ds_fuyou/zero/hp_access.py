# SPDX-License-Identifier: Apache-2.0
"""``safe_get/set_full_*`` and friends: single states and gradients of single parameters.

Stock's public functions fetch a partition tensor, change it in place and ask for it to be written back. The
overrides keep that protocol: what was handed out is remembered until the write-back.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.zero.stock import is_boundary

__all__ = ["HpAccessMixin"]


class HpAccessMixin:
    """Overrides of stage 3's access to fp32 states and gradients."""

    def _part_of(self: Any, optim_state_key: str | None) -> int:
        moments: tuple[str, ...] = self.rank_state.core.kind.moments
        if optim_state_key is None:
            return 0
        if optim_state_key not in moments:
            raise KeyError(f"the optimizer keeps {', '.join(moments)}, not {optim_state_key!r}")
        return 1 + moments.index(optim_state_key)

    def _get_fp32_opt_state_partition(
        self: Any, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        self.rank_state.bound_heap()  # scripts read one parameter after another
        span = self.rank_state.span(param)
        part = self._part_of(optim_state_key)
        values = self.rank_state.core.states.read_param(span, part)
        if not release_swap_buffers:
            self._handed_out = (span, part, values)
        return values, span.sub_group

    def set_full_hp_param(self: Any, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """As stock; also where the elements cannot be shared out evenly among the ranks."""
        if not param.requires_grad:
            return
        _require_size(value, param)
        values, sub_group = self._get_fp32_opt_state_partition(param, False, optim_state_key)
        _take_own_part(values, value, dist.get_rank(group=param.ds_process_group))
        self._optimizer_states_and_gradient_swap_out(sub_group)

    def set_fp32_grad_for_param(self: Any, value: torch.Tensor, param: Any) -> None:
        """As stock; also where the elements cannot be shared out evenly among the ranks."""
        if not param.requires_grad:
            return
        _require_size(value, param)
        values, sub_group = self._get_fp32_grad_state_partition(param, False)
        _take_own_part(values, value, dist.get_rank(group=param.ds_process_group))
        self._writeback_swap_state(sub_group, write_opt_state=False, write_gradients=True)

    def _optimizer_states_and_gradient_swap_out(self: Any, sub_group_id: int, timer_names: Any = None) -> None:
        """Stock's write-back after a state was changed in place."""
        span, part, values = self._handed_out
        self.rank_state.core.states.write_param(span, part, values)

    def _get_fp32_grad_state_partition(self: Any, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        self.rank_state.bound_heap()
        span = self.rank_state.span(param)
        core = self.rank_state.core
        self._complete_copied(wait=True)
        if core.has_arrived(span):
            values = core.gradient(span).to(torch.float32, copy=True)
        else:
            values = torch.zeros(span.numel, dtype=torch.float32)
        if not release_swap_buffers:
            self._handed_out_grad = (span, values)
        return values, span.sub_group

    def _writeback_swap_state(self: Any, sub_group_id: int, write_opt_state: bool, write_gradients: bool) -> None:
        span, values = self._handed_out_grad
        self.rank_state.core.override_gradient(span, values)
        if is_boundary(self):
            self.rank_state.core.complete_gradient(span)

    def update_fp32_grad_for_param_vectorized(self: Any, update_func: Any, param_list: Any) -> None:
        """Applies ``update_func(full_gradient, param)`` to every trainable parameter's gradient."""
        for param in param_list:
            if param.requires_grad:
                self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

    def get_fp32_grad_partitions(self: Any) -> dict[int, dict[int, torch.Tensor]]:
        """fp32 copies of all gradient partitions: ``[sub-group][index in it]``."""
        return {
            group_index: {i: self._get_fp32_grad_state_partition(p, True)[0] for i, p in enumerate(group)}
            for group_index, group in enumerate(self.fp16_groups)
        }


def _require_size(value: torch.Tensor, param: Any) -> None:
    if value.numel() != param.ds_numel:
        raise FuyouStateError(
            f"a value for a parameter of {param.ds_numel} elements (shape {tuple(param.ds_shape)}) must have as many; "
            f"{value.numel()} were given"
        )


def _take_own_part(own: torch.Tensor, value: torch.Tensor, rank: int) -> None:
    """Copies this rank's part of a full value; the last rank's partition may end in padding, which stays."""
    part = value.flatten()[own.numel() * rank :][: own.numel()]
    own[: part.numel()].copy_(part)
