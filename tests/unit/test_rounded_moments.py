# SPDX-License-Identifier: Apache-2.0
"""A core that keeps its moments in fewer bits does what one of fp32 does whose moments are rounded after every step:
the same bits wherever states are, however they are cut, and whatever else happens to them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.checkpoint.contents import Contents
from ds_fuyou.checkpoint.state_files import RankFiles, contents_of
from ds_fuyou.errors import FuyouChecksumError, FuyouConfigError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.coded_states import decode, encode
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, FlatLayout, LayoutLimits, build_layout
from ds_fuyou.optimizer.rules import OptimizerKind
from ds_fuyou.state_layout import BF16, FP32, INT8, SPLIT, WHOLE, layout_of, moments_of
from ds_fuyou.storage.store import RunIdentity, SlotStore
from tests.harness.moments import BLOCK, codes, numbers, published_numbers, rounded
from tests.harness.small_core import ADAMW, Disk, backward, hypers, options_of, small_core, step

IN_MEMORY, STORED, MIXED, RESIDENT = (1.0, 0.0, 1.0), (0.0, 0.0, 1.0), (0.5, 0.4, 0.5), (1.0, 1.0, 0.0)
LION = OptimizerKind("lion", ("exp_avg",))
ROUNDED, MASTERS = (BF16, INT8), (WHOLE, SPLIT)
Do = Callable[[OutOfCoreOptimizer], None]


def layout_with(num_cuts: int) -> FlatLayout:
    """In chunks of so many cuts at most; no parameter begins or ends with a block of codes."""
    cut = CUT_ELEMENTS
    params = [("a", "x", 3 * cut - 100, 0), ("b", "x", 2 * cut + 33, 1), ("c", "y", 2 * cut + 144, 2)]
    return build_layout([params], LayoutLimits(max_elements=num_cuts * cut, min_elements=cut))


LAYOUT = layout_with(4)


def state_of(core: OutOfCoreOptimizer) -> list[torch.Tensor]:
    """The bits of P32, of the moments and of P16, chunks put together."""
    chunks = [core.states.read(index) for index in range(len(core.layout.chunks))]
    parts = [torch.cat(part).view(torch.int32) for part in zip(*chunks, strict=True)]
    return parts + [core.params.read(span).view(torch.int16) for span in core.layout.params]


def round_moments(core: OutOfCoreOptimizer, moments: str) -> None:
    for chunk in core.layout.chunks:
        master, *old = core.states.read(chunk.index)
        new = [rounded(values, moments, number == 0, chunk.param_begins) for number, values in enumerate(old)]
        core.states.write(chunk.index, [master, *new])


def assert_alike(path: Path, steps: list[Do], moments: str, cores: list[dict[str, object]]) -> None:
    """After every step, an fp32 core with rounded moments against these."""
    with ExitStack() as stack:

        def made(name: str, **given: object) -> OutOfCoreOptimizer:
            (path / name).mkdir()
            layout = given.pop("layout", LAYOUT)
            return stack.enter_context(small_core(path / name, layout, **given))  # type: ignore[arg-type]

        kind = cores[0].get("kind", ADAMW)
        reference = made("reference", residency=RESIDENT, kind=kind)
        ours = [made(str(number), moments=moments, **given) for number, given in enumerate(cores)]
        for number, do in enumerate(steps):
            do(reference)
            if do is not skipped:
                round_moments(reference, moments)
            expected = state_of(reference)
            for which, core in enumerate(ours):
                do(core)
                found = state_of(core)
                for part, (one, other) in enumerate(zip(expected, found, strict=True)):
                    assert torch.equal(one, other), f"core {which}, after step {number}, part {part}"


def of_seed(seed: int) -> Do:
    return lambda core: step(core, seed)


def redone(core: OutOfCoreOptimizer) -> None:
    """What backward prepared had another factor."""
    backward(core, 77)
    core.apply(hypers(core.layout), 0.37, expected_multiplier=1.0)
    core.wait_all()


def skipped(core: OutOfCoreOptimizer) -> None:
    backward(core, 78)
    core.skip()


@pytest.mark.parametrize("clip_policy", ["defer", "speculate"])
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("moments", ROUNDED)
def test_steps_wherever_states_are(moments: str, masters: str, clip_policy: str, tmp_path: Path) -> None:
    places = (RESIDENT, IN_MEMORY, STORED, MIXED)
    cores: list[dict[str, object]] = [
        {"residency": place, "masters": masters, "clip_policy": clip_policy} for place in places
    ]
    assert_alike(tmp_path, [of_seed(1), of_seed(2), redone, skipped, of_seed(3), redone], moments, cores)


@pytest.mark.parametrize("moments", ROUNDED)
def test_steps_however_chunks_are_cut_and_with_threads(moments: str, tmp_path: Path) -> None:
    cores: list[dict[str, object]] = [
        {"layout": layout_with(num_cuts), "num_slots": num_slots, "num_update_threads": num_threads}
        for num_cuts, num_slots, num_threads in ((1, 2, 1), (2, 1, 2), (64, 2, 2))
    ]
    assert_alike(tmp_path, [of_seed(1), redone, of_seed(2)], moments, cores)


@pytest.mark.parametrize("moments", ROUNDED)
def test_steps_of_lion(moments: str, tmp_path: Path) -> None:
    assert_alike(tmp_path, [of_seed(1), redone, of_seed(2)], moments, [{"kind": LION, "masters": SPLIT}])


@pytest.mark.parametrize("residency", [RESIDENT, IN_MEMORY, STORED])
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("moments", ROUNDED)
def test_what_is_read_and_written_again_is_the_same(
    moments: str, masters: str, residency: tuple[float, float, float], tmp_path: Path
) -> None:
    """As a checkpoint, or a script that sets one part: codes stay codes. So do those that a step does not touch."""

    def untouched_of(core: OutOfCoreOptimizer) -> list[torch.Tensor]:
        span = next(span for span in LAYOUT.params if span.name == "a")
        assert span.end % BLOCK  # so that its last codes would be in one block with its neighbour's first
        return [core.states.read_param(span, part).view(torch.int32) for part in (1, 2)]

    with small_core(tmp_path, LAYOUT, residency=residency, masters=masters, moments=moments) as core:
        for seed in (1, 2, 3):
            step(core, seed)
        before = state_of(core)
        for _ in range(3):
            for chunk in LAYOUT.chunks:
                core.states.write(chunk.index, core.states.read(chunk.index))
            core.states.write_param(LAYOUT.params[1], 0, core.states.read_param(LAYOUT.params[1], 0))
        assert all(map(torch.equal, before, state_of(core)))
        old = untouched_of(core)
        for seed in (4, 5):
            step(core, seed, without=("a",))
        assert all(map(torch.equal, old, untouched_of(core)))
        assert not torch.equal(before[1], state_of(core)[1])


@pytest.mark.parametrize("residency", [RESIDENT, IN_MEMORY, STORED])
@pytest.mark.parametrize("moments", ROUNDED)
def test_a_copy_for_a_checkpoint_while_training_goes_on(
    moments: str, residency: tuple[float, float, float], tmp_path: Path
) -> None:
    with small_core(tmp_path, LAYOUT, residency=residency, masters=SPLIT, moments=moments) as core:
        step(core, 1)
        expected = state_of(core)[:3]
        states = core.snapshot().states()
        backward(core, 2)
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        found = {chunk.index: [part.view(torch.int32).clone() for part in parts] for chunk, parts in states}
        core.wait_all()
        taken = [torch.cat([found[index][part] for index in sorted(found)]) for part in range(3)]
        assert all(map(torch.equal, taken, expected))


@pytest.mark.parametrize("residency", [IN_MEMORY, STORED])
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("moments", ROUNDED)
def test_what_is_left_on_storage_is_the_whole_state(
    moments: str, masters: str, residency: tuple[float, float, float], tmp_path: Path
) -> None:
    """Read without the run, and gone on from."""
    with small_core(tmp_path, LAYOUT, residency=residency, masters=masters, moments=moments, keep=True) as core:
        step(core, 1)
        step(core, 2)
        core.commits.settle()
        expected = state_of(core)
    directory = tmp_path / "ds_fuyou" / "run-rank0"
    store = SlotStore.open([directory], None)
    files = RankFiles(store, RunIdentity("test", 0, 1, "run"))
    assert files.layout == layout_of(masters, 2, moments)
    chunks = [files.parts(index, 3) for index in range(len(LAYOUT.chunks))]
    found = [torch.cat(part).view(torch.int32) for part in zip(*chunks, strict=True)]
    store.close(remove=False)
    assert all(map(torch.equal, found, expected))

    store = SlotStore.open([directory], None)
    options = options_of(LAYOUT, residency=residency, masters=masters, moments=moments)
    core = OutOfCoreOptimizer(LAYOUT, options, ADAMW, hypers(LAYOUT), store, store.last_commit())
    core.resume(lambda count: None)
    assert all(map(torch.equal, state_of(core), expected))
    step(core, 3)
    after = state_of(core)
    core.close()
    store.close()
    (tmp_path / "other").mkdir()
    with small_core(tmp_path / "other", LAYOUT, residency=RESIDENT, moments=moments) as undisturbed:
        for seed in (1, 2, 3):
            step(undisturbed, seed)
        assert all(map(torch.equal, after, state_of(undisturbed)))


def test_codes_of_a_version_whose_blocks_two_parameters_shared_are_refused_by_name() -> None:
    said = contents_of(LAYOUT, [[span.numel] for span in LAYOUT.params], layout_of(WHOLE, 2, INT8))
    assert Contents.parse(said, {}).layout.version == 5
    found = Contents.parse(said, {}).param_begins
    assert [tuple(begins) for begins in found] == [chunk.param_begins for chunk in LAYOUT.chunks]
    assert any(found)
    older = {**said, "states": {**said["states"], "version": 3}}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="another version of ds_fuyou reads that"):
        Contents.parse(older, {})


@pytest.mark.parametrize("moments", ROUNDED)
def test_what_the_disk_changed_ends_the_update_that_reads_it(moments: str, tmp_path: Path) -> None:
    fields = ("moment0", "moment1", *(("scales0", "scales1") if moments == INT8 else ()))
    for field in fields:
        (tmp_path / field).mkdir()
        with small_core(tmp_path / field, LAYOUT, moments=moments) as core:
            step(core, 1)
            at = core.place.stored.offsets(LAYOUT.chunks[0].numel)[field]
            Disk(core, "state/0", core.slot(0)).flip(at + 1)
            with pytest.raises(FuyouChecksumError, match="verifying the state of chunk 0"):
                step(core, 2)


# ---- codes ------------------------------------------------------------------------------------------------------


def coded(values: torch.Tensor, which: int, *, of_update: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what they mean: by an update, whose rule leaves values as they are, or by what stores them
    from outside."""
    numel, layout = len(values), layout_of(WHOLE, 2, INT8)
    state = aligned_tensor(layout.whole.num_bytes(numel))
    state.zero_()
    at, part = layout.offsets(numel), layout.whole.offsets(numel)[f"moment{which}"]
    state[part:].view(torch.float32)[:numel].copy_(values)
    block = encode(layout, numel, state)
    if of_update:
        codes = block[at[f"moment{which}"] :][:numel]
        scales = block[at[f"scales{which}"] :].view(torch.float32)[: -(-numel // BLOCK)]
        scratch = values.clone()
        load_core().store_codes(scratch.data_ptr(), codes.data_ptr(), scales.data_ptr(), numel, which == 0)
    decode(layout, numel, block, state)
    return (
        block[at[f"moment{which}"] :][:numel].clone(),
        block[at[f"scales{which}"] :].view(torch.float32)[: -(-numel // BLOCK)].clone(),
        state[part:].view(torch.float32)[:numel].clone(),
    )


def odd_blocks(is_signed: bool) -> torch.Tensor:
    """Blocks of values of every kind: quotients at every number and beside, and at every middle of two and beside."""
    table = numbers(is_signed)
    edges = torch.cat([table, (table[1:] + table[:-1]) / 2])
    beside = [edges, *(torch.nextafter(edges, torch.tensor(sign * 9.0)) for sign in (-1, 1))]
    points = torch.cat([*beside, torch.nextafter(beside[1], torch.tensor(-9.0)), torch.rand(200_000) ** 9])
    if is_signed:
        points = torch.cat([points, -points])
    points = points.clamp(-1 if is_signed else 0, 1)
    rows = torch.nn.functional.pad(points, (0, -len(points) % (BLOCK - 1))).view(-1, BLOCK - 1)
    ones = torch.ones(len(rows), 1)
    found = [torch.cat([ones, rows], 1), torch.cat([rows, -ones if is_signed else ones], 1)]
    found += [found[0] * scale for scale in (3e-5, 1e-13, 1e30, 1e-39, 0.7)]
    kinds = [0.0, -0.0, 1e-45, 1e-38, 3e38, float("inf"), float("nan"), 1e-12, 9e-13, 1.0]
    special = torch.zeros(len(kinds) ** 2, BLOCK)
    for row, (one, other) in zip(special, [(a, b) for a in kinds for b in kinds], strict=True):
        row[3], row[200] = one, -other if is_signed else other
    return torch.cat([*found, special])


@pytest.mark.parametrize(
    ("is_signed", "digest"),
    [
        (True, "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"),
        (False, "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398"),
    ],
)
def test_the_numbers_are_constants_and_those_published(is_signed: bool, digest: str) -> None:
    """Whatever compiled them: what codes on storage mean depends on every bit."""
    found = numbers(is_signed)
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest() == digest
    torch.testing.assert_close(found, published_numbers(is_signed), rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_those_of_the_published_rule(is_signed: bool) -> None:
    blocks = odd_blocks(is_signed)
    expected, scales = codes(blocks, is_signed)
    found = coded(blocks.view(-1), 0 if is_signed else 1, of_update=True)
    assert torch.equal(found[0].view(-1, BLOCK).long(), expected)
    assert torch.equal(found[1].isnan(), scales.isnan())
    assert torch.equal(found[1].nan_to_num(), scales.nan_to_num())
    meant = numbers(is_signed)[expected] * scales.unsqueeze(-1)
    assert torch.equal(found[2].view(-1, BLOCK).nan_to_num(7.0), meant.nan_to_num(7.0))


@pytest.fixture(scope="module")
def published() -> Iterator[Any]:
    """torchao's functions, from where `make setup` puts it. Other tests of the process do not find it: transformers and
    peft would act on it.
    """
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        patched.syspath_prepend(os.path.join(sys.prefix, "torchao"))
        if importlib.util.find_spec("torchao") is None:
            pytest.skip("torchao is not installed (make setup)")
        warnings.simplefilter("ignore")
        yield importlib.import_module("torchao.optim.quant_utils")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        del sys.modules[name]


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_those_of_torchao(is_signed: bool, published: Any) -> None:
    table = numbers(is_signed)
    torch.testing.assert_close(torch.tensor(published.create_dynamic_map(is_signed)), table, rtol=2e-7, atol=0.0)
    blocks = odd_blocks(is_signed)
    scaled, scales = published.scale_tensor(blocks, BLOCK)
    expected = published.quantize_8bit_with_qmap(scaled, table)
    found = coded(blocks.view(-1), 0 if is_signed else 1, of_update=True)
    assert torch.equal(found[0].view(-1, BLOCK), expected.view(-1, BLOCK))
    assert torch.equal(found[1].nan_to_num(), scales.view(-1).nan_to_num())


@pytest.mark.parametrize("is_signed", [True, False])
def test_all_codes_come_back_from_fp32(is_signed: bool) -> None:
    """Also those of a block that lacks its largest number, as one has whose largest value is negative."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (4000, BLOCK), generator=generator)
    blocks[:256] = torch.arange(256)
    ends = torch.arange(len(blocks)) % 3
    blocks[ends == 0, 17] = 255
    if is_signed:
        blocks[ends == 1] = blocks[ends == 1].clamp(max=253)
        blocks[ends == 1, 17] = 0
    else:
        blocks[ends == 1, 17] = 255
    blocks = blocks[ends != 2]
    scales = torch.exp(40 * torch.rand(len(blocks), generator=generator) - 25).clip(1e-12)
    scales[0], scales[1] = 1e-12, 3e38
    values = (numbers(is_signed)[blocks] * scales.unsqueeze(-1)).view(-1)
    found = coded(values, 0 if is_signed else 1, of_update=False)
    assert torch.equal(found[2].view(torch.int32), values.view(torch.int32))
    assert torch.equal(found[0].view(-1, BLOCK).long(), blocks)


@pytest.mark.parametrize("numel", [1, 255, 257, 5000])
@pytest.mark.parametrize("is_signed", [True, False])
def test_the_last_block_may_be_short(is_signed: bool, numel: int) -> None:
    values = torch.rand(numel, generator=torch.Generator().manual_seed(numel))
    found = coded(values, 0 if is_signed else 1, of_update=True)
    assert torch.equal(found[2], rounded(values, INT8, is_signed))


# ---- layouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 1024, 1025, 70_000])
def test_fields_lie_behind_each_other_at_pages(numel: int) -> None:
    for masters in MASTERS:
        for moments in ROUNDED:
            layout = layout_of(masters, 2, moments)
            at = list(layout.offsets(numel).values())
            assert at == sorted(set(at))
            assert all(offset % 4096 == 0 for offset in at)
            assert layout.version == (5 if layout.moments == INT8 else 3)
            assert layout.resident == replace(layout, masters=WHOLE)
            assert layout.whole == layout_of(WHOLE, 2)
            assert at[-1] >= layout.bytes_each * numel


def test_bytes_that_rounded_moments_save() -> None:
    """A parameter, with everything on storage: read by its update, and written, with P16."""
    found = {
        (masters, moments): sum(layout_of(masters, 2, moments).moved_bytes(0.0, 0.0)) + 2
        for masters in MASTERS
        for moments in (FP32, BF16, INT8)
    }
    assert (found[WHOLE, FP32], found[WHOLE, BF16], found[SPLIT, BF16]) == (26, 18, 16)
    assert found[SPLIT, INT8] == pytest.approx(12 + 4 * 4 / 256 - 0.0, abs=0.01)
    assert layout_of(WHOLE, 2, INT8).resident_bytes_each == 6 + 2 * 4 / 256


def test_moments_of_adagrad_are_not_rounded() -> None:
    assert moments_of(FP32, "adagrad") == FP32
    assert moments_of(INT8, "adam") == INT8
    with pytest.raises(FuyouConfigError, match="Adam and Lion"):
        moments_of(BF16, "adagrad")
    with pytest.raises(ValueError, match="no state layout"):
        layout_of(WHOLE, 2, "fp8")
