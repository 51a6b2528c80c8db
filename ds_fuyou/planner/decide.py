# SPDX-License-Identifier: Apache-2.0
"""The one decider: what of each class is in host memory, and what becomes of activations. No torch.

A run at its start, a run that plans again, ``fuyou plan`` and ``fuyou init`` all ask :func:`decide`.

[Note: how it decides]
Of the placements that fit the budgets the one with the shortest predicted step. Seconds are those of the closed form
(``cost.py``), so which lane is the bound decides what a byte of host memory is worth. Where nothing is known of the
computing, it takes no time, and where nothing is known of the machine, its storage is the bound: then the placement
that moves the fewest bytes is the fastest. Of placements within 2 % of the fastest, which predictions do not tell
apart, the one that moves fewest bytes to and from storage is taken: whatever else holds a step up, waits for reads are
fewer, and it wears the disks least. Of those that move as few within 1 % (a byte of P16 whose update hands it over, of
G16 or of a frozen parameter is worth the same), the one with most of P16 and G16 in host memory: of adapters they are
small, and each piece costs a request.

Host memory is filled by classes in every order, the last one in part: with a single lane as the bound each class saves
a fixed number of seconds a byte, and one of the orders is best. With several lanes the best lies between: from the best
order on, memory is taken from one class and given to another in ever smaller parts while that helps. Activations are
planned anew for each placement, by the ladder of ``activations.py``, with what host memory it leaves them.

What passes through host memory is set aside before: an arena for activations and the lanes' pools, of generous sizes,
since the closed form knows nothing of what evens out. Where no activation is swapped the arena goes to the classes; and
where a small budget's pools would do with clearly less, and a step becomes clearly shorter for it, so do they.

Updates begin in backward, for which P16 in host memory has two versions. With one more of it, or of states, is there,
which many micro-batches make up for: where a step is shorter with updates that wait for ``step()``, they wait.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.activations import ActivationCosts, plan_activations
from ds_fuyou.planner.cost import ClosedForm, Placement, StepCost, Workload
from ds_fuyou.planner.document import Residency
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.plan import (
    CHUNK_BYTES,
    MIB,
    TWICE,
    Plan,
    PlanInput,
    activations_stay,
    arena_bytes,
    built_plan,
    bytes_each,
    classes_of,
    has_two_versions,
    kept_param_bytes,
    lane_bytes,
    least_arena_bytes,
    least_resident,
    minimum_lane_bytes,
    resident_bytes,
    save_bytes,
    stored_bytes,
)
from ds_fuyou.planner.policies import Policy

__all__ = ["Decision", "StepTime", "decide"]

_ACTIVATIONS, _NOBODY = "activations", "nobody"
_NEAR = 1.02  # of the fastest: then the one that moves least
_AS_FEW = 1.01  # of the fewest bytes: then the one with most of P16 and G16 in host memory
_PARTS = (4, 8, 16, 32, 64, 128)  # of the budget, moved from one class to another
_CLEARLY = 0.03  # of a step, and of the budget: less is not what a prediction tells
_WORTH_WAITING = 0.02  # of a step
_REACH = 1.05  # of what is to be beaten: farther off, shares in every order are not improved


@dataclass(frozen=True)
class StepTime:
    """What predicts a step: the workload, the machine as one rank sees it, when updates may run; and what a micro-batch
    saves for backward, None where that is not known. ``mode`` of activations is the user's. ``is_measured``: else
    storage alone is known to take time.
    """

    work: Workload
    machine: Machine
    policy: Policy
    activations: ActivationCosts | None = None
    mode: str = "auto"
    is_measured: bool = True

    def deferred(self) -> StepTime:
        """With updates that wait for ``step()``."""
        return replace(self, policy=self.policy.deferred())

    def begun(self) -> StepTime:
        """With updates that begin in backward."""
        return replace(self, policy=self.policy.begun())

    @cached_property
    def _cost(self) -> StepCost:
        return StepCost(self.work, self.machine, self.policy)

    def predicted(self, place: Placement) -> ClosedForm:
        return self._cost.form(place)

    def secs(self, place: Placement) -> float:
        return self._cost.secs(place)

    def moved_bytes(self, found: ClosedForm) -> float:
        """To and from storage in a step."""
        lanes, machine = found.lane_secs, self.machine
        rates = {Lane.READ: machine.storage_read, Lane.WRITE: machine.storage_write}
        return sum(lanes[lane] * rate for lane, rate in rates.items() if rate > 0)

    def placed(self, given: PlanInput, residency: Residency, in_dram: float) -> Placement:
        """With ``in_dram`` bytes of host memory for activations."""
        place = Placement(
            residency.parameters,
            residency.optimizer,
            residency.gradients,
            frozen=residency.frozen,
            states_twice=residency.optimizer_twice,
        )
        if self.activations is None:
            return place
        return plan_activations(
            self.activations,
            place,
            given.device_room_bytes,
            in_dram,
            self.secs,
            self.mode,
            most_stored=0.0 if activations_stay(given) else float("inf"),
        )


@dataclass(frozen=True)
class Decision:
    """The plan, the placement behind it, its predicted seconds of a step, and by what. ``begins``: updates do in
    backward, where they can.
    """

    plan: Plan
    place: Placement
    secs: float
    time: StepTime
    begins: bool

    def settled(self, given: PlanInput) -> PlanInput:
        """What was asked, with what was decided of when updates begin."""
        return replace(given, may_speculate=self.begins)


@dataclass(frozen=True)
class _Tried:
    residency: Residency
    in_dram: float
    place: Placement
    secs: float
    moved: float


@dataclass
class _Search:
    """Of one size of chunks, one arena, and one size of what is left to the ``lanes`` where anything is on storage.
    ``is_arena_given``: by the user, who then says how many activations stay in host memory, too.
    """

    given: PlanInput
    time: StepTime
    chunk_bytes: int
    arena: int
    lanes: int
    is_arena_given: bool = False
    may_swap: bool = True
    found: dict[tuple[float, ...], _Tried] = field(default_factory=dict)
    least_needed: float = float("inf")

    @property
    def _apart(self) -> int:
        """Host memory that no class gets."""
        arena = self.arena if self.is_arena_given else self.arena or least_arena_bytes(self.given)
        return arena + save_bytes(self.given, self.chunk_bytes)

    @property
    def _weighs_activations(self) -> bool:
        """Whether memory for activations is a class of its own: their bytes are known, and memory is their home."""
        given = self.given
        known = self.time.activations is not None and given.swaps_activations and not given.device_is_host
        return known and not given.activations_leave_dram and not self.is_arena_given

    def fill(self, most_secs: float = float("inf")) -> _Tried | None:
        """The best placement; None if none fits. It is only the best of all orders where that is far from
        ``most_secs``.
        """
        for shares in self._orders():
            self._try(*shares)
        nearest = self._fastest()
        if nearest is None or nearest.secs > _REACH * most_secs:
            return nearest
        for spare, part in itertools.product((False, True), _PARTS):
            best, helps = self._fastest(), True
            while best is not None and helps:
                before = best.secs
                for residency, in_dram in self._shifted(best, self.given.dram_budget_bytes / part, spare):
                    self._try(residency, in_dram)
                best = self._fastest()
                helps = best is not None and best.secs < before * (1 - 1e-6)
        return self._best()

    def _orders(self) -> Iterator[tuple[Residency, float]]:
        given, fixed = self.given, self.given.fixed_shares()
        open_classes = [name for name in classes_of(given) if name not in fixed]
        twice = fixed.get(TWICE, 0.0)  # of states in memory, as far as there are so many
        none = least_resident(given)
        yield _changed(none, {**dict.fromkeys(open_classes, 1.0), TWICE: twice}), self._all_left(none, open_classes)
        if self._weighs_second_states:
            yield self._all_twice(_changed(none, dict.fromkeys(open_classes, 1.0))), 0.0
        classes = [*open_classes, _ACTIVATIONS] if self._weighs_activations else open_classes
        for two_versions in (False, True):
            for order in itertools.permutations(classes):
                left = float(given.dram_budget_bytes - resident_bytes(given, none) - self.lanes - self._apart)
                shares: dict[str, float] = {}
                in_dram = 0.0
                for name in order:
                    if name == _ACTIVATIONS:
                        in_dram = min(left, self._most_activations(_changed(none, shares), left)) if left > 0 else 0.0
                        left -= in_dram
                        continue
                    size = bytes_each(given, name, two_versions) * given.numel
                    beside = twice if name == "optimizer" else 0.0
                    share = left / size
                    share = share / 2 if share < 2 * beside else share - beside
                    shares[name] = min(1.0, max(0.0, share))
                    left -= (shares[name] + min(beside, shares[name])) * size
                filled = _changed(none, {**shares, TWICE: twice})
                if has_two_versions(given, filled) == two_versions:
                    yield filled, in_dram
        yield none, 0.0

    @property
    def _weighs_second_states(self) -> bool:
        return self.given.may_speculate and TWICE not in self.given.fixed_shares()

    def _all_twice(self, residency: Residency) -> Residency:
        """With second versions of as many states as host memory has room for beside all classes."""
        given, twice = self.given, replace(residency, optimizer_twice=residency.optimizer)
        each = bytes_each(given, TWICE, True) * given.numel
        lacking = resident_bytes(given, twice) + self._apart - given.dram_budget_bytes
        return _changed(twice, {TWICE: min(1.0, max(0.0, twice.optimizer_twice - max(0.0, lacking) / each))})

    def _all_left(self, none: Residency, open_classes: list[str]) -> float:
        """What activations may have where every open class is in memory, and nothing needs lanes."""
        whole = _changed(none, dict.fromkeys(open_classes, 1.0))
        room = self.given.dram_budget_bytes - resident_bytes(self.given, whole) - self._apart
        return max(0.0, float(room)) if self._weighs_activations else 0.0

    def _most_activations(self, residency: Residency, room: float) -> float:
        return self.time.placed(self.given, residency, max(0.0, room)).swapped_bytes

    def _shifted(self, best: _Tried, num_bytes: float, spare: bool) -> Iterator[tuple[Residency, float]]:
        """``num_bytes`` of one class go, and another one comes in their place; with ``spare`` also: nothing does, or
        one comes to memory that nobody has.
        """
        given, fixed = self.given, self.given.fixed_shares()
        names = [_NOBODY] * spare + [name for name in classes_of(given) if name not in fixed]
        if self._weighs_activations:
            names.append(_ACTIVATIONS)
        if self._weighs_second_states:
            names.append(TWICE)
        two = has_two_versions(given, best.residency)
        before = resident_bytes(given, best.residency) + best.in_dram
        for less, more in itertools.permutations(names, 2):
            residency, in_dram, moved = best.residency, best.in_dram, num_bytes
            if less == _ACTIVATIONS:
                moved = min(moved, in_dram)
                in_dram -= moved
            elif less != _NOBODY:
                size = bytes_each(given, less, two) * given.numel
                moved = min(moved, getattr(residency, less) * size)
                residency = _changed(residency, {less: getattr(residency, less) - moved / size})
            if moved <= 0:
                continue
            if more == _ACTIVATIONS:
                in_dram += moved
            elif more != _NOBODY:
                size = bytes_each(given, more, two) * given.numel
                most = residency.optimizer if more == TWICE else 1.0
                residency = _changed(residency, {more: min(most, getattr(residency, more) + moved / size)})
            residency = _changed(residency, {TWICE: fixed.get(TWICE, residency.optimizer_twice)})
            taken = resident_bytes(given, residency) + in_dram
            if taken > before and taken + self._apart + self.lanes > given.dram_budget_bytes:
                continue  # it was the lanes', which seconds do not weigh
            yield residency, in_dram

    def _try(self, residency: Residency, in_dram: float) -> None:
        given = self.given
        key = (*(round(getattr(residency, name), 6) for name in (*classes_of(given), TWICE)), round(in_dram))
        if key in self.found:
            return
        needed = resident_bytes(given, residency) + minimum_lane_bytes(given, residency, self.chunk_bytes)
        needed += self._apart
        self.least_needed = min(self.least_needed, needed)
        if needed + in_dram > given.dram_budget_bytes * (1 + 1e-9):
            return
        stored = stored_bytes(given, residency)
        if stored > given.storage_budget_bytes:
            return
        stays = self.arena if activations_stay(given) else 0
        place = self.time.placed(given, residency, in_dram + stays)
        if place.swapped_bytes > 0 and not self.may_swap:
            return
        if stored + place.storage_activation_bytes > given.storage_budget_bytes:
            return
        found = self.time.predicted(place)
        self.found[key] = _Tried(residency, in_dram, place, found.iteration_secs, self.time.moved_bytes(found))

    def _fastest(self) -> _Tried | None:
        return min(self.found.values(), key=lambda tried: (tried.secs, tried.moved), default=None)

    def _best(self) -> _Tried | None:
        """That moves least of those which are about as fast. Second versions are for what is clearly shorter."""
        fastest = self._fastest()
        if fastest is None:
            return None
        once = [tried for tried in self.found.values() if not tried.residency.optimizer_twice]
        least = min((tried.secs for tried in once), default=float("inf"))
        found = once if least <= fastest.secs * (1 + _CLEARLY) else list(self.found.values())
        least = min(tried.secs for tried in found)
        near = [tried for tried in found if tried.secs <= least * _NEAR]
        fewest = min(tried.moved for tried in near)
        return min((tried for tried in near if tried.moved <= fewest * _AS_FEW), key=_in_pieces)


def _in_pieces(tried: _Tried) -> tuple[float, ...]:
    """What passes to and from storage in the smallest pieces, and whatever else tells alike placements apart."""
    shares = tried.residency
    return -shares.parameters - shares.gradients, tried.moved, shares.optimizer_twice, tried.secs


def _changed(residency: Residency, shares: Mapping[str, float]) -> Residency:
    changes: dict[str, Any] = dict(shares)
    found = replace(residency, **changes)
    return replace(found, optimizer_twice=min(found.optimizer_twice, found.optimizer))


def decide(given: PlanInput, overrides: Mapping[str, int | None], time: StepTime) -> Decision:
    """The fastest placement that fits, [Note: how it decides]; ``overrides`` replaces single values of the plan.

    Raises:
        FuyouConfigError: none fits; with the bytes needed and found.
    """
    is_twice = given.shares.get(TWICE, 0.0) > 0  # for updates in backward: given, or what a run has and keeps
    may_wait = given.weighs_start and given.may_speculate and not is_twice
    chosen: Decision | None = None
    try:
        chosen = _decided(given, overrides, time)
        if not may_wait or not time.is_measured:
            return chosen
    except FuyouConfigError:
        if not may_wait:
            raise
    late, most_secs = replace(given, may_speculate=False), float("inf") if chosen is None else chosen.secs
    try:
        waiting = _decided(late, overrides, time.deferred(), most_secs)
    except FuyouConfigError:
        if chosen is None:
            raise
        return chosen
    return waiting if chosen is None or waiting.secs < (1 - _WORTH_WAITING) * chosen.secs else chosen


def _decided(
    given: PlanInput, overrides: Mapping[str, int | None], time: StepTime, most_secs: float = float("inf")
) -> Decision:
    """With updates that begin when ``given`` and ``time`` say so; shares are not improved far from ``most_secs``."""
    over = {key: value for key, value in overrides.items() if value is not None}
    if time.activations is not None:
        given = replace(given, block_activation_bytes=max(1, int(time.activations.whole_bytes)))
    sizes = (over["chunk_bytes"],) if "chunk_bytes" in over else CHUNK_BYTES
    # Without an arena of its own, what happens to be left has to do for activations.
    arenas = (over["activation_bytes"],) if "activation_bytes" in over else (*dict.fromkeys((arena_bytes(given), 0)),)
    least_needed = float("inf")
    for arena, chunk_bytes in itertools.product(arenas, sizes):
        lanes = lane_bytes(given, chunk_bytes)
        search = _Search(given, time, chunk_bytes, arena, lanes, "activation_bytes" in over)
        best = search.fill(most_secs)
        if best is not None:
            if best.secs <= _REACH * most_secs and not over.keys() & {"staging_bytes", "prefetch_bytes"}:
                search, best = _with_less_apart(search, best)
            plan = built_plan(given, best.residency, chunk_bytes, search.arena, over, int(best.in_dram))
            kept = kept_param_bytes(given, best.residency, plan.prefetch_bytes)
            place = replace(best.place, staging_bytes=plan.staging_bytes, kept_param_bytes=kept)
            return Decision(plan, place, time.secs(place), time, given.may_speculate)
        least_needed = search.least_needed
    budget = given.dram_budget_bytes + given.lent_bytes
    found = f"dram_budget_bytes is {_in_whole(budget, math.floor)}"
    if given.lent_bytes:
        lent = _in_whole(given.lent_bytes, math.floor)
        found += f", {lent} of them held by engines without an optimizer that were built before"
    needed = _in_whole(least_needed, math.ceil)  # so that it is never shown as what there is
    raise FuyouConfigError(
        f"the smallest placement that the tiers allow needs {needed} of host memory, {found}; "
        f"raise it, set more tiers to nvme, or plan smaller shares"
    )


def _in_whole(num_bytes: float, rounded: Callable[[float], int]) -> str:
    return f"{rounded(num_bytes / MIB)} MiB" if num_bytes >= MIB else f"{rounded(num_bytes)} bytes"


def _with_less_apart(search: _Search, best: _Tried) -> tuple[_Search, _Tried]:
    """Where memory that is set aside does more in a class: the search with less of it, and what that found."""
    given, time = search.given, search.time
    if time.activations is not None and search.arena and not search.is_arena_given and not best.place.swapped_bytes:
        bare = replace(search, arena=0, may_swap=False, found={})
        found = bare.fill()
        if found is not None and found.secs < best.secs:
            search, best = bare, found
    least = minimum_lane_bytes(given, Residency(0.0, 0.0, 0.0, 0.0), search.chunk_bytes)
    if search.lanes - 2 * least > _CLEARLY * given.dram_budget_bytes and minimum_lane_bytes(
        given, best.residency, search.chunk_bytes
    ):
        narrow = replace(search, lanes=2 * least, found={})
        found = narrow.fill()
        if found is not None and found.secs < (1 - _CLEARLY) * best.secs:
            search, best = narrow, found
    return search, best
