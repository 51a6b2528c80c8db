# SPDX-License-Identifier: Apache-2.0
"""Writes docs/clients.md from the outcomes that tests.clients.run left: ``make test-clients``. What has none keeps the
row that the page has.

Exits with 1 if something that runs in stock differs or fails with the block. A cell of another state of the package's
sources than this one is marked: the command, run again after a change, marks what the change has made older.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.clients.cases import CASES, PROGRAMS, Case
from tests.clients.run import RESULTS, TIERS, Answer, Results, cells_of, package
from tests.huggingface.runner import ROOT

TARGET = ROOT / "docs" / "clients.md"
CELLS = tuple(f"{num_ranks} {kind}{end}" for num_ranks in (1, 2) for kind in TIERS for end in ("", " resumed"))
TITLES = tuple(
    f"{ranks}, {what}{end}" for ranks in ("1 rank", "2 ranks") for what in ("NVMe", "auto") for end in ("", ", resumed")
)
OLDER = " (older)"
_STATE = re.compile(r"package's sources\s+`(\w+)`")

HEAD = """\
# Programs that others wrote

Programs that use DeepSpeed's ZeRO-3, run with their JSON as it is (parameters and optimizer offloaded to the CPU), and
with a `fuyou` block as the only edit. `make test-clients` installs them into environments of their own, runs everything
below on the CPU, and writes this page; interrupted, it goes on when it is started again. Models are small, made from
configurations, with a tokenizer and texts of the Python manual; 4 steps.

- **equal**: every number that the program logged (losses, norms, rewards, evaluations, what it generated) is stock's
  digit for digit, and every tensor of the final model is stock's bit for bit.
- **NVMe**: parameters, gradients and optimizer with tier `nvme`. **auto**: all three `auto`.
- **resumed**: fresh processes that go on from the checkpoint of step 2 end like the undisturbed run, but for
  tokens, which TRL counts anew. "as stock": they do not, and stock's resumed run departs in the same way, to the bit.
  (By itself stock's resumed run departs in the last bits: [design.md](design.md), "Resume".)
- **stock fails**: the program does not run with its own JSON either.
- **–**: the script saves nothing to go on from. **not run**: no outcome yet.
- **(older)**: run with earlier sources of the package than all others, which were run with the package's sources
  `STATE`, a digest of `ds_fuyou/`. `python -m tests.clients.table` marks what is older than a checkout.
"""

TAIL = """\
## What was left out

- TRL 1.16 has no PPO.
- axolotl is installed without what it does not import on a CPU (xformers, flash attention), and beside a newer
  DeepSpeed than its extra allows. It has no key for the Trainer's `use_cpu`, which is set for it. accelerate takes each
  rank without a device for the only one, so that all of them save to the same files: it is told how many they are.
- DeepSpeedExamples' scripts run as they are, with data sets of their columns and models made here instead of those
  that they would download (`tests/clients/examples_script.py`); the block is added to the dictionary that
  DeepSpeed-Chat makes. They need a checkout, which the variable `DEEPSPEED_EXAMPLES` names.
  `tests/clients/chat_script.py` has the five engines of step 3 without it.
"""


@dataclass(frozen=True)
class Shown:
    """``package``: with which sources it was found out; empty if with earlier ones than the page names."""

    outcome: str
    package: str


@dataclass(frozen=True)
class Told:
    """What the file of a case says."""

    cells: Mapping[str, Answer] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""


def _cell(shown: Shown | None, tried: bool) -> str:
    if shown is None:
        return "not run" if tried else "–"
    word = shown.outcome.partition(":")[0]
    return (f"**{word}**" if word in ("differs", "fails") else word) + OLDER * (shown.package != package())


def _tried(case: Case, cell: str) -> bool:
    return cell in cells_of(case)


def _escaped(remark: str) -> str:
    return remark.replace("|", "\\|").replace("<", "&lt;")


def _row(case: Case, cells: Mapping[str, Shown]) -> str:
    """A case may ask for less than it did when it ran."""
    asked = {cell: shown for cell, shown in cells.items() if _tried(case, cell)}
    columns = [_cell(asked.get(cell), _tried(case, cell)) for cell in CELLS]
    remarks = [case.remark] if case.remark else []
    remarks += sorted({shown.outcome.partition(": ")[2] for shown in asked.values() if shown.outcome != "equal"})
    return f"| {case.program} | {case.shows} | {' | '.join(columns)} | {_escaped('; '.join(remarks))} |"


def _versions(results: Mapping[str, Told], before: str) -> list[str]:
    lines = []
    for program in PROGRAMS:
        ran = [results[case.name] for case in CASES if case.program == program and case.name in results]
        kept = [line for line in before.splitlines() if line.startswith(f"- {program}: ")]
        if ran:
            named = ", ".join(f"{name} {version}" for name, version in ran[0].versions.items())
            kept = [f"- {program}: {named} ({ran[0].date})"]
        lines += kept
    return lines


def outcomes_of(page: str) -> dict[str, dict[str, Shown]]:
    """By the name of a case, what its row on the page says happened."""
    found: dict[str, dict[str, Shown]] = {}
    state = _STATE.search(page)
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for case in CASES:
        for row in rows:
            if row[:2] == [case.program, case.shows]:
                why = row[-1].replace(_escaped(case.remark), "").strip("; ") if len(row) == len(CELLS) + 3 else ""
                why = why.replace("\\|", "|").replace("&lt;", "<")
                found[case.name] = {}
                for cell, text in zip(CELLS, row[2:], strict=False):
                    word = text.removesuffix(OLDER).strip("* ")
                    package = state[1] if state and not text.endswith(OLDER) else ""
                    if word not in ("not run", "–"):
                        found[case.name][cell] = Shown(word if word == "equal" else f"{word}: {why}", package)
    return found


def page(results: Mapping[str, Told], before: str = "") -> str:
    """``before``: the page whose outcomes stay where ``results`` has none."""
    shown = outcomes_of(before)
    for name, told in results.items():
        now = {cell: Shown(answer.outcome, answer.package) for cell, answer in told.cells.items()}
        shown[name] = shown.get(name, {}) | now
    titles = ["program", "what it does", *TITLES, "remark"]
    lines = [HEAD.replace("STATE", package()), f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [_row(case, shown.get(case.name, {})) for case in CASES]
    return "\n".join([*lines, "", "Versions:", "", *_versions(results, before), "", TAIL])


def how_much(results: Mapping[str, Told]) -> str:
    """How many cells there are, how many have an outcome of this state, and what these took."""
    asked = sum(len(cells_of(case)) for case in CASES)
    answers = [answer for told in results.values() for answer in told.cells.values() if answer.package == package()]
    hours = sum(answer.secs for answer in answers) / 3600
    return f"{len(answers)} of {asked} cells are of this state of the package, and took {hours:.1f} hours"


def main() -> None:
    results = {}
    for file in RESULTS.glob("*.json"):
        cells, told = Results.read(file)
        results[file.stem] = Told(cells, **told)
    TARGET.write_text(page(results, TARGET.read_text()))
    sys.stdout.write(f"{TARGET.read_text()}\n{how_much(results)}\n")
    bad = [
        f"{case.name}, {cell}: {answer.outcome}"
        for case in CASES
        for cell, answer in (results[case.name].cells.items() if case.name in results else ())
        if _tried(case, cell) and answer.outcome.startswith(("differs", "fails"))
    ]
    sys.exit("\n".join(bad) or 0)


if __name__ == "__main__":
    main()
