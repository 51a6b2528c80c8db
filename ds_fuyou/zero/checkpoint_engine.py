# SPDX-License-Identifier: Apache-2.0
"""``engine.save_checkpoint`` and its counterparts: streamed files, folders that appear whole, frozen parts on storage.

The layout and the contents are stock's. What changes is how files come about, see checkpoint/streamed_file.py
and checkpoint/atomic.py.
"""

from __future__ import annotations

import functools
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch.nn import Parameter

from ds_fuyou.checkpoint import atomic, streamed_file
from ds_fuyou.checkpoint.streamed_file import StandIns
from ds_fuyou.errors import FuyouError, FuyouStateError, FuyouStorageError
from ds_fuyou.log import log_once
from ds_fuyou.zero.param_swapper import partition_of
from ds_fuyou.zero.stage3 import FuyouStage3Optimizer

__all__ = ["FuyouCheckpointEngine", "loading_module", "replace_writer", "saving"]

_FROZEN_FRAGMENTS = "frozen_param_fragments"
_SMALL_ENTRIES = 64 << 20  # room for what is not counted: scheduler, client state, recovery script


class FuyouCheckpointEngine(TorchCheckpointEngine):
    """torch files, written from stand-ins and read by mapping them."""

    def __init__(self, config_params: Any) -> None:
        super().__init__(config_params)
        self.stand_ins = StandIns()
        self.failure: Exception | None = None
        self._written: list[Path] = []

    def begin(self) -> StandIns:
        """A new checkpoint: stand-ins made from now on belong to it."""
        self.stand_ins, self._written, self.failure = StandIns(), [], None
        return self.stand_ins

    def save(self, state_dict: Any, path: str) -> None:
        """Writes one file. A failure is kept for the end of the save: until then this rank goes on with the others."""
        if self.failure is not None:
            return
        self._written.append(Path(path))
        try:
            streamed_file.save(state_dict, Path(path), self.stand_ins)
        except Exception as error:  # whatever it is, all ranks are told: see _settle
            self.failure = error

    def discard(self) -> None:
        """Removes the files of a checkpoint that failed: they would fill the disk to no use."""
        for path in self._written:
            path.unlink(missing_ok=True)
        self._written = []

    def load(self, path: str, map_location: Any = None) -> Any:
        """As stock's, but bytes come from the mapped file when they are used, not all at once."""
        is_mappable = zipfile.is_zipfile(path)
        return torch.load(path, map_location=map_location, weights_only=False, mmap=is_mappable)


def replace_writer(engine: Any) -> None:
    """Gives an engine our writer, unless its configuration asks for another one."""
    if not isinstance(engine.optimizer, FuyouStage3Optimizer):
        return
    present = engine.checkpoint_engine
    if type(present) is TorchCheckpointEngine and present.zipfile_serialization:
        engine.checkpoint_engine = FuyouCheckpointEngine(engine._config)
    else:
        log_once(
            logging.WARNING,
            f"checkpoints are written by {type(present).__name__} as the configuration asks: not streamed (the rank's "
            "fp32 state is collected in host memory) and not atomic",
        )


def saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """``save_checkpoint``: into a hidden folder, then one rename."""

    @functools.wraps(original)
    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        client_state = {} if client_state is None else client_state
        if not save_dir or not isinstance(self.checkpoint_engine, FuyouCheckpointEngine):
            return original(
                self,
                save_dir,
                tag=tag,
                client_state=client_state,
                save_latest=save_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        tag = _common_tag(str(tag if tag is not None else f"global_step{self.global_steps}"))
        folder, hidden = Path(save_dir), atomic.incomplete_tag(tag)
        _prepare(self, folder, tag, exclude_frozen_parameters)
        with _streaming(self) as writer:
            result = original(
                self,
                save_dir,
                tag=hidden,
                client_state=client_state,
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
            _settle(writer.failure)
        _settle(_outcome(lambda: _publish(self, folder, hidden, tag, is_local=False)))
        _settle(_outcome(lambda: _publish(self, folder, hidden, tag, is_local=True)))
        if save_latest:
            is_writer = dist.get_rank() == 0
            _settle(_outcome(lambda: atomic.write_text(folder / "latest", tag) if is_writer else None))
        return result

    return save_checkpoint


def _common_tag(tag: str) -> str:
    """The tag, checked. Ranks that name different ones would leave parts of several checkpoints."""
    tags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tags, tag)
    if len(set(tags)) > 1:
        raise FuyouStateError(f"every rank must save to the same tag; found {sorted(set(tags))}")
    return atomic.checked_tag(tag)


def _prepare(engine: Any, folder: Path, tag: str, exclude_frozen_parameters: bool) -> None:
    """Clears what earlier saves left, and raises on every rank if the files will not fit."""
    folder.mkdir(parents=True, exist_ok=True)
    if engine.local_rank <= 0:
        atomic.recover(folder / tag)
        atomic.discard(folder / atomic.incomplete_tag(tag))
    dist.barrier()
    _require_space(engine, folder, exclude_frozen_parameters)


def _outcome(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # told to every rank by _settle
        return error
    return None


def _settle(failure: Exception | None) -> None:
    """Every rank comes here with its own outcome; if one failed all raise, the failing one its own error.

    Raises:
        FuyouStorageError: a rank could not write, flush or rename.
    """
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if failure is None else (getattr(failure, "errno", None) or 0, str(failure)))
    if failure is not None:
        if isinstance(failure, FuyouError) or not isinstance(failure, OSError):
            raise failure
        raise FuyouStorageError(failure.errno or 0, f"saving a checkpoint failed: {failure}") from failure
    for rank, found in enumerate(said):
        if found is not None:
            raise FuyouStorageError(found[0], f"rank {rank} could not save its part of a checkpoint: {found[1]}")


def _publish(engine: Any, folder: Path, hidden: str, tag: str, *, is_local: bool) -> None:
    """Names the folder: first rank 0, then the first rank of every node whose folder is its own."""
    mine = engine.local_rank <= 0 and (folder / hidden).is_dir() if is_local else dist.get_rank() == 0
    if mine:
        atomic.publish(folder / hidden, folder / tag)


@contextmanager
def _streaming(engine: Any) -> Iterator[FuyouCheckpointEngine]:
    """While it lasts, large tensors in state dictionaries are stand-ins."""
    writer: FuyouCheckpointEngine = engine.checkpoint_engine
    stand_ins = writer.begin()
    fragment_of = engine._get_param_fragment_func
    engine.optimizer.checkpoint_state.stand_ins = stand_ins
    engine._get_param_fragment_func = lambda param: _frozen_fragment(param, stand_ins, fragment_of)
    try:
        yield writer
    except BaseException:
        writer.discard()
        raise
    finally:
        engine.optimizer.checkpoint_state.stand_ins = None
        del engine._get_param_fragment_func
        writer.begin()


def _frozen_fragment(
    param: Parameter, stand_ins: StandIns, fragment_of: Callable[[Parameter], torch.Tensor]
) -> torch.Tensor:
    """This rank's part of a parameter that is frozen now; a stand-in if it is on storage or the optimizer's."""
    if not hasattr(param, "ds_id") or partition_of(param) is None:
        return fragment_of(param)
    numel, dtype = param.ds_tensor.ds_numel, param.ds_tensor.dtype
    return stand_ins.add((numel,), dtype, lambda: iter([(0, param.nvme_swapper.values(param))]))


def _require_space(engine: Any, folder: Path, exclude_frozen_parameters: bool) -> None:
    """Raises on every rank if the filesystem is too small for all ranks' files."""
    num_bytes = engine.optimizer.checkpoint_state.num_bytes if engine.save_zero_checkpoint else 0
    if engine.save_non_zero_checkpoint:
        num_bytes += _SMALL_ENTRIES + sum(buffer.nbytes for buffer in engine.module.buffers())
        if not exclude_frozen_parameters:
            frozen = [p for p in engine.module.parameters() if not p.requires_grad and hasattr(p, "ds_tensor")]
            num_bytes += sum(p.ds_tensor.ds_numel * p.ds_tensor.element_size() for p in frozen)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    where = (os.uname().nodename, os.stat(folder).st_dev)
    dist.all_gather_object(of_ranks, (where, num_bytes))
    of_others = sum(size for place, size in of_ranks if place == where) - num_bytes
    messages: list[Any] = [None] * len(of_ranks)
    dist.all_gather_object(messages, atomic.require_space(folder, num_bytes, of_others))
    for message in messages:
        if message is not None:
            raise FuyouStorageError(28, message, os.fspath(folder))


def loading_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_module_state_dict``: frozen parameters on storage are written there, one by one."""

    @functools.wraps(original)
    def load_module_state_dict(self: Any, checkpoint: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        fragments = checkpoint.get(_FROZEN_FRAGMENTS) if isinstance(self.optimizer, FuyouStage3Optimizer) else None
        if fragments:
            fragments = dict(fragments)
            for param in self.module.parameters():
                name = self.param_names.get(param)
                if name not in fragments or partition_of(param) is None:
                    continue
                param.nvme_swapper.replace(param, fragments[name])
                fragments[name] = param.ds_tensor.data  # what the original copies onto itself
            checkpoint = {**checkpoint, _FROZEN_FRAGMENTS: fragments}
        return original(self, checkpoint, *arguments, **named)

    return load_module_state_dict
