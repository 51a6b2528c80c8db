# SPDX-License-Identifier: Apache-2.0
"""What ``fuyou recover`` makes of state files: fp32 weights, or an ordinary DeepSpeed checkpoint.

Weights are a state dictionary of P32, parameter by parameter. A checkpoint has stock's files (ZeRO-3, CPU tier) of
every rank: states from the slots, what changes from step to step from the commit record, and the rest from the outline
that the engine left when it was built (zero/saving/checkpoint_outline.py). Neither needs the script, a device or
model-sized memory.

[Note: frozen parameters]
State files do not hold them: a run that goes on in place has them as its script makes them. A checkpoint that is made
of the files holds those of another checkpoint of the run (``like``), or none: who loads it then has them as the script
made them, in stock as here, and ``zero_to_fp32.py`` gives the others.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_fuyou.checkpoint import atomic, streamed_file
from ds_fuyou.checkpoint.like import Like, TrainerFolder
from ds_fuyou.checkpoint.state_files import RankFiles, opened_ranks
from ds_fuyou.checkpoint.stock_state import StateEntries
from ds_fuyou.checkpoint.training_record import SUMS_AS_BUILT, TrainingRecord, from_bytes, raw
from ds_fuyou.checkpoint.unfinished import IN_USE, WritingLock, discard_left
from ds_fuyou.errors import FuyouError, FuyouStateError, FuyouStorageError
from ds_fuyou.files import replacing
from ds_fuyou.storage.records import CONTENTS_NAME

__all__ = ["Recovered", "RecoveredCheckpoint", "recover_checkpoint", "recover_weights"]

_OUTLINE_VERSION = 1
_SMALL_ENTRIES = 64 << 20  # room for what is not counted: buffers, scheduler, client state
_GENERATORS = "fuyou_random_states"
_CLIENT = "fuyou_client_state"


@dataclass(frozen=True)
class Recovered:
    """What was taken out.

    Attributes:
        step: optimizer steps applied to the weights, those before a resume included, skipped ones not.
        num_params: tensors in the file.
        verified: every chunk was compared with its checksum; False for a run with ``checksum: false``.
    """

    step: int
    num_params: int
    verified: bool


@dataclass(frozen=True)
class RecoveredCheckpoint:
    """What was made.

    Attributes:
        folder: that has the ranks' files.
        global_steps: of the engine, skipped steps included.
        verified: as in :class:`Recovered`.
        left_out: what a checkpoint that the run had saved would hold, too; in words.
        warning: what may be wrong with it, in words; empty for nothing.
    """

    folder: Path
    global_steps: int
    verified: bool
    left_out: Sequence[str]
    warning: str


def recover_weights(directories: Sequence[Path], out: Path) -> Recovered:
    """Writes ``{name: fp32 tensor}`` of the trainable parameters to ``out``, which appears whole or not at all.

    Raises:
        FuyouStateError, FuyouStorageError, FuyouChecksumError: as :func:`opened_ranks`; or a chunk is not what the run
            wrote.
    """
    with opened_ranks(directories) as ranks:
        stand_ins = streamed_file.StandIns()
        state = {}
        for index, (name, shape, *_) in enumerate(ranks[0].params):
            numel = math.prod(shape)
            held = sum(end - begin for *_, begin, end in (rank.params[index] for rank in ranks))
            if held < numel:  # before a file of that size is laid out
                where = ranks[0].store.directories[0] / CONTENTS_NAME
                raise FuyouStateError(f"{where} says that {name[:60]} has {numel} elements; its ranks hold {held}")
            state[name] = stand_ins.add(shape, torch.float32, _Param(ranks, index, numel))
        with replacing(out) as part:
            streamed_file.save(state, part, stand_ins)
        atomic.flush(Path(os.path.realpath(out)).parent)  # `fuyou clean` may come next
        return Recovered(ranks[0].optimizer_step, len(state), all(rank.is_verified for rank in ranks))


class _Param:
    """Pieces of one parameter over all ranks; the last rank's padding is left out."""

    def __init__(self, ranks: Sequence[RankFiles], index: int, numel: int) -> None:
        self._ranks, self._index, self._numel = ranks, index, numel

    def __call__(self) -> Iterator[tuple[int, torch.Tensor]]:
        at = 0
        for rank in self._ranks:
            for values in rank.values(self._index):
                kept = values[: self._numel - at]
                if kept.numel():
                    yield at, kept
                at += kept.numel()


def recover_checkpoint(
    directories: Sequence[Path], save_dir: Path, tag: str | None = None, like: Path | None = None
) -> RecoveredCheckpoint:
    """Makes ``save_dir/tag`` with stock's files of every rank, and ``save_dir/latest``; folders appear whole.

    Args:
        directories: as in :func:`opened_ranks`.
        tag: ``global_step<N>`` without.
        like: another checkpoint of this run, for frozen parameters. If it is a folder of the Hugging Face Trainer,
            ``save_dir`` becomes one, and must not exist.

    Raises:
        FuyouStateError, FuyouStorageError, FuyouChecksumError: as :func:`recover_weights`; or the record has no state
            of training, ``like`` does not fit, or there is no room.
    """
    with opened_ranks(directories) as opened:
        parts = [_RankParts(rank) for rank in opened]
        steps = parts[0].record.counters["global_steps"]
        tag = atomic.checked_tag(tag if tag is not None else f"global_step{steps}")
        found = Like.at(like, len(parts)) if like is not None else None
        warning = next((said for rank in parts if (said := rank.warning(found))), "")
        trainer = found.trainer(save_dir, tag, [rank.record for rank in parts]) if found is not None else None
        target = save_dir if trainer is None else save_dir.with_name(atomic.incomplete_tag(save_dir.name))
        hidden = target / atomic.incomplete_tag(tag)
        unfinished, is_new = hidden if trainer is None else target, not target.exists()
        discard_left(unfinished)
        lock = _locked(unfinished)  # `fuyou clean` takes what a killed process left
        try:
            hidden.mkdir(parents=True, exist_ok=True)
            atomic.require_replaceable(target / tag, hidden)
            _require_space(target, sum(rank.num_bytes(found) for rank in parts))
            for rank in parts:
                rank.write(hidden, found, trainer)
            latest = atomic.write_beside(target / "latest", tag)
            atomic.publish(hidden, target / tag)
            _copy_scripts(target)
            atomic.replace(latest, target / "latest")
            if trainer is not None:
                trainer.complete(target)
                atomic.publish(target, save_dir)
        except BaseException:
            atomic.discard(unfinished)
            if is_new:
                with contextlib.suppress(OSError):  # something else has come to be in it
                    target.rmdir()
            raise
        finally:
            lock.release()
        left_out = [*parts[0].left_out(found), *(trainer.left_out if trainer is not None else ())]
        return RecoveredCheckpoint(save_dir / tag, steps, all(rank.is_verified for rank in opened), left_out, warning)


def _locked(folder: Path) -> WritingLock:
    try:
        return WritingLock(folder, is_first=True)
    except FileExistsError as error:
        raise FuyouStorageError(errno.EBUSY, IN_USE, os.fspath(folder)) from error


class _RankParts:
    """One rank's files of a checkpoint, and what they are made of."""

    def __init__(self, files: RankFiles) -> None:
        self._files = files
        self._outline = _outline_of(files)
        training = files.meta.get("training")
        if training is None and files.optimizer_step == 0:
            raise FuyouStateError(
                f"{files.store.directories[0]}: no step of this run has been applied, so there is nothing to recover "
                "but what it began with (--weights FILE)"
            )
        if training is None:
            raise FuyouStateError(
                f"{files.store.directories[0]}: its last commit, step {files.optimizer_step}, has no state of training "
                "(it could not be pickled, a checkpoint was just loaded, or optimizer.step() was called and not "
                "engine.step()); weights alone can be taken out: --weights FILE"
            )
        with _read_without_the_script(files.store.directories[0]):
            self.record = TrainingRecord.decode(training)
        self._client: Any = None
        self._client_failed = ""
        try:
            self._client = self.record.client()
        except Exception as error:  # of classes that only the script has
            self._client_failed = f"what the script handed over cannot be read without it ({error})"

    def num_bytes(self, like: Like | None) -> int:
        each = self._files.layout.saved_bytes_each(len(self._outline["moments"]))
        states = each * sum(self._files.sub_group_numels)
        frozen = (like.frozen(self._files.rank, self._shapes) or {}) if like is not None and self._shapes else {}
        return _SMALL_ENTRIES + states + sum(part.nbytes for part in frozen.values())

    @property
    def _shapes(self) -> Mapping[str, Any]:
        """Of the frozen parameters."""
        shapes: Mapping[str, Any] = self._outline["model"]["frozen_param_shapes"]
        return shapes

    @property
    def _sums(self) -> Mapping[str, tuple[int, int]]:
        """Of the frozen parameters as the script had built them: elements of this rank's part, a CRC-32 of its
        beginning.
        """
        sums: Mapping[str, tuple[int, int]] = self._outline.get("frozen_sums", {})
        return sums

    def warning(self, like: Like | None) -> str:
        """What may be wrong with ``like``; empty for nothing."""
        other = like.unlike(self._files.rank, self._sums) if like is not None else []
        if not other:
            return ""
        return (
            f"{len(other)} of {len(self._sums)} frozen parameters have other values in --like than the run began with "
            f"({other[0]} is the first): it is a checkpoint of another run, or this one changed them itself"
        )

    def left_out(self, like: Like | None) -> Iterator[str]:
        if self._shapes and not (like is not None and like.has_frozen):
            yield "frozen parameters: they are as the script makes them"
        if self._client_failed:
            yield self._client_failed

    def write(self, folder: Path, like: Like | None, trainer: TrainerFolder | None) -> None:
        """Both files, flushed."""
        model = self._model(like)
        streamed_file.save(model, folder / self._outline["model_file"], streamed_file.StandIns())
        stand_ins = streamed_file.StandIns()
        groups = self.record.groups if trainer is None else trainer.groups(self.record.groups)
        optimizer = self._optimizer(stand_ins, groups)
        state = {
            "optimizer_state_dict": optimizer,
            **{key: model[key] for key in ("ds_config", "ds_version")},
        }
        streamed_file.save(state, folder / self._outline["optimizer_file"], stand_ins)

    def _model(self, like: Like | None) -> dict[str, Any]:
        record, model = self.record, dict(self._outline["model"])
        model["module"].update({**record.buffers, **record.extra})
        model.update(record.schedules)
        for name, value in record.counters.items():
            if name in model:
                model[name] = value
        if record.scheduler is not None:
            (model["lr_scheduler"],) = record.scheduler
        shapes = self._shapes
        if shapes:
            fragments = like.frozen(self._files.rank, shapes) if like is not None else None
            model["frozen_param_fragments"], model["frozen_param_shapes"] = fragments, shapes if fragments else None
            if not fragments:
                model[SUMS_AS_BUILT] = dict(self._sums)
        client = self._client
        if isinstance(client, Mapping) and not client.keys() & model.keys():
            model.update(client)
        elif client is not None:
            model[_CLIENT] = client
        model[_GENERATORS] = record.generator_states()
        return model

    def _optimizer(self, stand_ins: streamed_file.StandIns, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        files, meta = self._files, self._files.meta
        entries = StateEntries(
            groups=groups,
            group_of_sub_group=self._outline["group_of_sub_group"],
            moments=self._outline["moments"],
            step=files.optimizer_step,
            history=meta["clock"],
            missed_steps=meta["missed_steps"],
            layout=files.layout,
        )
        num_parts, dtypes = entries.num_parts, entries.dtypes

        def pieces() -> Iterator[tuple[int, int, torch.Tensor]]:
            num_read = 1 + (files.num_moments if num_parts > 1 else 0)
            for chunk, (sub_group, begin, _) in enumerate(files.chunks):
                parts = files.parts(chunk, num_read)
                parts += [torch.zeros_like(parts[0])] * (num_parts - num_read)  # a moment that nothing reads
                for part, values in enumerate(parts):
                    yield sub_group * num_parts + part, begin, values.to(dtypes[part])

        shapes = [((numel,), dtype) for numel in files.sub_group_numels for dtype in dtypes]
        flats = stand_ins.add_together(shapes, pieces)
        scaler, is_dynamic = self.record.scaler
        return {
            **self._outline["optimizer"],
            "loss_scaler": scaler,
            "dynamic_loss_scale": is_dynamic,
            "overflow": False,
            **entries.named([flats[i : i + num_parts] for i in range(0, len(flats), num_parts)]),
        }


def _outline_of(files: RankFiles) -> dict[str, Any]:
    where, found = files.store.directories[0], files.store.engine_outline()
    why = "the ds_fuyou that made it was an older one"
    if found is not None:
        if found["version"] > _OUTLINE_VERSION:
            raise FuyouStateError(
                f"{where}: what it says of its engine is of format {found['version']}, {_OUTLINE_VERSION} is known; "
                "use the ds_fuyou that wrote it"
            )
        why = found["refused"]
    if found is None or why:
        raise FuyouStateError(
            f"{where}: no checkpoint can be made of it, since {why}. Go on from it in place "
            '("resume": "auto") and save one; or take weights alone out: --weights FILE'
        )
    with _read_without_the_script(where):
        outline: dict[str, Any] = from_bytes(raw(found["pickled"]))
    return outline


@contextlib.contextmanager
def _read_without_the_script(where: Path) -> Iterator[None]:
    """Extra states of modules, schedulers and configurations may hold its classes."""
    try:
        yield
    except FuyouError:
        raise
    except Exception as error:  # whatever unpickling raises
        raise FuyouStateError(
            f"{where}: its state of training cannot be read without the script ({error!r}). Go on from it in place "
            '("resume": "auto") and save a checkpoint; or take weights alone out: --weights FILE'
        ) from error


def _require_space(folder: Path, num_bytes: int) -> None:
    message = atomic.require_space(folder, num_bytes, 0)
    if message is not None:
        raise FuyouStorageError(errno.ENOSPC, message, os.fspath(folder))


def _copy_scripts(folder: Path) -> None:
    """As stock does; found without importing DeepSpeed."""
    package = importlib.util.find_spec("deepspeed")
    for name in atomic.SCRIPTS:
        script = Path(package.origin).parent / "utils" / name if package is not None and package.origin else None
        if script is not None and script.is_file():
            shutil.copyfile(script, folder / name)
            (folder / name).chmod(0o755)
