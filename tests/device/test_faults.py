# SPDX-License-Identifier: Apache-2.0
"""Every call of the package that orders work is left out once: the device must find each, or it is not needed.

The calls are those that a run comes by, so they follow the code. One engine of the device is slow at a time, and
slower with each trial (the host may be slow itself), until the fault shows: by a trip wire, by other bits, or by an
error.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.device.parity import case_of, fuyou_of
from tests.harness.runner import differences, start_case, with_fuyou
from tests.parity.test_moves import moving

SLOW = {
    "up": {"slow_up_secs": 0.004},
    "down": {"slow_down_secs": 0.004},
    "compute": {"slow_compute_secs": 0.001},
}
SMALL = {"steps": 3, "model": {"width": 256}, "look_at": []}
ALONE = case_of("bf16-always-1-two", zero_init=True) | {
    **SMALL,
    "eval_within": [1],
    "eval_late_in": [1, 2],
    "edit_before": [1],
    "hooks_of_gradients": "behind",
}
SUMS = case_of("bf16-rarely-3-two_lrs", zero_init=True) | {**SMALL, "edit_within": [1], "eval_within": [2]}
FEW_LIVE = copy.deepcopy(SUMS)
FEW_LIVE["config"]["zero_optimization"] |= {
    "stage3_max_live_parameters": 60_000,
    "stage3_prefetch_bucket_size": 10_000,
    "stage3_max_reuse_distance": 10_000,
}
MOVES = moving(
    {"params_after": {"1": 0.6, "3": 1.0, "5": 0.0}, "grads_after": {"2": 1.0, "4": 0.0, "6": 0.5}},
    {"1": 0.7, "5": 0.0},
)
# A script, where what it trains lies, and what of that moves.
RUNS: tuple[tuple[dict, tuple[str, str, str, int, str], dict], ...] = (
    # everything away, with room for two parameters that were read
    (ALONE, ("all", "auto", "backward_and_forward", 2, "swap-nvme"), {}),
    # parameters in host memory, which the step changes where copies to the device read them
    (ALONE, ("states", "auto", "backward_and_forward", 2, "recompute"), {}),
    # sums of gradients, on storage and in host memory
    (SUMS, ("all", "auto", "backward_and_forward", 2, "swap-nvme"), {}),
    (FEW_LIVE, ("states", "auto", "backward_and_forward", 2, "recompute"), {}),
    (SUMS, ("grads_cpu", "defer", "none", 1, "auto"), {}),
    ({**SUMS, "steps": 8}, ("half", "speculate", "backward_and_forward", 2, "none"), MOVES),
)
TWO_PARAMETERS = {"prefetch_bytes": 4096}

# Calls without which everything is right in these runs, and why.
NOT_NEEDED = {
    "device.synchronize at zero/parameters/gathering.py:_await_copies": "what these runs gather they use on the "
    "computing stream, behind its copies; who uses another one is in test_training.py",
    "event.query at optimizer/intake.py:done": "whatever it says, wait() follows before anything is handed on",
    "stream.synchronize at zero/gradient_flow.py:rest": "every copy of a gradient was waited for before, and with it "
    "all that its stream was given; the norm is read on the computing stream before anything is changed. Sleep, which "
    "unpins after it, is in test_training.py",
    "tensor.record_stream at zero/parameters/across_batches.py:_release": "what was put aside and is not taken back "
    "goes behind a wait: an edit's, a step's, or a checkpoint's",
    "device.synchronize at optimizer/moving_grads.py:_change": "moves begin behind a step, which has waited for every "
    "copy of a gradient",
    "event.record at host/run_ahead.py:let_go": "bounds the device's memory, and orders nothing",
}
# Measure time, and order nothing; profiles of operators keep no values.
MEASURING = ("profiling/", "zero/run/step_clock.py", "host/compute_clock.py")


@pytest.mark.thorough
def test_each_is_found(stock_run, tmp_path: Path) -> None:
    stocks = [stock_run(case) for case, *_ in RUNS]
    numbers = itertools.count()

    def begun(fault: str, number: int, slow: str, trial: int = 1) -> Callable[[], list[dict]]:
        directory = tmp_path / f"run{next(numbers)}"
        case, placement, moves = RUNS[number]
        fuyou = fuyou_of(directory / "swap", *placement, **TWO_PARAMETERS)
        (directory / "swap").mkdir(parents=True)
        slowness = {engine: secs * 5 ** (trial - 1) for engine, secs in SLOW[slow].items()}
        device = {"seed": trial, "delay_secs": 0.002, "delayed_share": 0.2, "fault": fault, **slowness}
        return start_case(with_fuyou({**case, **moves, "device": device}, fuyou), directory, "ours")

    sites = []
    for number, stock in enumerate(stocks):
        (sound,) = begun("", number, "up")()
        assert not sound["trips"]
        assert differences(stock, [sound]) == []
        sites.append({site for site in sound["sites"] if not any(f" {each}" in site for each in MEASURING)})
    needed = sorted(set.union(*sites) - NOT_NEEDED.keys())
    missed = needed
    for trial, number, slow in itertools.product((1, 2, 3), range(len(RUNS)), SLOW):  # it shows by chance
        here = [site for site in missed if site in sites[number]]
        for pair in (here[at : at + 2] for at in range(0, len(here), 2)):  # devices that are slow wait most of the time
            starts = {site: partial(begun, site, number, slow, trial) for site in pair}
            runs = [(start, start()) for start in starts.values()]
            found = [shows(stocks[number], end, start) for start, end in runs]
            shown = {site for site, is_shown in zip(starts, found, strict=True) if is_shown}
            missed = [site for site in missed if site not in shown]
    assert not missed, f"left out, and nobody noticed: {missed}"
    assert len(needed) >= 10, needed
    gone = NOT_NEEDED.keys() - set.union(*sites)
    assert not gone, f"no longer there: {gone}"


def shows(stock: list[dict], end: Callable[[], list[dict]], again: Callable[[], Callable[[], list[dict]]]) -> bool:
    """Whether a run was wrong. One that fails may have failed for another reason: it counts if it does so again."""
    for finished in (end, lambda: again()()):
        try:
            found = finished()
        except AssertionError:  # it failed, or did not end
            continue
        return bool(any(each["trips"] for each in found) or differences(stock, found))
    return True


GATHERS = "zero/parameters/gather_handles.py:_on_the_device"


@pytest.mark.parametrize("fault", ["", f"event.record at {GATHERS}", f"stream.wait_event at {GATHERS}"])
def test_a_gather_of_several_ranks_comes_behind_the_copies_of_its_partitions(
    fault: str, stock_run, tmp_path: Path
) -> None:
    """Their memory on the device is let go behind the streams that gather and wait; that is not seen here: DeepSpeed
    lets two gathers be under way, and memory is used again by the third.
    """
    case = case_of("bf16-rarely-1-two-2ranks", zero_init=True)
    case |= {"steps": 3, "model": {"width": 256}, "look_at": [], "eval_within": [1], "eval_late_in": [1, 2]}
    device = {"seed": 1, "delay_secs": 0.002, "fault": fault, "slow_up_secs": 0.02}
    numbers = itertools.count()

    def begun() -> Callable[[], list[dict]]:
        directory = tmp_path / f"run{next(numbers)}"
        (directory / "swap").mkdir(parents=True)
        fuyou = fuyou_of(directory / "swap", "all", "auto", "backward_and_forward", 2, "none", **TWO_PARAMETERS)
        return start_case(with_fuyou({**case, "device": device}, fuyou), directory, "ours")

    stock, end = stock_run(case), begun()
    if not fault:
        found = end()
        assert not any(each["trips"] for each in found)
        assert differences(stock, found) == []
        for each in found:
            assert any(f" {GATHERS}" in site for site in each["sites"])
        return
    assert shows(stock, end, begun)
