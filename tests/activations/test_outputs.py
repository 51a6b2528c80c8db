# SPDX-License-Identifier: Apache-2.0
"""Blocks whose operators' outputs are kept, swapped or recomputed: gradients equal those of the untouched model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.policy import BlockFate, Fate
from tests.activations.support import Attached, Plain, attached, gradients, interrupted, profile_blocks

SMALL = 256 * 1024
AROUND = {"": BlockFate(Fate.SWAP)}


def ids(length: int = 33) -> torch.Tensor:
    return torch.randint(300, (4, length), generator=torch.Generator().manual_seed(0))


def train(model: nn.Module) -> None:
    model(ids()).backward()


def train_in_autocast(model: nn.Module) -> None:
    for length in (33, 21):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids(length))
        loss.backward()


def train_twice_through_one_graph(model: nn.Module) -> None:
    loss = model(ids())
    loss.backward(retain_graph=True)
    loss.backward()


def calls_of(model: nn.Module, step: Callable[[nn.Module], None]) -> list[OperatorCall]:
    copied = copy.deepcopy(model)
    profile = profile_blocks(find_blocks(copied), lambda: step(copied))[0]
    return [output.call for output in profile.operators if output.call is not None]


def in_each_block(calls: Sequence[OperatorCall], fate: Fate, prefix: str = "blocks.") -> dict[str, BlockFate]:
    """The same fate for all of these calls, in the three blocks of a model."""
    return {f"{prefix}{i}": BlockFate(Fate.SWAP, dict.fromkeys(calls, fate)) for i in range(3)} | AROUND


def agrees(swapped: Attached, step: Callable[[nn.Module], None], expected: Sequence[torch.Tensor | None]) -> bool:
    found = gradients(swapped.model, step)
    swapped.model.zero_grad(set_to_none=True)
    return all(
        (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
        for a, b in zip(expected, found, strict=True)
    )


def agrees_whatever_is_drawn(
    swapped: Attached, step: Callable[[nn.Module], None], calls: Sequence[OperatorCall], expected: Sequence[Any]
) -> None:
    """With fates of every block's calls that are drawn anew, four times."""
    drawn, blocks = random.Random(0), [f"blocks.{i}" for i in range(len(swapped.model.blocks))]
    for _ in range(4):
        fates = {block: {call: drawn.choice(list(Fate)) for call in calls} for block in blocks}
        swapped.session.decide({block: BlockFate(Fate.SWAP, chosen) for block, chosen in fates.items()} | AROUND)
        assert agrees(swapped, step, expected), fates


STEPS = (train, train_in_autocast, train_twice_through_one_graph)
MODELS: dict[str, dict] = {
    "plain": {},
    "awkward": {"dropout": 0.1, "twice": True, "tied": True, "frozen": (0, 2)},
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_any_mixture_of_fates(name: str, step: Callable[[nn.Module], None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Plain(num_layers=4, **MODELS[name]).train()
    expected = gradients(copy.deepcopy(model), step)
    calls = calls_of(model, step)
    assert {"aten.addmm.default", "aten.gelu.default", "aten._softmax.default"} <= {call.operator for call in calls}
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        agrees_whatever_is_drawn(swapped, step, calls, expected)
        assert swapped.tier.counters.read_bytes > 0
        assert swapped.nothing_is_left()


class Force(nn.Module):
    """Takes derivatives in its forward: of what it has just made, or (``deep``) through all blocks before."""

    def __init__(self, width: int, *, deep: bool) -> None:
        super().__init__()
        self.first, self.deep = nn.Linear(width, width), deep
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        energy = (torch.tanh(y) * torch.sigmoid(y)).square().sum()
        (force,) = torch.autograd.grad(energy, begin if self.deep else y, create_graph=True)
        return x + 0.1 * force + self.down(F.gelu(self.up(x)))


class Forces(nn.Module):
    def __init__(self, *, deep: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Force(48, deep=deep) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = x.requires_grad_()
        for block in self.blocks:
            x = block(x, begin)
        return x.square().mean()


@pytest.mark.parametrize("deep", [False, True])
def test_a_forward_that_differentiates(deep: bool, tmp_path: Path) -> None:
    """It is recomputed while it runs."""
    torch.manual_seed(0)
    model = Forces(deep=deep)

    def step(model: nn.Module) -> None:
        for seed in range(2):
            model(torch.randn(64, 48, generator=torch.Generator().manual_seed(seed))).backward()

    expected = gradients(copy.deepcopy(model), step)
    calls = calls_of(model, step)
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        agrees_whatever_is_drawn(swapped, step, calls, expected)
        assert swapped.nothing_is_left()


def test_what_is_saved_is_not_computed_again_and_what_is_swapped_is_not_held(tmp_path: Path) -> None:
    """Counts runs of the products, and bytes on the device between forward and backward, for one operator's fates."""
    torch.manual_seed(0)
    model = Plain(num_layers=3).train()
    expected = gradients(copy.deepcopy(model), train)
    up = OperatorCall("aten.addmm.default", 2)
    out_bytes = 4 * 32 * 193 * 4
    held, moved, runs = {}, {}, {}
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        for fate in Fate:
            swapped.session.decide({f"blocks.{i}": BlockFate(Fate.SWAP, {up: fate}) for i in range(3)} | AROUND)
            before = swapped.tier.counters.out_bytes
            loss = model(ids())
            held[fate], moved[fate] = swapped.tier.held.now, swapped.tier.counters.out_bytes - before
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                loss.backward()
            runs[fate] = sum(event.count for event in seen.key_averages() if event.key == "aten::addmm")
            assert swapped.tier.held.now == 0, "while the loss, and so the graph, still lives"
            del loss
            assert agrees(swapped, train, expected)
    assert held[Fate.KEEP] - held[Fate.RECOMPUTE] == 3 * out_bytes
    assert held[Fate.SWAP] == held[Fate.RECOMPUTE]
    assert moved[Fate.SWAP] - moved[Fate.RECOMPUTE] == 3 * out_bytes
    assert moved[Fate.KEEP] == moved[Fate.RECOMPUTE]
    assert [runs[Fate.RECOMPUTE] - runs[fate] for fate in (Fate.KEEP, Fate.SWAP)] == [3, 3], "one in each block"


def train_on_noise(model: nn.Module) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()


@torch.library.custom_op("fuyou_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor, share: float) -> torch.Tensor:
    """As a kernel of another library it does not say that it draws."""
    return x * (torch.rand(x.shape) >= share) if share else x.clone()


noisy.register_autograd(lambda ctx, grad: (grad, None))


class NoisyBlock(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.up, self.share = nn.Linear(64, 64), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(noisy(F.gelu(self.up(x)), self.share).sin(), 0.3)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_what_another_librarys_operator_draws_is_drawn_again(share: float, tmp_path: Path) -> None:
    """Handed out instead, dropout behind it would draw what it has drawn. One that draws nothing is handed out."""
    torch.manual_seed(0)
    model = nn.Sequential(*(NoisyBlock(share) for _ in range(3))).train()
    expected = gradients(copy.deepcopy(model), train_on_noise)
    call = OperatorCall("fuyou_tests.noisy.default", 0)
    assert call in calls_of(model, train_on_noise)
    with attached(model, tmp_path) as swapped:
        swapped.session.decide({str(i): BlockFate(Fate.SWAP, {call: Fate.SWAP}) for i in range(3)} | AROUND)
        before = swapped.tier.counters.out_bytes
        loss = model(torch.randn(32, 64))
        selected = swapped.tier.counters.out_bytes - before
        del loss
        swapped.session.decide({str(i): BlockFate(Fate.SWAP, {call: Fate.RECOMPUTE}) for i in range(3)} | AROUND)
        before = swapped.tier.counters.out_bytes
        loss = model(torch.randn(32, 64))
        saved_bytes = selected - (swapped.tier.counters.out_bytes - before)
        del loss
        assert saved_bytes == (0 if share else 3 * 32 * 64 * 4)
        swapped.session.decide({str(i): BlockFate(Fate.SWAP, {call: Fate.KEEP}) for i in range(3)} | AROUND)
        assert agrees(swapped, train_on_noise, expected)


class NeverDrops(nn.Module):
    """Of dropout with a probability of 0 that draws all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.native_dropout(self.up(x), 0.0, True)[0].sin(), 0.3)


def test_dropout_of_nothing_is_drawn_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(NeverDrops() for _ in range(3))).train()
    expected = gradients(copy.deepcopy(model), train_on_noise)
    calls = calls_of(model, train_on_noise)
    assert "aten.sin.default" in {call.operator for call in calls}
    with attached(model, tmp_path) as swapped:
        for fate in (Fate.KEEP, Fate.SWAP):
            swapped.session.decide(in_each_block((*calls, OperatorCall("aten.native_dropout.default", 0)), fate, ""))
            assert agrees(swapped, train_on_noise, expected)


class Chooses(nn.Module):
    """By operators of a higher order, whose functions run inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        chosen = torch.cond(up.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (up,))
        return x + F.dropout(self.up(chosen).tanh(), 0.3)


def test_operators_of_a_higher_order_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Chooses() for _ in range(3))).train()
    expected = gradients(copy.deepcopy(model), train_on_noise)
    calls = calls_of(model, train_on_noise)
    assert OperatorCall("aten.addmm.default", 1) in calls
    with attached(model, tmp_path) as swapped:
        for fate in Fate:
            swapped.session.decide(in_each_block(calls, fate, ""))
            assert agrees(swapped, train_on_noise, expected)


@torch.library.custom_op("fuyou_tests::make_noisy", mutates_args={"x"})
def make_noisy(x: torch.Tensor) -> None:
    """As :func:`noisy`, in place."""
    x.mul_(torch.rand(x.shape))


class Completes(torch.autograd.Function):
    """Changes an output that it has just made, by a call that has to run again or after somebody read it, before it
    returns it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        made = x * 2.0
        if how == "library":
            make_noisy(made)
        elif how == "list":  # returns nothing
            torch._foreach_mul_([made], 0.5)
        elif how == "read":
            largest = float(abs(made.numpy()).max())
            made.add_(1.0)
            x = x * largest
        else:
            made.uniform_(-1.0, 1.0)
        ctx.save_for_backward(made)
        return x + made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class CompletingBlock(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.how = nn.Linear(64, 64), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(Completes.apply(self.up(x), self.how).sin(), 0.3)


@pytest.mark.parametrize("how", ["torch", "library", "list", "read"])
@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.SWAP])
def test_what_completes_an_output_and_has_to_run_runs_again(fate: Fate, how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(CompletingBlock(how) for _ in range(3))).train()
    expected = gradients(copy.deepcopy(model), train_on_noise)
    calls = calls_of(model, train_on_noise)
    completed = OperatorCall("aten.mul.Tensor", 0)
    assert completed in calls
    with attached(model, tmp_path) as swapped:
        for handed_out in (calls, [completed]):
            swapped.session.decide(in_each_block(handed_out, fate, ""))
            assert agrees(swapped, train_on_noise, expected)


class OfDeepSpeed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = LinearFunctionForZeroStage3.apply(x, self.weight, self.bias).sin()
        return x + found


def test_a_product_is_handed_out_with_its_bias(tmp_path: Path) -> None:
    """Of DeepSpeed's linear layer, which adds it in place."""
    torch.manual_seed(0)
    model = nn.Sequential(*(OfDeepSpeed(64, 64) for _ in range(3))).train()

    def step(model: nn.Module) -> None:
        model(torch.ones(2, 16, 64).cumsum(1) / 16).square().sum().backward()

    expected = gradients(copy.deepcopy(model), step)
    calls = calls_of(model, step)
    product, runs = OperatorCall("aten.mm.default", 0), {}
    assert product in calls
    with attached(model, tmp_path) as swapped:
        for fate in Fate:
            swapped.session.decide(in_each_block([product], fate, ""))
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                assert agrees(swapped, step, expected)
            runs[fate] = sum(event.count for event in seen.key_averages() if event.key in ("aten::mm", "aten::add_"))
    assert [runs[Fate.RECOMPUTE] - runs[fate] for fate in (Fate.KEEP, Fate.SWAP)] == [6, 6], "both, in each block"


class InPlaceBlock(nn.Module):
    """Changes an output inside of the block, draws random numbers, and hands out a tensor that is changed later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.calls = SimpleNamespace(number=0, with_extra=0)  # an object that changes inside: a recomputation goes on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.number += 1
        if self.calls.number == self.calls.with_extra:
            x = x + 0.0  # saves nothing: PyTorch's own count of saved tensors is as before
        hidden = self.up(x)
        hidden.mul_(0.5)
        hidden = F.dropout(F.relu(hidden, inplace=True), 0.3, self.training)
        return self.down(hidden)


class HandingBack(nn.Module):
    """Hands back what it was given, and one output twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.up(x.tanh())
        return x, hidden, hidden


class Changing(nn.Module):
    """Changes in place what blocks hand out, and uses it by its other names."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.blocks = nn.Linear(48, 48), nn.ModuleList(HandingBack() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x) + 0.0
        for block in self.blocks:
            _, first, second = block(x)
            first *= 2.0  # which is the second, too
            x = x + second.sin()
        handed, _, _ = self.blocks[0](x)
        handed *= 1.5  # which is x
        return x.sin().square().mean()


@pytest.mark.parametrize("fate", [Fate.RECOMPUTE, Fate.KEEP])
def test_what_a_block_hands_back_is_what_it_was_given(fate: Fate, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Changing().train()
    expected = gradients(copy.deepcopy(model), train_in_place)
    calls = calls_of(model, train_in_place)
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        swapped.session.decide(in_each_block(calls, fate))
        assert agrees(swapped, train_in_place, expected)


class InPlaceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceBlock(48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x.square().mean()


def train_in_place(model: nn.Module) -> None:
    model(torch.ones(64, 48)).backward()


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.SWAP])
def test_outputs_that_are_changed_in_place(fate: Fate, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = InPlaceModel().train()
    expected = gradients(copy.deepcopy(model), train_in_place)
    calls = calls_of(model, train_in_place)
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        swapped.session.decide(in_each_block(calls, fate))
        for _ in range(2):
            assert agrees(swapped, train_in_place, expected)
        assert swapped.nothing_is_left()


class Unseen(torch.autograd.Function):
    """Works in place past PyTorch's dispatcher, as kernels of other libraries do for rotary embeddings."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        memory = x.detach().numpy()
        memory *= -1.5
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * -1.5


class UnseenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        self.unseen: Callable[[torch.Tensor], torch.Tensor] = Unseen.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.unseen(self.up(x))))


class ChangedByItsCaller(nn.Module):
    """The block saves nothing of what the caller changes: a sigmoid's backward needs its result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(torch.tanh(self.up(x)))
        return y, torch.sigmoid(y)


class ChangesOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ChangedByItsCaller() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y, gate = block(x)
            y += 1.0
            x = x + y.sin() * gate
        return x.square().mean()


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.SWAP])
def test_an_output_that_the_caller_changes_is_computed_again(fate: Fate, tmp_path: Path) -> None:
    """It is saved inside of a dispatch mode, where PyTorch does not count changes by itself."""

    def step(model: nn.Module) -> None:
        model(torch.linspace(-1, 1, 64 * 48).view(64, 48)).backward()

    torch.manual_seed(0)
    model = ChangesOutputs().train()
    wanted = gradients(copy.deepcopy(model), step)
    with attached(model, tmp_path) as at:
        product = {OperatorCall("aten.addmm.default", 1): fate}
        at.session.decide({block.name: BlockFate(Fate.SWAP, product) for block in at.session.blocks})
        for _ in range(2):
            found = gradients(model, step)
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_outputs_that_are_changed_unseen_are_computed_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(UnseenBlock() for _ in range(3))).train()

    def step(model: nn.Module) -> None:
        model(torch.ones(64, 48).cumsum(0) / 64).square().mean().backward()

    expected = gradients(copy.deepcopy(model), step)
    calls = calls_of(model, step)
    assert {call for call in calls if "addmm" in call.operator} == {OperatorCall("aten.addmm.default", 1)}
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        for fate in (Fate.KEEP, Fate.SWAP):
            swapped.session.decide(in_each_block(calls, fate, ""))
            assert agrees(swapped, step, expected), fate


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.SWAP])
def test_outputs_that_are_changed_unseen_in_other_blocks_are_found(fate: Fate, tmp_path: Path) -> None:
    """The first block, which was watched, changes none; nor did the others when they were."""
    torch.manual_seed(0)
    model = nn.Sequential(*(UnseenBlock() for _ in range(3))).train()
    model[0].unseen = nn.Identity()

    def step(model: nn.Module) -> None:
        model(torch.ones(64, 48).cumsum(0) / 64).square().mean().backward()

    expected = gradients(copy.deepcopy(model), step)
    calls = calls_of(model, step)
    up = OperatorCall("aten.addmm.default", 0)
    assert up in calls
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        swapped.session.decide(in_each_block(calls, fate, ""))
        for _ in range(3):
            assert agrees(swapped, step, expected)
        wants = [forward._selection.region(None).wants(up) for forward in swapped.session._forwards]
        assert wants == [True, False, False]
        assert swapped.nothing_is_left()


class Interrupts(nn.Module):
    """In its first call."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 1:
            raise MemoryError
        return x


def test_a_forward_that_raises_is_not_the_one_that_is_looked_at(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(UnseenBlock() for _ in range(2))).train()
    calls = [OperatorCall(f"aten.{name}.default", number) for name, number in (("addmm", 0), ("gelu", 0))]

    def step(model: nn.Module) -> None:
        model(torch.ones(64, 48).cumsum(0) / 64).square().mean().backward()

    expected = gradients(copy.deepcopy(model), step)
    model[1].up = nn.Sequential(model[1].up, Interrupts())
    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        swapped.session.decide(
            {f"{i}": BlockFate(Fate.SWAP, dict.fromkeys(calls, Fate.KEEP)) for i in range(2)} | AROUND
        )
        with pytest.raises(MemoryError):
            step(model)
        assert agrees(swapped, step, expected)


class ChangedBuffers(nn.Module):
    """Counts its calls, keeps running statistics, and divides by a norm that each call estimates a little better. One
    buffer changes from the third call on.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(width, width))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("late", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, debug: bool = False) -> torch.Tensor:
        self.table = torch.ones(2 * len(self.table))  # another one, and a longer one, each time
        assert debug, "a name that torch's checkpoint has, too"
        if len(self.table) > 4:
            self.late += x.detach().mean() + 1.0
        return x + self.norm(F.gelu(self.linear(x))) * scale.mean() * self.table.sum() * (1.0 + self.late)


class ChangingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ChangedBuffers(48) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=x.detach().abs(), debug=True)
        return x.square().mean()


@pytest.mark.parametrize("outputs", [{}, {OperatorCall("aten.gelu.default", 0): Fate.SWAP}], ids=["whole", "but one"])
def test_buffers_are_changed_once(outputs: dict[OperatorCall, Fate], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ChangingModel().train()
    reference = copy.deepcopy(model)

    def several(model: nn.Module) -> None:
        losses = [model(torch.full((64, 48), value).cumsum(0)) for value in (0.1, -0.3)]
        for loss in losses:
            loss.backward()

    with attached(model, tmp_path, arena_bytes=SMALL) as swapped:
        swapped.session.decide({f"blocks.{i}": BlockFate(Fate.SWAP, outputs) for i in range(2)} | AROUND)
        for _ in range(2):
            assert agrees(swapped, several, gradients(reference, several))
        assert swapped.nothing_is_left()
    for (name, found), expected in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(found, expected), name


def test_no_part_of_a_model_keeps_a_cache_while_blocks_are_recomputed(tmp_path: Path, told: Callable[[], str]) -> None:
    """The text part of a larger Hugging Face model has a configuration of its own."""

    class Part(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part, self.config, self.seen = part, SimpleNamespace(use_cache=True), []

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.seen.append(self.config.use_cache)
            return self.part(ids)

    model = Part(Part(Plain())).train()
    with attached(model, tmp_path, recompute=lambda name: True):
        train(model)
        interrupted(model, train, model.part.part)
        model.eval()
        train(model)
    assert [part.seen for part in (model, model.part)] == [[False, False, True]] * 2
    assert model.config.use_cache
    assert model.part.config.use_cache
    assert told().count("A script that trains on past_key_values gives use_cache=True") == 1


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden.add_(self.linear.bias)  # what came in is changed: it must not be computed from again
        return self.linear(F.gelu(hidden))


def test_inputs_given_by_name_are_swapped_and_have_the_value_of_then(tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(ByName() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(hidden=x * 1.0)
            return x.square().mean()

    def step(model: nn.Module) -> None:
        model(torch.ones(256, 48, requires_grad=True)).backward()

    model = Model().train()
    expected = gradients(copy.deepcopy(model), step)
    with attached(model, tmp_path, arena_bytes=SMALL, recompute=lambda name: True) as swapped:
        assert agrees(swapped, step, expected)
        loss = model(torch.ones(256, 48))
        assert swapped.tier.counters.out_bytes >= 2 * 4 * 256 * 48 * 4, "in each of two forwards"
        del loss
        assert swapped.nothing_is_left()


@dataclass(frozen=True)
class Given:
    hidden: torch.Tensor
    parts: list[torch.Tensor]
    name: str = "given"


class Items(dict):
    """A dictionary of a class that PyTorch's trees do not know."""


def test_whatever_a_block_gives_its_recomputation_comes_first(tmp_path: Path) -> None:
    """Later than that ZeRO-3 has gathered the parameters of an operator, and the recomputation would release them."""
    shapes: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda x: x,
        lambda x: (x, {"a": [x * 2]}),
        lambda x: Given(x, [x * 2]),
        lambda x: {"here": Items(hidden=x, double=x * 2)},
    )

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, shape: Callable[[torch.Tensor], Any]) -> Any:
            return shape(self.linear(x))

    model = nn.Sequential(*(Block() for _ in range(2))).train()
    with attached(model, tmp_path, recompute=lambda name: True):
        for shape in shapes:
            given = model[0](torch.ones(4, 8), shape)
            while not isinstance(given, torch.Tensor):
                plain = vars(given) if isinstance(given, Given) else given
                given = next(iter(plain.values())) if isinstance(plain, dict) else plain[-1]
            assert given.grad_fn is not None
            assert given.grad_fn.name() == "_RecomputeFirstBackward"
        given = model[0](torch.ones(4, 8), shapes[2])
        assert (type(given), given.name) == (Given, "given")
        (given.hidden.sum() + given.parts[0].sum()).backward()
        assert torch.equal(model[0].linear.bias.grad, torch.full((8,), 12.0))


def test_a_recomputation_that_does_something_else_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = InPlaceModel().train()
    calls = calls_of(model, train_in_place)
    with attached(model, tmp_path) as swapped:
        swapped.session.decide({"blocks.1": BlockFate(Fate.SWAP, dict.fromkeys(calls, Fate.KEEP))} | AROUND)
        model.blocks[1].calls.with_extra = model.blocks[1].calls.number + 2
        with pytest.raises(RuntimeError, match=r"must do what it did in forward: aten.add.Tensor ran 0 times then"):
            train_in_place(model)


def test_fates_change_between_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Plain(num_layers=4, dropout=0.1).train()
    expected = gradients(copy.deepcopy(model), train)
    swap, recompute = BlockFate(Fate.SWAP), BlockFate(Fate.KEEP, {})
    moved = []
    with attached(model, tmp_path) as swapped:
        for num_swapped, num_recomputed in ((4, 0), (2, 1), (0, 4), (0, 0)):
            before = swapped.tier.counters.out_bytes
            fates = [swap] * num_swapped + [recompute] * num_recomputed
            decided = {f"blocks.{i}": fate for i, fate in enumerate(fates)}
            swapped.session.decide(decided | (AROUND if num_swapped else {}))
            assert agrees(swapped, train, expected)
            moved.append(swapped.tier.counters.out_bytes - before)
        assert swapped.nothing_is_left()
    assert moved[0] > 1.5 * moved[1] > 0
    assert moved[2:] == [0, 0]


class CompiledBlock(nn.Module):
    """Compiles a function for itself, as attention with a mask of its own does."""

    def __init__(self, compiled: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        self.compiled = compiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.compiled(self.up(x)))


def test_what_a_block_compiles_itself_is_still_compiled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    seen = CompileCounter()
    compiled = torch.compile(lambda x: F.gelu(x * 1.3).sin(), backend=seen)
    model = nn.Sequential(*(CompiledBlock(compiled) for _ in range(3))).train()
    products = {OperatorCall("aten.addmm.default", 0): Fate.SWAP}

    def step(model: nn.Module) -> None:
        model(torch.ones(64, 48)).square().mean().backward()

    with attached(model, tmp_path) as swapped:
        swapped.session.decide({f"{i}": BlockFate(Fate.SWAP, products) for i in range(3)} | AROUND)
        found = gradients(model, step)
        assert swapped.tier.counters.out_bytes > 0
    assert seen.frame_count == 1
    expected = gradients(model, step)
    assert seen.frame_count == 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
