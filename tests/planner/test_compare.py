# SPDX-License-Identifier: Apache-2.0
"""``fuyou plan --compare``, and its page in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.cli import main
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.cost import Workload
from ds_fuyou.simulator.choose import Chosen, try_choose
from ds_fuyou.simulator.compare import COMPARED, Training, compared
from ds_fuyou.simulator.fit import Needs
from ds_fuyou.simulator.models import load_model
from ds_fuyou.simulator.systems import find_policy
from tests.harness.limits import HANG_SECS
from tests.planner.support import machine, model

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PLAN = ["plan", "--model", "13B", "--batch", "16", "--num-ssds", "4"]
# Put at the end of the page: what the browser laid out, of what a reader sees.
MEASURE = """<script>
const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] };
const all = s => [...document.querySelectorAll(s)];
const found = {
  width: document.documentElement.scrollWidth, window: innerWidth,
  charts: all("svg").map(svg => ({name: svg.getAttribute("aria-label"), box: box(svg),
    bars: [...svg.querySelectorAll("rect")].map(box), texts: [...svg.querySelectorAll("text")].map(box)})),
  tables: all("table").map(t => [...t.rows].map(r => [...r.cells].map(c => c.innerText))),
  headings: all("h1, h2").map(h => h.innerText),
  loaded: performance.getEntriesByType("resource").map(e => e.name),
};
const out = document.createElement("output");
out.id = "measured"; out.textContent = JSON.stringify(found); document.body.append(out);
</script>"""


def _browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (apt-get install chromium-headless-shell)")
    return found


class _Measured(HTMLParser):
    text, _inside = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "output"

    def handle_data(self, data: str) -> None:
        self.text += data if self._inside else ""


def shown_in_browser(page: Path, folder: Path) -> dict[str, Any]:
    """What a browser makes of the page, which it may not change."""
    opened = folder / "opened.html"
    opened.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    flags = ["--headless", "--disable-gpu", "--window-size=1280,900", f"--user-data-dir={folder / 'profile'}"]
    if os.getuid() == 0:
        flags.append("--no-sandbox")
    done = subprocess.run(
        [_browser(), *flags, "--dump-dom", opened.as_uri()],
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
        check=False,
    )
    parser = _Measured()
    parser.feed(done.stdout)
    assert parser.text, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(parser.text)
    return found


def test_the_page_of_a_plan_shows_lanes_tiers_systems_and_upgrades(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main([*PLAN, "--compare", "--price", "1.5", "--out", str(page)]) == 0
    assert "http" not in page.read_text(encoding="utf-8")
    found = shown_in_browser(page, tmp_path)
    assert found["loaded"] == []
    assert found["width"] <= found["window"]  # nothing to scroll aside for
    lanes, tiers = found["charts"]
    assert (lanes["name"], tiers["name"]) == ("lanes over time", "bytes by tier")
    for chart in (lanes, tiers):
        left, top, right, bottom = chart["box"]
        assert right - left > 800
        assert len(chart["bars"]) >= 8
        for bar in chart["bars"]:
            assert left <= bar[0] <= bar[2] <= right + 1
            assert top <= bar[1] < bar[3] <= bottom + 1
        for number, text in enumerate(chart["texts"]):
            assert all(not _overlap(text, other) for other in chart["texts"][:number])
    systems, upgrades = found["tables"]
    assert [row[0] for row in systems[1:]] == list(COMPARED.values())
    assert "lacks" in systems[1][-1]
    assert float(systems[-1][3]) > 0
    assert len(upgrades) == 7
    assert "What an upgrade buys" in found["headings"]


def _overlap(one: list[float], other: list[float]) -> bool:
    return one[0] < other[2] - 1 and other[0] < one[2] - 1 and one[1] < other[3] - 4 and other[1] < one[3] - 4


def test_what_is_compared_fits_or_says_what_lacks() -> None:
    rows = {row.system: row for row in compared(*_asked(4, 128), Training(1e9, 2.0))}
    assert "GPU memory lacks" in rows["ZeRO-3"].why
    assert "host memory lacks" in rows["ZeRO-Offload"].why
    ours, stock = rows["this"], rows["ZeRO-Infinity"]
    assert ours.tokens_per_s > stock.tokens_per_s > 0
    assert ours.hours == pytest.approx(1e9 / ours.tokens_per_s / 3600)
    assert ours.cost == pytest.approx(2 * ours.hours)
    assert ours.wear == pytest.approx(ours.written_bytes / (4 * 7000e12))


def test_a_model_that_fits_the_gpus_is_fastest_there() -> None:
    on = machine(4, 128, "h100", num_gpus=8)
    rows = {row.system: row for row in compared(Workload(model("13B"), 8), on, find_policy("ds_fuyou"), Training())}
    assert rows["ZeRO-3"].tokens_per_s > rows["ZeRO-Infinity"].tokens_per_s
    assert rows["ZeRO-3"].written_bytes == 0
    one = {row.system: row for row in compared(*_asked(4, 128), Training())}
    assert one["ZeRO-3"].tokens_per_s == 0


def test_a_system_alone_is_planned_as_it_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO-3 has its parameters on the GPU, Adam, too, and checkpointing if that is faster."""
    work, on = Workload(load_model("gpt:12,12,768,50257"), 1), machine(2, 64)
    ours, alone = find_policy("ds_fuyou"), find_policy("zero_3")
    ours = replace(ours, fused=alone.fused, slices_loss=alone.slices_loss, logit_bytes=alone.logit_bytes)
    rows = {row.system: row.tokens_per_s for row in compared(work, on, ours, Training())}
    asked = ["--model", "gpt:12,12,768,50257", "--num-ssds", "2", "--dram-gb", "64", "--system", "zero_3"]
    assert main(["plan", *asked, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["predicted"]["tokens_per_s"]
    assert shown == pytest.approx(rows["ZeRO-3"], rel=0.001)


def test_attention_loss_and_checkpointing_are_the_scripts_whatever_trains_it() -> None:
    """What fits a GPU whole is not made slower by leaving it; and logits are whole unless somebody says otherwise."""
    small, on, ours = load_model("gpt:12,12,768,50257"), machine(2, 64), find_policy("ds_fuyou")
    rows = {row.system: row.tokens_per_s for row in compared(Workload(small, 8), on, ours, Training())}
    assert rows["ZeRO-3"] >= rows["this"] > rows["ZeRO-Infinity"]
    large = Workload(small, 512, 1024)
    for policy in (ours, find_policy("zero_infinity")):
        needs = try_choose(large, on, policy)
        assert isinstance(needs, Needs)
        assert needs.total("gpu") > 512 * 1024 * 50257 * policy.logit_bytes
    assert isinstance(try_choose(large, on, replace(ours, slices_loss=True)), Chosen)


def _asked(num_ssds: int, dram_gib: int) -> tuple[Any, ...]:
    return Workload(model("13B"), 16), machine(num_ssds, dram_gib), find_policy("ds_fuyou")


def test_all_train_in_the_precision_of_the_json() -> None:
    """4.4 billion parameters of 16 bits fit a card of 80 GB with their states and gradients; of 32 bits they do not."""
    work, on = Workload(load_model("gpt:32,26,3328,50257"), 1), machine(4, 256, "h100")
    found = {}
    for num_bytes in (2, 4):
        ours = replace(find_policy("ds_fuyou"), param_bytes=num_bytes, gradient_bytes=num_bytes)
        found[num_bytes] = {row.system: row for row in compared(work, on, ours, Training())}
    for system in ("ZeRO-Offload", "ZeRO-Infinity", "this"):
        assert found[4][system].tokens_per_s < found[2][system].tokens_per_s
    assert found[2]["ZeRO-3"].tokens_per_s > 0
    assert found[4]["ZeRO-3"].tokens_per_s == 0


def test_the_command_prints_and_saves_what_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--compare", "--tokens", "2e9"]) == 0
    text = capsys.readouterr().out
    assert "a training of 2,000,000,000 tokens" in text
    assert all(name in text for name in COMPARED.values())
    assert main([*PLAN, "--price", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predicted"]["compared"]
    assert rows[-1]["cost"] == pytest.approx(3 * rows[-1]["hours"])


def test_writes_beyond_the_warranty_are_told_in_days(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "--model", "13B", "--ssd", "990pro", "--dram-gb", "80"]
    assert main([*small, "--compare", "--tokens", "8e6"]) == 0
    text = capsys.readouterr().out
    assert "warranted for" not in text
    assert " %" in text
    assert main([*small, "--compare", "--tokens", "1e9", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["predicted"]["compared"][-1]
    assert main([*small, "--compare", "--tokens", "1e9"]) == 0
    text = capsys.readouterr().out
    days = row["hours"] / 24
    assert (
        f"this writes {row['wear']:,.1f} times what the SSDs are warranted for: they last {days / row['wear']:,.0f} of "
        f"{days:,.0f} days" in text
    )
    assert f"{row['written_bytes'] / 1e15:,.2f} PB" in text


@pytest.mark.parametrize(("tokens", "price"), [(0.0, 0.0), (float("nan"), 0.0), (1e9, -1.0), (1e9, float("inf"))])
def test_a_training_that_makes_no_sense_is_refused(tokens: float, price: float) -> None:
    with pytest.raises(FuyouConfigError, match=r"--tokens must be|--price must be"):
        Training(tokens, price)
