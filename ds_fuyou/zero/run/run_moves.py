# SPDX-License-Identifier: Apache-2.0
"""Where states, P16, G16 and frozen parameters of a run should be, by what was measured and by the memory that is left;
their way there.

[Note: the order of moves]
Where no activation leaves the device the arena that a first run began with becomes narrower, for others to come there.
What leaves host memory of P16, G16 and frozen parameters does so at once, between two steps, then states move behind
training, those that leave first, and when all has arrived the others come: memory holds no more than before or after.
All ranks do as rank 0 decides, and wait for one another before P16 or frozen parameters move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ds_fuyou.log import current_rank, get_logger, log_once
from ds_fuyou.planner.document import CLASSES, Residency
from ds_fuyou.planner.plan import bytes_each, has_two_versions, in_use_bytes, narrow_arena_bytes
from ds_fuyou.planner.profile import RunProfile
from ds_fuyou.planner.profiled import expert_values, placed_again
from ds_fuyou.telemetry.report import LaneTimes
from ds_fuyou.zero.agreement import decided_by_rank_0, least
from ds_fuyou.zero.run.neighbours import free_memory_of_rank, memory_of_rank
from ds_fuyou.zero.run.rank_state import RankState

__all__ = ["RunMoves"]

_MOST_WAITS = 50  # steps
_FLOOR = 0.02  # of the machine's memory: with less than that available states leave it, until twice as much is


@dataclass(frozen=True)
class _Target:
    """Shares in host memory, versions of P16 there, whether updates wait for ``step()`` once it is there, bytes of the
    lanes; predicted seconds of a step.
    """

    states: float
    params: float
    num_versions: int
    waits: bool
    grads: float
    frozen: float
    prefetch_bytes: int
    gradient_buffer_bytes: int
    secs: float

    @property
    def held(self) -> float:
        """Of P16 in host memory, in all its versions."""
        return self.params * self.num_versions

    def is_as(self, other: _Target) -> bool:
        """Whether everything is in the same place."""
        places = [(one.states, one.param_place, one.grads, one.frozen) for one in (self, other)]
        return places[0] == places[1]

    @property
    def param_place(self) -> tuple[float, int, bool]:
        """What :meth:`RankState.place_params` makes of P16, and what follows from it for updates."""
        return self.params, self.num_versions, self.waits


class RunMoves:
    """Of one rank. All of it but :attr:`may_move`, :attr:`may_place`, :attr:`is_idle` and :attr:`is_short` is a
    collective.

    ``leave_out``: seconds and work of lanes that a pause took, to be left out of reports.
    """

    def __init__(self, rank_state: RankState, leave_out: Callable[[float, LaneTimes], None]) -> None:
        self._state, self._leave_out = rank_state, leave_out
        self._is_refused = dict.fromkeys((*CLASSES, "frozen"), False)  # by storage, to leave
        self._most_states = 1.0  # in host memory, since that became scarce
        self._was_short = False
        self._comes: _Target | None = None
        """What comes when states have arrived: P16, G16, frozen parameters."""
        self._num_waits = 0

    def _is_open(self, name: str) -> bool:
        """Whether the block leaves it open where a class is."""
        section = getattr(self._state.activation.config, name)
        return section.tier == "auto" and name not in self._state.plan_input.shares

    @property
    def may_move(self) -> bool:
        """Whether anything that is trained may change its tier. Where a run may be gone on from nothing does: states
        that are in host memory would be lost with it, and its files say where P16 is.
        """
        state, config = self._state, self._state.activation.config
        if state.store is None or config.resume == "auto" or config.durable:
            return False
        return any(self._is_open(name) for name in CLASSES)

    @property
    def may_place(self) -> bool:
        """Whether anything may change its tier: frozen parameters in every run, no state file says where they are."""
        return self.may_move or self._leaves("frozen")

    @property
    def is_idle(self) -> bool:
        """Everything is where it shall be."""
        return self._comes is None and self._state.core.mover.is_idle and self._state.core.grad_mover.target is None

    @property
    def is_ready(self) -> bool:
        """Whether P16 of this rank may move now, or frozen parameters, where they alone are to come; if it is to come,
        states and G16 have left as they should."""
        state, core, comes = self._state, self._state.core, self._comes
        if comes is not None and replace(comes, frozen=state.plan.residency.frozen).is_as(self._as_it_is):
            return state.may_place_frozen
        have_left = core.mover.failure is None and core.grad_mover.target is None
        return state.may_place_params and (have_left or not self.brings)

    # ---- by what was measured -----------------------------------------------------------------------------

    def move(self, profile: RunProfile | None) -> None:
        """To where what was measured says it should be, over the next steps."""
        if not self.may_place:
            return
        arena = self._arena_bytes()
        target = decided_by_rank_0(lambda: self._better(profile, arena))
        if target is None:
            return
        now, self._comes, self._num_waits = self._state.plan.residency, None, 0
        before = self._as_it_is
        moves_params = target.param_place != before.param_place
        self._narrow_arena(arena)
        if moves_params and target.held <= before.held and not self._place_params(target):
            return
        if target.grads < now.gradients and not self._place_grads(target):
            return
        if target.frozen < now.frozen and not (self._all_may_place_frozen() and self._place_frozen(target)):
            return
        if target.states != now.optimizer:
            if not self._move_states(target.states):
                return
            if current_rank() == 0:
                get_logger().info(
                    "P32 and moments move over the next steps: %.0f %% of them in host memory instead of %.0f %%, with "
                    "which %.3f s a step are predicted",
                    100 * target.states,
                    100 * now.optimizer,
                    target.secs,
                )
        if (moves_params and target.held > before.held) or target.grads > now.gradients or target.frozen > now.frozen:
            self._comes = target

    def _arena_bytes(self) -> int:
        """Host memory that activations need: less than they have where none is to leave the device, and none is there
        on any rank. A collective.
        """
        state, session, tier = self._state, self._state.activations, self._state.swap_tier
        now, needed = state.plan.activation_bytes, narrow_arena_bytes(state.plan_input)
        is_given = expert_values(state.activation.config).get("activation_bytes") is not None
        has_less = session is not None and bool(session.fates) and not session.swaps
        has_less &= tier is not None and tier.storage is not None and tier.is_empty
        is_spare = has_less and needed < now and not is_given
        return needed if least(float(is_spare))[0] else now

    def _narrow_arena(self, num_bytes: int) -> None:
        state, tier = self._state, self._state.swap_tier
        if tier is not None and num_bytes < state.plan.activation_bytes:
            tier.narrow(num_bytes)
            kept_bytes = min(state.plan.kept_activation_bytes, num_bytes // 2)
            state.planned(replace(state.plan, activation_bytes=num_bytes, kept_activation_bytes=kept_bytes))

    def _better(self, profile: RunProfile | None, arena_bytes: int) -> _Target | None:
        """If a step becomes clearly shorter. Chunks that leave memory are updated in backward only where there is a
        spare slot, and P16 in memory has two versions or is none; it gets as many as it needs where it moves, and where
        one is enough, because updates wait for ``step()`` now, it gives up the other.
        """
        state, core = self._state, self._state.core
        if profile is None:
            return None
        now, asked = state.plan.residency, state.plan_input.open()
        has_two, has_slots = core.place.num_versions == 2, core.options.num_slots >= 2
        may_speculate = asked.may_speculate and has_slots
        may_now = may_speculate and not core.policy.waits and (has_two or now.parameters == 0)
        weighs_start = asked.weighs_start and has_slots
        given = replace(asked, durable=has_slots, may_speculate=may_now, weighs_start=weighs_start)
        others = ["parameters", "gradients"] if self.may_move else []
        others += ["frozen"] if given.frozen_bytes > 0 else []
        config = state.activation.config
        found = placed_again(
            given,
            expert_values(config),
            profile,
            replace(state.plan, activation_bytes=arena_bytes),
            config.activations.mode,
            others=[] if self._was_short else others,
            states_move=self.may_move,
            may_speculate=may_speculate,
        )
        if found is None:
            return None
        plan, waits = found.plan, core.policy.waits
        residency = replace(plan.residency, optimizer=min(plan.residency.optimizer, self._most_states))
        if (residency.parameters, found.begins) == (now.parameters, may_now):  # P16 stays, in its versions
            once = bytes_each(given, "parameters", False) * given.numel * residency.parameters
            more = once if has_two and not has_two_versions(given, plan.residency) else 0
            if plan.host_bytes(given) + more > max(given.dram_budget_bytes, state.plan.host_bytes(given)):
                return None
            versions = core.place.num_versions
            if all(getattr(residency, name) == getattr(now, name) for name in ("optimizer", "gradients", "frozen")):
                return None
        else:
            versions = 2 if has_two_versions(found.settled(given), residency) else 1
            waits = not found.begins if may_speculate else waits
        return _Target(
            residency.optimizer,
            residency.parameters,
            versions,
            waits,
            residency.gradients,
            residency.frozen,
            plan.prefetch_bytes,
            plan.gradient_buffer_bytes,
            found.secs,
        )

    def bring(self, *, waits: bool) -> None:
        """What was to come when states have arrived. ``waits``: on some rank they have not, or it has no quiet."""
        self._num_waits += waits
        if self._comes is not None and not waits:
            target, self._comes = self._comes, None
            now = self._state.plan.residency
            if target.param_place != self._as_it_is.param_place:
                self._place_params(target)
            if target.grads > now.gradients:
                self._place_grads(target)
            if target.frozen > now.frozen and self._all_may_place_frozen():
                self._place_frozen(target)
        elif self._num_waits > _MOST_WAITS:  # they gave up, or a script has parameters gathered between steps
            self._comes = None

    @property
    def brings(self) -> bool:
        """Whether P16, G16 or frozen parameters are to come, the same on all ranks."""
        return self._comes is not None

    # ---- by what is left ------------------------------------------------------------------------------------

    @property
    def is_short(self) -> bool:
        """Whether this machine has so little left that the system may soon end a process, and something could leave."""
        core = self._state.core
        if self._held_bytes(*CLASSES, "frozen") <= 0 or not core.mover.is_idle or core.grad_mover.target is not None:
            return False
        return free_memory_of_rank() < _FLOOR * memory_of_rank()

    def _leaves(self, name: str) -> bool:
        state = self._state
        if name == "frozen":
            is_open = state.plan_input.frozen_bytes > 0 and name not in state.plan_input.fixed_shares()
        else:
            is_open = self.may_move and self._is_open(name)
        return is_open and not self._is_refused[name]

    def _held_bytes(self, *names: str) -> float:
        """In host memory, of what may leave it."""
        now, given, two = self._state.plan.residency, self._state.plan_input, self._state.core.place.num_versions == 2
        leaving = filter(self._leaves, names)
        return given.numel * sum(getattr(now, name) * bytes_each(given, name, two) for name in leaving)

    def _room_bytes(self) -> int:
        """A rank's part of the memory that there is beyond twice the floor; negative where it lacks."""
        return int(free_memory_of_rank() - 2 * _FLOOR * memory_of_rank())

    def _lacking_bytes(self, grows: int) -> float:
        """What the rank that is worst off needs, where leaving takes ``grows`` bytes by itself."""
        return -least(-max(0.0, float(grows - self._room_bytes())))[0]

    def leave_memory(self) -> None:
        """States leave host memory until there is twice the floor, over the next steps, and where there are none P16
        does, as soon as it can, then G16; frozen parameters where they are more than these together; on all ranks as
        much as the one needs that is worst off. Told once.
        """
        state = self._state
        core, now, given = state.core, state.plan.residency, state.plan_input
        self._was_short, self._comes = True, None
        if self._held_bytes("frozen") > self._held_bytes(*CLASSES) and self._frozen_leave():
            return
        states_leave = self._leaves("optimizer") and now.optimizer > 0
        nothing = (False,) * len(core.layout.chunks)
        away = replace(core.place.residency, **{"states" if states_leave else "params": nothing})
        grows = max(0, core.staging_bytes(away) - core.staging.capacity_bytes)
        if not states_leave:
            grows += max(0, self._reads_bytes(replace(now, parameters=0.0)) - state.parameters.capacity_bytes)
        lacking = self._lacking_bytes(grows)
        if lacking <= 0:
            return
        if states_leave:
            size = bytes_each(given, "optimizer", False) * given.numel
            share = self._most_states = max(0.0, now.optimizer - lacking / size)
            # Staging memory for what leaves is taken when there is least: as little as will do, until memory is back.
            if self._move_states(share, lambda: max(0, self._room_bytes())):
                gone = 100 * (now.optimizer - share)
                self._tell(f"P32 and moments of {gone:.0f} % of the parameters leave it for storage")
            else:
                self._is_refused["optimizer"] = True
        elif self._leaves("parameters") and now.parameters > 0:
            size = bytes_each(given, "parameters", core.place.num_versions == 2) * given.numel
            # Where the device is the host what stays is held twice while it moves.
            share = 0.0 if state.device.is_host else max(0.0, now.parameters - lacking / size)
            if not least(float(self.is_ready))[0]:
                return  # a later step finds it ready
            reads = self._reads_bytes(replace(now, parameters=share))
            if self._place_params(replace(self._as_it_is, params=share, prefetch_bytes=reads)):
                self._tell(f"P16 of {100 * (now.parameters - share):.0f} % of the parameters has left it for storage")
            else:
                self._is_refused["parameters"] = True
        elif self._leaves("gradients") and now.gradients > 0:
            share = max(0.0, now.gradients - lacking / (bytes_each(given, "gradients", False) * given.numel))
            if self._place_grads(replace(self._as_it_is, grads=share)):
                self._tell(f"G16 of {100 * (now.gradients - share):.0f} % of the parameters leaves it for storage")
            else:
                self._is_refused["gradients"] = True

    def _reads_bytes(self, residency: Residency) -> int:
        """Host memory that parameters are read to, planned or as much as the largest of those needs."""
        return max(self._state.plan.prefetch_bytes, in_use_bytes(self._state.plan_input, residency))

    def _frozen_leave(self) -> bool:
        """False if they cannot: others have to."""
        state, now = self._state, self._state.plan.residency
        reads = self._reads_bytes(replace(now, frozen=0.0))
        grows = max(0, reads - state.parameters.capacity_bytes)
        lacking = self._lacking_bytes(grows)
        if lacking <= 0:
            return True
        if not self._all_may_place_frozen():
            log_once(
                logging.WARNING,
                "host memory is scarce, and frozen parameters cannot leave it now: the script has them gathered, or "
                "another engine of this process lives",
            )
            return False
        share = max(0.0, now.frozen - lacking / state.plan_input.frozen_bytes)
        if (
            not self._place_frozen(replace(self._as_it_is, frozen=share, prefetch_bytes=reads))
            or state.frozen_share >= now.frozen
        ):
            self._is_refused["frozen"] = True
            return False
        self._tell(f"{100 * (now.frozen - state.frozen_share):.0f} % of the frozen parameters have left it for storage")
        return True

    @property
    def _as_it_is(self) -> _Target:
        plan, core = self._state.plan, self._state.core
        now, lanes = plan.residency, (plan.prefetch_bytes, plan.gradient_buffer_bytes)
        p16 = (now.parameters, core.place.num_versions, core.policy.waits)
        return _Target(now.optimizer, *p16, now.gradients, now.frozen, *lanes, 0.0)

    def _tell(self, what: str) -> None:
        log_once(logging.WARNING, f"host memory is scarce: {what}, and stays there")

    # ---- both -----------------------------------------------------------------------------------------------

    def _place_params(self, target: _Target) -> bool:
        """Now, if it can be on all ranks."""
        state = self._state
        if not least(float(self.is_ready))[0]:
            return False
        now, lanes, began = state.plan.residency, LaneTimes.of(state), time.perf_counter()
        if not state.place_params(target.params, target.prefetch_bytes, target.num_versions):
            return False
        residency = replace(now, parameters=target.params)
        starts = ""
        if target.waits != state.core.policy.waits:
            state.let_updates_wait(target.waits)
            starts = f"; from now on updates {'wait for step()' if target.waits else 'begin in backward'}"
        state.planned(replace(state.plan, residency=residency, prefetch_bytes=target.prefetch_bytes))
        secs = time.perf_counter() - began
        self._leave_out(secs, LaneTimes.of(state).since(lanes))
        if current_rank() == 0:
            get_logger().info(
                "P16 has moved in %.1f s: %.0f %% of it are in host memory instead of %.0f %%%s",
                secs,
                100 * target.params,
                100 * now.parameters,
                starts,
            )
        return True

    def _place_grads(self, target: _Target) -> bool:
        """With the next step's first gradient."""
        state, now = self._state, self._state.plan.residency
        if not state.place_grads(target.grads):
            return False
        plan = replace(state.plan, residency=replace(now, gradients=target.grads))
        state.planned(replace(plan, gradient_buffer_bytes=target.gradient_buffer_bytes))
        if current_rank() == 0:
            get_logger().info(
                "G16 moves with the next step: %.0f %% of it will be in host memory instead of %.0f %%",
                100 * target.grads,
                100 * now.gradients,
            )
        return True

    def _all_may_place_frozen(self) -> bool:
        return bool(least(float(self._state.may_place_frozen))[0])

    def _place_frozen(self, target: _Target) -> bool:
        """Now, where all ranks may."""
        state, now = self._state, self._state.plan.residency
        lanes, began = LaneTimes.of(state), time.perf_counter()
        is_placed = state.place_frozen(target.frozen, target.prefetch_bytes)
        secs = time.perf_counter() - began
        self._leave_out(secs, LaneTimes.of(state).since(lanes))
        if is_placed:
            residency = replace(now, frozen=state.frozen_share)
            state.planned(replace(state.plan, residency=residency, prefetch_bytes=target.prefetch_bytes))
            if current_rank() == 0:
                get_logger().info(
                    "frozen parameters have moved in %.1f s: %.0f %% of them are in host memory instead of %.0f %%",
                    secs,
                    100 * state.frozen_share,
                    100 * now.frozen,
                )
        return is_placed

    def _move_states(self, share: float, room: Callable[[], int] | None = None) -> bool:
        """Over the next steps. Those with a second version leave first, and come back without."""
        state, now = self._state, self._state.plan.residency
        if not state.move_to(share, room=room):
            return False
        twice = max(0.0, now.optimizer_twice - max(0.0, now.optimizer - share))
        state.planned(replace(state.plan, residency=replace(now, optimizer=share, optimizer_twice=twice)))
        return True
