# SPDX-License-Identifier: Apache-2.0
"""A core whose masters are split, or bfloat16, does, to the bit, what one with whole masters does, whatever happens to
P16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds_fuyou.checkpoint.state_files import RankFiles
from ds_fuyou.errors import FuyouChecksumError, FuyouConfigError
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.snapshot import Snapshot
from ds_fuyou.state_layout import BF16, FP32, INT8, SPLIT, WHOLE, layout_of, masters_of, moments_of
from ds_fuyou.storage.store import RunIdentity, SlotStore
from tests.harness.small_core import ADAMW, Disk, backward, hypers, options_of, small_core, step, values

LAYOUT = build_layout(
    [[("a", "x", 3 * CUT_ELEMENTS, 0), ("b", "x", 2 * CUT_ELEMENTS, 1), ("c", "y", 2 * CUT_ELEMENTS + 77, 2)]],
    LayoutLimits(max_elements=4 * CUT_ELEMENTS, min_elements=2 * CUT_ELEMENTS),
)
SPANS = LAYOUT.params
IN_MEMORY, STORED, MIXED = (1.0, 0.0, 1.0), (0.0, 0.0, 1.0), (0.5, 0.4, 0.5)
Do = Callable[[OutOfCoreOptimizer], None]
KINDS = {SPLIT: ADAMW, BF16: replace(ADAMW, kept_as=(BF16, FP32))}


def everything(core: OutOfCoreOptimizer) -> list[torch.Tensor]:
    """The bits of all states, and of P16."""
    states = [part.view(torch.int32).clone() for i in range(len(LAYOUT.chunks)) for part in core.states.read(i)]
    return states + [core.params.read(span).view(torch.int16) for span in SPANS]


def assert_alike(
    path: Path,
    steps: list[Do],
    residency: tuple[float, float, float],
    forms: Sequence[str] = tuple(KINDS),
    **options: object,
) -> None:
    """Compares after every step: split masters with whole ones, and bfloat16 ones with whole ones of such values."""
    for masters in forms:
        kind = KINDS[masters]
        with ExitStack() as stack:
            cores = []
            for kept in (WHOLE, masters):
                folder = path / f"{masters}-{kept}"
                folder.mkdir()
                made = small_core(folder, LAYOUT, kind=kind, residency=residency, masters=kept, **options)  # type: ignore[arg-type]
                cores.append(stack.enter_context(made))
            assert [core.place.stored.masters for core in cores] == [WHOLE, masters]
            for number, do in enumerate(steps):
                for core in cores:
                    do(core)
                for one, other in zip(*map(everything, cores), strict=True):
                    assert torch.equal(one, other), f"{masters}, after step {number}"


def of_seed(seed: int, without: tuple[str, ...] = ()) -> Do:
    return lambda core: step(core, seed, without)


def edited(which: int, value: float) -> Do:
    """As a script that gathers a parameter and writes to it, before a step."""

    def do(core: OutOfCoreOptimizer) -> None:
        span = SPANS[which]
        core.params.edited(span)
        core.params.write(span, torch.full((span.numel,), value, dtype=torch.bfloat16))

    return do


def redone(core: OutOfCoreOptimizer) -> None:
    """What backward prepared had another factor."""
    backward(core, 77)
    core.apply(hypers(LAYOUT), 0.37, expected_multiplier=1.0)
    core.wait_all()


def skipped(core: OutOfCoreOptimizer) -> None:
    backward(core, 78)
    core.skip()


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("clip_policy", ["defer", "speculate"])
@pytest.mark.parametrize("residency", [IN_MEMORY, STORED, MIXED])
def test_steps(residency: tuple[float, float, float], clip_policy: str, num_slots: int, tmp_path: Path) -> None:
    steps = [of_seed(1), of_seed(2), redone, of_seed(3, without=("b",)), skipped, redone, of_seed(4)]
    assert_alike(tmp_path, steps, residency, clip_policy=clip_policy, num_slots=num_slots)


@pytest.mark.parametrize("clip_policy", ["defer", "speculate"])
@pytest.mark.parametrize("residency", [IN_MEMORY, STORED, MIXED])
def test_edits_of_p16(residency: tuple[float, float, float], clip_policy: str, tmp_path: Path) -> None:
    """The master does not follow, also where a step leaves the edit as it is, again and again."""
    steps = [
        edited(0, 0.5),
        of_seed(1),
        edited(1, -3.25),
        of_seed(2, without=("b",)),
        of_seed(3, without=("b",)),
        edited(0, 9.0),
        edited(0, float("nan")),
        redone,
        of_seed(4),
    ]
    assert_alike(tmp_path, steps, residency, clip_policy=clip_policy)


@pytest.mark.parametrize("residency", [IN_MEMORY, STORED, MIXED])
def test_an_edit_within_a_window_that_read_ahead(residency: tuple[float, float, float], tmp_path: Path) -> None:
    def do(core: OutOfCoreOptimizer) -> None:
        core.open_window(hypers(LAYOUT), 1.0, managed=True)
        core.add_gradients([(SPANS[2], values(SPANS[2], 5))])
        edited(0, 2.0)(core)
        edited(2, 4.0)(core)
        core.add_gradients([(span, values(span, 5)) for span in SPANS[:2]])
        core.end_micro_batch()
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        core.wait_all()

    assert_alike(tmp_path, [of_seed(1), do, of_seed(2)], residency, clip_policy="speculate")


def test_what_a_script_does_to_memory_without_a_word(tmp_path: Path) -> None:
    def do(core: OutOfCoreOptimizer) -> None:
        core.param_view(SPANS[1]).mul_(1.5)

    steps = [of_seed(1), do, of_seed(2), do, redone, of_seed(3)]
    assert_alike(tmp_path, steps, IN_MEMORY, clip_policy="speculate")


@pytest.mark.parametrize("residency", [IN_MEMORY, STORED, MIXED])
def test_values_of_every_kind(residency: tuple[float, float, float], tmp_path: Path) -> None:
    """Ties, NaN of several kinds, infinities, subnormals: P32 of one parameter, all of them, is replaced."""

    def put(span_index: int, bits: list[int]) -> Do:
        def do(core: OutOfCoreOptimizer) -> None:
            span = SPANS[span_index]
            some = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
            core.states.write_param(span, 0, some.repeat(span.numel // len(bits) + 1)[: span.numel])

        return do

    odd = [0x7FC00001, -1, 0x7F800001, 0x7F800000, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF, 0x3F818000, 0x3F808000]
    many_ties = [0x3F818000, 0xBF818000, 0x40018000]

    def untouched(core: OutOfCoreOptimizer) -> None:
        """Written, whatever the values are, by a step that has a gradient for others alone."""
        step(core, 5, without=("a",))

    steps = [of_seed(1), put(0, odd), untouched, put(0, many_ties), untouched, untouched, of_seed(2), put(1, odd)]
    assert_alike(tmp_path, [*steps, of_seed(3)], residency, [SPLIT])


@pytest.mark.parametrize("residency", [IN_MEMORY, STORED, MIXED])
def test_states_that_are_replaced(residency: tuple[float, float, float], tmp_path: Path) -> None:
    def load(core: OutOfCoreOptimizer) -> None:
        for chunk in LAYOUT.chunks:
            parts = [part + 0.123 for part in core.states.read(chunk.index)]
            core.states.write(chunk.index, parts, torch.full((chunk.numel,), 0.25, dtype=torch.bfloat16))

    def set_moment(core: OutOfCoreOptimizer) -> None:
        core.states.write_param(SPANS[1], 2, torch.full((SPANS[1].numel,), 0.5))

    assert_alike(tmp_path, [load, of_seed(1), set_moment, of_seed(2), load, redone], residency, [SPLIT])


@pytest.mark.parametrize("residency", [IN_MEMORY, STORED])
def test_a_copy_for_a_checkpoint_while_training_goes_on(residency: tuple[float, float, float], tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=residency, masters=SPLIT) as core:
        step(core, 1)
        expected = everything(core)
        snapshot = core.snapshot()
        found: dict[int, list[torch.Tensor]] = {}
        states = snapshot.states()
        backward(core, 2)
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        for chunk, parts in states:
            found[chunk.index] = [part.view(torch.int32).clone() for part in parts]
        assert isinstance(snapshot, Snapshot)
        core.wait_all()
        taken = [part for index in range(len(LAYOUT.chunks)) for part in found[index]]
        assert all(map(torch.equal, taken, expected))


@pytest.mark.parametrize("masters", KINDS)
@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("residency", [IN_MEMORY, STORED])
def test_what_is_left_on_storage_is_the_whole_state(
    residency: tuple[float, float, float], is_edited: bool, masters: str, tmp_path: Path
) -> None:
    """Read without the run, and gone on from; also after P16 of the committed step was edited."""
    kind = KINDS[masters]
    with small_core(tmp_path, LAYOUT, kind=kind, residency=residency, masters=masters, keep=True) as core:
        step(core, 1)
        step(core, 2)
        core.commits.settle()
        if is_edited:
            edited(1, 7.0)(core)
        expected = everything(core)[: 3 * len(LAYOUT.chunks)]
    directory = tmp_path / "ds_fuyou" / "run-rank0"
    store = SlotStore.open([directory], None)
    files = RankFiles(store, RunIdentity("test", 0, 1, "run"))
    found = [part.view(torch.int32) for i in range(len(LAYOUT.chunks)) for part in files.parts(i, 3)]
    alone = [files.parts(i, 1)[0].view(torch.int32) for i in range(len(LAYOUT.chunks))]
    store.close(remove=False)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, alone, expected[::3]))

    store = SlotStore.open([directory], None)
    commit = store.last_commit()
    options = options_of(LAYOUT, residency=residency, masters=masters)
    core = OutOfCoreOptimizer(LAYOUT, options, kind, hypers(LAYOUT), store, commit)
    core.resume(lambda count: None)
    assert all(map(torch.equal, everything(core), expected))
    edited(0, 1.0)(core)  # nothing of it was read by an update yet
    assert all(map(torch.equal, everything(core), expected))
    step(core, 3)
    after = everything(core)
    core.close()
    store.close()

    (tmp_path / "other").mkdir()
    with small_core(tmp_path / "other", LAYOUT, kind=kind, residency=residency) as undisturbed:
        for seed in (1, 2, 3):
            step(undisturbed, seed)
        assert all(map(torch.equal, after, everything(undisturbed)))


@pytest.mark.parametrize("field", ["joints", "low", "moment0", "moment1", "P16"])
@pytest.mark.parametrize("residency", [IN_MEMORY, STORED])
def test_what_the_disk_changed_ends_the_update_that_reads_it(
    residency: tuple[float, float, float], field: str, tmp_path: Path
) -> None:
    with small_core(tmp_path, LAYOUT, residency=residency, masters=SPLIT) as core:
        step(core, 1)
        at = core.place.stored.offsets(LAYOUT.chunks[0].numel)
        if field == "P16" and residency is STORED:
            Disk(core, "param16/0", core.slot(0)).flip(10)
        else:
            Disk(core, "state/0", core.slot(0)).flip(at["high" if field == "P16" else field] + 1)
        if residency is IN_MEMORY and field in ("joints", "P16"):  # upper halves make it good, or are not read
            step(core, 2)
            return
        failed = "reading the P16 of chunk 0" if field == "P16" else "verifying the state of chunk 0"
        with pytest.raises(FuyouChecksumError, match=failed):
            step(core, 2)


def test_what_cannot_be_split_stays_whole_or_is_refused() -> None:
    assert masters_of("split", is_bfloat16=True, checksum=True) == SPLIT
    assert masters_of("whole", is_bfloat16=True, checksum=True) == WHOLE
    for facts in ({"is_bfloat16": False, "checksum": True}, {"is_bfloat16": True, "checksum": False}):
        assert masters_of("whole", **facts) == WHOLE
        with pytest.raises(FuyouConfigError, match="needs bfloat16 parameters and checksums"):
            masters_of("split", **facts)
        assert masters_of("auto", **facts) == WHOLE
    assert masters_of("auto", is_bfloat16=True, checksum=True) == SPLIT
    assert masters_of("auto", is_bfloat16=True, checksum=True, are_cloned=True) == WHOLE
    assert masters_of("split", is_bfloat16=True, checksum=True, are_cloned=True) == SPLIT


@pytest.mark.parametrize("numel", [1, 1024, 1025, 70_000])
def test_fields_lie_behind_each_other_at_pages(numel: int) -> None:
    for masters in (WHOLE, SPLIT, BF16):
        for num_moments in (1, 2):
            layout = layout_of(masters, num_moments)
            at = list(layout.offsets(numel).values())
            assert at == sorted(set(at))
            assert all(offset % 4096 == 0 for offset in at)
            assert at[-1] >= layout.bytes_each * numel
            assert layout.num_master_bytes(numel) == layout.master_alone.num_bytes(numel) < at[-1]


@pytest.mark.parametrize(
    ("params", "states", "saved"), [(1.0, 0.0, (2.0, 0.0)), (0.0, 0.0, (0.0, 2.0)), (0.6, 0.2, (0.96, 0.64))]
)
def test_bytes_that_split_masters_save(params: float, states: float, saved: tuple[float, float]) -> None:
    whole, split, narrow = (layout_of(masters, 2).moved_bytes(params, states) for masters in (WHOLE, SPLIT, BF16))
    assert whole == pytest.approx((12 * (1 - states), 12 * (1 - states)))
    assert (whole[0] - split[0], whole[1] - split[1]) == pytest.approx(saved)
    low_halves = 2 * (1 - states)
    assert (split[0] - narrow[0], split[1] - narrow[1]) == pytest.approx((low_halves, low_halves))


def test_states_are_kept_as_stock_is_told_to_keep_them() -> None:
    """Whatever the block says of masters; and in memory as on storage."""
    for wanted, checksum in ((WHOLE, False), (SPLIT, True)):
        assert masters_of(wanted, is_bfloat16=True, checksum=checksum, stock=BF16) == BF16
    assert [moments_of(wanted, "adam", BF16) for wanted in (FP32, BF16)] == [BF16, BF16]
    with pytest.raises(FuyouConfigError, match=r'moments: "int8" and bf16\.bf16_optimizer_states'):
        moments_of(INT8, "adam", BF16)
    masters, both = layout_of(BF16, 2), layout_of(BF16, 2, BF16)
    assert (masters.resident_bytes_each, both.resident_bytes_each) == (10, 6)
    assert (masters.saved_as, both.saved_as) == ((BF16, FP32, FP32), (BF16, BF16, BF16))
    assert (masters.saved_bytes_each(2), both.saved_bytes_each(2), layout_of(WHOLE, 2, BF16).saved_bytes_each(2)) == (
        10,
        6,
        12,
    )


@pytest.mark.parametrize("residency", [IN_MEMORY, STORED, MIXED, (1.0, 1.0, 0.0)])
def test_what_a_script_sets_is_rounded_to_bfloat16(residency: tuple[float, float, float], tmp_path: Path) -> None:
    kind = replace(ADAMW, kept_as=(BF16, BF16))
    with small_core(tmp_path, LAYOUT, kind=kind, residency=residency, masters=BF16, moments=BF16) as core:
        step(core, 1)
        for chunk in LAYOUT.chunks:
            parts = [part + 0.123 for part in core.states.read(chunk.index)]
            core.states.write(chunk.index, parts)
            wanted = [part.to(torch.bfloat16).float() for part in parts]
            assert all(map(torch.equal, core.states.read(chunk.index), wanted))
        step(core, 2)
        for chunk in LAYOUT.chunks:
            master, *_ = core.states.read(chunk.index)
            assert torch.equal(master, master.to(torch.bfloat16).float())
