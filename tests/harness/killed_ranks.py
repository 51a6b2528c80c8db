# SPDX-License-Identifier: Apache-2.0
"""One rank of a run on storage that dies where it is told: ``PATH CASE``, a JSON object.

``steps``; ``config`` and ``block``: changes of the configuration; ``frozen``: beginning of parameters' names. ``out``:
a folder in which rank 0 leaves what it has after every step. ``die``: by rank, ``[generation, when]``: SIGKILL "before"
that generation's record is written, "after" it, when "all" ranks have written theirs, or while it is late: "late" lets
the other ranks go on for a second; "raises": its disk fails. Who is not killed by then waits after its last step,
unless it has ``out``.
``slow``: by rank, bytes a second of its writes. ``generators``: what else than PyTorch's the loss depends on, "none":
not on that either. ``hands_over_code``: what pickle refuses. ``save``: a folder, to which a checkpoint goes after two
steps, or after step ``save_at``, or ``save_after`` of them and then the end, when all ranks have committed that step;
``load``: one, and then the end. ``ends``: even without ``out``.
``draws_first``: random numbers are drawn before every forward, after the generators were put back. ``signalled``: the
generation in whose ``engine.step()`` SIGTERM comes when it has been applied. ``by_optimizer``: ``optimizer.step()`` is
called, not the engine's. ``two``: changes of the case for each of two engines of one model, which print their states
before and after ``steps``.
``reload``: a checkpoint that is loaded into what was resumed; prints whether the generators stay as they are then.
``move_after``: by step, the share of states that is to be in host memory from then on, ``move_bytes`` of them a step.
``poisoned``: a step after which P16 of the first chunk is NaN on storage. ``model``: changes of it,
``own_class``: what counts in it gives a class of this script as extra state,
``zero_init``: which is built under ``zero.Init``. ``turned``: its parameter groups come in another
order. ``seed``: of its first values. ``odd``: added to the first element of
what is frozen, before the engine is built. ``edits``: what it is set to behind the engine, gathered.
``dies_removing``: SIGKILL when so many of its directories are removed. ``runs_out``: before the engine that trains
another one is built, whose first forward runs out of memory, and is destroyed; "same model": over its parameters.
``first_stay``: P16 in host memory is the first of the model, as in earlier versions. ``chunk_sizes``: of which a plan
may choose. ``adopting``: what goes wrong while files are taken over, "disk", "interrupt", "behind".
Prints ``MOVED read written``, bytes on storage that it took to make states or to take them over, ``READ n``, bytes of
storage that the process has read before its first forward, and, when a step has returned, ``LOSSES rank n ...``, in
hexadecimal digits, and ``STEP n``.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

import deepspeed
import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.optimizer import residency
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.planner import decide
from ds_fuyou.storage import store
from ds_fuyou.storage.directory import RunDirectory
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.store import SlotStore
from ds_fuyou.zero.run import taken_design
from tests.harness.group import leave_group
from tests.harness.meeting import Meeting
from tests.harness.models import TinyCount, TinyGPT, make_batch
from tests.harness.moving import place_params_in_step
from tests.harness.runner import ds_config

MODEL = {"num_layers": 3, "width": 32, "vocabulary": 101}


class OwnCount(dict):
    """Not there without this script."""


def die_in_commit(rank: int, die: Mapping[str, Any], path: str) -> None:
    commit = SlotStore.commit
    generation, when = die.get(str(rank), (None, ""))
    met = {of: Meeting(path, f"committed-{of}") for of, when in die.values() if when == "all"}

    def dying(self: SlotStore, step: int, slots: Mapping[str, int], meta: Mapping[str, Any]) -> None:
        if step == generation and when == "late":
            time.sleep(1.0)
        if step == generation and when == "raises":
            raise FuyouStorageError(errno.EIO, "the disk is broken", path)
        if step != generation or when in ("after", "all"):
            commit(self, step, slots, meta)
        if step in met:
            met[step].arrive()
        if step == generation and when == "all":
            met[step].wait()
        if step == generation:
            os.kill(os.getpid(), signal.SIGKILL)

    SlotStore.commit = dying


def fail_adopting(when: str) -> None:
    """While it is written that files are this run's from now on, or behind that."""
    told, adopt = store.told_to_keep, SlotStore.adopt

    def failing(*arguments: Any) -> Any:
        if when == "disk":
            raise FuyouStorageError(errno.EIO, "the disk is broken", "")
        os.kill(os.getpid(), signal.SIGINT)
        return told(*arguments)

    def fails(self: SlotStore, **named: Any) -> None:
        adopt(self, **named)
        raise ValueError("what comes behind it")

    if when == "behind":
        SlotStore.adopt = fails
    else:
        store.told_to_keep = failing


def die_removing(num_removed: int) -> None:
    discard, numbers = RunDirectory.discard, itertools.count(1)

    def dying(self: RunDirectory) -> None:
        discard(self)
        if next(numbers) == num_removed:
            os.kill(os.getpid(), signal.SIGKILL)

    RunDirectory.discard = dying


def tell_moved(name: str) -> None:
    """``initialize`` or ``resume``."""
    original = getattr(OutOfCoreOptimizer, name)

    def telling(self: OutOfCoreOptimizer, *arguments: Any) -> None:
        original(self, *arguments)
        moved = self.io.stats()
        sys.stdout.write(f"MOVED {moved['read'].num_bytes} {moved['write'].num_bytes}\n")

    setattr(OutOfCoreOptimizer, name, telling)


def count_reads() -> list[int]:
    """Of all that this process reads from now on, bytes."""
    original, counted = IoLane.read, [0]

    def counting(self: IoLane, extents: Any, *arguments: Any, **named: Any) -> Any:
        counted[0] += sum(extent.num_bytes for extent in extents)
        return original(self, extents, *arguments, **named)

    IoLane.read = counting
    return counted


def build(path: str, case: dict, rank: int, model: torch.nn.Module | None = None) -> Any:
    """``model``: of an engine that was destroyed."""
    block = {"nvme_path": path, "optimizer": {"tier": "nvme"}, "io": {"engine": "threads"}}
    config = ds_config(fuyou={**block, **case.get("block", {})}, **case.get("config", {}))
    if "fp16" in config:
        get_accelerator().is_fp16_supported = lambda: True  # eager fp16 works on the CPU
    if case.get("own_class"):
        TinyCount.get_extra_state = lambda self: OwnCount(calls=self.calls)
    torch.manual_seed(case.get("seed", 0) + rank)
    random.seed(rank)
    numpy.random.seed(rank)
    if model is None:
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=case.get("zero_init", False)):
            model = TinyGPT(**{**MODEL, **case.get("model", {})})
    for name, param in model.named_parameters():
        param.requires_grad_(not ("frozen" in case and name.startswith(case["frozen"])))
    frozen = [param for param in model.parameters() if not param.requires_grad]
    if "odd" in case:
        frozen[0].data.view(-1)[0] += case["odd"]
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": trained[::2], "lr": 2e-3}, {"params": trained[1::2]}][:: -1 if case.get("turned") else 1]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    if "edits" in case:
        with deepspeed.zero.GatheredParameters(frozen, modifier_rank=0):
            frozen[0].data.view(-1)[0] = case["edits"]
    return engine


def chance(case: dict) -> float:
    if case.get("generators") == "none":
        return 0.0
    drawn = float(torch.rand(()))
    if case.get("generators") == "all":
        drawn += random.random() + float(numpy.random.rand())
    return drawn


def left_by(engine: Any, losses: list[float], case: dict) -> dict[str, Any]:
    """All ranks must come here."""
    found: dict[str, Any] = {"losses": losses, "rates": [group["lr"] for group in engine.optimizer.param_groups]}
    found |= {"scale": engine.optimizer.loss_scale, "skipped": engine.skipped_steps, "samples": engine.global_samples}
    found["begun"] = engine.micro_steps % engine.gradient_accumulation_steps()  # micro-batches of the next step
    found["applied"] = engine.optimizer.rank_state.core.clock.step  # not generations: a loaded checkpoint is a new one
    if engine.random_ltd_enabled():
        found["tokens"] = dict(engine.random_ltd_scheduler.state_dict())
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[f"{name} P16"] = param.data.clone()
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param).clone()
            for moment in ("exp_avg", "exp_avg_sq") if found["applied"] else ():
                found[f"{name} {moment}"] = safe_get_full_optimizer_state(param, moment).clone()
    return found


def signal_in_step(engine: Any, generation: int) -> None:
    """After the update was applied, before the engine has counted it."""
    state = engine.optimizer.rank_state
    step_applied = state.step_applied

    def signalled() -> None:
        step_applied()
        if state.core.generation == generation:
            os.kill(os.getpid(), signal.SIGTERM)

    state.step_applied = signalled


def poison(engine: Any) -> None:
    core = engine.optimizer.rank_state.core
    core.wait_all()
    for extent in core.place.param_extents(0, core.slot(0)):
        fd = os.open(core.store.paths_of_fd(extent.fd), os.O_WRONLY)
        os.pwrite(fd, b"\xc0\x7f" * (extent.num_bytes // 2), extent.offset)
        os.fsync(fd)
        os.close(fd)


def train_two(path: str, case: dict) -> None:
    engines = [build(path, {**case, **changes}, 1 + number) for number, changes in enumerate(case["two"])]
    for when in ("BEFORE", "AFTER"):
        for number, engine in enumerate(engines):
            first = float(safe_get_full_fp32_param(next(engine.module.parameters())).double().sum())
            sys.stdout.write(f"{when} {number} {engine.global_steps} {first!r}\n")
            for step in range(case["steps"] if when == "BEFORE" else 0):
                engine.backward(engine(**make_batch(MODEL, step + 100 * number, 0)))
                engine.step()
            engine.optimizer.rank_state.core.commits.settle()
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def reload(engine: Any, folder: str) -> None:
    engine.load_checkpoint(folder)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    engine(**make_batch(MODEL, 0, 0))
    sys.stdout.write(f"GENERATORS STAY {torch.equal(before, torch.get_rng_state())}\n")


def run_out(engine: Any) -> None:
    """What a batch that is too large does, and who looks for one that fits."""
    with mock.patch.object(torch.nn.functional, "cross_entropy", side_effect=torch.OutOfMemoryError("too large")):
        try:
            engine(**make_batch(MODEL, 0, 0))
        except torch.OutOfMemoryError:
            sys.stdout.write(f"RAN OUT after {engine.global_steps}\n")
    engine.destroy()


def main(path: str, case: dict) -> None:
    rank = int(os.environ["RANK"])
    die_in_commit(rank, case.get("die", {}), path)
    if "adopting" in case:
        fail_adopting(case["adopting"])
    if "dies_removing" in case:
        die_removing(case["dies_removing"])
    if "first_stay" in case:
        residency._spread = residency._first
    if "chunk_sizes" in case:
        decide.CHUNK_BYTES = taken_design.CHUNK_BYTES = tuple(case["chunk_sizes"])
    all_saved = Meeting(path, "saved")
    deepspeed.init_distributed("gloo")
    if "two" in case:
        train_two(path, case)
    for name in ("initialize", "resume"):
        tell_moved(name)
    read = count_reads()
    model = None
    if "runs_out" in case:
        failed = build(path, case, rank)
        if case["runs_out"] == "at once":
            failed.destroy()
        else:
            run_out(failed)
        model = failed.module if case["runs_out"] == "same model" else None
    engine = build(path, case, rank, model)
    if "signalled" in case:
        signal_in_step(engine, case["signalled"])
    if "reload" in case:
        reload(engine, case["reload"])
        return
    slow = case.get("slow", {}).get(str(rank))
    if slow is not None:
        engine.optimizer.rank_state.core.io.engine.set_throttle(0.0, slow)
    if "load" in case:
        engine.load_checkpoint(case["load"])
        os.kill(os.getpid(), signal.SIGKILL)
    client = engine.fuyou_client_state or {"losses": []}
    if "draws_first" in case:
        torch.rand(5)  # a data loader draws its seed
        engine.fuyou_restore_random_states()
    accumulation = engine.gradient_accumulation_steps()
    sys.stdout.write(f"READ {read[0]}\n")
    for step in range(engine.global_steps, case["steps"]):
        if str(step + 1) in case.get("params_after", {}):
            place_params_in_step(engine, case["params_after"][str(step + 1)])
        for micro in range(accumulation):
            factor = 1.0 + chance(case) if "draws_first" in case else None
            loss = engine(**make_batch(MODEL, step * accumulation + micro, rank))
            loss = loss * (1.0 + chance(case) if factor is None else factor)
            engine.backward(loss)
            client["losses"].append(float(loss.detach()))
            engine.fuyou_client_state = (lambda: client) if case.get("hands_over_code") else client
            if "by_optimizer" in case:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            else:
                engine.step()
        if "save" in case and step + 1 == case.get("save_after", case.get("save_at", 2)):
            engine.save_checkpoint(case["save"])
            if "save_after" in case:
                engine.optimizer.rank_state.core.commits.settle()
                all_saved.arrive()
                all_saved.wait()
                os.kill(os.getpid(), signal.SIGKILL)
        if "move_after" in case:
            engine.optimizer.rank_state.core.wait_all()  # what has begun to move has moved when the next step begins
        if str(step + 1) in case.get("move_after", {}):
            engine.optimizer.rank_state.move_to(case["move_after"][str(step + 1)], case.get("move_bytes", 1 << 30))
        if step + 1 == case.get("poisoned"):
            poison(engine)
        made = " ".join(loss.hex() for loss in client["losses"][-accumulation:])
        sys.stdout.write(f"LOSSES {rank} {step + 1} {made}\nSTEP {step + 1}\n")
        sys.stdout.flush()
        if "out" in case:
            left = left_by(engine, client["losses"], case)
            if rank == 0:
                torch.save(left, f"{case['out']}/{step + 1}")
    if "out" in case or "ends" in case:
        engine.destroy()
        leave_group()
    else:
        time.sleep(3600.0)  # to be killed


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
