# SPDX-License-Identifier: Apache-2.0
"""Engines that cannot be built, and one that cannot read what it leaves: ``PATH``. Prints what is left each time."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_fuyou.ops.core import load_core
from ds_fuyou.storage.lifetime import open_stores
from ds_fuyou.zero.saving.training_state import TrainingState
from tests.harness.killed_ranks import MODEL, build
from tests.harness.models import make_batch

CASE = {"block": {"parameters": {"tier": "nvme"}, "resume": "auto"}}


@contextlib.contextmanager
def failing(owner: Any, name: str) -> Iterator[None]:
    with mock.patch.object(owner, name, side_effect=OSError(errno.EMFILE, "not today")):
        yield


def try_to_build(path: str, what: str) -> None:
    try:
        build(path, CASE, 0)
    except OSError as error:
        tell(path, f"{what} failed with {error.strerror!r}")
    else:
        raise RuntimeError(f"{what} did not fail")


def tell(path: str, what: str) -> None:
    left = os.listdir(f"{path}/ds_fuyou") if os.path.exists(f"{path}/ds_fuyou") else []
    sys.stdout.write(f"{what}: {len(open_stores())} open, {len(left)} left\n")
    sys.stdout.flush()


def main(path: str) -> None:
    deepspeed.init_distributed("gloo")
    with failing(DeepSpeedZeroOptimizer_Stage3, "create_reduce_and_remove_grad_hooks"):
        try_to_build(path, "hooks")
    engine = build(path, CASE, 0)
    for step in range(2):
        engine.backward(engine(**make_batch(MODEL, step, 0)))
        engine.step()
    engine.optimizer.rank_state.core.store.keep_because("it is gone on from below")
    engine.destroy()
    with failing(TrainingState, "put_back"):
        try_to_build(path, "putting back")
    engine = build(path, CASE, 0)
    tell(path, f"resumed after step {engine.global_steps}")
    core = load_core()
    engine.optimizer.rank_state.core.io.engine.add_fault(core.IoKind.READ, core.IoFaultEffect.ERROR, error=errno.EIO)
    engine.destroy()
    tell(path, "destroyed")


if __name__ == "__main__":
    main(sys.argv[1])
