# SPDX-License-Identifier: Apache-2.0
"""The ``fuyou`` block of the DeepSpeed JSON.

`load_block` turns a DeepSpeed configuration into a `FuyouConfig`, or into None when the block is absent
or switched off. Every value may be the string "auto", which means the default; where the default is
itself "auto", the planner decides. What the surrounding DeepSpeed JSON says about offloading is taken in
by `ds_fuyou.ds_json`, not here. docs/settings.md is generated from this file.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from ds_fuyou.errors import FuyouConfigError, shown
from ds_fuyou.log import log_once
from ds_fuyou.planner.applied import completed_block, planned_shares
from ds_fuyou.planner.document import CLASSES, PlanDocument, is_document, parse
from ds_fuyou.storage.types import PAGE_BYTES

__all__ = [
    "BLOCK_KEY",
    "ActivationSettings",
    "CheckpointSettings",
    "FuyouConfig",
    "GradientSettings",
    "IoEngineSettings",
    "OptimizerSettings",
    "ParameterSettings",
    "PlanOverrides",
    "ResidentShares",
    "load_block",
    "misspelt_block_keys",
    "parse_bytes",
    "paths_of_section",
]

BLOCK_KEY = "fuyou"
_BYTE_UNITS = {"": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_BYTE_UNITS["b"] = 1
_MOST_DIGITS = 40  # of a size in text: what follows could only make it larger than anything
_MOST_SHOWN = 200
_MOST_CHUNK_BYTES = 2**33  # of fp32; elements of a chunk have numbers of 32 bits on storage (``Joint``), with a margin
_MOST_BYTES = 2**62  # nothing is larger, and sums of a few still fit what the kernel takes


def parse_bytes(value: object) -> int:
    """Bytes from a positive whole number or from text such as "64GB" (10^9), "64GiB" (2^30) or "1.1GiB" (rounded down).

    Raises:
        ValueError: anything else; the message says what was found.
    """
    number: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match and match[2] in _BYTE_UNITS:
            unit = _BYTE_UNITS[match[2]]
            number = float(match[1][:_MOST_DIGITS]) * unit if "." in match[1] else int(match[1][:_MOST_DIGITS]) * unit
            number = int(number)
    if isinstance(number, (int, float)) and number > _MOST_BYTES:
        raise ValueError("must be below 4 EiB")
    if number is None or not number > 0 or number != int(number):
        raise ValueError('must be "auto", a positive number of bytes, or text like "64GB" or "512MiB"')
    return int(number)


def _parse_budget(value: object) -> object:
    """One that holds at least a page: a smaller number was meant in other units."""
    budget = value if value == "auto" else parse_bytes(value)
    if isinstance(budget, int) and budget < PAGE_BYTES:
        meant = f'; {budget} bytes? Write "{budget}GiB"' if value == budget else ""
        raise ValueError(f"must be at least {PAGE_BYTES} bytes{meant}")
    return budget


def _parse_block(value: object) -> int:
    num_bytes = parse_bytes(value)
    if num_bytes % PAGE_BYTES or num_bytes > 2**30:
        raise ValueError(f"must be a multiple of {PAGE_BYTES}, 1 GiB at most")
    return num_bytes


def _parse_chunk(value: object) -> int:
    num_bytes = parse_bytes(value)
    if num_bytes > _MOST_CHUNK_BYTES:
        raise ValueError("must be 8 GiB at most; a few MiB are enough, and leaving it out has them planned")
    if num_bytes < PAGE_BYTES:
        raise ValueError(f"must be at least {PAGE_BYTES} bytes; leaving it out has it planned")
    return num_bytes


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be made of printable characters")
    return value


_PLACEHOLDERS = {"rank": ("RANK",), "local_rank": ("LOCAL_RANK",), "node": ("CROSS_RANK", "GROUP_RANK", "SLURM_NODEID")}
"""Placeholders of a path and the variables that launchers (deepspeed, torchrun, Slurm) set for them."""


def _of_this_rank(path: str) -> str:
    """``$NAME`` and ``${NAME}`` from the environment; ``{rank}``, ``{local_rank}``, ``{node}``; ``{host}``."""
    for name, variables in _PLACEHOLDERS.items():
        found = [os.environ[variable] for variable in variables if os.environ.get(variable)]
        path = re.sub(rf"(?<!\$)\{{{name}\}}", found[0] if found else "0", path)
    path = re.sub(r"(?<!\$)\{host\}", socket.gethostname(), path)
    unset = [name for name in re.findall(r"\$\{?(\w+)", path) if name not in os.environ]
    if unset:
        raise ValueError(f"must name environment variables that are set; not set: {', '.join(unset)}")
    return os.path.expandvars(path)


def _as_paths(value: object) -> object:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) and path for path in paths):
        raise ValueError("must be a path or a list of paths")
    for path in paths:
        _printable(path)
    expanded = tuple(os.path.abspath(os.path.expanduser(_of_this_rank(path))) for path in paths)
    if not expanded:
        raise ValueError("must name at least one path; leave the key out to use the offload sections' path")
    if len(set(expanded)) != len(expanded):
        raise ValueError("must not name a path twice; list each storage device once")
    return expanded


Tier = Literal["auto", "cpu", "nvme"]
ByteBudget = Annotated[int | Literal["auto"], BeforeValidator(_parse_budget)]
ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
ChunkBytes = Annotated[int, BeforeValidator(_parse_chunk)]
BlockBytes = Annotated[int, BeforeValidator(_parse_block)]
FileName = Annotated[str, AfterValidator(_printable)]
Paths = Annotated[tuple[str, ...], BeforeValidator(_as_paths)]
Threads = Annotated[int, Field(ge=1, le=4096)]
QueueDepth = Annotated[int, Field(ge=1, le=4096)]
Weight = Annotated[int, Field(ge=1, le=10**9)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Settings(BaseModel):
    """Common rules: frozen, strictly typed, and "auto" stands for the default of any key that gives it no meaning."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=False)

    @model_validator(mode="before")
    @classmethod
    def _auto_means_default(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value != "auto" or cls._means_something(key)}

    @classmethod
    def _means_something(cls, key: object) -> bool:
        """Whether "auto" is a value of its own for a key, beside another default."""
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is not None and "auto" in get_args(field.annotation)


class ParameterSettings(_Settings):
    """Where the 16-bit parameters (P16) live between uses."""

    tier: Tier = Field("auto", description="Home of P16: host memory, storage, or as the plan decides.")


class OptimizerSettings(_Settings):
    """Where the fp32 parameters and moments live, and when they are updated."""

    tier: Tier = Field("auto", description="Home of P32 and the moments.")
    overlap: Literal["none", "backward", "backward_and_forward"] = Field(
        "backward_and_forward",
        description="What updates may run beside: nothing (all inside `step()`), backward, or backward and "
        "the next forward (each chunk is ready before the forward that reads it). Results are the same.",
    )
    clip_policy: Literal["auto", "defer", "speculate"] = Field(
        "auto",
        description="How a clip factor or an overflow that is known only after backward is honoured exactly: "
        "`defer` starts updates then, `speculate` starts them in backward and redoes those it must. `auto` starts them "
        "in backward unless many had to be redone lately, or the plan finds a step clearly shorter without.",
    )
    masters: Literal["auto", "whole", "split"] = Field(
        "auto",
        description="How P32 on storage is kept. `whole`: fp32. `split`: as 16 lower bits, which P16 completes, so "
        "fewer bytes move, and every value is the same to the bit; it needs bfloat16 parameters and `checksum`. "
        "`auto`: `split` where that is so, except where checkpoints of fp32 moments share blocks with the state files "
        "(XFS, Btrfs; not with `durable`, `resume` or `keep_state`). A run that goes on from state files keeps theirs.",
    )
    moments: Literal["fp32", "bf16", "int8"] = Field(
        "fp32",
        description="How moments are kept between steps, wherever they are. `fp32`: as stock has them. `bf16`, `int8` "
        "(codes with a scale for each 256): rounded after every update, so fewer bytes move and lie in memory; results "
        "are near stock's, not equal. For Adam and Lion.",
    )


class GradientSettings(_Settings):
    """Where the gradients wait until `step()` has validated them, and how they are reduced."""

    tier: Tier = Field("auto", description="Home of G16, and of the accumulator when accumulating.")
    reduce_by: Literal["auto", "bucket", "block"] = Field(
        "auto",
        description="Which gradients are reduced over the ranks together. `bucket`: as many as `reduce_bucket_size` "
        "holds, as in stock, so that sums equal stock's on any number of ranks; updates of a bucket start when it is "
        "full. `block`: a block's, so that its updates start in backward; on more than two ranks the last bit of a sum "
        "may differ from stock's. `auto`: `block` on one and two ranks, where sums are the same, `bucket` on more.",
    )


class ActivationSettings(_Settings):
    """What happens to activations saved for backward."""

    tier: Tier = Field("auto", description="Home of swapped activations.")
    mode: Literal["auto", "none", "swap", "recompute"] = Field(
        "auto",
        description="Leave activations alone, swap them, recompute whole blocks, or decide for each operator's output.",
    )
    block_classes: list[str] | None = Field(
        None, description="Class names of the repeated blocks; found in the model when not given."
    )


class IoEngineSettings(_Settings):
    """How storage is reached."""

    engine: Literal["auto", "io_uring", "threads"] = Field(
        "auto", description="`auto` is io_uring where the kernel allows it, a thread pool otherwise."
    )


class ResidentShares(_Settings):
    """Shares of the classes in host memory, 0 to 1, where `tier` is "auto"; the rest lives on storage.

    Whole chunks stay: of states and gradients those that the next forward needs first, of parameters, frozen ones
    included, as many of any stretch of the model as of all.
    """

    parameters: Share | None = Field(None, description="Of P16.")
    optimizer: Share | None = Field(None, description="Of P32 and the moments.")
    gradients: Share | None = Field(None, description="Of G16.")
    frozen: Share | None = Field(None, description='Of frozen parameters, where `parameters.tier` is "auto".')
    optimizer_twice: Share | None = Field(
        None,
        description="Share of all P32 and moments (at most that of `optimizer`) of which host memory has two versions, "
        "so that their updates begin in backward.",
    )

    def given(self) -> dict[str, float]:
        """The shares that are set, by class."""
        return self.model_dump(exclude_none=True)


class PlanOverrides(_Settings):
    """Single values of the plan, set by hand; each one not given is planned."""

    chunk_bytes: ChunkBytes | None = Field(None, description="Largest P32 of one chunk, in bytes, 4096 to 8 GiB.")
    staging_bytes: ByteCount | None = Field(None, description="Host memory for chunks in flight, in bytes.")
    prefetch_bytes: ByteCount | None = Field(
        None, description="P16 read ahead of its use or kept for the next, in bytes."
    )
    activation_bytes: ByteCount | None = Field(
        None, description="Host memory for swapped activations on their way, and for those that stay there, in bytes."
    )
    smallest_swapped_bytes: ByteCount | None = Field(
        None, description="Saved tensors that cover fewer bytes stay on the device."
    )
    num_threads: Threads | None = Field(None, description="Threads of the CPU optimizer.")
    queue_depth: QueueDepth | None = Field(None, description="I/O requests in flight at once.")
    block_bytes: BlockBytes | None = Field(None, description="Largest single I/O request, in bytes.")
    slots: Literal[1, 2, 3] | None = Field(
        None,
        description="Slots of a chunk on storage. Three, the choice under `checkpoint.save: background` where disks "
        "have room for them and two checkpoints and all states are on storage, spread such a checkpoint over many "
        "steps.",
    )
    small_param_bytes: ByteCount | None = Field(
        None,
        description="P16 partitions on storage of fewer bytes stay in host memory once a step has read them, until "
        "they are updated: backward and further micro-batches read them no second time.",
    )
    shares: list[Weight] | None = Field(
        None,
        description="Relative share of the bytes each `nvme_path` receives, in their order. When not given: alike, or "
        "by bandwidth where paths are on several devices, which a short measurement at the start compares.",
    )
    residency: ResidentShares | None = Field(
        None,
        description="Shares of `parameters`, `optimizer` and `gradients` in host memory, 0 to 1, where their `tier` is "
        '"auto"; the rest lives on storage.',
    )
    _document: PlanDocument | None = PrivateAttr(default=None)

    @property
    def document(self) -> PlanDocument | None:
        """The plan document that these values came in, if they did."""
        return self._document

    def resident_shares(self) -> dict[str, float]:
        """Shares that are set, by class."""
        return self.residency.given() if self.residency is not None else {}


class CheckpointSettings(_Settings):
    """How checkpoints are written."""

    save: Literal["blocking", "background"] = Field(
        "blocking",
        description="`background`: `save_checkpoint` returns as soon as it is fixed what is saved; the folder appears, "
        "and `latest` with it, when it is whole, some steps later. `engine.fuyou_wait_checkpoint()`, called by "
        "every rank, waits for that. Scripts that touch the folder right after the call, or delete older checkpoints "
        "then, need `blocking`.",
    )
    frozen: Literal["auto", "save", "leave_out"] = Field(
        "auto",
        description="Whether checkpoints hold parameters that are not trained. `auto`: all but the base of PEFT's "
        "adapters, where the base is what the script built: a run that loads the checkpoint builds it again. "
        "`leave_out`: none, whatever they are. `save_checkpoint(exclude_frozen_parameters=True)` leaves them out under "
        "any of these.",
    )


class FuyouConfig(_Settings):
    """The block itself."""

    enabled: bool = Field(True, description="`false`: as if the package were not installed.")
    nvme_path: Paths | None = Field(
        None,
        description="Directory, or list of directories striped over. Default: the `nvme_path` of the "
        "`offload_optimizer` and `offload_param` sections. Every rank makes a state directory of its own in it. "
        "Where nodes or ranks use other disks: `$NAME` is taken from the environment of the rank, `{host}`, `{node}`, "
        "`{rank}` and `{local_rank}` are replaced.",
    )
    dram_budget_bytes: ByteBudget = Field(
        "auto",
        description="Host memory this rank may use. `auto`: 80 % (where device and host share one memory 40 %) of what "
        "is free when the engine is built, or what the tightest control group leaves, divided equally among the ranks "
        "of this machine; all ranks plan with the smallest result.",
    )
    gpu_budget_bytes: ByteBudget = Field(
        "auto",
        description="Device memory this rank may use; `activations.mode: auto` fills it, and what is left bounds the "
        "parameters that stay between micro-batches, and swapped activations that have not left the device. Default: "
        "90 % of what others leave of the device, and no swapping where the device is the host.",
    )
    nvme_budget_bytes: ByteBudget = Field("auto", description="Storage this rank may use.")
    parameters: ParameterSettings = ParameterSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    gradients: GradientSettings = GradientSettings()
    activations: ActivationSettings = ActivationSettings()
    io: IoEngineSettings = IoEngineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    checksum: bool = Field(
        True,
        description="Compare what is read back from storage with what was written there: P32 and moments by the "
        "chunk, the rest by the page of 4 KiB (8 bytes of host memory each): P16, G16, frozen parameters, swapped "
        "activations; what a run goes on from, and states that `fuyou recover` takes out, by the commit record; "
        "and what a checkpoint is loaded from, by the sums in its files.",
    )
    trace: FileName | None = Field(
        None,
        description="File to write a lane trace to (opens in Perfetto), when the run ends: its first 300,000 spans. "
        "Ranks but the first write `FILE.rankN`.",
    )
    keep_state: bool = Field(
        False,
        description="Leave the state files in place after a clean end, too: a run with `resume` goes on from them, and "
        "`fuyou recover` makes a checkpoint of them, or takes their fp32 weights out.",
    )
    durable: bool = Field(
        False,
        description="Plan only placements in which every step survives a kill: P32 and the moments of all parameters "
        "on storage (`optimizer.tier` becomes `nvme`), two slots, or an error where the disks have no room for them. "
        "The plan's lines, and `fuyou plan`, say what that costs a step.",
    )
    resume: Literal["off", "auto"] = Field(
        "off",
        description="`auto`: a run that finds in `nvme_path` the state files of the same model and world, left "
        "by one that was killed or kept by `keep_state`, goes on from their last step, in place: parameters, moments, "
        "counters, scheduler and random states are those after it. One that finds none begins; one that finds steps "
        "of this model and cannot go on from them (a setting changed, a process uses them) ends with an error.",
    )
    on_stale: Literal["report", "clean"] = Field(
        "report",
        description="What a start does with state files that dead runs left in `nvme_path`, and that it does not go on "
        "from: name them, or remove those of the same user, model and ranks that no process uses and `keep_state` did "
        "not keep. With `resume: auto` those alone that hold nothing to go on from (no step was made, or its states "
        "were in host memory): from others another engine, or another start, may.",
    )
    random_states: Literal["torch", "all"] = Field(
        "torch",
        description="Which random generators a step's commit record holds: PyTorch's (host and device), or Python's "
        "and NumPy's, too.",
    )
    plan: PlanOverrides | None = Field(
        None,
        description="Expert values, or a plan that `fuyou plan --out` saved: an object, or the path of its JSON file.",
    )

    @property
    def relies_on_slots(self) -> bool:
        """Somebody will go on from what is in slots: nothing may keep a commit from being written."""
        return self.durable or self.resume == "auto" or self.keep_state


def load_block(ds_config: Mapping[str, Any]) -> FuyouConfig | None:
    """The validated block of a DeepSpeed configuration; None if absent, null or ``enabled: false``.

    Nothing but ``enabled`` is looked at when that is false. A top-level key that looks like a misspelt
    block is warned about once.

    Raises:
        FuyouConfigError: with the dotted path of every offending key, what was found, what fits.
    """
    for key in misspelt_block_keys(ds_config):
        log_once(
            logging.WARNING,
            f'the DeepSpeed configuration has a top-level key "{key}", which nothing reads; '
            f'if the ds_fuyou block is meant, spell it "{BLOCK_KEY}"',
        )
    block = ds_config.get(BLOCK_KEY)
    if block is None:
        return None
    if not isinstance(block, Mapping):
        raise FuyouConfigError(
            f'"{BLOCK_KEY}" must be an object such as {{"enabled": true, "nvme_path": "/nvme"}}, found {_shown(block)}'
        )
    if block.get("enabled") is False:
        return None
    block = dict(block)
    _refuse_unknown_keys(block, FuyouConfig, BLOCK_KEY)
    block["plan"], document = _load_plan(block.get("plan"))
    if document is not None:
        shares = ResidentShares(**planned_shares(block, document))
        block = completed_block(block, document)
        block["plan"] = block["plan"].model_copy(update={"residency": shares})
    config: FuyouConfig = _validated(FuyouConfig, block, BLOCK_KEY)
    _refuse_two_homes(config)
    return _durable(config) if config.durable else config


def _durable(config: FuyouConfig) -> FuyouConfig:
    """With all states on storage. FuyouConfigError where another key says otherwise."""
    where, plan = f"{BLOCK_KEY}.durable", config.plan
    if config.optimizer.tier == "cpu" or (plan is not None and plan.resident_shares().get("optimizer")):
        raise FuyouConfigError(
            f"{where}: P32 and the moments must be on storage, and {BLOCK_KEY}.optimizer.tier or the plan has them in "
            f'host memory; leave that out, or set optimizer.tier to "nvme"'
        )
    if plan is not None and plan.slots == 1:
        raise FuyouConfigError(f"{where}: a chunk must have two slots, and {BLOCK_KEY}.plan.slots is 1; leave it out")
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"tier": "nvme"})})


def _refuse_two_homes(config: FuyouConfig) -> None:
    shares = config.plan.resident_shares() if config.plan is not None else {}
    for name in CLASSES:
        tier = getattr(config, name).tier
        if tier != "auto" and name in shares:
            raise FuyouConfigError(
                f'{BLOCK_KEY}.{name}.tier is "{tier}" and {BLOCK_KEY}.plan.residency.{name} is {shares[name]:g}; '
                f'leave one of them out ("nvme" is a share of 0, "cpu" of 1)'
            )


def misspelt_block_keys(ds_config: Mapping[str, Any]) -> list[str]:
    """Top-level keys that are probably meant to be the block (other case, swapped letters, prefixes)."""
    return [
        key
        for key in ds_config
        if isinstance(key, str)
        and key != BLOCK_KEY
        and difflib.get_close_matches(key.lower(), [BLOCK_KEY], n=1, cutoff=0.75)
    ]


def _load_plan(plan: object) -> tuple[object, PlanDocument | None]:
    """Reads the file when `plan` is a path; checks the keys of the object either way. A plan document is taken
    apart: its settings are the overrides.
    """
    where = f"{BLOCK_KEY}.plan"
    if plan is None or plan == "auto":
        return None, None
    if isinstance(plan, str):
        where += f" ({plan[:_MOST_SHOWN]})"
        try:
            with open(os.path.expanduser(plan), encoding="utf-8-sig") as file:
                plan = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise FuyouConfigError(
                f"{where}: must be a readable JSON file, found {str(error)[:_MOST_SHOWN]}; "
                f"give an inline object or fix the path"
            ) from error
    if not isinstance(plan, Mapping):
        raise FuyouConfigError(f"{where}: must be an object or the path of a JSON file, found {_shown(plan)}")
    document = None
    if is_document(plan):
        try:
            document = parse(plan)
        except FuyouConfigError as error:
            raise FuyouConfigError(f"{where}: {error}") from error
        plan, where = document.settings, f"{where}.settings"
        if "residency" in plan:
            raise FuyouConfigError(f"{where}.residency: must stand beside settings in a plan document, not in them")
    _refuse_unknown_keys(plan, PlanOverrides, where)
    overrides: PlanOverrides = _validated(PlanOverrides, plan, where)
    overrides._document = document
    return overrides, document


def _refuse_unknown_keys(data: Mapping[str, Any], model: type[_Settings], where: str) -> None:
    unknown = list(_unknown_keys(data, model, where))
    if unknown:
        raise FuyouConfigError("; ".join(unknown))


def _unknown_keys(data: Mapping[str, Any], model: type[_Settings], where: str) -> Iterator[str]:
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            near = difflib.get_close_matches(str(key).lower(), model.model_fields, n=1, cutoff=0.5)
            if key == "states" and "optimizer" in model.model_fields:
                near = ["optimizer"]
            hint = f'did you mean "{where}.{near[0]}"?' if near else ""
            name = str(key)[:_MOST_SHOWN]
            yield f"{where}.{name}: unknown key; {hint or 'valid keys are ' + ', '.join(model.model_fields)}"
        elif isinstance(value, Mapping):
            section = _section_of(field.annotation)
            if section is not None and section is not PlanOverrides:
                yield from _unknown_keys(value, section, f"{where}.{key}")


def _section_of(annotation: object) -> type[_Settings] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, _Settings):
            return candidate
    return None


def _validated(model: type[_Settings], data: object, where: str) -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise FuyouConfigError("; ".join(_explained(error, where))) from error


def paths_of_section(where: str, value: str) -> tuple[str, ...]:
    """What ``nvme_path`` of an offload section names, by the rules of the block's.

    Raises:
        FuyouConfigError: nothing that can be a path.
    """
    paths: tuple[str, ...] = _validated(FuyouConfig, {"nvme_path": value}, where).nvme_path
    return paths


def _explained(error: ValidationError, where: str) -> Iterator[str]:
    """One line a wrong value: dotted path, what must hold, what was found."""
    told = set()
    for item in error.errors(include_url=False, include_context=False):
        path = where
        for part in item["loc"]:
            if isinstance(part, int):
                path += f"[{part}]"
            elif part in _ALL_KEYS:  # the others name a member of a union
                path += f".{part}"
        if path in told:  # a union reports once for each member
            continue
        told.add(path)
        if item["type"] == "model_type":
            section = _section_at(item["loc"])
            must = "must be an object" + (f" with any of {', '.join(section.model_fields)}" if section else "")
        elif item["type"] == "bool_type":
            must = "must be true or false"
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            must = message if message.startswith("must ") else f"must be {message}"
        yield f"{path}: {must}; found {_shown(item['input'])}"


def _section_at(loc: Sequence[int | str]) -> type[_Settings] | None:
    """The section that is missing where an object was wanted."""
    fields = (model.model_fields.get(str(loc[-1])) for model in (FuyouConfig, PlanOverrides))
    return next((_section_of(field.annotation) for field in fields if field is not None), None)


_ALL_KEYS = frozenset(key for model in _Settings.__subclasses__() for key in model.model_fields)


def _shown(value: object) -> str:
    return f"{shown(value, _MOST_SHOWN)} ({type(value).__name__})"
