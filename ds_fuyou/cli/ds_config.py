# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's JSON as it reads it, and what the planner takes from it: batch, accumulation, and the block around which
it plans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_fuyou.config import FuyouConfig
from ds_fuyou.ds_json import load_activation, stock_states
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.state_layout import FP32

__all__ = [
    "DeepSpeedFile",
    "DeepSpeedJson",
    "has_precision",
    "read_ds_config",
    "read_ds_file",
    "says_precision",
]


@dataclass(frozen=True)
class DeepSpeedFile:
    """A configuration as it stands in its file. ``is_json``: by the letter; else with comments and other liberties of
    Hjson, which DeepSpeed reads, and Hugging Face's programs do not.
    """

    text: str
    config: dict[str, Any]
    is_json: bool


def read_ds_file(path: Path) -> DeepSpeedFile:
    """Reads a file as DeepSpeed does.

    Raises:
        FuyouConfigError: unreadable, or no object.
    """
    is_json = True
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        try:
            config = json.loads(text)
        except ValueError as error:
            is_json, config = False, _hjson(text, error)
    except (OSError, ValueError, RecursionError) as error:
        raise FuyouConfigError(f"{path}: must be a readable JSON file, found {error}") from error
    if not isinstance(config, dict):
        raise FuyouConfigError(f"{path}: must hold a JSON object, found {type(config).__name__}")
    return DeepSpeedFile(text, config, is_json)


def _hjson(text: str, error: ValueError) -> object:
    """Whatever it cannot read either, or reads as nothing, is the ``error`` that it was as JSON."""
    import hjson

    try:
        found = json.loads(hjson.dumpsJSON(hjson.loads(text)))  # plain dictionaries
    except (ValueError, OverflowError):  # it takes 1e999 for a whole number
        raise error from None
    if not isinstance(found, dict) or not found:
        raise error
    return found


@dataclass(frozen=True)
class DeepSpeedJson:
    """None: not said, or "auto". ``has_storage``: the block has directories for state. ``is_bfloat16``: parameters are,
    as where nothing is said. ``states``: how stock would keep masters and moments.
    """

    batch: int | None
    accumulation: int | None
    block: FuyouConfig | None
    has_storage: bool = False
    is_bfloat16: bool = True
    states: tuple[str, str] = (FP32, FP32)


def read_ds_config(path: Path) -> DeepSpeedJson:
    """Reads and checks the JSON as a run would.

    Raises:
        FuyouConfigError: unreadable, or the block is wrong or cannot work with the rest.
    """
    try:
        data = read_ds_file(path).config
    except FuyouConfigError as error:
        raise FuyouConfigError(f"--config {error}") from error
    activation = load_activation(data)
    return DeepSpeedJson(
        batch=_count(path, data, "train_micro_batch_size_per_gpu"),
        accumulation=_count(path, data, "gradient_accumulation_steps"),
        block=None if activation is None else activation.config,
        has_storage=activation is not None and bool(activation.state_paths),
        is_bfloat16=has_precision(data, "bf16", "bfloat16") or not says_precision(data),
        states=stock_states(data),
    )


_PRECISIONS = ("bf16", "bfloat16", "fp16")


def says_precision(config: Mapping[str, Any]) -> bool:
    """Not so in a file that Accelerate completes."""
    return any(isinstance(config.get(name), Mapping) for name in _PRECISIONS)


def has_precision(config: Mapping[str, Any], *names: str) -> bool:
    """Whether one of these sections is enabled, or "auto"."""
    sections = [config[name] for name in names if isinstance(config.get(name), Mapping)]
    return any(section.get("enabled", False) in (True, "auto") for section in sections)


def _count(path: Path, data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise FuyouConfigError(f"--config {path}: {key} must be a whole number from 1 to 10^9, found {value!r:.100}")
    return value
