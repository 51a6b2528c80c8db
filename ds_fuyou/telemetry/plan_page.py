# SPDX-License-Identifier: Apache-2.0
"""A plan as one HTML page that needs nothing else: lanes of a step, bytes by tier, systems side by side, upgrades."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ds_fuyou.simulator.choose import Chosen
from ds_fuyou.simulator.compare import HEAD, Compared, Training, cells, worn_out
from ds_fuyou.simulator.report import TIER_NAMES, upgrades
from ds_fuyou.simulator.simulate import chrome_trace
from ds_fuyou.telemetry.lane_times import content_of
from ds_fuyou.telemetry.page import lanes_chart, page_of, stacked_bars, table
from ds_fuyou.units import shown_bytes

__all__ = ["render_plan"]


def render_plan(chosen: Chosen, text: str, rows: Sequence[Compared], training: Training) -> str:
    """The page; ``text`` is what the command prints of the plan, ``rows`` are empty where nothing is compared."""
    work, secs = chosen.work, chosen.iteration_secs
    title = f"{work.model.name} on {chosen.machine.name}"
    summary = (
        f"{chosen.tokens_per_s:,.1f} tokens/s; a step of {work.tokens_per_step(chosen.machine.num_gpus):,} tokens "
        f"takes {secs:.2f} s, bound by {chosen.bound.label}; {chosen.tflops_model:.1f} model TFLOPS. "
        "Predicted, not measured."
    )
    body = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(summary)}</p>"]
    if rows:
        body += [f"<h2>A training of {training.tokens:,.0f} tokens</h2>", table(HEAD, cells(rows, training))]
        body += [f"<p>{html.escape(line)}</p>" for line in worn_out(rows)]
    body += ["<h2>Lanes of a step</h2>", lanes_chart(content_of(chrome_trace(chosen.simulated, chosen.machine)))]
    body += ["<h2>Bytes by tier</h2>", stacked_bars(_tiers(chosen), shown_bytes)]
    body += ["<h2>What an upgrade buys</h2>", _upgrades(chosen)]
    body += ["<h2>The plan</h2>", f"<pre>{html.escape(text)}</pre>"]
    return page_of(title, body)


def _tiers(chosen: Chosen) -> list[tuple[str, float, list[tuple[str, float]]]]:
    return [
        (
            name,
            chosen.needs.have[tier],
            [(item.name, item.num_bytes) for item in chosen.needs.items if item.tier == tier],
        )
        for tier, name in TIER_NAMES.items()
    ]


def _upgrades(chosen: Chosen) -> str:
    rows = [
        (what, f"{secs:.2f} s", f"{100 * (chosen.iteration_secs / secs - 1):+.1f} %") for what, secs in upgrades(chosen)
    ]
    return table(("twice the", "a step", "tokens/s"), rows)
