# SPDX-License-Identifier: Apache-2.0
"""A run that is killed twice and goes on in place equals, to the bit, one that nothing happened to."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.checkpoint.recovery import recover_checkpoint, recover_weights
from ds_fuyou.cli import main
from ds_fuyou.state_layout import WHOLE, StateLayout, layout_of
from ds_fuyou.storage.records import COMMIT_NAME, CONTENTS_NAME, MANIFEST_NAME, read_record, write_record
from ds_fuyou.storage.store import SlotStore
from tests.durability.runs import kill_some, launch, run_to_end, steps_in, wait_for_step
from tests.harness.damage import flip_bit
from tests.harness.forked import finish
from tests.parity.cases import RANDOM_LTD
from tests.unit.test_filesystems import can_mount, fill

STEPS = 7
RESUME = {"resume": "auto"}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 4e-3, "warmup_num_steps": 5}}}
WHOLE_MASTERS = {"optimizer": {"tier": "nvme", "masters": "whole"}}  # others are split
INT8 = {"optimizer": {"tier": "nvme", "masters": "split", "moments": "int8"}}
ALL_STORED = {"parameters": {"tier": "nvme"}, "gradients": {"tier": "nvme"}}
BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
BF16_STATES = {"bf16": {**BF16_MASTERS["bf16"], "bf16_optimizer_states": True}}
UNPLACED = {"zero_optimization": {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}}
FP16 = {
    "bf16": None,
    "fp16": {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 2, "hysteresis": 1},
}


def same(one: object, other: object) -> bool:
    """NaN equals itself: losses of skipped steps."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(float(str(other))))


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    assert expected.keys() == found.keys()
    return [name for name in expected if not same(expected[name], found[name])]


def require_same(undisturbed: Path, out: Path) -> None:
    """Whatever ``out`` has of a step."""
    for file in out.iterdir():
        expected = torch.load(undisturbed / file.name, weights_only=False)
        assert differences(expected, torch.load(file, weights_only=False)) == [], file.name


def killed_at(step: int, path: Path, case: dict[str, Any], world_size: int) -> str:
    """What rank 0 said before it died of that step, which all ranks have committed."""
    status, said = end_of(path, {**case, "die": {"0": [step, "all"]}}, f"killed{step}.", world_size)
    assert status == -9, said[-3000:]
    return said


@contextlib.contextmanager
def state_files(path: Path) -> Iterator[SlotStore]:
    """Rank 0's, of the only run that left some."""
    (directory,) = path.glob("ds_fuyou/*-rank0")
    with contextlib.closing(SlotStore.open([directory], None)) as store:
        yield store


CASES = {
    "clipped": ({"config": {"gradient_clipping": 0.5, **WARMUP}}, 1),
    "stored, accumulated": (
        {"config": {"gradient_accumulation_steps": 2}, "block": ALL_STORED, "frozen": "blocks.1"},
        1,
    ),
    "whole": ({"config": {"gradient_clipping": 0.5, **WARMUP}, "block": WHOLE_MASTERS}, 1),
    "whole, stored, two ranks": ({"config": WARMUP, "block": {**WHOLE_MASTERS, **ALL_STORED}, "slow": {"1": 4e6}}, 2),
    "8-bit moments": ({"config": {"gradient_clipping": 0.5, **WARMUP}, "block": INT8}, 1),
    "stock's bf16 masters": ({"config": {"gradient_clipping": 0.5, **WARMUP, **BF16_MASTERS}}, 1),
    "stock's bf16 states, stored, two ranks": (
        {"config": {**WARMUP, **BF16_STATES}, "block": ALL_STORED, "slow": {"1": 4e6}},
        2,
    ),
    "fp16, skipped steps": ({"config": {**FP16, **WARMUP}}, 1),
    "all generators": ({"generators": "all", "block": {"random_states": "all"}}, 1),
    "drawn before the forward": ({"draws_first": True}, 1),
    "extra state": ({"model": {"counts": True}, "config": WARMUP}, 1),
    "random-LTD": ({"config": RANDOM_LTD}, 1),
    "two ranks": ({"config": {"gradient_clipping": 0.5, **WARMUP}, "slow": {"1": 4e6}}, 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.compat if name in ("clipped", "two ranks") else ()) for name in CASES]
)
def test_a_run_that_is_killed_twice_equals_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    changes, world_size = CASES[name]
    case = {"steps": STEPS, **changes}
    undisturbed, killed, out = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    run_to_end(undisturbed, {**case, "out": str(undisturbed)}, world_size)
    case["block"] = {**case.get("block", {}), **RESUME}
    for number, die in enumerate(({"0": [2, "after"]}, {str(world_size - 1): [4, "before"]})):
        processes, logs = launch(killed, {**case, "die": die}, world_size, f"killed{number}.")
        finish(processes)
        assert processes[int(next(iter(die)))].exitcode == -9, logs[0].read_text()[-3000:]
        said = logs[0].read_text()
        assert ("going on from step" in said) == bool(number), said[-3000:]
    said = run_to_end(killed, {**case, "out": str(out)}, world_size, "resumed")
    assert "going on from step 3, in place" in said
    assert "chunks stay as in the files" not in said
    assert not list(killed.glob("ds_fuyou")), "a clean end removes it"
    steps = sorted(int(file.name) for file in out.iterdir())
    assert steps[-1] == STEPS
    assert steps[0] > 3
    for step in steps:
        expected = torch.load(undisturbed / str(step), weights_only=False)
        assert differences(expected, torch.load(out / str(step), weights_only=False)) == [], step


@pytest.mark.parametrize(
    ("first", "then", "block", "world_size"),
    [
        ("whole", "auto", {}, 1),
        ("whole", "split", ALL_STORED, 2),
        ("auto", "whole", {}, 2),
        ("split", "whole", ALL_STORED, 1),
    ],
)
def test_a_run_goes_on_in_the_masters_of_the_files(
    first: str, then: str, block: dict, world_size: int, tmp_path: Path
) -> None:
    """Killed twice under other masters than those that it began with; they stay, and so does every bit."""
    case = {"steps": STEPS, "config": {"gradient_clipping": 0.5, **WARMUP}}
    undisturbed, killed, out = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    run_to_end(undisturbed, {**case, "block": block, "out": str(undisturbed)}, world_size)
    for number, masters in enumerate((first, then, then)):
        case["block"] = {**block, **RESUME, "optimizer": {"tier": "nvme", "masters": masters}}
        if number == 2:
            said = run_to_end(killed, {**case, "out": str(out)}, world_size, "resumed")
            break
        said = killed_at(2 + number, killed, case, world_size)
        theirs = "whole" if first == "whole" else "split"
        assert (f"masters stay {theirs}, as in the files that this run goes on from" in said) == bool(number)
        with state_files(killed) as store:
            assert stored_states(store)[0].masters == theirs
    assert "going on from step 3, in place" in said
    require_same(undisturbed, out)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_keeps_in_memory_what_its_files_lack(world_size: int, tmp_path: Path) -> None:
    """P16 that earlier versions kept there is the first of the model; a run of these begins with another part of it."""
    shares = {"plan": {"chunk_bytes": 16384, "residency": {"parameters": 0.5, "gradients": 1.0}}}
    case = {"steps": STEPS, "config": WARMUP, "block": {**RESUME, **shares}}
    undisturbed, killed, anew, out = (tmp_path / name for name in ("undisturbed", "killed", "anew", "out"))
    out.mkdir()
    run_to_end(undisturbed, {**case, "out": str(undisturbed)}, world_size)
    stored = []
    for path, changes in ((anew, {}), (killed, {"first_stay": True}), (killed, {})):
        killed_at(3 if path.exists() else 2, path, {**case, **changes}, world_size)
        with state_files(path) as store:
            stored.append({name for name in store.regions if name.startswith("param16/")})
    assert stored[0] != stored[1] == stored[2]
    said = run_to_end(killed, {**case, "out": str(out)}, world_size, "resumed")
    assert "going on from step 3, in place" in said
    assert "masters stay" not in said
    require_same(undisturbed, out)


@pytest.mark.parametrize(
    ("world_size", "kib", "later_kib", "larger"),
    [(1, 240, 1 << 16, 32768), (2, 180, 1 << 16, 32768), pytest.param(1, 240, 260, 20480, id="same cuts")],
)
def test_a_run_goes_on_from_its_files_whatever_memory_is_free(
    world_size: int, kib: int, later_kib: int, larger: int, tmp_path: Path
) -> None:
    """A part of P16 is in memory because there was little of it, in chunks of a size that suited that; by itself the
    run would have more there, states included, or chunks that leave too little to the lanes.
    """
    case: dict[str, Any] = {"steps": STEPS, "config": {"gradient_clipping": 0.5, **WARMUP, **UNPLACED}}
    undisturbed, killed, out = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    run_to_end(undisturbed, {**case, "out": str(undisturbed)}, world_size)
    for number in range(3):
        case |= {"block": {**RESUME, "dram_budget_bytes": kib << 10}, "chunk_sizes": [16384]}
        if number:
            case["block"] |= {"dram_budget_bytes": later_kib << 10, "optimizer": {"tier": "auto"}}
            case["chunk_sizes"].insert(0, larger)
        else:
            case["block"]["gradients"] = {"tier": "nvme"}
        if number == 2:
            said = run_to_end(killed, {**case, "out": str(out)}, world_size, "resumed")
            break
        said = killed_at(2 + number, killed, case, world_size)
        assert ("chunks stay as in the files that this run goes on from" in said) == bool(number), said[-3000:]
        with state_files(killed) as store:
            num_chunks = sum(name.startswith("state/") for name in store.regions)
            assert 0 < sum(name.startswith("param16/") for name in store.regions) < num_chunks
            assert sum(name.startswith("grad16/") for name in store.regions) == num_chunks
    assert "going on from step 3, in place" in said
    require_same(undisturbed, out)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_goes_on_from_where_p16_has_moved_to(world_size: int, tmp_path: Path) -> None:
    """By hand: a run that is to be gone on from does not do that. The step in which it moves is committed twice, first
    without its state of training."""
    case: dict[str, Any] = {"steps": STEPS, "config": {"gradient_clipping": 0.5, **WARMUP, **UNPLACED}}
    case |= {"block": {**RESUME, "dram_budget_bytes": 1 << 26}, "chunk_sizes": [16384]}
    undisturbed, killed, out = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    run_to_end(undisturbed, {**case, "out": str(undisturbed)}, world_size)
    for step, shares in ((3, {"2": 0.5}), (5, {"4": 0.0})):
        killed_at(step, killed, {**case, "params_after": shares}, world_size)
        with state_files(killed) as store:
            num_chunks = sum(name.startswith("state/") for name in store.regions)
            stored = sum(name.startswith("param16/") for name in store.regions)
            assert (1 - next(iter(shares.values()))) * num_chunks == pytest.approx(stored, abs=1.5)
    said = run_to_end(killed, {**case, "params_after": {"6": 0.7}, "out": str(out)}, world_size, "resumed")
    assert "going on from step 5, in place" in said
    require_same(undisturbed, out)


def test_a_run_does_not_go_on_with_more_in_memory_than_fits(tmp_path: Path) -> None:
    case = {"steps": STEPS, "config": UNPLACED, "chunk_sizes": [16384]}
    refused, waits = 1, 2
    for number, budget in enumerate((1 << 26, 200 << 10, 240 << 10, 1 << 26)):
        block = {**RESUME, "dram_budget_bytes": budget}
        status, said = end_of(tmp_path, {**case, "block": block, "die": {"0": [2 + number, "after"]}}, str(number))
        assert (status == -9) == (number != refused), said[-3000:]
        assert ("of host memory it holds 0.1 MiB and what is on its way" in said) == (number == refused)
        assert ("going on from step" in said) == (number > refused)
        assert ("P16 (parameters) 51.5 kB (1 version)" in said) == (number == waits), "where two do not fit"


def test_a_run_does_not_go_on_from_moments_of_another_kind(tmp_path: Path) -> None:
    case = {"steps": STEPS, "die": {"0": [2, "after"]}}
    of = {
        moments: {**RESUME, "optimizer": {"tier": "nvme", "masters": "whole", "moments": moments}}
        for moments in ("fp32", "int8")
    }
    assert end_of(tmp_path, {**case, "block": of["int8"]}, "first")[0] == -9
    said = end_of(tmp_path, {**case, "block": of["fp32"]}, "second")[1]
    assert "its moments are 'int8', and fuyou.optimizer.moments says 'fp32': say 'int8' to go on from it" in said
    assert "STEP" not in said
    said = end_of(tmp_path, {**case, "block": of["int8"], "die": {"0": [3, "after"]}}, "third")[1]
    assert "going on from step 2, in place" in said


def test_three_slots_of_a_run_that_saves_behind_training_are_gone_on_from(tmp_path: Path) -> None:
    """Killed in the second step after the call, whose updates write into the third."""
    block = {**RESUME, "checkpoint": {"save": "background"}}
    case = {"steps": STEPS, "config": {"gradient_clipping": 0.5, **WARMUP}, "block": block}
    undisturbed, killed, out = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    run_to_end(undisturbed, {**case, "out": str(undisturbed)}, 1)
    for generation, when in ((4, "after"), (6, "before")):
        dies = {**case, "die": {"0": [generation, when]}, "save": str(tmp_path / "saved")}
        processes, logs = launch(killed, dies, 1, f"killed{generation}.")
        finish(processes)
        assert processes[0].exitcode == -9, logs[0].read_text()[-3000:]
        (directory,) = killed.glob("ds_fuyou/*")
        with contextlib.closing(SlotStore.open([directory], None)) as store:
            assert {region.num_slots for region in store.regions.values()} == {3}
    said = run_to_end(killed, {**case, "out": str(out)}, 1, "resumed")
    assert "going on from step 5, in place" in said
    require_same(undisturbed, out)


def end_of(path: Path, case: dict, name: str, world_size: int = 1) -> tuple[int | None, str]:
    """Status and output of rank 0."""
    processes, logs = launch(path, case, world_size, name)
    finish(processes)
    return processes[0].exitcode, logs[0].read_text(errors="replace")


def stored_states(store: SlotStore) -> tuple[StateLayout, list[int]]:
    """Their layout, and the elements of every chunk."""
    contents = store.contents()
    masters = contents.get("states", {}).get("masters", WHOLE)
    return layout_of(masters, 2), [end - begin for _, begin, end in contents["chunks"]]


def flip_a_bit(directory: Path, part: int = 0) -> None:
    """Of the last commit's first chunk: of P32, or of a moment."""
    store = SlotStore.open([directory], None)
    commit = store.last_commit()
    assert commit is not None
    layout, (first, *_) = stored_states(store)
    names = ("low" if layout.is_split else "master", "moment0", "moment1")
    begin = store.extents("state/0", commit.slots["state/0"])[0].offset + layout.offsets(first)[names[part]]
    store.close()
    flip_bit(directory / "data", begin + 100)


def test_state_files_that_do_not_fit_or_were_altered_stay_where_they_are(tmp_path: Path) -> None:
    case = {"steps": STEPS, "die": {"0": [2, "after"]}, "block": RESUME}
    status, said = end_of(tmp_path, case, "first")
    assert (status, "this run starts from its beginning" in said) == (-9, True), said[-3000:]
    (directory,) = tmp_path.glob("ds_fuyou/*")

    other = {**case, "block": {**RESUME, "plan": {"chunk_bytes": 65536}}}
    status, said = end_of(tmp_path, other, "other")
    assert status not in (0, -9), said[-3000:]
    assert f"so it does not begin anew, either: {directory}: its dtype, optimizer or groups are others" in said
    whole = (directory / MANIFEST_NAME).read_bytes()
    (directory / MANIFEST_NAME).write_bytes(whole[:-1])
    status, said = end_of(tmp_path, case, "torn")
    assert status not in (0, -9), said[-3000:]
    assert f"so it does not begin anew, either: {directory}: its manifest is missing or cannot be read" in said
    (directory / MANIFEST_NAME).write_bytes(whole)
    record, deleted = directory / COMMIT_NAME, tmp_path / "deleted"
    record.rename(deleted)
    status, said = end_of(tmp_path, case, "deleted")
    assert status not in (0, -9), said[-3000:]
    assert f"so it does not begin anew, either: {directory}: {COMMIT_NAME} is missing" in said
    deleted.rename(record)
    assert {directory} == set(tmp_path.glob("ds_fuyou/*"))

    flip_a_bit(directory)
    status, said = end_of(tmp_path, case, "flipped")
    assert status not in (0, -9), said[-3000:]
    assert "reading the state of chunk 0 failed: the bytes read are not those that were written" in said
    assert directory.exists()
    flip_a_bit(directory)
    status, said = end_of(tmp_path, {**case, "die": {"0": [3, "after"]}}, "again")
    assert (status, "going on from step 2, in place" in said) == (-9, True), said[-3000:]
    assert {directory} == set(tmp_path.glob("ds_fuyou/*"))


@pytest.mark.parametrize(("block", "zero_init"), [({}, False), (ALL_STORED, True)])
def test_a_run_does_not_go_on_over_other_frozen_parameters(block: dict, zero_init: bool, tmp_path: Path) -> None:
    """State files do not hold them: they are as the script builds them, which must be as the dead run's did."""
    case = {"steps": STEPS, "die": {"0": [2, "after"]}, "frozen": "blocks.1", "block": {**RESUME, **block}}
    case["zero_init"] = zero_init
    status, said = end_of(tmp_path, case, "first")
    assert status == -9, said[-3000:]
    status, said = end_of(tmp_path, {**case, "seed": 1}, "other")
    assert status not in (0, -9), said[-3000:]
    assert "its script had built frozen parameters with other values" in said
    status, said = end_of(tmp_path, {**case, "die": {"0": [3, "after"]}}, "again")
    assert (status, "going on from step 2, in place" in said) == (-9, True), said[-3000:]


@pytest.mark.parametrize("block", [{}, ALL_STORED])
def test_no_rank_goes_on_where_one_has_other_frozen_parameters(block: dict, tmp_path: Path) -> None:
    """In its part alone. State files stay as they are on both: the right ones are gone on from afterwards."""
    case = {"steps": STEPS, "frozen": "blocks.1", "block": {**RESUME, **block}}
    status, said = end_of(tmp_path, {**case, "die": {"0": [2, "all"], "1": [2, "all"]}}, "first", 2)
    assert status == -9, said[-3000:]
    before = set(tmp_path.glob("ds_fuyou/*"))
    processes, logs = launch(tmp_path, {**case, "odd": 1.0}, 2, "other")
    finish(processes)
    assert [process.exitcode for process in processes] == [1, 1]
    assert all("had built frozen parameters with other values" in log.read_text() for log in logs)
    assert set(tmp_path.glob("ds_fuyou/*")) == before
    status, said = end_of(tmp_path, {**case, "ends": True}, "again", 2)
    assert (status, "going on from step 2, in place" in said) == (0, True), said[-3000:]


@pytest.mark.parametrize(("first", "second"), [(True, True), (False, True), (True, False)])
def test_edits_of_frozen_parameters_before_an_engine_is_built_again(first: bool, second: bool, tmp_path: Path) -> None:
    """The script makes them in every run, also where the engine before ran out of memory, over the same parameters."""
    case = {"steps": STEPS, "frozen": "blocks.1", "edits": 0.5, "block": RESUME}
    runs_out = {"runs_out": "same model"}
    status, said = end_of(tmp_path, {**case, **(runs_out if first else {}), "die": {"0": [2, "after"]}}, "first")
    assert status == -9, said[-3000:]
    status, said = end_of(tmp_path, {**case, **(runs_out if second else {}), "ends": True}, "second")
    assert (status, "going on from step 2, in place" in said) == (0, True), said[-3000:]


@pytest.mark.parametrize("where", ["moments", "P16"])
def test_what_changed_on_storage_ends_the_first_step_and_the_commit_stays(where: str, tmp_path: Path) -> None:
    case = {"steps": STEPS, "die": {"0": [2, "after"]}, "block": {**RESUME, **ALL_STORED}}
    assert end_of(tmp_path, case, "first")[0] == -9
    (directory,) = tmp_path.glob("ds_fuyou/*")
    if where == "moments":
        flip_a_bit(directory, 2)
    else:
        flip_p16(directory)
    status, said = end_of(tmp_path, case, "flipped")
    assert status not in (0, -9), said[-3000:]
    assert "going on from step 2, in place" in said
    assert "the bytes read are not those that were written" in said
    assert ("the state of chunk 0 failed" in said) == (where == "moments")
    assert "STEP 4" not in said, "at the latest the next step says so"
    if where == "moments":
        flip_a_bit(directory, 2)
    else:
        flip_p16(directory)
    status, said = end_of(tmp_path, {**case, "die": {"0": [3, "after"]}}, "again")
    assert (status, "going on from step 2, in place" in said) == (-9, True), said[-3000:]


@pytest.mark.parametrize("checksum", [True, False])
def test_a_nan_from_storage_ends_the_run(checksum: bool, tmp_path: Path) -> None:
    """Steps would be skipped for ever, and P16 never be written again."""
    case = {"steps": 40, "poisoned": 2, "config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    case["block"] = {**ALL_STORED, "checksum": checksum, "plan": {"prefetch_bytes": 4096}}
    status, said = end_of(tmp_path, case, "poisoned")
    assert status not in (0, -9), said[-3000:]
    if checksum:
        assert "the bytes read are not those that were written" in said
    else:
        assert re.search(r"4 steps in a row were skipped: parameter \S+ on storage holds \d+ values that are not", said)
    assert "STEP 8" not in said


def flip_p16(directory: Path) -> None:
    """Of the last commit's first chunk."""
    store = SlotStore.open([directory], None)
    commit = store.last_commit()
    assert commit is not None
    begin = store.extents("param16/0", commit.slots["state/0"])[0].offset
    store.close()
    flip_bit(directory / "data", begin + 100)


def test_what_taking_over_reads_and_writes_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Everything on storage: nothing. P16 in memory is made of P32."""
    moved = {}
    for num_layers in (3, 9):
        for parameters in ("nvme", "cpu"):
            path = tmp_path / f"{num_layers}-{parameters}"
            case = {"steps": STEPS, "model": {"num_layers": num_layers}, "die": {"0": [2, "after"]}}
            case["block"] = {
                **RESUME,
                **ALL_STORED,
                "parameters": {"tier": parameters},
            }
            status, said = end_of(path, case, "first")
            assert status == -9, said[-3000:]
            assert int(re.findall(r"MOVED \d+ (\d+)", said)[0]) > 0, "a run that begins writes its states"
            said = end_of(path, {**case, "die": {"0": [3, "after"]}}, "second")[1]
            assert "going on from step 2, in place" in said
            read, written = map(int, re.findall(r"MOVED (\d+) (\d+)", said)[0])
            assert written == 0
            moved[num_layers, parameters] = read
            (directory,) = path.glob("ds_fuyou/*")
            store = SlotStore.open([directory], None)
            layout, numels = stored_states(store)
            store.close()
            if parameters == "cpu":
                assert read == sum(map(layout.num_master_bytes, numels))
            else:
                assert read == 0
    assert moved[9, "cpu"] > 1.5 * moved[3, "cpu"], "the models differ"


@pytest.mark.parametrize(("zero_init", "world_size"), [(False, 1), (True, 1), (True, 2)])
def test_nothing_is_read_before_the_first_forward(zero_init: bool, world_size: int, tmp_path: Path) -> None:
    """Everything on storage, frozen parameters, too; the values that are there are those that the forward reads."""
    case = {"steps": STEPS, "zero_init": zero_init, "frozen": "blocks.1", "block": {**RESUME, **ALL_STORED}}
    for step in (2, 3):
        said = end_of(tmp_path, {**case, "die": {"0": [step, "after"]}}, str(step), world_size)[1]
        assert ("going on from step 2, in place" in said) == (step == 3), said[-3000:]
    assert re.findall(r"READ (\d+)", said) == ["0"]


def test_state_files_of_other_tiers_are_not_gone_on_from(tmp_path: Path) -> None:
    """P16 on storage would stay as it is in a run that keeps it in memory, and be old for the one after that."""
    case = {"steps": STEPS, "die": {"0": [2, "after"]}}
    for number, parameters in enumerate(("nvme", "cpu", "nvme")):
        block = {**RESUME, "parameters": {"tier": parameters}}
        status, said = end_of(tmp_path, {**case, "block": block, "die": {"0": [2 + number, "after"]}}, str(number))
        assert (status == -9) == (parameters == "nvme"), said[-3000:]
        assert ("it was made with other tiers or shares: of parameters 0.0 % are" in said) == (parameters == "cpu")
        assert ("going on from step 2, in place" in said) == (number == 2)


def forget(directory: Path, what: str) -> None:
    """In what state files say of themselves, as older versions left it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        contents = read_record(fd, directory, CONTENTS_NAME)
        assert contents is not None
        write_record(fd, directory, CONTENTS_NAME, {name: value for name, value in contents.items() if name != what})
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("change", "world_size", "why"),
    [
        ({"turned": True}, 1, "its parameters are grouped or ordered otherwise"),
        ({"turned": True}, 2, "its parameters are grouped or ordered otherwise"),
        ({"frozen": "blocks.1"}, 1, "others of its parameters are frozen"),
        ({"frozen": "blocks.1", "block": {**RESUME, **ALL_STORED}, "zero_init": True}, 2, "others of its parameters"),
    ],
)
def test_no_run_begins_beside_its_files_with_other_groups_or_others_frozen(
    change: dict, world_size: int, why: str, tmp_path: Path
) -> None:
    """It would be another model's by the order of what it trains. Also where they are of another number of ranks. Those
    of older versions do not say what was frozen, and are gone on from as they are."""
    case = {"steps": STEPS, "block": RESUME, "ends": True}
    status, said = end_of(tmp_path, {**case, "die": {"0": [2, "all"], "1": [2, "all"]}}, "first", 2)
    assert status == -9, said[-3000:]
    before = sorted(tmp_path.glob("ds_fuyou/*"))
    status, said = end_of(tmp_path, {**case, **change}, "changed", world_size)
    assert (status, "STEP" in said) == (1, False), said[-3000:]
    assert f"does not begin anew, either: {before[0]}: {why}" in said
    assert sorted(tmp_path.glob("ds_fuyou/*")) == before
    for directory in before:
        forget(directory, "shapes")
    status, said = end_of(tmp_path, case, "again", 2)
    assert (status, "going on from step 2, in place" in said) == (0, True), said[-3000:]


def test_models_that_have_parameters_in_common_are_others(tmp_path: Path) -> None:
    """One with fewer layers, all of which are in the other."""
    case = {"steps": 2, "block": RESUME, "ends": True}
    assert end_of(tmp_path, {**case, "die": {"0": [2, "after"]}, "model": {"num_layers": 2}}, "less")[0] == -9
    status, said = end_of(tmp_path, case, "more")
    assert (status, "STEP 2" in said, "is of this model" in said) == (0, True, False), said[-3000:]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_another_user_left_is_passed_over_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a container does that ran as root before. Nothing of them may be taken: anybody could have laid them there."""
    case = {"steps": 2, "block": RESUME, "ends": True}
    killed_at(1, tmp_path, case, 1)
    (left,) = (tmp_path / "ds_fuyou").glob("*-rank0")
    os.chown(left, 65534, 65534)
    status, said = end_of(tmp_path, case, "again")
    assert (status, "STEP 2" in said, "going on from" in said) == (0, True, False), said[-3000:]
    assert f"state files of other users are passed over: 1 directories, {left} is user 65534's" in said
    assert main(["clean", "--dry-run", str(tmp_path)]) == 0
    assert "no state found; 1 directories are of other users" in capsys.readouterr().out


def test_experiments_with_others_frozen_run_beside_each_other(tmp_path: Path) -> None:
    """What the other one left when it died later hinders nobody who goes on from files of his own."""
    case = {"steps": 2, "block": RESUME}
    processes, logs = launch(tmp_path, case, 1)
    wait_for_step(2, processes, logs)
    status, said = end_of(tmp_path, {**case, "die": {"0": [1, "after"]}, "frozen": "blocks.1"}, "beside")
    assert (status, "is of this model" in said) == (-9, False), said[-3000:]
    assert processes[0].is_alive(), "it waits to be killed"
    finish(processes, 0)
    status, said = end_of(tmp_path, {**case, "steps": 3, "ends": True}, "again")
    assert (status, "going on from step 2, in place" in said) == (0, True), said[-3000:]
    assert "is of this model, but this run cannot go on from it: others of its parameters are frozen" in said


def test_no_run_begins_beside_state_files_in_use_or_without_a_rank(tmp_path: Path) -> None:
    """Also the rank whose files are there or free says so, and does not wait for the other."""
    case = {"steps": 2, "block": RESUME}
    used, left = tmp_path / "used", tmp_path / "left"
    processes, logs = launch(used, case, 1)
    wait_for_step(2, processes, logs)
    status, said = end_of(used, {**case, "die": {"0": [2, "after"]}}, "second")
    assert processes[0].is_alive(), "it waits to be killed"
    finish(processes, 0)
    assert status not in (0, -9), said[-3000:]
    assert re.search(r"does not begin anew, either: \S+: a process uses it", said)
    status, said = end_of(used, {**case, "die": {"0": [3, "after"]}, "steps": 3}, "third")
    assert (status, "going on from step 2, in place" in said) == (-9, True), said[-3000:]

    processes, logs = launch(left, case, 2)
    wait_for_step(2, processes, logs)
    finish(processes, 0)
    (second,) = left.glob("ds_fuyou/*-rank1")
    shutil.rmtree(second)
    processes, logs = launch(left, case, 2, "again")
    finish(processes)
    assert all(each.exitcode not in (0, -9) for each in processes)
    for log in logs:
        assert re.search(r"does not begin anew, either: \S+: rank 1 found nothing of that run", log.read_text())


@pytest.mark.parametrize("when", ["disk", "interrupt", "behind"])
def test_a_start_that_fails_while_it_takes_files_over_leaves_them(when: str, tmp_path: Path) -> None:
    case = {"steps": 3, "block": RESUME, "ends": True}
    killed_at(2, tmp_path, case, 1)
    status, said = end_of(tmp_path, {**case, "adopting": when}, "fails")
    assert status not in (0, -9), said[-3000:]
    assert "the engine could not be built: the state of the last step stays in" in said or when != "behind"
    status, said = end_of(tmp_path, case, "again")
    assert (status, "going on from step 2, in place" in said) == (0, True), said[-3000:]


def test_a_rank_that_fails_in_the_first_step_keeps_no_later_start_from_beginning(tmp_path: Path) -> None:
    """It has nothing to keep, and its files go; the other one's stay, with a step that nobody can go on from."""
    case = {"steps": 3, "block": RESUME}
    processes, logs = launch(tmp_path, {**case, "die": {"1": [1, "raises"]}}, 2, "fails")
    finish(processes)
    (left,) = (tmp_path / "ds_fuyou").glob("*-rank*")
    assert left.name.endswith("rank0"), logs[0].read_text()[-3000:]
    said = run_to_end(tmp_path, {**case, "ends": True}, 2, "again")
    assert "STEP 3" in said
    assert "going on from" not in said
    assert [*(tmp_path / "ds_fuyou").glob("*-rank*")] == [left], "it may be that a disk is not there this time"


def test_a_step_has_as_many_micro_batches_as_the_configuration_says_now(tmp_path: Path) -> None:
    """Of another number, that of finished ones may be no multiple."""
    out = tmp_path / "out"
    out.mkdir()
    case = {"steps": 4, "generators": "none", "block": RESUME, "config": {"gradient_accumulation_steps": 3}}
    assert end_of(tmp_path, {**case, "die": {"0": [2, "after"]}}, "first")[0] == -9
    case["config"] = {"gradient_accumulation_steps": 4}
    assert "going on from step 2, in place" in run_to_end(tmp_path, {**case, "out": str(out)}, 1, "second")
    for step in (3, 4):
        found = torch.load(out / str(step), weights_only=False)
        assert (found["applied"], found["begun"]) == (step, 0)


def test_of_two_runs_that_fit_the_later_one_goes_on_and_the_other_is_told(tmp_path: Path) -> None:
    case = {"steps": STEPS, "generators": "none"}
    for resume, die in (("off", 3), ("off", 2), ("auto", 3)):
        status, said = end_of(tmp_path, {**case, "block": {"resume": resume}, "die": {"0": [die, "after"]}}, f"to{die}")
        assert status == -9, said[-3000:]
    assert "going on from step 2, in place" in said
    assert "cannot go on from it: its step 3 is whole, but" in said
    other = {"resume": "off", "plan": {"chunk_bytes": 65536}}
    assert end_of(tmp_path, {**case, "block": other, "die": {"0": [1, "after"]}}, "later")[0] == -9
    status, said = end_of(tmp_path, {**case, "block": RESUME, "die": {"0": [4, "after"]}}, "again")
    assert status not in (0, -9), "the run that began last is another one"
    assert "its dtype, optimizer or groups are others" in said


@pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount")
def test_a_disk_that_others_have_filled_does_not_stop_who_goes_on(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    try:
        case = {"steps": 4, "generators": "none", "block": {**RESUME, "nvme_path": str(disk)}}
        assert end_of(tmp_path, {**case, "die": {"0": [2, "after"]}}, "first")[0] == -9
        fill(disk)
        status, said = end_of(tmp_path, {**case, "die": {"0": [4, "after"]}}, "second")
        assert status == -9, said[-3000:]
        assert "going on from step 2, in place" in said
        assert "writing engine.json failed; what it said before stands" in said
        (directory,) = disk.glob("ds_fuyou/*")
        made = recover_checkpoint([directory], tmp_path / "recovered")
        assert made.global_steps == 4
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_signal_within_a_step_leaves_the_one_before(tmp_path: Path) -> None:
    """After the update was applied, before the engine counted it."""
    undisturbed, killed, out = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    case = {"steps": 5, "block": RESUME}
    run_to_end(undisturbed, {**case, "out": str(undisturbed)}, 1)
    status, said = end_of(killed, {**case, "signalled": 4}, "first")
    assert status == 128 + signal.SIGTERM, said[-3000:]
    assert "STEP 3" in said
    assert "going on from step 3, in place" in run_to_end(killed, {**case, "out": str(out)}, 1, "resumed")
    for step in (4, 5):
        expected = torch.load(undisturbed / str(step), weights_only=False)
        assert differences(expected, torch.load(out / str(step), weights_only=False)) == [], step


@pytest.mark.parametrize("other", [{}, {"block": {**RESUME, "plan": {"chunk_bytes": 16384}}}], ids=["alike", "unlike"])
def test_each_of_two_engines_of_one_model_goes_on_from_its_own_state(other: dict, tmp_path: Path) -> None:
    """Also where settings differ."""
    case = {"steps": 2, "two": [{}, other], "block": RESUME}
    told = []
    for name in ("first", "second"):
        status, said = end_of(tmp_path, case, name)
        assert status == -9, said[-3000:]
        told.append(dict(re.findall(r"(BEFORE \d|AFTER \d) (.*)", said)))
    first, second = told
    assert first["AFTER 0"] != first["AFTER 1"]
    assert [second[f"BEFORE {number}"] for number in (0, 1)] == [first[f"AFTER {number}"] for number in (0, 1)]
    assert "its dtype" not in said, "the other one's files are no mistake"


def test_steps_that_no_engine_ends_are_committed(tmp_path: Path) -> None:
    """With part of the states in host memory, too: updates of the third would wait for the commit of the first."""
    shares = {"parameters": 0.0, "optimizer": 0.5, "gradients": 1.0}
    for name, block in (("mixed", {"optimizer": {}, "plan": {"residency": shares, "chunk_bytes": 65536}}), ("all", {})):
        case = {"steps": 5, "by_optimizer": True, "generators": "none", "block": block, "out": str(tmp_path)}
        assert "STEP 5" in run_to_end(tmp_path / name, case, 1)


def test_what_cannot_be_pickled_is_named_and_training_goes_on(tmp_path: Path) -> None:
    case = {"steps": STEPS, "die": {"0": [3, "after"]}, "block": RESUME, "hands_over_code": True}
    status, said = end_of(tmp_path, case, "first")
    assert status == -9, said[-3000:]
    assert said.count("what the script handed over (engine.fuyou_client_state) cannot be pickled") == 1
    (directory,) = tmp_path.glob("ds_fuyou/*")
    assert recover_weights([directory], tmp_path / "weights.pt").step == 3
    status, said = end_of(tmp_path, case, "second")
    assert status not in (0, -9), said[-3000:]
    assert f"either: {directory}: of its last step, 3, the state of training was not recorded" in said


def test_a_directory_that_was_moved_is_told_where_it_was(tmp_path: Path) -> None:
    first, moved, case = tmp_path / "first", tmp_path / "moved", {"steps": 3, "block": RESUME}
    assert end_of(first, {**case, "die": {"0": [2, "after"]}}, "log")[0] == -9
    first.rename(moved)
    status, said = end_of(moved, case, "again")
    assert status not in (0, -9)
    assert f"it was made in {first} and moved here: give it back its place" in said, said[-3000:]
    moved.rename(first)
    assert "going on from step 2, in place" in run_to_end(first, {**case, "ends": True}, 1, "there")


def test_a_checkpoint_that_was_loaded_is_a_commit(tmp_path: Path) -> None:
    """Killed before any step, the run goes on from what it had loaded."""
    undisturbed, killed, out = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    case = {"steps": 5, "generators": "none", "config": WARMUP, "block": RESUME}
    run_to_end(undisturbed, {**case, "out": str(undisturbed), "save": str(tmp_path / "checkpoint")}, 1)
    status, said = end_of(killed, {**case, "load": str(tmp_path / "checkpoint")}, "loaded")
    assert status == -9, said[-3000:]
    assert "going on from step 2, in place" in run_to_end(killed, {**case, "out": str(out)}, 1, "resumed")
    for step in (3, 4, 5):
        expected = torch.load(undisturbed / str(step), weights_only=False)
        expected["losses"] = expected["losses"][2:]  # nothing was handed over when the checkpoint was made
        assert differences(expected, torch.load(out / str(step), weights_only=False)) == [], step
    assert end_of(killed, {**case, "die": {"0": [2, "after"]}}, "again")[0] == -9
    said = end_of(killed, {**case, "reload": str(tmp_path / "checkpoint")}, "reloaded")[1]
    assert "going on from step 2, in place" in said
    assert "GENERATORS STAY True" in said, said[-3000:]
    assert "a checkpoint was loaded over step 2, which this run had gone on from in place" in said


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_ranks_killed_again_and_again_at_random(seed: int, tmp_path: Path) -> None:
    """Every start goes on; the steps after the last one equal those that nothing happened to."""
    undisturbed, killed, out = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    chance = random.Random(seed)
    case = {"steps": 40, "config": {"gradient_clipping": 0.5, **WARMUP}, "block": RESUME}
    run_to_end(undisturbed, {**case, "out": str(undisturbed)}, 2)
    reached = 0
    for number in range(4):
        part = {**case, "steps": reached + 8, "slow": {str(number % 2): 3e6}}  # however late it is killed
        processes, logs = launch(killed, part, 2, f"killed{number}.")
        kill_some(chance, processes, logs, reached + 2)  # after the first step alone there may be none to go on from
        said = logs[0].read_text(errors="replace")
        found = re.findall(r"going on from step (\d+)", said)
        assert [int(step) >= reached - 1 for step in found] == [True] * (number > 0), said[-3000:]
        reached = max(reached, steps_in(logs))
    run_to_end(killed, {**case, "out": str(out)}, 2, "resumed")
    steps = sorted(int(file.name) for file in out.iterdir())
    assert steps == list(range(steps[0], 41))
    for step in steps:
        expected = torch.load(undisturbed / str(step), weights_only=False)
        assert differences(expected, torch.load(out / str(step), weights_only=False)) == [], step
