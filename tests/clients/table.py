# SPDX-License-Identifier: Apache-2.0
"""Writes docs/clients.md from the outcomes that tests.clients.run left: ``make test-clients``. What has none keeps the
row that the page has.

Exits with 1 if something that runs in stock differs or fails with the block.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.clients.cases import CASES, PROGRAMS, Case
from tests.clients.run import RESULTS
from tests.huggingface.runner import ROOT

TARGET = ROOT / "docs" / "clients.md"
CELLS = ("1 nvme", "1 auto", "2 nvme", "2 auto", "resumed")

HEAD = """\
# Programs that others wrote

Programs that use DeepSpeed's ZeRO-3, run with their JSON as it is (parameters and optimizer offloaded to the CPU), and
with a `fuyou` block as the only edit. `make test-clients` installs them into environments of their own, runs everything
below on the CPU, and writes this page; interrupted, it goes on when it is started again. Models are small, made from
configurations, with a tokenizer and texts of the Python manual; 4 steps.

- **equal**: every number that the program logged (losses, norms, rewards, evaluations, what it generated) is stock's
  digit for digit, and every tensor of the final model is stock's bit for bit.
- **NVMe**: parameters, gradients and optimizer with tier `nvme`. **auto**: all three `auto`.
- **resumed**: a fresh process that goes on from the checkpoint of step 2 (one rank, NVMe) ends like the undisturbed
  run, but for tokens, which TRL counts anew. "as stock": it does not, and stock's resumed run departs in the same way,
  to the bit. (By itself stock's resumed run departs in the last bits: [design.md](design.md), "Resume".)
- **stock fails**: the program does not run with its own JSON either.
- **–**: the script saves nothing to go on from. **not run**: no outcome yet.
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


def _cell(outcome: str | None, tried: bool) -> str:
    if outcome is None:
        return "not run" if tried else "–"
    word = outcome.partition(":")[0]
    return f"**{word}**" if word in ("differs", "fails") else word


def _tried(case: Case, cell: str) -> bool:
    return case.checkpoint is not None if cell == "resumed" else int(cell[0]) in case.ranks


def _escaped(remark: str) -> str:
    return remark.replace("|", "\\|").replace("<", "&lt;")


def _row(case: Case, cells: dict[str, str]) -> str:
    shown = [_cell(cells.get(cell), _tried(case, cell)) for cell in CELLS]
    remarks = [case.remark] if case.remark else []
    remarks += sorted({text.partition(": ")[2] for text in cells.values() if not text.startswith("equal")})
    return f"| {case.program} | {case.shows} | {' | '.join(shown)} | {_escaped('; '.join(remarks))} |"


def _versions(results: dict[str, dict[str, Any]], before: str) -> list[str]:
    lines = []
    for program in PROGRAMS:
        told = [results.get(case.name, {}) for case in CASES if case.program == program]
        ran = [each for each in told if "versions" in each]
        kept = [line for line in before.splitlines() if line.startswith(f"- {program}: ")]
        if ran:
            named = ", ".join(f"{name} {version}" for name, version in ran[0]["versions"].items())
            kept = [f"- {program}: {named} ({ran[0]['date']})"]
        lines += kept
    return lines


def outcomes_of(page: str) -> dict[str, dict[str, str]]:
    """By the name of a case, what its row on the page says happened."""
    found: dict[str, dict[str, str]] = {}
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for case in CASES:
        for row in rows:
            if row[:2] == [case.program, case.shows]:
                why = row[-1].replace(_escaped(case.remark), "").strip("; ") if len(row) == len(CELLS) + 3 else ""
                words = dict(zip(CELLS, (cell.strip("* ") for cell in row[2:]), strict=False))
                happened = {cell: word for cell, word in words.items() if word not in ("not run", "–")}
                why = why.replace("\\|", "|").replace("&lt;", "<")
                found[case.name] = {c: word if word == "equal" else f"{word}: {why}" for c, word in happened.items()}
    return found


def page(results: dict[str, dict[str, Any]], before: str = "") -> str:
    """``before``: the page whose outcomes stay where ``results`` has none."""
    kept = outcomes_of(before)
    head = ["program", "what it does", "1 rank, NVMe", "1 rank, auto", "2 ranks, NVMe", "2 ranks, auto", "resumed"]
    lines = [HEAD, f"| {' | '.join([*head, 'remark'])} |", "|---" * (len(head) + 1) + "|"]
    lines += [_row(case, kept.get(case.name, {}) | results.get(case.name, {}).get("cells", {})) for case in CASES]
    return "\n".join([*lines, "", "Versions:", "", *_versions(results, before), "", TAIL])


def main() -> None:
    results = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    TARGET.write_text(page(results, TARGET.read_text()))
    sys.stdout.write(TARGET.read_text())
    outcomes = [outcome for told in results.values() for outcome in told["cells"].values()]
    sys.exit(1 if any(outcome.startswith(("differs", "fails")) for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
