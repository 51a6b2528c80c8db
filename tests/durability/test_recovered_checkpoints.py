# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that `fuyou recover` makes of a dead run's state files is the one that the run would have saved."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_fuyou.checkpoint.recovery import recover_checkpoint, recover_weights
from ds_fuyou.cli import main
from ds_fuyou.errors import FuyouChecksumError, FuyouStateError, FuyouStorageError
from tests.durability.runs import launch
from tests.harness.forked import finish, start
from tests.harness.runner import differences, ds_config, environment, run_case, with_fuyou
from tests.parity.cases import FP16, RANDOM_LTD, WARMUP, block

SAVED = 5
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}}
SCALED = {"bf16": None, "fp16": {**FP16, "loss_scale_window": 2}}
BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
BF16_STATES = {"bf16": {**BF16_MASTERS["bf16"], "bf16_optimizer_states": True}}
STORED = {"parameters": {"tier": "nvme"}, "gradients": {"tier": "nvme"}}
RECORDED_ALONE = {"fuyou_random_states", "losses"}
"""What a checkpoint of the engine's, without a client_state, does not hold."""

KILLED = """
import os, sys
from pathlib import Path
from ds_fuyou.checkpoint import recovery
recovery._RankParts.write = lambda *_: os._exit(9)
recovery.recover_checkpoint([Path(sys.argv[2])], Path(sys.argv[1]))
"""

CASES = {
    "clipped": ({"config": {"gradient_clipping": 0.5, "scheduler": WARMUP}, "model": {"counts": True}}, 1),
    "scaled, accumulated": ({"config": {**SCALED, "gradient_accumulation_steps": 2}}, 1),
    "stored, frozen, two ranks": ({"block": STORED, "frozen": "blocks.1", "config": {"scheduler": WARMUP}}, 2),
    "stock's bf16 masters": ({"config": {"gradient_clipping": 0.5, **BF16_MASTERS}}, 1),
    "stock's bf16 states, stored, two ranks": ({"block": STORED, "config": BF16_STATES}, 2),
    "Lion, random-LTD": ({"config": {**LION, **RANDOM_LTD}}, 1),
}


def unequal(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Places at which two trees differ, in type or value."""
    if type(one) is not type(other):
        yield f"{where}: {type(one).__name__}, {type(other).__name__}"
    elif isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield f"{where}: tensors {tuple(one.shape)}, {tuple(other.shape)}"
    elif isinstance(one, Mapping):
        if list(one) != list(other):
            yield f"{where}: keys {set(one) ^ set(other)}, or their order"
        yield from unequal(getattr(one, "_metadata", None), getattr(other, "_metadata", None), f"{where}._metadata")
        for key in one.keys() & other.keys():
            yield from unequal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, Sequence) and not isinstance(one, str):
        if len(one) != len(other):
            yield f"{where}: length {len(one)}, {len(other)}"
        for place, pair in enumerate(zip(one, other, strict=False)):
            yield from unequal(*pair, f"{where}[{place}]")
    elif hasattr(one, "__dict__") and not isinstance(one, type):
        yield from unequal(vars(one), vars(other), where)
    elif one != other:
        yield f"{where}: {one!r}, {other!r}"


def dead_run(path: Path, changes: dict, world_size: int) -> tuple[list[Path], Path]:
    """State directories of a run that saved a checkpoint and was killed, and the folder to which it saved."""
    saved = path / "saved"
    processes, logs = launch(path, {"steps": SAVED, "save": str(saved), "save_after": SAVED, **changes}, world_size)
    finish(processes)
    assert [each.exitcode for each in processes] == [-9] * world_size, logs[0].read_text(errors="replace")[-3000:]
    return sorted(path.glob("ds_fuyou/*-rank*")), saved


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.compat if "two ranks" in name else ()) for name in CASES]
)
def test_its_files_are_those_of_a_checkpoint_that_the_run_saved(name: str, tmp_path: Path) -> None:
    changes, world_size = CASES[name]
    directories, saved = dead_run(tmp_path, changes, world_size)
    out = tmp_path / "recovered"
    made = recover_checkpoint(directories, out, like=saved)
    assert (made.folder, made.global_steps, made.verified) == (out / "global_step5", SAVED, True)
    assert not made.left_out
    assert not made.warning
    assert (out / "latest").read_text() == "global_step5"
    assert {file.name for file in out.iterdir()} == {file.name for file in saved.iterdir()}
    files = sorted(file.name for file in (saved / "global_step5").iterdir())
    assert files == sorted(file.name for file in made.folder.iterdir())
    assert len(files) == 2 * world_size
    for file in files:
        expected, found = (
            torch.load(folder / file, weights_only=False) for folder in (saved / "global_step5", made.folder)
        )
        assert RECORDED_ALONE & found.keys() == (RECORDED_ALONE if "model_states" in file else set())
        kept = {key: value for key, value in found.items() if key not in RECORDED_ALONE}
        assert list(unequal(expected, kept)) == []
        if "model_states" in file:
            assert bool(found["skipped_steps"]) == name.startswith("scaled")


def test_what_a_killed_recovery_leaves_is_cleaned(tmp_path: Path) -> None:
    (directory,), saved = dead_run(tmp_path, {}, 1)
    script, out = tmp_path / "recover.py", tmp_path / "recovered"
    script.write_text(KILLED)
    process = start(script, [str(out), str(directory)], environment(0, 1, 0), tmp_path / "recover.log")
    finish([process])
    assert process.exitcode == 9, (tmp_path / "recover.log").read_text(errors="replace")
    assert [path.name for path in out.iterdir()] == [".incomplete-global_step5"]
    assert main(["clean", str(out)]) == 0
    assert list(out.iterdir()) == []
    made = recover_checkpoint([directory], out)
    names = {file.name for file in (saved / "global_step5").iterdir()}
    assert {file.name for file in made.folder.iterdir()} == names


def test_what_cannot_be_read_without_the_script_is_told(tmp_path: Path) -> None:
    (directory,), _ = dead_run(tmp_path, {"model": {"counts": True}, "own_class": True}, 1)
    with pytest.raises(FuyouStateError, match=r"cannot be read without the script \(.*OwnCount"):
        recover_checkpoint([directory], tmp_path / "recovered")
    assert not (tmp_path / "recovered").exists()


def test_without_another_checkpoint_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    directories, saved = dead_run(tmp_path, {"frozen": "blocks.1"}, 1)
    made = recover_checkpoint(directories, tmp_path / "recovered", tag="mine")
    assert made.folder.name == "mine"
    assert len(made.left_out) == 1
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    expected, found = (
        torch.load(folder / name, weights_only=False) for folder in (saved / "global_step5", made.folder)
    )
    assert expected["frozen_param_fragments"]
    assert found["frozen_param_fragments"] is found["frozen_param_shapes"] is None
    assert list(unequal(expected["module"], found["module"])) == []
    file = saved / "global_step5" / name
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
        with archive.open(largest) as record:
            middle = record._fileobj.tell() + largest.file_size // 2
    with file.open("r+b") as damaged:
        damaged.seek(middle)
        (byte,) = damaged.read(1)
        damaged.seek(middle)
        damaged.write(bytes([byte ^ 1]))
    with pytest.raises(FuyouChecksumError, match=name):  # new sums would be those of what it is
        recover_checkpoint(directories, tmp_path / "from damaged", like=saved / "global_step5")


def test_a_disk_without_room_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories, saved = dead_run(tmp_path, {}, 1)
    there = sorted(saved.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    for out in (tmp_path / "new", saved):
        with pytest.raises(FuyouStorageError, match="nothing was written"):
            recover_checkpoint(directories, out, tag="other")
    assert not (tmp_path / "new").exists()
    assert sorted(saved.iterdir()) == there


def test_of_a_run_that_applied_no_step_there_are_weights_alone(tmp_path: Path) -> None:
    processes, _ = launch(tmp_path, {"steps": 3, "die": {"0": [1, "before"]}}, 1)
    finish(processes)
    (directory,) = tmp_path.glob("ds_fuyou/*-rank0")
    with pytest.raises(FuyouStateError, match="no step of this run has been applied"):
        recover_checkpoint([directory], tmp_path / "recovered")
    assert recover_weights([directory], tmp_path / "weights.pt").step == 0


def test_what_was_trained_over_other_frozen_parameters_is_not_loaded_without_a_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a checkpoint without them what the script has built counts, whatever it makes of that later; with another's
    who recovers it is told.
    """
    directories, _ = dead_run(tmp_path / "dead", {"frozen": "blocks.1"}, 2)
    recovered = tmp_path / "recovered"
    recover_checkpoint(directories, recovered)
    loads = {"steps": 1, "frozen": "blocks.1", "load": str(recovered)}  # and it ends by SIGKILL
    for name, changes, is_right in (
        ("same", {}, True),
        ("edited", {"edits": 2.0}, True),
        ("other", {"odd": 1.0}, False),
    ):
        processes, logs = launch(tmp_path / name, {**loads, **changes}, 2)
        finish(processes)
        said = "".join(log.read_text(errors="replace") for log in logs)
        assert [each.exitcode == -9 for each in processes] == [is_right] * 2, said[-3000:]
        assert ("adapters would lie over another base" in said) == (not is_right)
    _, saved = dead_run(tmp_path / "another", {"frozen": "blocks.1", "odd": 1.0}, 2)
    arguments = [*map(str, directories), "--checkpoint", str(tmp_path / "mixed"), "--like", str(saved)]
    assert main(["recover", *arguments]) == 0
    said = capsys.readouterr().err
    assert "1 of 6 frozen parameters have other values in --like than the run began with (blocks.1." in said


def converted(saved: Path, run_python: Any) -> Path:
    """Adds the universal form of the only checkpoint in the folder."""
    folder = saved / (saved / "latest").read_text()
    convert = ["-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder), "--no_strict"]
    convert += ["--output_folder", f"{folder}_universal", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = run_python(convert)
    assert done.returncode == 0, done.stderr
    (saved / "latest_universal").write_text(f"{folder.name}_universal")
    return saved


def test_stock_and_ours_load_it_and_go_on_on_another_number_of_ranks(run_python: Any, tmp_path: Path) -> None:
    """Of two ranks, kept: what was saved with `save_checkpoint` at the same step is loaded beside it."""
    config = ds_config(gradient_clipping=0.8, scheduler=WARMUP)
    case = {"steps": 3, "model": {}, "groups": "two_lrs", "config": config, "world_size": 2}
    swap, saved, recovered = tmp_path / "swap", tmp_path / "saved", tmp_path / "recovered"
    swap.mkdir()
    kept = {**block(str(swap), "states"), "keep_state": True}
    run_case(with_fuyou({**case, "save": str(saved)}, kept), tmp_path, "trained")
    directories = sorted(map(str, swap.glob("ds_fuyou/*-rank*")))
    assert main(["recover", *directories, "--checkpoint", str(recovered)]) == 0

    on_two = {**case, "load": str(recovered)}
    stock = run_case(on_two, tmp_path, "stock")
    assert differences(run_case({**case, "load": str(saved)}, tmp_path, "stock_from_saved"), stock) == []
    config = {**config, "checkpoint": {"load_universal": True}}
    on_one = {**case, "world_size": 1, "config": config}
    loaded = [
        run_case({**on_one, "load": str(converted(folder, run_python))}, tmp_path, f"one_from_{folder.name}")
        for folder in (saved, recovered)
    ]
    assert differences(*loaded) == []
    ours = with_fuyou({**on_one, "load": str(recovered)}, block(str(swap), "all"))
    assert differences(loaded[0], run_case(ours, tmp_path, "one_ours")) == []
