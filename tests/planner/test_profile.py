# SPDX-License-Identifier: Apache-2.0
"""A kept profile comes back as it was, and only for the machine and model it was made for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ds_fuyou.planner import profile
from ds_fuyou.planner.profile import (
    SCHEMA,
    OperatorCost,
    forget_profile,
    load_profile,
    machine_fingerprint,
    profile_directory,
    save_profile,
)
from ds_fuyou.state_layout import BF16, INT8, SPLIT, WHOLE, StateLayout, layout_of
from tests.planner.profiles import ACTIVATIONS, PROFILE


def test_what_is_kept_comes_back(profiles: Path) -> None:
    assert load_profile(PROFILE.machine, PROFILE.model) is None
    path = save_profile(PROFILE)
    assert path is not None
    assert path.parent == profiles
    assert load_profile(PROFILE.machine, PROFILE.model) == PROFILE
    assert load_profile(PROFILE.machine, "another") is None
    bare = replace(PROFILE, storage=None, blocks=())
    save_profile(bare)
    assert load_profile(PROFILE.machine, PROFILE.model) == bare
    block = replace(PROFILE.blocks[0], operators=(OperatorCost("up/mm", 4e9, 400.0, True, ("aten.mm.default", 1)),))
    decided = replace(PROFILE, activations=ACTIVATIONS, blocks=(block,))
    save_profile(decided)
    assert load_profile(PROFILE.machine, PROFILE.model) == decided
    assert (bare.room, decided.room) == (None, ACTIVATIONS.room)
    assert [file.name for file in profiles.iterdir()] == [path.name]
    assert [forget_profile(PROFILE.machine, name) for name in (PROFILE.model, PROFILE.model, "another")] == [
        True,
        False,
        False,
    ]
    assert load_profile(PROFILE.machine, PROFILE.model) is None


@pytest.mark.parametrize("layout", [layout_of(SPLIT, 2), layout_of(WHOLE, 1, INT8), layout_of(BF16, 2, BF16)])
def test_every_layout_comes_back(profiles: Path, layout: StateLayout) -> None:
    kept = replace(PROFILE, given=replace(PROFILE.given, layout=layout))
    save_profile(kept)
    assert load_profile(PROFILE.machine, PROFILE.model) == kept


def test_old_profiles_go_and_nothing_else(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MOST_KEPT", 3)
    profiles.mkdir(exist_ok=True)
    others = [profiles / f"experiment-{number}.json" for number in range(5)]  # of somebody who keeps more there
    for other in others:
        other.write_text('{"schema": "mine"}')
        os.utime(other, (0, 0))
    for number in range(5):
        path = save_profile(replace(PROFILE, model=f"model{number}"))
        assert path is not None
        os.utime(path, (number, number))
    assert load_profile(PROFILE.machine, "model2") is not None  # used now
    save_profile(replace(PROFILE, model="new"))
    left = {file.name.partition("-")[2] for file in {*profiles.iterdir()} - {*others}}
    assert left == {"model2.json", "model4.json", "new.json"}
    assert all(other.exists() for other in others)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace(SCHEMA, "ds_fuyou.profile/0"),
        lambda text: json.dumps({**json.loads(text), "update_rate": 0}),
        lambda text: json.dumps({**json.loads(text), "forward_secs": "1"}),
        lambda text: json.dumps({**json.loads(text), "machine": "x"}),
        lambda text: json.dumps({**json.loads(text), "activations": {**asdict(ACTIVATIONS), "beside_bytes": -1.0}}),
        lambda text: json.dumps({**json.loads(text), "activations": {**asdict(ACTIVATIONS), "once": 1}}),
        lambda text: text.replace('"call": null', '"call": ["aten.mm.default"]'),
        lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != "blocks"}),
    ],
    ids=[
        "cut short",
        "no object",
        "another schema",
        "no rate",
        "text",
        "another machine",
        "a size",
        "no names",
        "no call",
        "a key lacks",
    ],
)
def test_what_is_damaged_is_told_and_ignored(damage: Callable[[str], str], told: Callable[[], str]) -> None:
    path = save_profile(PROFILE)
    assert path is not None
    path.write_text(damage(path.read_text()))
    assert load_profile(PROFILE.machine, PROFILE.model) is None
    assert f"{path} is ignored and measured again" in told()


def test_where_profiles_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: Callable[[], str]) -> None:
    monkeypatch.delenv("DS_FUYOU_PROFILES")
    monkeypatch.delenv("FUYOU_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert profile_directory() == tmp_path / "xdg/ds_fuyou/profiles"
    monkeypatch.setenv("FUYOU_CACHE", str(tmp_path / "own"))
    assert profile_directory() == tmp_path / "own/profiles"
    monkeypatch.setenv("DS_FUYOU_PROFILES", "off")
    assert profile_directory() is None
    assert save_profile(PROFILE) is None
    assert load_profile(PROFILE.machine, PROFILE.model) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path / "file"))
    assert save_profile(PROFILE) is None
    assert "could not be kept for the next run" in told()


def test_another_disk_or_device_is_another_machine() -> None:
    names = {machine_fingerprint(*parts) for parts in (("cpu", ["8:1"], 1), ("cpu", ["8:2"], 1), ("gpu", ["8:1"], 1))}
    assert len(names) == 3
    assert machine_fingerprint("cpu", ["8:1"], 1) in names
