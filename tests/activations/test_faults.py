# SPDX-License-Identifier: Apache-2.0
"""What goes wrong is said where it can be handled, never becomes a wrong gradient, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.ops.core import load_core
from ds_fuyou.storage import swap_space
from ds_fuyou.storage.io import Transfer
from ds_fuyou.storage.swap_space import SwapSpace
from tests.activations.support import MIB, Attached, Plain, attached, gradients, interrupted, must_agree

SMALL = 256 * 1024


def ids(length: int = 33) -> torch.Tensor:
    return torch.randint(300, (4, length), generator=torch.Generator().manual_seed(length))


def train(model: nn.Module) -> None:
    model(ids()).backward()


def agrees_again(swapped: Attached, expected: list) -> None:
    """After a failure the same session trains on, correctly."""
    found = gradients(swapped.model, train)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    swapped.model.zero_grad(set_to_none=True)


def two_steps(swapped: Attached) -> None:
    for _ in range(2):
        train(swapped.model)
        swapped.session.end_step()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Plain().train()


@pytest.mark.parametrize("kind", ["READ", "WRITE"])
def test_an_io_error_reaches_the_training_thread(kind: str, model: nn.Module, tmp_path: Path) -> None:
    core = load_core()
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        swapped.io.engine.add_fault(
            kind=getattr(core.IoKind, kind), effect=core.IoFaultEffect.ERROR, error=errno.EIO, first=3, count=1
        )
        with pytest.raises(FuyouStorageError, match=r"an activation of (blocks|the model)") as caught:
            two_steps(swapped)
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(tmp_path)
        swapped.io.engine.clear_faults()
        del caught
        agrees_again(swapped, expected)
        assert swapped.nothing_is_left()


@pytest.mark.parametrize("effect", ["SHORT", "DELAY"])
def test_short_and_slow_transfers_are_completed(effect: str, model: nn.Module, tmp_path: Path) -> None:
    core = load_core()
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        for kind in (core.IoKind.READ, core.IoKind.WRITE):
            swapped.io.engine.add_fault(
                kind=kind, effect=getattr(core.IoFaultEffect, effect), delay_secs=0.002, first=0, count=1000
            )
        agrees_again(swapped, expected)
        assert swapped.nothing_is_left()


@pytest.mark.parametrize("arena_bytes", [SMALL, 16 * MIB], ids=["small", "large"])
def test_storage_full(arena_bytes: int, model: nn.Module, tmp_path: Path) -> None:
    with attached(model, tmp_path, arena_bytes=arena_bytes, budget_bytes=128 * 1024) as swapped:
        for _ in range(2):
            with pytest.raises(FuyouStorageError, match="nvme_budget_bytes leaves") as caught:
                train(model)
            assert caught.value.errno == errno.ENOSPC
            del caught
            assert not swapped.session.is_open
            assert swapped.nothing_is_left()
    assert swapped.space.num_bytes <= 128 * 1024


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses to enlarge the file: the error names what is needed and what is free."""
    space = SwapSpace([tmp_path])

    def refuse(fd: int, num_bytes: int, offset: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(swap_space, "preallocate", refuse)
    with pytest.raises(
        FuyouStorageError, match=rf"swapped activations: storage needs 4096 more bytes.*{tmp_path}: \d+ free"
    ) as caught:
        space.lease(1)
    assert caught.value.errno == errno.ENOSPC
    space.close()


def test_an_unwritable_path_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(FuyouStorageError, match="cannot keep swapped activations in nvme_path"):
        SwapSpace([tmp_path / "missing"])


def test_an_exception_in_forward_leaves_nothing(model: nn.Module, tmp_path: Path) -> None:
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        for index in (0, 2):
            handle = model.blocks[index].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                train(model)
            handle.remove()
            assert swapped.nothing_is_left()
            assert not swapped.session.is_open
        agrees_again(swapped, expected)


def test_an_interrupt_is_cleaned_up_at_the_end_of_the_step(model: nn.Module, tmp_path: Path) -> None:
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path) as swapped:
        interrupted(model, train, model.blocks[1])
        swapped.session.end_step()
        assert not swapped.session.is_open
        agrees_again(swapped, expected)
        assert swapped.nothing_is_left()


@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluation", "training"])
def test_the_forward_after_an_interrupt_is_swapped(model: nn.Module, tmp_path: Path, evaluates: bool) -> None:
    """A script may end an evaluation by Ctrl-C, or by a signal of its own, and train on."""
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path) as swapped:
        with torch.set_grad_enabled(not evaluates):
            interrupted(model, train, model.blocks[1])
        with torch.no_grad():
            model(ids())
        assert not swapped.session.is_open
        before = swapped.session.counters.out_bytes
        agrees_again(swapped, expected)
        assert swapped.session.counters.out_bytes > before
        assert swapped.nothing_is_left()


def test_a_forward_without_backward_leaves_nothing(model: nn.Module, tmp_path: Path) -> None:
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        for length in (33, 20, 40):
            loss = model(ids(length))
            del loss
        assert swapped.nothing_is_left()


class InPlace(nn.Module):
    """Saves a tensor in ``first``, then changes it in place before backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).sigmoid()  # sigmoid saves its result
        z = self.second(y)
        y.mul_(2.0)
        return z.square().mean()


def test_small_tensors_that_are_changed_in_place_are_refused_as_without_hooks(tmp_path: Path) -> None:
    model = InPlace(8).train()
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match=r"in-?place operation"):
        copy.deepcopy(model)(x).backward()
    with attached(model, tmp_path), pytest.raises(RuntimeError, match="inplace operation"):
        model(x).backward()


def test_moved_tensors_that_are_changed_in_place_keep_the_saved_value(tmp_path: Path) -> None:
    """PyTorch refuses this; a copy was taken when the tensor was saved, so the gradient is right."""
    model = InPlace(64).train()
    x = torch.randn(32, 64)
    expected = copy.deepcopy(model)
    expected.second(expected.first(x).sigmoid()).square().mean().backward()
    with attached(model, tmp_path):
        model(x).backward()
    for a, b in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_changing_a_tensor_between_two_saves_moves_it_twice(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            a = self.one(y)
            y = y.clone()
            b = self.two(y.add_(1.0))
            return (a * b).mean()

    must_agree(Twice(), lambda model: model(torch.ones(32, 64, requires_grad=True)).backward(), tmp_path)


class Converted(nn.Module):
    """Works with copies of its parameters: one that lies in memory otherwise, and one that is changed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 8, 3, 3))
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.conv2d(x, self.kernel.to(memory_format=torch.channels_last), padding=1)
        weight = self.weight.to(torch.float64)
        with torch.no_grad():
            weight.clamp_(-0.5, 0.5)
        return (x.flatten(1)[:, :64].double() @ weight).square().mean()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.watched = nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.trained(x), self.watched(x)


def test_a_batch_that_is_written_past_pytorch_is_moved_in_every_forward(tmp_path: Path) -> None:
    """As memory that a data loader fills: no version tells. The script keeps outputs of which no backward asks."""
    batch = torch.zeros(32, 64)
    seen: list[torch.Tensor] = []

    def step(model: nn.Module) -> None:
        for value in (1.0, 2.0, 3.0):
            batch.numpy()[:] = value
            trained, watched = model(batch)
            seen.append(watched)
            trained.square().mean().backward()

    torch.manual_seed(0)
    model = TwoHeads().train()
    expected = gradients(copy.deepcopy(model), step)
    with attached(model, tmp_path) as swapped:
        found = gradients(model, step)
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        entries = [entry for of in swapped.swapper._moved.values() for found in of._entries.values() for entry in found]
        assert {entry.tape for entry in entries} == {swapped.swapper._tape}, "forwards before this one are forgotten"
        seen.clear()
        assert swapped.nothing_is_left()


def test_copies_of_parameters_with_other_values_or_layout_are_activations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 12, 12)
    must_agree(Converted(), lambda model: model(x).backward(), tmp_path)


def test_use_after_close(model: nn.Module, tmp_path: Path) -> None:
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        loss = model(ids())
        swapped.settle()
        swapped.session.close()
        with pytest.raises(FuyouStateError, match="closed"):
            loss.backward()
        model.zero_grad()
        train(model)  # the session is off: an ordinary forward
    assert all(param.grad is not None for param in model.parameters())


def test_ctrl_c_while_it_is_closed_keeps_no_file(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Transfer.end

    def interrupted(transfer: Transfer) -> None:
        end(transfer)
        raise KeyboardInterrupt

    monkeypatch.setattr(Transfer, "end", interrupted)
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        swapped.io.engine.set_throttle(0.0, 1e6)
        loss = model(ids())
        assert open_files(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            swapped.tier.close()
        assert not open_files(tmp_path)
        del loss


def open_files(directory: Path) -> list[str]:
    """Descriptors of this process below it, those of nameless files too."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in found if link.startswith(str(directory))]


def test_a_copy_of_the_model_is_left_alone(model: nn.Module, tmp_path: Path) -> None:
    with attached(model, tmp_path, recompute=lambda name: name == "blocks.1") as swapped:
        twin = copy.deepcopy(model)
        train(twin)
        assert swapped.tier.counters.out_bytes == 0
        with torch.no_grad():
            twin.blocks[1].up.weight.zero_()
        assert not torch.equal(twin(ids()), model(ids())), "the copy runs its own recomputed block"


def test_sequence_length_changes_in_every_step(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        for length in range(21, 46, 4):
            model(ids(length)).backward()

    found = must_agree(Plain(), step, tmp_path, arena_bytes=SMALL)
    assert found.space.num_bytes <= 64 * MIB, "one growth of the file serves all lengths"
