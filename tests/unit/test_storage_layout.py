# SPDX-License-Identifier: Apache-2.0
"""Striping covers every byte once, in proportion to bandwidth and within what the devices hold."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.storage.layout import PathShare, StoreLayout, choose_num_slots, device_capacities, queue_depth, stripe
from ds_fuyou.storage.probe import PathFacts
from ds_fuyou.storage.types import RegionSpec, RunIdentity
from tests.unit.storage_support import PAGE, UNIT, fake_disks

RESERVE = 16 * 1024 * 1024


def check_covers_each_byte_once(layout: StoreLayout) -> None:
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for region in layout.regions:
        assert len(region.slots) == region.spec.num_slots
        for pieces in region.slots:
            assert sum(piece.num_bytes for piece in pieces) == region.spec.num_bytes
            for piece in pieces:
                assert piece.offset % PAGE == 0
                assert piece.num_bytes > 0
                assert piece.num_bytes % PAGE == 0
                taken[piece.path].append((piece.offset, piece.offset + piece.num_bytes))
    for path, num_bytes in enumerate(layout.file_bytes):
        at = 0
        for begin, end in sorted(taken[path]):
            assert begin == at
            at = end
        assert at == num_bytes


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts_cover_each_byte_once_within_the_capacities(seed: int) -> None:
    draw = random.Random(seed)
    unit = PAGE * draw.choice([1, 3, 16])
    regions = [RegionSpec(f"r{i}", PAGE * draw.randint(1, 100), draw.randint(1, 2)) for i in range(draw.randint(1, 20))]
    shares = [PathShare(f"d{draw.randint(0, 2)}", draw.uniform(0.01, 10)) for _ in range(draw.randint(1, 4))]
    devices = sorted({share.device for share in shares})
    total = sum(region.num_bytes * region.num_slots for region in regions)
    room = dict.fromkeys(devices, 0)
    left = total + PAGE * draw.choice([0, 1, 50])  # now and then not a page to spare
    for device in devices[:-1]:
        room[device] = PAGE * draw.randint(0, left // PAGE)
        left -= room[device]
    room[devices[-1]] = left
    layout = stripe(regions, shares, room, unit)
    check_covers_each_byte_once(layout)
    for device, capacity in room.items():
        of_device = [n for share, n in zip(shares, layout.file_bytes, strict=True) if share.device == device]
        assert sum(of_device) <= capacity


def test_a_region_uses_all_paths_in_proportion_to_their_weights() -> None:
    regions = [RegionSpec(f"r{i}", 12 * UNIT, 2) for i in range(10)]
    shares = [PathShare("a", 3.0), PathShare("b", 1.0)]
    layout = stripe(regions, shares, {"a": 10**12, "b": 10**12})
    assert layout.file_bytes == (180 * UNIT, 60 * UNIT)
    for region in layout.regions:
        for pieces in region.slots:
            assert sum(piece.num_bytes for piece in pieces if piece.path == 1) == 3 * UNIT


def test_a_full_device_is_capped_and_every_region_still_uses_both() -> None:
    regions = [RegionSpec(f"r{i}", 10 * UNIT, 1) for i in range(10)]
    layout = stripe(regions, [PathShare("a", 1.0), PathShare("b", 1.0)], {"a": 10 * UNIT, "b": 10**12})
    assert layout.file_bytes == (10 * UNIT, 90 * UNIT)
    assert all({piece.path for piece in region.slots[0]} == {0, 1} for region in layout.regions)


def test_a_small_region_lies_on_one_path_and_small_regions_spread() -> None:
    regions = [RegionSpec(f"r{i}", 64 * PAGE, 1) for i in range(10)]
    layout = stripe(regions, [PathShare("a", 1.0), PathShare("b", 1.0)], {"a": 10**12, "b": 10**12})
    assert all(len(region.slots[0]) == 1 for region in layout.regions)
    assert layout.file_bytes == (5 * 64 * PAGE, 5 * 64 * PAGE)


def test_one_path_gives_one_extent_a_slot() -> None:
    layout = stripe([RegionSpec("r", 100 * UNIT, 2)], [PathShare("a", 1.0)], {"a": 10**12})
    assert [len(pieces) for pieces in layout.regions[0].slots] == [1, 1]


def test_more_than_the_devices_hold_is_refused() -> None:
    with pytest.raises(FuyouConfigError, match=f"{2 * UNIT} bytes must fit.*{UNIT}"):
        stripe([RegionSpec("r", UNIT, 2)], [PathShare("a", 1.0)], {"a": UNIT})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_no_bandwidth_is_refused(weight: float) -> None:
    with pytest.raises(FuyouConfigError, match="positive and finite"):
        stripe([RegionSpec("r", UNIT, 1)], [PathShare("a", weight)], {"a": 10**9})


def test_paths_on_one_device_share_its_free_bytes_less_the_reserve() -> None:
    facts = [PathFacts(RESERVE + 10 * PAGE + 1, "ext4", False, True, device) for device in ("a", "a", "b")]
    assert device_capacities(facts) == {"a": 10 * PAGE, "b": 10 * PAGE}
    assert device_capacities([PathFacts(5, "ext4", False, True, "a")]) == {"a": 0}


def test_two_slots_where_they_fit() -> None:
    paths = [Path("/a"), Path("/b")]
    probe = fake_disks({paths[0]: RESERVE + 50, paths[1]: RESERVE + 3 * PAGE})
    assert choose_num_slots(paths, PAGE, 3 * PAGE, None, probe=probe).num_slots == 2
    assert choose_num_slots(paths, PAGE, 3 * PAGE, 3 * PAGE, probe=probe).reason == ""


def test_ranks_of_one_machine_share_its_disks() -> None:
    probe = fake_disks({Path("/a"): RESERVE + 9 * PAGE})
    one, two = PAGE, 3 * PAGE
    assert choose_num_slots([Path("/a")], one, two, two, bytes_of_others=2 * two, probe=probe).num_slots == 2
    choice = choose_num_slots([Path("/a")], one, two, bytes_of_others=3 * two, probe=probe)
    assert choice.num_slots == 1
    assert f"{9 * PAGE} bytes can be used on /a; other ranks need {9 * PAGE} of them" in choice.reason
    assert "dead runs" not in choice.reason
    assert choose_num_slots([Path("/a")], one, two, wanted=3, bytes_beside=2 * two, probe=probe).num_slots == 3
    choice = choose_num_slots([Path("/a")], one, two, wanted=3, bytes_beside=3 * two, probe=probe)
    assert (choice.num_slots, choice.limit.split()[0]) == (1, "three")
    choice = choose_num_slots([Path("/a")], one, 10 * PAGE, bytes_stale=77, probe=probe)
    assert "; dead runs left 77 bytes there, which `fuyou clean` frees. With one" in choice.reason


def test_two_slots_leave_room_for_others_and_for_activations() -> None:
    path, free = Path("/a"), 10**12

    def slots(share: float, **more: object) -> int:
        two = int(share * free) // PAGE * PAGE
        return choose_num_slots([path], two // 2, two, probe=fake_disks({path: free}), **more).num_slots

    assert (slots(0.97), slots(0.99)) == (2, 1)
    assert (slots(0.87, swaps_activations=True), slots(0.89, swaps_activations=True)) == (2, 1)
    budget = 10**9
    for num_bytes, expected in ((89 * 10**7, 2), (91 * 10**7, 1)):
        choice = choose_num_slots([path], 1, num_bytes, budget, swaps_activations=True, probe=fake_disks({path: free}))
        assert choice.num_slots == expected
    assert "nvme_budget_bytes is 1000000000 beside activations that are swapped" in choice.reason


@pytest.mark.parametrize(("budget", "limit"), [(None, "can be used on /a"), (3 * PAGE, "nvme_budget_bytes is")])
def test_one_slot_names_the_limit_and_what_is_lost(budget: int | None, limit: str) -> None:
    probe = fake_disks({Path("/a"): RESERVE + 3 * PAGE})
    choice = choose_num_slots([Path("/a")], 2 * PAGE, 4 * PAGE, budget, probe=probe)
    assert choice.num_slots == 1
    for part in (limit, str(4 * PAGE), str(3 * PAGE), "crash consistency", "speculate", "last checkpoint"):
        assert part in choice.reason


@pytest.mark.parametrize("num_bytes", [0, -PAGE, PAGE + 1])
def test_a_region_is_a_positive_multiple_of_a_page(num_bytes: int) -> None:
    with pytest.raises(FuyouConfigError, match=f"multiple of 4096, found {num_bytes}"):
        RegionSpec("r", num_bytes, 1)


def test_a_region_has_one_to_three_slots() -> None:
    with pytest.raises(FuyouConfigError, match="must be 1, 2 or 3, found 4"):
        RegionSpec("r", PAGE, 4)


@pytest.mark.parametrize("run_id", ["", "../up", "a/b", ".hidden", "x" * 101])
def test_a_run_id_is_a_plain_file_name(run_id: str) -> None:
    with pytest.raises(FuyouConfigError, match="run_id must be"):
        RunIdentity("model", 0, 1, run_id)


def test_a_rank_is_within_the_world() -> None:
    with pytest.raises(FuyouConfigError, match="rank 2 of 2"):
        RunIdentity("model", 2, 2, "run")


@pytest.mark.parametrize("num_paths", [2, 5, 12])
def test_every_chunk_uses_every_path_in_equal_parts(num_paths: int) -> None:
    regions = [RegionSpec(f"r{i}", 24 * 2**20, 2) for i in range(6)]
    shares = [PathShare(f"d{i}", 1.0) for i in range(num_paths)]
    layout = stripe(regions, shares, {share.device: 2**40 for share in shares})
    check_covers_each_byte_once(layout)
    for region in layout.regions:
        for pieces in region.slots:
            of_path = [sum(piece.num_bytes for piece in pieces if piece.path == path) for path in range(num_paths)]
            assert max(of_path) - min(of_path) <= 4 * 2**20
            assert min(of_path) > 0


def test_requests_are_enough_for_every_path() -> None:
    assert queue_depth(1) == 32
    assert all(queue_depth(n) >= 8 * n for n in range(1, 40))
