# SPDX-License-Identifier: Apache-2.0
"""Reports: when they are logged, and that the numbers add up."""

import logging
from types import SimpleNamespace

import pytest
import torch

from ds_fuyou.host.compute_clock import HostClock
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.state_layout import WHOLE, StateLayout
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.telemetry import report
from ds_fuyou.telemetry.placement import placement_of, placement_table
from ds_fuyou.telemetry.report import LaneTimes, StepReport
from ds_fuyou.telemetry.wear import Rating, short_lives
from ds_fuyou.units import shown_bytes

K = CUT_ELEMENTS
LAYOUT = build_layout(
    [[(f"block.{i}", f"block.{i}", K, i) for i in range(4)]], LayoutLimits(max_elements=K, min_elements=K)
)


class State:
    """A rank state's counters, set by hand."""

    def __init__(self, params=1.0, states=0.0, grads=1.0) -> None:
        lane = SimpleNamespace(busy_secs=0.0, num_bytes=0)
        self.lanes = {"read": lane, "write": SimpleNamespace(busy_secs=0.0, num_bytes=0)}
        self.updates = SimpleNamespace(update_busy_secs=0.0)
        options = CoreOptions(
            residency=ChunkResidency.of_shares(LAYOUT, params, states, grads),
            num_slots=2,
            overlap=Overlap.BACKWARD,
            clip_policy="auto",
            param_dtype=torch.bfloat16,
            grad_dtype=torch.bfloat16,
            staging_bytes=4096,
            num_update_threads=1,
            io=IoSettings(),
        )
        self.parameters = SimpleNamespace(waited_secs=0.0, capacity_bytes=500, reads=params < 1)
        self.frozen_stored = 0
        self.activations = None
        self.num_tokens = 0
        self.planned_device_bytes = 0.0
        self.clock = HostClock(lambda: report.waited_secs(self))
        self.core = SimpleNamespace(
            options=options,
            place=SimpleNamespace(
                residency=options.residency,
                num_versions=options.num_param_versions,
                stored=StateLayout(WHOLE, 2),
                spare_bytes=0,
            ),
            layout=LAYOUT,
            kind=SimpleNamespace(moments=("exp_avg", "exp_avg_sq")),
            staging=SimpleNamespace(capacity_bytes=4096),
            io=SimpleNamespace(stats=lambda: self.lanes),
            pipeline=SimpleNamespace(stats=lambda: self.updates),
            waited_secs=0.0,
            gradients=SimpleNamespace(waited_secs=0.0),
            num_redone_chunks=0,
        )

    def shares_of_machine(self) -> dict:
        return {"/a": 0.5, "/b": 1.5}

    def frozen_bytes(self) -> dict:
        return {"cpu": 0, "nvme": self.frozen_stored}

    def work(self) -> None:
        self.lanes["read"].busy_secs += 0.5
        self.lanes["write"].busy_secs += 0.25
        self.updates.update_busy_secs += 0.25
        self.core.waited_secs += 0.06
        self.core.gradients.waited_secs += 0.04


@pytest.fixture
def lines():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = report.get_logger()
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_bytes_of_every_class_and_copy_are_counted() -> None:
    rows = {row.name: (row.tier, row.num_bytes) for row in placement_of(State())}
    assert rows == {
        "P16 (parameters)": ("cpu", 16 * K),
        "G16 (gradients)": ("cpu", 8 * K),
        "P32 (master parameters)": ("nvme", 32 * K),
        "exp_avg": ("nvme", 32 * K),
        "exp_avg_sq": ("nvme", 32 * K),
        "staging pool": ("cpu", 4096),
    }


def test_a_share_in_memory_has_a_row_a_tier() -> None:
    """A share that whole chunks cannot hold is rounded down; G16 on storage has one copy."""
    rows = [(r.name, r.tier, r.num_bytes, r.note) for r in placement_of(State(0.25, 0.5, 0.7))]
    assert rows[:6] == [
        ("P16 (parameters)", "cpu", 4 * K, "25 % of the elements, 2 versions"),
        ("P16 (parameters)", "nvme", 12 * K, "2 slots"),
        ("G16 (gradients)", "cpu", 4 * K, "50 % of the elements"),
        ("G16 (gradients)", "nvme", 4 * K, ""),
        ("P32 (master parameters)", "cpu", 8 * K, "50 % of the elements"),
        ("P32 (master parameters)", "nvme", 16 * K, "2 slots"),
    ]


def test_parameters_on_storage_have_slots_and_a_look_ahead_pool() -> None:
    rows = {row.name: (row.tier, row.num_bytes) for row in placement_of(State(0.0, 0.0, 0.0))}
    assert rows["P16 (parameters)"] == ("nvme", 16 * K)
    assert rows["look-ahead pool"] == ("cpu", 500)


def test_second_states_have_a_row() -> None:
    state = State(states=1.0)
    state.core.place.spare_bytes = 48 * K
    rows = {row.name: (row.tier, row.num_bytes) for row in placement_of(state)}
    assert rows["P32 and moments, once more"] == ("cpu", 48 * K)


def test_frozen_parameters_have_a_row_and_a_pool_and_their_waits_count() -> None:
    state = State()
    state.frozen_stored = 12_000
    state.parameters = SimpleNamespace(waited_secs=0.25, capacity_bytes=700, reads=True)
    rows = {row.name: (row.tier, row.num_bytes) for row in placement_of(state)}
    assert rows["frozen parameters"] == ("nvme", 12_000)
    assert rows["look-ahead pool"] == ("cpu", 700)
    assert LaneTimes.of(state).exposed_secs == pytest.approx(0.25)


def test_the_table_has_a_line_a_tier() -> None:
    table = placement_table(placement_of(State(0.25, 0.5, 0.7)), LAYOUT.numel).splitlines()
    assert table[0] == "where every byte lives, 0.0 M trainable parameters on this rank:"
    assert [line.split(":")[0] for line in table[1:]] == ["  host memory 70.1 kB", "  storage 131.1 kB"]
    assert "P16 (parameters) 8.2 kB (25 % of the elements, 2 versions)" in table[1]
    assert table[2].endswith("G16 (gradients) 8.2 kB")
    held = [row for row in placement_of(State(states=1.0)) if row.tier == "cpu"]
    assert len(placement_table(held, LAYOUT.numel).splitlines()) == 2


def test_state_in_memory_has_one_copy() -> None:
    rows = {row.name: (row.tier, row.num_bytes) for row in placement_of(State(states=1.0))}
    assert rows["exp_avg"] == ("cpu", 16 * K)
    assert rows["P16 (parameters)"] == ("cpu", 8 * K), "nothing speculates: one version"


def test_hidden_is_what_the_training_thread_did_not_wait_for() -> None:
    state = State()
    state.work()
    times = LaneTimes.of(state)
    assert times.busy_secs == pytest.approx(1.0)
    assert times.hidden_secs == pytest.approx(0.9)
    assert "hidden 0.90 s, exposed 0.10 s (90 % hidden)" in times.line()


def test_a_wait_longer_than_the_work_hides_nothing() -> None:
    assert LaneTimes(read_secs=1.0, exposed_secs=2.0).hidden_secs == 0.0


def test_steps_1_10_100_and_every_hundred_are_logged(lines) -> None:
    state, reports = State(), StepReport()
    logged = []
    for step in range(1, 301):
        state.work()
        before = len(lines)
        reports.step(state)
        if len(lines) > before:
            logged.append(step)
    assert logged == [1, 10, 100, 200, 300]
    assert "where every byte lives" in lines[0]
    assert "hidden 0.90 s, exposed 0.10 s" in lines[1]  # the mean of a step, not the sum of nine


def test_the_summary_leaves_out_the_first_step_and_comes_once(lines) -> None:
    state, reports = State(), StepReport()
    state.lanes["read"].busy_secs = 1000.0  # what the first step cost
    reports.step(state)
    state.work()
    reports.step(state)
    reports.close(state)
    reports.close(state)
    summaries = [line for line in lines if "mean of steps 2-2" in line]
    assert len(summaries) == 1
    assert "read 0.50 s" in summaries[0]
    assert sum("where every byte lives" in line for line in lines) == 1, "once, after the first step"


def test_other_ranks_say_nothing(lines, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    state, reports = State(), StepReport()
    reports.step(state)
    reports.close(state)
    assert lines == []


def test_closing_before_the_second_step_says_nothing(lines) -> None:
    state, reports = State(), StepReport()
    reports.close(state)
    reports.step(state)
    lines.clear()
    reports.close(state)
    assert lines == []


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1e3, "1.0 kB"), (2.5e9, "2.5 GB"), (3e12, "3.00 TB"), (2.5e18, "2,500.00 PB")],
)
def test_bytes_are_shown_in_decimal_units(num_bytes, text) -> None:
    assert shown_bytes(num_bytes) == text


def test_the_bound_lane_works_longest() -> None:
    assert LaneTimes(read_secs=0.5, write_secs=0.4, exposed_secs=0.05).bound_lane(1.0) == "compute"
    assert LaneTimes(read_secs=0.5, write_secs=0.4, exposed_secs=0.2).bound_lane(1.0) == "storage"
    assert LaneTimes(read_secs=0.1, update_secs=0.9, exposed_secs=0.2).bound_lane(1.0) == "cpu optimizer"
    assert LaneTimes(read_secs=2.0, write_secs=2.0).bound_lane(1.0) == "compute", "side by side, neither is the bound"


def test_writes_a_day_are_told_and_worn_drives_warned_of_once(lines, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    rated = Rating(("Some SSD",), 1e12, is_known=True)
    monkeypatch.setattr(report, "rating_at", lambda path: rated if path == "/b" else None)
    state, reports = State(), StepReport()
    for _ in range(100):
        reports.step(state)
        now[0] += 10.0
        state.lanes["write"].num_bytes += 1e6
    assert lines[1].endswith("; 17.3 GB written a day"), "2 ranks, 8640 steps"
    assert len([line for line in lines if "written a day" in line]) == 2
    assert [line for line in lines if "/b (Some SSD) is rated for 1.00 TB written" in line] == [lines[2]]
    assert "gets 13.0 GB a day: it lasts 77 days" in lines[2]
    assert not any("/a (" in line for line in lines)


def test_a_report_that_fails_is_told_once_and_ends_no_step(lines, monkeypatch) -> None:
    def unreadable(path: str) -> None:
        raise ModuleNotFoundError("No module named 'ds_fuyou.planner.presets'")  # replaced while the run goes

    monkeypatch.setattr(report, "rating_at", unreadable)
    state, reports = State(), StepReport()
    for _ in range(30):
        state.lanes["write"].num_bytes += 1e6
        reports.step(state)
    told = "steps are not reported, training goes on: ModuleNotFoundError: No module named 'ds_fuyou.planner.presets'"
    assert [line for line in lines if "not reported" in line] == [told]


def test_what_lasts_a_year_is_not_told() -> None:
    rating = Rating(("Some SSD",), 365e9, is_known=False)
    assert not short_lives({"/a": 1e9}, {"/a": rating})
    [(is_known, sentence)] = short_lives({"/a": 1.01e9}, {"/a": rating})
    assert not is_known
    assert "is taken to be rated (no preset knows the model) for 365.0 GB written" in sentence
