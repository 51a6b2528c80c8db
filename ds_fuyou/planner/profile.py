# SPDX-License-Identifier: Apache-2.0
"""What the first steps of a run measured, and where it is kept for the next run. No torch.

A profile belongs to one machine and one model. It lies in ``$DS_FUYOU_PROFILES`` (a directory, or "off"), else in
``profiles`` of the package's cache directory, one JSON file for each pair of fingerprints, written atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ds_fuyou.files import cache_path, replacing
from ds_fuyou.log import log_once
from ds_fuyou.planner.hardware import NO_THREADS, ThreadSecs
from ds_fuyou.planner.plan import PlanInput
from ds_fuyou.state_layout import layout_of

__all__ = [
    "SCHEMA",
    "BlockCost",
    "MeasuredActivations",
    "OperatorCost",
    "RunProfile",
    "StorageRates",
    "fingerprint_of",
    "forget_profile",
    "load_profile",
    "machine_fingerprint",
    "profile_directory",
    "save_profile",
    "scaled_blocks",
    "slowest",
]

SCHEMA = "ds_fuyou.profile/9"
_BEGIN = f'{{"schema": "{SCHEMA.partition("/")[0]}/'.encode()
MOST_KEPT = 100  # profiles, a few kB each
OFF = "off"


@dataclass(frozen=True)
class OperatorCost:
    """What one call of an operator in a block's forward made, for the micro-batch that was measured.

    Attributes:
        name: module within the block and operator, ``mlp.up/addmm``; ``/2`` is added to the second of its name.
        flops: forward FLOPs of the call.
        num_bytes: memory that the outputs made; 0 for views and for operators in place.
        saved: backward needs it, or nobody could see whether it does. A view that is saved counts for the operator that
            made the memory, the input of a block for the operator that ended the block before.
        call: by which a recomputation knows the output, its operator and which of that one's calls; None for a call
            that it always runs again (:mod:`ds_fuyou.activations.calls`), as for one whose output is changed unseen
            (looked for in the first block alone).
    """

    name: str
    flops: float
    num_bytes: float
    saved: bool
    call: tuple[str, int] | None = None


@dataclass(frozen=True)
class BlockCost:
    """One call of one block. ``name`` "" is what the model does outside of its blocks.

    Attributes:
        input_bytes: of the tensors that came in.
        operators: in the order of the calls; those that made no memory and have no FLOPs are left out.
    """

    name: str
    flops: float
    input_bytes: float
    operators: tuple[OperatorCost, ...]


def scaled_blocks(blocks: tuple[BlockCost, ...], factor: float) -> tuple[BlockCost, ...]:
    """Of a micro-batch that has ``factor`` times as many elements: all of it is taken to be in proportion."""

    def scaled(one: OperatorCost) -> OperatorCost:
        return replace(one, flops=factor * one.flops, num_bytes=factor * one.num_bytes)

    return tuple(
        replace(
            block,
            flops=factor * block.flops,
            input_bytes=factor * block.input_bytes,
            operators=tuple(map(scaled, block.operators)),
        )
        for block in blocks
    )


@dataclass(frozen=True)
class MeasuredActivations:
    """What mode "auto" decided by. Bytes of the device are those of the rank that needs most of it.

    Attributes:
        num_blocks: of the model.
        block_bytes: saved by one block in a forward, in the mean; ``outside_bytes``: around the blocks.
        beside_bytes: of the device, that all else takes while backward is in the blocks; ``loss_bytes``: before.
        passing_bytes: that activations which leave the device may take of it at the same time.
        fixed_bytes: of the device, in use however long a batch is.
        mean_tokens, longest_tokens: of the step's micro-batches.
        room: of the device, for activations that stay.
        once: blocks that cannot be computed again, and why.
    """

    num_blocks: int
    block_bytes: float
    outside_bytes: float
    beside_bytes: float
    loss_bytes: float
    passing_bytes: float
    fixed_bytes: float
    mean_tokens: float
    longest_tokens: float
    room: float
    once: Mapping[str, str]


@dataclass(frozen=True)
class StorageRates:
    """Bytes a second of all paths together, in requests of the size the run uses: read and write alone, both at once.

    Attributes:
        cpu_secs_per_byte: what the host's cores pay to move a byte.
        probed_bytes: that each of the three moved. A short probe: a consumer SSD may be slower for long.
    """

    read: float
    write: float
    mixed: float
    cpu_secs_per_byte: float
    probed_bytes: float


@dataclass(frozen=True)
class RunProfile:
    """Measured in the first two steps of a run on one rank.

    Attributes:
        machine, model: fingerprints; a profile is used only where both are the same.
        shape: of the first tensor of the batch, one micro-batch; the mean of those of a step.
        num_elements: of that tensor, their mean: tokens, where they are token numbers.
        accumulation: micro-batches a step.
        blocks: FLOPs and bytes of every operator output, for so many elements; empty where they could not be recorded.
        forward_secs, backward_secs: of one micro-batch while nothing else ran, waits not counted; the mean.
        update_rate: parameters a second of the CPU optimizer.
        thread: what the threads that run the model do themselves; nothing where the device is the host.
        storage: None where nothing of the run lives on storage.
        link_up, link_down: bytes a second to the device and from it; copies within host memory where that is one.
        device_is_host: compute, updates and the host's part of I/O share the cores.
        num_cores: that this rank may use.
        host_bytes, device_bytes: available when it was measured.
        given: sizes and means of each rank, under the block of the run; ``world_size`` of them, ``num_params`` of the
            whole model.
        activations: None until mode "auto" has decided, and a step has been applied since.
        redo_share: of updates begun in backward, those that were done again.
        sum_rate: gradients a second that are added on the host, as micro-batches on a device accumulate; 0: none were.
    """

    machine: str
    model: str
    shape: tuple[int, ...]
    num_elements: float
    accumulation: int
    blocks: tuple[BlockCost, ...]
    forward_secs: float
    backward_secs: float
    update_rate: float
    storage: StorageRates | None
    link_up: float
    link_down: float
    device_is_host: bool
    num_cores: int
    host_bytes: float
    device_bytes: float
    given: PlanInput
    world_size: int
    num_params: int
    activations: MeasuredActivations | None = None
    redo_share: float = 0.0
    thread: ThreadSecs = NO_THREADS
    sum_rate: float = 0.0

    @property
    def room(self) -> float | None:
        """Of the device for activations that stay, beside what else training needs of it; None: not known."""
        return None if self.activations is None else self.activations.room

    @property
    def forward_flops(self) -> float:
        """Of one micro-batch; 0 where operators were not recorded."""
        return sum(block.flops for block in self.blocks)

    @property
    def flops_rate(self) -> float:
        """Achieved FLOP/s of forward; 0 where operators were not recorded."""
        return self.forward_flops / self.forward_secs

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunProfile:
        """Raises ValueError, TypeError or KeyError where the data is not what :meth:`to_json` gives."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r} instead of {SCHEMA!r}")
        values = {item.name: data[item.name] for item in fields(cls)}
        values["shape"] = tuple(int(size) for size in data["shape"])
        values["blocks"] = tuple(
            BlockCost(**{**block, "operators": tuple(map(_operator, block["operators"]))}) for block in data["blocks"]
        )
        values["activations"] = _activations(data["activations"])
        values["thread"] = ThreadSecs(**data["thread"])
        values["storage"] = None if data["storage"] is None else StorageRates(**data["storage"])
        values["given"] = PlanInput(**{**data["given"], "layout": layout_of(**data["given"]["layout"])})
        profile = cls(**values)
        if not all(math.isfinite(value) and value >= 0 for value in (*astuple(profile.thread), profile.sum_rate)):
            raise ValueError(f"must not be negative, found {profile.thread} and a rate of sums of {profile.sum_rate}")
        measured = [
            profile.forward_secs,
            profile.backward_secs,
            profile.update_rate,
            profile.link_up,
            profile.link_down,
        ]
        measured += (
            [] if profile.storage is None else [profile.storage.read, profile.storage.write, profile.storage.mixed]
        )
        if not all(math.isfinite(value) and value > 0 for value in measured):
            raise ValueError(f"rates and times must be positive, found {measured}")
        return profile


def _operator(data: Mapping[str, Any]) -> OperatorCost:
    if data["call"] is None:
        return OperatorCost(**data)
    operator, occurrence = data["call"]
    return OperatorCost(**{**data, "call": (str(operator), int(occurrence))})


def _activations(data: Mapping[str, Any] | None) -> MeasuredActivations | None:
    if data is None:
        return None
    found = MeasuredActivations(**data)
    sizes = [value for name, value in asdict(found).items() if name != "once"]
    if not all(math.isfinite(size) and size >= 0 for size in sizes) or not isinstance(found.once, Mapping):
        raise ValueError(f"sizes must not be negative, found {found}")
    return found


def slowest(profiles: Sequence[RunProfile]) -> RunProfile:
    """The first of ``profiles`` with the worst number that any of them has: who shares a step waits for the last."""
    worst = {
        name: sign * min(sign * getattr(profile, name) for profile in profiles)
        for sign, names in ((1, _RATES_AND_BYTES), (-1, _SECS))
        for name in names
    }
    storages = [profile.storage for profile in profiles if profile.storage is not None]
    storage = None
    if storages:
        rates = {name: min(getattr(one, name) for one in storages) for name in ("read", "write", "mixed")}
        storage = replace(storages[0], **rates)
    thread = ThreadSecs(*map(max, zip(*(astuple(profile.thread) for profile in profiles), strict=True)))
    return replace(profiles[0], storage=storage, thread=thread, **worst)


_SECS = ("forward_secs", "backward_secs")
_RATES_AND_BYTES = ("update_rate", "sum_rate", "link_up", "link_down", "host_bytes", "device_bytes")


def fingerprint_of(*parts: object) -> str:
    """Short and stable for equal parts."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:16]


def machine_fingerprint(device: str, storage: Sequence[str], settings: object) -> str:
    """Of this machine: processor, cores of this process, memory, the device, what the paths lie on, I/O settings."""
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "")
    return fingerprint_of(cpu, len(os.sched_getaffinity(0)), memory, device, *storage, settings)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def profile_directory() -> Path | None:
    """Where profiles lie; None where they are switched off. Nothing is created."""
    named = os.environ.get("DS_FUYOU_PROFILES", "")
    if named.lower() == OFF:
        return None
    if named:
        return Path(os.path.expanduser(named))
    return cache_path() / "profiles"


def _path(machine: str, model: str) -> Path | None:
    directory = profile_directory()
    return None if directory is None else directory / f"{machine}-{model}.json"


def load_profile(machine: str, model: str) -> RunProfile | None:
    """The kept profile of this machine and model, None if there is none. A broken one is told and ignored."""
    path = _path(machine, model)
    if path is None:
        return None
    try:
        profile = RunProfile.from_json(json.loads(path.read_text(encoding="utf-8")))
        if (profile.machine, profile.model) != (machine, model):
            raise ValueError("it was made for another machine or model")
        with contextlib.suppress(OSError):  # a cache that this user only reads
            os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        log_once(logging.WARNING, f"the kept profile {path} is ignored and measured again: {error!r}")
        return None
    return profile


def forget_profile(machine: str, model: str) -> bool:
    """Whether a kept profile was there and is gone now. What fails is told: training needs no cache."""
    path = _path(machine, model)
    try:
        if path is not None:
            path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        log_once(logging.WARNING, f"the profile {path} no longer holds and could not be removed: {error}")
        return False
    return path is not None


def save_profile(profile: RunProfile) -> Path | None:
    """Keeps a profile for the next run; returns where. What fails is told: training needs no cache."""
    path = _path(profile.machine, profile.model)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps(profile.to_json()) + "\n", encoding="utf-8")
        _drop_old(path.parent)
    except OSError as error:
        log_once(logging.WARNING, f"the profile could not be kept for the next run: {error}")
        return None
    return path


def _drop_old(directory: Path) -> None:
    """All profiles but those that were made or used last. Another process may do the same; other files stay."""
    found = []
    for file in directory.glob("*-*.json"):
        with contextlib.suppress(OSError):
            found.append((file.stat().st_mtime_ns, file))
    for _, file in [each for each in sorted(found) if _is_profile(each[1])][:-MOST_KEPT]:
        file.unlink(missing_ok=True)


def _is_profile(file: Path) -> bool:
    """By how it begins, whichever version wrote it."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return opened.read(len(_BEGIN)) == _BEGIN
    return False
