# SPDX-License-Identifier: Apache-2.0
"""Writes docs/clients.md from the outcomes that tests.clients.run left: ``make test-clients``.

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
below on the CPU, and writes this page. Models are small, made from configurations, with a tokenizer and texts of the
Python manual; 4 steps.

- **equal**: every number that the program logged (losses, norms, rewards, evaluations, what it generated) is stock's
  digit for digit, and every tensor of the final model is stock's bit for bit.
- **NVMe**: parameters, gradients and optimizer with tier `nvme`. **auto**: all three `auto`.
- **resumed**: a fresh process that goes on from the checkpoint of step 2 (one rank, NVMe) ends like the undisturbed
  run, but for tokens, which TRL counts anew. "as stock": it does not, and stock's resumed run departs in the same way,
  to the bit. (By itself stock's resumed run departs in the last bits: [design.md](design.md), "Resume".)
- **stock fails**: the program does not run with its own JSON either.
- **–**: not tried. **not run**: no outcome yet.
"""

TAIL = """\
## What was left out

- TRL 1.16 has no PPO.
- axolotl is installed without what it does not import on a CPU (xformers, flash attention), and beside a newer
  DeepSpeed than its extra allows. It has no key for the Trainer's `use_cpu`, which is set for it.
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


def _row(case: Case, told: dict[str, Any]) -> str:
    cells = told.get("cells", {})
    shown = [_cell(cells.get(cell), _tried(case, cell)) for cell in CELLS]
    remarks = [case.remark] if case.remark else []
    remarks += sorted({text.partition(": ")[2] for text in cells.values() if not text.startswith("equal")})
    remark = "; ".join(remarks).replace("|", "\\|").replace("<", "&lt;")
    return f"| {case.program} | {case.shows} | {' | '.join(shown)} | {remark} |"


def _versions(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for program in PROGRAMS:
        for case in CASES:
            found = results.get(case.name, {}).get("versions")
            if case.program == program and found:
                named = ", ".join(f"{name} {version}" for name, version in found.items())
                lines.append(f"- {program}: {named} ({results[case.name]['date']})")
                break
    return lines


def page(results: dict[str, dict[str, Any]]) -> str:
    head = ["program", "what it does", "1 rank, NVMe", "1 rank, auto", "2 ranks, NVMe", "2 ranks, auto", "resumed"]
    lines = [HEAD, f"| {' | '.join([*head, 'remark'])} |", "|---" * (len(head) + 1) + "|"]
    lines += [_row(case, results.get(case.name, {})) for case in CASES]
    return "\n".join([*lines, "", "Versions:", "", *_versions(results), "", TAIL])


def main() -> None:
    results = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    TARGET.write_text(page(results))
    sys.stdout.write(TARGET.read_text())
    outcomes = [outcome for told in results.values() for outcome in told["cells"].values()]
    sys.exit(1 if any(outcome.startswith(("differs", "fails")) for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
