# SPDX-License-Identifier: Apache-2.0
"""What a commit record holds of a run beside its states, as zero/saving/training_state.py takes it: coding, formats.

[Note: formats of the state of training]
Since format 2 what the script handed over is bytes of its own, so that the rest can be read without the script, whose
classes it may hold. Format 1 had it among the rest; it is still read. A newer format is refused.
Early records of format 2 have no schedules of the data pipeline: the runs that had some made others later. Nor do they
say how many micro-batches a step had in their run's configuration. Format 3 has what modules give as extra states; who
knows format 2 alone would go on without them. Format 4 has small buffers together, without a name of their own: each by
itself took four times as long.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_fuyou.errors import FuyouStateError

__all__ = ["SMALL_BUFFERS", "SUMS_AS_BUILT", "VERSION", "TrainingRecord", "from_bytes", "raw", "text", "to_bytes"]

VERSION = 4
SMALL_BUFFERS = ""
"""Among buffers, by their names: all small ones."""
SUMS_AS_BUILT = "ds_fuyou_frozen_sums_as_built"
"""Key of a recovered checkpoint without frozen parameters, for zero/saving/frozen_base.py: what the dead run's are."""


@dataclass(frozen=True)
class TrainingRecord:
    """Decoded.

    Attributes:
        counters: of the engine, by its own names.
        generators: states of random generators: "torch", "device", "python", "numpy", as far as they were recorded.
        scheduler: ``(state_dict,)`` of the learning-rate scheduler, None if there was none.
        schedules: states of the data pipeline's, by the names that a checkpoint has for them.
        scaler: loss scaler, whether it is dynamic.
        groups: hyperparameters of the parameter groups.
        buffers: those of the model's that were recorded.
        extra: what its modules gave as extra states, by the names that a state dictionary has for them.
        accumulation: micro-batches a step as the run was configured, which counters of them go by; None if not known.
        frozen: a digest of the frozen parameters as the script had built them, on every rank; None if not known.
    """

    counters: Mapping[str, int]
    generators: Mapping[str, bytes]
    scheduler: tuple[Any] | None
    schedules: Mapping[str, Any]
    scaler: tuple[Any, bool]
    groups: Sequence[Mapping[str, Any]]
    buffers: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    accumulation: int | None
    frozen: str | None
    _client: bytes | None
    _client_of_format_1: object = None

    @classmethod
    def decode(cls, taken: Mapping[str, Any]) -> TrainingRecord:
        """Raises FuyouStateError if a newer version of this package took it."""
        if taken["version"] > VERSION:
            raise FuyouStateError(
                f"the state of training is of format {taken['version']}, {VERSION} is known; use the ds_fuyou that "
                "wrote it"
            )
        parts = from_bytes(raw(taken["pickled"]))
        client = parts["client"]
        return cls(
            counters=taken["counters"],
            generators={name: raw(state) for name, state in taken["generators"].items()},
            scheduler=parts["scheduler"],
            schedules=parts.get("schedules", {}),
            scaler=parts["scaler"],
            groups=parts["groups"],
            buffers=_buffers_in(parts["buffers"]),
            extra=parts.get("extra", {}),
            accumulation=taken.get("accumulation"),
            frozen=taken.get("frozen"),
            _client=client if taken["version"] > 1 else None,
            _client_of_format_1=client if taken["version"] == 1 else None,
        )

    def client(self) -> Any:
        """What the script handed over. Raises what unpickling does where its classes are not at hand."""
        return self._client_of_format_1 if self._client is None else from_bytes(self._client)

    def generator_states(self) -> dict[str, Any]:
        """As the generators' own functions take them."""
        found: dict[str, Any] = {}
        for name, state in self.generators.items():
            found[name] = from_bytes(state) if name in ("python", "numpy") else byte_tensor(state)
        return found


def _buffers_in(kept: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    found = {name: from_bytes(data) for name, data in kept.items() if name != SMALL_BUFFERS}
    return {**from_bytes(kept[SMALL_BUFFERS]), **found} if SMALL_BUFFERS in kept else found


def to_bytes(value: object) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


def from_bytes(data: bytes) -> Any:
    """Whoever can write the state files is the user whose process this is: they are 0600 in directories of 0700."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def raw(written: str) -> bytes:
    return base64.b64decode(written)
