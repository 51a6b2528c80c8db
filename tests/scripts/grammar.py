# SPDX-License-Identifier: Apache-2.0
"""Training scripts drawn at random: JSON that a worker runs, with the package and without."""

from __future__ import annotations

import random
from typing import Any

from tests.harness.runner import ds_config
from tests.scripts.models import KINDS

__all__ = ["draw"]

Action = list[Any]
FP16 = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 3, "hysteresis": 1}
DTYPES: list[dict] = [{"bf16": {"enabled": True}}] * 3 + [{"bf16": None, "fp16": FP16}, {"bf16": None}]
TIERS = ["cpu", "nvme", "nvme", 0.3, 0.6]
IO = ["auto", "auto", "threads"]
ACTIVATIONS: list[dict] = [
    {},
    {"activations": {"mode": "swap"}},
    {"activations": {"mode": "swap", "tier": "nvme"}},
    {"activations": {"mode": "recompute"}},
    {"activations": {"mode": "auto"}, "gpu_budget_bytes": 60_000},
]


def draw(seed: int) -> dict:
    """The script of a seed. ``reference``: "stock", or "memory" where stock departs from PyTorch or itself, or has no
    such states: the package with everything in host memory."""
    chance = random.Random(seed)
    reference = "memory" if chance.random() < 0.2 else "stock"
    engines = [_engine(chance) for _ in range(chance.choice([1, 1, 1, 2]))]
    if _rounds_states(random.Random(f"states {seed}"), engines):
        reference = "memory"
    device = {"seed": seed, "delay_secs": 0.002} if chance.random() < 0.25 else "cpu"
    for spec in engines:
        if device != "cpu":  # the stand-in has no kernels for cells that fuse and for copies of conjugates
            spec["kinds"] = ["mlp" if kind in ("recurrent", "wide") else kind for kind in spec["kinds"]]
        if "gates" in spec["kinds"] and not _has_16_bits(spec["config"]):
            reference = "memory"  # of fp32 BLAS gives other bits for a matrix of one row where that lies otherwise
    drawer = _Drawer(chance, engines, reference, may_autocast=device == "cpu")
    actions: list[Action] = []
    for _ in range(12):
        actions += [drawer.any_of(BETWEEN) for _ in range(chance.choice([0, 0, 1, 2]))]
        engine = chance.randrange(len(engines))
        actions += drawer.micro_batches(engine)
    return {
        "world_size": chance.choice([1, 1, 2]),
        "device": device,
        "reference": reference,
        "engines": engines,
        "actions": actions,
    }


def _has_16_bits(config: dict) -> bool:
    return any((config.get(name) or {}).get("enabled") for name in ("bf16", "fp16"))


# ---- engines -------------------------------------------------------------------------------------------------------


def _engine(chance: random.Random) -> dict:
    dtype = chance.choice(DTYPES)
    zero = {
        "stage3_param_persistence_threshold": chance.choice([0, 100, 3000]),
        "sub_group_size": chance.choice([10**8, 9000]),
        "stage3_prefetch_bucket_size": chance.choice([0, 3000, 10**7]),
        "stage3_max_live_parameters": chance.choice([0, 8000, 10**9]),
        "reduce_bucket_size": chance.choice([2000, 20000, 5 * 10**8]),
    }
    more = chance.choice([{}, {}, {}, {"data_types": {"grad_accum_dtype": "fp32"}}])
    accumulation = {"gradient_accumulation_steps": chance.choice([1, 1, 2, 3])}
    if chance.random() < 0.15:
        accumulation = {"managed_gradient_accumulation": False}
    return {
        "kinds": [chance.choice([*KINDS]) for _ in range(chance.choice([3, 4, 5]))],
        "tied": chance.random() < 0.2,
        "leaves_loss": chance.random() < 0.3,
        "frozen": chance.choice([None, None, 1]),
        "groups": chance.choice([1, 2]),
        "zero_init": chance.random() < 0.5,
        "config": ds_config(
            **dtype,
            **more,
            **accumulation,
            gradient_clipping=chance.choice([0.0, 0.0, 0.5, 1.5]),
            zero_optimization=zero,
        ),
        "fuyou": _block(chance, is_bfloat16="bf16" in dtype and dtype["bf16"] is not None),
    }


def _block(chance: random.Random, *, is_bfloat16: bool) -> dict:
    homes = {name: chance.choice(TIERS) for name in ("optimizer", "parameters", "gradients")}
    sections: dict[str, dict] = {name: {"tier": home} for name, home in homes.items() if isinstance(home, str)}
    shares = {name: home for name, home in homes.items() if not isinstance(home, str)}
    sections.setdefault("optimizer", {}).update(
        clip_policy=chance.choice(["auto", "defer", "speculate", "speculate"]),
        overlap=chance.choice(["none", "backward", "backward_and_forward", "backward_and_forward"]),
        masters="split" if is_bfloat16 and chance.random() < 0.4 else "whole",
    )
    plan: dict[str, Any] = {
        "chunk_bytes": chance.choice([8192, 16384, 65536, 1 << 20]),
        "slots": chance.choice([1, 2, 2]),
        "prefetch_bytes": chance.choice([40_000, 90_000, 400_000]),
        "small_param_bytes": chance.choice([1, 1000, 20_000]),
        "smallest_swapped_bytes": 1024,
        "activation_bytes": chance.choice([65536, 262144]),
    }
    if shares:
        plan["residency"] = shares
    more = {"checkpoint": {"save": chance.choice(["blocking", "background"])}, "io": {"engine": chance.choice(IO)}}
    return {**sections, **chance.choice(ACTIVATIONS), **more, "plan": plan}


def _rounds_states(chance: random.Random, engines: list[dict]) -> bool:
    """Draws how states are kept; whether an engine does so as stock has no name for."""
    rounds = False
    for spec in engines:
        optimizer, plan = spec["fuyou"]["optimizer"], spec["fuyou"]["plan"]
        share = plan.get("residency", {}).get("optimizer", 0.0)
        if share and chance.random() < 0.5:
            plan["residency"]["optimizer_twice"] = chance.choice([0.3, share])
        how = chance.choice(["fp32", "fp32", "stock's", "bf16", "int8"])
        if how in ("bf16", "int8"):
            optimizer["moments"], rounds = how, True
        elif how == "stock's" and (spec["config"].get("bf16") or {}).get("enabled"):
            keys = ["bf16_master_weights_and_grads", "bf16_optimizer_states"][: chance.choice([1, 2])]
            spec["config"]["bf16"] = {"enabled": True, **dict.fromkeys(keys, True)}
            spec["config"].pop("data_types", None)  # sums of gradients are of that type, too
            optimizer["masters"] = "auto"
    return rounds


# ---- actions -------------------------------------------------------------------------------------------------------

BETWEEN = ("evaluate", "read", "edit", "get_states", "set_states", "change", "change_clip", "fail_in_forward")
BETWEEN += ("state_dict", "save", "load", "release", "fail_in_backward", "move", "place", "sleep", "freeze")
WITHIN = ("evaluate", "read", "get_states")
AFTER = ("evaluate", "read", "edit", "get_states", "get_gradients", "set_gradients", "change", "fail_in_forward")
AFTER += ("state_dict", "save")


class _Drawer:
    def __init__(self, chance: random.Random, engines: list[dict], reference: str, *, may_autocast: bool) -> None:
        self._chance, self._engines, self._reference = chance, engines, reference
        self._may_autocast = may_autocast
        self._batch = 0

    def _next_batch(self) -> int:
        self._batch += 1
        return self._batch

    def any_of(self, names: tuple[str, ...], engine: int | None = None) -> Action:
        """Where stock is the reference something else takes the place of what it does otherwise."""
        chance = self._chance
        name = chance.choice(names)
        if self._reference == "stock":
            name = {"load": "save", "freeze": "read"}.get(name, name)
        arguments: dict[str, Any] = {"engine": chance.randrange(len(self._engines)) if engine is None else engine}
        if name == "freeze":
            arguments |= {"block": chance.randrange(5), "trained": chance.random() < 0.5}
        if name in ("read", "edit", "get_states", "set_states", "get_gradients", "set_gradients"):
            arguments["params"] = [chance.randrange(100) for _ in range(chance.choice([1, 2, 4]))]
        if name in ("evaluate", "fail_in_forward", "fail_in_backward"):
            arguments["batch"] = self._next_batch()
        if name in ("fail_in_forward", "fail_in_backward"):
            arguments["at"] = chance.randrange(5)
        if name in ("save", "load"):
            arguments["tag"] = chance.choice("ab")
        arguments.update(self._more(name))
        if names is WITHIN and name == "evaluate":  # stock's hooks cannot count parameters that were released so
            arguments["inference"] = False
        return [name, arguments]

    def _more(self, name: str) -> dict[str, Any]:
        chance = self._chance
        if name == "change":
            key, value = chance.choice(
                [
                    ("lr", chance.random() * 2e-3),
                    ("lr", 0.0),
                    ("weight_decay", chance.random() * 0.2),
                    ("betas", [0.8 + 0.1 * chance.random(), 0.95]),
                ]
            )
            return {"group": chance.randrange(2), "key": key, "value": value}
        if name == "edit":
            return {"rank": chance.randrange(2)}
        if name == "evaluate":
            return {"inference": chance.random() < 0.3}
        if name == "change_clip":
            return {"value": chance.choice([0.0, 0.3, 1.0])}
        if name in ("move", "place"):
            what = {"what": chance.choice(["params", "grads", "frozen"])} if name == "place" else {}
            return {**what, "share": chance.choice([0.0, 0.4, 1.0])}
        if name == "sleep":
            return {"pin": chance.random() < 0.5}
        return {}

    def micro_batches(self, engine: int) -> list[Action]:
        """Of a step."""
        config = self._engines[engine]["config"]
        if config.get("managed_gradient_accumulation", True):
            return [self._micro(engine, None) for _ in range(config["gradient_accumulation_steps"])]
        return [self._micro(engine, False) for _ in range(self._chance.randrange(3))] + [self._micro(engine, True)]

    def _micro(self, engine: int, steps: bool | None) -> Action:
        chance, config = self._chance, self._engines[engine]["config"]
        order = list(range(5)) if chance.random() < 0.6 else [chance.randrange(5) for _ in range(6)]
        arguments = {
            "engine": engine,
            "batch": self._next_batch(),
            "size": chance.choice([1, 2, 3]),
            "order": order,
            "factor": chance.choice([1.0, 1.0, 1.0, 0.05, 3.0, float("inf") if chance.random() < 0.3 else 1.0]),
            "again": chance.choice([0] * 7 + [1]),
            "left_out": chance.randrange(5) if self._reference == "memory" and chance.random() < 0.2 else None,
            "in_eval": chance.random() < 0.1,
            "autocast": chance.random() < 0.15 and self._may_autocast and not config.get("fp16"),
            "steps": steps,
            "within": [self.any_of(WITHIN) for _ in range(chance.choice([0, 0, 0, 1]))],
            "after": [self.any_of(AFTER, engine) for _ in range(chance.choice([0, 0, 1, 2]))],
        }
        return ["micro", arguments]
