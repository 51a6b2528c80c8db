# SPDX-License-Identifier: Apache-2.0
"""``fuyou doctor ds.json``: what in a DeepSpeed configuration would not do what it says, with the line to write."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_fuyou.cli.ds_config import BYTE_ORDER_MARK, read_ds_file
from ds_fuyou.cli.finding import Finding, path_finding
from ds_fuyou.config import BLOCK_KEY
from ds_fuyou.ds_json import Activation, is_on, load_activation, lookup, section_of
from ds_fuyou.errors import FuyouConfigError, FuyouStorageError
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.storage.probe import LOCAL_FILESYSTEMS, probe_path
from ds_fuyou.units import shown_bytes

__all__ = ["config_findings", "findings_of"]

_OFFLOADS = ("offload_optimizer", "offload_param")
_SLOT_BYTES = 12  # of fp32 masters and moments: docs/states.md says what takes less


def config_findings(file: Path, model: ModelSpec | None = None) -> Iterator[Finding]:
    """Every check of one file, the worst that DeepSpeed itself would refuse first. ``model``: what is to be trained,
    None where nobody says.
    """
    name = str(file)
    other = _other_format(file)
    if other is not None:
        yield other
        return
    try:
        read = read_ds_file(file)
    except FuyouConfigError as error:
        found = str(error).removeprefix(f"{name}: ")
        fix = "correct the file at the place named: a JSON object, { ... }"
        if not file.is_file():
            fix = f"name a DeepSpeed JSON that exists; fuyou init --model MODEL --out {name} writes a block"
        yield Finding(name, found, ok=False, fix=fix)
        return
    if not read.is_json:
        fix = "take them out where Accelerate or the Trainer reads the file"
        yield Finding(name, "holds comments or the like: DeepSpeed takes them, Hugging Face's programs do not", fix=fix)
    if read.text.startswith(BYTE_ORDER_MARK):
        found = "begins with a byte order mark: DeepSpeed takes it, Hugging Face's programs do not"
        yield Finding(name, found, fix="save it as UTF-8 without one where Accelerate or the Trainer reads it")
    yield from findings_of(name, read.config, model)


_OF_ACCELERATE = re.compile(
    r"""^[^#\n]*["']?\b(?:distributed_type|compute_environment|deepspeed_config)["']?\s*:""", re.M
)
_NAMED_THERE = re.compile(
    r"""^[^#\n]*\bdeepspeed_config_file["']?\s*:\s*(?:"(?P<a>[^"\n]+)"|'(?P<b>[^'\n]+)'|(?P<c>[^\s"',}#]+))""", re.M
)


def _other_format(file: Path) -> Finding | None:
    """What is no DeepSpeed JSON at all, but another program's file that may name one: as ``accelerate config`` writes
    it, in YAML or JSON.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):  # who reads it as JSON says what is the matter
        return None
    if _OF_ACCELERATE.search(text) is None:
        if file.suffix.lower() not in (".yaml", ".yml"):
            return None
        return Finding(str(file), "is YAML by its name; DeepSpeed reads JSON", ok=False, fix="name the DeepSpeed JSON")
    named = _NAMED_THERE.search(text)
    if named is not None:
        path = named["a"] or named["b"] or named["c"]
        found = f"is a configuration of Accelerate, which names the one of DeepSpeed: {path}"
        return Finding(str(file), found, ok=False, fix=f"fuyou doctor {shlex.quote(path)}")
    found = f"is a configuration of Accelerate, in which no {BLOCK_KEY} block can stand"
    fix = "write a DeepSpeed JSON, and name it there: deepspeed_config_file: ds.json"
    return Finding(str(file), found, ok=False, fix=fix)


def findings_of(name: str, config: Mapping[str, Any], model: ModelSpec | None = None) -> Iterator[Finding]:
    """Every check of a configuration that was read from ``name``; as :func:`config_findings`."""
    num_findings = 0
    for check in (_precision, _aio, _offload_sections, _block):
        for found, ok, fix in check(config):
            num_findings += 1
            yield Finding(name, found, ok=ok, fix=fix)
    if not num_findings:
        yield Finding(name, "says what it means")
    yield from _paths(config)
    if model is not None:
        yield from _room(config, model)


Row = tuple[str, bool, str]


def _precision(config: Mapping[str, Any]) -> Iterator[Row]:
    enabled = [name for name in ("bf16", "bfloat16", "fp16") if is_on(lookup(config, f"{name}.enabled"))]
    if "fp16" in enabled and len(enabled) > 1:
        yield (
            f"{' and '.join(enabled)} are both enabled, which DeepSpeed refuses",
            False,
            '"fp16": { "enabled": false }',
        )


def _aio(config: Mapping[str, Any]) -> Iterator[Row]:
    zero = section_of(config, "zero_optimization")
    if "aio" in zero:
        fix = f'move it to the top level of the file: "aio": {json.dumps(zero["aio"])}'
        yield "aio stands inside zero_optimization, which DeepSpeed 0.19 refuses as an extra input", False, fix
    for section in (section_of(config, "aio"), section_of(zero, "aio")):
        if "thread_count" in section:
            fix = f'"intra_op_parallelism": {json.dumps(section["thread_count"])} instead'
            yield "aio.thread_count is ignored by DeepSpeed since 0.16.4: one thread does all I/O", True, fix


def _offload_sections(config: Mapping[str, Any]) -> Iterator[Row]:
    zero = section_of(config, "zero_optimization")
    for name in _OFFLOADS:
        section = zero.get(name)
        if section is None:
            if name in config:
                fix = f'"zero_optimization": {{ "{name}": {json.dumps(config[name])} }}'
                yield f"{name} stands at the top level, where nothing reads it", False, fix
            continue
        if not isinstance(section, Mapping):
            yield f"{name} is {json.dumps(section)}", False, f'"{name}": {{ "device": "cpu" }}'
            continue
        device, path = section.get("device"), section.get("nvme_path")
        if device not in (None, "auto", "none", "cpu", "nvme"):
            yield f"{name}.device is {json.dumps(device)}", False, f'"device": "nvme" or "cpu" in {name}'
        if device == "nvme" and not path and not _block_paths(config):
            fix = f'"nvme_path": "/a/directory/on/the/ssd" in {name}, or in the {BLOCK_KEY} block'
            yield f'{name}.device is "nvme" and no path is named', False, fix
    if _without_stage_3(zero) and any(name in zero for name in _OFFLOADS):
        yield f"stage is {json.dumps(zero.get('stage', 0))}: only stage 3 offloads parameters", False, '"stage": 3'


def _without_stage_3(zero: Mapping[str, Any]) -> bool:
    return bool(zero.get("stage", 0) != 3)


def _block(config: Mapping[str, Any]) -> Iterator[Row]:
    zero = section_of(config, "zero_optimization")
    if BLOCK_KEY in zero:
        fix = f'move it to the top level of the file: "{BLOCK_KEY}": {json.dumps(zero[BLOCK_KEY])}'
        yield f"the {BLOCK_KEY} block stands inside zero_optimization, where it is not seen", False, fix
        return
    if config.get(BLOCK_KEY) is None:
        path = next(iter(_named_paths(config)), "/a/directory/on/the/ssd")
        fix = f'"{BLOCK_KEY}": {{ "nvme_path": {json.dumps(path)} }} at the top level'
        yield f"there is no {BLOCK_KEY} block: DeepSpeed runs as stock", True, fix
        return
    try:
        activation = load_activation(config)
    except FuyouConfigError as error:
        yield "the block cannot run", False, str(error)
        return
    if activation is None:
        yield f'"{BLOCK_KEY}" says "enabled": false', True, '"enabled": true'
        return
    yield from _effects(activation)
    held = [name for name in _OFFLOADS if lookup(zero, f"{name}.device") == "cpu" and _open_tier(config, name)]
    if held and _block_paths(config):
        found = f'{" and ".join(held)} say "cpu", so what they name stays in host memory, whatever nvme_path holds'
        yield (
            found,
            True,
            "leave these sections out, and the run decides by the memory that is free; or set tiers in the block",
        )


def _effects(activation: Activation) -> Iterator[Row]:
    if activation.ignored:
        keys = "; ".join(f"{item.key} ({item.reason})" for item in activation.ignored)
        yield f"without effect under the block: {keys}", True, "leave them out, or keep them for runs without the block"
    if activation.config.gradients.reduce_by == "block":
        found = f'{BLOCK_KEY}.gradients.reduce_by is "block": on more than two ranks last bits differ from stock\'s'
        yield found, True, "leave it out for equal bits, with a reduce_bucket_size of an eighth of the model or less"


def _open_tier(config: Mapping[str, Any], name: str) -> bool:
    """Whether the block leaves it to the offload section where its class lives."""
    part = {"offload_optimizer": "optimizer", "offload_param": "parameters"}[name]
    return all(lookup(config[BLOCK_KEY], key) in (None, "auto") for key in (f"{part}.tier", "plan"))


def _block_paths(config: Mapping[str, Any]) -> list[str]:
    given = lookup(config, f"{BLOCK_KEY}.nvme_path")
    return [path for path in (given if isinstance(given, list) else [given]) if isinstance(path, str)]


def _named_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Path, as a run spells it → where it is named: in the block, else in the sections. What the environment or the
    rank decides is left to the run.
    """
    places = dict.fromkeys(_block_paths(config), f"{BLOCK_KEY}.nvme_path")
    for name in () if places else _OFFLOADS:
        path = lookup(config, f"zero_optimization.{name}.nvme_path")
        if isinstance(path, str) and path not in ("", "auto"):
            places.setdefault(path, f"zero_optimization.{name}.nvme_path")
    known: dict[str, str] = {}
    for path, place in places.items():
        if path.isprintable() and path and "$" not in path and "{" not in path:
            known.setdefault(os.path.abspath(os.path.expanduser(path)), place)
    return known


def _paths(config: Mapping[str, Any]) -> Iterator[Finding]:
    devices: dict[str, str] = {}
    for path, place in _named_paths(config).items():
        yield from _path(path, place, devices)


def _room(config: Mapping[str, Any], model: ModelSpec) -> Iterator[Finding]:
    """Whether the disks hold what a run that starts now would place there."""
    from ds_fuyou.cli.first_block import Question, room_here  # imports torch

    try:
        activation = load_activation(config)
    except FuyouConfigError:
        return  # which was told
    if activation is None or not all(os.path.isdir(path) for path in activation.state_paths):
        return
    what = "room for states"
    try:
        room = room_here(Question(model, config), activation)
    except FuyouConfigError as error:
        yield Finding(what, f"no placement of {model.name} fits", ok=False, fix=str(error))
        return
    if room is None:
        yield Finding(what, "none is needed: by what is free now, everything is in host memory")
        return
    one, two = shown_bytes(room.one), shown_bytes(room.two)
    free, more = f"{shown_bytes(room.free)} can be used", "free space, or name another disk in nvme_path, too"
    if room.slots >= 2:
        slots, third = "three" if room.slots == 3 else "two", ""
        if room.third:
            third = f"; three, for checkpoints behind training, and two of these need {shown_bytes(room.third)}"
        found = f"for {slots} slots: two need {two}{third}, {free}"
        yield Finding(what, found, fix=more if room.third and room.slots == 2 else "")
    elif room.slots:
        found = f"for one slot alone: it needs {one}, two need {two}, {free}; after a kill nothing can be gone on from"
        plan = activation.config.plan
        is_asked = plan is not None and plan.slots == 1 and room.two <= room.free
        yield Finding(what, found, fix=f"leave {BLOCK_KEY}.plan.slots out" if is_asked else more)
    else:
        yield Finding(what, f"too small: one slot needs {one}, {free}", ok=False, fix=more)


def _path(path: str, place: str, devices: dict[str, str]) -> Iterator[Finding]:
    what = f"{place} {path}"
    raw = _raw_device(path)
    if raw:
        fix = f"make a file system on it, mount it, and name a directory there: mkfs.ext4 {path}; mount {path} /nvme0"
        yield Finding(what, f"is a {raw}, not a directory", ok=False, fix=fix)
        return
    finding = path_finding(path)
    yield Finding(what, finding.found, ok=finding.ok, fix=finding.fix)
    if not finding.ok:
        return
    try:
        facts = probe_path(Path(path))
    except FuyouStorageError:  # it changed since
        return
    if facts.filesystem not in LOCAL_FILESYSTEMS:
        fix = "name a disk of this machine: every step reads and writes all states"
        yield Finding(what, f"is on a network file system, or an unknown one ({facts.filesystem})", fix=fix)
    if facts.device in devices:
        yield Finding(
            what,
            f"lies on the same device as {devices[facts.device]}: striping over both gains nothing",
            fix="name one directory a device",
        )
    devices.setdefault(facts.device, path)
    largest = facts.free_bytes / (2 * _SLOT_BYTES) / 1e9
    yield Finding(what, f"holds the optimizer state of models of up to {largest:.1f} billion parameters (two slots)")


def _raw_device(path: str) -> str:
    kinds: tuple[tuple[Callable[[int], bool], str], ...] = (
        (stat.S_ISBLK, "raw block device"),
        (stat.S_ISCHR, "raw character device"),
        (stat.S_ISREG, "file"),
    )
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    return next((name for test, name in kinds if test(mode)), "")
