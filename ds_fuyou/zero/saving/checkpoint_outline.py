# SPDX-License-Identifier: Apache-2.0
"""What stock's files of a checkpoint say of an engine beside its states, left with the state files when it is built: so
that ``fuyou recover`` makes them without the script.

Stock's own saving puts it together, into a writer that keeps what it is given: so it has whatever this DeepSpeed's
files have. Of parameters it has names and shapes, of buffers the values at this time; what changes from step to step
comes from the commit record (zero/saving/training_state.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.utils import logger as stock_logger

from ds_fuyou.checkpoint.training_record import text, to_bytes
from ds_fuyou.storage.types import JsonValue
from ds_fuyou.zero.saving.frozen_base import as_built

__all__ = ["outline_of"]

_VERSION = 1
_SCHEDULE = "random_ltd_scheduler"


class _Keeping:
    """In the place of a checkpoint engine."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.name = ""

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        self.state, self.name = state_dict, Path(path).name


def outline_of(engine: Any) -> dict[str, JsonValue]:
    """For :meth:`SlotStore.describe_engine`. Where none can be made it says why, as ``refused``."""
    try:
        refused, pickled = "", text(to_bytes(_outline(engine)))
    except Exception as error:  # whatever pickle and the script's own objects raise
        refused, pickled = f"what its files say cannot be pickled ({error})", ""
    return {"version": _VERSION, "refused": refused, "pickled": pickled}


def _outline(engine: Any) -> dict[str, Any]:
    writer = _Keeping()
    with _kept_by(engine, writer):
        engine._save_checkpoint("", "outline")
    stock = engine.optimizer
    module = writer.state["module"]
    for name, _ in engine.module.named_parameters(remove_duplicate=False):
        if name in module:
            module[name] = _placeholder(module[name])
    states = stock.checkpoint_state
    return {
        "model_file": writer.name,
        "optimizer_file": Path(engine._get_zero_ckpt_name("", "outline")).name,
        "model": writer.state,
        "frozen_sums": as_built(engine),
        "optimizer": stock.state_header(),
        "group_of_sub_group": states.group_of_sub_group,
        "moments": states.saved_names(),
    }


def _placeholder(param: torch.Tensor) -> torch.Tensor:
    """What stock saves of a partitioned parameter, wherever the device is."""
    return torch.empty(0, dtype=param.dtype, device="cpu")


@contextmanager
def _kept_by(engine: Any, writer: _Keeping) -> Iterator[None]:
    present, level = engine.checkpoint_engine, stock_logger.level
    engine.checkpoint_engine = writer
    lacks_schedule = engine.random_ltd_enabled() and not hasattr(engine, _SCHEDULE)
    if lacks_schedule:  # it is made later; a record has its state
        setattr(engine, _SCHEDULE, SimpleNamespace(state_dict=dict))
    engine._get_param_fragment_func = lambda param: None  # values of frozen parameters: not here
    stock_logger.setLevel(logging.WARNING)  # it says that a checkpoint is saved
    try:
        yield
    finally:
        stock_logger.setLevel(level)
        if lacks_schedule:
            delattr(engine, _SCHEDULE)
        del engine._get_param_fragment_func
        engine.checkpoint_engine = present
