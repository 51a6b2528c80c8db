# SPDX-License-Identifier: Apache-2.0
"""A run as the state files have it that it goes on from.

[Note: who decides] Files say where P16 and G16 of every chunk are, how large chunks are, and how masters are kept.
None of that changes a bit, and what a run would choose by itself depends on memory that is free when it starts. So what
files have is taken, as far as the block does not say otherwise (tiers, shares, ``chunk_bytes``) and host memory holds
it; lanes are planned anew. Moments of other bits are other numbers: those the block alone decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from deepspeed import comm as dist

from ds_fuyou.errors import FuyouConfigError, FuyouStateError, shown
from ds_fuyou.optimizer.layout import FlatLayout
from ds_fuyou.optimizer.placement import grad_region, param_region, state_region
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.planner.document import Residency
from ds_fuyou.planner.plan import CHUNK_BYTES, MIB, TWICE, resident_bytes
from ds_fuyou.planner.profiled import expert_values, placed
from ds_fuyou.state_layout import BF16, FP32, SPLIT, WHOLE, StateLayout
from ds_fuyou.storage.types import RegionSpec
from ds_fuyou.zero.run.run_design import RunDesign, laid_out

__all__ = ["design_in", "tell_taken"]

logger = logging.getLogger("ds_fuyou")


def design_in(own: RunDesign, contents: Mapping[str, Any], regions: Mapping[str, RegionSpec], engine: int) -> RunDesign:
    """As files with these ``contents`` and ``regions`` have it; ``own`` is what the run would do by itself, ``engine``
    its number. The same on all ranks, whose files are alike. No collective.

    Raises:
        FuyouStateError: the run cannot go on from such files: why.
    """
    cut = replace(own, given=replace(own.given, layout=_layout_of(own, contents.get("states"))))
    sizes, cut = _cut_as(cut, contents, engine)
    residency = _residency_in(cut.layout, regions)
    shares = {
        "parameters": cut.layout.share_of(residency.params),
        "optimizer": 0.0,
        "gradients": cut.layout.share_of(residency.grads),
    }
    _require_wanted(cut, shares)
    found = _planned(replace(cut, taken=residency), shares, sizes)
    if found.plan.slots < 2 or not any(
        {region.name: region for region in found.regions(num_slots)} == regions for num_slots in (2, 3)
    ):
        raise FuyouStateError("it was made with other slots, or holds other regions than this run has")
    return found


def tell_taken(own: RunDesign, found: RunDesign) -> None:
    """On rank 0: what the files decided otherwise."""
    if dist.get_rank() != 0:
        return
    if found.given.layout.masters != own.given.layout.masters:
        logger.info("masters stay %s, as in the files that this run goes on from", found.given.layout.masters)
    if found.residency != own.residency or found.layout != own.layout:
        shares = found.plan.residency
        logger.info(
            "chunks stay as in the files that this run goes on from: %.0f %% of P16 and %.0f %% of G16 are in host "
            "memory, P32 and moments on storage",
            100 * shares.parameters,
            100 * shares.gradients,
        )


def _layout_of(own: RunDesign, said: Any) -> StateLayout:
    """Of states, as files say it."""
    ours = own.given.layout
    for masters in (ours.masters, *_other_masters(own, ours.masters)):
        layout = replace(ours, masters=masters)
        if said == layout.said:
            return layout
    raise FuyouStateError(_other_layout(said, ours.said))


def _other_masters(own: RunDesign, masters: str) -> Iterator[str]:
    """Those that files may have, beside the run's own."""
    if masters == SPLIT:
        yield WHOLE
    elif masters == WHOLE and own.model.param_dtype is torch.bfloat16 and own.model.activation.config.checksum:
        yield SPLIT


def _other_layout(found: Any, wanted: Any) -> str:
    """Moments of other bits are other moments: what a run rounds it goes on to round, and what it does not it must not
    begin to, unless somebody says so.
    """
    theirs, ours = (_said(layout, "moment_type", FP32) for layout in (found, wanted))
    if theirs != ours and _said(wanted, "masters", WHOLE) == shown(BF16, 20):
        return f"its moments are {theirs}, and bf16.bf16_optimizer_states with fuyou.optimizer.moments says {ours}"
    if theirs != ours:
        return (
            f"its moments are {theirs}, and fuyou.optimizer.moments says {ours}: say {theirs} to go on from it, or "
            f"make a checkpoint of it with fuyou recover, which is loaded under any"
        )
    masters = _said(found, "masters", WHOLE)
    return (
        f"its masters are {masters} (split ones need bfloat16 parameters and fuyou.checksum, bf16 ones "
        f"bf16.bf16_master_weights_and_grads), or its optimizer is of another kind"
    )


def _said(layout: Any, name: str, otherwise: str) -> str:
    return shown(layout.get(name, otherwise) if isinstance(layout, Mapping) else otherwise, 20)


def _cut_as(own: RunDesign, contents: Mapping[str, Any], engine: int) -> tuple[list[int], RunDesign]:
    """With chunks as the files have them, and from which sizes they follow, of those that a plan may choose, the
    largest first: smaller ones leave more memory. Whether what is frozen is as it was is looked at when the engine is
    built; older files do not say its shapes.
    """
    given = expert_values(own.model.activation.config).get("chunk_bytes")
    tried: dict[FlatLayout, list[int]] = {}
    for chunk_bytes in (given,) if given is not None else CHUNK_BYTES:
        tried.setdefault(laid_out(own.model, chunk_bytes), []).append(chunk_bytes)
    for layout, sizes in tried.items():
        design = replace(own, layout=layout)
        if {**contents, "shapes": ""} == {**design.contents(engine), "shapes": ""}:
            return sizes, design
    raise FuyouStateError(
        "its dtype, optimizer or groups are others, or its parameters are cut into other chunks (chunk_bytes)"
    )


def _residency_in(layout: FlatLayout, regions: Mapping[str, RegionSpec]) -> ChunkResidency:
    def in_memory(region_of: Callable[[int], str]) -> tuple[bool, ...]:
        return tuple(region_of(chunk.index) not in regions for chunk in layout.chunks)

    states = in_memory(state_region)
    if any(states):
        raise FuyouStateError(f"P32 and moments of {sum(states)} chunks are not in it")
    return ChunkResidency(in_memory(param_region), states, in_memory(grad_region), states)


def _require_wanted(own: RunDesign, shares: Mapping[str, float]) -> None:
    """What the block fixes is as it says; a share of it to a chunk or two."""
    fixed, layout = own.given.fixed_shares(), own.layout
    near = 2 * max(chunk.numel for chunk in layout.chunks) / layout.numel
    if fixed.get("optimizer", 0.0) > 0:
        raise FuyouStateError("it was made with all states on storage, and this run keeps some in host memory (tiers)")
    for name, share in shares.items():
        wanted = fixed.get(name, share)
        if abs(share - wanted) > (near if 0 < wanted < 1 else 0):
            raise FuyouStateError(
                f"it was made with other tiers or shares: of {name} {100 * share:.1f} % are in host memory, not "
                f"{100 * wanted:.1f} %"
            )


def _planned(design: RunDesign, shares: Mapping[str, float], sizes: Sequence[int]) -> RunDesign:
    """With what host memory leaves to the lanes. What storage has room for is no question: the files are there."""
    config, given = design.model.activation.config, design.given
    given = replace(given.open(), shares={**given.shares, **shares, TWICE: 0.0})
    unbounded = replace(given, storage_budget_bytes=float("inf"))
    for chunk_bytes in sizes:
        overrides = {**expert_values(config), "chunk_bytes": chunk_bytes}
        with suppress(FuyouConfigError):
            decision = placed(unbounded, overrides, design.profile, design.model.accumulation, config.activations.mode)
            return replace(design, given=decision.settled(given), decision=decision)
    held = resident_bytes(given, Residency(shares["parameters"], 0.0, shares["gradients"]))
    raise FuyouStateError(
        f"of host memory it holds {held / MIB:.1f} MiB and what is on its way to storage and back, and this run may "
        f"use {given.dram_budget_bytes / MIB:.1f} MiB: free some, or set dram_budget_bytes"
    )
