# SPDX-License-Identifier: Apache-2.0
"""What the DeepSpeed JSON around the block says: offload sections taken in, impossible mixes refused.

The ZeRO-Infinity sections of an existing JSON stay as they are. `absorb_offload_sections` honours what
they say where the block says "auto", and lists every key that has no meaning here once, with a reason.
Pure Python: it looks at the raw dictionary and imports nothing of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ds_fuyou.config import BLOCK_KEY, FuyouConfig, load_block, paths_of_section
from ds_fuyou.errors import FuyouConfigError, FuyouStateError, shown
from ds_fuyou.state_layout import BF16, FP32

__all__ = [
    "SUPPORTED_OPTIMIZERS",
    "Activation",
    "IgnoredKey",
    "absorb_offload_sections",
    "activation_of",
    "current_activation",
    "is_on",
    "load_activation",
    "lookup",
    "may_be_on",
    "refused_combinations",
    "section_of",
    "stock_states",
]

SUPPORTED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion")

_IGNORED_REASONS = {
    "buffer_count": "the staging pool is sized from the model",
    "buffer_size": "the staging pool is sized from the model",
    "max_in_cpu": "what stays in host memory follows fuyou.dram_budget_bytes",
    "pipeline_read": "reads always overlap",
    "pipeline_write": "writes always overlap",
    "fast_init": "states are initialised chunk by chunk, without extra passes",
    "ratio": "every parameter is updated on the CPU",
    "super_offload": "switched off",
    "cpuadam_cores_perc": "threads are part of the plan (fuyou.plan.num_threads)",
}


@dataclass(frozen=True)
class IgnoredKey:
    """A key of the DeepSpeed JSON that has no effect under the block."""

    key: str
    reason: str


@dataclass(frozen=True)
class Activation:
    """What the plugin attaches to a parsed DeepSpeed configuration as its attribute ``fuyou``: the block, completed by
    the offload sections.

    Attributes:
        config: the block, its "auto" tiers and missing `nvme_path` filled in.
        ignored: dotted keys that were not taken over, each once.
        pin_memory: whether host buffers may be page-locked.
    """

    config: FuyouConfig
    ignored: tuple[IgnoredKey, ...]
    pin_memory: bool

    @property
    def state_paths(self) -> tuple[str, ...]:
        """Directories that may hold state; empty when everything stays in host memory."""
        return self.config.nvme_path or ()


_current: ContextVar[Activation | None] = ContextVar("ds_fuyou_activation", default=None)


def current_activation() -> Activation:
    """The activation of the engine that is being built.

    Raises:
        FuyouStateError: no engine with a block is being built in this context.
    """
    activation = _current.get()
    if activation is None:
        raise FuyouStateError(
            "no engine with a fuyou block is being built; this is called from the plugin's wrappers only"
        )
    return activation


@contextmanager
def activation_scope(activation: Activation) -> Iterator[None]:
    """Makes `activation` the current one for the duration of the block."""
    token = _current.set(activation)
    try:
        yield
    finally:
        _current.reset(token)


def activation_of(ds_config: object) -> Activation | None:
    """The activation of a parsed DeepSpeedConfig or of a raw configuration dictionary, None if off."""
    if isinstance(ds_config, Mapping):
        return load_activation(ds_config)
    found = getattr(ds_config, BLOCK_KEY, None)
    return found if isinstance(found, Activation) else None


def load_activation(ds_config: Mapping[str, Any]) -> Activation | None:
    """Block, offload sections and refusals together. None if the block is absent or off.

    Raises:
        FuyouConfigError: the block is wrong or cannot work with the rest of the configuration.
    """
    config = load_block(ds_config)
    return None if config is None else absorb_offload_sections(ds_config, config)


def absorb_offload_sections(ds_config: Mapping[str, Any], config: FuyouConfig) -> Activation:
    """Completes `config` from ``offload_optimizer``, ``offload_param`` and ``aio``.

    Raises:
        FuyouConfigError: stage is not 3, a feature that cannot be combined is on, or a tier is on
            storage and no path is named anywhere.
    """
    zero = section_of(ds_config, "zero_optimization")
    _require_stage_3(ds_config.get("zero_optimization"), zero)
    _refuse_combinations(ds_config)
    ignored: list[IgnoredKey] = []
    paths: dict[str, None] = {}  # two sections may name one, in two spellings
    tiers: dict[str, str] = {}
    pins: list[bool] = []
    for name, part in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        for key, value in section_of(zero, name).items():
            dotted = f"zero_optimization.{name}.{key}"
            if key == "device" and value in ("cpu", "nvme"):
                if part in _planned(config):
                    ignored.append(IgnoredKey(dotted, f"fuyou.plan decides how much of {part} is in host memory"))
                    continue
                if getattr(config, part).tier != "auto":
                    ignored.append(IgnoredKey(dotted, f"fuyou.{part}.tier is set"))
                tiers[part] = value
            elif key == "nvme_path" and isinstance(value, str) and value not in ("", "auto"):
                if config.nvme_path is not None:
                    ignored.append(IgnoredKey(dotted, "fuyou.nvme_path is set"))
                else:
                    paths.update(dict.fromkeys(paths_of_section(f"zero_optimization.{name}", value)))
            elif key == "pin_memory" and isinstance(value, bool):
                pins.append(value)
            elif value is not None and value != "auto":
                reason = _IGNORED_REASONS.get(key, "it has no meaning here")
                ignored.append(IgnoredKey(dotted, reason))
    ignored += [
        IgnoredKey(f"aio.{key}", "storage is reached by fuyou.io; depth and block size are part of the plan")
        for key in section_of(ds_config, "aio")
    ]
    ignored += [
        IgnoredKey(f"zero_optimization.{key}", "deprecated by DeepSpeed; the tiers of the block say where state is")
        for key in ("cpu_offload", "cpu_offload_param")
        if zero.get(key)
    ]
    if lookup(ds_config, "optimizer.params.torch_adam") is True:
        ignored.append(IgnoredKey("optimizer.params.torch_adam", "DeepSpeed's CPU kernel updates; last bits differ"))
    completed = _completed(config, tuple(paths), tiers)
    _require_path(completed)
    return Activation(completed, tuple(ignored), pin_memory=all(pins))


def _planned(config: FuyouConfig) -> dict[str, float]:
    """Resident shares that the plan sets, by class."""
    return config.plan.resident_shares() if config.plan is not None else {}


def _completed(config: FuyouConfig, paths: tuple[str, ...], tiers: dict[str, str]) -> FuyouConfig:
    update: dict[str, Any] = {}
    if config.nvme_path is None and paths:
        update["nvme_path"] = paths
    for part, tier in tiers.items():
        settings = getattr(config, part)
        if settings.tier == "auto":
            update[part] = settings.model_copy(update={"tier": tier})
    return config.model_copy(update=update)


def _require_path(config: FuyouConfig) -> None:
    on_storage = [
        f'fuyou.{part}.tier is "nvme"'
        for part in ("parameters", "optimizer", "gradients", "activations")
        if getattr(config, part).tier == "nvme"
    ]
    on_storage += [
        f"fuyou.plan puts a part of the {part} on storage" for part, share in _planned(config).items() if share < 1
    ]
    if on_storage and config.nvme_path is None:
        raise FuyouConfigError(
            f"{', '.join(on_storage)} but no path is named; set fuyou.nvme_path, or nvme_path in "
            f"zero_optimization.offload_optimizer or offload_param"
        )
    shares = config.plan.shares if config.plan else None
    if shares is not None and len(shares) != len(config.nvme_path or ()):
        raise FuyouConfigError(
            f"fuyou.plan.shares must hold one number for each nvme_path ({len(config.nvme_path or ())}), "
            f"found {len(shares)}"
        )


def _require_stage_3(raw: object, zero: Mapping[str, Any]) -> None:
    stage = zero.get("stage", 0)
    if isinstance(raw, bool):
        stage = int(raw)
    if isinstance(stage, bool) or stage != 3:
        raise FuyouConfigError(
            f"the fuyou block needs zero_optimization.stage 3, found {shown(stage)}; "
            f'set "stage": 3, or "enabled": false in the block'
        )


def _refuse_combinations(ds_config: Mapping[str, Any]) -> None:
    clashes = [f"{key} ({reason})" for key, reason in _clashes(ds_config)]
    if clashes:
        raise FuyouConfigError(
            f"the fuyou block cannot be combined with: {'; '.join(clashes)}. Remove these, or switch the block off"
        )


_SWITCHES: tuple[tuple[str, str], ...] = (
    ("zero_optimization.zero_quantized_weights", "parameters would not be those of stock ZeRO-3"),
    ("zero_optimization.zero_quantized_gradients", "gradients would not be those of stock ZeRO-3"),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        "parameters would not be those of stock ZeRO-3",
    ),
    ("zero_optimization.elastic_checkpoint", "no longer supported by stage 3; use universal checkpoints"),
    ("zero_optimization.offload_optimizer.super_offload", "it replaces the same optimizer"),
    ("fp16.fp16_master_weights_and_grads", "master parameters are kept in fp32"),
    ("compile.deepcompile", "it compiles stock's own gathers and reductions into the graph"),
    ("expert_parallel.enabled", "experts would be partitioned over groups of their own"),
    ("hybrid_engine.enabled", "its inference containers take the parameters over"),
    ("optimizer.params.amsgrad", "the CPU Adam of DeepSpeed has no AMSGrad"),
)


_BF16_MASTERS = "bf16_master_weights_and_grads"

_LIMITS: tuple[tuple[str, float, str], ...] = (
    ("zero_optimization.zero_hpz_partition_size", 1, "parameters are partitioned over all ranks"),
    ("zero_optimization.mics_shard_size", 0, "parameters are partitioned over all ranks"),
    ("tensor_parallel.autotp_size", 1, "norms and partitions would span tensor-parallel groups"),
)


def refused_combinations() -> list[tuple[str, str]]:
    """Every refused setting with its reason, for the documentation."""
    return [
        *((f"{key} = true", reason) for key, reason in _SWITCHES),
        *((f"{key} > {most:g}", reason) for key, most, reason in _LIMITS),
        ("zero_optimization.zenflow", _ZENFLOW),
        ("zero_optimization.offload_optimizer.ratio < 1", _RATIO),
        ("bf16.bf16_master_weights_and_grads = true, bf16.enabled = false", _NOT_BF16),
        ("bf16.bf16_master_weights_and_grads = true, optimizer.type not Adam or AdamW", _NOT_ADAM),
        ('torch_autocast.dtype = "float16"', _FP16_AUTOCAST),
    ]


_ZENFLOW = "it replaces the same optimizer"
_RATIO = "no part is updated on the GPU"
_NOT_BF16 = "parameters would not be bfloat16, as their masters would"
_NOT_ADAM = "DeepSpeedCPUAdam alone has such masters"
_ON = ("1", "true", "t", "yes", "y", "on")  # as strings, in any case: what pydantic takes for true
_HALVES = ("fp16", "float16", "half", "torch.float16")
_FP16_AUTOCAST = "torch's gradient scaler would step the optimizer itself; use bfloat16"


def is_on(value: object) -> bool:
    """Whether DeepSpeed's configuration takes it for true: also 1 and ``"true"``."""
    return value.lower() in _ON if isinstance(value, str) else isinstance(value, int | float) and value == 1


def may_be_on(value: object) -> bool:
    """Also where the Trainer or Accelerate is to say."""
    return is_on(value) or value == "auto"


def _clashes(ds_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, reason in _SWITCHES:
        if is_on(lookup(ds_config, key)):
            yield key, reason
    for key, most, reason in _LIMITS:
        if _number(lookup(ds_config, key), most) > most:
            yield key, reason
    if lookup(ds_config, "zero_optimization.zenflow") not in (None, "auto", False):
        yield "zero_optimization.zenflow", _ZENFLOW
    ratio = lookup(ds_config, "zero_optimization.offload_optimizer.ratio")
    if _number(ratio, 1.0) < 1.0:
        yield f"zero_optimization.offload_optimizer.ratio = {ratio}", _RATIO
    yield from _master_clashes(ds_config)
    dtype = lookup(ds_config, "torch_autocast.dtype")
    if is_on(lookup(ds_config, "torch_autocast.enabled")) and str(dtype) in _HALVES:
        yield f"torch_autocast.dtype = {shown(dtype)}", _FP16_AUTOCAST
    kind = lookup(ds_config, "optimizer.type")
    names = [name.lower() for name in SUPPORTED_OPTIMIZERS]
    if isinstance(kind, str) and kind != "auto" and kind.lower() not in names:
        yield f"optimizer.type = {shown(kind)}", f"what works: {', '.join(SUPPORTED_OPTIMIZERS)}"


def _master_clashes(ds_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    name, section = _bf16_section(ds_config)
    if not is_on(section.get(_BF16_MASTERS)):
        return
    if not may_be_on(section.get("enabled")):
        yield f"{name}.{_BF16_MASTERS} = true without {name}.enabled", _NOT_BF16
    kind = lookup(ds_config, "optimizer.type")
    if isinstance(kind, str) and kind.lower() not in ("adam", "adamw", "auto"):
        yield f"{name}.{_BF16_MASTERS} = true with optimizer.type = {shown(kind)}", _NOT_ADAM


def stock_states(ds_config: Mapping[str, Any]) -> tuple[str, str]:
    """How stock's CPU tier would keep masters and moments under a configuration."""
    _, section = _bf16_section(ds_config)
    if not is_on(section.get(_BF16_MASTERS)):
        return FP32, FP32
    wants_fp32 = lookup(ds_config, "optimizer.params.fp32_optimizer_states") is not False
    return BF16, FP32 if wants_fp32 and not is_on(section.get("bf16_optimizer_states")) else BF16


def _bf16_section(ds_config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The one that DeepSpeed reads, and its name."""
    name = "bf16" if ds_config.get("bf16") is not None else "bfloat16"
    return name, section_of(ds_config, name)


def lookup(data: object, dotted: str) -> object:
    """The value of a dotted key; None where any part of it is missing."""
    for part in dotted.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _number(value: object, default: float) -> float:
    if isinstance(value, str):  # pydantic takes those that say a number
        try:
            return float(value)
        except ValueError:
            return default
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def section_of(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty where there is none, or something else in its place."""
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}
