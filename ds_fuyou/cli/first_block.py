# SPDX-License-Identifier: Apache-2.0
"""What ``fuyou init`` decides: directories for state, and tiers where those of a DeepSpeed JSON would not fit.

By the same rule as a run, with what it would find now: free host memory, disks, devices, cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_fuyou.cli.ds_config import has_precision, param_bytes
from ds_fuyou.config import BLOCK_KEY
from ds_fuyou.ds_json import Activation, load_activation, lookup, section_of, stock_states
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.host.available_memory import auto_tenths, available_host_bytes
from ds_fuyou.planner.document import Residency
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.plan import Plan, PlanInput, under_block
from ds_fuyou.planner.profiled import placed_under
from ds_fuyou.state_layout import FP32, StateLayout, layout_of, masters_of, moments_of
from ds_fuyou.storage.disks import DIRECTORY_NAME, Disk, find_disks
from ds_fuyou.storage.layout import (
    CHECKPOINT_BYTES,
    CHECKPOINTS_BESIDE,
    choose_num_slots,
    device_capacities,
    most_slots,
)
from ds_fuyou.storage.probe import PathFacts, probe_path, shares_blocks
from ds_fuyou.units import shown_bytes
from ds_fuyou.zero.device import num_devices, rank_device
from ds_fuyou.zero.run.neighbours import cores_of_rank

__all__ = ["FirstBlock", "Question", "Room", "choose_block", "room_here"]

_MOMENTS = {"lion": 1, "adagrad": 1}
_OVERRULED = (
    "the block says so, as the offload sections ask for more host memory than is free; better take them out, and these "
    "tiers: then a run keeps there what fits when it starts"
)
_CLASSES = {"frozen": "frozen P16", "parameters": "P16", "optimizer": "P32 and moments", "gradients": "G16"}


@dataclass(frozen=True)
class Question:
    """A model, the configuration around the block, and what the user has said: directories, ranks of this machine."""

    model: ModelSpec
    config: Mapping[str, Any]
    paths: tuple[str, ...] = ()
    ranks: int | None = None


@dataclass(frozen=True)
class FirstBlock:
    """The block, directories to be made for it, and lines that say why it is so."""

    block: dict[str, Any]
    new_directories: tuple[str, ...] = ()
    why: list[str] = field(default_factory=list)


def choose_block(asked: Question) -> FirstBlock:
    """The smallest block that trains the model here.

    Raises:
        FuyouConfigError: the configuration cannot be combined with a block, host memory holds no placement, or the
            disks do not hold the state.
    """
    ranks = asked.ranks or num_devices()
    paths, new, where = _paths(asked)
    activation = _activation(asked.config, {"nvme_path": paths} if paths else {})
    given = _plan_input(asked, activation, ranks)
    given, plan, tiers, how = _placed(given, asked, activation)
    why = [
        f"{asked.model.name}: {asked.model.params / 1e6:,.0f} million parameters{_trained(asked.model)} on {ranks} "
        f"rank{'s' * (ranks > 1)}; "
        f"{shown_bytes(given.dram_budget_bytes)} of host memory for each "
        f"({10 * auto_tenths(is_unified=given.is_unified)} % of what is free now)",
        where,
        f"placement: {_shown(plan.residency)}; {how}",
    ]
    room = _room(given, plan, ranks, activation)
    why += [_told_room(room)] if room is not None else []
    why += [_durability(given, room)] if activation.state_paths else []
    why += _buckets(asked, ranks)
    written = [] if paths == _named(asked.config) else list(paths)
    block: dict[str, Any] = {"enabled": True, **tiers}
    if written:
        block = {"enabled": True, "nvme_path": written[0] if len(written) == 1 else written, **tiers}
    return FirstBlock(block, new, why)


def _trained(model: ModelSpec) -> str:
    return f", {model.trainable_params / 1e6:,.1f} million of them trained," if model.frozen_params else ""


def _activation(config: Mapping[str, Any], block: Mapping[str, Any]) -> Activation:
    activation = load_activation({**config, BLOCK_KEY: {"enabled": True, **block}})
    if activation is None:
        raise FuyouConfigError("a block must be enabled to be written")
    return activation


def _paths(asked: Question) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Directories for state, those of them that are to be made, and a line about them."""
    for paths, says in ((asked.paths, "as told"), (_named(asked.config), "as the offload sections say")):
        if paths:
            # A mount point that is missing is refused: its parent would be filled instead.
            new = tuple(p for p in paths if p in asked.paths and not os.path.lexists(p) and Path(p).parent.is_dir())
            _refuse_memory([os.path.dirname(path) if path in new else path for path in paths])
            made = f"; {', '.join(new)} is made" if new else ""
            return paths, new, f"state in {', '.join(paths)}, {says}{made}"
    disks = _best(find_disks())
    if not disks:
        return (), (), "state in host memory only: no local disk was found on which this user may write (--path)"
    chosen = tuple(str(disk.directory / DIRECTORY_NAME) for disk in disks)
    new = tuple(path for path in chosen if not Path(path).is_dir())
    shown = ", ".join(f"{path} ({_told(disk)})" for path, disk in zip(chosen, disks, strict=True))
    return chosen, new, f"state in {shown}: the best kind of disk here on which this user may write"


def _named(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Directories of the offload sections."""
    sections = ("offload_optimizer", "offload_param")
    named = any(lookup(config, f"zero_optimization.{name}.nvme_path") for name in sections)
    return _activation(config, {}).state_paths if named else ()


def _refuse_memory(paths: Sequence[str]) -> None:
    for path in paths:
        if probe_path(Path(path)).is_tmpfs:
            raise FuyouConfigError(f"{path} is host memory, which state on storage is to save; name one on a disk")


def _best(disks: Sequence[Disk]) -> list[Disk]:
    """All of the best kind that hold at least half of what the largest of them does: a state is striped evenly."""
    return [d for d in disks if d.kind == disks[0].kind and 2 * d.facts.free_bytes >= disks[0].facts.free_bytes]


def _told(disk: Disk) -> str:
    return f"{disk.kind}, {disk.facts.filesystem}, {shown_bytes(disk.facts.free_bytes)} free"


def _plan_input(asked: Question, activation: Activation, ranks: int) -> PlanInput:
    """As a run would give it to the rule."""
    model, device = asked.model, rank_device()
    width = param_bytes(asked.config)
    sizes = PlanInput(
        numel=-(-model.trainable_params // ranks),
        param_bytes_each=width,
        grad_bytes_each=width,
        layout=_layout(asked.config, activation),
        largest_param_numel=-(-model.largest_param // ranks),
        dram_budget_bytes=available_host_bytes() // ranks * auto_tenths(is_unified=device.is_unified) // 10,
        num_cpus=max(1, cores_of_rank() // ranks),
        device_is_host=device.is_host,
        is_unified=device.is_unified,
        num_paths=max(1, len(activation.state_paths)),
        frozen_bytes=model.frozen_bytes / ranks,
        largest_frozen_bytes=model.largest_frozen_bytes / ranks,
    )
    return under_block(sizes, activation.config, bool(activation.state_paths))


def _layout(config: Mapping[str, Any], activation: Activation) -> StateLayout:
    block, optimizer = activation.config, str(section_of(config, "optimizer").get("type", "")).lower()
    of_masters, of_moments = stock_states(config)
    moments = moments_of(block.optimizer.moments, optimizer, of_moments)
    masters = masters_of(
        block.optimizer.masters,
        is_bfloat16=has_precision(config, "bf16", "bfloat16"),
        checksum=block.checksum,
        are_cloned=moments == FP32 and _may_share_blocks(activation),
        stock=of_masters,
    )
    return layout_of(masters, _MOMENTS.get(optimizer, 2), moments)


def _disks(activation: Activation) -> list[Path]:
    """A directory on each disk that state will be on, which may have to be made."""
    return [path if path.is_dir() else path.parent for path in map(Path, activation.state_paths)]


def _may_share_blocks(activation: Activation) -> bool:
    """Whether a run's checkpoints would share blocks with slots."""
    return not activation.config.relies_on_slots and shares_blocks([p for p in _disks(activation) if p.is_dir()])


def _placed(given: PlanInput, asked: Question, activation: Activation) -> tuple[PlanInput, Plan, dict[str, Any], str]:
    """The plan, with what it was made from, what the block must say for it, and why.

    The block says tiers, never shares: those would be of what is free now, and a start that finds less be refused.
    """
    tiers = {"optimizer": given.optimizer_tier, "parameters": given.params_tier}
    held = [name for name, tier in tiers.items() if tier == "cpu"] if activation.state_paths else []
    stored: list[str] = []
    while True:
        told = tiers | dict.fromkeys(stored, "nvme")
        there = replace(given, optimizer_tier=told["optimizer"], params_tier=told["parameters"])
        try:
            plan = placed_under(activation.config, there, None).plan
        except FuyouConfigError as error:
            if stored == held:
                raise FuyouConfigError(f"{asked.model.name} on this machine: {error}") from error
            stored = held[: len(stored) + 1]
        else:
            why = _OVERRULED if stored else _why(given, plan, bool(activation.state_paths))
            return there, plan, {name: {"tier": "nvme"} for name in stored}, why


def _why(given: PlanInput, plan: Plan, has_storage: bool) -> str:
    """Why a run that starts now places so, and what it decides when it starts."""
    if not has_storage:
        return "it fits, and must when a run starts: there is no storage"
    tiers = {"offload_optimizer": given.optimizer_tier, "offload_param": given.params_tier}
    said = " and ".join(name for name, tier in tiers.items() if tier != "auto")
    if plan.residency == Residency(1.0, 1.0, 1.0):
        if not said:
            return "it fits; what does not when a run starts goes to storage"
        return (
            f"it fits; what {said} names stays there, whatever is free when a run starts, and what else does not fit "
            f"goes to storage; better take that out: then all of it may go"
        )
    if "auto" not in tiers.values():
        return "as the offload sections say"
    moved = "of what fits it moves the fewest bytes, and a run decides anew by what is free, and known, when it starts"
    return f"as {said} says; {moved}" if said else moved


def _shown(residency: Residency) -> str:
    where = {1.0: "in host memory", 0.0: "on storage"}
    if residency == Residency(1.0, 1.0, 1.0):
        return "everything in host memory"
    shares = {
        shown: float(getattr(residency, name))
        for name, shown in _CLASSES.items()
        if name != "frozen" or residency.frozen < 1
    }
    return ", ".join(
        f"{name} {where.get(x, f'{x:.0%} in host memory, the rest on storage')}" for name, x in shares.items()
    )


@dataclass(frozen=True)
class Room:
    """Of storage: bytes that one slot and two need, and that can be used; ``slots`` that a run takes, 0: none fits.
    ``third``: what three and two checkpoints beside them need, where checkpoints are written behind training; else 0.
    """

    one: int
    two: int
    free: int
    slots: int
    third: int = 0


def room_here(asked: Question, activation: Activation) -> Room | None:
    """What a run that starts now would need of its directories, which exist. None: nothing is placed there.

    Raises:
        FuyouConfigError: host memory holds no placement.
    """
    ranks = asked.ranks or num_devices()
    given = _plan_input(asked, activation, ranks)
    return _room(given, placed_under(activation.config, given, None).plan, ranks, activation)


def _room(given: PlanInput, plan: Plan, ranks: int, activation: Activation) -> Room | None:
    place, num, paths = plan.residency, given.numel * ranks, _disks(activation)
    if place == Residency(1.0, 1.0, 1.0):
        return None
    slot = given.param_bytes_each * (1 - place.parameters) + given.layout.bytes_each * (1 - place.optimizer)
    spilled = given.grad_bytes_each * (1 - place.gradients)
    frozen = given.frozen_bytes * (1 - place.frozen) * ranks
    one, two, three = (int(num * (n * slot + spilled) + frozen) for n in (1, 2, 3))
    facts: list[PathFacts] = [probe_path(path) for path in paths]
    free, budget = sum(device_capacities(facts).values()), None
    if given.storage_budget_bytes < float("inf"):
        budget = int(given.storage_budget_bytes) * ranks
        free = min(free, budget)

    def has_room(wanted: int, num_bytes: int, beside: int = 0) -> bool:
        choice = choose_num_slots(
            paths,
            one,
            num_bytes,
            budget,
            wanted=wanted,
            bytes_beside=beside,
            swaps_activations=given.swaps_activations,
            probe=probe_path,
        )
        return choice.num_slots == wanted

    are_cloned = given.layout.is_whole and _may_share_blocks(activation)
    most = most_slots(plan.slots, in_memory=place.optimizer > 0, are_cloned=are_cloned)
    if most < 2 or not has_room(2, two):
        return Room(one, two, free, 1 if one <= free else 0)
    if most < 3:
        return Room(one, two, free, 2)
    beside = CHECKPOINTS_BESIDE * CHECKPOINT_BYTES * num
    return Room(one, two, free, 3 if has_room(3, three, beside) else 2, three + beside)


def _told_room(room: Room) -> str:
    """A line on how much storage is needed.

    Raises:
        FuyouConfigError: there is too little.
    """
    one, two = shown_bytes(room.one), shown_bytes(room.two)
    if not room.slots:
        raise FuyouConfigError(
            f"the state needs {one} on storage, {shown_bytes(room.free)} can be used; free space, or name directories "
            f"on more disks with --path"
        )
    if room.slots == 3:
        third = shown_bytes(room.third)
        return f"storage: {two} with two slots, {third} with a third, for checkpoints behind training, and two of these"
    if room.one == room.two:
        return f"storage: {one}"
    if room.slots == 2:
        return f"storage: {two} with two slots"
    return f"storage: {one} with one slot; {two} would hold two (faster)"


def _durability(given: PlanInput, room: Room | None) -> str:
    """What a crash leaves, where the tier of states is as ``given``: where it is open they may move, too."""
    if given.optimizer_tier != "nvme":
        return 'as durable as its last checkpoint, as states may be in host memory; "durable": true keeps every step'
    if room is None or room.slots < 2:
        return "as durable as its last checkpoint, with one slot"
    return "a crash leaves the last step whole"


def _buckets(asked: Question, ranks: int) -> list[str]:
    """On more than two ranks gradients are reduced in stock's buckets."""
    zero, eighth = asked.config["zero_optimization"], max(1, asked.model.trainable_params // 8)
    size = zero.get("reduce_bucket_size", 500_000_000)
    if ranks <= 2 or size == "auto" or not isinstance(size, (int, float)) or size <= eighth:
        return []
    return [
        f'to set yourself: "reduce_bucket_size": {eighth} in zero_optimization, or updates wait for backward\'s end'
    ]
