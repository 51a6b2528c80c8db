# SPDX-License-Identifier: Apache-2.0
"""State dictionaries in stock's CPU-tier format, so that stock's checkpoint files, tools and loaders apply; and
universal checkpoints (``ds_to_universal.py``), which are loaded chunk by chunk on any number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from ds_fuyou.checkpoint.file_sums import FileSums, Place, compare_archive
from ds_fuyou.checkpoint.mapped import MappedFiles, check_readable, copied
from ds_fuyou.checkpoint.reading import naming
from ds_fuyou.checkpoint.stock_state import CLOCK_KEY, FLAT_GROUPS, OPTIMIZER_STATE, StateEntries, states_of
from ds_fuyou.checkpoint.streamed_file import Clone, StandIns
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.available_memory import available_host_bytes
from ds_fuyou.log import log_once
from ds_fuyou.optimizer.chunk_values import gather
from ds_fuyou.optimizer.layout import Chunk, ParamSpan
from ds_fuyou.optimizer.rules import GroupHyper
from ds_fuyou.optimizer.snapshot import Snapshot
from ds_fuyou.optimizer.state_access import ROUNDED, NewState
from ds_fuyou.state_layout import FP32
from ds_fuyou.storage.store import Extent
from ds_fuyou.zero.agreement import LoadMeetings, of_every_rank
from ds_fuyou.zero.run.rank_state import RankState
from ds_fuyou.zero.saving.background_save import Save

__all__ = ["CheckpointState", "UniversalReader", "read_universal_state"]

_SHAPES = "param_shapes"  # in stock's file of a module
States = Generator[tuple[Chunk, list[torch.Tensor]]]


class _Source(NamedTuple):
    """Of a part of a new state: values, or where they lie; and where they come from, if they are compared then."""

    values: torch.Tensor | Sequence[Extent]
    place: Place | None = None


class _Saved(NamedTuple):
    """What a checkpoint has of the optimizer: moments by sub-group, None if it was made before the first step, and how
    many steps parameters missed, by their names in this run."""

    moments: list[list[torch.Tensor]] | None
    missed: Mapping[str, int]


class CheckpointState:
    """Behind stage 3's saving and loading.

    Args:
        optimizer: stock's; its parameter groups hold the hyperparameters.
        group_of_sub_group: parameter group of every sub-group.
        hypers: the hyperparameters of every sub-group as they are now.
    """

    def __init__(
        self,
        rank_state: RankState,
        optimizer: torch.optim.Optimizer,
        group_of_sub_group: Sequence[int],
        hypers: Callable[[], list[GroupHyper]],
    ) -> None:
        self._rank_state = rank_state
        self._core = rank_state.core
        self._optimizer = optimizer
        self.group_of_sub_group = list(group_of_sub_group)
        self._hypers = hypers
        self.stand_ins: StandIns | None = None
        """While a checkpoint file is streamed: large tensors are stand-ins of this. Else they are real, in DRAM."""
        self.snapshot: Snapshot | None = None
        """What they stand for."""
        self.save: Save | None = None
        """The last checkpoint that was begun and has not been ended by all ranks."""
        self.loaded_files: set[str] = set()
        """Real paths of files that the engine itself has loaded: nobody has written to what it gives us of them."""

        self.meetings: LoadMeetings | None = None
        """While ``load_checkpoint`` runs."""
        self.read_states: Callable[[Mapping[str, Any]], None] | None = None
        """While one runs that loads states, too: reads and checks them, given the module's file."""
        self._saved_shapes: Sequence[Mapping[str, Sequence[int]]] | None = None
        """By sub-group, as the checkpoint says that is being loaded; None if it does not."""
        self.is_saving = False  # a call of save_checkpoint runs
        self._torn_weights = self._torn_moments = self._had_torn_moments = False
        """Some are a checkpoint's, and nobody knows of all that they are."""

    # ---- saving -------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, Any]:
        """What a rank's state dictionary holds beside the loss scaler: optimizer state, P32, history of steps."""
        core = self._core
        entries = StateEntries(
            groups=[{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups],
            group_of_sub_group=self.group_of_sub_group,
            moments=self.saved_names(),
            step=core.clock.step,
            history=core.clock.history,
            missed_steps=core.missed.by_name(),
            layout=core.place.stored,
        )
        return entries.named(self._flat_states(entries.dtypes))

    def saved_names(self) -> list[str]:
        """Names of the moments as stock's optimizer of this kind saves them."""
        kind = self._core.kind
        if kind.name == "lion":
            return ["exp_avg", "exp_avg_sq"]  # DeepSpeedCPULion keeps a second one, zero, that nothing reads
        if kind.name == "adagrad" and type(self._optimizer).__module__.startswith("torch."):
            return ["sum"]
        return list(kind.moments)

    def keep(self) -> None:
        """A checkpoint begins: the states of this step are kept until they are in its file.

        Raises:
            FuyouMemoryError: there is no memory for those on their way.
        """
        self.snapshot = self._core.snapshot()

    def _flat_states(self, dtypes: Sequence[torch.dtype]) -> list[list[torch.Tensor]]:
        """``[sub-group][P32, moments...]``, flat, of these types: collected now, or streamed through stand-ins."""
        core, num_parts = self._core, len(dtypes)
        shapes = [((n,), dtype) for n in core.layout.sub_group_numels for dtype in dtypes]

        def pieces(states: States) -> Iterator[tuple[int, int, torch.Tensor]]:
            with contextlib.closing(states):
                for chunk, parts in states:
                    while len(parts) < num_parts:
                        parts.append(torch.zeros_like(parts[0]))
                    for part, values in enumerate(parts[:num_parts]):
                        yield chunk.sub_group * num_parts + part, chunk.begin, values.to(dtypes[part])

        if self.stand_ins is not None:
            snapshot = self.snapshot
            if snapshot is None:
                raise FuyouStateError("no step's states are kept for this checkpoint")

            def kept(clone: Clone) -> Iterator[tuple[int, int, torch.Tensor]]:
                def cloned(chunk: Chunk, parts: Sequence[Sequence[Extent]]) -> list[Extent] | None:
                    first = chunk.sub_group * num_parts
                    found = [clone(first + part, chunk.begin, extents) for part, extents in enumerate(parts)]
                    return [each for each in found if each is not None] if None not in found else None

                # Slots whose blocks are shared need new ones when they are written, which may not be there.
                is_relied_on = self._rank_state.activation.config.relies_on_slots
                return pieces(snapshot.states(None if is_relied_on else cloned))

            flats = self.stand_ins.add_together(shapes, kept, later=True, clones=True)
        else:
            _require_memory(sum(n * dtype.itemsize for (n,), dtype in shapes))
            flats = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
            for which, begin, values in pieces(core.states.read_all(range(len(core.layout.chunks)))):
                flats[which][begin : begin + values.numel()].copy_(values)
        return [flats[i : i + num_parts] for i in range(0, len(flats), num_parts)]

    @property
    def num_bytes(self) -> int:
        """Size of this rank's optimizer file, without its small entries."""
        return self._core.place.stored.saved_bytes_each(len(self.saved_names())) * int(self._core.layout.numel)

    # ---- loading ------------------------------------------------------------------------------------------

    def require_whole(self) -> None:
        """Raises FuyouStateError if a load has failed when it had replaced something: a step would be of a mixture."""
        if self._torn_weights or self._torn_moments:
            raise FuyouStateError(
                "a checkpoint was loaded in part when its load failed, on this rank or another, so there is nothing to "
                "go on from: load one that is whole, or build the engine anew"
            )

    @contextlib.contextmanager
    def _replacing(self, *, moments: bool) -> Iterator[None]:
        """States of all chunks, and P16: what was read ahead is old on every rank alike, also where this fails.

        ``moments``: they are new, too; else they are written as they are.
        """
        had_torn_moments, of_load = self._torn_moments, self.meetings is not None
        self._torn_weights = self._torn_moments = True
        try:
            yield
        finally:
            self._rank_state.step_applied()
        self._torn_weights = of_load  # a load is whole when all ranks say so
        self._torn_moments = of_load if moments else had_torn_moments

    def loaded(self, *, with_states: bool) -> None:
        """All ranks have loaded a checkpoint; without states the moments of one that failed before stay as they are."""
        self._torn_weights, self._torn_moments = False, self._had_torn_moments and not with_states

    def begins(self, meetings: LoadMeetings) -> None:
        """A load, of all ranks. Moments of one alone may have been torn."""
        self._had_torn_moments = self._torn_moments = any(of_every_rank(self._torn_moments))
        self.meetings = meetings

    def loading_ended(self) -> None:
        """What the script gives from now on is its own: it may have read the same files and changed what it read."""
        self._saved_shapes = self.meetings = self.read_states = None
        self.loaded_files.clear()

    def module_is_read(self, checkpoint: Mapping[str, Any]) -> None:
        """This rank has its file of the module; nothing was changed yet. See [Note: what a failed load leaves] in
        loading.py.

        Raises:
            FuyouStateError: another rank has not, or states are missing or others.
        """
        self._saved_shapes = checkpoint.get(_SHAPES)
        if self.read_states is not None:
            self.read_states(checkpoint)
        if self.meetings is not None:
            self.meetings.meet()

    def replaces(self) -> None:
        """On all ranks: the weights that a load replaces from now on are not put back if it fails."""
        if self.meetings is not None:
            self._torn_weights = True

    def check(self, state_dict: Mapping[str, Any], *, load_optimizer_states: bool = True) -> _Saved | None:
        """Whether :meth:`load` takes it; what it has of the optimizer.

        Raises:
            FuyouStateError: another model, world size or optimizer.
        """
        core = self._core
        fp32 = state_dict[FLAT_GROUPS]
        if [t.numel() for t in fp32] != list(core.layout.sub_group_numels):
            raise FuyouStateError(
                f"the checkpoint's sub-groups hold {[t.numel() for t in fp32]} elements on this rank, the model's "
                f"{list(core.layout.sub_group_numels)}; load it with the model and world size it was saved with"
            )
        names = {span.name: span.name for span in core.layout.params}
        if self._saved_shapes is not None:
            names = self._require_order(self._saved_shapes)
        if not load_optimizer_states:
            return None
        saved = state_dict[OPTIMIZER_STATE]
        self._require_groups(saved["param_groups"])
        missed = _missed_steps(state_dict)
        if unknown := missed.keys() - names.keys():
            raise FuyouStateError(
                f"the checkpoint counts steps that {min(unknown)} missed, which the model does not have: load it with "
                "load_checkpoint, which knows parameters by their order, or with the model it was saved with"
            )
        return _Saved(self._saved_moments(saved), {names[name]: number for name, number in missed.items()})

    def check_together(self, state_dict: Mapping[str, Any], *, load_optimizer_states: bool) -> None:
        """As :meth:`check`, before anything is replaced, where a script gives every rank its states: ranks of which one
        had others than its own would go on unlike.

        Raises:
            FuyouStateError: another rank's cannot be loaded.
        """
        meeting = LoadMeetings()
        try:
            self.check(state_dict, load_optimizer_states=load_optimizer_states)
        except Exception as error:
            meeting.meet(error)
            raise
        meeting.meet()

    def load(self, state_dict: Mapping[str, Any], *, load_optimizer_states: bool) -> None:
        """What :meth:`entries` gave, or stock's file. Raises as :meth:`check`."""
        saved = self.check(state_dict, load_optimizer_states=load_optimizer_states)
        self._saved_shapes = None
        if saved is not None:
            self._load_groups(state_dict[OPTIMIZER_STATE])
        self._write_all(state_dict[FLAT_GROUPS], saved)
        if saved is not None:
            self._restore_clock(state_dict, saved.missed)

    def _require_order(self, saved: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, str]:
        """States have no names in a checkpoint: what was saved first is the first parameter's. Where another parameter
        would get it, that is refused; under another name it is loaded, as in stock. Names in this run by those.

        Raises:
            FuyouStateError: parameters of the same names in another order, or of other shapes.
        """
        theirs = [(name, tuple(shape)) for group in saved for name, shape in group.items()]
        state = self._rank_state
        params = map(state.param, state.layout.params)
        ours = [(state.model.names[param], tuple(param.ds_shape)) for param in params]
        names = {there: here for (there, _), (here, _) in zip(theirs, ours, strict=False)}
        if theirs == ours:
            return names
        there, here = next(pair for pair in itertools.zip_longest(theirs, ours) if pair[0] != pair[1])
        what = f"where the model has {_named(here)} the checkpoint has {_named(there)}"
        if sorted(theirs) == sorted(ours) or [shape for _, shape in theirs] != [shape for _, shape in ours]:
            raise FuyouStateError(
                f"{what}, and states have no other names than their order: make the model and its parameter groups as "
                "the saving script did, or load with load_optimizer_states=False, which goes by names"
            )
        log_once(logging.WARNING, f"{what}, of the same shape: it is taken for the same parameter under another name")
        return names

    def _saved_moments(self, saved: dict[str, Any]) -> list[list[torch.Tensor]] | None:
        """Moments by sub-group, None if the checkpoint was made before the first step."""
        if not saved["state"]:
            return None
        num_groups = len(self._optimizer.param_groups)
        order = [i for g in range(num_groups) for i, o in enumerate(self.group_of_sub_group) if o == g]
        names = self.saved_names()[: len(self._core.kind.moments)]
        found: list[list[torch.Tensor]] = [[] for _ in order]
        for place, sub_group in enumerate(order):
            if not all(name in saved["state"][place] for name in names):
                raise FuyouStateError(
                    f"the checkpoint's optimizer kept {sorted(saved['state'][place])}, this run's keeps {names}; load "
                    "it with the optimizer it was saved with, or with load_optimizer_states=False"
                )
            found[sub_group] = [saved["state"][place][name] for name in names]
        return found

    def _write_all(self, fp32: Sequence[torch.Tensor], saved: _Saved | None) -> None:
        """``saved``: moments are those, or zeros if it has none; without it they stay as they are."""
        core = self._core
        moments = saved.moments if saved is not None else None
        chunks = core.layout.chunks
        zeros: Sequence[None] = [None] * len(core.kind.moments)
        sums = FileSums() if self._rank_state.activation.config.checksum else None
        with MappedFiles(self.loaded_files) as files:

            def source(flat: torch.Tensor, chunk: Chunk) -> _Source:
                values = flat.view(-1)[chunk.begin : chunk.end]
                place = files.place(values) if sums is not None else None
                extents = files.extents(values) if values.dtype == torch.float32 else None
                if extents is not None:
                    return _Source(extents, place)
                check_readable(values)
                if sums is not None and place is not None:
                    sums.add(place, values)
                return _Source(values)

            def new_state(chunk: Chunk, present: Sequence[torch.Tensor | None]) -> NewState:
                held = moments[chunk.sub_group] if moments is not None else ()
                sources = [source(flat, chunk) for flat in (fp32[chunk.sub_group], *held)]

                def compare(parts: Sequence[torch.Tensor]) -> None:
                    for each, values in zip(sources, parts, strict=False):  # moments may be no checkpoint's
                        if sums is not None and each.place is not None:
                            sums.add(each.place, values)

                parts = [each.values for each in sources]
                return NewState(chunk.index, [*parts, *present[len(held) :]], ROUNDED, compare)

            def states() -> Iterator[NewState]:
                if saved is not None:
                    yield from (new_state(chunk, zeros) for chunk in chunks)
                    return
                for chunk, parts in core.states.read_all(range(len(chunks))):
                    yield new_state(chunk, parts[1:])

            with self._replacing(moments=saved is not None):
                core.states.write_all(states(), files.path_of)

    def _restore_clock(self, state_dict: Mapping[str, Any], missed: Mapping[str, int]) -> None:
        core = self._core
        ours = state_dict.get(CLOCK_KEY)
        kept_as, own = (ours or {}).get("moments", FP32), core.place.stored.moments
        if kept_as != own:
            what = "they are rounded" if own != FP32 else "they go on in fp32 from what was rounded"
            log_once(logging.INFO, f"the checkpoint's run kept moments as {kept_as}, this one as {own}: {what}")
        core.missed.restore(missed)
        if ours is not None:
            core.clock.replay(ours["history"])
            return
        # A stock checkpoint: the betas it was made with are those it saved.
        steps = {int(entry["step"]) for entry in state_dict[OPTIMIZER_STATE]["state"].values()}
        betas = [list(hyper.betas) for hyper in self._hypers()]
        core.clock.replay([(max(steps), betas)] if steps else [])

    def restore_from_params(self) -> None:
        """P32 := P16 (loading a module without its optimizer)."""
        core = self._core
        last: dict[int, torch.Tensor] = {}

        def present(span: ParamSpan) -> torch.Tensor:
            if span.index not in last:  # a large one spans many chunks
                last.clear()
                last[span.index] = core.params.read(span)
            return last[span.index]

        def states() -> Iterator[NewState]:
            for chunk, parts in core.states.read_all(range(len(core.layout.chunks))):
                parts[0].copy_(gather(core.layout, chunk, present, torch.float32))
                yield NewState(chunk.index, parts)

        with self._replacing(moments=False):
            core.states.write_all(states())

    # ---- universal checkpoints ----------------------------------------------------------------------------

    def load_universal(self, saved: Mapping[str, Any], reader: UniversalReader) -> None:
        """Parameters, moments, hyperparameters by group and bias-correction history.

        Args:
            saved: of :func:`read_universal_state`.

        Raises:
            FuyouStateError: another number of parameter groups.
        """
        self._require_groups(saved[OPTIMIZER_STATE]["param_groups"])  # before anything is replaced
        core = self._core
        keys = ("fp32", *core.kind.moments)
        has_moments = bool(saved[OPTIMIZER_STATE]["state"])

        def new_state(chunk: Chunk) -> NewState:
            parts = [
                gather(core.layout, chunk, functools.partial(reader.read, key=key), torch.float32)
                if has_moments or key == "fp32"
                else None
                for key in keys
            ]
            return NewState(chunk.index, parts, ROUNDED)

        with self._replacing(moments=True):
            core.states.write_all(map(new_state, core.layout.chunks))
        self._load_groups(saved[OPTIMIZER_STATE])
        trained = {span.name for span in core.layout.params}  # frozen ones may have missed steps when they were not
        self._restore_clock(saved, {name: n for name, n in _missed_steps(saved).items() if name in trained})

    def load_universal_module(self, reader: UniversalReader, *, load_from_fp32_weights: bool) -> None:
        """Parameters alone: P16 from the saved fp32 values; P32 from them too, or from P16."""
        core = self._core

        def states() -> Iterator[NewState]:
            for chunk, parts in core.states.read_all(range(len(core.layout.chunks))):
                values = gather(core.layout, chunk, functools.partial(reader.read, key="fp32"), torch.float32)
                params = values.to(core.options.param_dtype)
                parts[0].copy_(values if load_from_fp32_weights else params)
                yield NewState(chunk.index, parts, params)

        with self._replacing(moments=False):
            core.states.write_all(states())

    def _load_groups(self, saved: Mapping[str, Any]) -> None:
        """Hyperparameters group by group; stock gives those of the first group of a universal checkpoint to all."""
        groups = saved["param_groups"]
        self._require_groups(groups)
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def _require_groups(self, groups: Sequence[object]) -> None:
        present = len(self._optimizer.param_groups)
        if len(groups) != present:
            raise FuyouStateError(
                f"the checkpoint was saved with {len(groups)} parameter groups, this run has {present}; make them as "
                "the saving script did"
            )


def _require_memory(num_bytes: int) -> None:
    """Of what a script collects; what the system has promised it would end the run for."""
    free = available_host_bytes()
    if num_bytes > free:
        raise FuyouStateError(
            f"optimizer.state_dict() needs {num_bytes} bytes of host memory for P32 and moments, {free} are free; "
            "engine.save_checkpoint() streams them to its files"
        )


def _missed_steps(state_dict: Mapping[str, Any]) -> Mapping[str, int]:
    """By parameter, as the run that saved called them; none in a checkpoint of stock."""
    return (state_dict.get(CLOCK_KEY) or {}).get("missed_steps", {})


def _named(param: tuple[str, tuple[int, ...]] | None) -> str:
    return "no more" if param is None else f"{param[0]} {list(param[1])}"


def read_universal_state(checkpoint_dir: str, *, compares: bool = True) -> dict[str, Any]:
    """What a universal checkpoint holds beside its parameters.

    Raises:
        FuyouStateError: it is none.
    """
    file = Path(checkpoint_dir, "zero", "optimizer_state.pt")
    if not file.is_file():
        raise FuyouStateError(f"{file} is missing: convert the checkpoint with ds_to_universal.py and load its output")
    if compares:
        compare_archive(file)
    with naming(file):
        saved: dict[str, Any] = torch.load(file, weights_only=False, mmap=True, map_location="cpu")
        return copied(saved, states_of(saved))


class UniversalReader:
    """This rank's partitions out of a universal checkpoint; keeps those of the last parameter. Stock reads each
    parameter whole for every key; so does this, one parameter at a time.

    Args:
        read_partition: stage 3's ``load_hp_checkpoint_state``.
        name_of: by parameter.
    """

    def __init__(
        self,
        rank_state: RankState,
        checkpoint_dir: str,
        read_partition: Callable[..., torch.Tensor],
        name_of: Mapping[Parameter, str],
    ) -> None:
        self._rank_state = rank_state
        self._folder = Path(checkpoint_dir, "zero")
        self._read_partition = read_partition
        self._compares = rank_state.activation.config.checksum
        self._by_param = "param" in inspect.signature(read_partition).parameters  # since 0.19
        self._name_of = name_of
        self._param: Any = None
        self._values: dict[str, torch.Tensor] = {}

    def read(self, span: ParamSpan, key: str) -> torch.Tensor:
        param = self._rank_state.param(span)
        if param is not self._param:
            self._param, self._values = param, {}
        if key not in self._values:
            more = {"param": param} if self._by_param else {}
            folder = self._folder / self._name_of[param]
            if self._compares:
                compare_archive(folder / f"{key}.pt")
            with naming(folder / f"{key}.pt"):
                values = self._read_partition(str(folder), key, **more)
            self._values[key] = values.view(-1).to(torch.float32)
        return self._values[key]
