# SPDX-License-Identifier: Apache-2.0
"""Scripts that do more than train: ``WHAT FOLDER``. Each prints what it found as it goes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.utils import safe_get_full_grad, safe_get_local_fp32_param

from ds_fuyou.errors import FuyouStateError
from tests.harness.models import build_model, make_batch
from tests.harness.runner import ds_config


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def trained(folder: str, tier: str = "nvme", **block: Any) -> Any:
    config = ds_config() | {"fuyou": {"nvme_path": folder, "optimizer": {"tier": tier}, **block}}
    module = build_model({})
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    for index in range(3):
        engine.backward(engine(**make_batch({}, index, 0)))
        engine.step()
    return engine


def saves_at_exit(folder: str) -> None:
    """Its function is registered before anything of the engine's is."""
    engines: list[Any] = []

    def save() -> None:
        engines[0].save_checkpoint(f"{folder}/saved")
        say("SAVED", *sorted(path.name for path in Path(folder, "saved").iterdir()))

    atexit.register(save)
    engines.append(trained(folder))


def forks(folder: str) -> None:
    """Children that look at what their parent has, or end as scripts do."""
    for tier in ("nvme", "cpu"):
        engine = trained(folder, tier, trace=f"{tier}.json")
        os.chdir(folder)
        param = next(engine.module.parameters())
        engine.backward(engine(**make_batch({}, 3, 0)))
        for number in range(4):
            child = os.fork()
            if child == 0:
                if number == 0:
                    sys.exit(0)
                found = []
                state_dict = engine.optimizer.state_dict
                for read, of in ((safe_get_local_fp32_param, [param]), (safe_get_full_grad, [param]), (state_dict, [])):
                    try:
                        found.append(type(read(*of)).__name__)
                    except FuyouStateError as error:
                        found.append("forked" if "forked" in str(error) else str(error))
                say("CHILD", tier, *found)
                os._exit(0)
            os.waitpid(child, 0)
        engine.step()
        say("PARENT", tier, float(safe_get_local_fp32_param(param).sum()) != 0)
        engine.destroy()


def trains_in_a_child(folder: str, status: str) -> None:
    """As notebooks' launchers do."""

    def train() -> None:
        trained(folder, trace=f"{folder}/trace.json")
        sys.exit(int(status))

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
    say("ENDED", process.exitcode)


def trains_without_stderr(folder: str, kind: str) -> None:
    """A log on a disk that is full, a reader that has gone, nothing open."""
    if kind == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    elif kind == "pipe":
        read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        os.close(read)
    else:
        os.close(2)
    engine = trained(folder)
    engine.destroy()
    say("TRAINED", engine.global_steps)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
