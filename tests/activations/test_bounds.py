# SPDX-License-Identifier: Apache-2.0
"""What stays on the device, and in host memory, does not grow with layers, sequence or vocabulary."""

from __future__ import annotations

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.activations.swapper import Tape
from ds_fuyou.host.memory import resident_bytes
from ds_fuyou.host.waiting import wait_reporting
from ds_fuyou.ops.core import load_core
from tests.activations.late import LateCopies
from tests.activations.support import MIB, Plain, attached, gradients
from tests.harness.cpu_info import python_path
from tests.harness.limits import HANG_SECS
from tests.harness.waits import once_in

SCRIPT = """
import ctypes, json, sys
from pathlib import Path
import torch
from ds_fuyou.host.memory import resident_bytes
from tests.activations.support import MIB, Plain, attached

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()

torch.set_num_threads(1)
found = {}
for name, (layers, length, vocabulary) in json.loads(sys.argv[1]).items():
    torch.manual_seed(0)
    model = Plain(layers, 128, vocabulary).train()
    ids = torch.randint(vocabulary, (4, length + 1))
    with attached(model, Path(sys.argv[2]), arena_bytes=16 * MIB, smallest_bytes=65536) as swapped:
        for _ in range(2):  # the first one touches what later ones use again
            before = resident()
            loss = model(ids)
            after = resident()
            loss.backward()
            model.zero_grad(set_to_none=True)
        saved = swapped.tier.counters.out_bytes // 2
        found[name] = {
            "saved": saved, "kept": after - before, "peak": swapped.tier.held.peak, "left": swapped.tier.held.now
        }
    del model, loss
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Bytes of several sizes of a model, from one process: saved by a forward, resident after it, held at most."""
    import os
    import subprocess
    import sys

    sizes = {
        "6 layers": (6, 128, 300),
        "12 layers": (12, 128, 300),
        "24 layers": (24, 128, 300),
        "long": (6, 256, 300),
        "vocabulary": (2, 128, 30_000),
    }
    environment = {**os.environ, "PYTHONPATH": python_path()}
    arguments = [sys.executable, "-c", SCRIPT, json.dumps(sizes), str(tmp_path_factory.mktemp("swap"))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=HANG_SECS, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_device_holds_two_blocks_at_most_whatever_the_number_of_layers(measured: dict) -> None:
    block = (measured["24 layers"]["saved"] - measured["12 layers"]["saved"]) / 12
    assert block > MIB
    for name in ("6 layers", "12 layers", "24 layers"):
        assert measured[name]["peak"] <= 2 * block, name
        assert measured[name]["left"] == 0
    assert measured["24 layers"]["peak"] - measured["6 layers"]["peak"] < 18 * 1024 * 64


def test_resident_memory_after_forward_is_flat_in_layers_and_sequence(measured: dict) -> None:
    """The kernel's count, not ours: 18 more layers save 18 blocks, and keep almost nothing."""
    more = measured["24 layers"]["saved"] - measured["6 layers"]["saved"]
    assert more > 64 * MIB
    assert measured["24 layers"]["kept"] - measured["6 layers"]["kept"] < more / 8
    assert measured["long"]["saved"] > 1.9 * measured["6 layers"]["saved"]
    assert measured["long"]["kept"] < measured["long"]["saved"] / 8


def test_a_large_vocabulary_is_bounded(measured: dict) -> None:
    """Logits are larger than all staging memory: they go to storage in pieces and nothing of them stays."""
    logits = 4 * 128 * 30_000 * 4
    assert measured["vocabulary"]["saved"] > logits
    assert measured["vocabulary"]["kept"] < logits / 4
    assert measured["vocabulary"]["peak"] <= 1.25 * logits, "one at a time is brought back"


class Logits(Plain):
    """Leaves the loss to the script."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_loss_outside_of_the_model_is_swapped_until_backward_begins(tmp_path: Path) -> None:
    """Three micro-batches in flight: what their losses save is as large as logits, and none of it stays."""
    torch.manual_seed(0)
    model = Logits(2, 64, 20_000).train()
    batches = [torch.randint(20_000, (2, 33), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    logits_bytes = 2 * 32 * 20_000 * 4

    def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def step(model: nn.Module) -> None:
        sum(loss_of(model, ids) for ids in batches).backward()

    expected = gradients(copy.deepcopy(model), step)
    with attached(model, tmp_path, arena_bytes=MIB, smallest_bytes=4096) as swapped:
        moved = swapped.tier.counters.out_bytes
        losses = [loss_of(model, ids) for ids in batches]
        assert swapped.tier.counters.out_bytes - moved >= 3 * logits_bytes
        assert swapped.tier.held.now < logits_bytes / 10
        assert swapped.tier.counters.overflow_bytes == 0, "tensors larger than host memory go through it in pieces"
        sum(losses).backward()
        assert swapped.tier.held.peak < 1.5 * logits_bytes, "one at a time is brought back"
        after = swapped.tier.counters.out_bytes
        torch.rand(64, 4096, requires_grad=True).square().sum().backward()
        assert swapped.tier.counters.out_bytes == after, "once backward began, what the script computes is its own"
        swapped.session.end_step()
        model.zero_grad(set_to_none=True)
        del losses
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model, step), strict=True))
        model.zero_grad(set_to_none=True)
        swapped.session.end_step()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert swapped.nothing_is_left()


def test_hooks_of_the_script_stay_its_own(tmp_path: Path) -> None:
    """Hooks opened around the forward and closed before the loss; hooks opened after it, closed after backward."""
    model = Logits(2, 64, 300).train()
    ids = torch.randint(300, (2, 32))
    seen = []
    theirs = torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(1) or tensor, lambda tensor: tensor)
    with attached(model, tmp_path) as swapped:
        with theirs:
            logits = model(ids)
        moved, num_seen = swapped.tier.counters.out_bytes, len(seen)
        logits.square().mean().backward()
        assert (swapped.tier.counters.out_bytes, len(seen)) == (moved, num_seen), "no hooks are left"
        logits = model(ids)
        with theirs:
            logits.square().mean().backward()
            swapped.session.end_step()
        assert len(seen) > num_seen
        model(ids).square().mean().backward()
        swapped.session.end_step()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_waiting_instead_of_growing(tmp_path: Path) -> None:
    """Storage that takes nothing for the time being: forward waits, host memory stays within the arena."""
    torch.manual_seed(0)
    model = Plain(num_layers=6).train()
    core = load_core()
    with attached(model, tmp_path, arena_bytes=512 * 1024) as swapped:
        swapped.io.engine.add_fault(core.IoKind.WRITE, core.IoFaultEffect.HOLD, count=1 << 40)
        with once_in(swapped.io.engine.clear_faults, wait_reporting):
            loss = model(torch.randint(300, (4, 33)))
        assert swapped.tier.counters.waited_secs > 0
        assert swapped.tier.counters.overflow_bytes == 0
        assert swapped.tier.arena_used_bytes <= 512 * 1024
        loss.backward()


def test_reads_run_ahead_of_need(tmp_path: Path) -> None:
    """With room for it, backward asks for little that is not there or on its way."""
    torch.manual_seed(0)
    model = Plain(num_layers=12).train()
    with attached(model, tmp_path, arena_bytes=4 * MIB) as swapped:
        for _ in range(2):
            model(torch.randint(300, (4, 65))).backward()
        assert swapped.tier.counters.read_bytes > 8 * MIB
        assert swapped.tier.num_demand_reads <= 4


def test_a_longer_batch_is_swapped_where_a_shorter_one_could_be_kept(tmp_path: Path) -> None:
    """The choice to keep was made for another batch: what does not fit the device beside it leaves all the same."""
    torch.manual_seed(0)
    model = Plain(num_layers=4).train()
    short, long = (torch.randint(300, (4, length)) for length in (33, 129))
    expected = gradients(copy.deepcopy(model), lambda model: model(long).backward())
    with attached(model, tmp_path) as swapped:
        swapped.session.decide({name: BlockFate(Fate.KEEP) for name in ("", *(f"blocks.{i}" for i in range(4)))})
        loss = model(short)
        room = swapped.tier.held.now
        moved = swapped.tier.counters.out_bytes
        loss.backward()
        swapped.swapper.room_bytes = room
        swapped.tier.held.peak = 0
        found = gradients(model, lambda model: model(short).backward())
        assert (swapped.tier.counters.out_bytes, swapped.tier.held.peak) == (moved, room), "what fitted is kept as ever"
        model.zero_grad(set_to_none=True)
        loss = model(long)
        assert swapped.tier.held.now < 1.2 * room, "small tensors stay whatever they are"
        assert swapped.tier.counters.out_bytes > moved
        del loss, found
        found = gradients(model, lambda model: model(long).backward())
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert swapped.nothing_is_left()


def test_what_cannot_be_kept_is_swapped_without_a_wait(tmp_path: Path) -> None:
    """No copy that ends makes room where what is kept has all of it."""
    torch.manual_seed(0)
    model = Plain(num_layers=8).train()
    ids = torch.randint(300, (4, 33))
    expected = gradients(copy.deepcopy(model), lambda model: model(ids).backward())
    copies = LateCopies(1 << 30)  # until somebody waits
    with attached(model, tmp_path, arena_bytes=64 * MIB, copies=copies) as swapped:
        swapped.session.decide({name: BlockFate(Fate.KEEP) for name in ("", *(f"blocks.{i}" for i in range(8)))})
        swapped.swapper.room_bytes = MIB
        loss = model(ids)
        assert swapped.tier.counters.out_bytes > 2 * MIB
        assert copies.out.num_waits == 0
        loss.backward()
        model.zero_grad(set_to_none=True)
        found = gradients(model, lambda model: model(ids).backward())
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_what_leaves_is_waited_for_where_that_makes_room(tmp_path: Path) -> None:
    """The first blocks are swapped, the last are kept in their place."""
    torch.manual_seed(0)
    model = Plain(num_layers=8).train()
    ids = torch.randint(300, (4, 33))
    fates = {name: BlockFate(Fate.KEEP) for name in ("", *(f"blocks.{i}" for i in range(8)))}
    with attached(model, tmp_path, arena_bytes=64 * MIB) as swapped:
        swapped.session.decide(fates)
        loss = model(ids)
        whole = swapped.tier.held.now
        loss.backward()
    copies = LateCopies(1 << 30)
    with attached(model, tmp_path, arena_bytes=64 * MIB, copies=copies) as swapped:
        swapped.session.decide(fates | {f"blocks.{i}": BlockFate(Fate.SWAP) for i in range(4)})
        swapped.tier._soon_bytes = 0
        swapped.swapper.room_bytes = int(0.7 * whole)
        loss = model(ids)
        kept = swapped.swapper.kept.now
        assert 0.3 * whole < kept < 0.7 * whole
        assert copies.out.num_waits > 0
        assert swapped.tier.held.peak <= 0.75 * whole
        loss.backward()


def test_host_memory_is_given_back_although_the_session_is_still_known(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Plain(num_layers=8).train()
    with attached(model, tmp_path, arena_bytes=64 * MIB, eager=False) as swapped:
        for _ in range(2):
            model(torch.randint(300, (16, 65))).backward()
        peak = swapped.tier.arena_peak_bytes
        assert peak > 16 * MIB
        before = resident_bytes()
    assert resident_bytes() < before - peak // 2
    assert swapped.session.swapper is swapped.swapper, "as a destroyed engine that the script still holds knows it"


def test_views_of_something_small_count_what_they_cover(tmp_path: Path) -> None:
    """Not the whole each: what fits the device would leave it."""
    storage = torch.zeros(100, requires_grad=True)

    class Slices(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.stack([part.square().sum() for part in (storage * 1).unbind(0)]).sum()

    model = Slices().train()
    with attached(model, tmp_path) as swapped:
        loss = model()
        assert 400 <= swapped.tier.held.now <= 800
        loss.backward()


def test_reading_ahead_goes_over_what_was_saved_once() -> None:
    """Whatever the order in which a node asks; backward may begin again."""
    records = [torch.empty(0) for _ in range(400)]
    tape: Any = Tape([weakref.ref(record) for record in records])
    seen = 0
    for place in range(len(records) - 2, -1, -2):
        for asked in (place, place + 1):  # of two that one node saved, the lower one first
            seen += sum(1 for _ in tape.before(asked))
    assert seen == len(records) - 2
    assert sum(1 for _ in tape.before(len(records) - 1)) == len(records) - 1, "another backward"


def test_a_second_backward_reads_ahead_whatever_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [torch.empty(0) for _ in range(10)]
    tape: Any = Tape([weakref.ref(record) for record in records])
    for backward in (3, 4):
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda number=backward: number)
        assert sum(1 for place in range(9, -1, -1) for _ in tape.before(place)) == 9
