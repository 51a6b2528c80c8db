# SPDX-License-Identifier: Apache-2.0
"""Kills for hours (``make crash``): ``python -m tests.durability.crash [--kills N] [--store N] [--seed S] ...``.

Engine runs of 1, 2 and 4 ranks are killed, all ranks, some, or the launcher, again and again: while they begin, train,
save, load, go on in place, or end; and so is what takes weights out. Where a run goes on from is looked at, which may
be one step behind, and the losses of its steps, which must be, to the bit, those of an undisturbed one. In the end a
run goes on beyond the last step, and so must be what it leaves after every step. Crashes of the store alone come first
(store_crashes.py). Status 1 if anything is not as promised; its files stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.durability.runs import kill_some, launch, run_to_end, steps_in, wait_for_step
from tests.durability.store_crashes import sweep as store_sweep
from tests.durability.test_resume import ALL_STORED, differences
from tests.harness.forked import finish, start
from tests.harness.outcomes import Outcomes, add_arguments
from tests.harness.ports import remove_shared_buffers
from tests.harness.runner import HERE, environment

STEPS, STEPS_AFTER = 12, 2  # of runs that are killed, and then
MOST_KILLS = 12  # of one life
BATCH = 5_000  # crashes of the store
ENV = {"OMP_NUM_THREADS": "1"}  # two threads of so small a model wait for each other where others use the cores
NUM_RANKS = {1: 6, 2: 3, 4: 1}  # with these weights
KINDS: dict[str, dict[str, Any]] = {
    "states": {"config": {"gradient_clipping": 0.5}},
    "everything": {"config": {"gradient_accumulation_steps": 2}, "block": ALL_STORED},
    "saves behind": {"config": {"gradient_clipping": 0.5}, "block": {"checkpoint": {"save": "background"}}},
}
RECOVER = """
import sys
from pathlib import Path
from ds_fuyou.checkpoint.recovery import recover_weights
recover_weights([Path(path) for path in sys.argv[2:]], Path(sys.argv[1]))
"""


@dataclass
class Life:
    """One run from its beginning to its end, over several processes. ``begins_secs``: until the first step of an
    undisturbed one has returned. ``returned``: steps that the state must have, or all but one of them. ``lost``: steps
    that had returned and were made again, after each kill."""

    root: Path
    world_size: int
    kind: str
    chance: random.Random
    reference: Path
    begins_secs: float
    launches: int = 0
    logs: list[Path] = field(default_factory=list)
    """Of the last launch."""
    kills: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    returned: int = 0
    may_begin_anew: bool = False
    """Nothing is promised while a checkpoint is loaded, and a clean end takes the files with it."""

    def __post_init__(self) -> None:
        whole = torch.load(self.reference / str(STEPS + STEPS_AFTER), weights_only=False)
        self._losses: list[float] = whole["losses"]

    @property
    def case(self) -> dict[str, Any]:
        given = KINDS[self.kind]
        block = {**given.get("block", {}), "resume": "auto"}
        return {"steps": STEPS, "ends": True, "generators": "none", **given, "block": block}

    def launch(self, case: dict[str, Any]) -> tuple[Sequence[Any], list[Path]]:
        self.launches += 1
        processes, self.logs = launch(self.root / "state", case, self.world_size, f"log{self.launches}.", **ENV)
        return processes, self.logs

    def judge(self) -> str:
        """What the last launch shows that is not as promised. One that did not begin beside what a rank had left whose
        peers had ended cleanly does as it says: removes that."""
        if self.was_refused:
            if not self.may_begin_anew:
                return "a run did not begin, though nothing had changed"
            shutil.rmtree(self.root / "state" / "ds_fuyou")
            return ""
        begun = resumed_from(self.logs)
        if begun >= 0:
            self.lost.append(self.returned - begun)
            if begun < self.returned - 1 and not self.may_begin_anew:
                return f"{self.returned} steps had returned, the next run began after {begun}"
            self.returned, self.may_begin_anew = max(begun, steps_in(self.logs)), False
        # The record of the last step may have been there, though nobody saw it return: nothing to do but to end.
        self.may_begin_anew |= self.returned == STEPS
        if self.logs and self.logs[0].exists():
            for step, losses in LOSSES.findall(self.logs[0].read_text(errors="replace")):
                found, micros = list(map(float.fromhex, losses.split())), len(losses.split())
                expected = self._losses[(int(step) - 1) * micros : int(step) * micros]
                if found != expected:
                    return f"step {step} of a run that began after {begun} has the losses {found}, not {expected}"
        return _of_checkpoint(self.root / "checkpoint", self.reference / "checkpoint")

    @property
    def was_refused(self) -> bool:
        said = "".join(log.read_text(errors="replace") for log in self.logs if log.exists())
        return "so it does not begin anew" in said

    # ---- phases: each kills once ---------------------------------------------------------------------------

    def beginning(self) -> None:
        processes, _ = self.launch(self.case)
        time.sleep(self.chance.random() * 1.2 * self.begins_secs)
        self._kill(processes)

    def training(self) -> None:
        processes, logs = self.launch(self.case)
        kill_some(self.chance, processes, logs, min(self.returned + self.chance.randint(1, 2), STEPS))

    def saving(self) -> None:
        at = min(self.returned + 2, STEPS)
        processes, logs = self.launch({**self.case, "save": str(self.root / "checkpoint"), "save_at": at})
        wait_for_step(at - 1, processes, logs)
        time.sleep(self.chance.random() * 0.15)
        self._kill(processes)

    def ending(self) -> None:
        processes, logs = self.launch(self.case)
        wait_for_step(STEPS, processes, logs)
        time.sleep(self.chance.random() * 0.1)
        self._kill(processes)

    def loading(self) -> None:
        """Needs a checkpoint; made by an undisturbed run. All ranks go: those that live on would be killed anyway."""
        processes, _ = self.launch({**self.case, "load": str(self.reference / "checkpoint")})
        time.sleep(self.begins_secs * (0.3 + self.chance.random()))
        finish(processes, 0.0)

    def recovering(self) -> None:
        """A run is killed, then what takes its weights out, and that is done again."""
        self.training()
        directories = sorted((self.root / "state").glob("ds_fuyou/*-rank*"))
        if len(directories) < self.world_size:
            return
        out, script = self.root / "weights.pt", self.root / "recover.py"
        script.write_text(RECOVER)
        for again in (False, True):
            arguments = [out, *directories]
            process = start(
                script, [str(each) for each in arguments], environment(0, 1, 0) | ENV, self.root / "recovered"
            )
            if again:
                finish([process], 60)
            else:
                time.sleep(self.chance.random() * 0.25)
                finish([process], 0.0)
        if out.exists():
            torch.load(out)

    def launcher(self) -> None:
        """As torchrun starts ranks: it goes first, they soon after."""
        self.launches += 1
        state, log = self.root / "state", self.root / f"launcher{self.launches}"
        state.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.world_size}"]
        command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command += [HERE / "killed_ranks.py", state, json.dumps(self.case)]
        inherited = {
            name: value
            for name, value in (environment(0, self.world_size, 0) | ENV).items()
            if name not in ("RANK", "WORLD_SIZE")
        }
        with open(log, "wb") as output:
            process = subprocess.Popen(command, env=inherited, stdout=output, stderr=output, start_new_session=True)
        self.logs = [log]
        wanted, end = self.returned + self.chance.randint(1, 2), time.monotonic() + 60
        while steps_in([log]) < wanted and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        ranks = _children(process.pid)
        process.kill()
        process.wait()
        time.sleep(self.chance.random() * 0.3)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in ranks):
            time.sleep(0.01)

    def _kill(self, processes: Sequence[Any]) -> None:
        chosen = self.chance.sample(range(len(processes)), self.chance.randint(1, len(processes)))
        for rank in chosen:
            processes[rank].kill()
        finish(processes, self.chance.random() * 0.5)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


PHASES: dict[str, Callable[[Life], None]] = {
    "beginning": Life.beginning,
    "training": Life.training,
    "saving": Life.saving,
    "ending": Life.ending,
    "loading": Life.loading,
    "recovering": Life.recovering,
    "launcher": Life.launcher,
}
WEIGHTS: dict[str, float] = {
    "beginning": 6,
    "training": 10,
    "saving": 8,
    "ending": 2,
    "loading": 2,
    "recovering": 3,
    "launcher": 0.5,
}
LOSSES = re.compile(r"^LOSSES 0 (\d+) (.*)$", re.MULTILINE)


def resumed_from(logs: Sequence[Path]) -> int:
    """Of the last launch, by what rank 0 says; 0 if it began from its beginning, -1 if it did not come so far."""
    said = logs[0].read_text(errors="replace") if logs and logs[0].exists() else ""
    found = re.search(r"going on from step (\d+), in place", said)
    return int(found[1]) if found else 0 if "starts from its beginning" in said else -1


def live(life: Life, phases: Sequence[str]) -> str:
    """Some kills, then to the end: at random, or in these ``phases``. Returns what is not as promised."""
    out = life.root / "out"
    out.mkdir(parents=True)
    drawn = life.chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=life.chance.randint(2, MOST_KILLS))
    for phase in phases or drawn:
        PHASES[phase](life)
        life.kills.append(phase)
        wrong = life.judge()
        life.may_begin_anew |= phase == "loading"
        remove_shared_buffers()
        if wrong:
            return wrong
    case = {**life.case, "steps": STEPS + STEPS_AFTER, "out": str(out)}
    life.logs = [life.root / "state" / "last.0"]
    for again in (False, True):
        try:
            run_to_end(life.root / "state", case, life.world_size, "last.", **ENV)
            break
        except AssertionError as error:
            wrong = life.judge() if life.was_refused else f"the last run failed: {str(error)[-1500:]}"
            if wrong or again:
                return wrong or "a run was refused twice"
    begun = resumed_from(life.logs)
    wrong = life.judge()
    if wrong:
        return wrong
    for file in sorted(out.iterdir(), key=lambda file: int(file.name)):
        expected = torch.load(life.reference / file.name, weights_only=False)
        found = torch.load(file, weights_only=False)
        for each in (expected, found):
            each.pop("losses")  # a run that begins anew has them all, as one that loads has none
        wrong = differences(expected, found)
        if wrong:
            return f"after step {file.name} of a run that went on after {begun}: {wrong[:3]} differ"
    # What runs left that were killed before their first step is not this one's to remove.
    used = re.search(r"in place, in (\S+)", (life.root / "state" / "last.0").read_text(errors="replace"))
    if used and Path(used[1]).exists():
        return f"after the clean end {used[1]} stays"
    return ""


def _of_checkpoint(found: Path, expected: Path) -> str:
    """What was being saved is there as a whole, or not at all."""
    latest = found / "latest"
    if not latest.exists():
        return ""
    tag = latest.read_text()
    names = sorted(file.name for file in (found / tag).iterdir())
    wanted = sorted(file.name for file in (expected / (expected / "latest").read_text()).iterdir())
    if names != wanted:
        return f"the checkpoint {tag} has {names}, not {wanted}"
    for name in names:
        if name.endswith(".pt"):
            torch.load(found / tag / name, weights_only=False)
    return ""


class References:
    """Undisturbed runs: what they leave, and the seconds until their first step has returned. What is there is not run
    again."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, kind: str, world_size: int) -> tuple[Path, float]:
        path = self._root / f"{kind}{world_size}".replace(" ", "")
        took = path.with_suffix(".secs")
        if not took.exists():
            shutil.rmtree(path, ignore_errors=True)
            case = {"steps": STEPS + STEPS_AFTER, "out": str(path), "generators": "none", **KINDS[kind]}
            processes, logs = launch(path, {**case, "save": str(path / "checkpoint")}, world_size, **ENV)
            while not logs[0].exists():  # the server that runs are forked from begins with the first one
                time.sleep(0.01)
            begin = time.monotonic()
            wait_for_step(1, processes, logs)
            secs = time.monotonic() - begin
            finish(processes, 200)
            if any(each.exitcode for each in processes):
                raise RuntimeError(f"an undisturbed run failed: {logs[0].read_text()[-3000:]}")
            for file in [*path.glob("ds_fuyou"), *logs]:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
            took.write_text(str(secs))
        return path, float(took.read_text())


def table(lines: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Of all that was done so far."""
    sizes = sorted(NUM_RANKS)
    alone, lives = [each for each in lines if "made" in each], [each for each in lines if "phases" in each]
    made = Counter[str]()
    for each in alone:
        made.update(each["made"])
    kills = Counter((phase, life["ranks"]) for life in lives for phase in life["phases"])
    kinds = Counter(kind for life in lives for kind in [life["kind"]] * len(life["phases"]))
    lost = Counter(steps for life in lives for steps in life["lost"])
    wrong = [what for each in lines for what in each["wrong"]]
    secs_alone, secs = (sum(each["secs"] for each in those) or 1.0 for those in (alone, lives))
    done = [
        "# Kills and power cuts",
        "",
        f"`make crash`, seed {args.seed}; Linux {platform.release()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}.",
        f"Of the store alone {sum(made.values()) / secs_alone:.0f} crashes a second, {secs_alone / 60:.0f} minutes; "
        f"{kills.total() / secs:.2f} kills of runs a second, {secs / 60:.0f} minutes.",
        "Each run was killed again and again; where it went on from, the losses of its steps and the checkpoint that",
        "it had saved were looked at every time. Then it ended in peace; what it left after every step was compared,",
        "to the bit, with what an undisturbed run left.",
        "",
        "| the store alone | cases |",
        "|---|---:|",
        *(f"| {what} | {number:,} |" for what, number in made.items()),
        "",
        f"| {len(lives)} engine runs: killed while | "
        + " | ".join(f"{size} rank{'s' * (size > 1)}" for size in sizes)
        + " |",
        "|---" + "|---:" * len(sizes) + "|",
        *(f"| {phase} | " + " | ".join(f"{kills[phase, size]:,}" for size in sizes) + " |" for phase in PHASES),
        "| all | " + " | ".join(f"{sum(n for (_, s), n in kills.items() if s == size):,}" for size in sizes) + " |",
        "",
        "Of these " + ", ".join(f"{kind}: {number:,}" for kind, number in sorted(kinds.items())) + ".",
        "",
        "Steps that had returned and were made again, wherever a run said where it goes on from: "
        + ", ".join(f"{steps}: {number}" for steps, number in sorted(lost.items()))
        + ". (-1: the record was written before the return was seen. More than 1: a checkpoint was being loaded, or "
        "the run had ended.)",
        "",
        f"Not as promised: {len(wrong)}.",
        *(f"* {what}" for what in wrong[:20]),
    ]
    return "\n".join(done) + "\n"


def crash_stores(args: argparse.Namespace, outcomes: Outcomes) -> None:
    """Kills and power cuts of the store alone, in batches."""
    batches = [each for each in outcomes.lines if "made" in each]
    done, number = sum(sum(each["made"].values()) for each in batches), len(batches)
    while done < args.store and not outcomes.is_over():
        begin = time.monotonic()
        made, wrong = store_sweep(BATCH * (args.seed + number), BATCH // 50, BATCH - BATCH // 50)
        outcomes.add({"made": made, "wrong": wrong, "secs": round(time.monotonic() - begin, 2)})
        done, number = done + sum(made.values()), number + 1


def crash_runs(args: argparse.Namespace, outcomes: Outcomes, root: Path) -> None:
    """Lives of engine runs, one after the other."""
    lives = [each for each in outcomes.lines if "phases" in each]
    done, number = sum(len(each["phases"]) for each in lives), len(lives)
    references = References(args.references or root)
    while done < args.kills and not outcomes.is_over():
        chance, begin = random.Random(args.seed + number), time.monotonic()
        world_size = args.ranks or chance.choices(list(NUM_RANKS), list(NUM_RANKS.values()))[0]
        kind = chance.choice(list(KINDS))
        reference, begins_secs = references.of(kind, world_size)
        life = Life(root / f"run{number}", world_size, kind, chance, reference, begins_secs)
        wrong = live(life, args.phases)
        said = f"{life.root.name}, {world_size} ranks, {kind}, {life.kills}: {wrong or 'equal'}"
        sys.stdout.write(said + "\n")
        sys.stdout.flush()
        if not wrong:
            shutil.rmtree(life.root)
        line = {"phases": life.kills, "ranks": world_size, "kind": kind, "lost": life.lost}
        secs = round(time.monotonic() - begin, 2)
        outcomes.add({**line, "wrong": [said] if wrong else [], "secs": secs})
        done, number = done + len(life.kills), number + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2_000, help="of engine runs")
    parser.add_argument("--store", type=int, default=100_000, help="crashes of the store alone, 1 of 50 a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=[], help="every run is killed in these, in turn")
    parser.add_argument("--ranks", type=int, choices=NUM_RANKS, help="of every run; default: at random")
    parser.add_argument("--path", type=Path, help="where; default: the temporary directory")
    parser.add_argument("--references", type=Path, help="undisturbed runs are kept there for the next piece")
    parser.add_argument("--table", type=Path)
    add_arguments(parser, "crash.jsonl", 600.0)
    args = parser.parse_args()
    outcomes = Outcomes(args.outcomes, args.minutes)
    crash_stores(args, outcomes)
    root = Path(tempfile.mkdtemp(prefix="fuyou-crash-", dir=args.path))
    crash_runs(args, outcomes, root)
    text = table(outcomes.lines, args)
    sys.stdout.write(text)
    if args.table is not None:
        args.table.write_text(text, encoding="utf-8")
    is_wrong = any(each["wrong"] for each in outcomes.lines)
    if is_wrong:
        sys.stdout.write(f"files of what was wrong: {root}\n")
    else:
        shutil.rmtree(root)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
