# SPDX-License-Identifier: Apache-2.0
"""Saves under failures: ``save_worker.py CASE_JSON WHAT FOLDER``; every rank prints one JSON line.

WHAT: "failures" (a disk that is too small, a disk that fills up), "killed" (dies in the middle of replacing a
checkpoint), "one_rank" (of two: its disk is full, the other's is not, in stock's part of a save or in ours), "edges"
(frozen for the time being; a checkpoint of before the first step loaded into a trained engine), "flipped" (a byte of
the run's state on the disk), "memory" (anonymous memory of the process before and while it saves and loads).
"""

import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime import engine as stock_engine
from deepspeed.utils import safe_get_full_fp32_param
from train_worker import build_engine, make_batch

from ds_fuyou.checkpoint.atomic import name_beside
from tests.harness.damage import flip_bit
from tests.harness.group import leave_group


def train(engine, case: dict, num_steps: int) -> None:
    for step in range(num_steps):
        loss = engine(**make_batch(case["model"], step, torch.distributed.get_rank()))
        engine.backward(loss)
        engine.step()


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing_pwrite(after: int, fail: Callable[[], int]) -> Callable[..., int]:
    """os.pwrite that writes ``after`` bytes and then fails."""
    left, real = after, os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        nonlocal left
        left -= len(data)
        return real(fd, data, offset) if left > 0 else fail()

    return pwrite


def full_disk() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failures(engine, case: dict, folder: Path) -> dict:
    said = {}
    real = shutil.disk_usage
    shutil.disk_usage = lambda path: real(path)._replace(free=1000)
    said["too small"] = raised(lambda: engine.save_checkpoint(str(folder / "small")))
    said["too small left"] = sorted(p.name for p in (folder / "small").rglob("*"))
    shutil.disk_usage = real
    engine.save_checkpoint(str(folder / "saved"), tag="best")
    pwrite = os.pwrite
    os.pwrite = failing_pwrite(100_000, full_disk)
    train(engine, case, 1)
    said["full"] = raised(lambda: engine.save_checkpoint(str(folder / "saved"), tag="best"))
    os.pwrite = pwrite
    blocked = name_beside(folder / "saved" / "latest", "best")
    blocked.mkdir()
    said["no latest"] = raised(lambda: engine.save_checkpoint(str(folder / "saved"), tag="best"))
    blocked.rmdir()
    said["full left"] = sorted(
        p.suffix for p in (folder / "saved").rglob("*") if p.suffix and p.is_file() and "incomplete" in str(p)
    )
    said["latest"] = (folder / "saved" / "latest").read_text()

    class Calls:
        """Of the script, what comes while a checkpoint is written, as a signal does."""

        def __reduce__(self) -> tuple[type, tuple]:
            said["within"] = raised(lambda: engine.save_checkpoint(str(folder / "within")))
            return dict, ()

    engine.save_checkpoint(str(folder / "outer"), client_state={"calls": Calls()})
    said["outer"] = (folder / "outer" / "latest").read_text()
    return said


def killed(engine, case: dict, folder: Path) -> dict:
    engine.save_checkpoint(str(folder), tag="best")
    train(engine, case, 1)
    os.pwrite = failing_pwrite(100_000, lambda: os.kill(os.getpid(), signal.SIGKILL) or 0)
    engine.save_checkpoint(str(folder), tag="best")
    return {"survived": True}


def one_rank(engine, case: dict, folder: Path) -> dict:
    if torch.distributed.get_rank() == 0:
        stock_engine.copyfile = lambda *_: full_disk()
    said = {"script": raised(lambda: engine.save_checkpoint(str(folder), tag="first"))}
    stock_engine.copyfile = shutil.copyfile
    pwrite = os.pwrite
    if torch.distributed.get_rank() == 1:
        os.pwrite = failing_pwrite(100_000, full_disk)
    said |= {"full": raised(lambda: engine.save_checkpoint(str(folder), tag="first"))}
    os.pwrite = pwrite
    said["other tag"] = raised(lambda: engine.save_checkpoint(str(folder), tag=f"t{torch.distributed.get_rank()}"))
    engine.save_checkpoint(str(folder), tag="second")
    return said


def edges(engine, case: dict, folder: Path) -> dict:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    chosen = dict(engine.module.named_parameters())
    chosen["blocks.1.down.weight"].requires_grad_(False)
    engine.save_checkpoint(str(folder / "toggled"))
    exported = get_fp32_state_dict_from_zero_checkpoint(str(folder / "toggled"))
    with deepspeed.zero.GatheredParameters([chosen["blocks.1.down.weight"]], modifier_rank=0):
        chosen["blocks.1.down.weight"].data.fill_(0.5)
    with torch.no_grad():
        engine(**make_batch(case["model"], 0, 0))  # what a backward would need is read ahead
    engine.load_checkpoint(str(folder / "toggled"), load_module_only=True)
    with deepspeed.zero.GatheredParameters([chosen["blocks.1.down.weight"]]):
        frozen = chosen["blocks.1.down.weight"].data.clone()
    engine.load_checkpoint(str(folder / "toggled"))
    chosen["blocks.1.down.weight"].requires_grad_(True)
    states: dict = {name: safe_get_full_fp32_param(param).clone() for name, param in chosen.items()}
    engine.load_checkpoint(case["stock"])
    train(engine, case, 2)
    again = {name: safe_get_full_fp32_param(param).clone() for name, param in chosen.items()}
    return {
        "frozen": torch.equal(frozen, exported["blocks.1.down.weight"].to(frozen.dtype)),
        "exported": [n for n in states if not torch.equal(exported[n].bfloat16(), states[n].bfloat16())],
        "again": [n for n in states if not torch.equal(again[n], states[n])],
    }


def damage_state(engine) -> None:
    """A byte of a chunk's state is another one on the disk."""
    core = engine.optimizer.rank_state.core
    core.wait_all()
    extent = core.state_extents(1)[0]
    place = extent.offset + core.place.stored.native(core.layout.chunks[1].numel)["master"] + 18
    flip_bit(f"/proc/self/fd/{extent.fd}", place)


def flipped(engine, case: dict, folder: Path) -> dict:
    """It must not get into a checkpoint."""
    damage_state(engine)
    said = {"save": raised(lambda: engine.save_checkpoint(str(folder), tag="bad"))}
    return {**said, "left": sorted(path.name for path in folder.iterdir() if path.name == "bad")}


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_while(call: Callable[[], object]) -> int:
    """The largest anonymous memory seen while ``call`` runs."""
    done, peak = threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(peak[0], anonymous_bytes())


def memory(engine, case: dict, folder: Path) -> dict:
    before = anonymous_bytes()
    return {
        "numel": sum(p.ds_numel for p in engine.module.parameters()),
        "save": peak_while(lambda: engine.save_checkpoint(str(folder))) - before,
        "load": peak_while(lambda: engine.load_checkpoint(str(folder))) - before,
    }


TASKS = {
    "failures": failures,
    "killed": killed,
    "one_rank": one_rank,
    "edges": edges,
    "flipped": flipped,
    "memory": memory,
}


def main() -> None:
    case, what, folder = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], Path(sys.argv[3])
    engine = build_engine(case)
    if case.get("before"):
        engine.save_checkpoint(case["before"])
    train(engine, case, 2)
    found = TASKS[what](engine, case, folder)
    sys.stderr.write(json.dumps(found) + "\n")
    engine.destroy()
    leave_group()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
