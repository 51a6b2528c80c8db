# SPDX-License-Identifier: Apache-2.0
"""Planning around a DeepSpeed JSON: what the block fixes is kept, what it contradicts is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fuyou.cli import main
from ds_fuyou.planner.hardware import GIB
from ds_fuyou.planner.plan import weighs_start

BASE = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW"},
}


def _plan(tmp_path: Path, block: dict[str, Any] | None, *more: str, base: object = None, **around: object) -> int:
    config = tmp_path / "ds.json"
    data = dict(BASE) if base is None else base
    if block is not None and isinstance(data, dict):
        data = {**data, "fuyou": {"nvme_path": "/nvme", **block}, **around}
    config.write_text(json.dumps(data), encoding="utf-8")
    return main(["plan", "--model", "6B", "--num-ssds", "4", "--config", str(config), "--json", *more])


def _shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_batch_and_accumulation_come_from_the_json_unless_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path, None) == 0
    assert _shown(capsys)["workload"] == {"batch": 8, "seq": 1024, "accumulation": 2}
    assert _plan(tmp_path, {}, "--batch", "4", "--accumulation", "1") == 0
    assert _shown(capsys)["workload"] == {"batch": 4, "seq": 1024, "accumulation": 1}


@pytest.mark.parametrize(
    ("sizes", "more", "expected"),
    [
        ((16, None, None), (), (16, 1)),
        ((32, None, 4), (), (8, 4)),
        ((32, 4, None), (), (4, 8)),
        ((32, 4, None), ("--num-gpus", "2", "--dram-gb", "256"), (4, 4)),
        ((32, None, None), ("--batch", "4"), (4, 8)),
        ((32, 8, 4), ("--batch", "2"), (2, 4)),
        ((32, "auto", 4), (), (8, 4)),
        ((32, "auto", "auto"), (), (1, 1)),
        (("auto", "auto", 2), ("--dram-gb", "100"), (1, 2)),
    ],
)
def test_batch_sizes_are_completed_as_deepspeed_does(
    sizes: tuple[Any, ...],
    more: tuple[str, ...],
    expected: tuple[int, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _plan(tmp_path, None, *more, base=_sized(*sizes)) == 0
    workload = _shown(capsys)["workload"]
    assert (workload["batch"], workload["accumulation"]) == expected


def _sized(*sizes: Any) -> dict[str, Any]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {key: size for key, size in zip(keys, sizes, strict=True) if size is not None}
    return {"zero_optimization": {"stage": 3}, **given}


@pytest.mark.parametrize("sizes", [(32, 4, 4), (33, 4, None), (3, 4, None), (3, None, 4)])
def test_batch_sizes_that_deepspeed_refuses_are_refused(
    sizes: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path, None, base=_sized(*sizes)) == 2
    assert "must be micro-batch x accumulation x ranks" in capsys.readouterr().err


def test_without_a_path_nothing_is_on_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(tmp_path, {"nvme_path": None}, "--batch", "1", "--dram-gb", "256") == 0
    shown = _shown(capsys)
    assert all(share == 1.0 for name, share in shown["residency"].items() if name != "optimizer_twice")
    assert sum(shown["predicted"]["bytes"]["nvme"].values()) == 0
    assert _plan(tmp_path, {"nvme_path": None}, "--batch", "1", "--dram-gb", "64") == 2
    assert "of host memory (" in capsys.readouterr().err


def test_a_share_that_the_block_fixes_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"optimizer": 0.5, "gradients": 0.25}
    assert _plan(tmp_path, {"plan": {"residency": shares}}) == 0
    residency = _shown(capsys)["residency"]
    assert {name: residency[name] for name in shares} == shares
    assert _plan(tmp_path, {"plan": {"residency": {"optimizer": 0.9}}}, "--dram-gb", "32") == 2
    assert "of host memory (" in capsys.readouterr().err


def test_parameters_of_neither_precision_are_fp32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held: dict[str, Any] = {name: {"tier": "cpu"} for name in ("parameters", "gradients")}
    held["optimizer"] = {"tier": "cpu", "overlap": "none"}

    def sizes(enabled: bool) -> dict[str, float]:
        assert _plan(tmp_path, held, "--dram-gb", "160", bf16={"enabled": enabled}) == 0
        found: dict[str, float] = _shown(capsys)["predicted"]["bytes"]["cpu"]
        return found

    wide, narrow = sizes(False), sizes(True)
    assert [wide[name] / narrow[name] for name in ("P16", "G16", "P32, M, V")] == [2, 2, 1]


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize(
    ("section", "key"), [("parameters", "parameters"), ("optimizer", "optimizer"), ("gradients", "gradients")]
)
def test_a_chosen_tier_is_kept(
    section: str, key: str, tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path, {section: {"tier": tier}}) == 0
    assert _shown(capsys)["residency"][key] == (1.0 if tier == "cpu" else 0.0)


def test_the_layout_of_states_is_that_of_the_block_or_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes on storage and in memory, a parameter; and fewer written a step."""
    stored = {"optimizer": {"tier": "nvme"}, "parameters": {"tier": "cpu"}, "gradients": {"tier": "cpu"}}

    def of(tier: str, block: dict[str, Any], *more: str) -> tuple[float, float]:
        block = {**stored, "optimizer": {"tier": tier, **block}}
        assert _plan(tmp_path, block, *more) == 0
        predicted = _shown(capsys)["predicted"]
        sizes = [size for sizes in predicted["bytes"].values() for name, size in sizes.items() if name == "P32, M, V"]
        return sum(sizes), predicted["storage_bytes_written_a_step"]

    whole, by_block = of("nvme", {"masters": "whole"}), of("nvme", {"moments": "int8", "masters": "split"})
    assert of("nvme", {}) == of("nvme", {"masters": "split"})
    assert of("nvme", {}, "--moments", "int8", "--masters", "split") == by_block
    assert of("nvme", {"moments": "int8", "masters": "split"}, "--moments", "fp32", "--masters", "whole") == whole
    assert by_block[0] / whole[0] == pytest.approx((4 + 2 * (1 + 4 / 256)) / 12, rel=1e-6)
    assert by_block[1] / whole[1] == pytest.approx((4 + 2 * (1 + 4 / 256)) / 12, rel=0.02)
    bf16 = of("nvme", {"moments": "bf16"})
    assert bf16[0] / whole[0] == pytest.approx(8 / 12, rel=1e-6)
    assert of("cpu", {"moments": "bf16"})[0] / of("cpu", {})[0] == pytest.approx(8 / 12, rel=1e-6)


def test_masters_are_split_where_parameters_are_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a run decides; nothing said is bfloat16, as in a file that Accelerate completes."""
    stored = {"optimizer": {"tier": "nvme"}, "parameters": {"tier": "nvme"}, "gradients": {"tier": "cpu"}}

    def written(block: dict[str, Any], **base: Any) -> float:
        assert _plan(tmp_path, {**stored, **block}, base={**BASE, **base}) == 0
        return float(_shown(capsys)["predicted"]["storage_bytes_written_a_step"])

    split, whole = written({}), written({"optimizer": {"tier": "nvme", "masters": "whole"}})
    assert split / whole == pytest.approx(12 / 14, rel=0.02)
    assert written({}, bf16={"enabled": True}) == split
    assert written({}, fp16={"enabled": True}) == whole
    assert written({}, bf16={"enabled": False}) / whole == pytest.approx(16 / 14, rel=0.02)  # P16 is fp32
    assert written({"checksum": False}) == whole
    block = {**stored, "optimizer": {"tier": "nvme", "masters": "split"}}
    assert _plan(tmp_path, block, base={**BASE, "fp16": {"enabled": True}}) == 2
    assert "needs bfloat16 parameters" in capsys.readouterr().err


def test_the_layout_of_states_is_what_deepspeed_is_told_to_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(tier: str, **bf16: bool) -> float:
        block = {"optimizer": {"tier": tier}, "parameters": {"tier": "cpu"}, "gradients": {"tier": "cpu"}}
        assert _plan(tmp_path, block, bf16={"enabled": True, **bf16}) == 0
        sizes = [size for sizes in _shown(capsys)["predicted"]["bytes"].values() for size in sizes.items()]
        return sum(size for name, size in sizes if name == "P32, M, V")

    masters = {"bf16_master_weights_and_grads": True}
    for tier in ("cpu", "nvme"):
        found = [of(tier, **keys) / of(tier) for keys in (masters, {**masters, "bf16_optimizer_states": True})]
        assert found == pytest.approx([10 / 12, 6 / 12], rel=1e-6)


@pytest.mark.parametrize(("mode", "fate"), [("swap", "swap"), ("none", "keep")])
def test_a_chosen_mode_is_kept(mode: str, fate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(tmp_path, {"activations": {"mode": mode}}, "--batch", "1") == 0
    assert all(counts[fate] == 28 for counts in _shown(capsys)["activations"].values())


def test_recompute_saves_block_inputs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(tmp_path, {"activations": {"mode": "recompute"}}) == 0
    activations = _shown(capsys)["activations"]
    assert activations.pop("block_input")["recompute"] == 0
    assert all(counts["recompute"] == 28 for counts in activations.values())


def test_less_overlap_is_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secs = []
    for overlap in ("backward_and_forward", "backward", "none"):
        assert _plan(tmp_path, {"optimizer": {"overlap": overlap, "tier": "nvme"}}, "--accumulation", "1") == 0
        secs.append(_shown(capsys)["predicted"]["iteration_secs"])
    assert secs == sorted(secs)
    assert secs[0] < secs[2]


def test_updates_that_wait_for_the_norm_are_planned_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a run does it: nothing before `step()`, and one version of P16 in host memory."""
    found = []
    for clip_policy in ("auto", "speculate", "defer"):
        block = {"optimizer": {"clip_policy": clip_policy}, "dram_budget_bytes": "20GB"}
        assert _plan(tmp_path, block, "--batch", "1", "--accumulation", "16") == 0
        found.append(_shown(capsys))
    assert found[0]["residency"] == found[1]["residency"], "waiting is not clearly faster"
    assert found[2]["residency"]["parameters"] > found[0]["residency"]["parameters"]
    assert found[2]["predicted"]["iteration_secs"] > 0.95 * found[0]["predicted"]["iteration_secs"]


@pytest.mark.parametrize(("accumulation", "waits"), [("16", True), ("1", False)])
def test_updates_wait_where_that_is_clearly_faster(
    accumulation: str, waits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["--model", "gpt:32,32,4096,32000", "--host", "desktop", "--ssd", "990pro", "--num-ssds", "1"]
    work = ["--dram-gb", "64", "--batch", "1", "--seq", "2048", "--accumulation", accumulation]
    secs, updates = {}, {}
    for clip_policy in ("auto", "speculate", "defer"):
        config = tmp_path / f"{clip_policy}.json"
        block = {"nvme_path": "/nvme", "optimizer": {"clip_policy": clip_policy}}
        config.write_text(json.dumps({**BASE, "fuyou": block}), encoding="utf-8")
        assert main(["plan", *machine, *work, "--config", str(config), "--json"]) == 0
        predicted = _shown(capsys)["predicted"]
        secs[clip_policy], updates[clip_policy] = predicted["iteration_secs"], predicted["updates"]
        assert main(["plan", *machine, *work, "--config", str(config)]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        rows = [" ".join(line[1:4]) for line in lines if line[:1] == ["updates"]]
        assert rows == (["wait for step();"] if waits and clip_policy == "auto" else []), "else no P16 is in memory"
    assert secs["auto"] == secs["defer" if waits else "speculate"]
    assert updates["auto"] == updates["defer" if waits else "speculate"] != updates["speculate" if waits else "defer"]
    assert (secs["defer"] < 0.95 * secs["speculate"]) == waits


def test_it_is_weighed_where_both_passes_hide_updates_and_the_user_has_not_said() -> None:
    def weighs(**optimizer: str) -> bool:
        return weighs_start(SimpleNamespace(optimizer=SimpleNamespace(**optimizer)))

    assert weighs(clip_policy="auto", overlap="backward_and_forward")
    assert not any(weighs(clip_policy="auto", overlap=overlap) for overlap in ("backward", "none"))
    assert not any(weighs(clip_policy=said, overlap="backward_and_forward") for said in ("defer", "speculate"))


def test_budgets_bound_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"dram_budget_bytes": "30GB", "gpu_budget_bytes": "9GB", "nvme_budget_bytes": "300GB"}
    assert _plan(tmp_path, block) == 0
    used = {tier: sum(items.values()) for tier, items in _shown(capsys)["predicted"]["bytes"].items()}
    assert used["cpu"] <= 30e9
    assert used["gpu"] <= 9e9
    assert used["nvme"] <= 300e9


def test_what_saves_behind_training_and_a_named_budget_take_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = {"optimizer": {"tier": "nvme"}, "parameters": {"tier": "nvme"}}
    shown = []
    for block in ({}, {"checkpoint": {"save": "background"}}, {"dram_budget_bytes": "60GB"}):
        assert _plan(tmp_path, {**stored, **block}) == 0
        shown.append(_shown(capsys)["predicted"])
    plain, saving, keeping = (each["bytes"]["cpu"] for each in shown)
    assert "states on their way to a checkpoint" not in plain
    assert saving["states on their way to a checkpoint"] > 0
    assert keeping["look-ahead"] > 2 * plain["look-ahead"]  # of P16, until the next pass
    assert shown[2]["iteration_secs"] < shown[0]["iteration_secs"]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"dram_budget_bytes": "900GB"}, "fuyou.dram_budget_bytes must not exceed what there is: 900.0 GB"),
        ({"gpu_budget_bytes": "80GB"}, "fuyou.gpu_budget_bytes must not exceed"),
        ({"nvme_budget_bytes": "100TB"}, "fuyou.nvme_budget_bytes must not exceed"),
        ({"dram_budget_bytes": "1GB"}, "of host memory"),
        ({"nvme_budget_bytes": "1GB", "optimizer": {"tier": "nvme"}}, "of storage"),
        ({"optimizer": {"teir": "nvme"}}, 'did you mean "fuyou.optimizer.tier"?'),
    ],
)
def test_contradictions_are_refused(
    block: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path, block) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ([], "must hold a JSON object"),
        ({**BASE, "train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu must be a whole number"),
    ],
)
def test_a_json_that_is_no_configuration_is_refused(
    base: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path, None, base=base) == 2
    assert said in capsys.readouterr().err
    assert main(["plan", "--model", "6B", "--config", str(tmp_path / "none.json")]) == 2
    assert "must be a readable JSON file" in capsys.readouterr().err


@pytest.mark.parametrize("overlap", ["backward_and_forward", "backward"])
def test_with_room_for_one_slot_updates_begin_in_step(
    overlap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    block = {"nvme_path": "/nvme", "optimizer": {"overlap": overlap, "tier": "nvme"}}
    config.write_text(json.dumps({**BASE, "fuyou": block}), encoding="utf-8")
    plan = ["plan", "--model", "6B", "--num-ssds", "2", "--dram-gb", "48", "--batch", "24", "--config", str(config)]
    secs = []
    for storage, slots in (("0.12", 1), ("1", 2)):
        assert main([*plan, "--ssd-tb", storage, "--json"]) == 0
        shown = _shown(capsys)
        assert shown["settings"]["slots"] == slots
        secs.append(shown["predicted"]["iteration_secs"])
    assert secs[0] > 1.02 * secs[1]
    assert main([*plan, "--ssd-tb", "0.12"]) == 0
    assert "one slot a chunk, as storage lacks" in capsys.readouterr().out
    assert main([*plan, "--ssd-tb", "1"]) == 0
    assert "one slot a chunk" not in capsys.readouterr().out


@pytest.mark.parametrize(("save", "slots"), [("background", 3), ("blocking", 2)])
def test_a_plan_takes_no_slot_from_saves_behind_training(
    save: str, slots: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    block = {"nvme_path": "/nvme", "checkpoint": {"save": save}}
    config.write_text(json.dumps({**BASE, "fuyou": block}), encoding="utf-8")
    plan = ["plan", "--model", "6B", "--num-ssds", "2", "--dram-gb", "48", "--config", str(config), "--json"]
    assert main([*plan, "--ssd-tb", "4"]) == 0
    assert _shown(capsys)["settings"]["slots"] == slots


def test_without_a_limit_host_memory_is_filled_as_a_run_fills_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a run refuses the saved plan."""

    def told(*more: str, **block: str) -> tuple[float, bool]:
        config = tmp_path / "ds.json"
        config.write_text(json.dumps({**BASE, "fuyou": {"nvme_path": "/nvme", **block}}), encoding="utf-8")
        plan = ["plan", "--model", "6B", "--num-ssds", "2", "--dram-gb", "64", "--config", str(config), *more]
        assert main([*plan, "--json"]) == 0
        taken = sum(_shown(capsys)["predicted"]["bytes"]["cpu"].values()) / GIB
        assert main(plan) == 0
        return taken, 'this plan needs "dram_budget_bytes": ' in capsys.readouterr().out

    auto = 0.8 * 0.95 * 64  # of what the system leaves
    assert told() == (pytest.approx(auto, rel=0.02), False)
    assert told("--pinned-gb", "60") == (pytest.approx(60, rel=0.02), True)
    assert told("--pinned-gb", "40") == (pytest.approx(40, rel=0.02), False)
    assert told(dram_budget_bytes="60GiB") == (pytest.approx(60, rel=0.02), False)


def test_durable_steps_need_room_for_two_slots_and_tell_their_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path, {"durable": True}) == 0
    durable = _shown(capsys)
    assert durable["residency"]["optimizer"] == 0.0
    assert durable["settings"]["slots"] == 2
    assert _plan(tmp_path, {"optimizer": {"tier": "nvme"}}) == 0
    plain = _shown(capsys)
    states = "P32, M, V"
    assert durable["predicted"]["bytes"]["nvme"][states] == 2 * plain["predicted"]["bytes"]["nvme"][states]
    budget = {"nvme_budget_bytes": round(1.5 * plain["predicted"]["bytes"]["nvme"][states])}
    assert _plan(tmp_path, {"optimizer": {"tier": "nvme"}, **budget}) == 0
    capsys.readouterr()
    assert _plan(tmp_path, {"durable": True, **budget}) == 2
    assert "does not fit under ds_fuyou: it needs" in capsys.readouterr().err
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**BASE, "fuyou": {"nvme_path": "/nvme", "durable": True}}), encoding="utf-8")
    assert main(["plan", "--model", "6B", "--num-ssds", "4", "--config", str(config)]) == 0
    said = capsys.readouterr().out.splitlines()
    (line,) = [line for line in said if "on storage (durable); in host" in line]
    assert 0 < float(line.split(" s (")[0].split()[-1]) <= durable["predicted"]["iteration_secs"]
