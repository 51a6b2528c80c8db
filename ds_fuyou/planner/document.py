# SPDX-License-Identifier: Apache-2.0
"""The plan as a JSON document: saved, loaded, compared, edited by hand. No torch.

Sections: ``model`` and ``world_size`` say what the plan is for: a run refuses one for another number of parameters or
ranks, and activations for another number of blocks (``applied.py``, ``require_blocks``); ``residency`` and
``activations`` are the decisions; ``settings`` are the block's expert values (docs/settings.md); ``predicted`` and
``machine`` explain, and nothing reads them back.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouConfigError, shown
from ds_fuyou.files import replacing
from ds_fuyou.planner.blocks import OPERATORS

__all__ = ["CLASSES", "SCHEMA", "PlanDocument", "Residency", "Subject", "is_document", "load", "parse", "save"]

SCHEMA = "ds_fuyou.plan/1"
CLASSES = ("parameters", "optimizer", "gradients")
"""Fields of :class:`Residency`, and sections of the block: what a plan places for every model."""


@dataclass(frozen=True)
class Subject:
    """The model a plan is for; ``fingerprint`` is that of its shape, whatever its name."""

    name: str
    params: int
    layers: int
    fingerprint: str


@dataclass(frozen=True)
class Residency:
    """Share of each class in host memory, 0 to 1; the rest is on storage. ``optimizer_twice``: of P32 and moments, the
    share that is there in two versions, so that updates in backward overwrite nothing.
    """

    parameters: float
    optimizer: float
    gradients: float
    frozen: float = 1.0
    optimizer_twice: float = 0.0


@dataclass(frozen=True)
class PlanDocument:
    """A plan. ``activations``: for every operator in how many blocks its output is kept, swapped, recomputed."""

    model: Subject
    world_size: int
    residency: Residency
    activations: Mapping[str, Mapping[str, int]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""
    predicted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fates(self) -> Mapping[str, Mapping[str, int]]:
        """``activations``, for a run to follow; empty where all stay on the device: a run sees for itself whether they
        fit.
        """
        keeps_all = all(counts["keep"] == self.model.layers for counts in self.activations.values())
        return {} if keeps_all else self.activations

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def is_document(data: object) -> bool:
    """Whether a JSON object means to be a plan document (and not an object of expert values)."""
    return isinstance(data, Mapping) and "schema" in data


def save(plan: PlanDocument, path: Path) -> None:
    """Writes the document; whoever reads beside it sees the old one or the new one, never half of it."""
    with replacing(path) as part:
        part.write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")


def load(path: Path) -> PlanDocument:
    """Reads a document, and checks every value.

    Raises:
        FuyouConfigError: unreadable, another schema, a key unknown or missing, or a value out of range; with the path
            of the value.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise FuyouConfigError(f"{path}: a plan must be a readable JSON file, found {error}") from error
    try:
        return parse(data)
    except FuyouConfigError as error:
        raise FuyouConfigError(f"{path}: {error}") from error


def parse(data: object) -> PlanDocument:
    """A document from JSON data. Raises FuyouConfigError as :func:`load`."""
    if not isinstance(data, Mapping):
        raise FuyouConfigError(f"a plan must be a JSON object, found {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise FuyouConfigError(
            f"schema must be {SCHEMA!r}, found {shown(data.get('schema'))}; make the plan again with this version"
        )
    body = {key: value for key, value in data.items() if key != "schema"}
    _check_keys(body, PlanDocument, "")
    model = _section(body, "model", Subject)
    if isinstance(body["residency"], Mapping):  # documents of before name a class that there is no more
        body["residency"] = {key: value for key, value in body["residency"].items() if key != "accumulators"}
    residency = _section(body, "residency", Residency)
    for name, share in residency.items():
        _share(f"residency.{name}", share)
    for name in ("params", "layers"):
        _whole(f"model.{name}", model[name])
    _whole("world_size", body["world_size"])
    activations = _activations(body["activations"], int(model["layers"]))
    for name in ("settings", "workload", "predicted"):
        if not isinstance(body.get(name, {}), Mapping):
            raise FuyouConfigError(f"{name} must be an object, found {shown(body[name])}")
    return PlanDocument(
        model=Subject(**model),
        world_size=int(body["world_size"]),
        residency=Residency(**residency),
        activations=activations,
        settings=dict(body.get("settings", {})),
        workload=dict(body.get("workload", {})),
        machine=str(body.get("machine", "")),
        predicted=dict(body.get("predicted", {})),
    )


def _check_keys(data: Mapping[str, Any], kind: type[Any], where: str) -> None:
    names = [item.name for item in fields(kind)]
    _refuse_unknown(data, names, where)
    optional = ("frozen", "optimizer_twice", "settings", "workload", "machine", "predicted")
    missing = [name for name in names if name not in data and name not in optional]
    if missing:
        raise FuyouConfigError(f"{where or 'the plan'} lacks {', '.join(missing)}")


def _refuse_unknown(data: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            hint = f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(names)}"
            raise FuyouConfigError(f"{where}{str(key)[:200]}: unknown key; {hint}")


def _section(data: Mapping[str, Any], name: str, kind: type[Any]) -> dict[str, Any]:
    section = data[name]
    if not isinstance(section, Mapping):
        raise FuyouConfigError(f"{name} must be an object, found {shown(section)}")
    _check_keys(section, kind, f"{name}.")
    return dict(section)


def _share(where: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise FuyouConfigError(f"{where} must be a number from 0 to 1, found {shown(value)}")


def _whole(where: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FuyouConfigError(f"{where} must be a whole number of at least {least}, found {shown(value)}")


def _activations(data: object, layers: int) -> dict[str, dict[str, int]]:
    if not isinstance(data, Mapping):
        raise FuyouConfigError(f"activations must be an object, found {shown(data)}")
    _refuse_unknown(data, ("block_input", *OPERATORS), "activations.")
    for name, counts in data.items():
        where = f"activations.{name}"
        if not isinstance(counts, Mapping) or set(counts) != {"keep", "swap", "recompute"}:
            raise FuyouConfigError(f"{where} must have exactly keep, swap and recompute, found {shown(counts)}")
        for fate, count in counts.items():
            _whole(f"{where}.{fate}", count, 0)
        if sum(counts.values()) != layers:
            raise FuyouConfigError(f"{where} must add up to the {layers} blocks, found {sum(counts.values())}")
    return {name: dict(counts) for name, counts in data.items()}
