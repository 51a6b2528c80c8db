# SPDX-License-Identifier: Apache-2.0
"""Training scripts with injected faults, run in a process of their own: ``scenarios.py NAME SWAP_PATH TIERS``.

Each prints one JSON line that the tests judge.
"""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import deepspeed
import torch

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.ops import load_core
from ds_fuyou.optimizer.placement import state_region
from tests.harness.limits import HANG_SECS
from tests.harness.models import build_model, make_batch
from tests.harness.runner import ds_config
from tests.parity.cases import block


def make_engine(path: str, tiers: str, policy: str) -> Any:
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    config = {**ds_config(), "fuyou": block(path, tiers, policy)}
    model = build_model({})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def forward_and_backward(engine: Any, index: int) -> None:
    engine.backward(engine(**make_batch({}, index, 0)))


def train(engine: Any, first: int, last: int) -> None:
    for index in range(first, last):
        forward_and_backward(engine, index)
        engine.step()


def add_fault(core: Any, kind: str, effect: str, chunk: int | None = None, **values: Any) -> None:
    kinds, effects = load_core().IoKind, load_core().IoFaultEffect
    where = {}
    if chunk is not None:
        extent = core.store.extents(state_region(chunk), core.pipeline.slot(chunk))[0]
        end = extent.offset + extent.num_bytes
        where = {"fd": extent.fd, "offset_begin": extent.offset, "offset_end": end}
    core.io.engine.add_fault(getattr(kinds, kind), getattr(effects, effect), **where, **values)


def late_chunk(path: str, tiers: str) -> dict[str, Any]:
    """The state of the head's last chunk comes late: who waits?"""
    engine = make_engine(path, tiers, "defer")
    core = engine.optimizer.rank_state.core
    train(engine, 0, 3)
    core.wait_all()
    head = next(span for span in core.layout.params if span.name == "head.weight")
    chunk = core.layout.chunks_of_param[head.index][-1]
    add_fault(core, "READ", "HOLD", chunk, count=1000)
    train(engine, 3, 4)
    found: dict[str, Any] = {"step": core.pipeline.is_updated(chunk, core.generation)}

    def look(name: str, then: Callable[[], None] = lambda: None) -> Any:
        def hook(*_: Any) -> None:
            found.setdefault(name, core.pipeline.is_updated(chunk, core.generation))
            then()

        return hook

    engine.module.blocks[0].register_forward_hook(look("first block", core.io.engine.clear_faults))
    engine.module.head.register_forward_hook(look("head"))
    train(engine, 4, 5)
    engine.destroy()
    return found


def broken(path: str, tiers: str, kind: str, error: int) -> dict[str, Any]:
    """Every transfer of a kind fails from now on: in which step does the script hear of it?"""
    engine = make_engine(path, tiers, "auto")
    core = engine.optimizer.rank_state.core
    train(engine, 0, 2)
    core.wait_all()
    add_fault(core, kind, "ERROR", error=error, count=1 << 40)
    return first_error(engine)


def first_error(engine: Any, wait: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """``wait`` is called after each step: until the failure has happened, somewhere else."""
    for step in range(4):
        try:
            train(engine, 2 + step, 3 + step)
            wait()
        except FuyouStorageError as met:
            return {"step": step, "errno": met.errno, "path": met.filename, "offset": met.offset, "what": str(met)}
    return {"step": None}


def no_commit(path: str, tiers: str) -> dict[str, Any]:
    """The commit record cannot be written."""
    engine = make_engine(path, tiers, "auto")
    core = engine.optimizer.rank_state.core
    train(engine, 0, 2)
    core.wait_all()

    refused = threading.Event()

    def refuse(*_: Any, **__: Any) -> None:
        refused.set()
        raise OSError(errno.EROFS, "read-only file system")

    core.store.commit = refuse
    return first_error(engine, lambda: refused.wait(HANG_SECS))


def short(path: str, tiers: str) -> dict[str, Any]:
    """Every transfer is cut short by the system: it is completed, and nothing else changes."""
    engine = make_engine(path, tiers, "auto")
    core = engine.optimizer.rank_state.core
    for kind in ("READ", "WRITE"):
        add_fault(core, kind, "SHORT", count=1 << 40)
    train(engine, 0, 3)
    core.wait_all()
    engine.destroy()
    return {"generation": core.generation}


def script_fails(path: str, tiers: str) -> dict[str, Any]:
    engine = make_engine(path, tiers, "auto")
    train(engine, 0, 2)
    forward_and_backward(engine, 2)
    raise ZeroDivisionError("a mistake of the script")


def forever(path: str, tiers: str) -> dict[str, Any]:
    engine = make_engine(path, tiers, "auto")
    train(engine, 0, 2)
    say({"ready": True})
    while True:
        train(engine, 2, 3)


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(f"FOUND {json.dumps(what)}\n")
    sys.stdout.flush()


SCENARIOS: dict[str, Any] = {
    "late_chunk": late_chunk,
    "read_error": lambda path, tiers: broken(path, tiers, "READ", errno.EIO),
    "write_error": lambda path, tiers: broken(path, tiers, "WRITE", errno.ENOSPC),
    "no_commit": no_commit,
    "short": short,
    "script_fails": script_fails,
    "forever": forever,
}

if __name__ == "__main__":
    say(SCENARIOS[sys.argv[1]](sys.argv[2], sys.argv[3]))
