# SPDX-License-Identifier: Apache-2.0
"""The recording half of ``fuyou verify``: a run that writes down what it computed and stops after N steps.

The command starts the user's script twice with `ENVIRONMENT` set, once as "stock" (the block is taken out
and both offloads go to the CPU tier) and once as "fuyou". Every rank writes one JSON file.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_fuyou.ds_json import Activation
from ds_fuyou.optimizer.rules import optimizer_kind
from ds_fuyou.plugin import VERIFY_VARIABLE
from ds_fuyou.state_layout import FP32
from ds_fuyou.zero.stock import is_ours

__all__ = [
    "STORAGE",
    "Verification",
    "apart",
    "own_optimizer",
    "record_backward",
    "record_step",
    "rewrite_to_stock",
]

STORAGE = "storage"
"""First part of the names of files that say where recorded processes have state."""
_SAMPLED = 64  # values of a tensor, about


@dataclass(frozen=True)
class Verification:
    """One recorded run. ``mode`` is "stock" or "fuyou"; ``folder`` takes the files, one a rank."""

    mode: str
    num_steps: int
    folder: str

    @classmethod
    def from_environment(cls) -> Verification | None:
        text = os.environ.get(VERIFY_VARIABLE)
        return cls(**json.loads(text)) if text else None

    def to_environment(self) -> dict[str, str]:
        return {VERIFY_VARIABLE: json.dumps(asdict(self))}


def rewrite_to_stock(ds_config: Any) -> None:
    """The reference: stock ZeRO-3 with optimizer and parameters in host memory."""
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    ds_config.zero_config.offload_optimizer = DeepSpeedZeroOffloadOptimizerConfig(device="cpu")
    ds_config.zero_config.offload_param = DeepSpeedZeroOffloadParamConfig(device="cpu")


def apart(activation: Activation, verification: Verification) -> Activation:
    """The block of a recorded run. Its states are in folders of their own, which it begins with nothing and leaves with
    nothing: steps of the user's that a killed run has left stay, and no run goes on from these.
    """
    paths = tuple(map(_folder_in, activation.state_paths))
    made = [path for path in paths if path not in activation.state_paths]
    with (
        contextlib.suppress(OSError),  # on another machine: what a killed run leaves is the next one's to remove
        Path(verification.folder, f"{STORAGE}.{os.getpid()}").open("a", encoding="utf-8") as file,
    ):
        file.writelines(f"{json.dumps(path)}\n" for path in made)
    own = {"nvme_path": paths or None, "resume": "off", "keep_state": False, "on_stale": "clean"}
    return replace(activation, config=activation.config.model_copy(update=own))


def _folder_in(path: str) -> str:
    """Where it cannot be made the run is given the path itself, and says why that cannot be used. It is locked, shared,
    as long as this process lives: several commands may use one path, and the last one removes it.
    """
    folder = os.path.join(path, f"fuyou-verify-{os.geteuid()}")
    try:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink:
                return folder
            os.close(fd)  # another command has removed it meanwhile
    except OSError:
        return path


def own_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """``engine._configure_optimizer``: in the reference DeepSpeed's Adam takes the place of one that the script gives,
    which stock refuses beside offloading. Both have the same groups: who changes a rate in one does in the other.
    """

    @functools.wraps(original)
    def configure(self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
        verification = Verification.from_environment()
        if verification is not None and verification.mode == "stock" and client_optimizer is not None:
            if not isinstance(client_optimizer, torch.optim.Optimizer):
                client_optimizer = client_optimizer(model_parameters)
            client_optimizer = _of_deepspeed(client_optimizer)
        return original(self, client_optimizer, model_parameters)

    return configure


def _of_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose arithmetic a run of ours has with the given one."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if type(optimizer).__name__ not in ("Adam", "AdamW", "FusedAdam"):
        return optimizer
    values = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    own: torch.optim.Optimizer = DeepSpeedCPUAdam(
        optimizer.param_groups, **values, adamw_mode=optimizer_kind(optimizer).adamw_mode
    )
    return own


def record_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``engine.backward``: notes the loss it is given."""

    @functools.wraps(original)
    def backward(self: Any, loss: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(loss, torch.Tensor):
            _record_of(self)["losses"].append(float(loss.detach()))
        return original(self, loss, *arguments, **named)

    return backward


def record_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """``engine.step``: notes the norm of every optimizer step; after the last one writes and ends the script."""

    @functools.wraps(original)
    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        before = self.global_steps
        result = original(self, *arguments, **named)
        verification = Verification.from_environment()
        if verification is not None and self.global_steps > before:
            record = _record_of(self)
            norm = self.get_global_grad_norm()
            record["norms"].append(None if norm is None else float(norm))
            record["applied"].append(bool(self.was_step_applied()))
            if len(record["norms"]) == verification.num_steps:
                _finish(self, verification)
        return result

    return step


def _record_of(engine: Any) -> dict[str, list[Any]]:
    if not hasattr(engine, "_fuyou_record"):
        engine._fuyou_record = {"losses": [], "norms": [], "applied": []}
    record: dict[str, list[Any]] = engine._fuyou_record
    return record


def _finish(engine: Any, verification: Verification) -> None:
    """Writes this rank's file and leaves the script; every rank comes here in the same step."""
    from deepspeed import comm as dist

    result: dict[str, Any] = {**_record_of(engine), "world_size": dist.get_world_size()}
    result["parameters"], result["samples"] = _digests(engine)
    if hasattr(engine.optimizer, "gradient_flow"):
        result["reduce_by"] = engine.optimizer.gradient_flow.reduce_by
        state = engine.optimizer.rank_state
        kept, stock = state.plan_input.layout.moments, state.core.kind.kept_as[1]
        result["moments"] = FP32 if kept == stock else kept  # where they are not rounded but by stock
    file = Path(verification.folder, f"{verification.mode}.{dist.get_rank()}.json")
    file.write_text(json.dumps(result), encoding="utf-8")
    for _ in range(4):  # gloo's threads keep the tensors of their last collective, and abort an ending interpreter
        dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


def _digests(engine: Any) -> tuple[dict[str, dict[str, str]], dict[str, list[float]]]:
    """By name: digests of the 16-bit parameter and, if trained, of its fp32 value and its moments; and by kind of
    tensor, some of the values of all, in order.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    trained = {param.ds_id for group in engine.optimizer.fp16_groups for param in group}
    moments = _moments(engine.optimizer)
    digests: dict[str, dict[str, str]] = {}
    samples: dict[str, list[float]] = {}

    def take(found: dict[str, str], kind: str, values: torch.Tensor) -> None:
        found[kind] = _digest(values)
        some = values.detach().reshape(-1)
        samples.setdefault(kind, []).extend(some[:: max(1, len(some) // _SAMPLED)].float().cpu().tolist())

    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found: dict[str, str] = {}
            take(found, "parameter", param.data)
        if param.ds_id in trained:
            take(found, "fp32 value", safe_get_full_fp32_param(param))
            for moment, key in moments.items():
                take(found, moment, safe_get_full_optimizer_state(param, key))
        digests[name] = found
    return digests, samples


def _moments(optimizer: Any) -> dict[str, str]:
    """By our names of the moments: the names under which this optimizer, stock or out of core, answers for them."""
    names = optimizer_kind(optimizer.optimizer).moments
    if is_ours(optimizer):
        return {name: name for name in names}
    kept = {key for state in optimizer.optimizer.state.values() for key in state}
    return {name: name if name in kept else "sum" for name in names}  # torch's Adagrad


def _digest(values: torch.Tensor) -> str:
    data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).hexdigest()
