# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint holds the frozen parameters: not where they are the base of an adapter, as the script built it.

[Note: the base of an adapter]
A run that loads such a checkpoint has the base as its script builds it again. So "auto" leaves it out only where that
is what was trained with, as far as anybody can know:

* a module of the model has PEFT's ``peft_config``, and parameters of an adapter that it names are trained;
* every parameter that is frozen now lies in such a module, and is no adapter's (another adapter, or a part of one that
  is not trained, has values that nobody builds again);
* the adapter's making left the base as it was: PiSSA and its like subtract from it what the adapter begins with;
* none of these was an optimizer's, was edited, or got other values from a checkpoint since an engine first had it
  (``FuyouParameterSwapper.as_taken``).

If one does not fit, all are saved: stock loads all frozen parameters of a checkpoint, or none. What is left out
is left out as ``fuyou recover`` does: names stay, with the empty placeholders that ZeRO-3 saves of every parameter, so
strict loading finds them, in stock, too.

A base that is built again from other random numbers, or other weights, would be trained over without a word, by a run
that loads a checkpoint, saved or recovered, and by one that goes on from a dead run's states. So all have checksums of
the beginning of each partition (the latter two as the script had built it), where bases of other weights or other
random numbers differ, and who loads compares them. One that differs nowhere but further behind (rows that were appended
to an embedding) is not noticed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from torch.nn import Parameter

from ds_fuyou.checkpoint.crc import crc32_of, sum_of_part
from ds_fuyou.checkpoint.training_record import SUMS_AS_BUILT
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.log import log_once
from ds_fuyou.zero.agreement import of_every_rank
from ds_fuyou.zero.parameters.param_swapper import (
    FuyouParameterSwapper,
    is_what_scripts_write_to,
    partition_bytes,
    partition_of,
    swaps_here,
)

__all__ = ["SUMS", "as_built", "compare", "digest_of", "left_out", "still_as_taken", "sums_of", "watch"]

SUMS = "ds_fuyou_frozen_sums"
"""Key of a file that lacks frozen parameters: by name, elements of the rank's part and a CRC-32 of its beginning."""

_KEEP_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Of the ways by which PEFT's LoRA begins those that change nothing but the adapter."""


def watch(engine: Any) -> None:
    """The engine is built. From now on it is noted what changes the base of its adapters."""
    state = engine.optimizer.rank_state
    for param in state.model.trained:
        param.nvme_swapper.as_taken[param.ds_id] = None
        param.nvme_swapper.as_built.pop(param.ds_id, None)
    if state.activation.config.checkpoint.frozen == "auto":
        for param in _base_of(engine):
            if swaps_here(param):
                param.nvme_swapper.as_taken.setdefault(param.ds_id, _sum_of(param))


@contextmanager
def left_out(engine: Any, *, is_asked: bool) -> Iterator[bool]:
    """Inside, checkpoints of ``engine`` have no frozen parameters where the block says so. Gives True then, and where
    the caller has asked for that in stock's way (``is_asked``), by which their names are left out, too. A collective.
    """
    if is_asked or not _leaves_out(engine):
        yield is_asked
        return
    engine._get_zero_frozen_param_attributes = lambda attribute: None
    try:
        yield True
    finally:
        del engine._get_zero_frozen_param_attributes


def sums_of(engine: Any) -> dict[str, tuple[int, int]]:
    """Of frozen parameters, for :data:`SUMS`."""
    trained = {param.ds_id for param in engine.optimizer.rank_state.model.trained}
    found = {}
    for name, param in engine.module.named_parameters():
        swapper = getattr(param, "nvme_swapper", None)
        if not isinstance(swapper, FuyouParameterSwapper) or param.ds_id in trained:
            continue
        if partition_of(param) is None or swapper.parked(param) is not None:  # no other engine's, which trains it
            head, rank = swapper.head(param).detach().cpu(), dist.get_rank(param.ds_process_group)
            found[name] = sum_of_part(head, param.ds_tensor.ds_numel, param.ds_numel, rank)
    return found


def digest_of(engine: Any) -> str:
    """Of all that :func:`sums_of` says on every rank, of an engine that was just built: where one rank has another
    base, all have another digest. "" where there is nothing frozen. A collective.

    An engine that takes the place of one that failed takes what that one found, too: behind it the script may have made
    edits that it makes in every run.
    """
    found, named = sums_of(engine), dict(engine.module.named_parameters())
    for name, here in found.items():
        as_built = named[name].nvme_swapper.as_built
        number, first = as_built.get(named[name].ds_id, (None, here))
        found[name] = first if number == engine.optimizer.rank_state.number else here
        as_built[named[name].ds_id] = (engine.optimizer.rank_state.number, found[name])
    every = of_every_rank(_hash(found) if found else "")
    return _hash(every) if any(every) else ""


def as_built(engine: Any) -> dict[str, tuple[int, int]]:
    """What :func:`digest_of` has found of this rank's parts."""
    found = {}
    for name, param in engine.module.named_parameters():
        swapper = getattr(param, "nvme_swapper", None)
        if isinstance(swapper, FuyouParameterSwapper) and param.ds_id in swapper.as_built:
            number, sums = swapper.as_built[param.ds_id]
            if number == engine.optimizer.rank_state.number:
                found[name] = sums
    return found


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def compare(engine: Any, checkpoint: dict[str, Any], *, holds_frozen: bool) -> None:
    """Takes the sums out of a rank's file, and compares them with what the script has built if it lacks frozen
    parameters.

    Raises:
        FuyouStateError: a parameter that the file lacks has other values.
    """
    saved, built = checkpoint.pop(SUMS, {}), checkpoint.pop(SUMS_AS_BUILT, {})
    there: Mapping[str, Sequence[int]] = saved or built
    is_asked = engine.optimizer.rank_state.activation.config.checkpoint.frozen == "leave_out"
    if not there or holds_frozen or is_asked:
        return
    here = sums_of(engine) if saved else as_built(engine)
    both = [name for name in there if name in here and here[name][0] == there[name][0]]
    other = [name for name in both if tuple(here[name]) != tuple(there[name])]
    if other:
        raise FuyouStateError(
            f"the checkpoint holds no frozen parameters, and {len(other)} of {len(both)} that this script has built "
            f"have other values than it was trained with ({other[0]} is the first): adapters would lie over another "
            "base. Build it of the same weights, or of random numbers with the same seed, before initialize(); to load "
            'the checkpoint nevertheless set fuyou.checkpoint.frozen to "leave_out". A run whose base is another each '
            'time saves it with "save"'
        )


def _leaves_out(engine: Any) -> bool:
    key = engine.optimizer.rank_state.activation.config.checkpoint.frozen
    frozen = [p for p in engine.module.parameters() if not p.requires_grad and getattr(p, "ds_numel", p.numel())]
    if key == "save" or not frozen:
        return False
    if key == "auto":
        base = {param.ds_id for param in _base_of(engine)}
        if not base:
            return False
        others = (p for p in frozen if getattr(p, "ds_id", None) not in base or not _is_as_taken(p))
        found = of_every_rank(next((engine.param_names.get(param, "one without a name") for param in others), None))
        other = next((name for name in found if name is not None), None)
        if other is not None:
            log_once(
                logging.INFO,
                f"checkpoints have the frozen parameters: {other} is not, or not any more, of an adapter's base as the "
                'script built it (fuyou.checkpoint.frozen: "leave_out" leaves all of them out)',
            )
            return False
    log_once(
        logging.INFO,
        f"checkpoints leave out {len(frozen)} frozen parameters ({sum(map(partition_bytes, frozen)) / 1e6:.1f} MB a "
        'rank): who loads one has them as its script builds them (fuyou.checkpoint.frozen: "save" saves them)',
    )
    return True


def _base_of(engine: Any) -> list[Parameter]:
    """What adapters that are trained are laid over: see [Note: the base of an adapter]."""
    trained = {param.ds_id for param in engine.optimizer.rank_state.model.trained}
    found: dict[Parameter, None] = {}
    for module in engine.module.modules():
        configs = getattr(module, "peft_config", None)
        if not isinstance(configs, Mapping) or any(map(_changes_base, configs.values())):
            continue
        named = list(module.named_parameters(remove_duplicate=False))
        of_adapters = {param for name, param in named if not configs.keys().isdisjoint(name.split("."))}
        if any(getattr(param, "ds_id", None) in trained for param in of_adapters):
            found.update(dict.fromkeys(p for _, p in named if hasattr(p, "ds_id") and p not in of_adapters))
    return list(found)


def _changes_base(config: Any) -> bool:
    begins = getattr(config, "init_lora_weights", True)
    return (isinstance(begins, str) and begins.lower() not in _KEEP_BASE) or bool(getattr(config, "kasa_config", None))


def _is_as_taken(param: Parameter) -> bool:
    swapper = getattr(param, "nvme_swapper", None)
    known = swapper.as_taken.get(param.ds_id) if isinstance(swapper, FuyouParameterSwapper) else None
    return known is not None and known == _sum_of(param)


@contextmanager
def still_as_taken(params: Iterable[Parameter]) -> Iterator[None]:
    """Inside, these change their home, and not their values."""
    known = [*filter(_is_as_taken, params)]
    yield
    for param in known:
        param.nvme_swapper.as_taken[param.ds_id] = _sum_of(param)


def _sum_of(param: Parameter) -> int:
    """Of values that a script can change without a word; of others, whose edits are noted, 0."""
    if partition_of(param) is not None or not is_what_scripts_write_to(param):
        return 0
    values: torch.Tensor = param.ds_tensor.data.detach().cpu()
    return crc32_of(values.contiguous().view(-1))
