# SPDX-License-Identifier: Apache-2.0
"""What all ranks must agree on, because what follows from it is a collective. Each of these is a collective itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fuyou.errors import FuyouStateError

__all__ = ["LoadMeetings", "all_or_none", "barrier", "decided_by_rank_0", "least", "of_every_rank", "of_rank_0"]

T = TypeVar("T")


def of_rank_0(value: T) -> T:
    """What rank 0 gave; it must be picklable."""
    if dist.get_world_size() == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    found: T = box[0]
    return found


def decided_by_rank_0(decide: Callable[[], T]) -> T:
    """What rank 0 decides. A collective.

    Raises:
        FuyouStateError: rank 0 failed; there its own error.
    """
    found: T | None = None
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found = decide()
        except Exception as error:  # the others wait for an answer
            failure = error
    found, said = of_rank_0((found, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    if said is not None:
        raise FuyouStateError(f"rank 0 could not decide for all: {said}")
    return cast("T", found)


@contextmanager
def all_or_none(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """What is inside meets nobody; where it fails on one rank all others raise, too, instead of waiting for that rank
    in what comes next until the process group times out. A collective, at its end.

    Raises:
        FuyouStateError: another rank could not ``what``.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # the others wait for an answer
        failure = error
    mine = None if failure is None else (dist.get_rank(), f"{type(failure).__name__}: {failure}")
    said = of_every_rank(mine, group)
    if failure is not None:
        raise failure
    failed = next((each for each in said if each is not None), None)
    if failed is not None:
        raise FuyouStateError(f"rank {failed[0]} could not {what}, so this rank does not go on: {failed[1]}")


def of_every_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each of them (of ``group``) gave, by rank; it must be picklable."""
    if dist.get_world_size(group=group) == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group=group)
    # Not DeepSpeed's: its communication logger does not know this collective, and ends the process with status 0.
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def least(*values: float, group: dist.ProcessGroup | None = None) -> list[float]:
    """The smallest of each over all ranks (of ``group``); whole numbers are exact below 2^53, and powers of two."""
    if dist.get_world_size(group=group) == 1:
        return list(values)
    # Not every device has fp64. Under zero.Init torch's own constructors make everything 16 bits wide.
    tensor = torch.from_numpy(_in_order(numpy.array(values, dtype=numpy.float64).view(numpy.int64)))
    tensor = tensor.to(get_accelerator().current_device_name())
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return [float(value) for value in _in_order(tensor.cpu().numpy()).view(numpy.float64)]


def barrier() -> None:
    """Until all ranks are here."""
    least(1.0)


def _in_order(bits: numpy.ndarray) -> numpy.ndarray:
    """Bits of fp64 as whole numbers that are ordered as those are, and back."""
    return numpy.where(bits < 0, bits ^ numpy.iinfo(numpy.int64).max, bits)


class LoadMeetings:
    """Of one load, see [Note: meetings of a load] in loading.py."""

    def __init__(self) -> None:
        self._is_over = False

    def meet(self, failure: Exception | None = None, *, is_there: bool = True) -> None:
        """All ranks come here, each with its own outcome so far. ``is_there``: a checkpoint was found.

        Raises:
            FuyouStateError: another rank failed, or some have found a checkpoint and some have not.
        """
        if self._is_over:
            return
        mine = (is_there, None if failure is None else f"{type(failure).__name__}: {failure}")
        said = of_every_rank(mine)
        self._is_over = failure is not None or not all(there and text is None for there, text in said)
        failed = next(((rank, text) for rank, (_, text) in enumerate(said) if text is not None), None)
        if failure is not None:
            return
        if failed is not None:
            raise FuyouStateError(
                f"rank {failed[0]} could not load its part of the checkpoint, so this rank does not go on with its "
                f"own: {failed[1]}"
            )
        without = [str(rank) for rank, (there, _) in enumerate(said) if not there]
        if without and len(without) < len(said):
            raise FuyouStateError(
                f"rank {', '.join(without)} found no checkpoint where the others found one; load one that all ranks see"
            )
