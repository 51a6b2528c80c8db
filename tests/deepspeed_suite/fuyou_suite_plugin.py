# SPDX-License-Identifier: Apache-2.0
"""pytest plugin for DeepSpeed's own tests: block in every test process, one JSON line a test in a results file.

Environment, beside that of fuyou_suite_inject: ``FUYOU_SUITE_RESULTS`` (file; tests it holds already are not run again)
and ``FUYOU_SUITE_ONLY`` (optional file with the node ids to run).
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import re
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


STAGE_3 = re.compile(
    r"stage\W{1,6}3\b|\bstage\b.{0,30}\b3\b|zero_stage|ZeroStageEnum|config\w*\([^)]*\b3\b|zero[_-]?3", re.IGNORECASE
)


def without_stage_3(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests of which neither the source nor anything in their module that is no test says a stage that can be 3."""
    by_module: dict[Any, dict[Any, list[pytest.Item]]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            by_module.setdefault(item.module, {}).setdefault(item.cls or item.function, []).append(item)
    found: set[pytest.Item] = set()
    for module, tests in by_module.items():
        rest, texts = inspect.getsource(module), {test: inspect.getsource(test) for test in tests}
        for text in texts.values():
            rest = rest.replace(text, "")
        if not STAGE_3.search(rest):
            found.update(item for test, text in texts.items() if not STAGE_3.search(text) for item in tests[test])
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The checkout's conftest puts its root before the installed packages: processes of tests would take its DeepSpeed.
    sys.path[:] = [entry for entry in sys.path if Path(entry) != config.rootpath.parent]
    done = {json.loads(line)["test"] for line in lines_of(RESULTS)}
    only = os.environ.get("FUYOU_SUITE_ONLY")
    wanted = set(lines_of(Path(only))) if only else None
    others = without_stage_3(items)
    items_here = [item for item in items if item not in others and not other_stage(item)]
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
    line = {"test": item.nodeid, "outcome": outcome, "notes": notes, "at": place_of(text), "text": text[-3000:]}
    with open(RESULTS, "a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")


def place_of(text: str) -> str:
    """Of what failed in a process of the test: the last line there that is the test's, and the exception."""
    remote = text.partition("The above exception was the direct cause")[0]
    found = re.findall(r'File ".*?/(unit/[^"]+)", line (\d+), in (\w+)\n(?:E\s+)?\s*(.*)', remote)
    places = [place for place in found if place[0] != "unit/common.py"]
    raised = re.findall(r"^(?:E\s+)?([\w.]+(?:Error|Exception|Failed)\b.*)$", remote, re.MULTILINE)
    if not places:
        return raised[-1] if raised else ""
    file, line, _, code = places[-1]
    return f"{file}:{line} `{code}`: {raised[-1] if raised else ''}"
