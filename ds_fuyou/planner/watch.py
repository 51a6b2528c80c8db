# SPDX-License-Identifier: Apache-2.0
"""Measured steps against the plan: a gap that lasts is told once, with its cause and its numbers. No torch.

The rule: a quantity that is off by more than ``GAP`` of what was expected in ``LASTING`` steps in a row. Expected of
compute, bytes and the whole step is what the plan predicts. Of a lane's rate it is what this run itself reached in the
first ``LASTING`` steps, because a lane that works beside others is slower than alone: this is drift. Storage that was
found slower may be found faster again, a throttled disk that has cooled down. A cause is told again only after the plan
was made anew.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.profile import StorageRates
from ds_fuyou.planner.profiled import Prediction

__all__ = [
    "GAP",
    "LASTING",
    "Cause",
    "Finding",
    "LaneWatch",
    "StepMeasurement",
    "is_another",
    "left_of_storage",
    "slowed",
]

GAP = 0.25
LASTING = 5
_MUCH_LESS, _COMPILING_SECS = 0.5, 0.5  # of what was measured; that compiling, or looking for fast kernels, takes


class Cause(enum.Enum):
    """Why a step is not what the plan says."""

    WORKLOAD = "another batch"
    READS = "storage reads more slowly"
    WRITES = "storage writes more slowly"
    READS_AGAIN = "storage reads faster again"
    WRITES_AGAIN = "storage writes faster again"
    UPDATES = "the cpu optimizer is slower"
    COMPUTE = "compute takes longer"
    LESS_COMPUTE = "compute takes much less than when it was measured"
    BYTES = "more bytes go to and from storage"
    STEP = "the whole step"

    @property
    def replans(self) -> bool:
        """Whether a plan made anew would be another one."""
        return self is Cause.WORKLOAD or self.kind in (Cause.READS, Cause.WRITES)

    @property
    def kind(self) -> Cause:
        """The same of storage that is slower as of storage that is faster again."""
        return {Cause.READS_AGAIN: Cause.READS, Cause.WRITES_AGAIN: Cause.WRITES}.get(self, self)


@dataclass(frozen=True)
class StepMeasurement:
    """One step: wall seconds and those of them that the script took outside of it, seconds of forwards and backwards
    without waits, busy seconds and bytes of lanes, updated parameters, and elements of the batch in a micro-batch.
    """

    secs: float
    outside_secs: float
    compute_secs: float
    read_secs: float
    write_secs: float
    update_secs: float
    read_bytes: float
    write_bytes: float
    num_updated: float
    num_elements: float


@dataclass(frozen=True)
class Finding:
    """A lasting gap. ``ratio``: measured over expected (of rates: what is left of them)."""

    cause: Cause
    expected: float
    measured: float
    text: str

    @property
    def ratio(self) -> float:
        return self.measured / self.expected


def is_another(expected: float, found: float) -> bool:
    """Whether a batch of so many elements is not the one that was expected; 0: of no known shape."""
    return min(expected, found) > 0 and abs(found / expected - 1) > GAP


class LaneWatch:
    """To be told of every step; one object a plan.

    Args:
        compute_secs: of a step by the plan, everything included that the training thread runs or shares cores with.
        num_elements: of a micro-batch the plan was made for.
        usual: rates of lanes that an earlier plan's watch found; see :meth:`usual`.
        patience: steps in a row that a cause must last, where they are not ``LASTING``.
        told: what another watch over the same plan has found.
        slowed: lanes of storage that the plan takes to be slower than they were measured.
    """

    def __init__(
        self,
        predicted: Prediction,
        compute_secs: float,
        num_elements: float,
        usual: Mapping[Cause, float] | None = None,
        patience: Mapping[Cause, int] | None = None,
        told: Collection[Cause] = (),
        slowed: Collection[Cause] = (),
    ) -> None:
        self._lasting = {**dict.fromkeys(Cause, LASTING), **(patience or {})}
        self._slowed = slowed
        self._predicted = predicted
        self._compute_secs = compute_secs
        self._num_elements = num_elements
        self._off = {cause: deque[tuple[float, float]](maxlen=lasting) for cause, lasting in self._lasting.items()}
        self.told = set(told)
        self._usual: dict[Cause, float] = dict(usual or {})
        self._first: dict[Cause, list[float]] = {cause: [] for cause in _RATES if cause not in self._usual}

    def usual(self) -> dict[Cause, float]:
        """The rates this run reached in its first steps, where these are over; what was found slower since is usual."""
        return dict(self._usual)

    def step(self, measured: StepMeasurement) -> list[Finding]:
        """What lasts now and was not told before. Another batch explains everything else."""
        for cause, expected, found, is_off in self._quantities(measured):
            if is_off:
                self._off[cause].append((expected, found))
            else:
                self._off[cause].clear()
        self._note_first(measured)
        lasting = [cause for cause in Cause if len(self._off[cause]) >= self._lasting[cause]]
        if len(self._off[Cause.WORKLOAD]) >= LASTING:
            lasting = [cause for cause in lasting if cause is Cause.WORKLOAD]
        if len(lasting) > 1:
            lasting = [cause for cause in lasting if cause is not Cause.STEP]  # the others explain it
        findings = [self._finding(cause) for cause in lasting if cause not in self.told]
        self.told.update(lasting)
        self._usual.update({found.cause.kind: found.measured for found in findings if found.cause.kind in _RATES})
        return findings

    def _note_first(self, measured: StepMeasurement) -> None:
        for cause, rates in list(self._first.items()):
            rate = _rate_of(cause, measured)
            if rate > 0:
                rates.append(rate)
            if len(rates) == LASTING:
                self._usual[cause] = statistics.median(rates)
                del self._first[cause]

    def _quantities(self, now: StepMeasurement) -> Iterator[tuple[Cause, float, float, bool]]:
        """(cause, expected, found, whether that is off)."""
        planned = self._predicted
        elements = self._num_elements
        is_other = is_another(elements, now.num_elements)
        yield Cause.WORKLOAD, elements, now.num_elements, is_other
        yield Cause.COMPUTE, self._compute_secs, now.compute_secs, now.compute_secs > (1 + GAP) * self._compute_secs
        alone, took = planned.lane_secs[Lane.GPU.label], now.compute_secs
        is_less = not is_other and 0 < took < min(_MUCH_LESS * alone, alone - _COMPILING_SECS)
        yield Cause.LESS_COMPUTE, alone, took, is_less
        moved = now.read_bytes + now.write_bytes
        yield Cause.BYTES, planned.storage_bytes, moved, moved > (1 + GAP) * planned.storage_bytes > 0
        step = planned.iteration_secs
        nearest = min(max(step, now.secs - now.outside_secs), now.secs)  # outside, lanes may have gone on
        yield Cause.STEP, step, nearest, not step / (1 + GAP) <= nearest <= step * (1 + GAP)
        for cause, usual in self._usual.items():
            rate = _rate_of(cause, now)
            yield cause, usual, rate, 0 < rate < usual / (1 + GAP)
            if cause in self._slowed:
                yield _AGAIN[cause], usual, rate, rate > usual * (1 + GAP)

    def _finding(self, cause: Cause) -> Finding:
        steps, lately = self._lasting[cause], self._off[cause]
        expected = statistics.median(pair[0] for pair in lately)
        measured = statistics.median(pair[1] for pair in lately)
        return Finding(cause, expected, measured, _text(cause, expected, measured, steps))


_RATES = (Cause.READS, Cause.WRITES, Cause.UPDATES)
_AGAIN = {cause.kind: cause for cause in (Cause.READS_AGAIN, Cause.WRITES_AGAIN)}


def _rate_of(cause: Cause, step: StepMeasurement) -> float:
    """Amount a busy second of the lane; 0 where it did nothing."""
    amount, secs = {
        Cause.READS: (step.read_bytes, step.read_secs),
        Cause.WRITES: (step.write_bytes, step.write_secs),
        Cause.UPDATES: (step.num_updated, step.update_secs),
    }[cause]
    return amount / secs if secs > 0 else 0.0


def _text(cause: Cause, expected: float, measured: float, steps: int) -> str:
    lasting = f"in {steps} steps in a row"
    if cause is Cause.WORKLOAD:
        return f"micro-batches have {measured:.0f} elements {lasting}, the plan was made for {expected:.0f}"
    if cause.kind in (Cause.READS, Cause.WRITES):
        return f"{cause.value}: {measured / 1e9:.2f} GB/s {lasting}, until then it was {expected / 1e9:.2f} GB/s"
    if cause is Cause.UPDATES:
        return f"{cause.value}: {measured / 1e6:.0f} M parameters/s {lasting}, until then it was {expected / 1e6:.0f} M"
    if cause is Cause.BYTES:
        return f"{cause.value}: {measured / 1e9:.2f} GB a step {lasting}, planned were {expected / 1e9:.2f} GB"
    gap = 100 * (measured / expected - 1)
    return f"{cause.value}: {measured:.3f} s {lasting}, planned were {expected:.3f} s ({gap:+.0f} %)"


def left_of_storage(left: Mapping[Cause, float], findings: Iterable[Finding]) -> dict[Cause, float]:
    """What is left of each direction's measured rate, by what was left of it and what has been found since."""
    found = dict(left)
    for finding in findings:
        kind = finding.cause.kind
        if kind in (Cause.READS, Cause.WRITES):
            found[kind] = min(1.0, found.get(kind, 1.0) * finding.ratio)
    return found


def slowed(rates: StorageRates, left: Mapping[Cause, float]) -> StorageRates:
    """The rates where so much is left of each direction's; of both at once, of their harmonic mean."""
    read, write = rates.read * left.get(Cause.READS, 1.0), rates.write * left.get(Cause.WRITES, 1.0)
    before, now = statistics.harmonic_mean([rates.read, rates.write]), statistics.harmonic_mean([read, write])
    return replace(rates, read=read, write=write, mixed=rates.mixed * (now / before))
