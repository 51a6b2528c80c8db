# SPDX-License-Identifier: Apache-2.0
"""A run that is killed while its states move, or after they are back: what is gone on from, and what is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ds_fuyou.checkpoint.recovery import recover_checkpoint
from ds_fuyou.errors import FuyouStateError
from tests.durability.runs import launch, run_to_end
from tests.durability.test_resume import RESUME, differences
from tests.harness.forked import finish

STEPS = 8
CLIPPED = {"config": {"gradient_clipping": 0.5}}


def killed_run(path: Path, world_size: int, die: tuple[int, str], moves: dict[str, float], move_bytes: int) -> Path:
    """Of all ranks, the last one first; its folder."""
    case = {"steps": STEPS, **CLIPPED, "block": RESUME, "move_after": moves, "move_bytes": move_bytes}
    rank = world_size - 1
    processes, logs = launch(path, {**case, "die": {str(rank): die}}, world_size, "killed.")
    finish(processes)
    assert processes[rank].exitcode == -9, logs[0].read_text()[-3000:]
    return path


def compare(tmp_path: Path, killed: Path, world_size: int) -> str:
    """Goes on after the kill, without moves, and wants all of an undisturbed run; what rank 0 said."""
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    out.mkdir()
    run_to_end(undisturbed, {"steps": STEPS, **CLIPPED, "out": str(undisturbed)}, world_size)
    case = {"steps": STEPS, **CLIPPED, "block": RESUME, "out": str(out)}
    try:
        said = run_to_end(killed, case, world_size, "resumed")
    except AssertionError:
        # Of several ranks, one whose states were in memory has nothing to leave when another dies.
        if world_size == 1 or "found nothing of that run" not in (killed / "resumed0").read_text():
            raise
        shutil.rmtree(killed / "ds_fuyou")
        said = run_to_end(killed, case, world_size, "anew")
    for file in sorted(out.iterdir()):
        expected, found = (torch.load(folder / file.name, weights_only=False) for folder in (undisturbed, out))
        assert differences(expected, found) == [], file.name
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_has_left_memory_again_is_gone_on_from(world_size: int, tmp_path: Path) -> None:
    killed = killed_run(tmp_path / "killed", world_size, (6, "after"), {"1": 0.7, "3": 0.0}, 1 << 30)
    made = recover_checkpoint(sorted(killed.glob("ds_fuyou/*-rank*")), tmp_path / "recovered")
    assert made.global_steps >= 5
    assert made.verified
    said = compare(tmp_path, killed, world_size)
    assert f"going on from step {made.global_steps}, in place" in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kill_before_the_first_step_that_moves_is_committed_leaves_the_one_before(
    world_size: int, tmp_path: Path
) -> None:
    killed = killed_run(tmp_path / "killed", world_size, (3, "before"), {"2": 1.0}, 100_000)
    said = compare(tmp_path, killed, world_size)
    assert "going on from step 2, in place" in said or world_size == 2
    assert "P32 and moments were in host memory" not in said or world_size == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_amid_a_move_nothing_is_gone_on_from_and_it_is_told(when: str, tmp_path: Path) -> None:
    """Neither from the last record, which lacks states, nor from the one before, which is overwritten."""
    killed = killed_run(tmp_path / "killed", 1, (5, when), {"2": 1.0}, 100_000)
    with pytest.raises(FuyouStateError, match="chunks was in host memory and is lost"):
        recover_checkpoint(sorted(killed.glob("ds_fuyou/*-rank*")), tmp_path / "recovered")
    said = compare(tmp_path, killed, 1)
    assert "P32 and moments were in host memory when it ended" in said
    assert "this run starts from its beginning" in said
