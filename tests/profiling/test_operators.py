# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of operators are those of the shapes, and recording changes neither values nor what is kept."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.profiling.operators import OperatorRecorder
from tests.activations.support import profile_blocks

BATCH, LENGTH, WIDTH, HEADS = 2, 8, 16, 2
TOKENS = BATCH * LENGTH


class Block(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x) * scale

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        return self.down(F.gelu(self.up(x)))


def model(checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(checkpointed) for _ in range(2)))


def batch() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def test_flops_and_bytes_are_those_of_the_shapes() -> None:
    net = model()
    *blocks, outside = profile_blocks(find_blocks(net, ["Block"]), lambda: net(batch()).sum())
    assert [profile.name for profile in blocks] == ["1", "2"]
    found = {output.name: output for output in blocks[0].operators}
    assert found["qkv/addmm"].flops == 2 * TOKENS * WIDTH * 3 * WIDTH
    assert found["qkv/addmm"].num_bytes == 4 * TOKENS * 3 * WIDTH
    assert found["up/mm"].flops == 2 * TOKENS * WIDTH * 4 * WIDTH
    assert found["gelu"].num_bytes == 4 * TOKENS * 4 * WIDTH
    attention = next(output for name, output in found.items() if name.startswith("_scaled_dot_product"))
    assert attention.flops == 4 * BATCH * LENGTH * LENGTH * WIDTH
    assert blocks[0].flops == TOKENS * WIDTH * WIDTH * 22 + attention.flops
    assert outside.flops == 2 * TOKENS * WIDTH * WIDTH
    assert blocks[0].input_bytes == 4 * TOKENS * WIDTH
    names = [[(output.name, output.call) for output in block.operators] for block in blocks]
    assert names[0] == names[1]


def test_what_backward_needs_is_told_from_what_it_does_not() -> None:
    net = model()
    first, *_ = profile_blocks(find_blocks(net, ["Block"]), lambda: net(batch()).sum())
    needed = {output.name: output.saved for output in first.operators}
    assert not all(needed.values()), "it is known"
    assert needed["qkv/addmm"]  # a view of it: q, k and v
    assert needed["gelu"]
    assert needed["up/mm"]
    assert not needed["down/addmm"]  # only scaled by a number
    assert needed["mul"]  # the input of the next block


def test_saves_are_left_alone_where_nobody_knows_parameters() -> None:
    net = model()
    recorder = OperatorRecorder(find_blocks(net, ["Block"]), sees_saves=False)
    with recorder:
        loss = net(batch()).sum()
    first, *_ = recorder.profiles()
    assert not recorder._calls["1"].saves_own
    assert not any(output.saved for output in recorder._calls["1"].outputs)
    assert first.flops > 0
    loss.backward()
    assert all(output.saved for output in first.operators), "what nobody saw may be needed"


def test_inside_a_checkpoint_nobody_knows_what_is_saved() -> None:
    net = model(checkpointed=True)
    recorder = OperatorRecorder(find_blocks(net, ["Block"]))
    with recorder:
        loss = net(batch()).sum()
    first, *_ = recorder.profiles()
    seen = recorder._calls["1"]
    assert not seen.saves_own
    assert [output.name for output in seen.outputs if output.saved] == ["down/addmm"]  # the next block's input
    assert all(output.saved for output in first.operators), "what nobody saw may be needed"
    assert first.flops > 0
    loss.backward()
    assert all(param.grad is not None for param in net.parameters())


def test_gradients_are_the_same_and_hooks_of_others_go_on() -> None:
    net, packed = model(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    reference = torch.autograd.grad(net(batch()).sum(), list(net.parameters()))
    losses: list[torch.Tensor] = []
    for hooks in (None, (pack, lambda tensor: tensor)):
        profile_blocks(find_blocks(net, ["Block"]), lambda: losses.append(net(batch()).sum()), hooks)
    assert packed
    for loss in losses:
        found = torch.autograd.grad(loss, list(net.parameters()))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, reference, strict=True))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


class Sparse(nn.Module):
    """What is saved, given and made has no storage; one sparse tensor is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixing = torch.eye(BATCH * LENGTH).to_sparse().mul_(2.0)
        return torch.sparse.mm(mixing, self.linear(x).view(-1, WIDTH)).view_as(x)


def test_sparse_tensors_are_no_memory_of_a_storage() -> None:
    net = nn.Sequential(Sparse(), Sparse())
    reference = torch.autograd.grad(net(batch()).sum(), list(net.parameters()))
    losses: list[torch.Tensor] = []
    profile, *_ = profile_blocks(find_blocks(net), lambda: losses.append(net(batch()).sum()))
    assert [output.name for output in profile.operators if output.flops] == ["linear/addmm"]
    found = torch.autograd.grad(losses[0], list(net.parameters()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, reference, strict=True))


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.parametrize("is_view", [True, False])
def test_a_block_whose_input_its_caller_changes_is_not_computed_again(is_view: bool, is_changed: bool) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.double()).float()  # the cast saves nothing: the caller may change what it gave

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1.0
            for block in self.blocks:
                change = block(x.view_as(x) if is_view else x)
                x = x.add_(change) if is_changed else x + change
            return x.sum()

    net = Sum()
    with OperatorRecorder(find_blocks(net, ["Scaled"])) as recorder:
        net(batch()).backward()
    assert sorted(recorder.once) == (["blocks.0", "blocks.1"] if is_changed else [])


def test_a_saved_tensor_that_is_changed_is_refused_as_ever() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()))
    outputs: list[torch.Tensor] = []
    profile_blocks(find_blocks(net, ["Sequential"]), lambda: outputs.append(net(batch())))
    outputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


def test_what_runs_while_paused_and_after_an_error_is_not_counted() -> None:
    net = model()
    recorder = OperatorRecorder(find_blocks(net, ["Block"]))

    def forward() -> None:
        with recorder:
            with contextlib.suppress(KeyError), recorder.paused():
                torch.ones(3) * 2
                raise KeyError("what fails while paused must not keep it paused")
            torch.ones(3) + 2
            net(torch.ones(2, LENGTH, WIDTH + 1))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        forward()
    *_, outside = recorder.profiles()
    assert [output.name for output in outside.operators if output.name in ("mul", "add")] == ["add"]
    assert not any(module._forward_hooks for module in net.modules())


def test_what_a_module_compiles_itself_is_still_compiled() -> None:
    """Dynamo gives up for good on code that it first meets in a dispatch mode, unless the mode says otherwise."""
    seen = CompileCounter()
    net = model()
    for block in list(net)[1:]:
        block.inner = torch.compile(block.inner, backend=seen)
    profile_blocks(find_blocks(net, ["Block"]), lambda: net(batch()).sum())
    assert seen.frame_count > 0


def test_a_kernel_that_torch_has_no_formula_of_is_timed() -> None:
    """It takes as long as the products of its block, so it counts about as much as they do; what torch has itself
    counts as none.
    """
    library = torch.library.Library("fuyou_tests", "DEF")
    library.define("attend(Tensor x) -> Tensor")
    wide = torch.randn(256, 256)

    def attend(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            wide @ wide
        return x * 2

    library.impl("attend", attend, "CPU")

    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(256, 256, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                x = self.up(x)
            return torch.ops.fuyou_tests.attend(F.gelu(x))

    net = nn.Sequential(*(Foreign() for _ in range(5)))
    recorder = OperatorRecorder(find_blocks(net, ["Foreign"]), sees_saves=False)
    with torch.no_grad(), recorder:
        net(torch.randn(256, 256))
    for block in recorder.profiles()[:-1]:
        known = {output.name: output.flops for output in block.operators}
        products = sum(count for name, count in known.items() if name.startswith("up/"))
        assert products == 10 * 2 * 256**3
        assert products / 10 < known["attend"] < products * 100
        assert known["gelu"] == 0
