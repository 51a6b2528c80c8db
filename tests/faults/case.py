# SPDX-License-Identifier: Apache-2.0
"""Runs with one fault each, many in one process: ``case.py ORDERS``, a JSON object, with preload.c preloaded.

A run trains a few steps with everything on storage, from its beginning or from what another one left, and ends; or its
states go to host memory meanwhile and come back, so that its files shrink and grow, or P16 goes to storage and comes
back; or a checkpoint is saved behind training, or loaded first. The fault strikes its operation number n. A run that
ends with an exception is started again, without a fault; it goes on in place and must end as if nothing had happened. A
checkpoint is there as a whole, with its bits, or not at all, and then somebody said so.

``path``: where; emptied for every run. ``engines``, ``starts`` (fresh, resumed, moving, placing, saving, loading),
``effects``; ``late_secs``.
``first``: the first n; or ``numbers``: these alone; or ``sample`` and ``seed``: so many at random of each combination.
Prints one JSON object a run, see :class:`Outcome`; before it, ``{"begin": n}``: a process that says no more then hangs,
or has crashed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import gc
import io
import json
import logging
import os
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import debug

from ds_fuyou.errors import FuyouError
from ds_fuyou.log import get_logger
from ds_fuyou.storage import ending, lifetime
from ds_fuyou.storage.records import ProcessMark
from ds_fuyou.zero.run import run_store
from tests.durability.test_recovered_checkpoints import unequal
from tests.durability.test_resume import UNPLACED
from tests.harness.bits import same
from tests.harness.killed_ranks import MODEL, build
from tests.harness.models import make_batch

STEPS, STEPS_BEFORE = 3, 2
SAVED = "saved"
MOVES = {  # after a step: the share of states, or P16, that is to be in host memory
    "moving": {1: 1.0, 2: 0.0},
    "placing": {1: 0.0, 2: 1.0},
}
STEPS_MOVING = 4
NOTHING_PROMISED = ("moving", "placing", "loading")  # states were in host memory, or P16 or they on their way
ERROR = 1
EFFECTS = {
    "EIO": (ERROR, errno.EIO),
    "ENOSPC": (ERROR, errno.ENOSPC),
    "short": (2, 0),
    "zero": (3, 0),
    "late": (4, 0),
    "memory": (5, errno.ENOMEM),
}
NVME = {"tier": "nvme"}


@dataclass
class Outcome:
    """``struck``: the operation, its name, offset, bytes and file; empty if the run had no operation n. ``end``:
    "equal", "told" (an exception), "logged" (equal, and a line of the log names the failure), "unheard" (equal, and
    nobody was told of an error). ``wrong``: what is not as promised."""

    engine: str
    start: str
    effect: str
    number: int
    struck: str = ""
    end: str = ""
    said: str = ""
    step: int = 0
    steps_after: int = 0
    resumed_from: int = -1
    wrong: str = ""


class Faults:
    """The preloaded library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faults_hit.restype = ctypes.c_char_p
        self._library.faults_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_double]
        self._library.faults_seen.restype = ctypes.c_long
        self._library.faults_watch(os.fsencode(path))

    def arm(self, number: int, effect: str = "late", late_secs: float = 0.0) -> None:
        self._library.faults_arm(number, *EFFECTS[effect], late_secs)

    @property
    def hit(self) -> str:
        return os.fsdecode(self._library.faults_hit())

    def seen(self, effect: str) -> int:
        """Operations that can be struck so."""
        return int(self._library.faults_seen(EFFECTS[effect][0]))


def of_a_process_that_has_ended() -> ProcessMark:
    """What the runs of this process leave is taken for what an earlier process left."""
    return dataclasses.replace(_mark_of_this_process(), start_ticks=1)


_mark_of_this_process = ProcessMark.of_this_process


class Run:
    """One run in ``path`` until its end; ``last`` has what it left."""

    def __init__(self, path: Path, io_engine: str, faults: Faults, start: str) -> None:
        block: dict[str, Any] = {"io": {"engine": io_engine}, "parameters": NVME, "gradients": NVME, "resume": "auto"}
        if start == "saving":
            block["checkpoint"] = {"save": "background"}
        config: dict[str, Any] = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
        if start == "placing":  # where P16 is must be open for the next run to begin where this one has moved it to
            config |= UNPLACED
            block |= {"parameters": {"tier": "auto"}, "optimizer": NVME}
        self.case = {"block": block, "config": config, "num_layers": 1}
        self.path, self.faults, self.saved = path, faults, path / SAVED
        self.moves = MOVES.get(start, {})
        self.places = start == "placing"
        self.saves, self.loads = start == "saving", start == "loading"
        self.steps = STEPS_MOVING if self.moves else STEPS
        self.step = self.begun_at = self.struck_in = 0
        self.engine: Any = None
        self.last: dict[str, Any] = {}
        run_store._NUMBERS.clear()

    def train(self, steps: int | None = None, *, dies: bool = False) -> None:
        self.engine = engine = build(str(self.path), self.case, 0)
        if self.loads and engine.global_steps == 0 and engine.load_checkpoint(str(self.saved))[0] is None:
            raise RuntimeError("there was no checkpoint to be loaded")
        self.step = self.begun_at = engine.global_steps
        self._note_struck()
        client = engine.fuyou_client_state or {"losses": []}
        for step in range(engine.global_steps, steps or self.steps):
            for micro in range(2):
                loss = engine(**make_batch(MODEL, 2 * step + micro, 0)) * (1.0 + float(torch.rand(())))
                engine.backward(loss)
                client["losses"].append(float(loss.detach()))
                engine.fuyou_client_state = client
                engine.step()
            self.step = step + 1
            if self.step in self.moves:
                state = engine.optimizer.rank_state
                (state.place_params if self.places else state.move_to)(self.moves[self.step])
            if self.saves and self.step == STEPS_BEFORE - 1:
                engine.save_checkpoint(str(self.saved))
            self._note_struck()
        engine.fuyou_wait_checkpoint()
        self.last = left(engine, client["losses"])
        if dies:
            engine.optimizer.rank_state.core.store.keep_because("it is to be gone on from")
        self.end()

    def _note_struck(self) -> None:
        if self.faults.hit and not self.struck_in:
            self.struck_in = self.step

    def end(self) -> None:
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
        debug.module_names.clear()  # stock holds every model that was built
        debug.param_names.clear()
        gc.collect()


def left(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Losses, states and 16-bit parameters."""
    core = engine.optimizer.rank_state.core
    found: dict[str, Any] = {"losses": losses, "applied": core.generation}
    for chunk, parts in core.states.read_all(range(len(core.layout.chunks))):
        found |= {f"chunk {chunk.index} part {number}": part.clone() for number, part in enumerate(parts)}
    return found | dict(engine._zero3_consolidated_16bit_state_dict())


def differing(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first thing that differs."""
    if one.keys() != other.keys():
        return "other things are left"
    for name, value in one.items():
        if not same(value, other[name]):
            return f"{name} differs"
    return ""


def lacks(said: str, struck: str, effect: str) -> str:
    """What a message does not name, empty if it names everything."""
    if effect == "memory":
        return "" if "bytes of host memory" in said else "the memory is not named"
    file = Path(struck.split(" ", 3)[-1].removesuffix(" (deleted)")) if struck else Path("?")
    if not any(str(each) in said for each in (file, *file.parents[:2])):
        return "the file is not named"
    kind, number = EFFECTS[effect]
    if kind == ERROR and os.strerror(number) not in said:
        return "the error is not named"
    is_transfer = struck.partition(" ")[0].endswith(("read", "write"))
    return "the offset is not named" if is_transfer and file.name == "data" and "at byte" not in said else ""


def different_checkpoint(found: Path, expected: Path) -> str:
    """What its files lack, or hold that they should not; empty if nothing."""
    tag = (found / "latest").read_text()
    names, wanted = (sorted(file.name for file in (folder / tag).iterdir()) for folder in (found, expected))
    if names != wanted:
        return f"the checkpoint has {names}, not {wanted}"
    for name in names:
        if name.endswith(".pt"):
            contents = (torch.load(folder / tag / name, weights_only=False) for folder in (expected, found))
            for where in unequal(*contents):
                return f"{name} of the checkpoint: {where}"
    return ""


class Sweep:
    """All runs with one I/O engine that begin in one way."""

    def __init__(self, path: Path, io_engine: str, start: str, late_secs: float) -> None:
        self.path, self.io_engine, self.start, self.late_secs = path, io_engine, start, late_secs
        self.state, self.kept = path / "state", path / "kept"
        self.faults = Faults(self.state)
        self.said = io.StringIO()
        get_logger().addHandler(logging.StreamHandler(self.said))
        self.faults.arm(-1)
        shutil.rmtree(self.kept, ignore_errors=True)
        if start in ("resumed", "loading"):
            self._empty()
            self._leave_before(Run(self.state, io_engine, self.faults, "saving" if start == "loading" else start))
            shutil.copytree(self.state, self.kept)
        for _ in range(2):  # the first one measures storage, and keeps what it found for all that follow
            self._empty()
            self.faults.arm(-1)
            run = self.run()
            run.train()
        self.expected, self.begins_at = run.last, run.begun_at
        self.checkpoint = path / "checkpoint"
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        if run.saves:
            shutil.copytree(run.saved, self.checkpoint)
        if self.begins_at != {"resumed": STEPS_BEFORE, "loading": STEPS_BEFORE - 1}.get(start, 0):
            raise RuntimeError(f"the undisturbed run began after step {self.begins_at}: {self.said.getvalue()}")
        self.num_operations = {effect: self.faults.seen(effect) for effect in EFFECTS}
        gc.collect()
        gc.freeze()  # what has been imported need not be looked at after every run

    def _leave_before(self, run: Run) -> None:
        """What a run begins with: state files, or a checkpoint alone."""
        run.train(STEPS_BEFORE, dies=not run.saves)

    def _empty(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        if self.kept.exists():
            shutil.copytree(self.kept, self.state)
        else:
            self.state.mkdir(parents=True)
        self.said.seek(0)
        self.said.truncate()

    def run(self) -> Run:
        return Run(self.state, self.io_engine, self.faults, self.start)

    def strike(self, effect: str, number: int) -> Outcome:
        self._empty()
        self.faults.arm(number, effect, self.late_secs)
        run = self.run()
        outcome = Outcome(self.io_engine, self.start, effect, number)
        try:
            run.train()
        except Exception as error:
            self._told(run, error, outcome)
        else:
            outcome.struck = self.faults.hit
            self._finished(run, outcome)
        self.faults.arm(-1)
        if run.saves:
            outcome.wrong = outcome.wrong or self._wrong_checkpoint(run.saved, outcome)
        if outcome.wrong:
            sys.stderr.write(f"-- {outcome}\n{self.said.getvalue()}")
        outcome.struck = re.sub(r"\w+-\w+-\w+-\w+-\w+(?=-rank)", "RUN", outcome.struck.replace(f"{self.state}/", ""))
        return outcome

    def _finished(self, run: Run, outcome: Outcome) -> None:
        outcome.end, outcome.step = "equal", run.steps
        outcome.wrong = differing(self.expected, run.last)
        failures = [line for line in self.said.getvalue().splitlines() if "failed" in line or "cannot" in line]
        if failures:
            outcome.end, outcome.said = "logged", " | ".join(failures)[:600]
            outcome.wrong = outcome.wrong or lacks(outcome.said, outcome.struck, outcome.effect)
        elif EFFECTS[outcome.effect][0] == ERROR and outcome.struck:
            outcome.end = "unheard"

    def _told(self, run: Run, error: Exception, outcome: Outcome) -> None:
        """The script met an exception: what a user would do then is start it again."""
        outcome.struck = self.faults.hit
        outcome.end, outcome.said, outcome.step = "told", f"{type(error).__name__}: {error}"[:600], run.step
        outcome.steps_after = run.step - run.struck_in if run.struck_in else 0
        if not outcome.struck:
            outcome.wrong = "an exception without a fault"
        elif outcome.effect == "late" or (outcome.effect == "short" and outcome.struck.endswith("/data")):
            outcome.wrong = "what is harmless ended the run"
        elif outcome.steps_after > 0:
            outcome.wrong = f"struck in step {run.struck_in}, told after step {run.step}"
        elif not isinstance(error, FuyouError):
            outcome.wrong = f"{type(error).__name__} is none of the package's exceptions"
        else:
            outcome.wrong = lacks(outcome.said, outcome.struck, outcome.effect)
        try:
            lifetime.shutdown()  # as Python ends while an exception is on its way out
            run.end()
        except Exception as another:
            outcome.wrong = outcome.wrong or f"destroy() raised {another!r}"
        ending._ending.because = ""
        self.faults.arm(-1)
        error.__traceback__ = None
        self._resume(run, outcome)

    def _wrong_checkpoint(self, saved: Path, outcome: Outcome) -> str:
        if not (saved / "latest").exists():
            return "" if outcome.end in ("told", "logged") else "no checkpoint is there, and nobody said so"
        return different_checkpoint(saved, self.checkpoint)

    def _resume(self, run: Run, outcome: Outcome) -> None:
        again = self.run()
        try:
            again.train()
        except Exception as error:
            outcome.wrong = outcome.wrong or f"the next run ended with {error!r}"
            again.end()
            return
        outcome.resumed_from = again.begun_at
        wrong = differing(self.expected, again.last)
        least = max(run.step - 1, self.begins_at) if self.start not in NOTHING_PROMISED else 0
        if wrong:
            outcome.wrong = outcome.wrong or f"after the next run {wrong}"
        if again.begun_at < least:
            outcome.wrong = outcome.wrong or f"{run.step} steps returned, the next run began after {again.begun_at}"
        stays = [str(file) for file in run.path.glob("ds_fuyou/*")]
        if bool(stays) != (again.begun_at == again.steps):  # it made no step: what it went on from is left
            outcome.wrong = outcome.wrong or f"after the next run {stays or 'nothing'} stays"


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(orders: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    ProcessMark.of_this_process = staticmethod(of_a_process_that_has_ended)
    deepspeed.init_distributed("gloo")
    chance = random.Random(orders.get("seed"))
    for io_engine in orders["engines"]:
        for start in orders["starts"]:
            sweep = Sweep(Path(orders["path"]), io_engine, start, orders["late_secs"])
            for effect in orders["effects"]:
                numbers: Any = range(orders.get("first", 0), sweep.num_operations[effect])
                if "numbers" in orders:
                    numbers = orders["numbers"]
                elif "sample" in orders:
                    numbers = sorted(chance.sample(numbers, orders["sample"]))
                for number in numbers:
                    say({"begin": number})
                    say(dataclasses.asdict(sweep.strike(effect, number)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
