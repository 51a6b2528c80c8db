# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.config import FuyouConfig, PlanOverrides, load_block, misspelt_block_keys, parse_bytes
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.optimizer.layout import LayoutLimits, build_layout


def block(**settings: Any) -> FuyouConfig:
    config = load_block({"fuyou": {"enabled": True, **settings}})
    assert config is not None
    return config


@pytest.mark.parametrize("ds_config", [{}, {"fuyou": None}, {"fuyou": {"enabled": False, "no_such_key": 1}}])
def test_absent_or_off_is_none(ds_config: dict[str, Any]) -> None:
    assert load_block(ds_config) is None


def test_an_empty_block_is_on() -> None:
    config = load_block({"fuyou": {}})
    assert config is not None
    assert config.enabled


def test_documented_defaults() -> None:
    config = block()
    assert (config.parameters.tier, config.optimizer.tier, config.gradients.tier) == ("auto", "auto", "auto")
    assert config.optimizer.overlap == "backward_and_forward"
    assert config.checksum is True
    assert config.keep_state is False
    assert config.plan is None


def test_auto_is_accepted_for_every_key() -> None:
    sections = {}
    for key, field in FuyouConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        sections[key] = dict.fromkeys(inner, "auto") if inner else "auto"
    resumes = block(resume="auto")  # a value of its own here
    assert resumes != block()
    assert load_block({"fuyou": sections}) == resumes
    assert load_block({"fuyou": dict.fromkeys(FuyouConfig.model_fields, "auto")}) == resumes
    assert block(plan=dict.fromkeys(PlanOverrides.model_fields, "auto")).plan == PlanOverrides()


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        (1, 1),
        (2.0e9, 2 * 10**9),
        ("64GB", 64 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("7m", 7 * 10**6),
        ("9b", 9),
        ("1.1GiB", 1181116006),
    ],
)
def test_byte_counts(given: object, num_bytes: int) -> None:
    assert parse_bytes(given) == num_bytes


@pytest.mark.parametrize("key", ["dram_budget_bytes", "gpu_budget_bytes", "nvme_budget_bytes"])
@pytest.mark.parametrize(
    ("given", "said"),
    [(24, '; 24 bytes? Write "24GiB"'), (4095, '; 4095 bytes? Write "4095GiB"'), ("512B", ""), ("4KB", "")],
)
def test_a_budget_that_was_meant_in_other_units_is_refused(key: str, given: object, said: str) -> None:
    with pytest.raises(FuyouConfigError, match=re.escape(f"fuyou.{key}: must be at least 4096 bytes{said}; found")):
        block(**{key: given})
    assert getattr(block(**{key: 4096}), key) == 4096


@pytest.mark.parametrize("given", [0, -1, 0.5, float("inf"), float("nan"), True, "", "GB", "5 parsec", "-3GB", [1], {}])
def test_wrong_byte_counts(given: object) -> None:
    with pytest.raises(FuyouConfigError, match=r"fuyou\.dram_budget_bytes: must be .*found"):
        block(dram_budget_bytes=given)


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"plan": {"queue_depth": 4097}}, r"fuyou\.plan\.queue_depth: must be less than or equal to 4096; found 4097"),
        ({"plan": {"block_bytes": 512}}, r"fuyou\.plan\.block_bytes: must be a multiple of 4096, 1 GiB at most"),
        ({"plan": {"block_bytes": 2**31}}, r"fuyou\.plan\.block_bytes: must be a multiple of 4096, 1 GiB at most"),
        ({"plan": {"num_threads": 2**31}}, r"fuyou\.plan\.num_threads: must be less than or equal to 4096"),
        ({"plan": {"chunk_bytes": 4095}}, r"fuyou\.plan\.chunk_bytes: must be at least 4096 bytes"),
        ({"plan": {"chunk_bytes": 10**30}}, r"fuyou\.plan\.chunk_bytes: must be below 4 EiB"),
        ({"plan": {"chunk_bytes": 2**33 + 1}}, r"fuyou\.plan\.chunk_bytes: must be 8 GiB at most; .* leaving it out"),
        ({"plan": {"chunk_bytes": "16GiB"}}, r"fuyou\.plan\.chunk_bytes: must be 8 GiB at most; .* found '16GiB'"),
        ({"plan": {"shares": [10**30]}}, r"fuyou\.plan\.shares\[0\]: must be less than or equal to 1000000000"),
        ({"dram_budget_bytes": 10**5000}, r"fuyou\.dram_budget_bytes: must be below 4 EiB; found \.\.\. \(int\)"),
        ({"nvme_budget_bytes": "9" * 400 + ".5GB"}, r"fuyou\.nvme_budget_bytes: must be below 4 EiB"),
        ({"nvme_path": "/a\0b"}, r"fuyou\.nvme_path: must be made of printable characters"),
        ({"nvme_path": ["/a", "/\udc80"]}, r"fuyou\.nvme_path: must be made of printable characters"),
        ({"trace": "a\0"}, r"fuyou\.trace: must be made of printable characters"),
        ({"nvme_path": DEEP}, r"fuyou\.nvme_path: must be a path"),
        ({"plan": DEEP}, r"fuyou\.plan: must be an object"),
        ({"trace": ["x" * 10_000]}, r"fuyou\.trace: must be a valid string; found \['x+\.\.\. \(list\)"),
    ],
)
def test_what_no_machine_can_do_is_refused_by_its_full_key_in_one_short_line(settings: dict, said: str) -> None:
    with pytest.raises(FuyouConfigError, match=said) as caught:
        block(**settings)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_elements_of_the_largest_chunk_have_numbers_of_32_bits() -> None:
    plan = block(plan={"chunk_bytes": "8GiB"}).plan
    assert plan is not None
    assert plan.chunk_bytes is not None
    limits = LayoutLimits(max_elements=plan.chunk_bytes // 4)
    for numel in (2**31 + 1, 2**33 - 1, 2**35 + 12345):
        layout = build_layout([[("w", "w", numel, 0)]], limits)
        assert max(chunk.numel for chunk in layout.chunks) < 2**32


def test_a_plan_nested_without_end_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("[" * 200_000)
    with pytest.raises(FuyouConfigError, match=r"fuyou\.plan \(.*plan\.json\): must be a readable JSON file"):
        block(plan=str(file))


def test_paths_become_a_tuple_of_absolute_paths() -> None:
    assert block(nvme_path="/a/../b").nvme_path == ("/b",)
    assert block(nvme_path=["/a", "/b"]).nvme_path == ("/a", "/b")


def test_paths_may_differ_between_nodes_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISK", "/mnt/a")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CROSS_RANK", "2")
    assert block(nvme_path="$DISK/x").nvme_path == ("/mnt/a/x",)
    assert block(nvme_path="/d/{node}/{rank}-{local_rank}").nvme_path == ("/d/2/3-1",)
    assert block(nvme_path="/d/${RANK}/{host}").nvme_path == (f"/d/3/{socket.gethostname()}",)
    with pytest.raises(FuyouConfigError, match=r"fuyou\.nvme_path: must name .* that are set; not set: NO_SUCH_DISK"):
        block(nvme_path="/d/${NO_SUCH_DISK}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nvme_pth": "/x"}, r'fuyou\.nvme_pth: unknown key; did you mean "fuyou\.nvme_path"'),
        ({"plan": {"residency": {"states": 0.5}}}, r'residency\.states: .* mean "fuyou\.plan\.residency\.optimizer"'),
        ({"NVME_PATH": "/x"}, r'fuyou\.NVME_PATH: unknown key; did you mean "fuyou\.nvme_path"'),
        ({"optimizer": {"overlp": "none"}}, r'fuyou\.optimizer\.overlp: .*"fuyou\.optimizer\.overlap"'),
        ({"zzz": 1}, r"fuyou\.zzz: unknown key; valid keys are enabled, nvme_path"),
        ({"plan": {"chunk_byte": 1}}, r'fuyou\.plan\.chunk_byte: .*"fuyou\.plan\.chunk_bytes"'),
        ({"plan": {"slots": 4}}, r"fuyou\.plan\.slots: must be 1, 2 or 3; found 4 \(int\)"),
        ({"plan": {"num_threads": 0}}, r"fuyou\.plan\.num_threads: must be greater .*found 0"),
        ({"plan": {"shares": [1, 0]}}, r"fuyou\.plan\.shares\[1\]: must be greater"),
        ({"plan": 3}, r"fuyou\.plan: must be an object or the path .*found 3 \(int\)"),
        (
            {"optimizer": {"tier": "ssd"}},
            r"fuyou\.optimizer\.tier: must be 'auto', 'cpu' or 'nvme'; found 'ssd'",
        ),
        ({"optimizer": 3}, r"fuyou\.optimizer: must be an object with any of tier, overlap, .*; found 3 \(int\)"),
        ({"checkpoint": "background"}, r"fuyou\.checkpoint: must be an object with any of save, frozen; found"),
        ({"plan": {"residency": 0.5}}, r"fuyou\.plan\.residency: must be an object with any of parameters, "),
        ({"checksum": "yes"}, r"fuyou\.checksum: must be true or false; found 'yes' \(str\)"),
        ({"enabled": "true"}, r"fuyou\.enabled: must be true or false; found 'true' \(str\)"),
        ({"trace": 3}, r"fuyou\.trace: .*found 3 \(int\)"),
        ({"nvme_path": []}, r"fuyou\.nvme_path: must name at least one path"),
        ({"nvme_path": ["/a", "/a/"]}, r"fuyou\.nvme_path: must not name a path twice"),
        ({"nvme_path": [3]}, r"fuyou\.nvme_path: must be a path or a list of paths; found \[3\] \(list\)"),
        ({"activations": {"block_classes": "Block"}}, r"fuyou\.activations\.block_classes: .*found 'Block'"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FuyouConfigError, match=message):
        block(**settings)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(FuyouConfigError, match=r"fuyou\.checksum.*fuyou\.trace"):
        block(checksum=3, trace=3)


@pytest.mark.parametrize("found", [True, "auto", [], 3])
def test_a_block_that_is_no_object(found: object) -> None:
    with pytest.raises(FuyouConfigError, match='"fuyou" must be an object'):
        load_block({"fuyou": found})


def test_plan_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"chunk_bytes": "64MiB", "slots": 1}))
    assert block(plan=str(path)).plan == PlanOverrides(chunk_bytes=64 * 2**20, slots=1)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"chunk_bits": 1}'])
def test_a_bad_plan_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FuyouConfigError, match=r"fuyou\.plan \(.*plan\.json\)"):
        block(plan=str(path))


def test_misspelt_block_is_warned_about_once(told: Callable[[], str]) -> None:
    assert misspelt_block_keys({"fuyuo": {}, "Fuyou": {}, "ds_fuyou": {}, "fuyou": {}, "bf16": {}, "fp16": {}}) == [
        "fuyuo",
        "Fuyou",
        "ds_fuyou",
    ]
    for _ in range(2):
        assert load_block({"fuyuo": {"enabled": True}}) is None
    assert told().count('top-level key "fuyuo"') == 1


def test_durable_puts_all_states_on_storage_and_refuses_what_contradicts_it() -> None:
    config = load_block({"fuyou": {"durable": True, "optimizer": {"overlap": "backward"}}})
    assert config is not None
    assert (config.optimizer.tier, config.optimizer.overlap) == ("nvme", "backward")
    for block, said in (
        ({"optimizer": {"tier": "cpu"}}, r"fuyou\.durable: P32 and the moments must be on storage"),
        ({"plan": {"residency": {"optimizer": 0.5}}}, r"fuyou\.durable: P32 and the moments must be on storage"),
        ({"plan": {"slots": 1}}, r"fuyou\.durable: a chunk must have two slots"),
    ):
        with pytest.raises(FuyouConfigError, match=said):
            load_block({"fuyou": {"durable": True, **block}})
