# SPDX-License-Identifier: Apache-2.0
"""Settings of every test run: the CPU accelerator, and a process that tests may reconfigure."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.cpu_info import look_up, use_known
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port, remove_shared_buffers

# OpenMP's threads look at this when torch is first imported, and so do those of every process that a test starts: they
# wait asleep. Spinning, as is their habit, they keep the cores from the other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# DeepSpeed looks at this when it is first imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("MAX_JOBS", "2")
# Profiles of runs are not kept beyond a test.
_PROFILES = tempfile.TemporaryDirectory(prefix="ds_fuyou-tests-")
os.environ["DS_FUYOU_PROFILES"] = _PROFILES.name
look_up()
use_known()
# A shell that runs us in the background ignores this signal, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: tests that collect garbage need not look at half a million objects each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run where DeepSpeed's accelerator is one (``DS_ACCELERATOR=cuda``), or where the stand-in
    device is; those marked ``standin`` there alone. tests/device/test_standin.py starts such processes.
    """
    away = {"standin"} | ({"gpu"} if os.environ["DS_ACCELERATOR"] == "cpu" else set())
    away = set() if "STANDIN" in os.environ else away
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in away)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


if "STANDIN" in os.environ:
    from tests.device.accelerator import install_from

    install_from(os.environ)
elif os.environ["DS_ACCELERATOR"] == "cuda":
    from tests.harness.gpu import repeatable

    repeatable()


@pytest.fixture(scope="module")
def only_rank() -> Iterator[None]:
    """This process is the only rank of a group."""
    import deepspeed
    import torch

    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (rank | {"MASTER_PORT": str(free_port())}).items():
            patch.setenv(name, value)
        patch.setattr("deepspeed.utils.groups._WORLD_GROUP", None)  # of a group that was destroyed
        patch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # which engines replace, and leave so
        deepspeed.init_distributed("gloo")
        yield
        torch.distributed.destroy_process_group()


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher says how many ranks this machine has."""
    sizes = (
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "SLURM_STEP_TASKS_PER_NODE",
    )
    for name in (*sizes, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_python() -> RunPython:
    """Runs ``python -c code`` (or a list of arguments) in a fresh interpreter, with a time limit."""

    def run(code: str | list[str], timeout: float = HANG_SECS, **environment: str) -> subprocess.CompletedProcess[str]:
        arguments = ["-c", code] if isinstance(code, str) else code
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **environment},
        )

    return run


@pytest.fixture(autouse=True)
def shared_buffers() -> Iterator[None]:
    """After each test, what its ranks left in shared memory goes."""
    yield
    remove_shared_buffers()


@pytest.fixture(autouse=True)
def profiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs of this test keep their profiles: a directory of its own, made when one is kept."""
    directory = Path(_PROFILES.name) / f"{abs(hash(request.node.nodeid)):x}"
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(directory))
    return directory


@pytest.fixture(autouse=True)
def _forget_what_was_told() -> Iterator[None]:
    """Messages that are logged once a process are logged once a test."""
    from ds_fuyou import log

    log._told.clear()
    yield
    log._told.clear()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """Everything the package's logger said so far, as one text."""
    from ds_fuyou.log import get_logger

    logger = get_logger()
    logger.addHandler(caplog.handler)
    yield lambda: "\n".join(record.getMessage() for record in caplog.records)
    logger.removeHandler(caplog.handler)
