# SPDX-License-Identifier: Apache-2.0
"""A run of three steps on storage in two paths that kills itself: ``PATH PATH SHARE SLOTS END``.

Its parameters lie across chunks, one of them is a scalar. It continues one of five steps. ``END``: "early" before
anything is written, "late" after the third commit, "loading" while the states are replaced after it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from ds_fuyou.checkpoint.state_files import contents_of
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.placement import regions_for
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.storage.store import RunIdentity, SlotStore

HYPERS = (GroupHyper(1e-2, (0.9, 0.999), 1e-8, 0.0, True),) * 2
SHAPES = [(CUT_ELEMENTS, 3), (), (50, 7)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(paths: list[Path], share: float, slots: int, end: str) -> None:
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    groups = [[("a", "a", numels[0], 0), ("b", "b", numels[1], 1)], [("c", "c", numels[2], 2)]]
    layout = build_layout(groups, LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS))
    options = CoreOptions(
        residency=ChunkResidency.of_shares(layout, 1.0, share, 1.0),
        num_slots=slots,
        overlap=Overlap.NONE,
        clip_policy="defer",
        param_dtype=torch.bfloat16,
        grad_dtype=torch.bfloat16,
        staging_bytes=1 << 20,
        num_update_threads=1,
        io=IoSettings(engine="threads"),
    )
    store = SlotStore.create(paths, regions_for(layout, options, 2, slots), RunIdentity("m", 0, 1, "run"))
    if end == "early":
        die()
    store.describe(contents_of(layout, SHAPES))
    core = OutOfCoreOptimizer(layout, options, OptimizerKind("adam", ("exp_avg", "exp_avg_sq")), HYPERS, store)
    core.initialize(lambda span: torch.linspace(-1, 1, span.numel).bfloat16(), lambda count: None)
    core.clock.replay([(5, [hyper.betas for hyper in HYPERS])])
    for _ in range(3):
        for span in layout.params:
            core.add_gradients([(span, torch.linspace(1, 2, span.numel).bfloat16())])
        core.apply(HYPERS, 1.0, expected_multiplier=1.0)
    if end == "loading":
        core.states.write(0, [torch.full((layout.chunks[0].numel,), 7.0)] * 3)
        die()
    core.commits.stop()
    torch.save([core.states.read_param(span, 0) for span in layout.params], paths[0] / "expected")
    die()


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:3]], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
