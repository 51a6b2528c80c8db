# SPDX-License-Identifier: Apache-2.0
"""A block that is computed again finds what its forward found, whatever was changed since, and changes nothing."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import weakref
from collections import Counter, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.activations.recompute import RecomputedForward
from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.activations.surroundings import RandomSource, Surroundings
from ds_fuyou.activations.views import is_movable
from tests.activations.support import attached, gradients

WIDTH = 48
OF_DEVICE = torch.Generator()
"""Stands for the generator of a device, which no tensor among a block's arguments names."""
AROUND = {"": BlockFate(Fate.SWAP)}


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(32, WIDTH, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))


class Pair(NamedTuple):
    values: list[float]
    name: str


class Wrapped(UserDict[str, torch.Tensor]):
    """Python's class for dictionaries of one's own, which torch takes for no dictionary."""

    scale = 1.0


class Block(nn.Module):
    """``how`` gets the block, its input, and what all blocks share in one forward."""

    def __init__(self, how: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how
        self.own = torch.Generator().manual_seed(1)
        self.numbers, self.more = numpy.random.default_rng(1), random.Random(1)
        self.bits = numpy.random.PCG64(1)
        self.share, self.memory, self.seen, self.friend = 1.0, None, [0.5], None
        self.level = torch.ones(1)
        self.before, self.current, self.active = [], [0.5], None
        self.rows = torch.ones(2, WIDTH)
        self.row = self.rows[1]
        self.register_buffer("one_name", torch.ones(WIDTH))
        self.register_buffer("other_name", self.one_name)
        self.sum, self.own_leaf = None, torch.ones(1, requires_grad=True)
        self.pair = Pair([0.5], "")
        self.numbers_of_two = numpy.ones(2)
        self.first, self.chosen = self.numbers_of_two[:1], {1, 8, 64}
        self.array = numpy.ones(2)
        self.nested = {"losses": ([], 0), "sums": defaultdict(lambda: torch.zeros(1, dtype=torch.float32))}
        self.levels = {"all": self.level, "own": torch.ones(WIDTH)}
        self.notes = UserList([0.5])
        self.last, self.by_kind = deque(maxlen=3), defaultdict(float)
        self.counted, self.generators = Counter(), [torch.Generator().manual_seed(2)]
        self.register_buffer("begun", torch.ones(1))
        self.register_buffer("table", torch.eye(WIDTH).to_sparse())

    def forward(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        return x + self.down(self.how(self, F.gelu(self.up(x)), shared))


class Model(nn.Module):
    def __init__(self, how: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: dict[str, Any] = {"all": [], "counted": Counter(), "seen": set(), "array": numpy.ones(1)}
        shared |= {"wrapped": Wrapped(), "own": SimpleNamespace(factor=2.0, length=320)}
        for block in self.blocks:
            x = block(x, shared)
        return x.square().mean() + sum(item.square().mean() for item in shared["all"])


def draws(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    kept = torch.rand(h.shape, generator=block.own) < 0.5
    scale = random.random() + numpy.random.rand() + block.numbers.random() + block.more.random()
    scale += block.bits.random_raw() % 8
    return h * kept * scale * torch.rand(()) * torch.rand((), generator=OF_DEVICE)


def passes_on(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    h = h + 0.5 * shared.get("last", 0.0) + 0.1 * len(shared["all"])
    shared["last"] = h
    shared["all"].append(h)
    return h


def remembers(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    block.share *= 0.7
    h = h * block.share * sum(block.seen)
    block.seen.append(block.share)
    if block.memory is not None:
        h = h + block.memory
    block.memory = h
    if block.begun is not None:
        block.begun, h = None, h * 2
    return h


def asks_a_friend(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    """Two attributes, and an object that is none of them, know one list."""
    if block.friend is None:
        block.friend = SimpleNamespace(seen=block.seen)
        block.same = block.seen
    block.seen.append(1.5 + len(block.same))
    return h * block.friend.seen[-1] * block.same[-1]


def keeps_in_containers(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    """Of the kinds that the library has; one is replaced by another in a later forward."""
    h = h * (1 + sum(each.tanh() for each in block.last)) * (1 + block.counted["all"] + block.by_kind["own"])
    block.last.append(h.detach().mean(0))
    block.counted.update(all=1)
    block.by_kind["own"] += 0.5
    if len(block.last) == 2:
        block.last, block.by_kind = deque(block.last, 3), defaultdict(float, block.by_kind)
    return h * torch.rand((), generator=block.generators[0])


def changes_tensors_in_place(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    """Two attributes name one of them."""
    h = h * block.level.clone() * block.levels["own"].clone()
    block.level += 0.5
    block.array[1] += 0.5
    h = h * float(block.array[1])
    block.nested["losses"][0].append(float(h.detach().mean()))
    h = h * (1 + 0.1 * len(block.nested["losses"][0]) + block.nested["sums"]["all"].clone())
    block.nested["sums"]["all"] += 0.1
    block.levels["own"].mul_(1.5)
    return h + block.levels["all"].clone()


def names_again(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    """What one attribute names another one named before; one is a view of another; and one is a module."""
    block.before, block.current = block.current, [*block.current[-1:], float(h.detach().mean())]
    block.row += 0.5
    h = h * (1 + sum(block.before) + 0.1 * len(block.current)) + block.rows.clone()[1]
    block.active = block.up if block.active is block.down else block.down
    return block.active(h)


def past_pytorch(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    """State that autograd does not see change, or that has a history, a gradient, two names, or a place in a tuple."""
    h = h * block.level.clone() + block.one_name.clone()
    block.level.data.add_(0.5)
    block.other_name += 0.1
    if block.sum is not None:
        block.sum += h.sum() * 1e-3
    else:
        block.sum = h.sum() * 1e-3
    with torch.no_grad():
        block.own_leaf *= 1.1
    block.pair.values[0] += 1.0
    return h * block.sum.clone() * block.own_leaf.clone() * float(block.pair.values[0])


def views_and_histories(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    """In place with gradients, seen through a view, also of an array; a set; and what it freezes by itself."""
    block.made += 1.0
    h = h * block.part.clone() * block.made.scale
    block.pages.copy_(h[:2])
    block.numbers_of_two *= 0.5
    h = torch.sin(h * sum(block.chosen))
    block.chosen.add(len(block.chosen) * 7 % 64)
    h = h * block.line.clone() * float(block.first[0]) @ block.down.weight
    block.up.bias.requires_grad_(False)
    return h


def given_and_changed(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    h = h * (1 + shared["counted"]["blocks"]) * (1 + len(shared["seen"])) * float(shared["array"][0])
    shared["counted"].update(blocks=1)
    shared["seen"].add(len(shared["seen"]))
    shared["array"][0] += 0.1
    return h


def shares_by_wrappers(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    """Under one name, with gradients, as models whose layers share keys and values do; and one of its own."""
    h = h + shared["wrapped"].get("last", 0.5) * shared["wrapped"].scale * sum(block.notes)
    shared["wrapped"]["last"] = h
    shared["wrapped"].scale *= 0.5
    block.notes.append(float(h.detach().mean()))
    return h


def in_training(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return F.dropout(h, 0.3, block.training) * (1.0 if block.training else 0.5)


def by_defaults(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    heads = h.view(1, 4, 8, -1)
    h = F.scaled_dot_product_attention(heads, heads.sin(), heads.cos()).view(h.shape)
    return (h * torch.linspace(0, 1, WIDTH).exp()).float()


def multiplies_sparsely(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return torch.sparse.mm(block.table, h.t()).t().exp()


def step(model: nn.Module) -> None:
    """Two segments, and what scripts do between forward and backward."""
    for block in model.blocks:
        block.sum = None
        block.made = torch.ones(2, WIDTH, requires_grad=True) * 2
        block.made.scale, block.part = 0.5, block.made[0]
        block.pages = torch.ones(2, WIDTH)
        block.line = block.pages[1]
        block.up.bias.requires_grad_(True)
    random.seed(0)
    numpy.random.seed(0)
    OF_DEVICE.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            losses = [model(inputs(seed)) for seed in range(2)]
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval()
    with torch.no_grad():
        model(inputs(9))
    random.random(), numpy.random.rand()
    sum(losses).backward(retain_graph=True)
    sum(losses).backward()
    model.train()


def state(model: nn.Module) -> list[Any]:
    found: list[Any] = [random.getstate(), str(numpy.random.get_state()), OF_DEVICE.get_state().tolist()]
    found.append(torch.get_default_dtype())
    for block in model.blocks:
        memory = None if block.memory is None else block.memory.tolist()
        own = [block.own.get_state().tolist(), block.numbers.bit_generator.state, block.more.getstate()]
        found += [*own, block.share, memory, block.seen, block.begun, block.training]
        found += [
            [*block.notes],
            [each.tolist() for each in block.last],
            block.last.maxlen,
            dict(block.by_kind),
            block.by_kind["none"],
        ]
        found += [block.nested["losses"][0], block.nested["sums"]["all"].tolist()]
        found += [
            block.array.tolist(),
            block.level.tolist(),
            block.levels["all"] is block.level,
            block.levels["own"].tolist(),
        ]
        found += [block.before, block.current, block.row.tolist(), block.pair.values, block.own_leaf.tolist()]
        found += [block.part.tolist(), block.line.tolist(), [*block.chosen], block.first.tolist()]
        found += [block.up.bias.requires_grad, dict(block.counted), block.generators[0].get_state().tolist()]
    return found


@pytest.mark.parametrize("outputs", [{}, {OperatorCall("aten.gelu.default", 0): Fate.SWAP}], ids=["whole", "but one"])
@pytest.mark.parametrize(
    "how",
    [
        draws,
        passes_on,
        remembers,
        asks_a_friend,
        keeps_in_containers,
        changes_tensors_in_place,
        names_again,
        past_pytorch,
        views_and_histories,
        given_and_changed,
        shares_by_wrappers,
        in_training,
        by_defaults,
        multiplies_sparsely,
    ],
    ids=lambda how: how.__name__,
)
def test_it_finds_the_same_and_leaves_no_trace(how: Any, outputs: dict, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(how).train()
    reference = Model(how).train()
    reference.load_state_dict(model.state_dict())
    with attached(model, tmp_path, draws=RandomSource(OF_DEVICE.get_state, OF_DEVICE.set_state)) as swapped:
        swapped.session.decide({f"blocks.{i}": BlockFate(Fate.SWAP, outputs) for i in range(3)} | AROUND)
        for _ in range(2):
            expected, then = gradients(reference, step), state(reference)
            found = gradients(model, step)
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            assert state(model) == then


def test_a_block_takes_what_its_forward_does(tmp_path: Path) -> None:
    """Models ask, and leave out what a block does not take."""
    model = Model(in_training).train()
    expected = inspect.signature(model.blocks[0].forward)
    with attached(model, tmp_path) as swapped:
        swapped.session.decide({"blocks.0": BlockFate(Fate.SWAP, {})} | AROUND)
        assert type(model.blocks[0].forward) is RecomputedForward
        assert inspect.signature(model.blocks[0].forward) == expected
        model.blocks[0].__dict__["forward"].undo()
        assert inspect.signature(model.blocks[0].forward) == expected


def test_frozen_in_the_forward_alone(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        model.blocks[1].up.requires_grad_(False)
        loss = model(inputs())
        model.blocks[1].up.requires_grad_(True)
        model.blocks[2].down.requires_grad_(False)
        loss.backward()
        model.blocks[2].down.requires_grad_(True)

    torch.manual_seed(0)
    model = Model(in_training).train()
    expected = gradients(copy.deepcopy(model), step)
    with attached(model, tmp_path) as swapped:
        swapped.session.decide({f"blocks.{i}": BlockFate(Fate.SWAP, {}) for i in range(3)} | AROUND)
        found = gradients(model, step)
    assert [each is None for each in expected] == [each is None for each in found]
    assert all(one is None or torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert all(param.requires_grad for param in model.parameters())


class Hooked(Model):
    """Its hooks are there for one forward, as PEFT's are that hand something to layers; one removes itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handles = []
        for block in self.blocks:
            handles.append(block.up.register_forward_pre_hook(lambda module, args: (2 * args[0],)))
            handles.append(block.down.register_forward_hook(lambda module, args, out: out.tanh(), always_call=True))
            handles.append(
                block.down.register_forward_hook(lambda module, args, named, out: out.exp(), with_kwargs=True)
            )
            self._once(block.up)
        try:
            return super().forward(x)
        finally:
            for handle in handles:
                handle.remove()

    def _once(self, module: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, named: Any) -> Any:
            handle.remove()
            return (args[0].sin(),), named

        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def is_prepared_early(model: nn.Module) -> None:
    """Between forward and backward come hooks for the next forward."""
    loss = model(inputs(1))
    handles = [block.up.register_forward_hook(lambda *_: 1 / 0) for block in model.blocks]
    loss.backward()
    for block, handle in zip(model.blocks, handles, strict=True):
        assert list(block.up._forward_hooks) == [handle.id]
        assert not block.up._forward_pre_hooks
        assert not block.down._forward_hooks
        handle.remove()


@pytest.mark.parametrize("outputs", [{}, {OperatorCall("aten.gelu.default", 0): Fate.SWAP}], ids=["whole", "but one"])
def test_hooks_of_a_forward_are_those_of_its_recomputation(outputs: dict, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, reference = (Hooked(lambda block, h, shared: h).train() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    with attached(model, tmp_path) as swapped:
        swapped.session.decide({f"blocks.{i}": BlockFate(Fate.SWAP, outputs) for i in range(3)} | AROUND)
        for _ in range(2):
            expected = gradients(reference, is_prepared_early)
            assert all(map(torch.equal, expected, gradients(model, is_prepared_early)))


def test_a_hook_that_goes_or_comes_in_a_recomputation_has_gone_or_come(tmp_path: Path) -> None:
    model = Model(lambda block, h, shared: h).train()
    up, calls, later = model.blocks[0].up, [], []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            handle.remove()
            later.append(up.register_forward_hook(lambda *_: None))

    with attached(model, tmp_path) as swapped:
        swapped.session.decide({f"blocks.{i}": BlockFate(Fate.SWAP, {}) for i in range(3)} | AROUND)
        handle, other = up.register_forward_hook(hook), up.register_forward_hook(lambda *_: None)
        loss = model(inputs(1))
        other.remove()
        loss.backward()
        assert list(up._forward_hooks) == [later[0].id]
        model(inputs(1)).backward()
    assert len(calls) == 2


def test_kernels_of_attention_are_tried_in_the_same_order() -> None:
    backends = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    now = torch._C._get_sdp_priority_order()
    with torch.nn.attention.sdpa_kernel(backends, set_priority=True):
        then = torch._C._get_sdp_priority_order()
        found = Surroundings(nn.Identity(), [])
    assert then != now
    with found.restored():
        assert torch._C._get_sdp_priority_order() == then
    assert torch._C._get_sdp_priority_order() == now


def test_streams_that_a_forward_made_stay_those() -> None:
    """A second one could be given memory that the first one's tensors have, which backward reads."""
    module = nn.Module()
    module.stream, module.calls, module.held, module.made, module.seen = None, 1, {"one": 1}, [], [1]
    module.pair, module.mixed = (), [None, 0, 7]
    found = Surroundings(module, [])
    stream = torch.Stream(device="cpu")
    module.stream, module.late, module.calls = stream, stream, 2
    module.held.update(one=2, side=stream)
    module.made.append(stream)
    module.seen.append(2)
    module.pair, module.mixed[:] = (stream, 5), [stream, 5, 7, 8]
    now = {name: vars(module)[name] for name in ("held", "made", "seen", "mixed")}
    with found.restored():
        assert module.stream is module.late is stream
        assert (module.calls, module.held, module.made, module.seen) == (1, {"one": 1, "side": stream}, [stream], [1])
        assert (module.pair, module.mixed) == ((stream,), [stream, 0, 7])
    assert (module.pair, module.mixed) == ((stream, 5), [stream, 5, 7, 8])
    assert (module.calls, module.held, module.made, module.seen) == (2, {"one": 2, "side": stream}, [stream], [1, 2])
    assert all(vars(module)[name] is value for name, value in now.items())


class Token:
    """Lives as long as the graph that it is in."""


class Marked(torch.autograd.Function):
    tokens: ClassVar[list[weakref.ref[Token]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.token = Token()
        Marked.tokens.append(weakref.ref(ctx.token))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def remembers_unused(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    h = Marked.apply(h)
    block.memory, block.seen, block.pair = h, [h], (h, 1)
    return h


def test_forwards_without_backward_keep_no_earlier_ones(tmp_path: Path) -> None:
    """A block that holds what its last forward computed must not hold, by that, every forward there was."""
    model = Model(remembers_unused).train()
    with attached(model, tmp_path, recompute=lambda name: True):
        for seed in range(3):
            model(inputs(seed))
        gc.collect()
        assert [token() is None for token in Marked.tokens] == [True] * 6 + [False] * 3


def test_what_an_evaluation_made_may_be_given(tmp_path: Path) -> None:
    """A mask that is built once, where ``torch.inference_mode()`` was on: nobody has to save what is added."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.mask = nn.ModuleList(Adding() for _ in range(2)), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None:
                self.mask = torch.ones(32, WIDTH).tril()
            for block in self.blocks:
                x = block(x, self.mask)
            return x.square().mean()

    def evaluated_first(model: nn.Module) -> None:
        model.eval()
        with torch.inference_mode():
            model(inputs(9))
        model.train()(inputs()).backward()

    torch.manual_seed(0)
    model, reference = Masked(), Masked()
    reference.load_state_dict(model.state_dict())
    with attached(model, tmp_path, recompute=lambda name: True):
        expected = gradients(reference, evaluated_first)
        found = gradients(model, evaluated_first)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class HandsBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, own: Any) -> tuple[torch.Tensor, Any]:
        h = F.gelu(self.up(x))
        if isinstance(own, (list, deque, UserList)):
            own.append(h.sum(0))
        else:
            held = vars(own) if isinstance(own, SimpleNamespace) else own
            held[str(len(held))] = h.sum(0)
        return x + h, own


class HandedOn(nn.Module):
    """Each block adds to what it is given and hands that back; the model reads its own."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(HandsBack() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = own = self.kind()
        for block in self.blocks:
            x, own = block(x, own)
        held = vars(first) if isinstance(first, SimpleNamespace) else first
        found = held if isinstance(held, (list, deque, UserList)) else held.values()
        assert len(found) == 3
        return x.square().mean() + sum(each.square().mean() for each in found)


@pytest.mark.parametrize(
    "kind", [dict, list, deque, UserList, Wrapped, SimpleNamespace], ids=lambda kind: kind.__name__
)
def test_what_a_block_hands_back_is_what_it_was_given(kind: Callable[[], Any], tmp_path: Path) -> None:
    def train(model: nn.Module) -> None:
        model(inputs()).backward()

    model = HandedOn(kind).train()
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path, recompute=lambda name: True):
        found = gradients(model, train)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Frozen(list):
    def __setitem__(self, *_: Any) -> None:
        raise TypeError("nothing is replaced here")


class Wraps(HandsBack):
    """The dictionary that it is given comes back in an object that is new, beside what refuses to be changed."""

    def forward(self, x: torch.Tensor, own: Any) -> tuple[torch.Tensor, Any]:
        own.held.setdefault("frozen", Frozen([1, 2]))
        x, held = super().forward(x, own.held)
        return x, SimpleNamespace(held=held)


def test_what_is_given_stays_itself_in_an_object_that_is_new(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Wraps() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first: dict[str, Any] = {}
            own = SimpleNamespace(held=first)
            for block in self.blocks:
                x, own = block(x, own)
            return x.square().mean() + sum(each.square().mean() for each in first.values() if torch.is_tensor(each))

    def train(model: nn.Module) -> None:
        model(inputs()).backward()

    model = Wrapped().train()
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path, recompute=lambda name: True):
        found = gradients(model, train)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask.uses = getattr(mask, "uses", 0) + 1
        return x + F.gelu(self.up(x)) * mask * mask.scale * mask.uses


@pytest.mark.parametrize("moves", [True, False])
def test_attributes_of_a_tensor_that_is_given_are_those_of_then(moves: bool, tmp_path: Path) -> None:
    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask = torch.ones(32, WIDTH)
            for index, block in enumerate(self.blocks):
                self.mask.scale = 0.5 + index
                x = block(x, mask=self.mask)
            return x.square().mean()

    def train(model: nn.Module) -> None:
        loss = model(inputs())
        del model.mask.scale
        loss.backward()
        assert vars(model.mask) == {"uses": 3}

    model = Masking().train()
    expected = gradients(copy.deepcopy(model), train)
    if moves:
        with attached(model, tmp_path, recompute=lambda name: True, smallest_bytes=1):
            found = gradients(model, train)
    else:
        session = ActivationSession(model, (), None, find_blocks(model))
        found = gradients(model, train)
        session.close()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_other_objects_of_one_that_is_handed_back_stay(tmp_path: Path) -> None:
    class Knows(HandedOn):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = SimpleNamespace(friend=SimpleNamespace(loss=x.sum().requires_grad_()))
            friend = own.friend
            for block in self.blocks:
                x, own = block(x, own)
            assert own.friend is friend
            return x.square().mean() + friend.loss

    model = Knows(SimpleNamespace).train()
    with attached(model, tmp_path, recompute=lambda name: True):
        model(inputs()).backward()


class Slotted(UserDict[str, Any]):
    __slots__ = ("factor",)


class Named(UserDict[str, Any]):
    def __new__(cls, name: str) -> Named:
        return super().__new__(cls)

    def __init__(self, name: str) -> None:
        super().__init__(name=name)


def test_wrappers_with_slots_and_with_arguments_may_be_read(tmp_path: Path) -> None:
    def reads(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        if "slotted" not in shared:
            shared |= {"slotted": Slotted(), "named": Named("abc")}
            shared["slotted"].factor = 2.0
        return h * shared["slotted"].factor * len(shared["named"]["name"])

    model = Model(reads).train()
    expected = gradients(copy.deepcopy(model), step)
    with attached(model, tmp_path, recompute=lambda name: True):
        found = gradients(model, step)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(F.gelu(x + mask))


def test_what_is_given_inside_of_others_is_refused_once_it_has_changed(tmp_path: Path) -> None:
    def adds(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        if "mask" not in shared:
            shared["mask"] = torch.ones(32, WIDTH)
        else:
            shared["mask"].mul_(0.5)
        return h + shared["mask"]

    model = Model(adds).train()
    with attached(model, tmp_path, recompute=lambda name: True, smallest_bytes=1 << 20):
        loss = model(inputs())
        with pytest.raises(RuntimeError, match=r"in-?place operation"):
            loss.backward()


def test_a_wrapper_that_the_script_replaced_stays_as_it_is(tmp_path: Path) -> None:
    """It may lie where the old one lay."""

    def reads(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        return h * block.notes[0]

    model = Model(reads).train()
    with attached(model, tmp_path, recompute=lambda name: True):
        for _ in range(5):
            loss = model(inputs())
            for block in model.blocks:
                del block.notes
                block.notes = UserList([9.0])
            loss.backward()
            assert [block.notes[0] for block in model.blocks] == [9.0] * 3


@pytest.mark.parametrize("changes", [False, True])
def test_an_object_that_is_changed_and_not_brought_back_is_told(
    changes: bool, tmp_path: Path, told: Callable[[], str]
) -> None:
    def reads(block: Block, h: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        own = shared["own"]
        own.length = 10 * len(h)  # the same number, of another identity
        if changes:
            own.factor = own.factor * 0.5
            own.factor = own.factor * 2.0 * len(shared)
        return h * own.factor

    model = Model(reads).train()
    with attached(model, tmp_path, recompute=lambda name: True):
        model(inputs()).backward()
    assert told().count("assigns to factor of the SimpleNamespace that it is given") == changes


def test_what_lies_on_another_device_of_the_script_stays() -> None:
    """A teacher's outputs, say: what is copied on this rank's streams would be ordered behind the wrong device's."""
    values = inputs()
    assert is_movable(values, torch.device("cpu"))
    assert not is_movable(values, torch.device("cpu", 1))
