# SPDX-License-Identifier: Apache-2.0
"""The out-of-core optimizer without an engine, over a few parameters, and a disk that changes bytes behind its back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ds_fuyou.checkpoint.state_files import contents_of
from ds_fuyou.host.device import Device, HostDevice
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import FlatLayout, ParamSpan
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.placement import regions_for
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind
from ds_fuyou.state_layout import FP32, WHOLE
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.storage.store import RunIdentity, SlotStore

ADAMW = OptimizerKind("adam", ("exp_avg", "exp_avg_sq"))


def hypers(layout: FlatLayout) -> tuple[GroupHyper, ...]:
    return (GroupHyper(1e-2, (0.9, 0.999), 1e-8, 0.1, True),) * len(layout.sub_group_numels)


def values(span: ParamSpan, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + span.index)
    return torch.randn(span.numel, generator=generator).bfloat16()


def options_of(
    layout: FlatLayout,
    *,
    residency: tuple[float, ...],
    clip_policy: str = "defer",
    checksum: bool = True,
    device: Device | None = None,
    num_slots: int = 2,
    masters: str = WHOLE,
    moments: str = FP32,
    num_update_threads: int = 1,
) -> CoreOptions:
    return CoreOptions(
        residency=ChunkResidency.of_shares(layout, *residency),
        num_slots=num_slots,
        overlap=Overlap.BACKWARD_AND_FORWARD,
        clip_policy=clip_policy,
        param_dtype=torch.bfloat16,
        grad_dtype=torch.bfloat16,
        staging_bytes=1 << 24,
        num_update_threads=num_update_threads,
        io=IoSettings(engine="threads"),
        checksum=checksum,
        device=device or HostDevice(),
        masters=masters,
        moments=moments,
    )


@contextmanager
def small_core(
    path: Path,
    layout: FlatLayout,
    *,
    kind: OptimizerKind = ADAMW,
    residency: tuple[float, ...] = (1.0, 0.0, 1.0),
    clip_policy: str = "defer",
    checksum: bool = True,
    keep: bool = False,
    device: Device | None = None,
    num_slots: int = 2,
    masters: str = WHOLE,
    moments: str = FP32,
    num_update_threads: int = 1,
) -> Iterator[OutOfCoreOptimizer]:
    """Initialised. ``residency``: the shares of P16, states and G16 in memory. ``device``: the host, without one."""
    options = options_of(
        layout,
        residency=residency,
        clip_policy=clip_policy,
        checksum=checksum,
        device=device,
        num_slots=num_slots,
        masters=masters,
        moments=moments,
        num_update_threads=num_update_threads,
    )
    regions = regions_for(layout, options, len(kind.moments), num_slots)
    store = SlotStore.create([path], regions, RunIdentity("test", 0, 1, "run"), keep=keep)
    states = options.state_layout(len(kind.moments))
    store.describe(contents_of(layout, [[span.numel] for span in layout.params], states))
    core = OutOfCoreOptimizer(layout, options, kind, hypers(layout), store)
    try:
        core.initialize(lambda span: values(span, 0), lambda count: None)
        core.pin()
        yield core
    finally:
        core.close()
        store.close()


def backward(core: OutOfCoreOptimizer, seed: int, without: Sequence[str] = ()) -> None:
    core.open_window(hypers(core.layout), 1.0, managed=True)
    for span in reversed(core.layout.params):
        if span.name not in without:
            core.add_gradients([(span, values(span, seed))])
    core.end_micro_batch()


def step(core: OutOfCoreOptimizer, seed: int, without: Sequence[str] = ()) -> None:
    backward(core, seed, without)
    core.apply(hypers(core.layout), 1.0, expected_multiplier=1.0)
    core.wait_all()


class Disk:
    """Changes what lies in a region's slot; the run does not know."""

    def __init__(self, core: OutOfCoreOptimizer, region: str, slot: int) -> None:
        assert core.store is not None
        (extent,) = core.store.extents(region, slot)
        self.path, self._begin = core.store.paths_of_fd(extent.fd), extent.offset

    def flip(self, byte: int, mask: int = 1) -> None:
        before = self._read(byte, 1)
        self._write(byte, bytes([before[0] ^ mask]))

    def swap(self, first: int, second: int, num_bytes: int = 4096) -> None:
        one, other = self._read(first, num_bytes), self._read(second, num_bytes)
        assert one != other
        self._write(first, other)
        self._write(second, one)

    def _read(self, at: int, num_bytes: int) -> bytes:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return os.pread(fd, num_bytes, self._begin + at)
        finally:
            os.close(fd)

    def _write(self, at: int, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(fd, data, self._begin + at)
            os.fsync(fd)
        finally:
            os.close(fd)


def apply(core: OutOfCoreOptimizer, seed: int, multiplier: float = 1.0, without: Sequence[str] = ()) -> None:
    """A step that waits for nothing, clipped where the multiplier is not one."""
    backward(core, seed, without)
    core.apply(hypers(core.layout), multiplier, expected_multiplier=1.0)


def everything(core: OutOfCoreOptimizer) -> list[torch.Tensor]:
    """States of all chunks, then P16 of all parameters."""
    chunks = range(len(core.layout.chunks))
    states = [part.clone() for _, parts in core.states.read_all(chunks) for part in parts]
    return [*states, *(core.params.read(span).clone() for span in core.layout.params)]
