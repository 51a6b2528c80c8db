# SPDX-License-Identifier: Apache-2.0
"""Shapes of configurations as people publish them, and what the doctor says to each."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fuyou.cli import doctor, first_block, main
from ds_fuyou.cli.doctor_config import config_findings
from ds_fuyou.cli.finding import Finding, path_finding
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.simulator.models import load_model
from ds_fuyou.storage.probe import probe_path

HF_NVME = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "PATH", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": "PATH", "pin_memory": True, "buffer_count": 5},
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
    },
}


def zero(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **more}}


# name: (configuration, a failure?, what must be found, what must be advised)
SHAPES: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "the Trainer's template": (HF_NVME, True, "aio stands inside zero_optimization", 'top level of the file: "aio"'),
    "threads that nobody starts": (
        {**zero(), "aio": {"thread_count": 8}},
        False,
        "ignored by DeepSpeed since 0.16.4",
        '"intra_op_parallelism": 8',
    ),
    "nvme without a path": (zero(offload_param={"device": "nvme"}), True, "no path is named", '"nvme_path"'),
    "nvme, the path in the block": (
        {**zero(offload_param={"device": "nvme"}), "fuyou": {"nvme_path": "PATH"}},
        False,
        "O_DIRECT",
        "",
    ),
    "a raw device": (
        zero(offload_param={"device": "nvme", "nvme_path": "/dev/null"}),
        True,
        "raw character device",
        "mkfs.ext4",
    ),
    "a file": (zero(offload_param={"device": "nvme", "nvme_path": "FILE"}), True, "is a file", "name a directory"),
    "shared memory": (
        zero(offload_param={"device": "nvme", "nvme_path": "/dev/shm"}),
        False,
        "this is host memory",
        "directory on the SSD",
    ),
    "a directory that is not there": (
        zero(offload_optimizer={"device": "nvme", "nvme_path": "PATH/none"}),
        True,
        "no such directory",
        "mkdir -p",
    ),
    "stage 2": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        True,
        "only stage 3",
        '"stage": 3',
    ),
    "offload beside zero_optimization": (
        {**zero(), "offload_param": {"device": "cpu"}},
        True,
        "at the top level, where nothing reads it",
        '"zero_optimization": { "offload_param"',
    ),
    "offload as a word": (zero(offload_param="cpu"), True, 'offload_param is "cpu"', '"device": "cpu"'),
    "a device of another name": (
        zero(offload_param={"device": "disk", "nvme_path": "PATH"}),
        True,
        'device is "disk"',
        '"device": "nvme"',
    ),
    "no block": (zero(offload_param={"device": "nvme", "nvme_path": "PATH"}), False, "runs as stock", '"fuyou": {'),
    "the block inside": (zero(fuyou={"nvme_path": "PATH"}), True, "where it is not seen", "top level"),
    "a misspelt key": ({**zero(), "fuyou": {"nvme_paths": "PATH"}}, True, "the block cannot run", "nvme_path"),
    "switched off": ({**zero(), "fuyou": {"enabled": False}}, False, '"enabled": false', '"enabled": true'),
    "two paths of one disk": (
        {**zero(), "fuyou": {"nvme_path": ["PATH", "PATH/more"]}},
        False,
        "same device",
        "one directory a device",
    ),
    "guesses that nothing needs": (
        {**zero(offload_param={"device": "cpu", "buffer_size": 1000}), "fuyou": {"nvme_path": "PATH"}},
        False,
        "without effect under the block: zero_optimization.offload_param.buffer_size",
        "leave them out",
    ),
    "sums of its own": (
        {**zero(), "fuyou": {"nvme_path": "PATH", "gradients": {"reduce_by": "block"}}},
        False,
        "on more than two ranks last bits differ",
        "leave it out for equal bits",
    ),
    "offload sections that outweigh the path": (
        {
            **zero(offload_optimizer={"device": "cpu", "pin_memory": True}, offload_param={"device": "cpu"}),
            "fuyou": {"nvme_path": "PATH"},
        },
        False,
        'offload_optimizer and offload_param say "cpu", so what they name stays in host memory',
        "leave these sections out",
    ),
    "a tier that outweighs the section": (
        {
            **zero(offload_optimizer={"device": "cpu"}),
            "fuyou": {"nvme_path": "PATH", "optimizer": {"tier": "nvme"}},
        },
        False,
        "fuyou.optimizer.tier is set",
        "leave them out",
    ),
    "full offload as axolotl has it": (
        {
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            **zero(
                offload_optimizer={"device": "cpu", "pin_memory": True},
                offload_param={"device": "cpu", "pin_memory": True},
                sub_group_size=0,
                reduce_bucket_size="auto",
                stage3_gather_16bit_weights_on_model_save=True,
            ),
            "bf16": {"enabled": True},
            "gradient_accumulation_steps": "auto",
        },
        False,
        "runs as stock",
        '"fuyou": { "nvme_path"',
    ),
    "quantised gathers": (
        {**zero(zero_quantized_weights=True), "fuyou": {"nvme_path": "PATH"}},
        True,
        "the block cannot run",
        "cannot be combined with: zero_optimization.zero_quantized_weights",
    ),
    "two precisions": (
        {**zero(), "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        True,
        "bf16 and fp16 are both enabled, which DeepSpeed refuses",
        '"fp16"',
    ),
    "right": ({**zero(), "fuyou": {"nvme_path": "PATH"}}, False, "says what it means", ""),
}


def found(config: object, tmp_path: Path, model: ModelSpec | None = None) -> list[Finding]:
    (tmp_path / "more").mkdir(exist_ok=True)
    (tmp_path / "file").touch()
    text = json.dumps(config).replace("PATH", str(tmp_path)).replace("FILE", str(tmp_path / "file"))
    (tmp_path / "ds.json").write_text(text)
    return list(config_findings(tmp_path / "ds.json", model))


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_public_configurations(shape: str, tmp_path: Path) -> None:
    config, fails, what, fix = SHAPES[shape]
    findings = found(config, tmp_path)
    assert any(not finding.ok for finding in findings) == fails, findings
    assert any(what in finding.found and fix in finding.fix for finding in findings), findings
    assert all(finding.fix for finding in findings if not finding.ok)


@pytest.mark.parametrize(
    "text",
    ['{ // stage\n"zero_optimization": {"stage": 3}}', '{"zero_optimization": {"stage": 3},}', "# all\n{fp16: {}}"],
)
def test_comments_and_the_like_are_read_as_deepspeed_reads_them(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    findings = list(config_findings(file))
    assert all(finding.ok for finding in findings), findings
    assert "Hugging Face's programs do not" in findings[0].found
    assert "runs as stock" in findings[1].found


def test_a_byte_order_mark_is_named_as_such(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8-sig")
    findings = list(config_findings(file))
    assert "begins with a byte order mark" in findings[0].found
    assert "runs as stock" in findings[1].found


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100000, "null"])
def test_what_is_no_configuration_is_one_finding(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    (finding,) = config_findings(file)
    assert not finding.ok


def test_a_file_that_is_not_there_is_not_to_be_corrected(tmp_path: Path) -> None:
    (finding,) = config_findings(tmp_path / "no.json")
    assert not finding.ok
    assert finding.fix.startswith("name a DeepSpeed JSON that exists")


@pytest.mark.parametrize(
    "text", ['{"fuyou": {}, "bf16": {}, "fuyou": {}}', '{"zero_optimization": {"stage": 3, /* */ "stage": 3}}']
)
def test_a_key_that_stands_twice_is_refused_as_by_deepspeed(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    (finding,) = config_findings(file)
    assert not finding.ok
    assert " twice in one object" in finding.found


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        (
            "a.yaml",
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n",
            "fuyou doctor ds.json",
        ),
        (
            "a.json",
            '{"compute_environment": "LOCAL_MACHINE", "deepspeed_config": {"zero_stage": 3}}',
            "write a DeepSpeed JSON",
        ),
        (
            "c.yaml",
            "---\ncompute_environment: LOCAL_MACHINE\ndeepspeed_config:\n# deepspeed_config_file: old.json\n"
            "  deepspeed_config_file: 'my dir/ds.json'  # new\nlist:\n  - 1\n",
            "fuyou doctor 'my dir/ds.json'",
        ),
        ("b.yml", '{"deepspeed_config": {"deepspeed_config_file": "/d/ds.json"}}', "fuyou doctor /d/ds.json"),
    ],
)
def test_a_file_of_accelerate_is_known(name: str, text: str, fix: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    (finding,) = config_findings(file)
    assert not finding.ok
    assert finding.found.startswith("is a configuration of Accelerate")
    assert finding.fix.startswith(fix)


def test_what_is_mounted_read_only_is_no_matter_of_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = os.statvfs(tmp_path)
    fields = dict(
        zip(("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail"), facts, strict=False)
    )
    mounted = SimpleNamespace(**{f"f_{name}": value for name, value in fields.items()}, f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "statvfs", lambda path: mounted)
    finding = path_finding(str(tmp_path))
    assert not finding.ok
    assert finding.found == "lies on what is mounted read-only"
    assert "chown" not in finding.fix


def test_what_is_no_directory_is_not_to_be_made_one() -> None:
    finding = path_finding("/dev/null")
    assert (finding.ok, finding.found, finding.fix) == (False, "is no directory", "name a directory")


@pytest.mark.parametrize("path", ["/a\0b", "/a\ud800"])
@pytest.mark.parametrize("block", [{"fuyou": {}}, {}])
def test_what_can_be_no_path_is_no_exception(path: str, block: dict[str, Any], tmp_path: Path) -> None:
    sections = zero(offload_param={"device": "nvme", "nvme_path": path})
    told = [finding.fix for finding in found({**sections, **block}, tmp_path)]
    assert any("must be made of printable characters" in fix for fix in told) == bool(block), told
    told = [finding.fix for finding in found({**zero(), "fuyou": {"nvme_path": path}}, tmp_path)]
    assert any("must be made of printable characters" in fix for fix in told), told


def test_paths_are_looked_for_where_a_run_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the home directory, and one in two spellings once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    sections = {
        "offload_optimizer": {"device": "nvme", "nvme_path": "~/more"},
        "offload_param": {"device": "nvme", "nvme_path": f"{tmp_path}/more/"},
    }
    findings = found({**zero(**sections), "fuyou": {}}, tmp_path)
    assert [finding.what for finding in findings if "free" in finding.found] == [
        f"zero_optimization.offload_optimizer.nvme_path {tmp_path}/more"
    ]
    assert not any("same device" in finding.found for finding in findings), findings
    assert all(finding.ok for finding in findings), findings


@pytest.mark.parametrize(
    ("free", "ok", "what"),
    [(3, False, "too small: "), (7, True, "for one slot alone: "), (50, True, "for two slots: ")],
)
def test_a_disk_too_small_for_the_model_is_named_by_the_account_of_init(
    free: int, ok: bool, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``free``: GB. One slot of P16, P32 and moments takes 5."""
    monkeypatch.setattr(first_block, "available_host_bytes", lambda: 100 * 10**9)
    facts = probe_path(tmp_path)
    monkeypatch.setattr(first_block, "probe_path", lambda path: replace(facts, free_bytes=free * 10**9))
    model = "gpt:24,16,1024,50000"
    sections = {name: {"device": "nvme"} for name in ("offload_optimizer", "offload_param")}
    config = {**zero(**sections), "fuyou": {"nvme_path": [str(tmp_path), str(tmp_path / "more")]}}  # one device
    (finding,) = [each for each in found(config, tmp_path, load_model(model)) if each.what == "room for states"]
    assert finding.found.startswith(what)
    assert finding.ok == ok
    assert bool(finding.fix) == (free < 50)
    file = tmp_path / "init.json"
    file.write_text(json.dumps(zero(**sections)))
    assert main(["init", str(file), "--model", model, "--path", str(tmp_path)]) == (0 if ok else 2)
    shown = capsys.readouterr()
    *needed, _ = re.findall(r"[0-9.]+ GB", finding.found)
    assert needed
    assert all(size in shown.out + shown.err for size in needed)
    in_memory = {**zero(), "fuyou": config["fuyou"]}
    (finding,) = [each for each in found(in_memory, tmp_path, load_model(model)) if each.what == "room for states"]
    assert finding.found.startswith("none is needed")


@pytest.mark.parametrize(("budget", "what"), [(3, "too small: "), (7, "for one slot alone: "), (20, "for two slots: ")])
def test_storage_that_a_run_may_use_bounds_its_room(
    budget: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``budget``: GB. One slot takes 5, whatever is free."""
    monkeypatch.setattr(first_block, "available_host_bytes", lambda: 100 * 10**9)
    facts = probe_path(tmp_path)
    monkeypatch.setattr(first_block, "probe_path", lambda path: replace(facts, free_bytes=500 * 10**9))
    sections = {name: {"device": "nvme"} for name in ("offload_optimizer", "offload_param")}
    config = {**zero(**sections), "fuyou": {"nvme_path": str(tmp_path), "nvme_budget_bytes": f"{budget}GB"}}
    model = load_model("gpt:24,16,1024,50000")
    (finding,) = [each for each in found(config, tmp_path, model) if each.what == "room for states"]
    assert finding.found.startswith(what)


@pytest.mark.parametrize(
    ("plan", "shares", "resume", "what"),
    [
        ({}, False, "off", "for three slots: "),
        ({"slots": 2}, False, "off", "for two slots: "),
        ({"slots": 1}, False, "off", "for one slot alone: "),
        ({}, True, "off", "for two slots: "),
        ({}, True, "auto", "for three slots: "),
    ],
)
def test_slots_are_those_that_a_run_would_try_for(
    plan: dict[str, int], shares: bool, resume: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole masters, which checkpoints clone where blocks are shared, unless somebody relies on the slots."""
    monkeypatch.setattr(first_block, "available_host_bytes", lambda: 100 * 10**9)
    monkeypatch.setattr(first_block, "shares_blocks", lambda paths: shares)
    facts = probe_path(tmp_path)
    monkeypatch.setattr(first_block, "probe_path", lambda path: replace(facts, free_bytes=500 * 10**9))
    sections = {name: {"device": "nvme"} for name in ("offload_optimizer", "offload_param")}
    block = {"nvme_path": str(tmp_path), "checkpoint": {"save": "background"}, "optimizer": {"masters": "whole"}}
    block |= {"plan": plan, "resume": resume}
    findings = found({**zero(**sections), "fuyou": block}, tmp_path, load_model("gpt:24,16,1024,50000"))
    (finding,) = [each for each in findings if each.what == "room for states"]
    assert finding.found.startswith(what)
    assert ("leave fuyou.plan.slots out" in finding.fix) == (plan == {"slots": 1}), "where there is room for two"


@pytest.mark.parametrize(("free", "slots"), [(20, "two"), (60, "three")])
def test_checkpoints_behind_training_want_a_third_slot_and_room_for_two_of_them(
    free: int, slots: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``free``: GB. Three slots take 15, two checkpoints 8.5."""
    monkeypatch.setattr(first_block, "available_host_bytes", lambda: 100 * 10**9)
    monkeypatch.setattr(first_block, "shares_blocks", lambda paths: False)
    facts = probe_path(tmp_path)
    monkeypatch.setattr(first_block, "probe_path", lambda path: replace(facts, free_bytes=free * 10**9))
    sections = {name: {"device": "nvme"} for name in ("offload_optimizer", "offload_param")}
    block = {"nvme_path": str(tmp_path), "checkpoint": {"save": "background"}}
    model = load_model("gpt:24,16,1024,50000")
    findings = found({**zero(**sections), "fuyou": block}, tmp_path, model)
    (finding,) = [each for each in findings if each.what == "room for states"]
    assert finding.found.startswith(f"for {slots} slots: two need 9.")
    assert "three, for checkpoints behind training, and two of these need 23." in finding.found
    assert bool(finding.fix) == (slots == "two")


def test_the_model_is_taken_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**zero(), "fuyou": {"nvme_path": str(tmp_path)}}))
    assert main(["doctor", str(file), "--model", "gpt:4000,128,65536,50257"]) == 1
    assert "FAIL  room for states: no placement of gpt:4000,128,65536,50257 fits" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--model", "7B"]) == 2
    assert "--model needs a DeepSpeed JSON" in capsys.readouterr().err


def test_adapters_of_the_model_are_taken_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """States are to be in host memory, which those of the whole model exceed."""
    monkeypatch.setattr(first_block, "available_host_bytes", lambda: 40 * 10**9)
    monkeypatch.setattr(doctor, "findings", lambda *_, **__: iter(()))
    tiers = {"parameters": {"tier": "nvme"}, "optimizer": {"tier": "cpu"}, "gradients": {"tier": "cpu"}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**zero(), "fuyou": {"nvme_path": str(tmp_path), **tiers}}))
    asked = ["doctor", str(file), "--model", "gpt:32,32,4096,128000"]
    assert main(asked) == 1
    assert "FAIL  room for states: no placement of" in capsys.readouterr().out
    assert main([*asked, "--lora", "16"]) == 0
    assert "room for states: for two slots: two need 14." in capsys.readouterr().out
    assert main(["doctor", str(file), "--lora", "16"]) == 2
    assert "--lora needs --model" in capsys.readouterr().err


def test_what_the_rank_decides_is_left_to_the_run(tmp_path: Path) -> None:
    findings = found({**zero(), "fuyou": {"nvme_path": "/nvme{local_rank}"}}, tmp_path)
    assert all(finding.ok for finding in findings)


def test_the_command_reads_files_and_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    for check in ("_hook", "_other_ways", "_compiler", "_versions"):
        monkeypatch.setattr(doctor, check, lambda: Finding("stub", "fine"))
    monkeypatch.setattr(doctor, "_operators_check", lambda optimizers: doctor._io_uring)
    found(HF_NVME, tmp_path)
    assert main(["doctor", str(tmp_path), str(tmp_path / "ds.json")]) == 1
    said = capsys.readouterr().out
    assert "O_DIRECT" in said
    assert "FAIL" in said
    assert main(["doctor", "--measure", str(tmp_path / "ds.json")]) == 2
