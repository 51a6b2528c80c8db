# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients, bit for bit stock's.

[Note: stock's norm]
Stock converts every gradient to fp64, takes its norm, adds the squares of a sub-group's norms, and rounds the sum to
fp32. On the CPU torch adds the squares in a fixed order: lane by lane of one vector of fp64, whatever the number of
threads. The core adds them in the same order, from the gradient where it lies, at the speed of memory, without the copy
in fp64 (csrc/kernels/gradient_norm.h). How wide that vector is, :func:`_torch_lanes` finds out by comparing; where
nothing fits, torch itself is asked. A gradient on a device has its norm taken there, by stock's own function.

What was summed on the host, though stock sums it on the device, is the one case in which the two orders differ. Terms
that are not negative give in any order of n of them a sum within (n - 1) u of the exact one, relatively, u = 2**-53
(N. Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). If both ends of that interval round to one
fp32 number, that number is stock's; if not, the norms that widen the interval most are taken on the device until it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.ops.core import load_core

__all__ = ["GradientNorms", "Norm", "any_squares", "host_squares", "rounds_safely"]

_UNIT = 2.0**-53
_PART_NUMEL = 250_000_000
"""Stock takes the norm of a larger gradient in parts of this size."""

Norm = Callable[[torch.Tensor], torch.Tensor]
"""The norm of a tensor as stock takes it where the tensor lies: a scalar in stock's norm dtype."""


def _squares_by_torch(values: torch.Tensor) -> float:
    return sum(float(part.to(torch.float64).norm(2) ** 2.0) for part in values.view(-1).split(_PART_NUMEL))


@functools.cache
def _element_type(dtype: torch.dtype) -> Any:
    types = load_core().ElementType
    return {torch.float32: types.FLOAT32, torch.float16: types.FLOAT16, torch.bfloat16: types.BFLOAT16}[dtype]


def _sum_of_squares(pieces: Sequence[torch.Tensor], num_lanes: int) -> float:
    runs = [(piece.data_ptr(), piece.numel()) for piece in pieces]
    return float(load_core().sum_of_squares(_element_type(pieces[0].dtype), runs, num_lanes))


@functools.cache
def _torch_lanes() -> int | None:
    """In how many lanes this build of torch adds squares in fp64 on this machine; None: in none of the ways we know."""
    generator = torch.Generator("cpu").manual_seed(1)
    sizes = (1, 3, 1_001, 32_770, 65_543, 200_007)
    tried = [torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu") for numel in sizes]
    expected = [float(values.double().norm(2)) for values in tried]
    for lanes in (4, 8, 2):
        if [math.sqrt(_sum_of_squares([values], lanes)) for values in tried] == expected:
            return lanes
    return None


def host_squares(pieces: Sequence[torch.Tensor]) -> float:
    """The square of the norm that stock takes of a gradient in host memory, in consecutive contiguous pieces."""
    lanes = _torch_lanes()
    if lanes is None:
        return _squares_by_torch(pieces[0] if len(pieces) == 1 else torch.cat([*pieces]))
    total = 0.0
    for part in _parts(pieces):
        root = math.sqrt(_sum_of_squares(part, lanes))
        total += root * root
    return total


def any_squares(runs: Sequence[torch.Tensor]) -> float:
    """The sum of squares in some order, of values that are contiguous in host memory."""
    lanes = _torch_lanes()
    return _squares_by_torch(torch.cat([*runs])) if lanes is None else _sum_of_squares(runs, lanes)


def _parts(pieces: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """The pieces anew, in runs of the size that stock takes at once."""
    if 0 < sum(piece.numel() for piece in pieces) <= _PART_NUMEL:
        yield pieces
        return
    part: list[torch.Tensor] = []
    room = _PART_NUMEL
    for piece in pieces:
        for values in piece.view(-1).split(_PART_NUMEL) if piece.numel() > room else (piece.view(-1),):
            while values.numel():
                part.append(values[:room])
                room -= part[-1].numel()
                values = values[part[-1].numel() :]
                if room == 0:
                    yield part
                    part, room = [], _PART_NUMEL
    if part:
        yield part


def rounds_safely(sums: Sequence[float], num_terms: Sequence[int]) -> bool:
    """Whether the fp32 value of ``sum(sums)`` does not depend on the order in which anything was added.

    ``sums[i]`` and stock's are within ``num_terms[i]`` u of each other; 0: they are the same. A sum that is not finite
    has only one outcome (the step is refused) and is safe.
    """
    if not any(num_terms) or not all(math.isfinite(value) for value in sums):
        return True
    total = math.fsum(sums)
    if not math.isfinite(total):
        return True
    # Stock's root and square a parameter, and the sum over parameters.
    slack = math.fsum(value * terms for value, terms in zip(sums, num_terms, strict=True))
    slack = (slack + total * (2 * len(sums) + 16)) * _UNIT * 1.01
    low, high = torch.tensor([total - slack, total + slack], dtype=torch.float64, device="cpu").to(torch.float32)
    return bool(low == high)


def _tensors(norms: Sequence[float]) -> Sequence[torch.Tensor]:
    return torch.tensor(norms, dtype=torch.float64, device="cpu").unbind()


class GradientNorms:
    """The norms of one window's gradients by parameter. Used by the training thread alone."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._norm: Norm | None = None
        self._norms: dict[int, torch.Tensor | float] = {}  # numbers where the host took them in fp64
        self._squares: dict[int, tuple[float, int]] = {}
        self.num_retaken = 0
        """Norms that were taken a second time, on the device, since the start."""

    def take_by(self, norm: Norm) -> None:
        """Where fp64 on the host is not what stock takes norms in, and on a device, ``norm`` takes them."""
        self._norm = norm

    def take(self, param: int, pieces: Sequence[torch.Tensor]) -> None:
        """Takes the norm where the pieces of the gradient lie. On a device nothing waits."""
        if self._norm is None:
            self._norms[param] = math.sqrt(host_squares(pieces))
        else:
            self._norms[param] = self._norm(pieces[0] if len(pieces) == 1 else torch.cat([*pieces]))
        self._squares.pop(param, None)

    def take_sum(self, param: int, squares: float, numel: int) -> None:
        """A gradient that was summed on the host, though stock sums it on the device."""
        self._norms[param] = math.sqrt(squares)
        self._squares[param] = (squares, numel)

    def forget(self, param: int) -> None:
        """The gradient changes after its norm was taken."""
        self._norms.pop(param, None)
        self._squares.pop(param, None)

    def clear(self) -> None:
        self._norms.clear()
        self._squares.clear()

    def __contains__(self, param: int) -> bool:
        return param in self._norms

    def settle(self, params: Collection[int], gradient: Callable[[int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """The norms of a sub-group's gradients, so that the fp32 sum of their squares is stock's.

        ``gradient(param)`` gives back what was summed on the host, to have its norm taken on the device.
        """
        taken = {param: self._norms[param] for param in params if param in self._norms}
        numbers = iter(_tensors([norm for norm in taken.values() if isinstance(norm, float)]))
        found = {param: next(numbers) if isinstance(norm, float) else norm for param, norm in taken.items()}
        elsewhere = [param for param, norm in found.items() if norm.device.type != "cpu"]
        if elsewhere:  # one copy for all; their sum is the same on the host
            norms = torch.stack([found[param] for param in elsewhere]).cpu()
            found.update(zip(elsewhere, norms, strict=True))
        unsure = [param for param in found if param in self._squares]
        if not unsure:
            return found
        values = {param: float(norm) ** 2 for param, norm in found.items()}
        terms = {param: 2 * self._squares[param][1] if param in self._squares else 0 for param in found}
        by_width = sorted(unsure, key=lambda param: values[param] * terms[param])
        while by_width and not rounds_safely([values[p] for p in found], [terms[p] for p in found]):
            param = by_width.pop()
            self.num_retaken += 1
            self.take(param, [gradient(param).to(self._device.torch_device)])
            norm = self._norms[param]
            found[param] = _tensors([norm])[0] if isinstance(norm, float) else norm.cpu()
            values[param], terms[param] = float(found[param]) ** 2, 0
        return found

    def all_finite(self) -> bool:
        """Whether every norm is: a gradient is not finite exactly if its fp64 norm is not."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for norm in self._norms.values():
            if not isinstance(norm, float):
                by_device.setdefault(norm.device, []).append(norm)
            elif not math.isfinite(norm):
                return False
        return all(bool(torch.stack(norms).isfinite().all()) for norms in by_device.values())
