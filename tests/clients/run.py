# SPDX-License-Identifier: Apache-2.0
"""Runs the matrix: every case stock (CPU tier), with all tiers NVMe and with all "auto", and compares.

    python -m tests.clients.run [--environment NAME] [--only TEXT]

Logs digit for digit, final weights bit for bit; a run that goes on from a checkpoint against the undisturbed one. The
processes have the variables that torchrun would have given them. Every outcome is written when it is there, so that an
interrupted run goes on when it is started again: what this state of the package, of the case and of the versions has an
outcome for is not run again, unless ``--again`` says so.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.clients.cases import CASES, PROGRAMS, Case
from tests.harness.ports import remove_shared_buffers
from tests.huggingface.runner import ROOT, ds_json, run_script, weight_differences, with_block

__all__ = ["RESULTS", "WORK", "Answer", "Results", "make_models", "outcomes_of", "package"]

HERE = Path(__file__).parent
WORK = ROOT / ".work" / "clients"
RESULTS = WORK / "results"
TIERS = {"nvme": "all", "auto": "auto"}
NOISE = (
    "_runtime",
    "_per_second",
    "_per_sec_per_gpu",
    "total_flos",
    "_time",
    "memory(GiB)",
    "speed(iter/s)",
    "speed(s/it)",
)
_NAMED = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b")
COUNTED_ANEW = ("num_tokens",)  # by a resumed process, in stock too


def config_of(case: Case) -> dict[str, Any]:
    zero = {**ds_json()["zero_optimization"], **case.zero}
    if not case.plain:
        return ds_json(zero_optimization=zero)
    kept = {key: value for key, value in zero.items() if value != "auto"}
    kept["stage3_param_persistence_threshold"] = 1000  # of the small models some are persistent and some are not
    if case.program == "Lightning":  # which sets the rest itself, and refuses it here
        return {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,  # its engines for evaluation ask for the key
            "zero_optimization": kept,
        }
    optimizer = {"type": "AdamW", "params": {"lr": 2e-3}}  # one of these scripts brings none
    return {
        **({"optimizer": optimizer} if case.program == "DeepSpeedExamples" else {}),
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": kept,
    }


def history(out: Path, *, steps_only: bool = False) -> list[str]:
    """The lines of a log without what a clock measured; as text, so that NaN equals NaN. ``steps_only``: also without
    the last line of a Trainer, a mean over the steps of the process, and without the names of calls.
    """
    entries = json.loads((out / "log.json").read_text())
    noise = NOISE
    if steps_only:
        entries = [entry for entry in entries if "train_runtime" not in entry and "call" not in entry]
        noise += COUNTED_ANEW
    return [
        json.dumps({key: value for key, value in entry.items() if not key.endswith(noise)}, sort_keys=True)
        for entry in entries
    ]


def differences(stock: Path, ours: Path, *, resumed: bool = False) -> str:
    """What differs first, or nothing. ``resumed``: ``ours`` may have logged the last steps of ``stock`` alone."""
    wanted, found = history(stock, steps_only=resumed), history(ours, steps_only=resumed)
    if not found:
        return "nothing was logged"
    if resumed:
        wanted = wanted[-len(found) :]
    for number, (a, b) in enumerate(zip(wanted, found, strict=False)):
        if a != b:
            return f"entry {number} of the log: {a} became {b}"
    if len(wanted) != len(found):
        return f"{len(found)} entries in the log instead of {len(wanted)}"
    names = weight_differences(stock / "final", ours / "final")
    return f"weights: {', '.join(names)[:200]}" if names else ""


class Runs:
    """The runs of a case on a number of ranks, below one directory."""

    def __init__(self, case: Case, num_ranks: int, work: Path, models: Path) -> None:
        self.case, self.num_ranks, self.models = case, num_ranks, models
        self.work = work / f"{case.name}-{num_ranks}"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

    def run(self, kind: str, resume: Path | None = None) -> Path:
        """One run; ``kind``: "stock" or a name of TIERS. Raises AssertionError with what was said when it fails."""
        name = f"{kind}-resumed" if resume else kind
        shutil.rmtree(self.work / name, ignore_errors=True)  # a try before failed
        config, swap = {"config": config_of(self.case)}, self.work / f"{name}.swap"
        if kind != "stock":
            config = with_block(config, swap, TIERS[kind])
        file, out = self.work / f"{name}.ds.json", self.work / name
        file.write_text(json.dumps(config["config"]))
        options = {**self.case.options, "models": str(self.models), **({"resume": str(resume)} if resume else {})}
        said = run_script(
            HERE / self.case.script,
            [file, out, json.dumps(options)],
            self.work / f"{name}.process",
            self.num_ranks,
            HF_HOME=str(self.work / f"{name}.cache"),  # of its own: nothing is found there that another run computed
            HF_DATASETS_OFFLINE="1",
            MODELSCOPE_CACHE=str(self.work / f"{name}.cache"),
            USE_HF="1",
            DISABLE_VERSION_CHECK="1",  # LLaMA-Factory's, of datasets, of which ms-swift needs a newer one
        )
        if ("is active under DeepSpeed" in said) != (kind != "stock"):
            raise AssertionError("the block was not seen" if kind != "stock" else "a block was seen in the stock run")
        if not (out / "log.json").is_file():
            raise AssertionError("it ended well and left no log")
        left = [str(found) for found in swap.glob("**/*") if found.is_file()]
        if left:
            raise AssertionError(f"files left behind: {left}")
        return out

    @functools.cached_property
    def stock_again(self) -> Path:
        """Stock's own run that goes on, whatever it is compared with."""
        return self.run("stock", self.work / "stock" / str(self.case.checkpoint))


def last_error(error: AssertionError) -> str:
    """The last exception that a process named; if none did, how they ended."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines[1:] if _NAMED.match(line)]
    return (named[-1] if named else lines[0].rstrip(":")).replace(f"{ROOT}/", "")[:300]


def cells_of(case: Case, kinds: tuple[str, ...] = tuple(TIERS)) -> list[str]:
    """The cells that :func:`outcomes_of` gives: "1 nvme", "1 nvme resumed", "2 auto" and so on."""
    ends = ("", " resumed") if case.checkpoint else ("",)
    return [f"{num_ranks} {kind}{end}" for num_ranks in case.ranks for kind in kinds for end in ends]


def outcomes_of(
    case: Case, work: Path, models: Path, kinds: tuple[str, ...] = tuple(TIERS)
) -> Iterator[tuple[str, str]]:
    """Cell after cell and its outcome: "equal", or what happened."""
    for num_ranks in case.ranks:
        try:
            yield from _outcomes_on(replace(case, ranks=(num_ranks,)), Runs(case, num_ranks, work, models), kinds)
        finally:
            remove_shared_buffers()


def _outcomes_on(case: Case, runs: Runs, kinds: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """A run that fails is the outcome of all cells that need it."""
    try:
        stock = runs.run("stock")
    except AssertionError as error:
        failed = f"stock fails: {last_error(error)}"
        yield from ((cell, failed) for cell in cells_of(case, kinds))
        return
    for kind in kinds:
        cell, *resumes = cells_of(case, (kind,))
        try:
            found = differences(stock, runs.run(kind))
        except AssertionError as error:
            failed = f"fails: {last_error(error)}"
            yield from ((each, failed) for each in (cell, *resumes))
            continue
        yield cell, f"differs: {found}" if found else "equal"
        yield from ((each, resumed(runs, case, kind)) for each in resumes)


def resumed(runs: Runs, case: Case, kind: str) -> str:
    """Going on from the checkpoint against the undisturbed run; where that differs, against stock's going on."""
    undisturbed = runs.work / kind
    try:
        again = runs.run(kind, undisturbed / str(case.checkpoint))
        found = differences(undisturbed, again, resumed=True)
        if not found:
            return "equal"
        as_stock = not differences(runs.stock_again, again)
    except AssertionError as error:
        return f"fails: {last_error(error)}"
    if not as_stock:
        return f"differs: {found}"
    return f"as stock: {found}"


def make_models(directory: Path) -> Path:
    if not (directory / "judge").exists():
        directory.mkdir(parents=True, exist_ok=True)
        run_script(HERE / "given.py", [directory], directory / "made")
    return directory


@functools.cache
def package() -> str:
    """What was tested: a digest of the package's sources."""
    sources = hashlib.sha256()
    for file in sorted(path for path in (ROOT / "ds_fuyou").rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        sources.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return sources.hexdigest()[:16]


def asked_by(case: Case, versions: dict[str, str]) -> str:
    """What an outcome is the answer to."""
    script = (HERE / case.script).read_text()
    asked = f"{package()} {replace(case, ranks=(), remark='', shows='')} {script} {sorted(versions.items())}"
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answer:
    """What happened in a cell. ``asked``: :func:`asked_by`. ``package``: :func:`package`. ``secs``: what it took."""

    outcome: str
    asked: str
    package: str
    secs: float


class Results:
    """The file of a case: its cells, and by which question each was answered."""

    def __init__(self, case: Case, directory: Path = RESULTS) -> None:
        names = {PROGRAMS[case.program], "transformers", "accelerate", "peft", "deepspeed", "torch"}
        self.versions = {name: importlib.metadata.version(name) for name in sorted(names)}
        self._asked = asked_by(case, self.versions)
        self._file = directory / f"{case.name}.json"
        self.cells = self.read(self._file)[0] if self._file.exists() else {}

    @staticmethod
    def read(file: Path) -> tuple[dict[str, Answer], dict[str, Any]]:
        """The cells, and of what they tell: "versions" and "date"."""
        told = json.loads(file.read_text())
        return {cell: Answer(**answer) for cell, answer in told.pop("cells").items()}, told

    def has(self, cell: str) -> bool:
        return cell in self.cells and self.cells[cell].asked == self._asked

    def put(self, cell: str, outcome: str, secs: float) -> None:
        self.cells[cell] = Answer(outcome, self._asked, package(), round(secs, 1))
        told = {"cells": {cell: asdict(answer) for cell, answer in self.cells.items()}, "versions": self.versions}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({**told, "date": f"{datetime.date.today()}"}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    environments = sorted({case.environment for case in CASES})
    parser.add_argument("--environment", default="", choices=environments, help="the cases of this one")
    parser.add_argument("--only", default="", help="the case of this name, or those whose name has this text")
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2), help="cells of so many ranks")
    parser.add_argument("--kinds", nargs="*", default=tuple(TIERS), help="cells of these tiers; the others stay")
    parser.add_argument("--again", action="store_true", help="run what has an outcome, too")
    args = parser.parse_args()
    models = make_models(WORK / "-".join(filter(None, ("models", args.environment))))
    named = [case for case in CASES if case.name == args.only] or [case for case in CASES if args.only in case.name]
    for case in named:
        if case.environment != args.environment:
            continue
        results = Results(case)
        for num_ranks in (number for number in case.ranks if number in args.ranks):
            part = replace(case, ranks=(num_ranks,))
            missing = [
                kind
                for kind in args.kinds
                if args.again or not all(results.has(cell) for cell in cells_of(part, (kind,)))
            ]
            begin = time.monotonic()
            for cell, outcome in outcomes_of(part, WORK / "runs", models, tuple(missing)) if missing else ():
                end = time.monotonic()
                results.put(cell, outcome, end - begin)
                begin = end
                sys.stdout.write(f"{case.name}, {cell}: {outcome}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
