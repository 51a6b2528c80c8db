# SPDX-License-Identifier: Apache-2.0
"""Killed at any instant, a run leaves the complete state of its last commit or of the one it was making."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_fuyou.storage.store import SlotStore
from tests.unit.storage_support import identity, read_slot

NUM_REGIONS = 3
# Step n fills the spare slot of every region with n % 251; it tells "begin n" before and "done n" after.
WRITER = """
import sys
from pathlib import Path
from ds_fuyou.storage.store import *
from tests.unit.storage_support import write_slot
paths = [Path(p) for p in sys.argv[1:]]
regions = [RegionSpec(f"r{i}", 4096 * (i * 40 + 1), 2) for i in range(3)]
store = SlotStore.create(paths, regions, RunIdentity("model", 0, 1, "run"))
for step in range(1, 100000):
    print("begin", step, flush=True)
    for region in regions:
        write_slot(store, region.name, step % 2, step % 251)
    store.commit(step, {region.name: step % 2 for region in regions}, {"fill": step % 251})
    print("done", step, flush=True)
"""


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_instant_leaves_a_whole_committed_state(tmp_path: Path, seed: int) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, *map(str, paths)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    draw = random.Random(seed)
    said = [writer.stdout.readline() for _ in range(draw.randint(1, 6))]
    time.sleep(draw.uniform(0.0, 0.02))
    writer.kill()
    said += writer.stdout.read().splitlines()  # not communicate(): it loses what readline() had buffered
    writer.stdout.close()
    writer.wait(timeout=60)
    done = max([int(line.split()[1]) for line in said if line.startswith("done")], default=0)
    begun = max([int(line.split()[1]) for line in said if line.startswith("begin")])
    store = SlotStore.open([path / "ds_fuyou" / "run-rank0" for path in paths], identity())
    record = store.last_commit()
    try:
        if record is None:
            assert done == 0
            return
        assert record.intact
        assert done <= record.step <= begun
        assert record.meta["fill"] == record.step % 251
        for index in range(NUM_REGIONS):
            assert set(read_slot(store, f"r{index}", record.slots[f"r{index}"])) == {record.step % 251}
    finally:
        store.close(remove=True)
