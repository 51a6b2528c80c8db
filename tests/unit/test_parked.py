# SPDX-License-Identifier: Apache-2.0
"""Parameters that no optimizer updates lie in pieces over all paths, and their room returns with them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_fuyou.errors import FuyouChecksumError
from ds_fuyou.host.device import HostDevice
from ds_fuyou.storage import lifetime, parked
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.parked import PIECE_BYTES, ParkedSpace, ParkedValues
from ds_fuyou.zero.parameters import inference


def paths_in(folder: Path, number: int) -> tuple[str, ...]:
    for index in range(number):
        (folder / str(index)).mkdir()
    return tuple(str(folder / str(index)) for index in range(number))


def test_large_values_lie_on_all_paths(tmp_path: Path) -> None:
    space = ParkedSpace.at(paths_in(tmp_path, 3), "auto", None)
    values = torch.arange(3 * PIECE_BYTES // 8 + 1)
    parked = space.park("a parameter", values)
    extents = parked.location().runs[0].extents
    assert len({extent.fd for extent in extents}) == 3
    assert max(extent.num_bytes for extent in extents) == PIECE_BYTES
    assert torch.equal(parked.location().read(parked.io), values)
    parked.write(values + 1)
    assert torch.equal(parked.location().read(parked.io), values + 1)
    space.rest()
    assert torch.equal(parked.location().read(parked.io), values + 1), "the engine is started again"


def test_one_space_serves_all_who_name_the_same_paths_and_goes_with_the_last_value(tmp_path: Path) -> None:
    paths = paths_in(tmp_path, 2)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    first = ParkedSpace.at(paths, "auto", None).park("one", torch.zeros(10))
    second = ParkedSpace.at(paths, "auto", None).park("two", torch.ones(10))
    assert first.space is second.space
    assert first.space.space.leased_bytes == 2 * 4096
    space = first.space.space
    del first
    gc.collect()
    assert space.leased_bytes == 4096
    assert torch.equal(second.location().read(second.io), torch.ones(10))
    del second, space
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_with_the_number_of_one_that_is_gone_is_compared_with_nothing_of_it(tmp_path: Path) -> None:
    """As the checkpoint that an engine loads after its frozen parameters have moved to host memory."""
    lane = IoLane(IoSettings("threads", 8, num_threads=1), lambda fd: None)
    parked = ParkedSpace.at(paths_in(tmp_path, 1), "threads", None).park("a parameter", torch.arange(4096.0))
    parked.space.rest()
    parked.read_by(lane)
    assert torch.equal(parked.location().read(parked.io), torch.arange(4096.0))
    (extent,) = parked.location().runs[0].extents
    del parked
    gc.collect()
    with (tmp_path / "checkpoint").open("w+b") as file:
        file.write(bytes(range(256)) * 64)
        file.flush()
        assert file.fileno() == extent.fd
        memory = torch.empty(extent.num_bytes, dtype=torch.uint8)
        lane.sharing(lambda fd: None).read([extent], memory, "reading a checkpoint").wait()
    assert memory.tolist() == [*range(256)] * 64
    lane.close()


class _StartedError(Exception):
    """An I/O engine would be started."""


@pytest.mark.parametrize(("num_paths", "depth", "threads"), [(1, 32, 4), (4, 32, 16), (8, 64, 32)])
@pytest.mark.parametrize("whose", ["the space", "an engine that infers"])
def test_what_reads_parked_values_keeps_all_paths_busy(
    whose: str, num_paths: int, depth: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = ParkedSpace.at(paths_in(tmp_path, num_paths), "threads", None)
    values = space.park("a parameter", torch.zeros(10))
    space.rest()
    asked = []

    def start(settings: IoSettings, path_of: object) -> IoLane:
        asked.append(settings)
        raise _StartedError

    def infer() -> object:
        config = SimpleNamespace(trace=None, io=SimpleNamespace(engine="threads"))
        activation = SimpleNamespace(config=config, pin_memory=False)
        partition = SimpleNamespace(store=None, source=values, num_bytes=values.num_bytes)
        found = {
            "IoLane": start,
            "rank_device": lambda **_: HostDevice(),
            "in_use_order": lambda _: [torch.nn.Parameter(torch.zeros(1))],
            "held_bytes": lambda _: {},
            "partition_of": lambda _: partition,
            "register_closer": lambda _: lambda: None,
            "_read_bytes": lambda *_: 0,
            "cores_of_rank": lambda: 9,
        }
        for name, value in found.items():
            monkeypatch.setattr(inference, name, value)
        return inference.InferenceReads(torch.nn.Identity(), activation)  # type: ignore[arg-type]

    monkeypatch.setattr(parked, "IoLane", start)
    with pytest.raises(_StartedError):
        _ = space.io if whose == "the space" else infer()
    num_rings = 1 if whose == "the space" else 2
    assert asked == [IoSettings("threads", depth, num_threads=threads, num_rings=num_rings)]


def flip(parked: ParkedValues, piece: int, at: int) -> None:
    """A bit of what lies on storage, behind everybody's back."""
    extent = parked.location().runs[0].extents[piece]
    with open(f"/proc/self/fd/{extent.fd}", "r+b", buffering=0) as file:
        file.seek(extent.offset + at)
        byte = file.read(1)
        file.seek(extent.offset + at)
        file.write(bytes([byte[0] ^ 4]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("written_by", ["parking", "an edit", "an edit of another engine"])
@pytest.mark.parametrize("read_by", ["the space", "the space after a rest", "an engine", "a copy for a checkpoint"])
def test_a_flipped_bit_is_noticed_by_whoever_reads(written_by: str, read_by: str, tmp_path: Path) -> None:
    space = ParkedSpace.at(paths_in(tmp_path, 2), "auto", None)
    values = torch.arange(PIECE_BYTES // 8 + 4096)
    parked = space.park("a parameter", values)
    lane = IoLane(IoSettings(), space.space.path_of)
    if written_by != "parking":
        parked.read_by(lane if "another" in written_by else None)
        values = values + 1
        parked.write(values)
        parked.read_by(None)
    if read_by == "the space after a rest":
        space.rest()
    if read_by == "an engine":
        space.rest()
        parked.read_by(lane)

    def read() -> torch.Tensor:
        if read_by != "a copy for a checkpoint":
            return parked.location().read(parked.io)
        return torch.cat([part.clone() for _, part in parked.pieces()()])

    assert torch.equal(read(), values)
    flip(parked, 1, 100)
    with pytest.raises(FuyouChecksumError, match=r"reading a parameter.* failed: the bytes read are not those"):
        read()
    flip(parked, 1, 100)
    assert torch.equal(read(), values)
    lane.close()


def test_a_bit_that_flips_between_two_engines_is_noticed(tmp_path: Path) -> None:
    space = ParkedSpace.at(paths_in(tmp_path, 1), "auto", None)
    parked = space.park("a parameter", torch.arange(5000))
    flip(parked, 0, 20000)
    space.rest()
    with pytest.raises(FuyouChecksumError, match="reading a parameter"):
        parked.location().read(parked.io)


def test_what_lies_where_something_else_has_been_is_not_compared_with_that(tmp_path: Path) -> None:
    space = ParkedSpace.at(paths_in(tmp_path, 1), "auto", None)
    first = [space.park("one", torch.arange(numel)) for numel in (512, 1536, 512)]
    places = [parked.location().runs[0].extents[0] for parked in first]
    first.clear()
    gc.collect()
    for numel in (1024, 1536):
        values = torch.arange(numel) * 3
        parked = space.park("other", values)
        assert parked.location().runs[0].extents[0].offset < places[2].offset + places[2].num_bytes
        assert torch.equal(parked.location().read(parked.io), values)
        first.append(parked)


def test_without_checksum_nothing_is_compared(tmp_path: Path) -> None:
    space = ParkedSpace.at(paths_in(tmp_path, 1), "auto", None, checksum=False)
    parked = space.park("a parameter", torch.arange(5000))
    flip(parked, 0, 20000)
    assert not torch.equal(parked.location().read(parked.io), torch.arange(5000))


def test_a_space_that_an_end_has_closed_is_not_given_again(tmp_path: Path) -> None:
    """``lifetime.shutdown()`` by hand, in a process that goes on."""
    paths = paths_in(tmp_path, 1)
    parked = ParkedSpace.at(paths, "auto", None).park("one", torch.ones(10))
    lifetime.shutdown()
    again = ParkedSpace.at(paths, "auto", None)
    assert again is not parked.space
    values = again.park("two", torch.ones(10))
    assert values.location().read(values.io).all()
