# SPDX-License-Identifier: Apache-2.0
"""What the planner must know of a run: whose it is, and what it has placed where."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.log import current_rank
from ds_fuyou.optimizer.clip_policy import Overlap, UpdateStart
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.planner.cost import Placement
from ds_fuyou.planner.plan import kept_param_bytes
from ds_fuyou.planner.policies import Updates
from ds_fuyou.planner.profile import (
    BlockCost,
    RunProfile,
    fingerprint_of,
    load_profile,
    machine_fingerprint,
    profile_directory,
)
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.version import __version__
from ds_fuyou.zero.agreement import all_or_none, of_rank_0
from ds_fuyou.zero.run.neighbours import cores_of_rank, count_neighbours
from ds_fuyou.zero.run.rank_state import RankState
from ds_fuyou.zero.run.run_design import TrainedModel

__all__ = [
    "ActivationWork",
    "KnownRun",
    "known_run",
    "model_settings",
    "placement_of_run",
    "recomputed_flops",
    "updates_of_run",
]

# Where weights came from, as transformers notes it.
_ORIGIN = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}
_STARTS = {
    # overlap: (updates start in backward, they wait for step())
    Overlap.NONE: (Updates.STEP, Updates.STEP),
    Overlap.BACKWARD: (Updates.BACKWARD, Updates.STEP),
    Overlap.BACKWARD_AND_FORWARD: (Updates.DEADLINE, Updates.FORWARD),
}


@dataclass(frozen=True)
class KnownRun:
    """Fingerprints of a run's machine and model, what it has of the machine, and what an earlier run of the same two
    measured. The same on all ranks.

    Attributes:
        keeps: profiles are kept, so steps are measured where there is none.
    """

    machine: str
    model: str
    num_cores: int
    keeps: bool
    profile: RunProfile | None


@dataclass(frozen=True)
class ActivationWork:
    """``written_bytes`` of activations to storage in ``num_forwards``; FLOPs that one backward repeats."""

    written_bytes: float = 0.0
    num_forwards: int = 0
    recompute_flops: float = 0.0


def recomputed_flops(session: ActivationSession | None, blocks: Sequence[BlockCost]) -> float:
    """Of one micro-batch: what the blocks that are computed again do, less the outputs that are saved there."""
    if session is None:
        return 0.0
    total = 0.0
    for block in blocks:
        fate = session.fates.get(block.name)
        if block.name and fate is not None and fate.outputs is not None:
            total += sum(one.flops for one in block.operators if one.call not in fate.outputs)
    return total


def known_run(trained: TrainedModel, module: torch.nn.Module) -> KnownRun:
    """Rank 0 looks for what an earlier run measured, and tells the others: all place by it. A collective.

    The machine: its parts, the disks below the paths, how they are reached. The model: its parameters, their dtype
    and partitions, the optimizer, what is done to activations, how much stays gathered, how its modules are set (heads,
    attention implementation, checkpointing), and the versions of what runs it.
    """
    count_neighbours()
    config, device = trained.activation.config, trained.device
    name = device.name if device.is_host else f"{get_accelerator().device_count()} {device.name}"
    with all_or_none("look at its storage"):
        disks = [_disk(path) for path in trained.paths]
    expert = config.plan
    threads = (expert.num_threads, expert.queue_depth, expert.block_bytes) if expert is not None else ()
    model = fingerprint_of(
        [(name, numel) for group in trained.entries for name, _, numel, _ in group],
        (trained.param_dtype, trained.grad_dtype, trained.kind),
        (dist.get_world_size(), config.activations.mode, config.activations.tier, config.gpu_budget_bytes),
        (trained.reused_numel, trained.staying_numel, sum(p.ds_numel for p in trained.names if p.ds_persist)),
        (torch.__version__, deepspeed.__version__, __version__, model_settings(module), _versions(module)),
    )
    machine = machine_fingerprint(name, disks, (config.io.engine, threads, cores_of_rank()))
    keeps = profile_directory() is not None
    found = load_profile(machine, model) if keeps and current_rank() == 0 else None
    keeps, told = of_rank_0((keeps, found))
    return KnownRun(machine, model, cores_of_rank(), keeps, told)


def model_settings(model: torch.nn.Module) -> list[object]:
    """Numbers, flags and names in the model's configuration, and, by its class, in what is public of every module.
    What DeepSpeed notes there is left out, whatever is known by its address alone, and where the weights came from: a
    run that goes on from its checkpoint trains the same model.
    """
    found: list[object] = [_plain(getattr(getattr(model, "config", None), "__dict__", {}))]
    for module in model.modules():
        public = {name: value for name, value in vars(module).items() if not name.startswith(("_", "ds_"))}
        found.append((type(module).__qualname__, _plain({**public, "training": True})))
    return found


def _versions(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Of the packages that its modules' classes are of."""
    names = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return sorted((name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in names)


def _plain(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return sorted(
        (name, repr(value))
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str)) and name not in _ORIGIN
    )


def _disk(path: Path) -> str:
    facts = probe_path(path)
    return f"{facts.device} {facts.filesystem} {facts.supports_direct}"


def placement_of_run(rank_state: RankState, profile: RunProfile, activations: ActivationWork) -> Placement | None:
    """The placement as it was built; None where it is on storage and the profile has no rates of that."""
    core, pool_bytes = rank_state.core, rank_state.parameters.capacity_bytes
    residency, frozen = core.place.residency, rank_state.frozen_bytes()
    params, states, grads = map(core.layout.share_of, (residency.params, residency.states, residency.grads))
    twice = [core.place.has_spare(index) for index in range(len(core.layout.chunks))]
    if (min(params, states, grads) < 1 or frozen["nvme"]) and profile.storage is None:
        return None
    return Placement(
        params,
        states,
        grads,
        states_twice=core.layout.share_of(twice),
        frozen=frozen["cpu"] / max(1, sum(frozen.values())) if frozen["nvme"] else 1.0,
        swapped_bytes=activations.written_bytes / max(1, activations.num_forwards),
        staging_bytes=core.staging.capacity_bytes,
        kept_param_bytes=kept_param_bytes(rank_state.plan_input, rank_state.plan.residency, pool_bytes),
        recompute_flops=activations.recompute_flops,
    )


def updates_of_run(core: OutOfCoreOptimizer) -> Updates:
    """When the next step's updates run; it changes with how often gradients are clipped."""
    speculated, deferred = _STARTS[core.options.overlap]
    return speculated if core.policy.choose() is UpdateStart.SPECULATE else deferred
