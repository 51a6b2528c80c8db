# SPDX-License-Identifier: Apache-2.0
"""Machines by their parts: presets with a source for each number, and the rates a step sees of them. No torch.

``presets.json`` holds every number as ``[value, source]``. GPU and host memory are binary (24 means 24 GiB, as
memory is built), rates and SSD capacities decimal (as they are sold).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.hardware import GIB, Machine

__all__ = [
    "Constants",
    "Gpu",
    "Host",
    "Ssd",
    "constants",
    "find_gpu",
    "find_host",
    "find_ssd",
    "machine_of",
    "model_shapes",
    "preset_names",
    "rated_writes",
]

_PRESETS = Path(__file__).with_name("presets.json")
_ADAM_BYTES_PER_PARAM = 30  # reads G16 widened, P32, M, V; writes P32, M, V and P16
_SHORTEST_MODEL = 4  # letters and digits; what is shorter stands in other names, too
_SATURATION = 4.0  # how sharply n SSDs run into the host's limit: the order of the norm that joins both


@dataclass(frozen=True)
class Constants:
    """Shares of a specified or measured rate that a training step gets; see the sources in presets.json."""

    block_share_of_matmul: float
    streamed_share_of_block: float
    stock_share_of_block: float
    storage_under_load: float
    ssd_under_load: float
    adam_share_of_dram: float
    device_context_bytes: float


@dataclass(frozen=True)
class Gpu:
    """One GPU. Rates in FLOP/s and bytes/s; ``link`` is each direction alone and together."""

    name: str
    memory_bytes: int
    matmul_flops: float
    memory_rate: float
    link_rate: float


@dataclass(frozen=True)
class Ssd:
    """One SSD. Rates in bytes/s, sustained; ``endurance_bytes`` is what the vendor warrants to be written."""

    name: str
    capacity_bytes: float
    read_rate: float
    write_rate: float
    endurance_bytes: float


@dataclass(frozen=True)
class Host:
    """What CPU sockets and PCIe give: DRAM bytes/s by specification, storage bytes/s in both directions together."""

    name: str
    dram_rate: float
    storage_rate: float


@lru_cache(maxsize=1)
def _presets() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(_PRESETS.read_text(encoding="utf-8"))
    return loaded


@lru_cache(maxsize=1)
def constants() -> Constants:
    return Constants(**{key: float(value[0]) for key, value in _presets()["constants"].items()})


def model_shapes() -> dict[str, tuple[int, int, int]]:
    """Published GPTs by name: (layers, heads, hidden), smallest first."""
    return {name: (shape[0], shape[1], shape[2]) for name, shape in _presets()["models"].items()}


def preset_names(kind: str) -> str:
    """Of "gpus", "ssds" or "hosts", as a text."""
    return ", ".join(_presets()[kind])


def _found(kind: str, flag: str, name: str) -> tuple[str, dict[str, float]]:
    """The preset behind a name or an alias, without regard to case, spaces and dashes.

    Raises:
        FuyouConfigError: no such preset; names the nearest ones.
    """
    entries = _presets()[kind]
    by_alias = {alias: key for key, entry in entries.items() for alias in (key, *entry["aliases"])}
    plain = {alias.replace("_", ""): key for alias, key in by_alias.items()}
    wanted = "".join(c for c in name.lower() if c not in " -_/").removeprefix("nvidia")
    key = plain.get(wanted)
    if key is None:
        near = difflib.get_close_matches(wanted, plain, n=3, cutoff=0.5)
        names = list(dict.fromkeys(plain[alias] for alias in near))
        hint = f"did you mean {', '.join(names)}? Known are" if near else "known are"
        raise FuyouConfigError(f"{flag} {name!r} is not a known preset; {hint} {preset_names(kind)}")
    return key, {number: value[0] for number, value in entries[key].items() if number != "aliases"}


def find_gpu(name: str) -> Gpu:
    key, number = _found("gpus", "--gpu", name)
    return Gpu(
        key,
        int(number["memory_gib"] * GIB),
        number["matmul_tflops"] * 1e12,
        number["memory_gbps"] * 1e9,
        number["link_gbps"] * 1e9,
    )


def find_ssd(name: str) -> Ssd:
    key, number = _found("ssds", "--ssd", name)
    return Ssd(
        key,
        number["capacity_gb"] * 1e9,
        number["read_gbps"] * 1e9,
        number["write_gbps"] * 1e9,
        number["endurance_tb"] * 1e12,
    )


def rated_writes(model: str, capacity_bytes: float) -> float:
    """Bytes that a drive may be written by its vendor, if the name that it tells the system is one of a preset; 0 if
    not. Ratings of one model grow with its capacity.
    """
    told = "".join(c for c in model.lower() if c.isalnum())
    for key, entry in _presets()["ssds"].items():
        names = ("".join(c for c in name if c.isalnum()) for name in (key, *entry["aliases"]))
        if any(len(name) > _SHORTEST_MODEL and name in told for name in names):
            return float(entry["endurance_tb"][0] * 1e12 * capacity_bytes / (entry["capacity_gb"][0] * 1e9))
    return 0.0


def find_host(name: str) -> Host:
    key, number = _found("hosts", "--host", name)
    return Host(key, number["dram_gbps"] * 1e9, number["storage_gbps"] * 1e9)


def _joined(devices: float, host: float) -> float:
    """Rate of SSDs behind a host: near the smaller one, less where both are alike (queues run dry in turn)."""
    if devices <= 0:
        return 0.0
    return (devices**-_SATURATION + host**-_SATURATION) ** (-1 / _SATURATION)


def machine_of(
    gpu: Gpu,
    host: Host,
    ssd: Ssd,
    *,
    num_ssds: int,
    dram_bytes: float,
    num_gpus: int = 1,
    storage_bytes: float | None = None,
    pinned_limit_bytes: float = float("inf"),
) -> Machine:
    """The machine that these parts make. ``num_ssds`` 0: nothing can live on storage.

    Raises:
        FuyouConfigError: a count or a size is not positive (SSDs: negative).
    """
    for what, value in (("--num-gpus", num_gpus), ("--dram-gb", dram_bytes)):
        if not value > 0:
            raise FuyouConfigError(f"{what} must be positive, found {value:g}")
    if num_ssds < 0:
        raise FuyouConfigError(f"--num-ssds must not be negative, found {num_ssds}")
    known = constants()
    path_rate = host.storage_rate * known.storage_under_load
    devices = num_ssds * known.ssd_under_load
    return Machine(
        name=f"{num_gpus} x {gpu.name}, {num_ssds} x {ssd.name}, {dram_bytes / GIB:.0f} GiB DRAM, {host.name}",
        num_gpus=num_gpus,
        gpu_bytes=gpu.memory_bytes,
        flops=gpu.matmul_flops * known.block_share_of_matmul,
        gpu_memory_rate=gpu.memory_rate,
        link_up=gpu.link_rate,
        link_down=gpu.link_rate,
        dram_bytes=dram_bytes,
        pinned_limit_bytes=pinned_limit_bytes,
        storage_read=_joined(devices * ssd.read_rate, path_rate),
        storage_write=_joined(devices * ssd.write_rate, path_rate),
        storage_duplex=1.0,
        storage_bytes=num_ssds * ssd.capacity_bytes if storage_bytes is None else storage_bytes,
        endurance_bytes=num_ssds * ssd.endurance_bytes,
        update_rate=host.dram_rate * known.adam_share_of_dram / _ADAM_BYTES_PER_PARAM,
        pass_rate=host.dram_rate * known.adam_share_of_dram,
    )
