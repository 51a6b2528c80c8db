# SPDX-License-Identifier: Apache-2.0
"""pytest plugin for DeepSpeed's own tests: block in every test process, one JSON line a test in a results file.

Environment, beside that of fuyou_suite_inject: ``FUYOU_SUITE_RESULTS`` (file; tests it holds already are not run again)
and ``FUYOU_SUITE_ONLY`` (optional file with the node ids to run).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuyou_suite_inject as inject
import pytest

RESULTS = Path(os.environ["FUYOU_SUITE_RESULTS"])


def pytest_configure() -> None:
    # Tests run in processes of a fork server: it imports the module that injects, they inherit it.
    multiprocessing.set_forkserver_preload(["fuyou_suite_inject"])


def other_stage(item: pytest.Item) -> bool:
    """Whether a parameter of the test says that it is for another stage."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return any(name in ("zero_stage", "stage") and value in (0, 1, 2) for name, value in params.items())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The checkout's conftest puts its root before the installed packages: processes of tests would take its DeepSpeed.
    sys.path[:] = [entry for entry in sys.path if Path(entry) != config.rootpath.parent]
    done = {json.loads(line)["test"] for line in lines_of(RESULTS)}
    only = os.environ.get("FUYOU_SUITE_ONLY")
    wanted = set(lines_of(Path(only))) if only else None
    items_here = [item for item in items if not other_stage(item)]
    kept = [item for item in items_here if item.nodeid not in done and (wanted is None or item.nodeid in wanted)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    RESULTS.with_name(RESULTS.name + ".left").write_text(str(len(kept)), encoding="utf-8")


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that takes the whole session down leaves its first line: "died"."""
    Path(inject.RECORD).write_text("", encoding="utf-8")
    write(item, "died", "")
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        write(item, report.outcome, report.longreprtext)


def write(item: pytest.Item, outcome: str, text: str) -> None:
    notes = sorted(set(lines_of(Path(inject.RECORD))))
    if outcome == "failed" and "FuyouConfigError" in text:
        outcome = "refused"
    line = {"test": item.nodeid, "outcome": outcome, "notes": notes, "text": text[-3000:]}
    with open(RESULTS, "a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")
