# SPDX-License-Identifier: Apache-2.0
"""Stock runs by name, and the fuyou runs that must equal them: a covering of the settings, not the product.

Names of stock cases read: dtype, clip, accumulation, parameter groups, ranks.
"""

from __future__ import annotations

from tests.harness.runner import ds_config

__all__ = ["MATRIX", "STOCK", "block"]

NUM_STEPS = 10
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 6, "warmup_type": "linear"},
}
_TOKENS = {
    "min_value": 8,
    "max_value": 32,
    "schedule_type": "fixed_linear",
    "schedule_config": {"require_steps": 8, "seq_per_step": 8},
}
_ROUTING = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": _TOKENS,
}
RANDOM_LTD = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": _ROUTING}}}
"""Its schedule alone: no layer of the model drops tokens unless the script converts it."""
FP16 = {"enabled": True, "initial_scale_power": 23, "loss_scale_window": 3, "hysteresis": 1}
DTYPES = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"bf16": None, "fp16": FP16},
    "fp32": {"bf16": None},
}


def _case(dtype: str, clip: float, accumulation: int, groups: str, world_size: int = 1, **more: object) -> dict:
    config = ds_config(
        **DTYPES[dtype], gradient_clipping=clip, gradient_accumulation_steps=accumulation, scheduler=WARMUP
    )
    return {
        "steps": NUM_STEPS,
        "model": {},
        "config": config,
        "groups": groups,
        "world_size": world_size,
        **more,
    }


# "rarely" clips in some of the ten steps: measured norms are 1.034 to 1.066 (3 micro-batches), 1.27 to 1.32 (2 ranks)
STOCK: dict[str, dict] = {
    "bf16-off-1-one": _case("bf16", 0.0, 1, "one"),
    "bf16-always-1-two": _case("bf16", 0.05, 1, "two", eval_before=[0, 3, 4]),
    "bf16-rarely-3-two_lrs": _case("bf16", 1.05, 3, "two_lrs"),
    "fp16-off-1-one": _case("fp16", 0.0, 1, "one"),
    "fp16-rarely-3-two": _case("fp16", 1.05, 3, "two"),
    "fp32-always-1-two_lrs": _case("fp32", 0.05, 1, "two_lrs"),
    "fp32-off-3-one": _case("fp32", 0.0, 3, "one"),
    "bf16-rarely-1-two-2ranks": _case("bf16", 1.288, 1, "two", 2),
    "fp16-always-3-one-2ranks": _case("fp16", 0.05, 3, "one", 2),
    "fp32-off-1-two_lrs-2ranks": _case("fp32", 0.0, 1, "two_lrs", 2),
}

TIERS: dict[str, tuple[str | float, ...]] = {
    # optimizer, parameters, gradients: a tier, or the share in host memory; what of the optimizer is there twice
    "states": ("nvme", "cpu", "cpu"),
    "all": ("nvme", "nvme", "nvme"),
    "none": (0.9999999, "cpu", "cpu"),  # less than an element lacks: all chunks are in host memory
    "grads_cpu": ("nvme", "nvme", "cpu"),
    "params_only": ("cpu", "nvme", "cpu"),
    "quarter": (0.25, "cpu", 0.5),
    "half": (0.5, 0.5, 0.5),
    "most": (0.75, 0.25, "nvme"),
    "twice": (0.9999999, "cpu", "cpu", 0.6),
    "most_twice": (0.75, 0.5, "nvme", 0.4),
}


def block(
    path: str,
    tiers: str,
    policy: str = "auto",
    overlap: str = "backward_and_forward",
    slots: int = 2,
    **plan: int,
) -> dict:
    """A fuyou block whose chunks are small enough that the little model has about ten."""
    homes = dict(zip(("optimizer", "parameters", "gradients", "optimizer_twice"), TIERS[tiers], strict=False))
    shares = {name: home for name, home in homes.items() if not isinstance(home, str)}
    sections: dict[str, dict] = {name: {"tier": home} for name, home in homes.items() if isinstance(home, str)}
    sections.setdefault("optimizer", {}).update(clip_policy=policy, overlap=overlap)
    more = {"residency": shares} if shares else {}
    return {"nvme_path": path, **sections, "plan": {"chunk_bytes": 65536, "slots": slots, **more, **plan}}


# (stock case, tiers, clip_policy, overlap, slots)
MATRIX: list[tuple[str, str, str, str, int]] = [
    ("bf16-off-1-one", "states", "speculate", "backward_and_forward", 2),
    ("bf16-off-1-one", "all", "auto", "backward", 2),
    ("bf16-off-1-one", "none", "auto", "backward_and_forward", 2),
    ("bf16-off-1-one", "twice", "auto", "backward_and_forward", 2),
    ("bf16-always-1-two", "most_twice", "speculate", "backward", 2),
    ("bf16-always-1-two", "states", "auto", "backward_and_forward", 2),
    ("bf16-always-1-two", "all", "speculate", "none", 2),
    ("bf16-always-1-two", "grads_cpu", "defer", "backward", 1),
    ("bf16-rarely-3-two_lrs", "quarter", "speculate", "backward_and_forward", 2),
    ("bf16-rarely-3-two_lrs", "half", "speculate", "backward_and_forward", 2),
    ("bf16-rarely-3-two_lrs", "most", "defer", "none", 1),
    ("fp16-off-1-one", "states", "speculate", "backward", 2),
    ("fp16-off-1-one", "grads_cpu", "auto", "backward_and_forward", 2),
    ("fp16-rarely-3-two", "none", "defer", "backward", 1),
    ("fp16-rarely-3-two", "quarter", "defer", "backward_and_forward", 1),
    ("fp16-rarely-3-two", "half", "auto", "backward_and_forward", 2),
    ("fp16-rarely-3-two", "most", "speculate", "backward_and_forward", 2),
    ("fp16-rarely-3-two", "twice", "speculate", "backward_and_forward", 1),
    ("fp32-always-1-two_lrs", "grads_cpu", "speculate", "backward_and_forward", 2),
    ("fp32-always-1-two_lrs", "all", "auto", "backward_and_forward", 1),
    ("fp32-off-3-one", "states", "auto", "backward", 2),
    ("fp32-off-3-one", "none", "speculate", "none", 1),
    ("bf16-rarely-1-two-2ranks", "states", "speculate", "backward_and_forward", 2),
    ("bf16-rarely-1-two-2ranks", "half", "defer", "backward_and_forward", 1),
    ("fp16-always-3-one-2ranks", "all", "speculate", "backward", 2),
    ("fp16-always-3-one-2ranks", "twice", "auto", "backward_and_forward", 2),
    ("fp32-off-1-two_lrs-2ranks", "grads_cpu", "auto", "backward_and_forward", 2),
]
