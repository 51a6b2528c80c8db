# SPDX-License-Identifier: Apache-2.0
"""The planner beside a run: two conservative steps are measured, then every step is compared with what they predict.

Step 1 records operators and leaves no update behind; in step 2 nothing is updated before ``step()``, so forward,
backward and the optimizer are each timed alone. A profile that an earlier run kept takes the place of both. Results are
the same with and without: only the order of work changes. Rank 0 loads and keeps the profile, measures storage,
watches and tells. Which steps are measured, and when activations are decided anew, is said by rank 0 to all: both lead
to collectives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ds_fuyou.activations.auto import Choice, SavedStep
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.log import current_rank, get_logger, log_once
from ds_fuyou.planner.cost import Placement
from ds_fuyou.planner.decide import Decision
from ds_fuyou.planner.host_memory import available_host_bytes
from ds_fuyou.planner.policies import Updates
from ds_fuyou.planner.profile import (
    BlockCost,
    OperatorCost,
    RunProfile,
    StorageRates,
    forget_profile,
    save_profile,
)
from ds_fuyou.planner.profiled import (
    Prediction,
    alternatives,
    durability_line,
    placed_again,
    predict,
    prediction_line,
    prediction_table,
    profile_line,
    run_time,
)
from ds_fuyou.planner.watch import LASTING, Cause, Finding, LaneWatch, StepMeasurement, with_finding
from ds_fuyou.profiling.lane_rates import probe_link, probe_storage
from ds_fuyou.profiling.operators import BlockProfile, OperatorRecorder
from ds_fuyou.storage.types import PAGE_BYTES
from ds_fuyou.telemetry.report import LaneTimes
from ds_fuyou.zero.activations import model_blocks
from ds_fuyou.zero.agreement import decided_by_rank_0, on_any_rank
from ds_fuyou.zero.auto_activations import AutoActivations
from ds_fuyou.zero.rank_state import RankState
from ds_fuyou.zero.run_facts import (
    ActivationWork,
    KnownRun,
    placement_of_run,
    recomputed_flops,
    updates_of_run,
)
from ds_fuyou.zero.step_clock import StepClock, StepTimes

__all__ = ["RunPlan"]

_SMALLEST_PROBE, _LARGEST_PROBE = 4 << 20, 256 << 20
_LINK_BYTES, _LINK_BYTES_ON_HOST = 64 << 20, 8 << 20  # the latter is host memory twice: little, for any model
_TIMED_STEP = 2
_EARLIER = "measured in an earlier run"


class RunPlan:
    """Of one rank; told of forwards by its clock, of everything else by the stage-3 optimizer. Tells mode "auto".

    Args:
        rank_state: the rank's placement and lanes.
        auto: decides what becomes of activations; None in other modes.
        leave_out: seconds and work of lanes that were spent on measuring, to be left out of reports.
        known: what the run was placed by.
    """

    def __init__(
        self,
        rank_state: RankState,
        model: torch.nn.Module,
        auto: AutoActivations | None,
        leave_out: Callable[[float, LaneTimes], None],
        known: KnownRun,
    ) -> None:
        self._state = rank_state
        self.auto = auto
        self._leave_out = leave_out
        self._facts = known
        self.clock = StepClock(model, rank_state.clock)
        self.profile: RunProfile | None = None
        self.prediction: Prediction | None = None
        self.findings: list[Finding] = []
        self._origin = _EARLIER
        self._usual: dict[Cause, float] = {}
        self._patience = LASTING
        self._settles = auto is not None
        self._watch: LaneWatch | None = None
        self._num_steps = 0
        self._blocks: tuple[BlockCost, ...] = ()
        self._at = self._look()
        profile = known.profile
        if profile is not None and profile.storage is None and self._stores:
            profile = None  # measured while nothing was on storage
        self._plans, self._measures = known.keeps, known.keeps and profile is None
        if current_rank() == 0:
            self.profile = profile
        if auto is None and self._measures and current_rank() == 0:
            session = rank_state.activations
            blocks = session.blocks if session is not None else model_blocks(model, rank_state.activation.config)
            swapper = session.swapper if session is not None else None
            self.clock.record_next(blocks, None if swapper is None else (swapper.pack, swapper.unpack))

    def _look(self) -> tuple[float, LaneTimes, int, ActivationWork]:
        """Counters since the start."""
        state = self._state
        session, work = state.activations, ActivationWork()
        if session is not None:
            work = ActivationWork(session.counters.written_bytes, session.num_forwards)
        return time.perf_counter(), LaneTimes.of(state), state.core.pipeline.stats().num_updated_elements, work

    # ---- told by the optimizer ----------------------------------------------------------------------------

    @property
    def recorder(self) -> OperatorRecorder | None:
        """Whoever records the forward that runs now."""
        return (self.auto.recorder if self.auto is not None else None) or self.clock.recorder

    @property
    def holds_updates(self) -> bool:
        """Whether this step updates nothing before ``step()``, so that backward can be timed alone."""
        return self._measures and self._num_steps == _TIMED_STEP - 1

    def step_skipped(self) -> None:
        """Gradients overflowed: what was timed belongs to no step."""
        if self.auto is not None:
            self.auto.step_skipped()
        self.clock.end_step()
        self._at = self._look()

    def step_applied(self) -> None:
        """A step was applied; its updates may still run."""
        if self.auto is not None:
            self.auto.take_profile()
        self._num_steps += 1
        times = self.clock.end_step(wait=self._measures)
        wished = False
        measured = self._measures
        if self._measures:
            self._measure(times)
        elif self._num_steps == 1 and self.profile is not None:
            if (self.clock.shape, times.num_forwards) != (self.profile.shape, self.profile.accumulation):
                self.profile = _scaled(self.profile, times, self.clock.shape)
        elif self._watch is not None:
            wished = self._compare(self._watch, times)
        if self.auto is not None:
            self.auto.step_applied(lambda saved: self._choice(saved, times))
        if measured and not self._measures:
            self._move()
        if self._watch is not None and self.profile is not None and self.prediction is not None:
            self._follow_updates(self.profile, self._watch, self.prediction)
        self._decide_anew(wished)
        if self.profile is not None and self._watch is None and current_rank() == 0:
            self._settle(self.profile)
        self._at = self._look()

    def _decide_anew(self, wished: bool) -> None:
        """If rank 0, which alone watches, wishes so. Nothing that only rank 0 knows may keep it from asking."""
        auto = self.auto
        if not (self._plans and auto is not None and auto.is_decided and on_any_rank(wished)):
            return
        auto.decide_anew()
        self._watch, self._settles = None, True
        if wished:
            get_logger().info("activations are decided anew within the next steps")

    def _settle(self, profile: RunProfile) -> None:
        """Plans once activations have their fates for a whole step."""
        if not self._state.core.mover.is_idle:
            return
        if not self._settles:
            self._begin(profile)
        elif self.auto is None or self.auto.is_decided:
            self._settles = False

    def _profiles(self) -> tuple[BlockProfile, ...]:
        """What mode "auto" recorded of the first forward; empty without it."""
        return self.auto.profiles if self.auto is not None else ()

    def close(self) -> None:
        """Idempotent."""
        self.clock.close()

    # ---- measuring ----------------------------------------------------------------------------------------

    def _measure(self, times: StepTimes) -> None:
        """The first step also builds what later ones use again; the second is timed."""
        state = self._state
        if self._num_steps < _TIMED_STEP:
            self._blocks = tuple(_block_cost(p) for p in self._profiles() or self.clock.profiles())
            state.core.wait_all()
            return
        self._measures = False
        state.core.wait_all()
        _, lanes, updated, _ = self._at
        now, num_updated = LaneTimes.of(state), state.core.pipeline.stats().num_updated_elements
        if current_rank() != 0:
            return
        update_secs = now.update_secs - lanes.update_secs
        if not times.num_forwards or update_secs <= 0 or times.forward_secs <= 0 or times.backward_secs <= 0:
            log_once(logging.INFO, "no plan: the second step had no forward, backward or update that could be timed")
            return
        self._probed(times, (num_updated - updated) / update_secs)

    def _probed(self, times: StepTimes, update_rate: float) -> None:
        """Measures what is left, keeps the profile and tells the plan."""
        state, began, before = self._state, time.perf_counter(), LaneTimes.of(self._state)
        try:
            storage = self._storage_rates()
        except (FuyouStorageError, OSError) as error:
            log_once(logging.WARNING, f"no plan: storage could not be measured ({error}); training goes on without")
            return
        device = state.device
        up, down = probe_link(device, _LINK_BYTES_ON_HOST if device.is_host else _LINK_BYTES)
        self.profile = RunProfile(
            machine=self._facts.machine,
            model=self._facts.model,
            shape=self.clock.shape,
            accumulation=times.num_forwards,
            blocks=self._blocks,
            forward_secs=times.forward_secs / times.num_forwards,
            backward_secs=times.backward_secs / times.num_forwards,
            update_rate=update_rate,
            storage=storage,
            link_up=up,
            link_down=down,
            device_is_host=device.is_host,
            num_cores=self._facts.num_cores,
            host_bytes=float(available_host_bytes()),
            device_bytes=0.0 if device.is_host else float(device.free_bytes()),
        )
        self._leave_out(time.perf_counter() - began, LaneTimes.of(state).since(before))
        kept_at = save_profile(self.profile)
        self._origin = "not kept" if kept_at is None else f"kept for the next run in {kept_at}"

    def _storage_rates(self) -> StorageRates | None:
        state = self._state
        if not self._stores:
            return None
        stored = state.store.total_bytes if state.store is not None else 4 * state.plan.activation_bytes
        num_bytes = min(_LARGEST_PROBE, max(_SMALLEST_PROBE, stored // 4))
        transfer = min(state.plan.chunk_bytes, max(256 << 10, num_bytes // 16)) // PAGE_BYTES * PAGE_BYTES
        paths = [Path(path) for path in state.activation.state_paths]
        rates = probe_storage(state.core.io, paths, num_bytes, transfer)
        share = 1.0 / self._facts.local_ranks  # the others wait now, and will not wait then
        return replace(rates, read=share * rates.read, write=share * rates.write, mixed=share * rates.mixed)

    @property
    def _stores(self) -> bool:
        """Whether anything may go to storage: classes of the plan, or activations."""
        session = self._state.activations
        tier = session.swapper.tier if session is not None and session.swapper is not None else None
        return self._state.store is not None or (tier is not None and tier.storage is not None)

    # ---- planned ------------------------------------------------------------------------------------------

    def _begin(self, profile: RunProfile) -> None:
        """Predicts, tells, and watches from the next step on."""
        _, _, _, work = self._look()
        before = self._at[3]
        moved = ActivationWork(
            work.written_bytes - before.written_bytes,
            work.num_forwards - before.num_forwards,
            recomputed_flops(self._state.activations, self._profiles()),
        )
        placement = placement_of_run(self._state, profile, moved)
        if placement is None:
            log_once(logging.INFO, "no plan: nothing was measured of storage, which this placement needs")
            self.profile = None
            return
        chosen, others = predict(profile, placement), alternatives(profile, placement)
        budget = self._state.host_budget_bytes
        get_logger().info(
            "plan (%s): %s\n  %s", self._origin, profile_line(profile), prediction_line(chosen, others, budget)
        )
        if self._state.activation.config.durable:
            get_logger().info("plan: %s", durability_line(chosen, others, budget))
        get_logger().debug("all placements of whole classes:\n%s", prediction_table(chosen, others, budget))
        self._adopt(profile, chosen)

    def _move(self) -> None:
        """States go to where what was measured says they should be, over the next steps. A collective: rank 0 knows.

        Where a run may be gone on from nothing moves: its files are looked for where a run that begins places them.
        """
        state, config = self._state, self._state.activation.config
        if state.store is None or config.optimizer.tier != "auto" or "optimizer" in state.plan_input.shares:
            return
        if config.resume == "auto" or config.durable:
            return
        found = decided_by_rank_0(self._better_states)
        if found is None:
            return
        was, share = state.plan.residency.optimizer, found.plan.residency.optimizer
        if state.move_to(share):
            state.planned(replace(state.plan, residency=replace(state.plan.residency, optimizer=share)))
            if current_rank() == 0:
                get_logger().info(
                    "P32 and moments move over the next steps: %.0f %% of them in host memory instead of %.0f %%, with "
                    "which %.3f s a step are predicted",
                    100 * share,
                    100 * was,
                    found.secs,
                )

    def _better_states(self) -> Decision | None:
        """Chunks that leave memory are updated in backward only where there is a spare slot, and P16 in memory has two
        versions or is none.
        """
        state, options = self._state, self._state.core.options
        if self.profile is None:
            return None
        versions = options.num_param_versions == 2 or state.plan.residency.parameters == 0
        may_speculate = state.plan_input.may_speculate and options.num_slots == 2 and versions
        given = replace(state.plan_input, may_speculate=may_speculate, durable=options.num_slots == 2)
        mode = state.activation.config.activations.mode
        return placed_again(given, state.plan_overrides, self.profile, state.plan, mode)

    def _choice(self, saved: SavedStep, times: StepTimes) -> Choice:
        """What becomes of activations, by predicted time where this run can predict. On rank 0."""
        state, profile = self._state, self.profile or self._of_this_step(times)
        placement = None if profile is None else placement_of_run(state, profile, ActivationWork())
        if profile is None or placement is None:  # nothing was timed: nothing is computed twice
            return saved.planned(Placement(), lambda place: place.recompute_flops + 1e-9 * place.swapped_bytes)
        base = Placement(placement.params, placement.states, placement.grads, staging_bytes=placement.staging_bytes)
        return saved.planned(base, run_time(profile, placement).secs)

    def _of_this_step(self, times: StepTimes) -> RunProfile | None:
        """Where profiles are not kept: what the lanes did in the step that ends now."""
        state, (_, before, num_before, _) = self._state, self._at
        lanes = LaneTimes.of(state).since(before)
        if not times.num_forwards or times.forward_secs <= 0 or times.backward_secs <= 0:
            return None
        updated = state.core.pipeline.stats().num_updated_elements - num_before
        rates = [
            moved / secs
            for moved, secs in ((lanes.read_bytes, lanes.read_secs), (lanes.write_bytes, lanes.write_secs))
            if secs > 0
        ]
        storage = StorageRates(rates[0], rates[-1], sum(rates) / len(rates), 0.0, 0.0) if rates else None
        never = float("inf")
        return RunProfile(
            machine=self._facts.machine,
            model=self._facts.model,
            shape=self.clock.shape,
            accumulation=times.num_forwards,
            blocks=tuple(_block_cost(profile) for profile in self._profiles()),
            forward_secs=times.forward_secs / times.num_forwards,
            backward_secs=times.backward_secs / times.num_forwards,
            update_rate=updated / lanes.update_secs if updated and lanes.update_secs > 0 else never,
            storage=storage,
            link_up=never,
            link_down=never,
            device_is_host=state.device.is_host,
            num_cores=self._facts.num_cores,
            host_bytes=0.0,
            device_bytes=0.0,
        )

    def _adopt(self, profile: RunProfile, prediction: Prediction) -> None:
        """What steps are compared with from the next one on."""
        self.prediction = prediction
        if self._state.trace is not None:
            self._state.trace.planned({**prediction.lane_secs, "iteration": prediction.iteration_secs})
        self._watch = LaneWatch(prediction, prediction.thread_secs, profile.num_elements, self._usual, self._patience)

    def _follow_updates(self, profile: RunProfile, watch: LaneWatch, known: Prediction) -> None:
        """Whether updates start in backward depends on how often gradients are clipped."""
        updates = updates_of_run(self._state.core)
        if updates is known.placement.updates:
            return
        prediction = predict(profile, replace(known.placement, updates=updates))
        self._usual = watch.usual()
        self._adopt(profile, prediction)
        waits = updates in (Updates.FORWARD, Updates.STEP)
        get_logger().info(
            "updates %s: %.3f s a step are predicted instead of %.3f s",
            "wait for step() from now on, because gradients were clipped often" if waits else "start in backward again",
            prediction.iteration_secs,
            known.iteration_secs,
        )

    def _compare(self, watch: LaneWatch, times: StepTimes) -> bool:
        """This step against the plan. Whether the plan was made anew."""
        began, lanes, updated, _ = self._at
        now, current, num_updated, _ = self._look()
        step = current.since(lanes)
        secs = now - began
        found = watch.step(
            StepMeasurement(
                secs=secs,
                compute_secs=step.compute_of(secs),
                read_secs=step.read_secs,
                write_secs=step.write_secs,
                update_secs=step.update_secs,
                read_bytes=step.read_bytes,
                write_bytes=step.write_bytes,
                num_updated=num_updated - updated,
                num_elements=times.num_elements,
            )
        )
        for finding in found:
            self.findings.append(finding)
            get_logger().warning("step %d departs from the plan: %s", self._num_steps, finding.text)
        self._drop_kept(found)
        replans = [finding for finding in found if finding.cause.replans]
        if not replans or self.profile is None:
            return False
        self._again(replans, self.profile, times)
        return True

    def _drop_kept(self, findings: Sequence[Finding]) -> None:
        """A profile of an earlier run that no longer tells how long a step takes is measured again by the next run."""
        if self._origin != _EARLIER or not any(found.cause in (Cause.STEP, Cause.COMPUTE) for found in findings):
            return
        if forget_profile(self._facts.machine, self._facts.model):
            get_logger().info("the kept profile no longer holds: it is dropped, and the next run measures again")

    def _again(self, findings: Sequence[Finding], known: RunProfile, times: StepTimes) -> None:
        """The plan made anew for what is true now. Activations may change at the next step, tiers in a new run.
        Batches that keep changing, grouped by length say, are waited out longer each time.
        """
        profile = _scaled(known, times, self.clock.shape)
        if any(finding.cause is Cause.WORKLOAD for finding in findings):
            self._patience *= 2
        for finding in findings:
            profile = with_finding(profile, finding)
        self.profile, self._origin = profile, "made anew"
        if self._watch is not None:
            self._usual = self._watch.usual()
        self._begin(profile)
        self._tell_better(profile)

    def _tell_better(self, profile: RunProfile) -> None:
        """The placement that a new run should have, if it would be clearly faster."""
        if self.prediction is None:
            return
        budget, now = self._state.host_budget_bytes, self.prediction.iteration_secs
        fitting = [p for p in alternatives(profile, self.prediction.placement) if p.placement.host_bytes <= budget]
        if fitting and fitting[0].iteration_secs < 0.95 * now:
            best = fitting[0]
            where = ", ".join(f"{n}: {t}" for n, t in zip(("P16", "states", "G16"), best.placement.shown, strict=True))
            get_logger().warning(
                "another placement would be better now (%s): %.3f s a step instead of %.3f s; set these tiers in the "
                "block and start again",
                where,
                best.iteration_secs,
                now,
            )


def _block_cost(profile: BlockProfile) -> BlockCost:
    known = profile.saves_known
    operators = (
        OperatorCost(o.name, float(o.flops), float(o.num_bytes), o.saved or not known) for o in profile.outputs
    )
    return BlockCost(profile.name, float(profile.flops), float(profile.input_bytes), tuple(operators))


def _scaled(profile: RunProfile, times: StepTimes, shape: tuple[int, ...]) -> RunProfile:
    """The profile for another batch: compute in proportion to the elements of a micro-batch."""
    known = profile.num_elements > 0 and times.num_elements > 0
    factor = times.num_elements / profile.num_elements if known else 1.0
    blocks = tuple(
        replace(
            block,
            flops=factor * block.flops,
            input_bytes=factor * block.input_bytes,
            operators=tuple(
                replace(one, flops=factor * one.flops, num_bytes=factor * one.num_bytes) for one in block.operators
            ),
        )
        for block in profile.blocks
    )
    return replace(
        profile,
        shape=shape,
        accumulation=max(1, times.num_forwards),
        blocks=blocks,
        forward_secs=factor * profile.forward_secs,
        backward_secs=factor * profile.backward_secs,
    )
