# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's JSON as it reads it, and what the planner takes from it: batch, accumulation, and the block around which
it plans.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_fuyou.config import FuyouConfig
from ds_fuyou.ds_json import load_activation, lookup, may_be_on, stock_states
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.state_layout import FP32

__all__ = [
    "BYTE_ORDER_MARK",
    "BatchSizes",
    "DeepSpeedFile",
    "DeepSpeedJson",
    "has_precision",
    "param_bytes",
    "read_ds_config",
    "read_ds_file",
]

BYTE_ORDER_MARK = "\ufeff"
"""Some editors begin a file with it. DeepSpeed reads over it, Hugging Face's programs do not."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """A configuration as it stands in its file. ``is_json``: by the letter; else with comments and other liberties of
    Hjson, which DeepSpeed reads, and Hugging Face's programs do not. ``text`` begins with a byte order mark where the
    file does.
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
        content = text.removeprefix(BYTE_ORDER_MARK)
        try:
            config = json.loads(content, object_pairs_hook=_each_once)
        except _TwiceError:
            raise
        except ValueError as error:
            is_json, config = False, _hjson(content, error)
    except (OSError, ValueError, RecursionError) as error:
        raise FuyouConfigError(f"{path}: must be a readable JSON file, found {error}") from error
    if not isinstance(config, dict):
        raise FuyouConfigError(f"{path}: must hold a JSON object, found {type(config).__name__}")
    return DeepSpeedFile(text, config, is_json)


class _TwiceError(ValueError):
    """A key stands twice in one object."""


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """DeepSpeed refuses the others, too."""
    twice = [key for key, number in Counter(key for key, _ in pairs).items() if number > 1]
    if twice:
        raise _TwiceError(f"{', '.join(map(json.dumps, twice))} twice in one object")
    return dict(pairs)


def _hjson(text: str, error: ValueError) -> object:
    """Whatever it cannot read either, or reads as nothing, is the ``error`` that it was as JSON."""
    import hjson

    try:
        found = json.loads(hjson.dumpsJSON(hjson.loads(text, object_pairs_hook=_each_once)))  # plain dictionaries
    except _TwiceError:
        raise
    except (ValueError, OverflowError):  # it takes 1e999 for a whole number
        raise error from None
    if not isinstance(found, dict) or not found:
        raise error
    return found


@dataclass(frozen=True)
class BatchSizes:
    """The three that are tied: all = micro x accumulation x ranks. None: not said, or "auto", which is then another's
    to say (``is_open``: of the last two, one is).
    """

    all_ranks: int | None
    micro: int | None
    accumulation: int | None
    is_open: bool

    def of(self, ranks: int, micro: int | None, accumulation: int | None) -> tuple[int | None, int | None]:
        """Micro-batch and accumulation as DeepSpeed completes them on so many ranks; those that are given count in
        place of the JSON's.

        Raises:
            FuyouConfigError: the sizes contradict each other.
        """
        is_told = micro is not None or accumulation is not None
        micro = self.micro if micro is None else micro
        accumulation = self.accumulation if accumulation is None else accumulation
        if self.all_ranks is None or (micro is None and accumulation is None and self.is_open):
            return micro, accumulation
        if is_told and micro is not None and accumulation is not None:
            return micro, accumulation
        if micro is None:
            accumulation = accumulation or 1
            micro = self.all_ranks // ranks // accumulation
        elif accumulation is None:
            accumulation = self.all_ranks // ranks // max(1, micro)
        if micro * accumulation * ranks != self.all_ranks:
            raise FuyouConfigError(
                f"--config: {_ALL} {self.all_ranks} must be micro-batch x accumulation x ranks, found {micro} x "
                f"{accumulation} x {ranks}; --num-gpus says the ranks"
            )
        return micro, accumulation


@dataclass(frozen=True)
class DeepSpeedJson:
    """``has_storage``: the block has directories for state. ``is_bfloat16``: parameters are, as where nothing is said.
    ``states``: how stock would keep masters and moments.
    """

    batch: BatchSizes
    block: FuyouConfig | None
    has_storage: bool = False
    is_bfloat16: bool = True
    param_bytes: int = 2
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
        batch=_batch_sizes(path, data),
        block=None if activation is None else activation.config,
        has_storage=activation is not None and bool(activation.state_paths),
        is_bfloat16=has_precision(data, "bf16", "bfloat16") or not _says_precision(data),
        param_bytes=param_bytes(data),
        states=stock_states(data),
    )


_PRECISIONS = ("bf16", "bfloat16", "fp16")
_ALL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _says_precision(config: Mapping[str, Any]) -> bool:
    """Not so in a file that Accelerate completes."""
    return any(isinstance(config.get(name), Mapping) for name in _PRECISIONS)


def has_precision(config: Mapping[str, Any], *names: str) -> bool:
    """Whether one of these sections is enabled, or "auto"."""
    return any(may_be_on(lookup(config, f"{name}.enabled")) for name in names)


def param_bytes(config: Mapping[str, Any]) -> int:
    """Of each: 2, also where no precision is said, as in a file that Accelerate completes; else those of fp32."""
    return 2 if not _says_precision(config) or has_precision(config, *_PRECISIONS) else 4


def _batch_sizes(path: Path, data: Mapping[str, Any]) -> BatchSizes:
    all_ranks, micro, accumulation = (_count(path, data, key) for key in (_ALL, _MICRO, _STEPS))
    return BatchSizes(all_ranks, micro, accumulation, "auto" in (data.get(_MICRO), data.get(_STEPS)))


def _count(path: Path, data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise FuyouConfigError(f"--config {path}: {key} must be a whole number from 1 to 10^9, found {value!r:.100}")
    return value
