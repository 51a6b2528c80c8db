# SPDX-License-Identifier: Apache-2.0
"""Where every byte of every region and slot lies: striping over paths, and the number of slots. All pure.

A region is cut into units of 4 MiB, smaller ones where it has fewer than there are paths, that go to the paths in
proportion to their weights (measured bandwidth), so that reading one chunk uses every device. Where a device is
too small for its share it takes what it can hold and the others share the rest, in the same proportion in
every region. The result is frozen in the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.storage.probe import PathFacts, Probe, probe_path
from ds_fuyou.storage.types import PAGE_BYTES, RegionSpec

__all__ = [
    "ACTIVATION_SHARE",
    "CHECKPOINTS_BESIDE",
    "CHECKPOINT_BYTES",
    "RESERVE_BYTES",
    "RESERVE_SHARE",
    "UNIT_BYTES",
    "PathShare",
    "Piece",
    "RegionLayout",
    "SlotChoice",
    "StoreLayout",
    "choose_num_slots",
    "device_capacities",
    "most_slots",
    "queue_depth",
    "spare_bytes",
    "stripe",
]

UNIT_BYTES = 4 * 1024 * 1024
_LEAST_UNIT_BYTES = 256 * 1024  # a request below takes its time, not that of its bytes
_REQUESTS_A_PATH, _LEAST_REQUESTS = 8, 32
RESERVE_BYTES = 16 * 1024 * 1024
"""Left free on every device for manifests, records and the file system itself. Two slots leave more where one does."""
RESERVE_SHARE, ACTIVATION_SHARE = 0.02, 0.10


@dataclass(frozen=True)
class Piece:
    """Bytes [offset, offset + num_bytes) of the data file of path number ``path``."""

    path: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class RegionLayout:
    """A region and, for each of its slots, its pieces in logical order."""

    spec: RegionSpec
    slots: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class StoreLayout:
    """All regions, and where the data file of every path ends (0 for a path that holds nothing)."""

    regions: tuple[RegionLayout, ...]
    file_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(region.spec.num_bytes * region.spec.num_slots for region in self.regions)


@dataclass(frozen=True)
class PathShare:
    """A path's device (paths on one device share its capacity) and its relative bandwidth."""

    device: str
    weight: float


@dataclass(frozen=True)
class SlotChoice:
    """How many slots fit; when only one does, ``reason`` is the warning text, and ``limit`` what is too small."""

    num_slots: int
    reason: str
    limit: str = ""


def queue_depth(num_paths: int) -> int:
    """Requests in flight at once: enough for every path while one of them is slow to answer."""
    return max(_LEAST_REQUESTS, _REQUESTS_A_PATH * num_paths)


def device_capacities(facts: Sequence[PathFacts], reserve_share: float = 0.0) -> dict[str, int]:
    """Bytes the store may take of each device: what is free, less a small reserve (``reserve_share`` of that, if it is
    more), in whole pages.
    """
    free: dict[str, int] = {}
    for fact in facts:
        free[fact.device] = min(fact.free_bytes, free.get(fact.device, fact.free_bytes))
    left = {device: num - max(RESERVE_BYTES, int(reserve_share * num)) for device, num in free.items()}
    return {device: max(0, num_bytes) // PAGE_BYTES * PAGE_BYTES for device, num_bytes in left.items()}


def spare_bytes(paths: Sequence[Path], *, swaps_activations: bool, probe: Probe = probe_path) -> int:
    """What is free on the paths' devices beside a share for others, and one for activations that come later."""
    share = RESERVE_SHARE + (ACTIVATION_SHARE if swaps_activations else 0.0)
    return sum(device_capacities([probe(path) for path in paths], share).values())


CHECKPOINT_BYTES = 12
"""Of a parameter: P32 and two moments, as stock writes them."""
CHECKPOINTS_BESIDE = 2
"""A third slot is for checkpoints: taken where the one that is there, and the next, which replaces it, fit, too."""


def most_slots(planned: int, *, in_memory: bool, are_cloned: bool) -> int:
    """Slots to be tried for: as planned, but no third where states are in host memory, which may need the room when
    they leave it, nor for checkpoints that will share the states' blocks.
    """
    return min(planned, 2) if in_memory or are_cloned else planned


def choose_num_slots(
    paths: Sequence[Path],
    bytes_one_slot: int,
    bytes_wanted: int,
    budget: int | None = None,
    *,
    wanted: int = 2,
    bytes_beside: int = 0,
    bytes_of_others: int = 0,
    swaps_activations: bool = False,
    bytes_stale: int = 0,
    probe: Probe = probe_path,
) -> SlotChoice:
    """As many slots as are ``wanted`` (``bytes_wanted`` of them) where budget and free space hold them, else one with
    the text of the warning that is due.

    They leave a share of every device to others, and of devices and budget to activations that come later. It
    does not check that one slot fits; creating the store does.

    Args:
        bytes_beside: of this rank, what else is to find room: checkpoints, say.
        bytes_of_others: as many slots of the other ranks that use one of these devices; none has created its store yet.
        bytes_stale: what dead runs left on the paths.
        budget: this rank's.
    """
    for_activations = ACTIVATION_SHARE if swaps_activations else 0.0
    capacity = spare_bytes(paths, swaps_activations=swaps_activations, probe=probe)
    beside = " beside activations that are swapped" if swaps_activations else ""
    if budget is not None and bytes_wanted > (1 - for_activations) * budget:
        limit = f"nvme_budget_bytes is {budget}{beside}"
    elif bytes_wanted + bytes_beside + bytes_of_others > capacity:
        limit = f"{capacity} bytes can be used on {', '.join(str(path) for path in paths)}{beside}"
        limit += f"; other ranks need {bytes_of_others} of them" if bytes_of_others else ""
        limit += f"; dead runs left {bytes_stale} bytes there, which `fuyou clean` frees" if bytes_stale else ""
    else:
        return SlotChoice(wanted, "")
    limit = f"{'two' if wanted == 2 else 'three'} need {bytes_wanted} bytes and {limit}"
    reason = (
        f"one slot a chunk: {limit}. With one ({bytes_one_slot} bytes) "
        f"crash consistency and speculate are lost: updates wait for the end of backward, and a "
        f"crash may cost the state since the last checkpoint. Free space, raise the budget or add a path"
    )
    return SlotChoice(1, reason, limit)


def stripe(
    regions: Sequence[RegionSpec],
    shares: Sequence[PathShare],
    capacities: Mapping[str, int],
    unit_bytes: int = UNIT_BYTES,
) -> StoreLayout:
    """Lays out every slot of every region. Capacities are by device, in bytes, multiples of 4096; ``unit_bytes`` is the
    largest unit.

    Raises:
        FuyouConfigError: the regions do not fit the capacities together, or a weight is not positive and
            finite.
    """
    for share in shares:
        if not (share.weight > 0 and math.isfinite(share.weight)):
            raise FuyouConfigError(f"bandwidth weights must be positive and finite, found {share.weight}")
    total = sum(region.num_bytes * region.num_slots for region in regions)
    room = dict(capacities)
    if total > sum(room.values()):
        raise FuyouConfigError(f"{total} bytes must fit the devices, which hold {sum(room.values())} together")
    targets = _targets(total, shares, room)
    used = [0] * len(shares)
    laid_out = []
    for region in regions:
        unit = _unit_of(region.num_bytes, len(shares), unit_bytes)
        slots = tuple(_place(region.num_bytes, shares, targets, room, used, unit) for _ in range(region.num_slots))
        laid_out.append(RegionLayout(region, slots))
    return StoreLayout(tuple(laid_out), tuple(used))


def _unit_of(num_bytes: int, num_paths: int, most: int) -> int:
    """A unit for every path, if they are worth a request."""
    even = -(-num_bytes // num_paths // PAGE_BYTES) * PAGE_BYTES
    return min(most, max(_LEAST_UNIT_BYTES, even))


def _targets(total: int, shares: Sequence[PathShare], room: Mapping[str, int]) -> list[float]:
    """Bytes each path should take: by weight, capped by its device, what is over going to the others."""
    weights: dict[str, float] = {}
    for share in shares:
        weights[share.device] = weights.get(share.device, 0.0) + share.weight
    of_device: dict[str, float] = {}
    rest, open_devices = float(total), set(weights)
    while open_devices:
        sum_weights = sum(weights[device] for device in open_devices)
        full = {d for d in open_devices if rest * weights[d] / sum_weights >= room[d]}
        if not full:
            of_device.update({d: rest * weights[d] / sum_weights for d in open_devices})
            break
        of_device.update({d: float(room[d]) for d in full})
        rest = max(0.0, rest - sum(room[d] for d in full))
        open_devices -= full
    return [of_device[share.device] * share.weight / weights[share.device] for share in shares]


def _place(
    num_bytes: int,
    shares: Sequence[PathShare],
    targets: Sequence[float],
    room: dict[str, int],
    used: list[int],
    unit_bytes: int,
) -> tuple[Piece, ...]:
    """Appends one slot, unit by unit, each to the path that is furthest behind its target."""
    pieces: list[Piece] = []
    while num_bytes > 0:
        wanted = min(unit_bytes, num_bytes)
        open_paths = [i for i, share in enumerate(shares) if room[share.device] > 0]
        path = min(open_paths, key=lambda i: ((used[i] + wanted) / targets[i] if targets[i] > 0 else math.inf, i))
        size = min(wanted, room[shares[path].device])
        last = pieces[-1] if pieces else None
        if last is not None and last.path == path:
            pieces[-1] = Piece(path, last.offset, last.num_bytes + size)
        else:
            pieces.append(Piece(path, used[path], size))
        used[path] += size
        room[shares[path].device] -= size
        num_bytes -= size
    return tuple(pieces)
