# SPDX-License-Identifier: Apache-2.0
"""The planner's names of operators, found among what a block really ran.

A plan knows a block as norm, projections, attention, norm, MLP. A block that runs is a list of operators; the products
with a weight and the attention between them are landmarks, and what lies between two landmarks belongs together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_fuyou.activations.auto import Choice, Counts
from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.profile import OperatorCost

__all__ = ["by_planned_name", "planned_choice", "require_blocks"]

_WEIGHTED = frozenset({"addmm", "mm", "_addmm_activation", "linear", "mkldnn_linear", "_linear"})
_ATTENTION = frozenset({"bmm", "baddbmm", "_softmax", "_safe_softmax"})


def _short(call: OperatorCall) -> str:
    return call.operator.rsplit(".", 1)[0].split(".")[-1].split("::")[-1]


def _is_attention(call: OperatorCall) -> bool:
    name = _short(call)
    return name in _ATTENTION or "attention" in name or "attn" in name


def by_planned_name(calls: Sequence[OperatorCall]) -> dict[str, list[OperatorCall]] | None:
    """``calls`` of one block in the order of its forward, by the names of ``planner.model``; None where the block is
    neither attention between projections followed by an MLP nor an MLP alone. What comes after the last product has no
    name.
    """
    attention = [place for place, call in enumerate(calls) if _is_attention(call)]
    weighted = [place for place, call in enumerate(calls) if _short(call) in _WEIGHTED]
    before, after, projection = [-1], weighted, -1
    if attention:
        before = [place for place in weighted if place < attention[0]]
        projection, *after = [place for place in weighted if place > attention[-1]] or [-1]
    if not before or len(after) < 2:
        return None
    *up, down = after
    found: dict[str, list[OperatorCall]] = {}
    for place, call in enumerate(calls[: down + 1]):
        found.setdefault(_name(place, place in weighted, before[0], projection, up[0], down), []).append(call)
    return found


def _name(place: int, is_weighted: bool, first: int, projection: int, up: int, down: int) -> str:
    if place < first:
        return "norm_1"
    if place < projection:
        return "qkv" if is_weighted else "attention"
    if place == projection:
        return "attention_projection"
    if place < up:
        return "norm_2"
    if place == down:
        return "mlp_down"
    return "mlp_up" if is_weighted else "mlp_activation"


def require_blocks(activations: Mapping[str, Mapping[str, int]], num_blocks: int) -> None:
    """Refuses a plan's activations for a model of ``num_blocks`` if they are for another number.

    Raises:
        FuyouConfigError: with both numbers.
    """
    for name, row in activations.items():
        planned = sum(row.values())
        if planned != num_blocks:
            raise FuyouConfigError(
                f"fuyou.plan: activations.{name} is planned for {planned} blocks, the model has {num_blocks}; make a "
                f"plan for it with fuyou plan, or name its blocks in fuyou.activations.block_classes"
            )


def planned_choice(
    activations: Mapping[str, Mapping[str, int]], num_blocks: int, outputs: Mapping[OperatorCall, OperatorCost]
) -> Choice | None:
    """What a plan document says, for a model of ``num_blocks`` as many as planned; None where its names fit nothing in
    the blocks. What the plan does not name is computed again wherever anything of its block is.
    """
    rows = {
        name: Counts(swapped=row["swap"], recomputed=row["recompute"], kept=row["keep"])
        for name, row in activations.items()
    }
    named = by_planned_name(list(outputs))
    if named is None:
        return None
    found: dict[tuple[str, OperatorCall], Counts] = {}
    for name, members in named.items():
        for call in members if name in rows else ():
            found[f"{name} ({outputs[call].name})", call] = rows[name]
    inputs = rows.get("block_input", Counts(num_blocks, 0, 0))
    swapped = Counts(num_blocks - inputs.kept, 0, inputs.kept)  # an input cannot be computed again
    return Choice(num_blocks, swapped, found, swaps_outside=True)
