# SPDX-License-Identifier: Apache-2.0
"""The cases: model, batch and the DeepSpeed JSON of every variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BESIDE_IO", "CASES", "OFF", "WAYS", "Case", "StockTuning", "config_of", "memory_spec", "spec_of"]


@dataclass(frozen=True)
class StockTuning:
    """The values of ZeRO-Infinity that the pre-test chooses."""

    sub_group_size: int = 20_000_000
    intra_op_parallelism: int = 2
    buffer_count: int = 16


@dataclass(frozen=True)
class Case:
    """``ratios`` names (numerator, denominator, bar): what is quoted, and what it must not exceed, if anything."""

    name: str
    batch: int
    length: int
    clip: float
    variants: tuple[str, ...]
    ratios: tuple[tuple[str, str, float | None], ...]
    num_timed: int = 3
    checkpointing: bool = False  # the script's own gradient checkpointing of every block, in all variants
    timed: str = "steps"  # what a burst times: steps, a "rollout", or one of a "saving"'s ways to read a model


CASES = (
    Case(
        "balanced",
        2,
        256,
        0.0,
        ("zero_infinity", "fuyou_optimizer_nvme", "fuyou_all_nvme", "stock_off", "fuyou_off"),
        (("fuyou_optimizer_nvme", "zero_infinity", 0.68), ("fuyou_all_nvme", "zero_infinity", 0.75)),
    ),
    Case(
        "balanced_clip1",
        2,
        256,
        1.0,
        ("zero_infinity", "fuyou_optimizer_nvme"),
        (("fuyou_optimizer_nvme", "zero_infinity", 0.75),),
    ),
    Case(
        "storage_bound",
        1,
        32,
        0.0,
        ("zero_infinity", "fuyou_optimizer_nvme", "stock_off", "fuyou_off"),
        (("fuyou_optimizer_nvme", "zero_infinity", 0.85),),
    ),
    Case(
        "masters",
        1,
        32,
        0.0,
        ("fuyou_optimizer_nvme_whole", "fuyou_optimizer_nvme", "fuyou_all_nvme_whole", "fuyou_all_nvme"),
        (
            ("fuyou_optimizer_nvme", "fuyou_optimizer_nvme_whole", 0.88),
            ("fuyou_all_nvme", "fuyou_all_nvme_whole", 0.92),
        ),
    ),
    Case(
        "moments",
        1,
        32,
        0.0,
        (
            "fuyou_optimizer_nvme_whole",
            "fuyou_optimizer_nvme_bf16",
            "fuyou_optimizer_nvme_int8",
            "fuyou_all_nvme_whole",
            "fuyou_all_nvme_int8",
            "fuyou_dram",
            "fuyou_dram_int8",
        ),
        (
            ("fuyou_optimizer_nvme_int8", "fuyou_optimizer_nvme_whole", 0.45),
            ("fuyou_all_nvme_int8", "fuyou_all_nvme_whole", 0.58),
            ("fuyou_dram_int8", "fuyou_dram", 1.03),
        ),
    ),
    Case(
        "compute_bound",
        8,
        256,
        0.0,
        ("fuyou_optimizer_nvme", "stock_off", "fuyou_off", "fuyou_dram", "fuyou_off_beside_io"),
        (
            ("fuyou_optimizer_nvme", "stock_off", 1.03),
            ("fuyou_optimizer_nvme", "fuyou_off", 1.03),
            ("fuyou_dram", "fuyou_off", None),
            ("fuyou_off_beside_io", "fuyou_off", None),
        ),
        num_timed=2,
    ),
    Case(
        "dram",
        2,
        256,
        0.0,
        ("zero_offload", "fuyou_dram", "stock_off", "fuyou_off"),
        (("fuyou_dram", "zero_offload", 1.03),),
    ),
    Case(
        "activations",
        2,
        256,
        0.0,
        ("zero_infinity", "fuyou_optimizer_nvme", "fuyou_swap"),
        (("fuyou_swap", "zero_infinity", 0.60), ("fuyou_swap", "fuyou_optimizer_nvme", 1.0)),
        checkpointing=True,
    ),
    Case(
        "activations_batch8",
        8,
        256,
        0.0,
        ("zero_infinity", "fuyou_optimizer_nvme", "fuyou_swap"),
        (("fuyou_swap", "zero_infinity", 0.75), ("fuyou_swap", "fuyou_optimizer_nvme", 1.0)),
        num_timed=2,
        checkpointing=True,
    ),
    Case(
        "rollout",
        1,
        64,
        0.0,
        ("zero_offload", "fuyou_all_nvme", "zero_offload_gathered", "fuyou_all_nvme_gathered"),
        (
            ("fuyou_all_nvme", "zero_offload", 1.1),
            ("fuyou_all_nvme_gathered", "zero_offload_gathered", 1.1),
        ),
        timed="rollout",
    ),
    Case(
        "saving",
        1,
        64,
        0.0,
        ("fuyou_all_nvme_read_once", "fuyou_all_nvme", "fuyou_all_nvme_merge", "fuyou_all_nvme_evaluate"),
        (
            ("fuyou_all_nvme", "fuyou_all_nvme_read_once", 1.2),
            ("fuyou_all_nvme_merge", "fuyou_all_nvme_read_once", 1.2),
            ("fuyou_all_nvme_evaluate", "fuyou_all_nvme_read_once", 1.2),
        ),
        timed="saving",
    ),
    Case(
        "trace",
        2,
        256,
        0.0,
        ("fuyou_swap", "fuyou_swap_traced"),
        (("fuyou_swap_traced", "fuyou_swap", 1.01),),
    ),
)

OFF = ("stock_off", "fuyou_off")
"""Forward and backward alone, with stock's engine and with ours; the faster one enters the floor."""

BESIDE_IO = "fuyou_off_beside_io"
"""A control: our "off" while fio moves the bytes that the optimizer on storage would, and nothing is done with them."""

WAYS = ("_gathered", "_read_once", "_merge", "_evaluate")
"""Ends of names of variants: a rollout under ``GatheredParameters``; the bytes of the model alone, all reads asked for
at once; module by module gathered, as adapters are merged; a forward of one token without gradients. The configuration
is that of the variant without."""

VOCABULARY = 8192  # with 12 layers of width 768 about 98 million parameters


def spec_of(case: Case, variant: str, directory: Path, tuning: StockTuning) -> dict[str, Any]:
    """What benchmarks/worker.py needs to run a variant of a case."""
    return {
        "model": {
            "num_layers": 12,
            "width": 768,
            "num_heads": 12,
            "length": case.length,
            "vocabulary": VOCABULARY,
            "checkpointing": case.checkpointing,
        },
        "batch": case.batch,
        "mode": "off" if variant in (*OFF, BESIDE_IO) else "train",
        "way": next((way for way in WAYS if variant.endswith(way)), ""),
        "config": config_of(variant, directory, tuning, case.batch, case.clip),
    }


def config_of(variant: str, directory: Path, tuning: StockTuning, batch: int, clip: float) -> dict[str, Any]:
    """The DeepSpeed JSON of a variant."""
    for way in WAYS:
        variant = variant.removesuffix(way)
    config: dict[str, Any] = _CONFIGS[variant](str(directory), tuning) | _common(batch, clip)
    return config


def memory_spec(variant: str, num_layers: int, clip: float, directory: Path, tuning: StockTuning) -> dict[str, Any]:
    """One size of the memory case: width 1024, sequence 32, everything on storage, ``zero.Init``."""
    config = _CONFIGS[variant](str(directory), tuning) | _common(1, clip)
    return {
        "model": {"num_layers": num_layers, "width": 1024, "num_heads": 16, "length": 32, "vocabulary": 256},
        "batch": 1,
        "mode": "train",
        "zero_init": True,
        "config": config,
    }


def _common(batch: int, clip: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "steps_per_print": 1_000_000_000,
    }


def _zero_offload(directory: str, tuning: StockTuning) -> dict[str, Any]:
    cpu = {"device": "cpu"}
    return {"zero_optimization": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}}


def _zero_infinity(directory: str, tuning: StockTuning) -> dict[str, Any]:
    optimizer = {
        "device": "nvme",
        "nvme_path": directory,
        "pipeline_read": True,
        "pipeline_write": True,
        "buffer_count": tuning.buffer_count,
    }
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": optimizer,
            "offload_param": {"device": "cpu"},
            "sub_group_size": tuning.sub_group_size,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": tuning.intra_op_parallelism,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def _zero_infinity_params(directory: str, tuning: StockTuning) -> dict[str, Any]:
    """Parameters on NVMe too, with stock's default max_in_cpu (it does not run with less)."""
    config = _zero_infinity(directory, tuning)
    config["zero_optimization"]["offload_param"] = {
        "device": "nvme",
        "nvme_path": directory,
        "buffer_size": 100_000_000,
    }
    return config


def _fuyou(parameters: str, optimizer: str, gradients: str, states: Mapping[str, str] = {}, **more: Any) -> Any:
    def config(directory: str, tuning: StockTuning) -> dict[str, Any]:
        block = {
            "nvme_path": directory,
            "parameters": {"tier": parameters},
            "optimizer": {"tier": optimizer, **states},
            "gradients": {"tier": gradients},
            **more,
        }
        if "auto" in (parameters, optimizer, gradients):  # a device in an offload section would be the tier
            return {"zero_optimization": {"stage": 3}, "fuyou": block}
        return {**_zero_offload(directory, tuning), "fuyou": block}

    return config


def _traced(config: Any) -> Any:
    """The same with a lane trace: what it costs while it runs (the file is written when the run ends)."""

    def with_trace(directory: str, tuning: StockTuning) -> dict[str, Any]:
        found = config(directory, tuning)
        return {**found, "fuyou": {**found["fuyou"], "trace": str(Path(directory) / "trace.json")}}

    return with_trace


_SWAP = _fuyou("cpu", "nvme", "cpu", activations={"mode": "swap", "tier": "nvme"})
_CONFIGS = {
    "zero_offload": _zero_offload,
    "stock_off": _zero_offload,
    "fuyou_off": _fuyou("cpu", "cpu", "cpu"),
    BESIDE_IO: _fuyou("cpu", "cpu", "cpu"),
    "zero_infinity": _zero_infinity,
    "zero_infinity_params": _zero_infinity_params,
    "fuyou_dram": _fuyou("cpu", "cpu", "cpu"),
    "fuyou_optimizer_nvme": _fuyou("cpu", "nvme", "cpu"),
    "fuyou_optimizer_nvme_whole": _fuyou("cpu", "nvme", "cpu", {"masters": "whole"}),
    "fuyou_optimizer_nvme_bf16": _fuyou("cpu", "nvme", "cpu", {"masters": "split", "moments": "bf16"}),
    "fuyou_optimizer_nvme_int8": _fuyou("cpu", "nvme", "cpu", {"masters": "split", "moments": "int8"}),
    "fuyou_dram_int8": _fuyou("cpu", "cpu", "cpu", {"moments": "int8"}),
    "fuyou_all_nvme": _fuyou("nvme", "nvme", "nvme"),
    "fuyou_all_nvme_whole": _fuyou("nvme", "nvme", "nvme", {"masters": "whole"}),
    "fuyou_all_nvme_int8": _fuyou("nvme", "nvme", "nvme", {"masters": "split", "moments": "int8"}),
    # Three quarters in host memory, and staging memory for a small part of the others, as where a model is large.
    "fuyou_states_in_both": _fuyou(
        "auto",
        "auto",
        "auto",
        plan={"staging_bytes": 256 << 20, "residency": {"parameters": 1.0, "optimizer": 0.75, "gradients": 1.0}},
    ),
    "fuyou_swap": _SWAP,
    "fuyou_swap_traced": _traced(_SWAP),
    # The memory that stock takes with checkpointing: of the device, and of the host too.
    "fuyou_auto": _fuyou("cpu", "nvme", "cpu", gpu_budget_bytes=4_400_000_000),
    "fuyou_two_lines": _fuyou("auto", "auto", "auto"),
    "fuyou_auto_all": _fuyou("auto", "auto", "auto", gpu_budget_bytes=4_400_000_000, dram_budget_bytes=7_900_000_000),
}
