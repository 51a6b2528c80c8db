# SPDX-License-Identifier: Apache-2.0
"""``fuyou init``: a block that trains, nothing else changed, and no file where a doctor would object."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fuyou.cli import first_block, main
from ds_fuyou.cli.doctor_config import config_findings
from ds_fuyou.cli.ds_config import read_ds_file
from ds_fuyou.cli.init import with_block
from ds_fuyou.ds_json import load_activation
from ds_fuyou.storage.disks import Disk, DiskKind
from ds_fuyou.storage.probe import probe_path
from tests.harness.runner import ds_config, run_case

MODEL = "gpt:24,16,1024,50000"  # 354 million parameters
GB = 10**9
CPU = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GB of free memory, and one disk on which the user may write below ``disk``."""
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(first_block, "available_host_bytes", lambda: 100 * GB)
    disk = Disk(tmp_path / "disk", DiskKind.NVME, probe_path(tmp_path / "disk"))
    monkeypatch.setattr(first_block, "find_disks", lambda: [disk])


def with_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(first_block, "available_host_bytes", lambda: num_bytes)


def written(tmp_path: Path, config: object) -> Path:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config, indent=2))
    return file


def block_of(file: Path) -> dict[str, Any]:
    config = read_ds_file(file).config
    assert load_activation(config) is not None
    found: dict[str, Any] = config["fuyou"]
    return found


def test_of_memory_that_a_device_shares_it_plans_as_little_as_a_run_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--model", MODEL]) == 0
    assert "80.0 GB of host memory for each (80 % of what is free now)" in capsys.readouterr().err
    monkeypatch.setattr(first_block, "rank_device", lambda: SimpleNamespace(is_host=False, is_unified=True))
    assert main(["init", "--model", MODEL]) == 0
    assert "40.0 GB of host memory for each (40 % of what is free now)" in capsys.readouterr().err


def test_alone_it_shows_the_smallest_configuration_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--model", MODEL]) == 0
    shown = capsys.readouterr()
    path = tmp_path / "disk/fuyou_swap"
    assert json.loads(shown.out) == {
        "zero_optimization": {"stage": 3},
        "fuyou": {"enabled": True, "nvme_path": str(path)},
    }
    assert path.is_dir()
    assert "354 million parameters on 1 rank; 80.0 GB of host memory" in shown.err
    assert f"{path} (NVMe, " in shown.err
    assert "everything in host memory; it fits" in shown.err
    assert len(shown.err.splitlines()) <= 6


TEXTS = [
    '{\n    "zero_optimization": {"stage": 3},\n    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}\n}\n',
    '{"zero_optimization": {"stage": 3}, "x": 5e8}',
    '{\r\n\t"zero_optimization": {\r\n\t\t"stage": 3\r\n\t}\r\n}\r\n\r\n',
    '  \n{\n"zero_optimization": {"stage": 3}\n}',
    '\ufeff{\n  "zero_optimization": {"stage": 3}\n}\n',
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_character_of_the_file_stays(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(text.encode())
    file.chmod(0o640)
    assert main(["init", str(file), "--model", MODEL]) == 0
    after = file.read_bytes().decode()
    body, _, rest = after.partition('"fuyou"')
    assert text.startswith(body.rstrip().removesuffix(","))
    assert rest.endswith(text[text.rindex("}") :])
    assert {**json.loads(text.removeprefix("\ufeff")), "fuyou": block_of(file)} == read_ds_file(file).config
    assert ("\r\n" in text) == ("\r\n" in rest)
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_null_block_is_replaced(tmp_path: Path) -> None:
    file = written(tmp_path, {"fuyou": None, "zero_optimization": {"stage": 3}})
    assert main(["init", str(file), "--model", MODEL]) == 0
    assert block_of(file)["enabled"]


def test_comments_go_only_to_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "ds.json", tmp_path / "out.json"
    file.write_text('{\n  // three\n  "zero_optimization": {"stage": 3},\n}\n')
    assert main(["init", str(file), "--model", MODEL]) == 2
    assert "comments or the like, which would be lost" in capsys.readouterr().err
    assert main(["init", str(file), "--model", MODEL, "--out", str(other)]) == 0
    assert json.loads(other.read_text())["zero_optimization"] == {"stage": 3}
    assert "three" in file.read_text()


def test_an_empty_object_gets_no_comma(tmp_path: Path) -> None:
    file = written(tmp_path, {})
    assert json.loads(with_block(read_ds_file(file), {"enabled": True})) == {"fuyou": {"enabled": True}}


def test_paths_of_the_offload_sections_are_not_named_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    file = written(tmp_path, {"zero_optimization": {"stage": 3, "offload_optimizer": section}})
    assert main(["init", str(file), "--model", MODEL]) == 0
    assert block_of(file) == {"enabled": True}
    said = capsys.readouterr().out
    assert f"state in {tmp_path}, as the offload sections say" in said
    assert "P32 and moments on storage" in said
    assert "8.5 GB with two slots" in said  # 24 bytes each
    assert "a crash leaves the last step whole\n" in said
    assert not (tmp_path / "disk/fuyou_swap").exists()


@pytest.mark.parametrize(("free", "kept"), [(5 * GB, ["optimizer"]), (GB, ["parameters", "optimizer"])])
def test_sections_that_ask_for_too_much_memory_are_overruled(
    free: int, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_memory(monkeypatch, free)  # 14 bytes of P16 and states for each of 354 million do not fit 80 % of it
    file = written(tmp_path, {"bf16": {"enabled": True}, "zero_optimization": CPU})
    assert main(["init", str(file), "--model", MODEL]) == 0
    assert block_of(file) == {
        "enabled": True,
        "nvme_path": str(tmp_path / "disk/fuyou_swap"),
        **{name: {"tier": "nvme"} for name in kept},
    }, "no shares: a start that finds less memory would be refused"
    said = capsys.readouterr().out
    assert "the offload sections ask for more host memory than is free" in said
    assert "better take them out, and these tiers: " in said
    assert "a crash leaves the last step whole\n" in said


@pytest.mark.parametrize(
    ("section", "free", "said"),
    [
        ({}, 100 * GB, "as durable as its last checkpoint, as states may be in host memory"),
        ({}, 2 * GB, "as durable as its last checkpoint, as states may be in host memory"),
        ({"offload_param": {"device": "nvme"}}, 100 * GB, "as durable as its last checkpoint, as states may be in"),
        ({"offload_optimizer": {"device": "nvme"}}, 100 * GB, "a crash leaves the last step whole\n"),
    ],
)
def test_a_crash_leaves_the_last_step_only_where_all_states_stay_on_storage(
    section: dict[str, Any],
    free: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_memory(monkeypatch, free)
    file = written(tmp_path, {"zero_optimization": {"stage": 3, **section}})
    assert main(["init", str(file), "--model", MODEL, "--path", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert said in shown
    assert shown.count("a crash") + shown.count('"durable": true keeps every step') == 1


def test_a_path_of_a_section_that_the_block_replaces_need_not_exist(tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path / "none")}
    file = written(tmp_path, {"zero_optimization": {"stage": 3, "offload_optimizer": section}})
    assert main(["init", str(file), "--model", MODEL]) == 2
    assert main(["init", str(file), "--model", MODEL, "--path", str(tmp_path)]) == 0
    assert block_of(file) == {"enabled": True, "nvme_path": str(tmp_path)}
    assert all(finding.ok for finding in config_findings(file))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "it fits; what does not when a run starts goes to storage"),
        ({"offload_optimizer": {"device": "cpu"}}, "it fits; what offload_optimizer names stays there, whatever is"),
        (
            {"offload_param": {"device": "nvme"}},
            "P16 on storage, P32 and moments in host memory, G16 in host memory; as",
        ),
    ],
)
def test_what_a_section_holds_in_memory_is_not_said_to_go_to_storage(
    section: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {"zero_optimization": {"stage": 3, **section}})
    assert main(["init", str(file), "--model", MODEL]) == 0
    shown = capsys.readouterr().out
    assert said in shown
    assert ("better take that out" in shown) == ("offload_optimizer" in section)


def test_a_directory_that_is_told_is_made_where_its_parent_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [tmp_path / "disk/one", tmp_path / "disk/two"]
    assert main(["init", "--model", MODEL, "--path", *map(str, told)]) == 0
    assert json.loads(capsys.readouterr().out)["fuyou"]["nvme_path"] == list(map(str, told))
    assert all(path.is_dir() for path in told)
    assert main(["init", "--model", MODEL, "--path", str(tmp_path / "no/three")]) == 2
    assert not (tmp_path / "no").exists()


def test_of_adapters_the_base_alone_is_large_and_has_no_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """7 billion parameters: 14 GB of a frozen base, where training all takes 98 GB for one slot."""
    with_memory(monkeypatch, 10 * GB)
    facts = probe_path(tmp_path)
    monkeypatch.setattr(first_block, "probe_path", lambda path: replace(facts, free_bytes=50 * GB))
    asked = ["init", "--model", "gpt:32,32,4096,128000", "--path", str(tmp_path)]
    assert main(asked) == 2
    assert "on storage, 50.0 GB can be used" in capsys.readouterr().err
    assert main([*asked, "--lora", "16"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"7,002 million parameters, \d\d\.\d million of them trained, on 1 rank;", said)
    assert re.search(
        r"frozen P16 \d+% in host memory, the rest on storage, P16 in host memory, P32 and moments in", said
    )
    stored = float(re.search(r"storage: ([\d.]+) GB\n", said)[1])  # type: ignore[index]
    assert 14 - 8 < stored < 14
    assert main([*asked, "--lora", "16", "--base-bits", "4"]) == 0
    assert "everything in host memory" in capsys.readouterr().err


def test_what_fits_is_left_to_the_sections(tmp_path: Path) -> None:
    file = written(tmp_path, {"bf16": {"enabled": True}, "zero_optimization": CPU})
    assert main(["init", str(file), "--model", MODEL]) == 0
    assert block_of(file) == {"enabled": True, "nvme_path": str(tmp_path / "disk/fuyou_swap")}


def test_more_than_two_ranks_are_told_of_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--model", MODEL, "--ranks", "4"]) == 0
    assert '"reduce_bucket_size": 44' in capsys.readouterr().err
    auto = written(tmp_path, {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    assert main(["init", str(auto), "--model", MODEL, "--ranks", "4"]) == 0
    assert "reduce_bucket_size" not in capsys.readouterr().out


# name: (configuration, more arguments, status, what must be said)
REFUSED: dict[str, tuple[dict[str, Any], list[str], int, str]] = {
    "aio inside": ({"zero_optimization": {"stage": 3, "aio": {}}}, [], 1, "top level of the file"),
    "stage 2": ({"zero_optimization": {"stage": 2}}, [], 2, "stage 3"),
    "no stage": ({}, [], 2, "stage 3"),
    "offload of stage 2": ({"zero_optimization": {**CPU, "stage": 2}}, [], 1, '"stage": 3'),
    "quantised": ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, [], 2, "cannot be combined"),
    "a block": ({"zero_optimization": {"stage": 3}, "fuyou": {}}, [], 2, "block already"),
    "memory": ({"zero_optimization": {"stage": 3}}, ["--path", "/dev/shm"], 2, "is host memory"),
    "no directory": ({"zero_optimization": {"stage": 3}}, ["--path", "/no/such"], 2, "create it"),
    "no model": ({"zero_optimization": {"stage": 3}}, ["--model", "13Q"], 2, "the sizes are"),
    "no ranks": ({"zero_optimization": {"stage": 3}}, ["--ranks", "0"], 2, "--ranks must be at least 1"),
    "a disk too small": (
        {"zero_optimization": {"stage": 3}},
        ["--model", "gpt:2000,64,8192,50000"],
        2,
        "name directories on more disks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_doctor_would_name_is_refused_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, more, status, says = REFUSED[name]
    file = written(tmp_path, config)
    before = file.read_text()
    assert main(["init", str(file), "--model", MODEL, *more]) == status
    assert says in capsys.readouterr().err
    assert file.read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["disk", "ds.json"]
    assert os.listdir(tmp_path / "disk") == []


def test_without_a_disk_the_model_must_fit_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_block, "find_disks", list)
    assert main(["init", "--model", MODEL]) == 0
    assert json.loads(capsys.readouterr().out)["fuyou"] == {"enabled": True}
    with_memory(monkeypatch, 2 * GB)
    assert main(["init", "--model", MODEL]) == 2
    assert "the smallest placement that the tiers allow needs" in capsys.readouterr().err


def test_a_run_takes_what_was_written(tmp_path: Path) -> None:
    file = written(tmp_path, ds_config())
    assert main(["init", str(file), "--model", "gpt:2,2,32,100"]) == 0
    case = {"model": {}, "steps": 2, "config": json.loads(file.read_text())}
    (result,) = run_case(case, tmp_path / "run", "initial")
    assert f"state in {tmp_path}/disk/fuyou_swap" in result["output"]
