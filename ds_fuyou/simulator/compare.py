# SPDX-License-Identifier: Apache-2.0
"""This system beside others on one machine: what fits, how fast, what a training of so many tokens takes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.cost import Workload
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.policies import Policy
from ds_fuyou.simulator.choose import Chosen, try_choose, with_checkpointing
from ds_fuyou.simulator.fit import MEMORY_NAMES, Needs
from ds_fuyou.simulator.systems import find_policy
from ds_fuyou.units import shown_bytes

__all__ = ["COMPARED", "HEAD", "Compared", "Training", "cells", "compared", "compared_text", "worn_out"]

COMPARED = {
    "zero_3": "ZeRO-3",
    "zero_offload": "ZeRO-Offload",
    "zero_infinity": "ZeRO-Infinity",
    "ds_fuyou": "this",
}
HEAD = ("system", "tokens/s", "hours", "cost", "written", "of the warranty", "bound by, or why not")


@dataclass(frozen=True)
class Training:
    """What is asked: so many tokens, at so much an hour of the machine (0: not said)."""

    tokens: float = 1e9
    price: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= 1e18:
            raise FuyouConfigError(f"--tokens must be from 1 to 10^18, found {self.tokens:g}")
        if not 0 <= self.price <= 1e9:
            raise FuyouConfigError(f"--price must be from 0 to 10^9 an hour, found {self.price:g}")


@dataclass(frozen=True)
class Compared:
    """One system. Without ``tokens_per_s`` it does not train, and ``why`` says what lacks; else what bounds it.
    ``wear``: share of the writes that the SSDs are warranted for.
    """

    system: str
    why: str
    tokens_per_s: float = 0.0
    hours: float = 0.0
    cost: float = 0.0
    written_bytes: float = 0.0
    wear: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compared(work: Workload, machine: Machine, ours: Policy, training: Training) -> list[Compared]:
    """All of COMPARED; ``ours`` is what the user decided of this one."""
    found = []
    for name, shown in COMPARED.items():
        if name == "ds_fuyou":
            found.append(_row(shown, try_choose(work, machine, ours), training))
            continue
        # Attention, the loss and the precision are the script's, whatever trains it, and so is gradient checkpointing.
        policy = find_policy(name)
        policy = replace(
            policy,
            fused=ours.fused,
            slices_loss=ours.slices_loss,
            logit_bytes=ours.logit_bytes,
            param_bytes=ours.param_bytes,
            gradient_bytes=max(policy.gradient_bytes, ours.param_bytes),
        )
        found.append(_row(shown, try_choose(work, machine, with_checkpointing(work, machine, policy)), training))
    return found


def _row(name: str, chosen: Chosen | Needs, training: Training) -> Compared:
    if not isinstance(chosen, Chosen):
        lacking = [f"{MEMORY_NAMES[tier]} lacks {shown_bytes(lack)}" for tier, lack in chosen.missing().items()]
        return Compared(name, "does not fit: " + " and ".join(lacking))
    steps = training.tokens / chosen.work.tokens_per_step(chosen.machine.num_gpus)
    hours = training.tokens / chosen.tokens_per_s / 3600
    written = steps * chosen.written_bytes
    rated = chosen.machine.endurance_bytes
    return Compared(
        name,
        chosen.bound.label,
        chosen.tokens_per_s,
        hours,
        hours * training.price,
        written,
        written / rated if rated > 0 else None,
    )


def cells(rows: Sequence[Compared], training: Training) -> list[tuple[str, ...]]:
    """The table's cells under HEAD; a dash where there is nothing to say."""
    found: list[tuple[str, ...]] = []
    for row in rows:
        if row.tokens_per_s <= 0:
            found.append((row.system, *("-",) * 5, row.why))
            continue
        wear = "-" if row.wear is None or not row.written_bytes else _shown_wear(row.wear)
        cost = f"{row.cost:,.2f}" if training.price else "-"
        written = shown_bytes(row.written_bytes) if row.written_bytes else "-"
        found.append((row.system, f"{row.tokens_per_s:,.1f}", f"{row.hours:,.1f}", cost, written, wear, row.why))
    return found


def _shown_wear(wear: float) -> str:
    return f"{100 * wear:.3g} %" if wear <= 1 else f"{wear:,.1f} times"


def worn_out(rows: Sequence[Compared]) -> list[str]:
    """A line for each system under which the SSDs' warranted writes end before the training does."""
    return [
        f"{row.system} writes {row.wear:,.1f} times what the SSDs are warranted for: they last "
        f"{row.hours / 24 / row.wear:,.0f} of {row.hours / 24:,.0f} days"
        for row in rows
        if row.wear is not None and row.wear > 1
    ]


def compared_text(rows: Sequence[Compared], training: Training) -> str:
    """The table that the command prints."""
    table = [HEAD, *cells(rows, training)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    lines = ["", f"a training of {training.tokens:,.0f} tokens"]
    for row in table:
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *middle, row[-1]]))
    return "\n".join(lines + worn_out(rows))
