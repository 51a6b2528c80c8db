# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing written in the script is taken over inside of a swapped forward, and nowhere else."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,  # bound before anything is replaced
    create_selective_checkpoint_contexts,
)

from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.activations.takeover import TORCH_POINTS, CheckpointTakeover
from tests.activations.support import PlainBlock, attached, gradients, must_agree

pytestmark = pytest.mark.compat  # it replaces names of torch's own


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PlainBlock(32, 0.1) for _ in range(3))
        self.reentrant = reentrant
        self.num_calls = 0

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def inputs() -> torch.Tensor:
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()


def looked_up() -> list[Any]:
    """What checkpoints find under the names that are taken over."""
    return [getattr(point.module, point.name) for point in TORCH_POINTS]


def train(model: nn.Module) -> None:
    model(inputs()).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_swapped_instead_of_recomputed(reentrant: bool, tmp_path: Path, told: Callable[[], str]) -> None:
    model = Checkpointed(reentrant)
    must_agree(model, train, tmp_path)
    assert model.num_calls == 2 * 3, "each of two forwards calls each region once"
    assert told().count("takes these regions over") == 1
    train(model)
    assert model.num_calls == 2 * 3 + 6, "outside of a session a region is computed twice again"


def test_a_reentrant_region_whose_inputs_need_no_gradient_is_not_trained(tmp_path: Path) -> None:
    class Model(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (self.blocks[0], self.blocks[1]):
                x = checkpoint(self.run, block, x, use_reentrant=True)
            return self.blocks[2](x).square().mean()

    def step(model: nn.Module) -> None:
        model(inputs().detach()).backward()

    model = Model(reentrant=True).train()
    expected = gradients(copy.deepcopy(model), step)
    assert sum(gradient is None for gradient in expected) == 2 * len([*model.blocks[0].parameters()])
    with attached(model, tmp_path), pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        found = gradients(model, step)
    for (name, _), one, other in zip(model.named_parameters(), expected, found, strict=True):
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one, other), name


class _Doubled(TorchFunctionMode):
    """Multiplies what every linear layer gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


def _selected(*_: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize(
    "contexts",
    [
        lambda: (_Doubled(), _Doubled()),
        lambda: create_selective_checkpoint_contexts(_selected),
        functools.partial(create_selective_checkpoint_contexts, _selected),
    ],
)
def test_contexts_of_a_region_are_those_of_its_forward(
    contexts: Callable[[], Any], is_recomputed: bool, tmp_path: Path
) -> None:
    class Inside(nn.Module):
        """A block whose region is inside of it, so that it is a part of what is computed again."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(self.region, x, use_reentrant=False, context_fn=contexts)

        def region(self, x: torch.Tensor) -> torch.Tensor:
            modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
            assert "_CachingTorchDispatchMode" not in modes or is_free, "what it selects would stay on the device"
            return self.down(self.up(x).relu())

    torch.manual_seed(0)
    model = nn.Sequential(*(Inside() for _ in range(3)))
    is_free = True
    model(inputs()).sum().backward()  # PyTorch's own
    step = lambda model: model(inputs()).square().sum().backward()  # noqa: E731
    expected = gradients(model, step)
    is_free = False
    with attached(model, tmp_path, recompute=lambda name: is_recomputed) as swapped:
        found = gradients(model, step)
        assert swapped.tier.counters.out_bytes > 0
    assert all(map(torch.equal, expected, found))


_CALLS: Counter[str] = Counter()  # a module's own attributes are brought back when it is computed again


class _Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _CALLS[type(self).__name__] += 1
        return x + self.down(self.up(x).tanh())


class _Double(_Single):
    """Of two classes of layers one is that of the blocks: the first one with most parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(super().forward(x))


class _OfTwoKinds(nn.Module):
    def __init__(self, how: str, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in (_Double, _Single) for _ in range(4))
        self.how, self.reentrant = how, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(_called(layer, self.how), x, use_reentrant=self.reentrant)
        return x.square().mean()


def _called(layer: nn.Module, how: str) -> Callable[..., Any]:
    return {
        "module": layer,
        "method": layer.__call__,
        "partial": functools.partial(layer.__call__),
        "closure": lambda x: layer(x),
        "unknown": _by_default(layer),
    }[how]


def _by_default(layer: nn.Module) -> Callable[..., Any]:
    def function(x: torch.Tensor, *, called: nn.Module = layer) -> Any:
        return called(x)

    return function


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["module", "method", "partial", "closure", "unknown"])
def test_where_nothing_leaves_the_device_regions_of_other_layers_stay(how: str, reentrant: bool) -> None:
    """Whole blocks are computed again, so a region around something else would save all of it. What a function calls
    cannot be seen in its default arguments.
    """
    model = _OfTwoKinds(how, reentrant=reentrant).train()
    wanted = gradients(copy.deepcopy(model), train)
    _CALLS.clear()
    blocks = find_blocks(model)
    assert {type(block.module) for block in blocks} == {_Double}
    session = ActivationSession(model, blocks, None, blocks)
    try:
        found = gradients(model, train)
    finally:
        session.close()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert {"_Double": 8, "_Single": 4 if how == "unknown" else 8} == _CALLS


@pytest.mark.parametrize("reentrant", [True, False])
def test_other_threads_keep_their_checkpoints(reentrant: bool, tmp_path: Path) -> None:
    model, other = Checkpointed(reentrant).train(), Checkpointed(reentrant).train()
    counts = []

    def elsewhere(*_: object) -> None:
        thread = threading.Thread(target=lambda: train(other))
        thread.start()
        thread.join()
        counts.append(other.num_calls)

    with attached(model, tmp_path):
        handle = model.blocks[1].register_forward_pre_hook(elsewhere)
        train(model)
        handle.remove()
    assert counts == [6], "three regions, computed twice"
    assert model.num_calls == 3


def test_a_model_that_is_checkpointed_whole_is_swapped(tmp_path: Path) -> None:
    """Its forward is then within a backward, and has one of its own."""
    model = Checkpointed(True)

    def whole(model: nn.Module) -> None:
        checkpoint(model, inputs(), use_reentrant=True).backward()

    with attached(model.train(), tmp_path) as swapped:
        whole(model)
        moved = swapped.tier.counters.out_bytes
        assert moved > 0
        train(model)
        assert swapped.tier.counters.out_bytes == 2 * moved
    must_agree(Checkpointed(True), whole, tmp_path)


def test_takeovers_may_end_in_any_order() -> None:
    first, second = CheckpointTakeover("once"), CheckpointTakeover("twice")
    originals = looked_up()
    for takeovers in itertools.permutations((first, second)):
        first.begin()
        second.begin()
        for takeover in takeovers:
            takeover.end()
        assert looked_up() == originals
    model = Checkpointed(False).train()
    train(model)
    assert model.num_calls == 6, "three regions, computed twice"


@pytest.mark.parametrize("way", ["begin", "end"])
def test_an_interrupt_leaves_no_name_replaced(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of either; what follows a step, or closing, ends it."""
    originals = looked_up()
    takeover = CheckpointTakeover("instead")

    def interrupted(owner: CheckpointTakeover) -> None:
        raise KeyboardInterrupt

    def around_a_forward() -> None:
        takeover.begin()
        takeover.end()

    with monkeypatch.context() as patch:
        patch.setattr(TORCH_POINTS[1], way, interrupted)
        with pytest.raises(KeyboardInterrupt):
            around_a_forward()
    takeover.end()
    assert looked_up() == originals


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_two_sessions_over_one_model_leave_nothing_behind(is_reentrant: bool, tmp_path: Path) -> None:
    """Two engines that train parts of it: both see its forwards, and end them in the order in which they began."""
    originals = looked_up()
    model = Checkpointed(is_reentrant).train()
    expected = gradients(model, train)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with attached(model, tmp_path / "first"), attached(model, tmp_path / "second") as second:

        def watched(model: nn.Module) -> None:
            loss = model(inputs())
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            assert looked_up() == originals
            loss.backward()

        for _ in range(3):
            assert all(map(torch.equal, gradients(model, watched), expected))
        assert second.tier.counters.out_bytes > 0


def test_nothing_stays_replaced_after_an_exception(tmp_path: Path) -> None:
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    before = [getattr(torch.utils.checkpoint, name) for name in names]
    model = Checkpointed(False).train()
    model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with attached(model, tmp_path) as swapped:
        with pytest.raises(ZeroDivisionError):
            train(model)
        assert [getattr(torch.utils.checkpoint, name) for name in names] == before
        assert not swapped.session.is_open
