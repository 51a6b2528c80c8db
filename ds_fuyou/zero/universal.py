# SPDX-License-Identifier: Apache-2.0
"""Loads universal checkpoints (``ds_to_universal.py``), chunk by chunk, on any number of ranks.

Stock reads each parameter whole for every key; so does this, one parameter at a time.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.optimizer.chunk_values import gather
from ds_fuyou.optimizer.layout import ParamSpan

__all__ = ["UniversalMixin"]


class UniversalMixin:
    """Overrides of stage 3's loading of universal checkpoints."""

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self: Any, checkpoint_dir: str) -> None:
        """Parameters, moments, hyperparameters by group, loss scale and bias-correction history."""
        folder = Path(checkpoint_dir, "zero")
        file = folder / "optimizer_state.pt"
        if not file.is_file():
            raise FuyouStateError(
                f"{file} is missing: convert the checkpoint with ds_to_universal.py and load its output"
            )
        saved = torch.load(file, weights_only=False, mmap=True, map_location="cpu")
        self._load_global_state_stage3(saved)
        core = self.rank_state.core
        keys = ("fp32", *core.kind.moments)
        has_moments = bool(saved[OPTIMIZER_STATE_DICT]["state"])
        reader = _ParamReader(self, folder)
        for chunk in core.layout.chunks:
            parts = [
                gather(core.layout, chunk, functools.partial(reader.read, key=key), torch.float32)
                if has_moments or key == "fp32"
                else torch.zeros(chunk.numel)
                for key in keys
            ]
            core.states.write(chunk.index, parts, parts[0].to(core.options.param_dtype))
        self._load_groups(saved[OPTIMIZER_STATE_DICT])
        self._restore_clock(saved, saved[OPTIMIZER_STATE_DICT])
        self.rank_state.step_applied()

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(
        self: Any, checkpoint_dir: str, load_from_fp32_weights: bool
    ) -> None:
        """Parameters alone: P16 from the saved fp32 values; P32 from them too, or from P16."""
        core = self.rank_state.core
        reader = _ParamReader(self, Path(checkpoint_dir, "zero"))
        for chunk, parts in core.states.read_all(range(len(core.layout.chunks))):
            values = gather(core.layout, chunk, functools.partial(reader.read, key="fp32"), torch.float32)
            params = values.to(core.options.param_dtype)
            parts[0].copy_(values if load_from_fp32_weights else params)
            core.states.write(chunk.index, parts, params)
        self.rank_state.step_applied()

    def _load_groups(self: Any, saved: dict[str, Any]) -> None:
        """Hyperparameters group by group; stock gives those of the first group to all of them."""
        groups = saved["param_groups"]
        if len(groups) != len(self.optimizer.param_groups):
            raise FuyouStateError(
                f"the checkpoint was saved with {len(groups)} parameter groups, this run has "
                f"{len(self.optimizer.param_groups)}; make them as the saving script did"
            )
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


class _ParamReader:
    """This rank's partitions out of a universal checkpoint; keeps those of the last parameter."""

    def __init__(self, optimizer: Any, folder: Path) -> None:
        self._optimizer, self._folder = optimizer, folder
        self._by_param = "param" in inspect.signature(optimizer.load_hp_checkpoint_state).parameters  # since 0.19
        self._param: Any = None
        self._values: dict[str, torch.Tensor] = {}

    def read(self, span: ParamSpan, key: str) -> torch.Tensor:
        param = self._optimizer.rank_state.param(span)
        if param is not self._param:
            self._param, self._values = param, {}
        if key not in self._values:
            name = self._optimizer.param_names[param]
            more = {"param": param} if self._by_param else {}
            values = self._optimizer.load_hp_checkpoint_state(str(self._folder / name), key, **more)
            self._values[key] = values.view(-1).to(torch.float32)
        return self._values[key]
