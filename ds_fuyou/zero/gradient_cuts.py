# SPDX-License-Identifier: Apache-2.0
"""Which gradients are reduced together.

[Note: the order of sums]
A collective adds what the ranks bring in an order of its own, which depends on an element's place in the message. Two
numbers have one sum, so on one and two ranks every cut gives the same bits. On more ranks the bits are stock's only if
every message holds what stock's holds, in stock's order: :class:`BucketCut`. The price: nothing of a bucket can be
updated before the bucket is full, so where a bucket holds the whole model, nothing in backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist
from torch.nn import Parameter

__all__ = ["BlockCut", "BucketCut", "GradientCut", "Messages", "make_cut", "why_updates_wait"]

_MOST_RANKS_OF_ONE_ORDER = 2
_FEWEST_BUCKETS = 4  # a backward; with fewer most updates find nothing left to hide behind


@dataclass(frozen=True)
class Messages:
    """What stock says of a message. ``most_numel``: ``reduce_bucket_size``, elements; one parameter can have more."""

    most_numel: int
    dtype_of: Callable[[Parameter], torch.dtype]
    group_of: Callable[[Parameter], Any]

    @classmethod
    def of(cls, stock: Any) -> Messages:
        """``stock``: the stage-3 optimizer. DeepSpeed 0.18 has one process group for all parameters."""
        group_of = getattr(stock, "_get_param_partition_group", lambda _: stock.dp_process_group)
        return cls(int(stock.reduce_bucket_size), stock.get_param_comm_dtype, group_of)


@dataclass
class _Waiting:
    """Gradients of one message to be, in the order in which they came. The memory is ``param.grad``."""

    params: list[Parameter] = field(default_factory=list)
    numel: int = 0

    def add(self, param: Parameter) -> None:
        self.params.append(param)
        self.numel += param.ds_numel

    def take(self) -> list[Parameter]:
        params, self.params, self.numel = self.params, [], 0
        return params


class GradientCut(ABC):
    """Parameters whose gradients wait to be reduced. The same on every rank, as the order of autograd's hooks is."""

    reduce_by: str
    """As the key ``gradients.reduce_by`` says it."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._ids: set[int] = set()

    def __contains__(self, param: Parameter) -> bool:
        return param.ds_id in self._ids

    def add(self, param: Parameter) -> None:
        """The gradient is there, and :meth:`displaced_by` was asked."""
        self._waiting_with(param).add(param)
        self._ids.add(param.ds_id)

    def displaced_by(self, param: Parameter) -> list[Parameter]:
        """Takes out, and returns, what must be reduced before this parameter can wait."""
        waiting = self._waiting_with(param)
        if waiting.params and self._displaces(param, waiting):
            params = waiting.take()
            self._ids.difference_update(each.ds_id for each in params)
            return params
        return []

    def take_all(self) -> list[list[Parameter]]:
        """Takes out everything: one list a message, in the order in which they are sent."""
        self._ids.clear()
        return [waiting.take() for waiting in self._all() if waiting.params]

    @abstractmethod
    def _waiting_with(self, param: Parameter) -> _Waiting: ...

    @abstractmethod
    def _displaces(self, param: Parameter, waiting: _Waiting) -> bool: ...

    @abstractmethod
    def _all(self) -> list[_Waiting]: ...

    def _is_full(self, param: Parameter, waiting: _Waiting) -> bool:
        messages = self._messages
        return (
            messages.group_of(waiting.params[-1]) != messages.group_of(param)
            or waiting.numel + param.ds_numel > messages.most_numel
        )


class BlockCut(GradientCut):
    """A block's gradients leave as soon as the next block's begin to arrive, or a message is full."""

    reduce_by = "block"

    def __init__(self, messages: Messages, block_of: Mapping[int, str]) -> None:
        """``block_of``: names of blocks by ``ds_id``."""
        super().__init__(messages)
        self._block_of = block_of
        self._waiting = _Waiting()

    def _waiting_with(self, param: Parameter) -> _Waiting:
        return self._waiting

    def _displaces(self, param: Parameter, waiting: _Waiting) -> bool:
        last, dtype_of = waiting.params[-1], self._messages.dtype_of
        return (
            self._block_of[last.ds_id] != self._block_of[param.ds_id]
            or dtype_of(last) != dtype_of(param)
            or self._is_full(param, waiting)
        )

    def _all(self) -> list[_Waiting]:
        return [self._waiting]


class BucketCut(GradientCut):
    """Stock's ``ipg_buckets``: one a communication dtype, each sent when the next parameter does not fit, or backward
    ends."""

    reduce_by = "bucket"

    def __init__(self, messages: Messages) -> None:
        super().__init__(messages)
        self._buckets: dict[torch.dtype, _Waiting] = {}

    def _waiting_with(self, param: Parameter) -> _Waiting:
        return self._buckets.setdefault(self._messages.dtype_of(param), _Waiting())

    def _displaces(self, param: Parameter, waiting: _Waiting) -> bool:
        return self._is_full(param, waiting)

    def _all(self) -> list[_Waiting]:
        return [self._buckets[dtype] for dtype in sorted(self._buckets, key=str)]


def make_cut(stock: Any, reduce_by: str, block_of: Mapping[int, str]) -> GradientCut:
    """``reduce_by``: the key ``gradients.reduce_by``. "auto" is by block wherever that gives stock's bits."""
    messages = Messages.of(stock)
    params = [param for group in stock.fp16_groups for param in group]
    num_ranks = max(dist.get_world_size(group=param.ds_process_group) for param in params)
    if reduce_by == "bucket" or (reduce_by == "auto" and num_ranks > _MOST_RANKS_OF_ONE_ORDER):
        return BucketCut(messages)
    return BlockCut(messages, block_of)


def why_updates_wait(most_numel: int, numel: int) -> str | None:
    """A line for the log if stock's buckets are so large that updates cannot hide behind backward.

    ``most_numel``: elements of a bucket; ``numel``: of all trainable parameters.
    """
    if most_numel * _FEWEST_BUCKETS < numel:
        return None
    return (
        f"gradients are reduced in stock's buckets, so that sums equal stock's to the bit on any number of ranks; "
        f"zero_optimization.reduce_bucket_size is {most_numel} and the model trains {numel} elements, so most updates "
        f"wait for the end of backward. To let them run beside it set reduce_bucket_size to {max(1, numel // 8)} or "
        f'less, or "gradients": {{"reduce_by": "block"}} in the fuyou block, with which the last bit of a sum may '
        f"differ from stock's"
    )
