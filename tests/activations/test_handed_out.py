# SPDX-License-Identifier: Apache-2.0
"""What backward does with a tensor that was swapped: gives it back as a gradient, changes it. As in plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.activations.late import LateCopies
from tests.activations.support import MIB, attached

SHAPE = (256, 64)


class _Weighted(torch.autograd.Function):
    """The sum of ``z * reward``: its gradient by ``z`` is what it saved."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(reward)
        return (z * reward).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class _Scaled(torch.autograd.Function):
    """The sum of squares; its backward changes in place what it saved, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * 2)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        return saved.mul_(grads[0])


class _Scribbles(torch.autograd.Function):
    """Its backward changes its input, which others have saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(5) * 0


class _Model(nn.Module):
    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.compute = compute

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.compute(*args)


Case = Callable[[Callable[..., torch.Tensor]], object]


def _in_three_micro_batches(model: Callable[..., torch.Tensor]) -> object:
    reward, z = torch.ones(SHAPE), torch.zeros(SHAPE, requires_grad=True)
    for _ in range(3):
        model(z, reward).backward()
    return _seen(reward, z.grad)


def _in_three_backwards(model: Callable[..., torch.Tensor]) -> object:
    reward, z = torch.ones(SHAPE), torch.zeros(SHAPE, requires_grad=True)
    loss = model(z, reward * 1.0)
    for _ in range(3):
        loss.backward(retain_graph=True)
    return _seen(reward, z.grad)


def _of_two_leaves(model: Callable[..., torch.Tensor]) -> object:
    reward = torch.ones(SHAPE)
    both = [torch.zeros(SHAPE, requires_grad=True) for _ in range(2)]
    (model(both[0], reward) + model(both[1], reward)).backward()
    assert both[0].grad is not None
    both[0].grad.mul_(7)
    return _seen(reward, *(leaf.grad for leaf in both))


def _with_a_history(model: Callable[..., torch.Tensor]) -> object:
    """Autograd hands such a tensor on in an object of its own."""
    leaf, z = torch.ones(SHAPE, requires_grad=True), torch.zeros(SHAPE, requires_grad=True)
    reward = leaf * 1.0
    for _ in range(3):
        model(z, reward).backward(retain_graph=True)
    return _seen(reward, z.grad)


def _of_two_leaves_with_a_history(model: Callable[..., torch.Tensor]) -> object:
    reward = torch.ones(SHAPE, requires_grad=True) * 1.0
    both = [torch.zeros(SHAPE, requires_grad=True) for _ in range(2)]
    (model(both[0], reward) + model(both[1], reward)).backward(retain_graph=True)
    assert both[0].grad is not None
    both[0].grad.mul_(7)
    return _seen(reward, *(leaf.grad for leaf in both))


def _seen(*tensors: torch.Tensor | None) -> list[list[float]]:
    return [[] if tensor is None else tensor.detach().unique().tolist() for tensor in tensors]


CASES: list[Case] = [
    _in_three_micro_batches,
    _in_three_backwards,
    _of_two_leaves,
    _with_a_history,
    _of_two_leaves_with_a_history,
]


@pytest.mark.parametrize("late", [None, 1, 1000])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_no_memory_of_what_was_saved(case: Case, late: int | None, tmp_path: Path) -> None:
    plain = case(_Model(_Weighted.apply).train())
    model = _Model(_Weighted.apply).train()
    with attached(model, tmp_path, arena_bytes=MIB, copies=None if late is None else LateCopies(late)) as at:
        assert case(model) == plain
        assert at.tier.counters.out_bytes > 0
        assert at.swapper._handed == [], "backward has ended"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_small", [True, False])
def test_a_gradient_is_no_memory_of_what_stayed(
    case: Case, is_small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alias that autograd is given is the last one of its node, which has gone by the time a leaf takes it."""
    if is_small:
        monkeypatch.setattr(sys.modules[__name__], "SHAPE", (2, 4))
    plain = case(_Model(_Weighted.apply).train())
    model = _Model(_Weighted.apply).train()
    with attached(model, tmp_path, arena_bytes=MIB) as at:
        at.swapper.fates = {}  # all is kept
        assert case(model) == plain
        assert at.tier.counters.out_bytes == 0
        assert at.swapper._handed == []


class _Owns(torch.autograd.Function):
    """Fused losses compute a gradient in forward, save it and give it back: nobody else has it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(made := torch.full_like(weight, 2.0))
        ctx.address = made.data_ptr()
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        assert saved.data_ptr() == ctx.address
        return saved


def test_what_a_function_alone_owns_becomes_a_gradient_without_a_copy(tmp_path: Path) -> None:
    addresses: list[int] = []

    class Noting(_Owns):
        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            addresses.append(ctx.address)
            return _Owns.backward(ctx, *grads)

    model = _Model(Noting.apply).train()
    weight = torch.zeros(SHAPE, requires_grad=True)
    with attached(model, tmp_path) as at:
        at.swapper.fates = {}
        model(weight).backward()
    assert weight.grad is not None
    assert [weight.grad.data_ptr()] == addresses


def test_what_backward_was_given_is_let_go_when_the_next_node_asks(tmp_path: Path) -> None:
    held: list[int] = []

    def compute(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.square()
            x.register_hook(lambda grad: held.append(len(at.swapper._handed)))
        return x.sum()

    model = _Model(compute).train()
    with attached(model, tmp_path) as at:
        model(torch.rand(SHAPE, requires_grad=True)).backward()
    assert max(held) == 1


def _first_and_second(model: Callable[..., torch.Tensor], between: Callable[[], None]) -> list[list[float]]:
    """The gradient by one graph, which its second use must refuse."""
    z = torch.ones(SHAPE, requires_grad=True)
    loss = model(z * 1.0) * 3
    (first,) = torch.autograd.grad(loss, z, retain_graph=True)
    found = _seen(first)
    between()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, z, retain_graph=True)
    return found


class _Uses(torch.autograd.Function):
    """Its backward does something with what it saved, which nobody else has."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, reward: torch.Tensor, use: Callable[[torch.Tensor], object]) -> torch.Tensor:
        ctx.save_for_backward(reward)
        ctx.use = use
        return (z * reward).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            ctx.use(saved)
        return torch.ones(SHAPE), None, None


@pytest.mark.parametrize("late", [None, 1, 1000])
@pytest.mark.parametrize(
    "use",
    [
        lambda saved: saved.detach_(),
        lambda saved: saved.add_(torch.ones_like(saved, requires_grad=True) * 1),
        lambda saved: saved.requires_grad_().sum().backward(),
        lambda saved: saved.t_(),
        lambda saved: saved.set_(torch.ones_like(saved)),
    ],
    ids=["detached", "changed with a history", "derived", "transposed", "set"],
)
def test_backward_may_do_with_it_what_it_may_with_any(
    use: Callable[[torch.Tensor], object], late: int | None, tmp_path: Path
) -> None:
    model = _Model(lambda z, reward: _Uses.apply(z, reward, use)).train()
    z = torch.zeros(SHAPE, requires_grad=True)
    with attached(model, tmp_path, arena_bytes=MIB, copies=None if late is None else LateCopies(late)):
        model(z, torch.ones(SHAPE)).backward()
    assert _seen(z.grad) == [[1.0]]


def test_what_backward_was_given_is_let_go_when_a_kept_tensor_is_asked_for(tmp_path: Path) -> None:
    """Logits that were swapped, and blocks that were kept."""
    held: list[int] = []

    def compute(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x[:, :1].square() + x[:, 1:].sum()  # too small to be moved
            x.register_hook(lambda grad: held.append(len(at.swapper._handed)))
        return x.expand(SHAPE).contiguous().square().sum()

    model = _Model(compute).train()
    with attached(model, tmp_path, smallest_bytes=4096) as at:
        model(torch.rand(256, 2, requires_grad=True)).backward()
        assert at.tier.counters.out_bytes >= 256 * 64 * 4
    assert held[0] == 1
    assert held[-1] == 0


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_saved_tensor_that_backward_changed_is_not_used_again(is_forgotten: bool, tmp_path: Path) -> None:
    """Also where its host memory was needed for something else, and storage has it as it was."""
    plain = _first_and_second(_Model(_Scaled.apply).train(), lambda: None)
    assert plain == [[6.0]]
    model = _Model(_Scaled.apply).train()
    with attached(model, tmp_path) as at:

        def forget() -> None:
            at.tier.poll()
            while is_forgotten and at.tier._forget_last_clean((1 << 60, 0)):
                pass

        assert _first_and_second(model, forget) == plain


@pytest.mark.parametrize("late", [None, 0, 1, 2, 1000])
def test_a_saved_tensor_that_another_node_changed_is_refused_or_right(late: int | None, tmp_path: Path) -> None:
    """It is right where it had left the device before it was changed there."""

    def compute(z: torch.Tensor) -> torch.Tensor:
        h = z * 1.0
        squares = h.square().sum()
        return _Scribbles.apply(h) + squares

    def made(model: nn.Module) -> list[list[float]]:
        z = torch.ones(SHAPE, requires_grad=True)
        try:
            model(z).backward()
        except RuntimeError as error:
            return [[str(error).count("modified by an inplace operation")]]
        return _seen(z.grad)

    refused, right = [[1]], [[2.0]]
    assert made(_Model(compute).train()) == refused
    model = _Model(compute).train()
    with attached(model, tmp_path, copies=None if late is None else LateCopies(late)):
        assert made(model) in ([refused] if late is None else [refused, right])


def test_forward_mode_derivatives_inside_of_a_model(tmp_path: Path) -> None:
    """Their tangents may be zeros without memory."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        value, tangent = torch.func.jvp(lambda y: torch.addmm(x, y, x[:64, :64]), (x,), (torch.ones_like(x),))
        return (value * tangent).sum()

    def made(model: nn.Module) -> torch.Tensor:
        x = torch.linspace(0, 1, 256 * 64).view(256, 64).requires_grad_()
        model(x).backward()
        assert x.grad is not None
        return x.grad

    model = _Model(compute).train()
    plain = made(_Model(compute).train())
    with attached(model, tmp_path) as at:
        assert torch.equal(made(model), plain)
        assert at.tier.counters.out_bytes > 0


def test_a_derivative_within_forward_does_not_end_swapping(tmp_path: Path) -> None:
    """Forces by positions, say."""

    def compute(x: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
        if asks:
            leaf = x.detach().requires_grad_()
            x = x + torch.autograd.grad(leaf.pow(3).sum(), leaf)[0]
        for _ in range(8):
            x = x.square()
        return x.sum()

    moved = []
    for asks in (False, True):
        model = _Model(compute).train()
        with attached(model, tmp_path) as at:
            model(torch.rand(SHAPE, requires_grad=True), torch.tensor(asks)).backward()
            moved.append(at.tier.counters.out_bytes)
    assert moved[1] >= moved[0] > 0


def test_weights_of_the_scripts_own_modules_stay(tmp_path: Path) -> None:
    """They are there anyway; what its loss saves beside them goes."""
    model, critic = _Model(lambda x: x * 2).train(), nn.Linear(SHAPE[1], 2000)
    with attached(model, tmp_path) as at:
        loss = critic(model(torch.rand(SHAPE, requires_grad=True))).mean()
        assert at.tier.counters.out_bytes == SHAPE[0] * SHAPE[1] * 4
        loss.backward()
        critic.weight.data.add_(1)


def test_slices_of_one_tensor_are_found_by_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a long sequence, each saved twice: what is looked at does not grow with their number."""
    from ds_fuyou.activations.views import ByteRange

    looked, covers = [0], ByteRange.covers

    def counted(span: ByteRange, other: ByteRange) -> bool:
        looked[0] += 1
        return covers(span, other)

    def compute(x: torch.Tensor) -> torch.Tensor:
        rows = (x * 1.0).unbind(0)
        return torch.stack([(row * row).sum() for row in rows]).sum()

    monkeypatch.setattr(ByteRange, "covers", counted)
    model = _Model(compute).train()
    with attached(model, tmp_path, arena_bytes=16 * MIB) as at:
        x = torch.rand(1000, 2048, requires_grad=True)
        model(x).backward()
        assert at.tier.num_saved >= 1000
        assert torch.equal(x.grad, 2 * x)
    assert looked[0] < 8 * 1000
