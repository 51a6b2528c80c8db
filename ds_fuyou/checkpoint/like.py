# SPDX-License-Identifier: Apache-2.0
"""What a recovered checkpoint takes from an older one of the same run: frozen parameters; and, of a folder of the
Hugging Face Trainer, the files that the Trainer wants beside DeepSpeed's, moved on to the recovered step.

[Note: the Trainer's schedule]
The Trainer ticks its scheduler when the engine has stepped, so a commit record has the rates of the step that ended,
and not the scheduler: it is none of the engine's. It is built from the saved arguments by the Trainer's own function,
loaded and ticked on, as often a step as it had been before. The rates before the last step's ticks must be those in the
record.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_fuyou.checkpoint.crc import sum_of_part
from ds_fuyou.checkpoint.file_sums import compare_archive
from ds_fuyou.checkpoint.mapped import check_readable
from ds_fuyou.checkpoint.reading import naming
from ds_fuyou.checkpoint.training_record import TrainingRecord
from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.storage.parked import HEAD_BYTES

__all__ = ["Like", "TrainerFolder"]

_STATE, _SCHEDULER, _ARGUMENTS = "trainer_state.json", "scheduler.pt", "training_args.bin"
_WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?|(pytorch|adapter)_model.*\.bin(\.index\.json)?|optimizer\..*")
_FOLDER = re.compile(r"checkpoint-(\d+)")


class Like:
    """An older checkpoint of the run, of as many ranks."""

    def __init__(self, folder: Path, ranks: Path, model_files: Sequence[Path]) -> None:
        self._folder, self._ranks, self._model_files = folder, ranks, model_files
        self._first = _loaded(model_files[0])

    @classmethod
    def at(cls, folder: Path, world_size: int) -> Like:
        """Of a folder with ``latest`` in it, or one with the ranks' files.

        Raises:
            FuyouStateError: it is no checkpoint of ZeRO-3, or of another number of ranks.
        """
        latest = folder / "latest"
        ranks = folder / latest.read_text(encoding="utf-8").strip() if latest.is_file() else folder
        files = [ranks / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world_size)]
        found = len(list(ranks.glob("zero_pp_rank_*_model_states.pt"))) if ranks.is_dir() else 0
        if found != world_size or not all(file.is_file() for file in files):
            raise FuyouStateError(
                f"--like must name a checkpoint of this run, which has {world_size} ranks: {ranks} has files of {found}"
            )
        return cls(folder, ranks, files)

    @property
    def has_frozen(self) -> bool:
        return bool(self._first.get("frozen_param_fragments"))

    @property
    def applied_steps(self) -> int:
        """Steps of the engine that changed parameters."""
        return int(self._first["global_steps"]) - int(self._first["skipped_steps"])

    @property
    def global_steps(self) -> int:
        return int(self._first["global_steps"])

    def frozen(self, rank: int, shapes: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """A rank's parts of the frozen parameters, mapped from the file; None if they were left out there.

        Raises:
            FuyouStateError: they are others than the run's.
            FuyouStorageError: they cannot be read.
            FuyouChecksumError: the file is not what was written; the sums of the new one would be those of what it is.
        """
        compare_archive(self._model_files[rank])
        saved = _loaded(self._model_files[rank])
        fragments: dict[str, torch.Tensor] | None = saved.get("frozen_param_fragments")
        if not fragments:
            return None
        if {name: tuple(shape) for name, shape in shapes.items()} != {
            name: tuple(shape) for name, shape in saved["frozen_param_shapes"].items()
        }:
            raise FuyouStateError(f"--like is of another model: its frozen parameters are others [{self._ranks}]")
        for values in fragments.values():
            check_readable(values)
        return fragments

    def unlike(self, rank: int, sums: Mapping[str, tuple[int, int]]) -> list[str]:
        """Frozen parameters of which a rank's parts have other values than ``sums`` says, as zero/saving/frozen_base.py
        makes them.
        """
        saved = _loaded(self._model_files[rank])
        found, shapes = [], saved["frozen_param_shapes"]
        for name, values in (saved.get("frozen_param_fragments") or {}).items():
            head, numel = values.view(-1)[: HEAD_BYTES // values.element_size()], math.prod(shapes[name])
            if name in sums and tuple(sums[name]) != sum_of_part(head, values.numel(), numel, rank):
                found.append(name)
        return found

    def trainer(self, save_dir: Path, tag: str, records: Sequence[TrainingRecord]) -> TrainerFolder | None:
        """None if it is no folder of the Trainer's."""
        return TrainerFolder(self._folder, self, save_dir, tag, records) if (self._folder / _STATE).is_file() else None


class TrainerFolder:
    """The Trainer's files of a checkpoint after another step.

    Attributes:
        left_out: what the Trainer itself would have saved, and nobody recorded.
    """

    def __init__(self, source: Path, like: Like, save_dir: Path, tag: str, records: Sequence[TrainingRecord]) -> None:
        self._source, self._like, self._records = source, like, records
        self._state = json.loads((source / _STATE).read_text(encoding="utf-8"))
        counters = records[0].counters
        self._saved_step = int(self._state["global_step"])
        self.step = counters["global_steps"] + self._saved_step - like.global_steps
        self._num_applied = counters["global_steps"] - counters["skipped_steps"] - like.applied_steps
        named = _FOLDER.fullmatch(save_dir.name)
        if self.step < self._saved_step:
            raise FuyouStateError(f"{source} is of step {self._saved_step}, after the recovered one, {self.step}")
        if named and int(named[1]) != self.step:
            right = save_dir.with_name(f"checkpoint-{self.step}")
            raise FuyouStateError(f"the recovered step is {self.step}: name {right}")
        if save_dir.exists():
            raise FuyouStateError(f"{save_dir} exists; a folder of the Trainer is made as a whole, so name a new one")
        if not tag.startswith("global_step"):
            raise FuyouStateError(f"the Trainer looks for a tag global_step..., found {tag!r}; leave --tag out")
        self._schedule = self._moved_schedule() if (source / _SCHEDULER).is_file() else None
        self.left_out = list(self._not_recorded())

    def _not_recorded(self) -> Iterator[str]:
        if self.step > self._saved_step:
            yield f"the Trainer's log of the steps after {self._saved_step}"
        if "python" not in self._records[0].generators:
            yield (
                f"states of Python's and NumPy's generators: they are those of step {self._saved_step} "
                '("random_states": "all" records them)'
            )

    def groups(self, recorded: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Hyperparameters with the rates of the step that comes next."""
        if self._schedule is None:
            return list(recorded)
        rates = self._schedule["_last_lr"]
        return [{**group, "lr": rate} for group, rate in zip(recorded, rates, strict=True)]

    def _moved_schedule(self) -> dict[str, Any]:
        """See [Note: the Trainer's schedule]."""
        saved = torch.load(self._source / _SCHEDULER, map_location="cpu", weights_only=False)
        per_step, rest = divmod(saved["last_epoch"], max(1, self._like.applied_steps))
        try:
            scheduler = self._scheduler(saved)
            before = saved["_last_lr"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no optimizer has stepped
                for tick in range(per_step * self._num_applied):
                    if tick % per_step == 0:
                        before = scheduler.get_last_lr()
                    scheduler.step()
        except Exception as error:  # of the Trainer's arguments, or of another library's scheduler
            raise FuyouStateError(
                f"the schedule of {self._source} cannot be moved on to step {self.step} ({error!r})"
            ) from error
        recorded = [group["lr"] for group in self._records[0].groups]
        if rest or (self._num_applied and list(before) != recorded):
            raise FuyouStateError(
                f"the schedule of {self._source}, moved on to step {self.step}, gives learning rates {list(before)}, "
                f"the run had {recorded}: the script's own scheduler is another one. Recover without --like"
            )
        moved: dict[str, Any] = scheduler.state_dict()
        return moved

    def _scheduler(self, saved: Mapping[str, Any]) -> Any:
        from transformers import get_scheduler

        arguments = torch.load(self._source / _ARGUMENTS, map_location="cpu", weights_only=False)
        max_steps = int(self._state["max_steps"])
        params = [{"params": [torch.zeros(1)], "lr": rate} for rate in saved["base_lrs"]]
        optimizer = torch.optim.SGD(params)
        scheduler = get_scheduler(
            arguments.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=arguments.get_warmup_steps(max_steps),
            num_training_steps=max_steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )
        scheduler.load_state_dict(dict(saved))
        for group, rate in zip(optimizer.param_groups, saved["_last_lr"], strict=True):
            group["lr"] = rate
        return scheduler

    def complete(self, target: Path) -> None:
        """Writes them into a folder that has DeepSpeed's files. Weights of the older step are not copied."""
        for file in self._source.iterdir():
            if file.is_file() and not _WEIGHTS.fullmatch(file.name) and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
        epoch = self._state["epoch"] * self.step / self._saved_step if self._saved_step else 0.0
        state = {**self._state, "global_step": self.step, "epoch": epoch}
        text = json.dumps(state, indent=2, sort_keys=True) + "\n"
        (target / _STATE).write_text(text, encoding="utf-8")
        if self._schedule is not None:
            torch.save(self._schedule, target / _SCHEDULER)
        for rank, record in enumerate(self._records):
            name = "rng_state.pth" if len(self._records) == 1 else f"rng_state_{rank}.pth"
            if (self._source / name).is_file():
                saved = torch.load(self._source / name, map_location="cpu", weights_only=False)
                torch.save(_generators(saved, record, rank), target / name)


def _generators(saved: Mapping[str, Any], record: TrainingRecord, rank: int) -> dict[str, Any]:
    """The Trainer's names for what was recorded; what was not stays."""
    states = record.generator_states()
    found = {**saved, "cpu": states["torch"]}
    found.update({name: states[name] for name in ("python", "numpy") if name in states})
    devices = set(saved) - {"cpu", "python", "numpy"}
    if "device" in states and len(devices) == 1:
        (name,) = devices
        every = found[name]
        if isinstance(every, torch.Tensor):
            found[name] = states["device"]
        else:  # of all devices of the node
            mine = rank % len(every)
            found[name] = [states["device"] if place == mine else state for place, state in enumerate(every)]
    return found


def _loaded(file: Path) -> dict[str, Any]:
    try:
        with naming(file):
            found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    except RuntimeError as error:
        raise FuyouStorageError(0, f"--like: it cannot be read ({error})", str(file)) from error
    return found
