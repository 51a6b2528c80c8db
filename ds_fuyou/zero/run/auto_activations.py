# SPDX-License-Identifier: Apache-2.0
"""``activations.mode: auto`` in the engine: is told what one forward made, sees in one step what is saved and what room
there is, and has the planner decide, the same on all ranks; anew when asked. Where an earlier run has kept what it saw,
that decides before the first step. Where a plan document says what becomes of activations, that is done instead.

Until it has decided nothing leaves the device that fits there: of the budget, less what the device holds when a forward
begins, half is for saved tensors, the other half for what backward and gradients need, which nobody knows yet; or less
than half, where the loss over a large vocabulary needs more. What goes beyond that is swapped, and what storage has no
room for stays on the device all the same.

Afterwards a batch that is longer than those of the measured step keeps less on the device than was decided, and swaps
the rest: logits and whatever else grows with it need the room (:meth:`SavedStep.room_for`). Nothing says how long an
input is that holds no token ids; it is taken to be as long as the others. Where a plan document decides, which may be
wrong about the device, the first step says what room there is for what it keeps.

Budgets count what tensors take; an allocator also has holes, which differ from stream to stream. Where it has to give
back what it kept for later, which waits for the whole device, a fiftieth of the budget less stays from then on, a tenth
at most.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ds_fuyou.activations.auto import Choice, SavedStep
from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.named_outputs import planned_choice, require_blocks
from ds_fuyou.activations.policy import BlockFate
from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.activations.swapper import Swapper
from ds_fuyou.host.device import Device
from ds_fuyou.log import current_rank, get_logger, log_once
from ds_fuyou.planner.profile import BlockCost, MeasuredActivations, OperatorCost, scaled_blocks
from ds_fuyou.zero.agreement import decided_by_rank_0, least, of_rank_0
from ds_fuyou.zero.monitoring import tokens_in
from ds_fuyou.zero.run.budgets import unmeasured_room
from ds_fuyou.zero.run.device_peaks import DevicePeaks

__all__ = ["AutoActivations"]

_GIVEN_UP, _MOST_GIVEN_UP = 1 / 50, 1 / 10  # of the device's budget
_MEASURED_STEP = 2  # at the earliest: the first one is watched, and builds what later ones use again


class AutoActivations:
    """To be told of every step.

    Args:
        budget_bytes: of the device.
        loss_bytes_each: of it, that the loss of a token may take.
        planned: ``activations`` of a plan document, which then decides after the first step; None: the rule does.

    Raises:
        FuyouConfigError: the plan is for another number of blocks.
    """

    def __init__(
        self,
        session: ActivationSession,
        swapper: Swapper,
        device: Device,
        budget_bytes: int,
        loss_bytes_each: int,
        planned: Mapping[str, Mapping[str, int]] | None,
    ) -> None:
        if planned is not None:
            require_blocks(planned, len(session.blocks))
        self._session, self._swapper = session, swapper
        self._device = device
        self._budget_bytes, self._loss_bytes_each = budget_bytes, loss_bytes_each
        self._planned = planned
        self._peaks = DevicePeaks(device, swapper)
        self._lengths: list[int] = []  # of the measured step's micro-batches, in tokens
        self._fixed_bytes = math.inf  # of the device when their forwards begin, but for activations
        self._begin()
        session.watch_inputs(self._forward_begins)

    def _begin(self) -> None:
        self.is_decided = False
        self.measured: MeasuredActivations | None = None
        """What it was decided by; None where a plan document decided."""
        self.device_bytes: float | None = None
        """The most that a rank will hold on the device by what was decided; None: not known."""
        self._usual: MeasuredActivations | None = None  # what longer batches are compared with
        self._decided_by: SavedStep | None = None
        self._kept_bytes = 0.0  # of activations on the device, as decided
        self._tries: Callable[[], None] | None = None  # to be told when the first forward begins decided
        self._more_bytes = 0.0  # of the device in use by then than in the measured run
        self._given_up_bytes, self._num_retries, self._is_between = 0.0, 0, True
        self._num_steps = 0
        self._at = self._look_anew()
        self.blocks: tuple[BlockCost, ...] = ()
        """What the first forward made, block by block; once it has decided, a mean one of the measured step."""
        self._recorded_tokens = 0
        self._once: dict[str, str] = {}
        self._swapper.fates, self._swapper.keeps_what_storage_refuses = {}, True

    def _forward_begins(self, inputs: Any) -> None:
        """Says what room it has. Notes how long batches of the measured step are, and makes room for longer ones."""
        swapper, usual, saved = self._swapper, self._usual, self._decided_by
        tokens = tokens_in(inputs)
        if not (self.blocks or self._recorded_tokens):
            self._recorded_tokens = tokens
        if usual is None or saved is None:
            loss_bytes = self._loss_bytes_each * tokens
            swapper.room_bytes = unmeasured_room(self._budget_bytes, self._device, swapper.held.now, loss_bytes)
            self._peaks.forward_begins()
            self._lengths.append(tokens)
            self._fixed_bytes = min(self._fixed_bytes, max(0, self._device.allocated_bytes() - swapper.held.now))
            return
        if self._tries is not None:
            tries, self._tries = self._tries, None
            in_use = self._device.allocated_bytes() - swapper.held.now
            self._more_bytes = max(0.0, in_use - usual.fixed_bytes)
            tries()
        if self._is_between:  # what an evaluation asked for is not this step's
            self._num_retries, self._is_between = self._device.num_retries(), False
        is_longer = tokens > usual.longest_tokens > 0
        longer = (tokens / usual.mean_tokens, tokens / usual.longest_tokens) if is_longer else (1.0, 1.0)
        room = saved.most_bytes
        if is_longer or self.measured is None:  # a plan document has left no room for what backward works on
            room = saved.room_for(*longer, usual.fixed_bytes, self._kept_bytes)
        swapper.room_bytes = max(0.0, room - self._given_up_bytes - self._more_bytes)

    def decide_anew(self) -> None:
        """As in the first steps, until the next one has been measured. On all ranks after the same step."""
        self._session.decide({})
        self._begin()

    def _look_anew(self) -> dict[str, float]:
        """As :meth:`_look`, where a step begins that may be the measured one: its peaks are its own."""
        self._lengths, self._fixed_bytes = [], math.inf
        self._peaks.begin()
        return self._look()

    def _look(self) -> dict[str, float]:
        """Counters since the start."""
        saved = self._swapper.saved_bytes
        return {
            "saved": float(saved.total()),
            "outside": float(saved[""]),
            "forwards": float(self._session.num_forwards),
        }

    def step_applied(self, plan: Callable[[SavedStep], Choice]) -> None:
        """Decides by ``plan``, if enough is known. Rank 0 does for all: others may have seen another first forward, and
        recomputed blocks gather parameters, which is a collective.
        """
        if self.is_decided:
            self._give_way()
            return
        self._num_steps += 1
        when = f"after step {self._num_steps}"
        if self._num_steps >= _MEASURED_STEP:
            measured, blocks = self._measured_now(), self.blocks
            if measured.mean_tokens and self._recorded_tokens:
                blocks = scaled_blocks(blocks, measured.mean_tokens / self._recorded_tokens)
            self.blocks = of_rank_0(blocks)
            self._decide_by(measured, plan, when)
            return
        choice = None if self._planned is None else of_rank_0(self._by_plan(self._planned))
        if choice is not None:
            self._usual = self._measured_now()
            self._decided_by = self._saved_step(self._usual)
            self._decide(choice, when)
            self._kept_bytes = math.inf  # in blocks that may come back
            self.device_bytes = float(self._budget_bytes)  # what is kept fills it, if there is as much
            return
        self._at = self._look_anew()

    def begin_decided(
        self,
        kept: MeasuredActivations,
        blocks: tuple[BlockCost, ...],
        plan: Callable[[SavedStep], Choice],
        tries: Callable[[], None],
    ) -> None:
        """Before the first step, by what an earlier run measured, the same on all ranks. Not where a plan document
        decides, nor where blocks are others now. ``tries``: is told when the first forward begins. A collective.
        """
        recorded = {block.name for block in blocks if block.name}
        is_known = {block.name for block in self._session.blocks}.issuperset(recorded | {*kept.once})
        if self._planned is not None or not is_known or kept.num_blocks != len(self._session.blocks):
            return
        self.blocks, self._once = blocks, dict(kept.once)
        self._decide_by(kept, plan, "before step 1, as an earlier run measured")
        self._tries = tries

    def _decide_by(self, measured: MeasuredActivations, plan: Callable[[SavedStep], Choice], when: str) -> None:
        """Rank 0 does, for all. A collective."""
        saved = self._saved_step(measured)
        self._usual = self.measured = replace(measured, room=saved.room)
        choice = decided_by_rank_0(lambda: plan(saved))
        held = choice.kept_bytes + (0.0 if choice.stays_whole else saved.passing_bytes)
        self.device_bytes = max(measured.loss_bytes + held, measured.beside_bytes + max(choice.device_bytes, held))
        self._decided_by = saved
        self._decide(choice, when)

    def _decide(self, choice: Choice, when: str) -> None:
        self._kept_bytes = choice.kept_bytes
        self.is_decided = True
        fates = choice.fates([block.name for block in self._session.blocks])
        self._session.decide(fates | self._saved_whole(fates))
        if current_rank() == 0:
            get_logger().info("activations, decided %s: %s", when, choice.line())
            get_logger().debug("in how many of %d blocks:\n%s", len(self._session.blocks), choice.table())

    def _give_way(self) -> None:
        """Where the allocator had to ask twice in the step that ends. Each rank for itself: it is no collective."""
        is_timed, self._is_between = not self._is_between, True
        if not is_timed or self._decided_by is None or self._device.num_retries() == self._num_retries:
            return
        budget = self._budget_bytes
        self._given_up_bytes = min(_MOST_GIVEN_UP * budget, self._given_up_bytes + _GIVEN_UP * budget)
        log_once(
            logging.WARNING,
            "the device's allocator had no room left and gave back what it kept for later, which waits for all work: "
            "2 % of the budget less stays there from now on after each such step, 10 % at most. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves fewer holes; a lower gpu_budget_bytes keeps less "
            "from the beginning",
            on_any_rank=True,
        )

    def _saved_whole(self, fates: Mapping[str, BlockFate]) -> dict[str, BlockFate]:
        """Of blocks that were to be computed again, in part or whole, and cannot be. A collective."""
        once = of_rank_0(self._once)
        found = {name: BlockFate(fates[name].saved) for name in once if fates[name].outputs is not None}
        if found:
            name = next(iter(found))
            log_once(
                logging.WARNING,
                f"{len(found)} of {len(self._session.blocks)} blocks are saved where computing them again would have "
                f"been faster, {name} for one: {once[name]}",
            )
        return found

    def step_skipped(self) -> None:
        """Gradients overflowed: what was done belongs to no step that could be measured."""
        if not self.is_decided:
            self._at = self._look_anew()

    def recorded(self, blocks: tuple[BlockCost, ...], once: dict[str, str]) -> None:
        """What the first forward made, and which blocks cannot be computed again, and why."""
        self.blocks, self._once = blocks, once

    def _block(self) -> BlockCost | None:
        """That stands for all."""
        return next((block for block in self.blocks if block.name), None)

    def _outputs(self) -> dict[OperatorCall, OperatorCost]:
        """Of one block: what it can be spared to compute again, if that is work or backward asks for it."""
        block = self._block()
        return {
            OperatorCall(*one.call): one
            for one in (block.operators if block is not None else ())
            if one.call is not None and one.num_bytes > 0 and (one.flops > 0 or one.saved)
        }

    def _by_plan(self, planned: Mapping[str, Mapping[str, int]]) -> Choice | None:
        choice = planned_choice(planned, len(self._session.blocks), self._outputs())
        if choice is None:
            log_once(
                logging.WARNING,
                "fuyou.plan names operators of attention and MLP that the blocks of this model do not have; what "
                "becomes of activations is decided by what the next step shows instead",
            )
        return choice

    def _measured_now(self) -> MeasuredActivations:
        """Since the last look. A collective."""
        now = self._look()
        return self._measured({key: now[key] - self._at[key] for key in now})

    def _measured(self, step: dict[str, float]) -> MeasuredActivations:
        """Of this step; of the device what the rank had that needs most of it. A collective."""
        forwards = max(1, int(step["forwards"]))
        block_bytes = (step["saved"] - step["outside"]) / forwards / max(1, len(self._session.blocks))
        peaks = self._peaks
        peaks.end()
        beside, passing = peaks.beside_bytes(block_bytes), peaks.passing_bytes(block_bytes)
        loss = beside if peaks.loss_bytes is None else peaks.loss_bytes
        *most, fixed = least(-beside, -loss, -passing, min(self._fixed_bytes, beside))
        beside, loss, passing = (-less for less in most)
        return MeasuredActivations(
            num_blocks=len(self._session.blocks),
            block_bytes=block_bytes,
            outside_bytes=step["outside"] / forwards,
            beside_bytes=beside,
            loss_bytes=loss,
            passing_bytes=passing,
            fixed_bytes=fixed,
            mean_tokens=sum(self._lengths) / max(1, len(self._lengths)),
            longest_tokens=float(max(self._lengths, default=0)),
            room=0.0,
            once=self._once,
        )

    def _saved_step(self, measured: MeasuredActivations) -> SavedStep:
        """With the room that every rank has now. A collective."""
        tier = self._swapper.tier
        host_bytes = stored_bytes = 0.0
        if tier is not None:
            home = tier.storage
            host_bytes = float(tier.kept_bytes)
            stored_bytes = 0.0 if home is None else float(home.space.room_bytes)
        budget, host_bytes, stored_bytes = least(self._budget_bytes, host_bytes, stored_bytes)
        known = self._block()
        return SavedStep(
            num_blocks=max(1, len(self._session.blocks)),
            block_bytes=measured.block_bytes,
            block_flops=known.flops if known is not None else 0.0,
            input_bytes=known.input_bytes if known is not None else 0.0,
            outside_bytes=measured.outside_bytes,
            outputs=self._outputs(),
            device_bytes=max(0.0, budget - measured.beside_bytes),
            beside_bytes=measured.beside_bytes,
            staying_bytes=max(0.0, budget - measured.loss_bytes),
            passing_bytes=measured.passing_bytes,
            host_bytes=host_bytes,
            stored_bytes=stored_bytes,
        )
