# SPDX-License-Identifier: Apache-2.0
"""fp32 weights out of state files that a killed run left, and what cannot be recovered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_fuyou.checkpoint.recovery import recover
from ds_fuyou.errors import FuyouStateError, FuyouStorageError

# Two paths; parameters that lie across chunks, one of them scalar; step n adds 1 to every element.
RUN = """
import os, signal, sys
from pathlib import Path
import torch
from ds_fuyou.checkpoint.recovery import contents_of
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS as K, LayoutLimits, build_layout
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.placement import regions_for
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.storage.store import RunIdentity, SlotStore

paths, share, slots, end = [Path(sys.argv[1]), Path(sys.argv[2])], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
hypers = (GroupHyper(1e-2, (0.9, 0.999), 1e-8, 0.0, True),)
shapes = [(K, 3), (), (50, 7)]
numels = [torch.Size(shape).numel() for shape in shapes]
groups = [[("a", "a", numels[0], 0), ("b", "b", numels[1], 1)], [("c", "c", numels[2], 2)]]
layout = build_layout(groups, LayoutLimits(max_elements=K, min_elements=K))
options = CoreOptions(ChunkResidency.by_deadline(layout, 1.0, share, 1.0), slots, Overlap.NONE, "defer",
                      torch.bfloat16, torch.bfloat16, 1 << 20, 1, IoSettings(engine="threads"))
store = SlotStore.create(paths, regions_for(layout, options, 2, slots), RunIdentity("m", 0, 1, "run"))
if end == "early":
    os.kill(os.getpid(), signal.SIGKILL)
store.describe(contents_of(layout, shapes))
core = OutOfCoreOptimizer(layout, options, OptimizerKind("adam", ("exp_avg", "exp_avg_sq")), hypers * 2, store)
core.initialize(lambda span: torch.linspace(-1, 1, span.numel).bfloat16(), lambda count: None)
for step in range(3):
    for span in layout.params:
        core.add_gradient(span, torch.linspace(1, 2, span.numel).bfloat16())
        core.complete_gradient(span)
    core.apply(hypers * 2, 1.0, expected_multiplier=1.0)
core._committer.stop()
torch.save([core.states.read_param(span, 0) for span in layout.params], paths[0] / "expected")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_run(tmp_path: Path, share: float = 0.0, slots: int = 2, end: str = "late") -> list[Path]:
    """State directories that a killed process left."""
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    command = [sys.executable, "-c", RUN, *map(str, paths), str(share), str(slots), end]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == -9, ran.stderr[-3000:]
    return [path / "ds_fuyou" / "run-rank0" for path in paths]


def test_weights_of_the_last_committed_step_of_a_killed_run(tmp_path: Path) -> None:
    """One of its directories is enough; the files stay as they are."""
    directories = killed_run(tmp_path)
    found = recover(directories[1:], tmp_path / "weights.pt")
    assert (found.step, found.num_params) == (3, 3)
    recovered = torch.load(tmp_path / "weights.pt")
    assert {name: tuple(values.shape) for name, values in recovered.items()} == {"a": (2048, 3), "b": (), "c": (50, 7)}
    expected = torch.load(tmp_path / "first" / "expected")
    for values, wanted in zip(recovered.values(), expected, strict=True):
        assert torch.equal(values.view(-1), wanted)
    assert all((directory / "data").exists() for directory in directories)
    assert [path.name for path in tmp_path.glob("*weights*")] == ["weights.pt"]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"share": 0.7}, r"P32 of 2 of 5 chunks was in host memory and is lost.*optimizer.tier"),
        ({"slots": 1}, "one slot a chunk, so its files may be a mixture"),
        ({"end": "early"}, "nothing says what the state holds"),
    ],
)
def test_what_cannot_be_recovered_is_said(run: dict, said: str, tmp_path: Path) -> None:
    directories = killed_run(tmp_path, **run)
    with pytest.raises((FuyouStateError, FuyouStorageError), match=said):
        recover(directories, tmp_path / "weights.pt")
    assert not (tmp_path / "weights.pt").exists()


def test_a_directory_that_is_no_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FuyouStorageError, match="a state directory must be PATH/ds_fuyou"):
        recover([tmp_path], tmp_path / "weights.pt")
    (tmp_path / "ds_fuyou").mkdir(mode=0o700)
    with pytest.raises(FuyouStorageError, match="must exist and be readable"):
        recover([tmp_path / "ds_fuyou" / "run-rank0"], tmp_path / "weights.pt")
