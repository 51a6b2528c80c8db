# SPDX-License-Identifier: Apache-2.0
"""A device draws random numbers with a generator of its own, whose state is not the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.policy import BlockFate, Fate
from tests.activations.support import Plain
from tests.device.parity import fuyou_of
from tests.harness.runner import ds_config
from tests.unit.test_training_state import Run

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("only_rank")]


@torch.library.custom_op("fuyou_tests::noisy_there", mutates_args=())
def noisy_there(x: torch.Tensor) -> torch.Tensor:
    """As a kernel of another library it does not say that it draws."""
    return x + torch.rand(x.shape, dtype=x.dtype, device=x.device)


noisy_there.register_autograd(lambda ctx, grad: grad)


class Noisy(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy_there(x).sin()


def _saved(fate: Fate, *operators: str, library: str = "aten") -> BlockFate:
    """Outputs of these are there in backward; all else of a block is computed once more."""
    calls = (OperatorCall(f"{library}.{each}", number) for each in operators for number in range(8))
    return BlockFate(Fate.SWAP, dict.fromkeys(calls, fate))


FATES: dict[str, BlockFate] = {
    "nothing is saved": _saved(Fate.KEEP),
    "products are": _saved(Fate.SWAP, "mm.default", "bmm.default", "addmm.default"),
    "what was drawn is": _saved(Fate.KEEP, "bernoulli_.float", "empty_like.default", "div_.Scalar"),
    "what another library drew is": _saved(Fate.SWAP, "noisy_there.default", library="fuyou_tests"),
    "what comes of it is": _saved(Fate.SWAP, "mul.Tensor", "add.Tensor", "_softmax.default"),
}


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    torch.standin.core.configure({"own_generator": 1.0})
    yield
    torch.standin.core.configure({"own_generator": 0.0})
    assert torch.standin.take_trips() == []


def noisy() -> torch.nn.Module:
    model = Plain(dropout=0.2)
    for block in model.blocks:
        block.out = torch.nn.Sequential(block.out, Noisy())
    return model


def engine_of(
    swap: Path | None, activations: str = "none", model: Callable[[], torch.nn.Module] = noisy, **more: Any
) -> Any:
    """Stock's, computing nothing again, where ``swap`` is None."""
    zero = {name: {"device": "cpu", "pin_memory": True} for name in ("offload_optimizer", "offload_param")}
    config = ds_config(gradient_clipping=1.0, zero_optimization=zero)
    if swap is not None:
        swap.mkdir(exist_ok=True)
        config["fuyou"] = fuyou_of(swap, "states", "auto", "backward_and_forward", 2, activations) | more
    torch.manual_seed(0)
    built = model()
    engine, *_ = deepspeed.initialize(model=built, model_parameters=built.parameters(), config=config)
    return engine


def train(engine: Any, first: int, last: int) -> list[torch.Tensor]:
    """Losses, and what the device and the host draw between forward and backward, and behind a step."""
    found = []
    for index in range(first, last):
        ids = torch.randint(300, (2, 17), generator=torch.Generator().manual_seed(index)).to(engine.device)
        loss = engine(ids)
        found += [loss.detach(), torch.rand(4, device=engine.device), torch.rand(4)]
        engine.backward(loss)
        engine.step()
        found += [torch.rand(4, device=engine.device), torch.rand(4)]
    return [each.cpu() for each in found]


def test_the_devices_numbers_are_others_than_the_hosts() -> None:
    torch.manual_seed(3)
    torch.rand(5)
    own = torch.rand(4, device="standin").cpu()
    torch.manual_seed(3)
    assert torch.equal(own, torch.rand(4)), "they were not moved on by the host's"
    state = torch.standin.get_rng_state()
    more = torch.nn.functional.dropout(torch.ones(64, device="standin"), 0.5).cpu()
    torch.standin.set_rng_state(state)
    assert torch.equal(more, torch.nn.functional.dropout(torch.ones(64, device="standin"), 0.5).cpu())


@pytest.mark.parametrize("activations", ["recompute", "swap", *FATES, "the script's"])
def test_what_is_computed_again_draws_what_the_forward_drew(activations: str, tmp_path: Path) -> None:
    stock = engine_of(None)
    wanted = train(stock, 0, 3)
    stock.destroy()
    mode = {"recompute": "recompute", "swap": "swap", "the script's": "none"}.get(activations, "auto")
    engine = engine_of(tmp_path / "swap", mode, gpu_budget_bytes=1 << 20, plan={"smallest_swapped_bytes": 1})
    session, found = engine.optimizer.rank_state.activations, []
    if activations == "the script's":
        for block in engine.module.blocks:
            block.forward = _checkpointed(block.forward)
    for index in range(3):
        if activations in FATES:
            session.decide({block.name: FATES[activations] for block in session.blocks})
        found += train(engine, index, index + 1)
    engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def _checkpointed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


class InsideOfAnObject(torch.nn.Module):
    """A block among whose arguments nobody sees a tensor of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, held: SimpleNamespace) -> SimpleNamespace:
        up = torch.nn.functional.dropout(self.up(held.x).relu(), 0.3)
        return SimpleNamespace(x=held.x + self.down(up))


class Wrapping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(300, 32), torch.nn.Linear(32, 300, bias=False)
        self.blocks = torch.nn.ModuleList(InsideOfAnObject() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        held = SimpleNamespace(x=self.tokens(ids))
        for block in self.blocks:
            held = block(held)
        return torch.nn.functional.cross_entropy(self.head(held.x).flatten(0, 1).float(), ids.flatten())


def test_a_device_that_no_argument_names_draws_the_same_again(tmp_path: Path) -> None:
    found = []
    for swap in (None, tmp_path / "swap"):
        engine = engine_of(swap, "recompute", model=Wrapping)
        found.append(train(engine, 0, 3))
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_run_that_goes_on_draws_on() -> None:
    run, other = Run(), Run()
    torch.manual_seed(3)
    torch.rand(3, device="standin")
    taken, wanted = run.take(), torch.rand(3, device="standin").cpu()
    torch.manual_seed(5)
    other.state.put_back(other.engine, taken)
    other.engine.fuyou_restore_random_states()
    assert torch.equal(torch.rand(3, device="standin").cpu(), wanted)
