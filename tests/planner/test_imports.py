# SPDX-License-Identifier: Apache-2.0
"""What a training process loads of the planner: what decides and watches, nothing of what simulates other systems."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.harness.limits import HANG_SECS

LISTED = (
    "import json, sys, ds_fuyou.zero.stage3, ds_fuyou.zero.parameters.inference, ds_fuyou.zero.run.run_plan; "
    "sys.stdout.write('loaded ' + json.dumps([name for name in sys.modules if name.startswith('ds_fuyou.')]))"
)


def test_a_run_loads_nothing_of_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTED], capture_output=True, text=True, timeout=HANG_SECS, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.split("loaded ")[-1]))
    planner = {name.removeprefix("ds_fuyou.planner.") for name in loaded if name.startswith("ds_fuyou.planner.")}
    assert "cost" in planner  # it is what predicts
    assert not {name for name in loaded if name.startswith("ds_fuyou.simulator")}
    assert not {name for name in loaded if name.startswith(("ds_fuyou.cli", "ds_fuyou.telemetry.p"))} - {
        "ds_fuyou.telemetry.placement",
        "ds_fuyou.telemetry.pipeline_lanes",
    }
