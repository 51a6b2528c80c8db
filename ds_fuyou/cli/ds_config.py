# SPDX-License-Identifier: Apache-2.0
"""What the planner takes from a DeepSpeed JSON: batch, accumulation, and the ``fuyou`` block around which it plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_fuyou.config import FuyouConfig
from ds_fuyou.ds_json import load_activation
from ds_fuyou.errors import FuyouConfigError

__all__ = ["DeepSpeedJson", "read_ds_config"]


@dataclass(frozen=True)
class DeepSpeedJson:
    """None: not said, or "auto"."""

    batch: int | None
    accumulation: int | None
    block: FuyouConfig | None


def read_ds_config(path: Path) -> DeepSpeedJson:
    """Reads and checks the JSON as a run would.

    Raises:
        FuyouConfigError: unreadable, or the block is wrong or cannot work with the rest.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FuyouConfigError(f"--config {path}: must be a readable JSON file, found {error}") from error
    if not isinstance(data, Mapping):
        raise FuyouConfigError(f"--config {path}: must hold a JSON object, found {type(data).__name__}")
    activation = load_activation(data)
    return DeepSpeedJson(
        batch=_count(path, data, "train_micro_batch_size_per_gpu"),
        accumulation=_count(path, data, "gradient_accumulation_steps"),
        block=None if activation is None else activation.config,
    )


def _count(path: Path, data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise FuyouConfigError(f"--config {path}: {key} must be a whole number from 1 to 10^9, found {value!r:.100}")
    return value
