# SPDX-License-Identifier: Apache-2.0
"""What a run needs to go on beside its parameters and optimizer states: taken at the end of every step, for the commit
record, and put back by a run that resumes.

Counters of the engine, the loss scaler, hyperparameters of the groups, the learning-rate scheduler, states of random
generators, persistent buffers of the model, and what the script handed over as ``engine.fuyou_client_state`` (anything
that can be pickled, as ``client_state`` of a checkpoint). Kilobytes, as a rule: it is written in every step.

[Note: what cannot be recorded]
A scheduler, or what the script handed over, may hold what pickle refuses. Training goes on then, a warning names what
it is, once, and the record says that nothing can be gone on from it; weights can be taken out all the same.

[Note: when generators are put back]
Before the first forward in training mode, not when the engine is built: scripts make their data loaders in between,
which draw seeds from the same generators.
"""

from __future__ import annotations

import base64
import io
import logging
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.log import log_once
from ds_fuyou.storage.types import JsonValue

__all__ = ["CLIENT_STATE", "TrainingState"]

CLIENT_STATE = "fuyou_client_state"
_VERSION = 1
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_LARGE_BYTES = 1 << 20


class TrainingState:
    """Of one rank. ``all_generators``: Python's and NumPy's, too, not PyTorch's alone."""

    def __init__(self, optimizer: Any, module: torch.nn.Module, *, all_generators: bool) -> None:
        self._optimizer, self._module, self._all = optimizer, module, all_generators
        self._persistent = [
            f"{prefix}.{name}" if prefix else name
            for prefix, owner in module.named_modules()
            for name in owner._buffers.keys() - owner._non_persistent_buffers_set
        ]

    # ---- taking -------------------------------------------------------------------------------------------

    def take(self, engine: Any) -> JsonValue:
        """For a record; None if it cannot be written down."""
        pickled = self._pickled(engine)
        if pickled is None:
            return None
        return {
            "version": _VERSION,
            "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
            "generators": {name: _text(state) for name, state in self._generators().items()},
            "pickled": _text(pickled),
        }

    def _pickled(self, engine: Any) -> bytes | None:
        stock = self._optimizer
        scheduler = getattr(engine, "lr_scheduler", None)
        state_dict = getattr(scheduler, "state_dict", None)
        parts = {
            "what the script handed over (engine.fuyou_client_state)": ("client", getattr(engine, CLIENT_STATE, None)),
            "the learning-rate scheduler": ("scheduler", None if state_dict is None else state_dict()),
            "the loss scaler": ("scaler", (stock.loss_scaler, stock.dynamic_loss_scale)),
            "hyperparameters": ("groups", [_hypers(group) for group in stock.optimizer.param_groups]),
            "buffers of the model": ("buffers", self._buffers()),
        }
        try:
            found = _saved(dict(parts.values()))
        except Exception as error:  # whatever pickle and the objects' own methods raise
            self._tell_unrecorded(parts, error)
            return None
        if len(found) > _LARGE_BYTES:
            log_once(logging.WARNING, f"every step's commit record holds {len(found)} bytes: hand over less")
        return found

    def _tell_unrecorded(self, parts: Mapping[str, tuple[str, Any]], error: Exception) -> None:
        blamed = [name for name, (_, value) in parts.items() if not _can_be_saved(value)]
        log_once(
            logging.WARNING,
            f"{' and '.join(blamed) or 'the state of training'} cannot be pickled ({error}): no run can go on from "
            "this one's state files, weights alone can be recovered",
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Those that checkpoints hold."""
        buffers = dict(self._module.named_buffers()) if self._persistent else {}
        return {name: buffers[name].detach().cpu() for name in self._persistent if name in buffers}

    def _generators(self) -> dict[str, bytes]:
        found = {"torch": _bytes(torch.get_rng_state())}
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            found["device"] = _bytes(accelerator.get_rng_state())
        if self._all:
            found["python"] = _saved(random.getstate())
            found["numpy"] = _saved(numpy.random.get_state())
        return found

    # ---- putting back -------------------------------------------------------------------------------------

    def put_back(self, engine: Any, taken: Mapping[str, Any]) -> None:
        """Raises FuyouStateError if a newer version of this package took it, or this run has another scheduler."""
        if taken["version"] > _VERSION:
            raise FuyouStateError(
                f"the state of training is of format {taken['version']}, {_VERSION} is known; use the ds_fuyou that "
                "wrote it"
            )
        for name in _COUNTERS:
            setattr(engine, name, taken["counters"][name])
        parts = _loaded(_raw(taken["pickled"]))
        stock = self._optimizer
        stock.loss_scaler, stock.dynamic_loss_scale = parts["scaler"]
        for group, values in zip(stock.optimizer.param_groups, parts["groups"], strict=True):
            group.update(values)
        scheduler = getattr(engine, "lr_scheduler", None)
        if (scheduler is None) != (parts["scheduler"] is None):
            raise FuyouStateError(
                "the state files are of a run with a learning-rate scheduler, or this run has one and that had none; "
                "resume with the same configuration"
            )
        if scheduler is not None:
            scheduler.load_state_dict(parts["scheduler"])
        buffers = dict(self._module.named_buffers())
        with torch.no_grad():
            for name, values in parts["buffers"].items():
                buffers[name].copy_(values)
        setattr(engine, CLIENT_STATE, parts["client"])
        self._put_back_generators_later({name: _raw(text) for name, text in taken["generators"].items()})

    def _put_back_generators_later(self, states: Mapping[str, bytes]) -> None:
        def before(module: torch.nn.Module, _inputs: Any) -> None:
            if module.training and torch.is_grad_enabled():
                hook.remove()
                _put_back_generators(states)

        hook = self._module.register_forward_pre_hook(before, prepend=True)


def _put_back_generators(states: Mapping[str, bytes]) -> None:
    torch.set_rng_state(_tensor(states["torch"]))
    if "device" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(_tensor(states["device"]))
    if "python" in states:
        random.setstate(_loaded(states["python"]))
    if "numpy" in states:
        numpy.random.set_state(_loaded(states["numpy"]))


def _hypers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _saved(value: object) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


def _loaded(data: bytes) -> Any:
    """Whoever can write the state files is the user whose process this is: they are 0600 in directories of 0700."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _can_be_saved(value: object) -> bool:
    try:
        _saved(value)
    except Exception:
        return False
    return True


def _bytes(state: torch.Tensor) -> bytes:
    return cast("bytes", state.cpu().numpy().tobytes())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _raw(text: str) -> bytes:
    return base64.b64decode(text)
