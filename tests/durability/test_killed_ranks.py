# SPDX-License-Identifier: Apache-2.0
"""Whichever ranks are killed whenever, one step is whole on all of them, and it is the last one or the one before."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_fuyou.checkpoint.recovery import recover_weights
from tests.durability.runs import kill_some, launch, run_to_end, steps_in
from tests.harness.forked import finish

STEPS = 6
CLIPPED = {"gradient_clipping": 1.0}
SPECULATING = {"optimizer": {"tier": "nvme", "clip_policy": "speculate"}}
"""Updates begin, and write, in backward of every step."""


Reference = Callable[[int], list[dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """fp32 weights after every step of an undisturbed run, by number of ranks."""
    found: dict[int, list[dict[str, torch.Tensor]]] = {}

    def of(world_size: int) -> list[dict[str, torch.Tensor]]:
        if world_size not in found:
            path = tmp_path_factory.mktemp("reference")
            run_to_end(path, {"steps": STEPS, "out": str(path), "config": CLIPPED}, world_size)
            found[world_size] = [torch.load(path / str(step)) for step in range(1, STEPS + 1)]
        return found[world_size]

    return of


def check(path: Path, logs: list[Path], expected: list[dict[str, torch.Tensor]]) -> int:
    """What was recovered equals the undisturbed run at that step, which is returned."""
    returned = steps_in(logs)
    directories = sorted(path.glob("ds_fuyou/*-rank*"))
    assert len(directories) == len(logs), logs[0].read_text()[-3000:]
    step = recover_weights(directories, path / "weights.pt").step
    assert returned - 1 <= step <= returned + 1, (step, returned)
    weights = torch.load(path / "weights.pt")
    if step:
        assert {n for n, values in weights.items() if not torch.equal(values, expected[step - 1][n])} == set()
    return step


@pytest.mark.parametrize(
    ("die", "slow", "least"),
    [
        ({1: [3, "before"]}, {}, 2),
        ({0: [3, "after"]}, {}, 2),
        ({0: [3, "all"]}, {}, 3),
        ({1: [4, "late"]}, {}, 3),  # the other one has committed it, and must not overwrite the one before
        ({0: [3, "late"], 1: [3, "after"]}, {}, 2),
        ({0: [3, "before"], 1: [3, "after"], 2: [3, "late"]}, {}, 2),
        ({2: [4, "late"]}, {0: 4e6}, 3),
    ],
)
def test_ranks_that_die_between_two_commits(
    die: dict, slow: dict, least: int, reference: Reference, tmp_path: Path
) -> None:
    """Ranks that are not killed meet the end of the others as an exception."""
    world_size = 3 if 2 in die else 2
    case = {"steps": STEPS, "die": die, "slow": slow, "config": CLIPPED, "block": SPECULATING}
    processes, logs = launch(tmp_path, case, world_size)
    finish(processes)
    for rank, process in enumerate(processes):
        assert process.exitcode == -9 or rank not in die, logs[rank].read_text()[-3000:]
        assert process.exitcode != 0
    step = check(tmp_path, logs, reference(world_size))
    assert least <= step <= least + 1


@pytest.mark.parametrize("seed", range(4))
def test_random_ranks_killed_at_random(seed: int, reference: Reference, tmp_path: Path) -> None:
    """One is slow, so that commits lie apart. The rest is killed a moment later, as launchers do."""
    chance = random.Random(seed)
    world_size = chance.choice([2, 3])
    case = {"steps": STEPS, "slow": {chance.randrange(world_size): 3e6}, "config": CLIPPED}
    case["block"] = chance.choice([SPECULATING, {}])
    processes, logs = launch(tmp_path, case, world_size)
    kill_some(chance, processes, logs, chance.randint(1, STEPS - 3))
    check(tmp_path, logs, reference(world_size))
