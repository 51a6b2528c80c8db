# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from ds_fuyou import compat
from ds_fuyou.errors import FuyouCompatError


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that other versions are installed."""

    def pretend(deepspeed: str = compat.TESTED[-1], torch: str = "2.9.0+cpu") -> None:
        versions = {"deepspeed": deepspeed, "torch": torch}
        monkeypatch.setattr(compat, "installed_version", versions.__getitem__)

    return pretend


@pytest.mark.compat
def test_every_required_name_is_there() -> None:
    assert compat.problems() == []
    compat.check()


def test_each_kind_of_problem_is_described() -> None:
    lines = compat.problems(
        (
            compat.RequiredName("no_such_module", "x", (), "a"),
            compat.RequiredName("os.path", "no_such_name", (), "b"),
            compat.RequiredName("os.path", "join.deeper", (), "c"),
            compat.RequiredName("os.path", "join", ("a", "q", "r"), "d"),
            compat.RequiredName("os.path", "join", ("a",), "e"),
        )
    )
    assert len(lines) == 4
    assert "cannot be imported" in lines[0]
    assert lines[1] == "os.path.no_such_name does not exist (needed for b)"
    assert lines[2] == "os.path.join.deeper does not exist (needed for c)"
    assert lines[3] == "os.path.join lacks the parameters q, r (needed for d)"


def test_a_missing_name_says_which_versions_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "REQUIRED", (compat.RequiredName("os.path", "gone", (), "a test"),))
    with pytest.raises(FuyouCompatError, match=r"os\.path\.gone does not exist.*0\.18\.9 \.\. 0\.19\.8"):
        compat.check()


def test_too_old(version: Callable[..., None]) -> None:
    version(deepspeed="0.17.3")
    with pytest.raises(FuyouCompatError, match=r"DeepSpeed 0\.17\.3: DeepSpeed must be 0\.18\.9 or newer"):
        compat.check()
    version(torch="2.6.1")
    with pytest.raises(FuyouCompatError, match=r"torch is 2\.6\.1, must be 2\.7 or newer"):
        compat.check()


def test_untested_versions_are_one_warning(version: Callable[..., None], told: Callable[[], str]) -> None:
    version(deepspeed="0.18.9+abc123")
    compat.check()
    assert told() == ""
    version(deepspeed="0.19.5")
    compat.check()
    compat.check()
    assert told().count("DeepSpeed 0.19.5 is untested") == 1


def test_every_entry_says_what_for() -> None:
    assert all(name.why and name.module.startswith("deepspeed") for name in compat.REQUIRED)
