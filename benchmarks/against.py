# SPDX-License-Identifier: Apache-2.0
"""This checkout against another commit of it, paired and interleaved: has anything become slower?

python -m benchmarks.against d7b2517 --case balanced --case storage_bound --pairs 8

Prints, for each case and each of our variants, the quotients of the two step times, round by round. Nothing is
asserted: the reader decides what the spread allows to say.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, OFF, Case, StockTuning, spec_of
from benchmarks.processes import ForeignLoad, Worker
from benchmarks.report import environment_of
from benchmarks.run import BY_NAME, summary

ROOT = Path(__file__).resolve().parent.parent


def compare(case: Case, variant: str, roots: dict[str, Path], pairs: int, directory: Path) -> dict[str, Any]:
    """Step seconds of one variant in every checkout of ``roots``, in alternating order."""
    secs: dict[str, list[float]] = {name: [] for name in roots}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="fuyou-bench-") as scratch:
        try:
            for name, root in roots.items():
                (directory / name).mkdir(exist_ok=True)
                spec = spec_of(case, variant, directory / name, StockTuning())
                workers[name] = Worker(name, spec, Path(scratch), root)
                workers[name].ask(do="steps", lead=3, timed=1)
            load = ForeignLoad(list(workers.values()))
            for index in range(pairs):
                for name in roots if index % 2 == 0 else reversed(roots):
                    secs[name].append(workers[name].ask(do="steps", lead=1, timed=case.num_timed)["secs"])
            foreign = load.cores()
            for worker in workers.values():
                worker.stop()
        finally:
            for worker in workers.values():
                worker.kill()
    this, other = (secs[name] for name in roots)
    ratios = [a / b for a, b in zip(this, other, strict=True)]
    return {"case": case.name, "variant": variant, "secs": secs, "ratio": summary(ratios), "foreign_cores": foreign}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--case", choices=list(BY_NAME), action="append", help="only this one; may be given again")
    parser.add_argument("--variant", action="append", help="only this one; may be given again")
    parser.add_argument("--pairs", type=int, default=8, help="rounds (default 8)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to use")
    parser.add_argument("--out", type=Path, help="a JSON file for everything that was measured")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="fuyou-against-", dir=arguments.directory) as scratch:
        other = Path(scratch) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), arguments.commit], check=True)
        try:
            for case in [BY_NAME[name] for name in arguments.case or [case.name for case in CASES]]:
                for variant in arguments.variant or [name for name in case.variants if name.startswith("fuyou")]:
                    if variant not in case.variants or (variant not in OFF and not variant.startswith("fuyou")):
                        continue
                    row = compare(case, variant, {"this": ROOT, "other": other}, arguments.pairs, Path(scratch))
                    rows.append(row)
                    ratio, values = row["ratio"], row["secs"]
                    print(
                        f"{case.name} {variant}: {summary(values['this'])['median']:.3f} s against "
                        f"{summary(values['other'])['median']:.3f} s, ratio {ratio['median']:.3f} "
                        f"({ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f}), "
                        f"foreign cores {row['foreign_cores']:.2f}",
                        flush=True,
                    )
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=False)
        if arguments.out is not None:
            about = {"environment": environment_of(Path(scratch)), "commit": arguments.commit, "rows": rows}
            arguments.out.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
