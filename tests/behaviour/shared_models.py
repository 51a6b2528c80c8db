# SPDX-License-Identifier: Apache-2.0
"""Models that several engines or ``zero.Init`` contexts share: ``shared_models.py NAME SWAP_PATH``.

Prints one JSON line; where stock DeepSpeed is the reference the scenario has run it in this process, too.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import pickle
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fuyou.zero.parameters import param_swapper
from ds_fuyou.zero.run import run_design
from ds_fuyou.zero.saving.training_state import TrainingState
from tests.behaviour.engines import equal, evaluate, say, states, train
from tests.harness.models import build_model, make_batch
from tests.harness.runner import ds_config
from tests.parity.cases import block

OURS = ("all", "none")


def config_of(swap: str, tiers: str | None, *, trains: bool = True, **changes: Any) -> dict[str, Any]:
    config = ds_config(gradient_clipping=0.5) if trains else ds_config(optimizer=None)
    if tiers is not None:
        config["fuyou"] = block(swap, tiers, "speculate") | changes
    return config


def model_in(init: dict[str, Any] | None, seed: int = 1) -> torch.nn.Module:
    """A model built under ``zero.Init`` with these arguments, or without it."""
    torch.manual_seed(seed)
    with deepspeed.zero.Init(**(init or {}), enabled=init is not None):
        return build_model({})


def engine_of(model: torch.nn.Module, config: dict[str, Any]) -> Any:
    given = {"model_parameters": [p for p in model.parameters() if p.requires_grad]} if "optimizer" in config else {}
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    return engine


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().clone()
    return found


def as_stock(run: Any, swap: str, tiers: tuple[str, ...] = OURS) -> dict[str, bool]:
    wanted = run(swap, None)
    return {name: equal(run(swap, name), wanted) for name in tiers}


# ---- edits of several models at once -------------------------------------------------------------------------------


@contextlib.contextmanager
def gathered(*models: torch.nn.Module) -> Iterator[list[tuple[Any, Any]]]:
    """Pairs of parameters, all gathered by one context."""
    lists = [list(model.parameters()) for model in models]
    with deepspeed.zero.GatheredParameters([p for each in lists for p in each], modifier_rank=0):
        yield list(zip(*lists, strict=True))


def edited(models: list[torch.nn.Module]) -> list[bool]:
    """One edit of both models by one context, as scripts keep a target network: is it there afterwards?"""
    before = [values(model) for model in models]
    with gathered(*models) as pairs:
        for first, second in pairs:
            first.data.add_(1.0)
            second.data.mul_(0.5)
    after = [values(model) for model in models]
    wanted = [{n: v + 1.0 for n, v in before[0].items()}, {n: v * 0.5 for n, v in before[1].items()}]
    return [equal(now, then) for now, then in zip(after, wanted, strict=True)]


def edits(swap: str) -> dict[str, Any]:
    """Before any engine, beside a training and an inference engine, and after a step; either model built first."""
    found: dict[str, Any] = {}
    for tiers in OURS:
        for order in ("policy first", "reference first"):
            trains, looks = config_of(swap, tiers), config_of(swap, tiers, trains=False)
            configs = [trains, looks] if order == "policy first" else [looks, trains]
            models = [model_in({"config_dict_or_path": config}, seed) for seed, config in enumerate(configs)]
            models[0].head.requires_grad_(False)
            said = edited(models)
            engines = [engine_of(model, config) for model, config in zip(models, configs, strict=True)]
            policy = engines[configs.index(trains)]
            said += edited(models)
            train(policy, 0, 2)
            said += edited(models)
            for engine in engines:
                engine(**make_batch({}, 3, torch.distributed.get_rank()))
            said += edited(models)
            train(policy, 2, 3)
            found[f"{tiers}, {order}"] = all(said) or said
            for engine in engines:
                engine.destroy()
    return found


# ---- one engine after another --------------------------------------------------------------------------------------


def twice(
    swap: str, tiers: str | None, *, init: bool, destroys: bool, second: str | None = "same"
) -> dict[str, torch.Tensor]:
    """Two trainings of one model, each with an engine of its own."""
    config = config_of(swap, tiers)
    model = model_in({"config_dict_or_path": config} if init else None)
    engine = engine_of(model, config)
    train(engine, 0, 3)
    if destroys:
        engine.destroy()
    other = config_of(swap, tiers if second == "same" else second)
    again = engine_of(model, other)
    train(again, 3, 6)
    found = states(again) | {f"p16 {name}": value for name, value in values(model).items()}
    again.destroy()
    if not destroys:
        if tiers is not None:
            try:
                engine.step()
            except RuntimeError as error:
                if "another engine" not in str(error):
                    raise
            else:
                raise SystemExit("an engine without parameters made a step")
        engine.destroy()
    return found


class _Adapted(torch.nn.Module):
    """A frozen layer with two adapters, one of which is used. It looks at that one's weight, as PEFT's layers do, so
    that DeepSpeed fetches this weight with the layer from then on."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, sizes = base, (base.in_features, 20, base.out_features)
        self.adapters = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))) for _ in range(2)
        )
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapter = self.adapters[self.used]
        return self.base(x) + adapter(x.to(adapter[0].weight.dtype))


def adapters(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """One adapter is trained, then the other by an engine of its own, which has the first among what is frozen."""
    config = config_of(swap, tiers)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = model_in(None)
    for child in model.blocks:
        child.up, child.down = _Adapted(child.up), _Adapted(child.down)
    for used in range(2):
        for name, param in model.named_parameters():
            param.requires_grad_(f"adapters.{used}." in name)
        for child in model.modules():
            if isinstance(child, _Adapted):
                child.used = used
        engine = engine_of(model, config)
        train(engine, 3 * used, 3 * used + 3)
        engine.destroy()
    return values(model)


def beside(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """A loss has a weight of its own, which the engine trains and its model does not hold."""
    config = config_of(swap, tiers)
    model = model_in({"config_dict_or_path": config})
    with deepspeed.zero.Init(config_dict_or_path=config):
        factor = torch.nn.Linear(1, 2000, bias=False)
    given = [*model.parameters(), *factor.parameters()]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=given, config=config)
    for index in range(4):
        with deepspeed.zero.GatheredParameters([factor.weight]):
            engine.backward(engine(**make_batch({}, index, 0)) * (1.5 + factor.weight.mean()))
        engine.step()
    found = values(model) | {f"beside {name}": value for name, value in values(factor).items()}
    engine.destroy()
    return found


def thawed(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """A block is frozen while a checkpoint is saved; its model alone is loaded when the block is trained again."""
    model = model_in({"config_dict_or_path": config_of(swap, tiers)})
    engine = engine_of(model, config_of(swap, tiers))
    train(engine, 0, 2)
    model.blocks[0].requires_grad_(False)
    engine.save_checkpoint(f"{swap}-{tiers}", tag="two")
    model.blocks[0].requires_grad_(True)
    train(engine, 2, 4)
    engine.load_checkpoint(f"{swap}-{tiers}", tag="two", load_module_only=True)
    found = values(model)
    engine.destroy()
    return found


def validated(swap: str, tiers: str | None, *, destroys: bool = True) -> dict[str, torch.Tensor]:
    """An inference engine computes something, then the same model is trained."""
    config = config_of(swap, tiers)
    model = model_in({"config_dict_or_path": config})
    first = engine_of(model, config_of(swap, tiers, trains=False))
    first.eval()
    with torch.no_grad():
        losses = [first(**make_batch({}, index, 0)).float().view(1) for index in range(2)]
    if destroys:
        first.destroy()
    engine = engine_of(model, config)
    engine.train()
    train(engine, 0, 3)
    found = states(engine) | {f"loss {i}": loss for i, loss in enumerate(losses)}
    engine.destroy()
    return found


def left(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """What an engine leaves after an evaluation: gathered and released, nothing waits for a step."""
    model = model_in({"config_dict_or_path": config_of(swap, tiers)})
    engine = engine_of(model, config_of(swap, tiers))
    train(engine, 0, 2)
    evaluate(engine, 7)
    engine.destroy()
    return values(model)


def inspected(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """What a model holds when its engine is gone; and a reference engine goes on with it."""
    config = config_of(swap, tiers)
    model = model_in({"config_dict_or_path": config})
    model.norm.requires_grad_(False)
    engine = engine_of(model, config)
    train(engine, 0, 3)
    engine.destroy()
    found = values(model)
    with gathered(model) as pairs:
        for (param,) in pairs:
            param.data.mul_(2.0)
    found |= {f"edited {name}": value for name, value in values(model).items()}
    looks = engine_of(model, config_of(swap, tiers, trains=False))
    looks.eval()
    with torch.no_grad():
        found["loss"] = looks(**make_batch({}, 9, 0)).float().view(1)
    looks.destroy()
    return found


def watched(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """An inference engine whose configuration has no block computes with a model that is being trained."""
    config = config_of(swap, tiers)
    model = model_in({"config_dict_or_path": config})
    engine = engine_of(model, config)
    train(engine, 0, 2)
    looks = engine_of(model, config_of(swap, None, trains=False))
    losses = {}
    for index in range(2, 4):
        engine.eval()
        with torch.no_grad():
            losses[f"loss {index}"] = looks(**make_batch({}, index, 0)).float().view(1)
        engine.train()
        train(engine, index, index + 1)
    found = states(engine) | losses
    engine.destroy()
    return found


def failed(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """An engine that could not be built, then one that could."""
    config = config_of(swap, tiers)
    model = model_in({"config_dict_or_path": config})
    if tiers is not None:
        for mistake in (
            {"trace": f"{swap}/none/trace.json"},
            {"activations": {"mode": "swap", "block_classes": ["No"]}},
        ):
            try:
                engine_of(model, config_of(swap, tiers, **mistake))
            except (OSError, ValueError):
                continue
            raise SystemExit(f"an engine was built with {mistake}")
        refused = torch.optim.SGD(model.parameters(), lr=0.1)
        with contextlib.suppress(ValueError):
            deepspeed.initialize(model=model, optimizer=refused, config=config_of(swap, tiers))
            raise SystemExit("an engine was built with SGD")
        last = mock.patch.object(TrainingState, "attach", side_effect=OSError(errno.EMFILE, "not today"))
        with last, contextlib.suppress(OSError):
            engine_of(model, config)
            raise SystemExit("an engine was built that could not be completed")
    engine = engine_of(model, config)
    train(engine, 0, 3)
    found = states(engine)
    engine.destroy()
    return found


# ---- models that scripts take apart ----------------------------------------------------------------------------------


def interrupted(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """A forward ends with an exception, and the notebook builds its engine again."""
    config = config_of(swap, tiers)
    model = model_in({"config_dict_or_path": config})
    first = engine_of(model, config)
    train(first, 0, 2)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[1].register_forward_hook(fail)
    with contextlib.suppress(KeyboardInterrupt):
        first(**make_batch({}, 9, 0))
    hook.remove()
    second = engine_of(model, config)
    train(second, 2, 4)
    found = states(second)
    for engine in (second, first):
        engine.destroy()
    return found


def built_on(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    """A part that is built after ``zero.Init``, a module of another model, and ``remote_device``."""
    config = config_of(swap, tiers)
    held: dict[str, torch.Tensor] = {}
    for remote in (None, "cpu"):
        init = {"config_dict_or_path": config, "remote_device": remote}
        model, other = model_in(init), model_in(init, seed=2)
        torch.manual_seed(7)
        model.head = torch.nn.Linear(model.head.in_features, model.head.out_features, bias=False)
        model.blocks[0] = other.blocks[0]
        engine = engine_of(model, config)
        train(engine, 0, 3)
        held |= {f"{remote} {name}": value for name, value in (states(engine) | values(model)).items()}
        held |= {f"{remote} left {name}": value for name, value in values(other).items()}
        engine.destroy()
    return held


class Scale(torch.nn.Module):
    """Its parameter is made by a function that ``zero.Init`` does not replace: float32, until it is partitioned."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(width) + 0.5, requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.scale


def made_whole(swap: str, tiers: str | None) -> dict[str, torch.Tensor]:
    config = config_of(swap, tiers)
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build_model({})
        model.blocks[0] = torch.nn.Sequential(model.blocks[0], Scale(model.head.in_features))
    engine = engine_of(model, config)
    train(engine, 0, 3)
    held = values(model)
    engine.destroy()
    return held | {f"{name}, bytes": torch.tensor(value.itemsize) for name, value in held.items()}


def copied(swap: str, tiers: str | None, found: list[Any]) -> dict[str, torch.Tensor]:
    """Deep copies and pickling at every time of a model's life, which leave the model as it is. ``found``: what they
    gave.
    """
    config = config_of(swap, tiers)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else some stay gathered between steps
    model = model_in({"config_dict_or_path": config})

    def look() -> None:
        made = [*copy.deepcopy(model).named_parameters(), ("alone", copy.deepcopy(model.head.weight))]
        found.append([(name, tuple(p.shape), hasattr(p, "ds_id"), hasattr(p, "ds_tensor")) for name, p in made])
        try:
            found.append(len(pickle.dumps(model)))
        except (AttributeError, TypeError) as error:
            found.append(str(error))

    look()
    engine = engine_of(model, config)
    for step in range(3):
        look()
        train(engine, step, step + 1)
    held = states(engine)
    engine.destroy()
    look()
    return held | {f"p16 {name}": value for name, value in values(model).items()}


def copies(swap: str) -> dict[str, Any]:
    wanted: list[Any] = []
    stock = copied(swap, None, wanted)
    found: dict[str, Any] = {"looks": len(wanted) == 10}
    for tiers in OURS:
        seen: list[Any] = []
        found[f"{tiers}, values"] = equal(copied(swap, tiers, seen), stock)
        found[f"{tiers}, copies"] = seen == wanted or [seen, wanted]
    return found


# ---- contexts that did not see the block ---------------------------------------------------------------------------


def other_inits(swap: str) -> dict[str, Any]:
    found = {}
    plain = ds_config()
    plain["zero_optimization"] = {"stage": 3, "offload_param": {"device": "cpu"}}
    kinds: dict[str, dict[str, Any]] = {
        "without a configuration": {"dtype": torch.bfloat16},
        "without a block": {"config_dict_or_path": ds_config()},
        "with offload": {"config_dict_or_path": plain},
        "another block": {"config_dict_or_path": config_of(swap, "params_only", trains=False)},
    }

    def run(
        swap: str, tiers: str | None, init: dict[str, Any], frozen: bool, head: str = ""
    ) -> dict[str, torch.Tensor]:
        model = model_in(init)
        if head:  # a part from a context that saw the block, or from none
            torch.manual_seed(5)
            with deepspeed.zero.Init(config_dict_or_path=config_of(swap, tiers), enabled=head == "in another"):
                model.head = torch.nn.Linear(model.head.in_features, model.head.out_features, bias=False)
        if frozen:
            model.blocks[0].requires_grad_(False)
        engine = engine_of(model, config_of(swap, tiers))
        train(engine, 0, 2)
        with gathered(model) as pairs:
            for (param,) in pairs:
                param.data.mul_(0.5)
        train(engine, 2, 4)
        held = states(engine) if not frozen else {}
        held |= {f"p16 {name}": value for name, value in values(model).items()}
        engine.destroy()
        return held

    for name, init in kinds.items():
        for frozen in (False, True):
            given = ds_config() if name == "another block" else None
            wanted = run(swap, None, {"config_dict_or_path": given} if given else init, frozen)
            same = [equal(run(swap, tiers, init, frozen), wanted) for tiers in OURS]
            found[f"{name}{', frozen parts' if frozen else ''}"] = all(same) or same
    for head in ("in another", "in none"):
        wanted = run(swap, None, kinds["without a block"], False, head)
        same = [equal(run(swap, tiers, kinds["without a block"], False, head), wanted) for tiers in OURS]
        found[f"a part {head}"] = all(same) or same
    return found


# ---- what all ranks must do alike ------------------------------------------------------------------------------------


def unlike(swap: str) -> dict[str, Any]:
    """Ranks that find different amounts of free memory while a model is built, most of which is frozen. An engine puts
    that where its plan says.
    """

    def on_storage() -> list[str]:
        return [name for name, p in model.named_parameters() if str(p.ds_tensor.final_location).endswith("nvme")]

    free = [800_000, 400_000][torch.distributed.get_rank()]
    param_swapper.free_memory_of_rank = lambda: free // 2
    config = config_of(swap, "all", parameters={"tier": "auto"})
    config["zero_optimization"] = {"stage": 3}
    model = model_in({"config_dict_or_path": config})
    for name, param in model.named_parameters():
        param.requires_grad_("head" in name or "blocks.2" in name)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    built = [name for name in frozen if name in on_storage()]
    engine = engine_of(model, config)
    placed = [name for name in frozen if name in on_storage()]
    train(engine, 0, 4)
    engine.destroy()
    return {"frozen on storage": built, "placed there": placed, "num frozen": len(frozen)}


def ahead(swap: str) -> dict[str, Any]:
    """How many parameters are gathered, or being gathered, before the first forward after a step comes to them."""
    found = {}
    for tiers in OURS:
        config = config_of(swap, tiers)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        model = model_in({"config_dict_or_path": config})
        engine = engine_of(model, config)
        train(engine, 0, 4)
        state, seen = engine.optimizer.rank_state, []
        state.core.wait_all()  # nothing is gathered ahead of its update
        before_module = state.before_module

        def watched(params: Any, seen: list[Any] = seen, before_module: Any = before_module) -> None:
            seen += [param.ds_id for param in params if param.ds_status is not ZeroParamStatus.NOT_AVAILABLE]
            before_module(params)

        state.before_module = watched
        engine(**make_batch({}, 9, torch.distributed.get_rank()))
        found[tiers] = len(set(seen))
        engine.destroy()
    return found


def budget(swap: str) -> dict[str, Any]:
    """What a model's partitions take while an engine is built is counted as free."""
    run_design.free_memory_of_rank = lambda: 50_000_000
    run_design.copied_later_bytes = lambda: 0
    found = {}
    for tiers in ("all", "states"):
        config = config_of(swap, tiers)
        model = model_in({"config_dict_or_path": config})
        p16 = 2 * sum(param.ds_numel for param in model.parameters()) if tiers == "states" else 0
        engine = engine_of(model, config)
        found[tiers] = engine.optimizer.rank_state.plan_input.dram_budget_bytes == (50_000_000 + p16) * 8 // 10
        engine.destroy()
    return found


SCENARIOS: dict[str, Any] = {
    "edits": edits,
    "twice": lambda swap: as_stock(lambda s, t: twice(s, t, init=True, destroys=False), swap),
    "twice-destroyed": lambda swap: as_stock(lambda s, t: twice(s, t, init=True, destroys=True), swap),
    "twice-no-init": lambda swap: as_stock(lambda s, t: twice(s, t, init=False, destroys=False), swap),
    "then-stock": lambda swap: as_stock(lambda s, t: twice(s, t, init=False, destroys=True, second=None), swap),
    "adapters": lambda swap: as_stock(adapters, swap),
    "beside": lambda swap: as_stock(beside, swap),
    "thawed": lambda swap: as_stock(thawed, swap),
    "validated": lambda swap: as_stock(validated, swap),
    "validated-alive": lambda swap: {t: equal(validated(swap, t, destroys=False), validated(swap, None)) for t in OURS},
    "left": lambda swap: as_stock(left, swap),
    "inspected": lambda swap: as_stock(inspected, swap),
    "watched": lambda swap: as_stock(watched, swap),
    "failed": lambda swap: as_stock(failed, swap),
    "interrupted": lambda swap: as_stock(interrupted, swap),
    "copied": copies,
    "made-whole": lambda swap: as_stock(made_whole, swap),
    "built-on": lambda swap: as_stock(built_on, swap),
    "other-inits": other_inits,
    "unlike": unlike,
    "ahead": ahead,
    "budget": budget,
}

if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    say(SCENARIOS[sys.argv[1]](sys.argv[2]))
    for _ in range(4):  # as harness.train_worker.leave_group
        torch.distributed.barrier()
