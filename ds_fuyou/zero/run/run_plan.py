# SPDX-License-Identifier: Apache-2.0
"""The planner beside a run: two conservative steps are measured, then every step is compared with what they predict.

Step 1 records operators and leaves no update behind; in step 2 nothing is updated before ``step()``, so forward,
backward and the optimizer are each timed alone. A profile that an earlier run kept takes the place of both, and decides
fates of activations before the first step. Results are the same with and without: only the order of work changes.

[Note: ranks and plans] Every rank measures, watches and plans by the numbers of the slowest one, which all know, so all
plan alike. What follows from a plan is a collective: that something must follow is told by one small reduction a step,
and rank 0 decides where states go.
"""

from __future__ import annotations

import enum
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed import comm as dist

from ds_fuyou.activations.auto import Choice, SavedStep
from ds_fuyou.errors import FuyouError
from ds_fuyou.host.available_memory import available_host_bytes
from ds_fuyou.log import current_rank, get_logger, log_once
from ds_fuyou.planner.cost import Placement
from ds_fuyou.planner.decide import StepTime
from ds_fuyou.planner.document import PlanDocument
from ds_fuyou.planner.explain import class_lines, class_rows, run_document
from ds_fuyou.planner.hardware import ThreadSecs
from ds_fuyou.planner.policies import Updates
from ds_fuyou.planner.profile import (
    BlockCost,
    RunProfile,
    StorageRates,
    forget_profile,
    save_profile,
    scaled_blocks,
    slowest,
)
from ds_fuyou.planner.profiled import MOST_REDONE, Prediction, predict, profile_line, run_time
from ds_fuyou.planner.watch import (
    LASTING,
    Cause,
    Finding,
    LaneWatch,
    StepMeasurement,
    is_another,
    left_of_storage,
    slowed,
)
from ds_fuyou.profiling.lane_rates import probe_link, probe_storage
from ds_fuyou.storage.types import PAGE_BYTES
from ds_fuyou.telemetry.report import LaneTimes
from ds_fuyou.units import shown_bytes
from ds_fuyou.zero.activations import model_blocks
from ds_fuyou.zero.agreement import barrier, least, of_every_rank, of_rank_0
from ds_fuyou.zero.parameters.across_batches import AcrossBatches
from ds_fuyou.zero.run.auto_activations import AutoActivations
from ds_fuyou.zero.run.budgets import device_budget
from ds_fuyou.zero.run.rank_state import RankState
from ds_fuyou.zero.run.run_facts import (
    ActivationWork,
    KnownRun,
    placement_of_run,
    recomputed_flops,
    updates_of_run,
)
from ds_fuyou.zero.run.run_moves import RunMoves
from ds_fuyou.zero.run.step_clock import StepClock, StepTimes

__all__ = ["RunPlan", "storage_rates"]

_SMALLEST_PROBE, _LARGEST_PROBE = 4 << 20, 256 << 20
_LINK_BYTES, _LINK_BYTES_ON_HOST = 64 << 20, 8 << 20  # the latter is host memory twice: little, for any model
_TIMED_STEP = 2
_NEWS = 0.05  # of steps: worth writing the profile again
_TOLD_GAP = 0.01  # of predictions: worth a line
_FEWEST_STEPS, _LAST_STEPS = 5, 20  # that say what threads do themselves


class _Stage(enum.Enum):
    """What a step is for."""

    MEASURES = "the first two steps of a run that nothing is known of, or two behind some that its profile is not of"
    SETTLES = "activations get their fates, or had them for a part of the step"
    PLANS = "the plan is made when the step ends"
    WATCHES = "steps are compared with the plan"
    RUNS = "nothing was measured, and nothing is planned"


class _Origin(enum.Enum):
    """Where the profile that a plan is made by came from."""

    EARLIER = "measured in an earlier run"
    HERE = "measured in this run"
    ANEW = "made anew"


class _Anew(enum.IntEnum):
    """What follows from a step that was not as planned."""

    NOTHING = 0
    TIMES = 1
    """Steps are predicted anew, and placed."""
    ACTIVATIONS = 2
    """These are decided anew, too."""
    ALL = 3
    """The next steps measure, as a first run's do."""


class _Counters(NamedTuple):
    """Since the start. ``num_ended``: snapshots that have."""

    secs: float
    lanes: LaneTimes
    num_updated: int
    work: ActivationWork
    num_ended: int


class RunPlan:
    """Of one rank; told of forwards by its clock, of everything else by the stage-3 optimizer. Tells mode "auto".

    Args:
        rank_state: the rank's placement and lanes.
        auto: decides what becomes of activations; None in other modes.
        leave_out: seconds and work of lanes that were spent on measuring, to be left out of reports.
        known: what the run was placed by.
        across: what stays on the device between micro-batches; None where it is the host.
    """

    def __init__(
        self,
        rank_state: RankState,
        model: torch.nn.Module,
        auto: AutoActivations | None,
        leave_out: Callable[[float, LaneTimes], None],
        known: KnownRun,
        across: AcrossBatches | None,
    ) -> None:
        self._state = rank_state
        self.auto = auto
        self._leave_out = leave_out
        self._facts = known
        self._find_blocks = partial(model_blocks, model, rank_state.activation.config)
        self._across, self._lets_stay = across, False
        self.clock = StepClock(model, rank_state.clock, rank_state.device)
        self.prediction: Prediction | None = None
        self.findings = deque[Finding](maxlen=100)
        self._told_waits: set[bool] = set()
        self._origin, self._kept_at = _Origin.EARLIER, "not kept"
        self._usual: dict[Cause, float] = {}
        # Doubled each time: batches may be grouped by length, and a disk be throttled by turns.
        self._patience = {
            Cause.WORKLOAD: LASTING,
            Cause.READS_AGAIN: 2 * LASTING,
            Cause.WRITES_AGAIN: 2 * LASTING,
        }
        self._clip_patience = LASTING
        self._num_unlike = 0  # steps in a row that clip otherwise than was planned with
        self._watch: LaneWatch | None = None
        self._may_measure_anew = True  # where compute was timed that is not a step's usual one
        self._num_steps = 0
        self._num_measured = 0  # of the two steps that measure
        self._blocks: tuple[BlockCost, ...] = ()
        self._update_rate = self._sum_rate = 0.0  # parameters, gradients a second: the best that was seen
        self._added = (0.0, 0)
        self._threads: deque[ThreadSecs] = deque(maxlen=_LAST_STEPS)  # of steps that were compared
        self._kept: RunProfile | None = None  # on rank 0: what the next run finds
        self._is_tried = True  # a step was applied under what was decided of activations
        self.moves = RunMoves(rank_state, leave_out)
        self._at = self._look()
        rank_state.device.reset_peak()  # of building the engine
        self.profile = known.profile
        if self.profile is not None and self.profile.storage is None and self._stores:
            self.profile = None  # measured while nothing was on storage
        self._measured_rates = None if self.profile is None else self.profile.storage
        self._left: dict[Cause, float] = {}  # of these, of this rank's storage; all of them where it says nothing
        if current_rank() == 0 and known.keeps:
            self._kept = self.profile
        self._begin_decided()
        if not known.keeps:
            self._stage = _Stage.RUNS
        elif self.profile is None:
            self._stage = _Stage.MEASURES
        else:
            self._stage = self._planning()
        if self._stage is _Stage.MEASURES or (auto is not None and not auto.is_decided):
            self._record_next()

    def _record_next(self) -> None:
        """The next forward. Mode "auto" is to know of a compiled model, too, what goes into blocks and which of these
        must not run again.
        """
        session = self._state.activations
        blocks = session.blocks if session is not None else self._find_blocks()
        swapper = session.swapper if session is not None else None
        hooks = None if swapper is None else (swapper.pack, swapper.unpack)
        self.clock.record_next(blocks, hooks, even_compiled=self.auto is not None)

    def _begin_decided(self) -> None:
        """Mode "auto", if an earlier run has decided for batches of a known shape. From the first forward on nobody
        else finds that until a step has been applied: what no longer fits the device must not fail every start. So it
        is not relied on where it cannot be taken back. A collective.
        """
        auto, profile = self.auto, self.profile
        if auto is None or profile is None or profile.activations is None or not profile.shape:
            return
        if of_rank_0(self._keep()):
            auto.begin_decided(profile.activations, profile.blocks, lambda s: self._choice(s, profile), self._tries)

    def _tries(self) -> None:
        self._is_tried = False
        self._keep()

    def _planning(self) -> _Stage:
        """A plan is to be made: once activations have their fates for a whole step."""
        return _Stage.PLANS if self.auto is None or self.auto.is_decided else _Stage.SETTLES

    def _look(self) -> _Counters:
        state = self._state
        session, work = state.activations, ActivationWork()
        if session is not None:
            work = ActivationWork(session.counters.written_bytes, session.num_forwards)
        return _Counters(
            secs=time.perf_counter(),
            lanes=LaneTimes.of(state),
            num_updated=state.core.pipeline.stats().num_updated_elements,
            work=work,
            num_ended=state.core.num_snapshots - state.core.has_snapshot,
        )

    @property
    def _is_beside_snapshot(self) -> bool:
        """Whether states were copied for a checkpoint within the step that ends, or since the one before."""
        return self._state.core.num_snapshots > self._at.num_ended

    # ---- told by the optimizer ----------------------------------------------------------------------------

    @property
    def holds_updates(self) -> bool:
        """Whether this step updates nothing before ``step()``, so that backward can be timed alone."""
        return self._stage is _Stage.MEASURES and self._num_measured == _TIMED_STEP - 1

    def document(self) -> PlanDocument | None:
        """What this run was placed by, as ``fuyou plan --profile`` writes it; None where nothing was known."""
        known, design = self._facts.profile, self._state.design
        return None if known is None else run_document(known, design.given, design.decision)

    def step_skipped(self) -> None:
        """Gradients overflowed: what was timed belongs to no step."""
        if self.auto is not None:
            self.auto.step_skipped()
        self.clock.end_step()
        self._at = self._look()

    def step_applied(self) -> None:
        """A step was applied; its updates may still run."""
        if not self._is_tried:
            self._is_tried = True
            self._keep()
        self._num_steps += 1
        stage, anew = self._stage, _Anew.NOTHING
        times = self.clock.end_step(wait=stage is _Stage.MEASURES)
        blocks, once = self.clock.recorded()
        if blocks and self.auto is not None:
            self.auto.recorded(blocks, once)
        if stage is _Stage.MEASURES:
            self._measure(times, blocks)
        elif self._num_steps == 1 and self.profile is not None:
            if (self.clock.shape, times.num_forwards) != (self.profile.shape, self.profile.accumulation):
                anew = _Anew.TIMES if _is_alike(self.profile, times, self.clock.shape) else _Anew.ALL
                self.profile = _scaled(self.profile, times, self.clock.shape)
        elif stage is _Stage.WATCHES and self._watch is not None and self._compare(self._watch, times):
            anew = _Anew.ACTIVATIONS
        elif stage is _Stage.WATCHES and self._clips_otherwise():
            anew = _Anew.TIMES
        self._let_auto_decide(times)
        if stage is _Stage.MEASURES and self._stage is not stage:
            self.moves.move(self.profile)
        if self._watch is not None and self.profile is not None and self.prediction is not None:
            self._follow_updates(self.profile, self._watch, self.prediction)
        self._follow(anew, self._num_steps > 1 and self.moves.is_short)
        self._let_stay()
        if self.profile is not None and self.moves.is_idle:
            if self._stage is _Stage.PLANS:
                self._begin(self.profile)
            elif self._stage is _Stage.SETTLES and (self.auto is None or self.auto.is_decided):
                self._stage = _Stage.PLANS
        if self._num_steps == 1 and self.auto is None:
            self._state.device.reset_peak()  # the first step also builds what later ones use again
        self._at = self._look()

    def _let_stay(self) -> None:
        """Between micro-batches what the budget leaves beside what steps hold may stay on the device; nothing before
        that is known. A collective, on all ranks after the same steps.
        """
        if self._across is None or self._lets_stay == (self.auto is None or self.auto.is_decided):
            return
        self._lets_stay = not self._lets_stay
        room = device_budget(self._state.activation.config, self._state.device) - self._device_bytes()
        self._across.allow(least(max(0.0, room))[0] if self._lets_stay else 0.0)

    def _let_auto_decide(self, times: StepTimes) -> None:
        """Mode "auto"; what it finds of the device's room is kept for the next run."""
        auto = self.auto
        if auto is None:
            return
        was_decided = auto.is_decided
        auto.step_applied(lambda saved: self._choice(saved, self.profile or self._of_this_step(times)))
        if not auto.is_decided or was_decided or self.profile is None or auto.measured is None:
            return
        self.profile = replace(self.profile, activations=auto.measured)
        if self._kept is not None and self._origin is not _Origin.ANEW:  # not what this run has become since
            self._kept, self._is_tried = replace(self._kept, activations=auto.measured), False
            self._keep()

    def _keep(self) -> bool:
        """For the next run, on rank 0: whether it could be."""
        if self._kept is None:
            return False
        kept_at = save_profile(self._kept if self._is_tried else replace(self._kept, activations=None))
        self._kept_at = "not kept" if kept_at is None else f"kept for the next run in {kept_at}"
        return kept_at is not None

    def _follow(self, anew: _Anew, scarce: bool) -> None:
        """What one rank asks all do: plan anew, or leave memory. A collective, on all ranks after the same steps."""
        auto, moves = self.auto, self.moves
        if not (moves.may_place or (auto is not None and self._facts.keeps)):  # nothing follows that all ranks do
            if self._computes_less and dist.get_world_size() == 1:  # others' steps are not known here
                self._drop_mismeasured()
            if anew:
                self.profile = self._as_found()
                self._plan_anew()
            return
        waits = moves.brings and not moves.is_ready
        least_anew, *asked, less = least(-float(anew), -float(scarce), -float(waits), float(self._computes_less))
        anew, (scarce, waits) = _Anew(int(-least_anew)), (value < 0 for value in asked)
        if less:  # on all ranks: the plan is made by the slowest one's compute
            anew = _Anew.ALL
            self._drop_mismeasured()
        if anew:
            profiles = [profile for profile in of_every_rank(self._as_found()) if profile is not None]
            self.profile = self._lately(slowest(profiles))
            if auto is not None and (anew is _Anew.ALL or (anew is _Anew.ACTIVATIONS and auto.is_decided)):
                was_decided = auto.is_decided
                auto.decide_anew()
                self._record_next()
                if was_decided and current_rank() == 0:
                    get_logger().info("activations are decided anew within the next steps")
            elif anew is _Anew.ALL:
                self._record_next()
            self._plan_anew()
            if anew is _Anew.ALL:  # the profile is of other steps than those that are trained
                self._stage, self._num_measured, self._blocks = _Stage.MEASURES, 0, ()
                self._update_rate = self._sum_rate = 0.0
        plan = self._state.plan
        if scarce:
            moves.leave_memory()
        elif anew in (_Anew.TIMES, _Anew.ACTIVATIONS):
            moves.move(self.profile)
        elif moves.brings:
            moves.bring(waits=waits)
        if self._state.plan is not plan:
            self._moved()

    @property
    def _computes_less(self) -> bool:
        """Whether much less than was measured, and the next steps may measure."""
        is_found = self._watch is not None and Cause.LESS_COMPUTE in self._watch.told
        return is_found and self._may_measure_anew and self.moves.is_idle and not self._state.core.has_snapshot

    def _moved(self) -> None:
        """What steps take is predicted anew when everything has arrived, and what lanes reach is looked at anew: it
        depends on what they work beside.
        """
        self._usual = {}
        if self._stage is _Stage.WATCHES:
            self._watch, self._stage = None, _Stage.PLANS

    def _as_found(self) -> RunProfile | None:
        """The profile with storage as this rank finds it."""
        if self.profile is None or self._measured_rates is None:
            return self.profile
        return replace(self.profile, storage=slowed(self._measured_rates, self._left))

    def _plan_anew(self) -> None:
        """Predicts, tells and watches by what is true now."""
        if self._watch is not None:
            self._usual = self._watch.usual()
        self._watch, self._stage = None, self._planning()
        if self._num_steps > 1:  # the first step's batch is no news of an earlier run's machine
            self._origin = _Origin.ANEW

    def _recorded(self) -> tuple[BlockCost, ...]:
        """What mode "auto" saw of the first forward; empty without it."""
        return self.auto.blocks if self.auto is not None else ()

    def close(self) -> None:
        """What only many steps tell is kept for the next run: how often updates were done again, and beside a device at
        what rate they run, and what threads do themselves when nothing is recorded any more. Idempotent.
        """
        self.clock.close()
        kept = self._kept
        if kept is None:
            return
        found, share = kept, self._state.core.policy.refused_share
        if share is not None and abs(share - kept.redo_share) > _NEWS:
            found = replace(found, redo_share=share)
        rate = None if self._watch is None else self._watch.usual().get(Cause.UPDATES)
        is_alone = kept.world_size == 1 and not kept.device_is_host  # else others' rates count, or cores' alone
        if rate is not None and is_alone and abs(rate / kept.update_rate - 1) > _NEWS:
            found = replace(found, update_rate=rate)
        if is_alone and len(self._threads) >= _FEWEST_STEPS:
            threads = ThreadSecs(*map(statistics.median, zip(*map(astuple, self._threads), strict=True)))
            both = zip(astuple(threads), astuple(kept.thread), strict=True)
            if any(abs(now - then) > _NEWS * then > 0 for now, then in both):
                found = replace(found, thread=threads)
        if found is not kept:
            self._kept = found
            self._keep()
        self._kept = None

    # ---- measuring ----------------------------------------------------------------------------------------

    def _measure(self, times: StepTimes, recorded: tuple[BlockCost, ...]) -> None:
        """The first step also builds what later ones use again; the second is timed. On all ranks."""
        state = self._state
        state.core.wait_all()
        lanes, updated = self._at.lanes, self._at.num_updated
        now, num_updated = LaneTimes.of(state), state.core.pipeline.stats().num_updated_elements
        if now.update_secs > lanes.update_secs:  # the better of both: either is a short look at a shared machine
            rate = (num_updated - updated) / (now.update_secs - lanes.update_secs)
            self._update_rate = max(self._update_rate, rate)
        before, self._added = self._added, state.core.intake.added
        if self._added[0] > before[0]:
            self._sum_rate = max(self._sum_rate, (self._added[1] - before[1]) / (self._added[0] - before[0]))
        self._num_measured += 1
        if self._num_measured < _TIMED_STEP:
            self._blocks = recorded
            return
        if times.num_elements and self.clock.recorded_elements:  # another micro-batch, and a mean of several
            self._blocks = scaled_blocks(self._blocks, times.num_elements / self.clock.recorded_elements)
        began = time.perf_counter()
        barrier()  # all probe storage at once, so each sees its own share of a disk
        found: RunProfile | None = None
        if not times.num_forwards or self._update_rate <= 0 or times.forward_secs <= 0 or times.backward_secs <= 0:
            told = "nothing was measured: the second step had no forward, backward or update that could be timed"
            log_once(logging.INFO, told, on_any_rank=True)
        else:
            try:
                storage = self._storage_rates()
                up, down = probe_link(state.device, self._link_bytes())
                found = self._profile_of(times, self._update_rate, storage, up, down)
            except (FuyouError, OSError, RuntimeError, MemoryError) as error:  # the other ranks wait for an answer
                plan = "without a plan" if self.profile is None else "by what was measured before"
                told = f"the lanes could not be measured ({error}); training goes on {plan}"
                log_once(logging.WARNING, told, on_any_rank=True)
        self._leave_out(time.perf_counter() - began, LaneTimes.of(state).since(now))
        every = of_every_rank(found)
        if any(one is None for one in every):
            self._stage, self._origin = _Stage.RUNS if self.profile is None else self._planning(), _Origin.ANEW
            return
        self._stage = self._planning()
        self.profile = replace(slowest([one for one in every if one is not None]), blocks=of_rank_0(self._blocks))
        self._measured_rates, self._left = self.profile.storage, {}
        # The next run may begin with the batches of a profile that was scaled; and a checkpoint slows what is timed.
        is_kept = (self._kept is None or self._origin is not _Origin.ANEW) and not self._is_beside_snapshot
        self._origin = _Origin.HERE if is_kept else _Origin.ANEW
        if is_kept and current_rank() == 0:
            self._kept = self.profile
            self._keep()

    def _profile_of(
        self, times: StepTimes, update_rate: float, storage: StorageRates | None, link_up: float, link_down: float
    ) -> RunProfile:
        """What this rank knows when a step has been timed."""
        state = self._state
        return RunProfile(
            machine=self._facts.machine,
            model=self._facts.model,
            shape=self.clock.shape,
            num_elements=times.num_elements,
            accumulation=times.num_forwards,
            blocks=self._blocks or self._recorded(),
            forward_secs=times.forward_secs / times.num_forwards,
            backward_secs=times.backward_secs / times.num_forwards,
            update_rate=update_rate,
            storage=storage,
            link_up=link_up,
            link_down=link_down,
            device_is_host=state.device.is_host,
            num_cores=self._facts.num_cores,
            host_bytes=float(available_host_bytes()),
            device_bytes=0.0 if state.device.is_host else float(state.device.free_bytes()),
            given=state.plan_input,
            world_size=dist.get_world_size(),
            num_params=state.num_params,
            thread=times.thread,
            sum_rate=self._sum_rate,
        )

    def _link_bytes(self) -> int:
        """To probe the link with. On a device no more than the step had: its peak is still to be looked at."""
        device = self._state.device
        if device.is_host:
            return _LINK_BYTES_ON_HOST
        return max(PAGE_BYTES, min(_LINK_BYTES, device.peak_bytes() - device.allocated_bytes()))

    def _storage_rates(self) -> StorageRates | None:
        state = self._state
        if not self._stores:
            return None
        stored = state.frozen_bytes()["nvme"] + (0 if state.store is None else state.store.total_bytes)
        num_bytes = min(_LARGEST_PROBE, max(_SMALLEST_PROBE, (stored or 4 * state.plan.activation_bytes) // 4))
        transfer = min(state.plan.chunk_bytes, max(256 << 10, num_bytes // 16)) // PAGE_BYTES * PAGE_BYTES
        return probe_storage(state.core.io, [Path(path) for path in state.activation.state_paths], num_bytes, transfer)

    @property
    def _stores(self) -> bool:
        """Whether anything is on storage, or may go there: classes of the plan, frozen parameters, activations."""
        tier = self._state.swap_tier
        swaps = tier is not None and tier.storage is not None
        return swaps or self._state.store is not None or self._state.reads_parameters

    # ---- planned ------------------------------------------------------------------------------------------

    def _lately(self, profile: RunProfile) -> RunProfile:
        """With how often updates begun in backward were done again, or would have been, as far as this run knows."""
        share = self._state.core.policy.refused_share
        return profile if share is None else replace(profile, redo_share=share)

    def _time(self, profile: RunProfile) -> StepTime:
        return run_time(self._lately(profile), self._state.plan_input, updates=updates_of_run(self._state.core))

    def _begin(self, profile: RunProfile) -> None:
        """Predicts, tells, and watches from the next step on."""
        state = self._state
        work, before = self._look().work, self._at.work
        moved = ActivationWork(
            work.written_bytes - before.written_bytes,
            work.num_forwards - before.num_forwards,
            recomputed_flops(state.activations, self._recorded()),
        )
        place = placement_of_run(state, profile, moved)
        if place is None:
            log_once(logging.INFO, "no plan: nothing was measured of storage, which this placement needs")
            self.profile, self._stage = None, _Stage.RUNS
            return
        time = self._time(profile)
        chosen = predict(time, place)
        state.planned_device_bytes = self._device_bytes()
        state.device.reset_peak()
        if current_rank() == 0:
            given = state.plan_input
            given = replace(given, weighs_start=given.weighs_start and state.core.policy.possible)
            rows = class_rows(given, time, place, state.plan)
            lines = [chosen.line(), *class_lines(rows, chosen.iteration_secs)]
            if state.planned_device_bytes:
                lines.append(f"at most {shown_bytes(state.planned_device_bytes)} of the device are in use")
            origin = self._kept_at if self._origin is _Origin.HERE else self._origin.value
            get_logger().info("plan (%s): %s\n  %s", origin, profile_line(profile), "\n  ".join(lines))
        self._adopt(profile, chosen)

    def _device_bytes(self) -> float:
        """The most that steps hold on the device: what mode "auto" expects of its choice, and what stays between
        micro-batches, of which it knows nothing; else what the last one held. 0 where it is the host.
        """
        known = None if self.auto is None else self.auto.device_bytes
        if known is None or self._state.device.is_host:
            return float(self._state.device.peak_bytes())
        if self._across is None or self._state.model.accumulation == 1:
            return known
        return known + self._across.most_bytes

    def _choice(self, saved: SavedStep, profile: RunProfile | None) -> Choice:
        """What becomes of activations, by predicted time where this run can predict. On rank 0."""
        place = None if profile is None else placement_of_run(self._state, profile, ActivationWork())
        if profile is None or place is None:  # nothing was timed: nothing is computed twice
            return saved.planned(Placement(), lambda place: place.recompute_flops + 1e-9 * place.swapped_bytes)
        return saved.planned(place, self._time(profile).secs)

    def _of_this_step(self, times: StepTimes) -> RunProfile | None:
        """Where profiles are not kept: what the lanes did in the step that ends now."""
        state = self._state
        lanes = LaneTimes.of(state).since(self._at.lanes)
        if not times.num_forwards or times.forward_secs <= 0 or times.backward_secs <= 0:
            return None
        updated = state.core.pipeline.stats().num_updated_elements - self._at.num_updated
        never = float("inf")
        update_rate = updated / lanes.update_secs if updated and lanes.update_secs > 0 else never
        return self._profile_of(times, update_rate, storage_rates(lanes), never, never)

    def _adopt(self, profile: RunProfile, prediction: Prediction, told: Collection[Cause] = ()) -> None:
        """What steps are compared with from the next one on."""
        self.prediction, self._stage = prediction, _Stage.WATCHES
        self._threads.clear()
        if self._state.trace is not None:
            self._state.trace.planned({**prediction.lane_secs, "iteration": prediction.iteration_secs})
        slower = [lane for lane, left in self._left.items() if left < 1]
        self._watch = LaneWatch(
            prediction, prediction.thread_secs, profile.num_elements, self._usual, self._patience, told, slower
        )

    def _follow_updates(self, profile: RunProfile, watch: LaneWatch, known: Prediction) -> None:
        """Whether updates start in backward depends on how often gradients are clipped."""
        updates = updates_of_run(self._state.core)
        if updates is known.updates:
            return
        prediction = predict(self._time(profile), known.place)
        self._usual = watch.usual()
        self._adopt(profile, prediction, [cause for cause in watch.told if not cause.replans])
        waits = updates in (Updates.FORWARD, Updates.STEP)
        is_news = (
            abs(prediction.iteration_secs / known.iteration_secs - 1) >= _TOLD_GAP or waits not in self._told_waits
        )
        self._told_waits.add(waits)
        if current_rank() != 0 or not is_news:
            return
        get_logger().info(
            "updates %s: %.3f s a step are predicted instead of %.3f s",
            "wait for step() from now on, because gradients were clipped often" if waits else "start in backward again",
            prediction.iteration_secs,
            known.iteration_secs,
        )

    def _compare(self, watch: LaneWatch, times: StepTimes) -> bool:
        """This step against the plan: whether it must be made anew. A step beside which a checkpoint is written tells
        nothing of the others.
        """
        if self._is_beside_snapshot:
            return False
        before, now = self._at, self._look()
        step = now.lanes.since(before.lanes)
        self._threads.append(times.thread)
        found = watch.step(
            StepMeasurement(
                secs=now.secs - before.secs,
                outside_secs=times.outside_secs,
                compute_secs=times.forward_secs + times.backward_secs,
                read_secs=step.read_secs,
                write_secs=step.write_secs,
                update_secs=step.update_secs,
                read_bytes=step.read_bytes,
                write_bytes=step.write_bytes,
                num_updated=now.num_updated - before.num_updated,
                num_elements=times.num_elements,
            )
        )
        for finding in found:
            self.findings.append(finding)
            rank = current_rank()
            if rank == 0 or finding.cause.replans:  # what is no reason to plan anew all ranks would say
                who = f" of rank {rank}" if rank else ""
                get_logger().warning("step %d%s departs from the plan: %s", self._num_steps, who, finding.text)
        if self._origin is _Origin.EARLIER and any(one.cause in (Cause.STEP, Cause.COMPUTE) for one in found):
            self._drop_kept()
        replans = [finding for finding in found if finding.cause.replans]
        if not replans or self.profile is None:
            return False
        batches = [finding.measured for finding in replans if finding.cause is Cause.WORKLOAD]
        if batches:  # those that lasted, of which the last one need not be typical
            self.profile = _scaled(self.profile, replace(times, num_elements=batches[0]), self.clock.shape)
        self._left = left_of_storage(self._left, replans)
        for cause in {finding.cause for finding in replans}.intersection(self._patience):
            self._patience[cause] *= 2
        return True

    def _clips_otherwise(self) -> bool:
        """Whether gradients have been clipped so much more often, or less, than was planned with, for so many steps,
        that updates had better begin elsewhere, and P16 have as many versions as that needs. All ranks count alike, but
        one that asks to plan anew for another reason; whoever asks, all follow.
        """
        profile = self.profile
        if profile is None or not self.moves.may_move or not self._state.plan_input.open().may_speculate:
            return False
        is_often = self._lately(profile).redo_share > MOST_REDONE
        self._num_unlike = self._num_unlike + 1 if is_often != (profile.redo_share > MOST_REDONE) else 0
        if self._num_unlike < self._clip_patience:
            return False
        self._num_unlike = 0
        self._clip_patience *= 2  # as with what else keeps changing
        return True

    def _drop_mismeasured(self) -> None:
        """Once in a run, on all ranks: compute of the profile was never a step's usual one. What is kept of another
        batch, for which it was scaled, is none the worse for that.
        """
        self._may_measure_anew = False
        kept, profile = self._kept, self.profile
        if kept is None or profile is None or not is_another(kept.num_elements, profile.num_elements):
            self._drop_kept()

    def _drop_kept(self) -> None:
        """A profile that does not tell how long a step takes is measured again by the next run."""
        if self._kept is not None and forget_profile(self._facts.machine, self._facts.model):
            get_logger().info("the kept profile no longer holds: it is dropped, and the next run measures again")
        self._kept = None


def storage_rates(lanes: LaneTimes) -> StorageRates | None:
    """What a step's transfers came to; None where none ended in it. One that is on its way has taken time, and no bytes
    are counted of it.
    """
    busy = ((lanes.read_bytes, lanes.read_secs), (lanes.write_bytes, lanes.write_secs))
    rates = [moved / secs for moved, secs in busy if moved > 0 and secs > 0]
    return StorageRates(rates[0], rates[-1], sum(rates) / len(rates), 0.0, 0.0) if rates else None


def _is_alike(profile: RunProfile, times: StepTimes, shape: tuple[int, ...]) -> bool:
    """Whether a step has as many micro-batches as those of the profile, of about the same shape."""
    are_others = len(shape) != len(profile.shape) or any(map(is_another, profile.shape, shape))
    return times.num_forwards == profile.accumulation and not are_others


def _scaled(profile: RunProfile, times: StepTimes, shape: tuple[int, ...]) -> RunProfile:
    """The profile for another batch: compute in proportion to the elements of a micro-batch."""
    known = profile.num_elements > 0 and times.num_elements > 0
    factor = times.num_elements / profile.num_elements if known else 1.0
    return replace(
        profile,
        shape=shape,
        num_elements=times.num_elements if known else profile.num_elements,
        accumulation=max(1, times.num_forwards),
        blocks=scaled_blocks(profile.blocks, factor),
        forward_secs=factor * profile.forward_secs,
        backward_secs=factor * profile.backward_secs,
    )
