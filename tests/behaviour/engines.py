# SPDX-License-Identifier: Apache-2.0
"""Several engines in one process: ``engines.py NAME SWAP_PATH``. Prints one JSON line that the tests judge."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import types
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.host.memory import resident_bytes
from ds_fuyou.zero.parameters.param_swapper import stores_of
from ds_fuyou.zero.run import rank_state
from tests.harness.limits import HANG_SECS
from tests.harness.models import build_model, make_batch
from tests.harness.plans import plan_document
from tests.harness.runner import ds_config
from tests.harness.script_actions import fail_in_forward
from tests.parity.cases import block


def make_engine(swap: str, tiers: str | None, seed: int, mistake: dict[str, Any] | None = None, **model: Any) -> Any:
    """An engine with a block, or a stock one where ``tiers`` is None. ``mistake``: what is wrong in the block."""
    torch.manual_seed(seed)
    config = ds_config(gradient_clipping=0.5)
    if tiers is not None:
        config["fuyou"] = block(swap, tiers, "speculate") | (mistake or {})
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=tiers == "all"):
        module = build_model(model)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    return engine


def train(engine: Any, first: int, last: int) -> None:
    for index in range(first, last):
        engine.backward(engine(**make_batch({}, index, torch.distributed.get_rank())))
        engine.step()


def evaluate(engine: Any, index: int) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(**make_batch({}, index, 0)))
    engine.train()
    return loss


def states(engine: Any) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def files(swap: str) -> int:
    """Of all ranks, when all have come here."""
    torch.distributed.barrier()
    found = sum(path.is_file() for path in Path(swap).glob("**/*"))
    torch.distributed.barrier()
    return found


def together(swap: str) -> dict[str, Any]:
    """An actor and a critic in turn, as each of them alone; then the critic goes on without the actor."""
    alone = []
    for seed, tiers in ((1, "states"), (2, "all")):
        engine = make_engine(swap, tiers, seed)
        train(engine, 0, 4)
        alone.append(states(engine))
        engine.destroy()
    actor, critic = make_engine(swap, "states", 1), make_engine(swap, "all", 2)
    places = [set(map(str, e.optimizer.rank_state.store.directories)) for e in (actor, critic)]
    scores = []
    for index in range(3):
        scores.append(evaluate(critic, 100 + index))
        train(actor, index, index + 1)
        scores.append(evaluate(actor, 100 + index))
        train(critic, index, index + 1)
    train(actor, 3, 4)
    as_alone = [equal(states(actor), alone[0])]
    both = files(swap)
    actor.destroy()
    one = files(swap)
    train(critic, 3, 4)
    as_alone.append(equal(states(critic), alone[1]))
    critic.destroy()
    return {
        "as alone": as_alone,
        "own directories": places[0].isdisjoint(places[1]),
        "files": [both > one > 0, files(swap)],
        "scores": len(set(scores)),
    }


def inference_engine(swap: str, tiers: str) -> Any:
    torch.manual_seed(1)
    config = ds_config(optimizer=None)
    config["fuyou"] = block(swap, tiers)
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = build_model({})
    engine, *_ = deepspeed.initialize(model=module, config=config)
    return engine


def reference(swap: str) -> dict[str, Any]:
    """Frozen reference models without an optimizer beside the engine that trains: on storage, and in host memory."""
    actor = make_engine(swap, "all", 1)
    frozen, kept = [inference_engine(swap, tiers) for tiers in ("all", "none")]
    before = [evaluate(actor, 7), evaluate(frozen, 7), evaluate(kept, 7)]
    train(actor, 0, 3)
    after = [evaluate(actor, 7), evaluate(frozen, 7), evaluate(kept, 7)]
    actor.destroy()
    alone = [evaluate(frozen, 7), evaluate(kept, 7)]
    frozen.destroy()
    kept.destroy()
    return {
        "equal at first": before[0] == before[1] == before[2],
        "actor moved": after[0] != before[0],
        "reference stayed": after[1:] == before[1:] == alone,
    }


def unnamed(swap: str) -> dict[str, Any]:
    """An engine without an optimizer whose configuration has no block, over parameters that were built with one, as
    Lightning's evaluation makes it.
    """
    named = inference_engine(swap, "all")
    wanted = [evaluate(named, index) for index in range(4)]
    module = named.module
    named.destroy()
    engine, *_ = deepspeed.initialize(model=module, config=ds_config(optimizer=None))
    stores = stores_of(module.parameters())
    found = [evaluate(engine, index) for index in range(4)]
    reads = [sum(store.num_ahead_reads for store in stores), sum(store.num_demand_reads for store in stores)]
    engine.destroy()
    return {"equal": found == wanted, "stores": len(stores), "ahead of use": reads[0] > reads[1]}


def unlike(swap: str) -> dict[str, Any]:
    """Ranks that give gradients to different parameters of one shape, with DeepSpeed's checks on."""

    class Unlike(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                out = layer(x)
                x = x + (out.detach() if number == 1 + torch.distributed.get_rank() else out)
            return x.float().square().mean()

    config = ds_config()
    config["zero_optimization"] |= {"enable_sanity_checks": True}
    config["fuyou"] = block(swap, "all")
    model = Unlike()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        engine.backward(engine(torch.ones(4, 64, dtype=torch.bfloat16)))
    except RuntimeError as error:  # the first rank's values are the others' measure: it waits for them until they end
        say({"said": str(error)})
        sys.stdout.flush()
        os._exit(0)
    return {"said": None}


def forked(swap: str) -> dict[str, Any]:
    """A forked child ends the engines that it inherits, as a script's own function for the exit does; then the parent
    trains on."""
    actor = make_engine(swap, "all", 1, {"activations": {"mode": "swap"}})
    frozen = inference_engine(swap, "all")
    evaluate(frozen, 7)
    train(actor, 0, 2)
    child = os.fork()
    if child == 0:
        frozen.destroy()
        actor.destroy()
        os._exit(7)
    end, status = time.monotonic() + HANG_SECS, 0
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.05)
    if ended[0]:
        status = os.waitstatus_to_exitcode(ended[1])
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    train(actor, 2, 4)
    trained, left, score = states(actor), files(swap), evaluate(frozen, 7)
    actor.destroy()
    frozen.destroy()
    alone = make_engine(swap, "all", 1)
    train(alone, 0, 4)
    as_alone = equal(trained, states(alone))
    alone.destroy()
    return {"status": status, "as alone": as_alone, "files": left > 0, "score": score > 0}


class OtherAtFirst(torch.nn.Module):
    """An MLP whose first forward multiplies otherwise on the second rank: no plan's names are found in that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False)
        self.is_odd = torch.distributed.get_rank() == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.forward = self.by_hand if self.is_odd else types.MethodType(torch.nn.Linear.forward, self.up)
        self.is_odd = False
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(-2) * self.up.weight).sum(-1)


def agree(swap: str) -> dict[str, Any]:
    """A plan of activations on two ranks that saw different first forwards, in a step that was skipped."""
    model = torch.nn.Sequential(*(OtherAtFirst() for _ in range(2)))
    numel = sum(param.numel() for param in model.parameters())
    config = ds_config()
    config["fuyou"] = block(swap, "states") | {
        "activations": {"mode": "auto", "tier": "nvme"},
        "plan": plan_document(numel, 2, {"block_input": (0, 2, 0), "mlp_up": (0, 1, 1)}) | {"world_size": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    auto, session = engine.optimizer.run_plan.auto, engine.optimizer.rank_state.activations
    for factor in (float("inf"), 1.0, 1.0, 1.0):
        engine.backward(factor * engine(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        if not engine.was_step_applied():
            measured_from = auto._at["forwards"]
    fates = {name: None if fate.outputs is None else len(fate.outputs) for name, fate in session.fates.items()}
    engine.destroy()
    return {"fates": fates, "measured from": measured_from}


def our_hooks(module: torch.nn.Module) -> int:
    hooks = [hook for part in module.modules() for hook in (part._forward_pre_hooks, part._forward_hooks)]
    return sum(hook.__module__.startswith("ds_fuyou") for known in hooks for hook in known.values())


def num_threads(awaited: int) -> int:
    """The system lists one that was joined a little longer: then it is waited for, up to half a minute."""
    found = len(os.listdir("/proc/self/task"))
    for _ in range(3000 if awaited else 0):
        if found <= awaited:
            break
        time.sleep(0.01)
        found = len(os.listdir("/proc/self/task"))
    return found


def counted(swap: str, engine: Any) -> dict[str, int]:
    gc.collect()
    return {
        "threads": num_threads(0),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": files(swap),
        "hooks": our_hooks(engine.module),
    }


def refused(swap: str, tiers: str) -> list[str]:
    """What is said of engines that cannot be built: too late for anything but to give back what was taken. And one
    model that no engine takes, whose parameters are on storage.
    """
    config = ds_config()
    config["fuyou"] = block(swap, "all")
    with deepspeed.zero.Init(config_dict_or_path=config):
        build_model({})
    numel = sum(param.numel() for param in build_model({}).parameters())
    other = plan_document(numel, 4, {"block_input": (4, 0, 0), "mlp_up": (1, 1, 2)})
    said = []
    mistakes = {
        "states": {"trace": f"{swap}/none/trace.json"},
        tiers: {"plan": other, "activations": {"mode": "auto"}},
    }
    for where, mistake in mistakes.items():
        try:
            make_engine(swap, where, 0, mistake=mistake)
        except (OSError, ValueError) as error:
            said.append(str(error))
    return [core_refuses(swap), *said]


def core_refuses(swap: str) -> str:
    """What is said, and how many files are left, where the core cannot be built though its files could."""

    def refuse(*_: object) -> None:
        raise ValueError("the core refuses")

    original, rank_state.OutOfCoreOptimizer = rank_state.OutOfCoreOptimizer, refuse
    try:
        make_engine(swap, "states", 0)
    except ValueError as error:
        return f"{error}, {files(swap)} files are left"
    finally:
        rank_state.OutOfCoreOptimizer = original
    return "nothing"


def ends_badly(engine: Any) -> str:
    """What destroy() raises where parts of an engine close with an error, and how many hooks of gradients it leaves."""
    state, offload = engine.optimizer.rank_state, engine.optimizer.parameter_offload
    held, end_offload = state.parameters, offload.destroy
    hooks = list(engine.optimizer._grad_acc_hooks)
    assert all(hook.id in hook.hooks_dict_ref() for hook in hooks)

    def refuse() -> None:
        held.close()
        raise OSError("this part did not end well")

    def refuse_first() -> None:
        end_offload()
        raise ValueError("an earlier part did not end well")

    offload.destroy = refuse_first
    state.parameters = types.SimpleNamespace(close=refuse)
    try:
        engine.destroy()
    except OSError as error:
        return f"{error}, {sum(hook.id in hook.hooks_dict_ref() for hook in hooks)} hooks are left"
    return "nothing"


def freed(swap: str, tiers: str) -> dict[str, Any]:
    """What is left after destroy(), the engine still referenced, and without one; and memory over many engines."""
    wide = {"width": 512, "num_layers": 4}  # 9 million parameters
    stock = make_engine(swap, None, 0)  # what torch and DeepSpeed start by themselves is there before counting
    train(stock, 0, 1)
    stock.destroy()
    counts, sizes, said, models, gathered = [counted(swap, stock)], [], refused(swap, tiers), 0, 0
    del stock
    swaps: dict[str, Any] = {"activations": {"mode": "swap", "tier": "nvme"}} if tiers == "all" else {}
    for index in range(6):
        engine = make_engine(swap, tiers, 0, swaps | ({"trace": "/dev/full"} if index == 1 else {}), **wide)
        train(engine, 0, 2)
        ctypes.CDLL(None).malloc_trim(0)  # holes of the heap are nobody's
        sizes.append(resident_bytes())
        if index == 2:
            fail_in_forward(engine, make_batch({}, 0, 0))  # as a trial ends that has no memory left
        if index < 5:
            engine.destroy()
        else:
            said.append(ends_badly(engine))
        counts.append(counted(swap, engine))  # the engine is still there
        gathered += engine.module.tokens.weight.ds_status is ZeroParamStatus.AVAILABLE
        model = weakref.ref(engine.module)
        del engine
        gc.collect()
        models += model() is not None
    fewest = min(count["threads"] for count in counts[1:])  # the first one also starts threads that torch keeps
    counts[0]["threads"], counts[-1]["threads"] = fewest, num_threads(fewest)
    return {
        "before": counts[0],
        "after": counts[-1],
        "growth": max(sizes[3:]) - max(sizes[:3]),
        "refused": said,
        "models": models,
        "gathered": gathered,
    }


def beside_autocast(swap: str) -> dict[str, Any]:
    """DeepSpeed scales the losses of all engines once one has had torch_autocast with float16."""
    torch.manual_seed(0)
    module = build_model({})
    config = ds_config() | {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    config.pop("bf16", None)
    deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    try:
        make_engine(swap, "states", 1)
    except FuyouConfigError as error:
        return {"said": str(error)}
    return {"said": None}


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(f"FOUND {json.dumps(what)}\n")


SCENARIOS: dict[str, Any] = {
    "together": together,
    "reference": reference,
    "unnamed": unnamed,
    "unlike": unlike,
    "forked": forked,
    "agree": agree,
    "beside-autocast": beside_autocast,
    "freed-all": lambda swap: freed(swap, "all"),
    "freed-none": lambda swap: freed(swap, "none"),
}

if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    say(SCENARIOS[sys.argv[1]](sys.argv[2]))
    for _ in range(4):  # as harness.train_worker.leave_group
        torch.distributed.barrier()
