# SPDX-License-Identifier: Apache-2.0
"""Paths on several devices receive bytes by what these were measured to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds_fuyou.ds_json import load_activation
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.zero.run import striping
from ds_fuyou.zero.run.striping import measured_weights, path_weights


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    measured_weights.cache_clear()
    yield
    measured_weights.cache_clear()


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, ...]:
    made = tmp_path / "first", tmp_path / "second"
    for path in made:
        path.mkdir()
    return tuple(map(str, made))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory is on a device of its own."""
    monkeypatch.setattr(striping, "probe_path", lambda path: replace(probe_path(path), device=str(path)))


def refuse(io: object, path: Path) -> tuple[float, float]:
    raise FuyouStorageError(28, "no space", str(path))


def test_one_path_or_one_device_is_not_measured(paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striping, "path_rates", refuse)
    assert measured_weights(paths[:1], "auto") is None
    assert measured_weights(paths, "auto") is None


@pytest.mark.usefixtures("devices")
def test_a_real_measurement_leaves_nothing(paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    real = striping.path_rates

    def noted(io: object, path: Path) -> tuple[float, float]:
        found.append(real(io, path))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(striping, "path_rates", noted)
    measured_weights(paths, "auto")
    assert len(found) == 2
    assert all(rate > 0 for rates in found for rate in rates)
    assert not any(list(Path(path).iterdir()) for path in paths)


@pytest.mark.usefixtures("devices")
def test_weights_are_those_of_as_many_reads_as_writes(paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {paths[0]: (1e9, 3e9), paths[1]: (6e9, 6e9)}
    monkeypatch.setattr(striping, "path_rates", lambda io, path: rates[str(path)])
    told: list[str] = []
    monkeypatch.setattr(striping, "log_once", lambda level, message: told.append(message))
    assert measured_weights(paths, "auto") == (1.5e9, 6e9)
    assert f"{paths[0]} 20 % (1.50 GB/s), {paths[1]} 80 %" in told[0]
    rates.clear()  # a second question measures nothing
    assert measured_weights(paths, "auto") == (1.5e9, 6e9)


@pytest.mark.usefixtures("devices")
def test_nearly_alike_and_unmeasurable_are_alike(paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        striping, "path_rates", lambda io, path: (1e9, 1e9) if str(path) == paths[0] else (1.2e9, 1.2e9)
    )
    assert measured_weights(paths, "auto") is None
    measured_weights.cache_clear()
    monkeypatch.setattr(striping, "path_rates", refuse)
    assert measured_weights(paths, "auto") is None


@pytest.mark.usefixtures("devices")
def test_shares_of_the_block_are_not_measured(paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striping, "path_rates", refuse)
    block = {"nvme_path": list(paths), "plan": {"shares": [1, 2]}}
    activation = load_activation({"zero_optimization": {"stage": 3}, "fuyou": block})
    assert activation is not None
    assert path_weights(activation) == (1.0, 2.0)
