# SPDX-License-Identifier: Apache-2.0
"""What scripts do between steps, and how many bytes that reads: ``rollouts.py NAME SWAP_PATH``.

Generation, evaluation, saving, sleep. Prints one JSON line; stock, with everything in host memory, is the reference.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fuyou.errors import FuyouStateError
from tests.behaviour.engines import equal, say, states
from tests.harness.models import build_model, make_batch
from tests.harness.runner import ds_config
from tests.parity.cases import block

MODEL = {"num_layers": 6, "width": 256}
NUM_TOKENS = 8


def engine_of(
    swap: str | None, *, trains: bool = True, tied: bool = False, zero: dict[str, Any] | None = None, **plan: Any
) -> Any:
    """With P16 on storage, or a stock engine where ``swap`` is None."""
    trace = plan.pop("trace", None)
    zero = {"zero_optimization": zero or {}}
    config = ds_config(gradient_clipping=0.5, **zero) if trains else ds_config(optimizer=None, **zero)
    if swap is not None:
        config["fuyou"] = block(swap, "all", "speculate", **plan) | ({} if trace is None else {"trace": trace})
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build_model(MODEL | {"tied": tied})
    given = {"model_parameters": model.parameters()} if trains else {}
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    return engine


def batch(index: int) -> dict[str, Any]:
    return make_batch(MODEL, index, torch.distributed.get_rank())


def train(engine: Any, first: int, last: int) -> None:
    for index in range(first, last):
        engine.backward(engine(**batch(index)))
        engine.step()


def forwards(engine: Any, number: int = 1, *, after: Callable[[], None] = lambda: None) -> list[float]:
    """Without gradients: tokens of a generation, or batches of an evaluation."""
    losses = []
    engine.eval()
    for index in range(number):
        with torch.no_grad():
            losses.append(float(engine(**batch(100 + index))))
        after()
    engine.train()
    return losses


def stores_of(engine: Any) -> list[Any]:
    partitions = [param.nvme_swapper.partitions.get(param.ds_id) for param in engine.module.parameters()]
    return list({id(p.store): p.store for p in partitions if p is not None and p.store is not None}.values())


class Reads:
    """Of parameters since the last time."""

    def __init__(self, engine: Any) -> None:
        (self.store,) = stores_of(engine)
        self.all_bytes = sum(partition.num_bytes for partition in self.store.partitions)
        self.take()

    def take(self) -> dict[str, int]:
        store = self.store
        for partition in store.partitions:  # what is on its way counts
            if partition.read is not None:
                for transfer in partition.read.transfers:
                    transfer.wait_ended()
        io = store._io.stats()
        now = {
            "bytes": io["read"].num_bytes,
            "written": io["write"].num_bytes,
            "demand": store.num_demand_reads,
            "ahead": store.num_ahead_reads,
        }
        before, self._at = getattr(self, "_at", now), now
        return {name: now[name] - before[name] for name in now}


def quiet(engine: Any) -> None:
    """Updates have ended: what is read from here on are parameters."""
    engine.optimizer.rank_state.core.wait_all()


def tokens(swap: str, prefetch_bytes: int) -> dict[str, Any]:
    """A token is a forward; no parameter is gathered beforehand."""
    stock = engine_of(None)
    train(stock, 0, 2)
    wanted = forwards(stock, NUM_TOKENS)
    train(stock, 2, 4)
    engine = engine_of(swap, prefetch_bytes=prefetch_bytes)
    train(engine, 0, 2)
    quiet(engine)
    reads, each = Reads(engine), []
    found = forwards(engine, NUM_TOKENS, after=lambda: each.append(reads.take()))
    train(engine, 2, 4)
    same = [found == wanted, equal(states(stock), states(engine))]
    overflows, capacity = reads.store.num_overflows, reads.store.capacity_bytes
    return {"same": same, "each": each, "model": reads.all_bytes, "pool": capacity, "overflows": overflows}


def gathered(swap: str) -> dict[str, Any]:
    """TRL's way: everything is gathered, and stays so for the rollout."""
    found = {}
    for name, where in (("stock", None), ("ours", swap)):
        engine = engine_of(where, prefetch_bytes=1_500_000)
        train(engine, 0, 2)
        reads = None
        if where is not None:
            quiet(engine)
            reads = Reads(engine)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            first = None if reads is None else reads.take()
            losses = [float(engine.module.head.weight.sum()), float(engine.module.blocks[0].up.weight.sum())]
            for param in engine.module.parameters():
                param.data.mul_(2)  # a script's scratch: nobody said that it modifies them
            rest = None if reads is None else reads.take()
        if reads is None:  # stock's own tensors are the gathered ones: it does not forget
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                for param in engine.module.parameters():
                    param.data.div_(2)
        train(engine, 2, 4)
        found[name] = (losses, states(engine), first, rest, 0 if reads is None else reads.all_bytes)
    ours, stock = found["ours"], found["stock"]
    same = [ours[0] == stock[0], equal(ours[1], stock[1])]
    return {"same": same, "first": ours[2], "rest": ours[3], "model": ours[4]}


def inference(swap: str) -> dict[str, Any]:
    """An engine without an optimizer, from its first forward on, and what its trace and its plan say."""
    wanted = forwards(engine_of(None, trains=False), NUM_TOKENS)
    trace = f"{swap}/trace.json"
    trained = engine_of(swap, prefetch_bytes=2_800_000, trace=trace)
    train(trained, 0, 1)
    engine = engine_of(swap, trains=False, prefetch_bytes=2_800_000, trace=trace)
    reads, each = Reads(engine), []
    found = forwards(engine, NUM_TOKENS, after=lambda: each.append(reads.take()))
    tiers = trained.optimizer._tier_bytes
    now, peaks, planned = tiers.now(), tiers.peaks(), tiers.planned()
    beside = reads.store.capacity_bytes
    store = reads.store
    engine.destroy()
    without = tiers.planned()
    again = forwards(engine_of(swap, trains=False, prefetch_bytes=1_500_000), 1)
    trained.destroy()
    events = json.loads(Path(trace).read_text())["traceEvents"]
    Path(trace).unlink()
    return {
        "same": [found == wanted, again == wanted[:1]],
        "each": each,
        "model": reads.all_bytes,
        "within plan": [peaks[tier] <= planned[tier] for tier in ("host memory", "storage")],
        "counted": [
            planned["host memory"] - without["host memory"] == beside,
            planned["storage"] - without["storage"] == reads.all_bytes,
            now["storage"] > reads.all_bytes,
        ],
        "spans": sorted({e["name"].split(".")[0] for e in events if e["name"].startswith("inference ")}),
        "reads": sum(e.get("cat") == "storage read" and "parameter" in e["name"] for e in events) > len(MODEL),
        "closed": [store.used_bytes, len(store.partitions)],
    }


def one_budget(swap: str) -> dict[str, Any]:
    """Engines that infer look ahead with half of what the budget leaves after those before them, if they need it; one
    that trains plans with what they leave.
    """
    budget, limits, found = 60_000_000, [], []

    def made(*, trains: bool, budget: int = budget) -> Any:
        torch.manual_seed(1)
        config = ds_config(gradient_clipping=0.5) if trains else ds_config(optimizer=None)
        config["fuyou"] = block(swap, "all", "speculate") | {"dram_budget_bytes": budget}
        del config["fuyou"]["plan"]
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build_model(MODEL)
        given = {"model_parameters": model.parameters()} if trains else {}
        engine, *_ = deepspeed.initialize(model=model, config=config, **given)
        if trains:
            state = engine.optimizer.rank_state
            taken.append(state.planned_host_bytes)
            trains_with.append([state.plan_input.dram_budget_bytes, state.planned_host_bytes])
        else:
            (store,) = stores_of(engine)
            largest = max(partition.num_bytes for partition in store.partitions)
            if budget < 60_000_000:
                holds.append(store.holds_all)
                return engine
            found.append(store.capacity_bytes)
            left = budget - sum(taken) - sum(store.capacity_bytes for store in stores)
            limits.append(max(0, left) // 2 + 4 * largest)  # at least two of the largest in each of two pools
            stores.append(store)
        return engine

    stores: list[Any] = []
    taken: list[int] = []
    trains_with: list[list[int]] = []
    holds: list[bool] = []
    for size in (8_000_000, 16_000_000):
        made(trains=False, budget=size).destroy()
    engines = [made(trains=trains) for trains in (False, True, False)]
    engines[1].destroy()
    taken.clear()
    engines.append(made(trains=False))
    ((room, planned),) = trains_with
    return {
        "same": [forwards(engines[0]) == forwards(engines[3])],
        "found": found,
        "limits": limits,
        "holds": holds,
        "trains": [room == budget - found[0], planned <= room],
    }


def handed_on(swap: str) -> dict[str, Any]:
    """Engines that infer share a model with each other and with one that trains; each reads ahead in its turn."""
    found = []
    for where in (None, swap):
        torch.manual_seed(1)
        config, plain = ds_config(gradient_clipping=0.5), ds_config(optimizer=None)
        for each in (config, plain) if where is not None else ():
            each["fuyou"] = block(str(where), "all", "speculate", prefetch_bytes=1_500_000)
        with deepspeed.zero.Init(config_dict_or_path=plain):
            model = build_model(MODEL)
        first, *_ = deepspeed.initialize(model=model, config=plain)
        values = forwards(first, 2)
        second, *_ = deepspeed.initialize(model=model, config=plain)
        first.destroy()
        values += forwards(second, 2)
        trained, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        train(trained, 0, 2)
        values += forwards(trained, 1)
        trained.destroy()
        third, *_ = deepspeed.initialize(model=model, config=plain)
        values += forwards(third, 2)
        found.append((values, 0 if where is None else stores_of(third)[0].num_demand_reads))
    return {"same": [found[0][0] == found[1][0]], "demand": found[1][1]}


def evaluation(swap: str) -> dict[str, Any]:
    """Between training steps; the pool holds a part of the model."""
    stock, engine = engine_of(None), engine_of(swap, prefetch_bytes=1_500_000)
    reads, each = Reads(engine), []
    same = []
    for begin in (0, 3):
        train(stock, begin, begin + 3)
        train(engine, begin, begin + 3)
        quiet(engine)
        reads.take()
        each.append([])
        found = forwards(engine, 4, after=lambda: each[-1].append(reads.take()))
        same.append(found == forwards(stock, 4))
    return {"same": same, "each": each, "model": reads.all_bytes, "overflows": reads.store.num_overflows}


def in_flight(swap: str) -> dict[str, Any]:
    """A gather that is started in a forward, for a use that does not come in it."""
    engine = engine_of(swap, prefetch_bytes=1_500_000)
    train(engine, 0, 2)
    *_, last = engine.module.modules()
    first = next(param for param in engine.module.parameters() if param.numel() == 0)

    def prefetch(*_: Any) -> None:
        if first.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            engine.module.ds_inflight_param_registry[first] = first.all_gather_coalesced([first])

    last.register_forward_pre_hook(prefetch)
    found = []
    forwards(engine)
    found.append(first.ds_status.name)
    with deepspeed.zero.GatheredParameters([first]):
        found.append(first.numel() == first.ds_numel)
    loss = engine(**batch(0))
    found.append(first.ds_status.name)
    engine.backward(loss)
    engine.step()
    return {"same": [], "found": found}


def between(swap: str) -> dict[str, Any]:
    """Parameters read and edited after an evaluation, with gathers in flight, as DeepSpeed's prefetch for a backward
    leaves them if none comes (whether it does depends on how far reads are).
    """
    stock, engine = engine_of(None), engine_of(swap, prefetch_bytes=1_500_000)
    same, in_flight = [], 0
    train(stock, 0, 3)
    train(engine, 0, 3)
    for modifier in (None, 0):
        same.append(forwards(engine, 1) == forwards(stock, 1))
        found = []
        for each in (stock, engine):
            found.append([])
            for param in each.module.parameters():
                if each is engine and param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                    engine.module.ds_inflight_param_registry[param] = param.all_gather_coalesced([param])
                    in_flight += param.ds_status is ZeroParamStatus.INFLIGHT
                with deepspeed.zero.GatheredParameters([param], modifier_rank=modifier):
                    found[-1].append(param.data.clone())
                    if modifier is not None:
                        param.data.mul_(0.5)
        same.append(all(torch.equal(a, b) for a, b in zip(*found, strict=True)))
    train(stock, 3, 5)
    train(engine, 3, 5)
    same.append(equal(states(stock), states(engine)))
    return {"same": same, "in flight": in_flight}


def frozen(swap: str) -> dict[str, Any]:
    """Parameters that are not trained, in host memory, are gathered while a gather of them is in flight."""
    config = ds_config() | {"fuyou": block(swap, "states")}
    torch.manual_seed(1)
    model = build_model({**MODEL, "frozen": ["blocks.1"]})
    wanted = {name: param.detach().to(torch.bfloat16) for name, param in model.named_parameters() if "blocks.1" in name}
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    same, in_flight = [], 0
    for name, param in engine.module.named_parameters():
        if name in wanted:
            engine.module.ds_inflight_param_registry[param] = param.all_gather_coalesced([param])
            in_flight += param.ds_status is ZeroParamStatus.INFLIGHT
            with deepspeed.zero.GatheredParameters([param]):
                same.append(torch.equal(param.data, wanted[name]))
    train(engine, 0, 1)
    return {"same": same, "in flight": in_flight}


def saved(swap: str) -> dict[str, Any]:
    """The 16-bit state dictionary and file, and adapters merged one gathered module after the other."""
    stock, engine = engine_of(None), engine_of(swap, prefetch_bytes=1_500_000)
    for each in (stock, engine):
        each._config.zero_config.gather_16bit_weights_on_model_save = True
        train(each, 0, 2)
    quiet(engine)
    reads = Reads(engine)
    ours, found = engine._zero3_consolidated_16bit_state_dict(), {"state_dict": reads.take()}
    theirs = stock._zero3_consolidated_16bit_state_dict()
    same = [equal(ours, {name: value.clone() for name, value in theirs.items()})]
    held = reads.store.used_bytes
    for value in ours.values():
        value.mul_(2)  # the script's own: nothing of the model
    first = weakref.ref(next(iter(ours.values())))
    gc.disable()
    del ours, value
    is_held = first() is not None
    gc.enable()
    reads.take()
    engine.save_16bit_model(swap, "saved.bin")
    found["save_16bit_model"] = reads.take()
    same.append(equal(torch.load(Path(swap) / "saved.bin"), theirs))
    (Path(swap) / "saved.bin").unlink()
    quiet(engine)
    reads.take()
    for module in engine.module.modules():
        params = list(module.parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(params):
            same.append(all(param.ds_numel == param.numel() for param in params))
    found["modules"] = reads.take()
    train(stock, 2, 4)
    train(engine, 2, 4)
    same.append(equal(states(stock), states(engine)))
    capacity = reads.store.capacity_bytes
    held_too = {"held": held, "is held": is_held, "pool": capacity}
    return {"same": same, "found": found, "model": reads.all_bytes, **held_too}


def scarce(swap: str) -> dict[str, Any]:
    """The 16-bit state dictionary where host memory has no room for it: in a file, or as before if that cannot be."""
    from ds_fuyou.storage.memory_mapped import MappedTensors
    from ds_fuyou.zero.saving import consolidated

    consolidated.available_host_bytes = lambda: 1_000_000
    stock, engine = engine_of(None, tied=True), engine_of(swap, tied=True, prefetch_bytes=1_500_000)
    for each in (stock, engine):
        each._config.zero_config.gather_16bit_weights_on_model_save = True
        each.module.register_buffer("empty", torch.empty(0, 3))
        each.module.register_buffer("steps", torch.tensor(3))
        table = torch.randn(300, dtype=torch.complex64, generator=torch.Generator().manual_seed(7)).conj()
        for owner in (each.module.blocks[0], each.module.blocks[1]):
            owner.register_buffer("table", table)
        train(each, 0, 2)
    is_first = torch.distributed.get_rank() == 0

    def gathered(engine: Any, **given: Any) -> dict[str, torch.Tensor]:
        return engine._zero3_consolidated_16bit_state_dict(**given) or {}

    theirs = {name: value.clone() for name, value in gathered(stock).items()}
    ours = gathered(engine)
    same = [ours.keys() == theirs.keys(), list(ours) == list(theirs), equal(ours, theirs)]
    same.append(not is_first or ours["head.weight"] is ours["tokens.weight"])
    found = {"in a file": [is_mapped(value) for value in ours.values() if value.numel()]}
    for value in {id(value): value for value in ours.values()}.values():
        value.mul_(2)  # the script's own: nothing of the model
    same.append(equal(ours, {name: value * 2 for name, value in theirs.items()}))
    same.append(equal(gathered(engine), theirs))
    engine.save_16bit_model(swap, "saved.bin")
    if is_first:
        same.append(equal(torch.load(Path(swap) / "saved.bin"), theirs))
        (Path(swap) / "saved.bin").unlink()
    first = next(iter(engine.module.parameters()))
    for param in engine.module.parameters():
        param.requires_grad_(param is first)
    of_first = gathered(engine, exclude_frozen_parameters=True)
    same.append(all(torch.equal(value, theirs[name]) for name, value in of_first.items()))
    for param in engine.module.parameters():
        param.requires_grad_(True)

    keep, calls = MappedTensors.keep, []

    def failing(self: Any, values: torch.Tensor) -> torch.Tensor:
        calls.append(values)
        if len(calls) > 3:
            raise OSError(5, "the disk failed")
        return keep(self, values)

    MappedTensors.keep = failing
    kept = gathered(engine)
    same.append(equal(kept, theirs))
    found["some in a file"] = [is_mapped(value) for value in kept.values() if value.numel()]
    MappedTensors.keep = keep
    usage, consolidated.shutil.disk_usage = consolidated.shutil.disk_usage, refused
    same.append(equal(gathered(engine), theirs))
    consolidated.shutil.disk_usage = usage
    consolidated.MappedTensors = refused
    kept = gathered(engine)
    same.append(equal(kept, theirs))
    found["none in a file"] = [is_mapped(value) for value in kept.values()]
    train(stock, 2, 4)
    train(engine, 2, 4)
    same.append(equal(states(stock), states(engine)))
    engine.destroy()
    same.append(equal(ours, {name: value * 2 for name, value in theirs.items()}))
    return {"same": same, **found}


def refused(*_: Any) -> Any:
    raise OSError(28, "no space left")


refused.size_of = lambda *_: 0  # type: ignore[attr-defined]


def is_mapped(value: torch.Tensor) -> bool:
    """Whether a tensor lies in a file that has no name."""
    at = value.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= at < end:
            return line.endswith("(deleted)")
    return False


@contextlib.contextmanager
def asleep(engine: Any, **how: Any) -> Iterator[None]:
    engine.offload_states(**how)
    yield
    engine.reload_states()


def sleep(swap: str) -> dict[str, Any]:
    stock, engine = engine_of(None), engine_of(swap, prefetch_bytes=16_000_000)
    train(stock, 0, 4)
    refused = ""
    for index in range(4):
        who = engine if index < 2 else engine.optimizer  # some programs ask the optimizer
        with asleep(who, pin_memory=index % 2 == 0):
            away = all(param.ds_status.name == "NOT_AVAILABLE" for param in engine.module.parameters())
        train(engine, index, index + 1)
    quiet(engine)
    with asleep(engine, pin_memory=False):
        reads = Reads(engine)
    woken = reads.take()
    forwards(engine)
    try:
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    except ValueError as error:
        refused = str(error)
    engine.offload_states(device=OffloadDeviceEnum.none)
    then = reads.take()
    same = [equal(states(stock), states(engine))]
    engine.destroy()
    ended = []
    for each in (engine.offload_states, engine.reload_states):
        try:
            each()
        except FuyouStateError as error:
            ended.append(str(error))
    return {
        "ended": ended,
        "same": same,
        "away": away,
        "woken": woken,
        "then": then,
        "refused": refused,
    }


def ranks(swap: str) -> dict[str, Any]:
    """Two ranks gather together in portions: no more host memory than the pool, and the same values."""
    stock, engine = engine_of(None), engine_of(swap, prefetch_bytes=1_200_000)
    same, overflows = [], []
    reads = Reads(engine)
    for index in range(3):
        train(stock, index, index + 1)
        train(engine, index, index + 1)
        gathers = []
        for each in (stock, engine):
            params = list(each.module.parameters())
            with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
                if index == 1 and torch.distributed.get_rank() == 0:
                    for param in params:
                        param.data.mul_(0.5)
            with deepspeed.zero.GatheredParameters(params):
                gathers.append([param.detach().clone() for param in params])
        same.append(all(torch.equal(a, b) for a, b in zip(*gathers, strict=True)))
        overflows.append(reads.store.num_overflows)
        same.append(forwards(stock, 3) == forwards(engine, 3))
    ours, theirs = (each._zero3_consolidated_16bit_state_dict() for each in (engine, stock))
    same.append(ours is None if theirs is None else equal(ours, theirs))
    same.append(equal(states(stock), states(engine)))
    return {"same": same, "overflows": overflows}


def edited(swap: str) -> dict[str, Any]:
    """Parameters are edited under ``GatheredParameters`` before, between and behind forwards that run inside of it,
    where little of a model stays gathered."""
    found = {}
    for name, where in (("stock", None), ("ours", swap)):
        engine = engine_of(where, prefetch_bytes=700_000)
        train(engine, 0, 2)
        params = [*engine.module.blocks[1].parameters(), *engine.module.blocks[4].parameters()]
        losses, sizes = [], []
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            for factor in (1.5, 0.75, 0.9):
                with torch.no_grad():
                    for param in params:
                        param.mul_(factor)
                losses += forwards(engine, 2) if factor != 0.9 else []
                sizes.append([param.numel() for param in params])
        losses += forwards(engine, 1)
        away = [param.ds_status is ZeroParamStatus.NOT_AVAILABLE for param in params]
        train(engine, 2, 4)
        found[name] = (losses, sizes, states(engine), away)
    ours, stock = found["ours"], found["stock"]
    same = [ours[0] == stock[0], ours[1] == stock[1], equal(ours[2], stock[2])]
    return {"same": same, "away": ours[3]}


def ended_inside(swap: str) -> dict[str, Any]:
    """An engine is destroyed where a ``GatheredParameters`` is open whose rank 0 has edited what it gathered."""
    found = {}
    for name, where in (("stock", None), ("ours", swap)):
        engine = engine_of(where, prefetch_bytes=700_000)
        train(engine, 0, 2)
        params = list(engine.module.parameters())
        chosen = [*engine.module.blocks[1].parameters(), *engine.module.blocks[4].parameters()]
        with deepspeed.zero.GatheredParameters(chosen, modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                with torch.no_grad():
                    for param in chosen:
                        param.mul_(0.5)
            engine.destroy()
            inside = [param.detach().clone() for param in chosen]
        away = [param.ds_status is ZeroParamStatus.NOT_AVAILABLE for param in params]
        with deepspeed.zero.GatheredParameters(params):
            behind = [param.detach().clone() for param in params]
        found[name] = (inside, behind, away)
    same = [
        all(map(torch.equal, ours, stock)) for ours, stock in zip(found["ours"][:2], found["stock"][:2], strict=True)
    ]
    return {"same": same, "away": found["ours"][2]}


def edited_leaves(swap: str) -> dict[str, Any]:
    """The same of modules that DeepSpeed gathers whole, whose parameters it empties when it lets go of them."""
    engine = engine_of(swap, prefetch_bytes=700_000, zero={"stage3_module_granularity_threshold": 1_000_000})
    before, params = forwards(engine), list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        with torch.no_grad():
            for param in params:
                param.mul_(0.5)
        inside = forwards(engine, 1) + forwards(engine, 1)
        sizes = [param.numel() == param.ds_numel for param in params]
    behind = forwards(engine)
    same = [inside[0] == inside[1], inside[0] == behind[0], inside != before, *sizes]
    return {"same": same, "away": [param.ds_status is ZeroParamStatus.NOT_AVAILABLE for param in params]}


SCENARIOS: dict[str, Any] = {
    "fits": lambda swap: tokens(swap, 16_000_000),
    "half": lambda swap: tokens(swap, 2_800_000),
    "gathered": gathered,
    "inference": inference,
    "one-budget": one_budget,
    "handed-on": handed_on,
    "evaluation": evaluation,
    "in_flight": in_flight,
    "between": between,
    "frozen": frozen,
    "edited": edited,
    "edited-leaves": edited_leaves,
    "ended-inside": ended_inside,
    "saved": saved,
    "scarce": scarce,
    "sleep": sleep,
    "ranks": ranks,
}

if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    say(SCENARIOS[sys.argv[1]](sys.argv[2]))
    for _ in range(4):  # as harness.train_worker.leave_group
        torch.distributed.barrier()
