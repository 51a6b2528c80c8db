# SPDX-License-Identifier: Apache-2.0
"""What scripts do with PyTorch's stack of saved-tensor hooks while swapping has hooks of its own there."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.activations.support import attached, gradients, must_agree

DISABLE = torch.autograd.graph.disable_saved_tensors_hooks


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(32, 48, generator=torch.Generator().manual_seed(seed))


def cubes(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


class Stack(nn.Module):
    """No loss in its output; with ``inside`` a transform of ``torch.func`` in every block."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
            if self.inside:
                x = x * torch.func.vmap(torch.func.grad(cubes))(x)
        return x


@pytest.mark.parametrize("inside", [True, False], ids=["in the model", "in the loss"])
def test_transforms_run_while_activations_are_swapped(inside: bool, tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        out = model(inputs())
        slopes, values = torch.func.vmap(torch.func.grad_and_value(cubes))(out)
        loss = (F.gelu(out) * slopes).mean() + values.mean()
        loss.backward()

    must_agree(Stack(inside), step, tmp_path)
    assert torch.autograd.graph.disable_saved_tensors_hooks is DISABLE


@pytest.mark.parametrize("recompute", [False, True])
def test_a_transform_around_the_model_and_one_that_fails(recompute: bool, tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        slopes = torch.func.grad(lambda x: model(x).mean())(inputs())
        out = model(inputs(1))
        with pytest.raises(RuntimeError, match="scalar"):
            torch.func.grad(lambda x: model(x))(inputs(2))
        with pytest.raises(ZeroDivisionError):
            torch.func.grad(lambda x: x.sum() / (1 // 0))(out)
        (F.gelu(out) * slopes).mean().backward()

    must_agree(Stack(), step, tmp_path, recompute=lambda name: recompute)
    assert torch.autograd.graph.disable_saved_tensors_hooks is DISABLE


def test_two_models_that_step_aside_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = Stack().train(), Stack().train()

    def step(model: nn.Module) -> None:
        out = model(inputs())
        other = second(out)
        slopes = torch.func.grad(cubes)(other)
        (F.gelu(out) * slopes + other).mean().backward()

    expected = gradients(first, step)
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
    with attached(first, tmp_path / "a"), attached(second, tmp_path / "b"):
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(first, step), strict=True))
    assert torch.autograd.graph.disable_saved_tensors_hooks is DISABLE


def test_hooks_of_the_script_around_a_later_forward_stay_as_long_as_it_says(tmp_path: Path) -> None:
    """They change values, so that a gradient tells where they were."""

    def halved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() * 0.5 if tensor.is_floating_point() else tensor

    def step(model: nn.Module) -> None:
        first = model(inputs())
        with torch.autograd.graph.saved_tensors_hooks(halved, lambda tensor: tensor):
            second = model(inputs(1))
            loss = (second.sin() * first).mean()
        (loss + first.exp().mean()).backward()

    torch.manual_seed(0)
    model = Stack().train()
    expected = gradients(copy.deepcopy(model), step)
    with attached(model, tmp_path) as swapped:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model, step), strict=True))
        swapped.session.end_step()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_forward_in_another_thread_while_hooks_stay_open(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        first = model(inputs())
        others: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: others.append(model(inputs(1)).exp().mean()))
        thread.start()
        thread.join()
        (F.gelu(first).mean() + others[0]).backward()

    must_agree(Stack(), step, tmp_path)
