# SPDX-License-Identifier: Apache-2.0
"""Many seeds of the parity cases on the stand-in device (``make soak-device``): ``soak.py [NUMBER] [FIRST]``."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

from tests.device.parity import CELLS, case_of, fuyou_of, must_equal_stock
from tests.harness.ports import remove_shared_buffers
from tests.harness.runner import run_case


def main(num_seeds: int, first: int) -> int:
    """Goes on after a failure; returns how many there were."""
    made: dict[str, list[dict]] = {}
    failed = []
    with tempfile.TemporaryDirectory(prefix="fuyou-soak-") as scratch:

        def stock_run(case: dict) -> list[dict]:
            key = json.dumps(case, sort_keys=True)
            if key not in made:
                made[key] = run_case(case, Path(scratch), "stock")
            return made[key]

        for seed in range(first, first + num_seeds):
            drawn = random.Random(seed)
            name, tiers, policy, overlap, slots, activations, _ = drawn.choice(CELLS)
            case = case_of(name, zero_init=drawn.random() < 0.5)
            device = {"seed": seed, "delay_secs": drawn.choice([2e-4, 2e-3, 1e-2]), "delayed_share": drawn.random()}
            lane = drawn.choice(["slow_compute_secs", "slow_up_secs", "slow_down_secs"])
            device["of_rank"] = {"1": {lane: drawn.choice([0, 1e-4, 1e-3])}}  # one rank lags behind
            directory = Path(scratch) / str(seed)
            fuyou = fuyou_of(directory / "swap", tiers, policy, overlap, slots, activations)
            try:
                must_equal_stock(case, fuyou, device, stock_run, directory)
            except AssertionError as error:
                failed.append(seed)
                sys.stdout.write(f"seed {seed} ({name}, {tiers}, {activations}, {device}) failed:\n{error}\n")
            remove_shared_buffers()
            sys.stdout.write(f"seed {seed}: {len(failed)} failed so far\n")
            sys.stdout.flush()
    return len(failed)


if __name__ == "__main__":
    arguments = [int(each) for each in sys.argv[1:]]
    sys.exit(main(*(arguments + [200, 0][len(arguments) :])) > 0)
