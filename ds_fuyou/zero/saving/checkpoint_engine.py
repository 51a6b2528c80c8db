# SPDX-License-Identifier: Apache-2.0
"""``engine.save_checkpoint`` and its counterparts: streamed files, folders that appear whole, frozen parts on storage.

The layout and the contents are stock's. What changes is how files come about, see checkpoint/streamed_file.py
and checkpoint/atomic.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch.nn import Parameter
from torch.utils import _pytree

from ds_fuyou.checkpoint import atomic, streamed_file
from ds_fuyou.checkpoint.file_sums import compare_file
from ds_fuyou.checkpoint.mapped import Compared, copied
from ds_fuyou.checkpoint.parts import Parts
from ds_fuyou.checkpoint.reading import is_archive, naming
from ds_fuyou.checkpoint.stock_state import states_of
from ds_fuyou.checkpoint.streamed_file import StandIns, StreamedFile
from ds_fuyou.checkpoint.training_record import from_bytes, to_bytes
from ds_fuyou.checkpoint.unfinished import WritingLock, discard_left
from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.log import get_logger, log_once
from ds_fuyou.zero.agreement import of_every_rank, of_rank_0
from ds_fuyou.zero.parameters.param_swapper import (
    FuyouParameterSwapper,
    is_what_scripts_write_to,
    partition_bytes,
    partition_of,
)
from ds_fuyou.zero.run.neighbours import machine
from ds_fuyou.zero.saving import frozen_base
from ds_fuyou.zero.saving.background_save import Save, as_storage_error
from ds_fuyou.zero.saving.checkpoint_state import CheckpointState
from ds_fuyou.zero.stage3 import FuyouStage3Optimizer

__all__ = [
    "CopiedScripts",
    "FuyouCheckpointEngine",
    "end_last_save",
    "loading_module",
    "replace_writer",
    "saving",
]

T = TypeVar("T")
_FROZEN_FRAGMENTS, _OPTIMIZER = "frozen_param_fragments", "optimizer_state_dict"
_WAIT = "fuyou_wait_checkpoint"  # of the engine
_PIECE_BYTES = 8 << 20
_SMALL_ENTRIES = 8 << 20  # room for what is not counted: scheduler, client state, recovery script


class CopiedScripts:
    """DeepSpeed's scripts beside checkpoints, which every save of stock writes over. A file that is written over is
    flushed when it is closed, and its source may have left the page cache: both wait behind all that training moves.
    """

    def __init__(self) -> None:
        self._copied: dict[Path, dict[Path, tuple[int, ...]]] = {}

    def copy(self, copy: Callable[[str], None], target: Path) -> None:
        """``copy(target)``, unless what it made there last is there still."""
        made = self._copied.get(target, {})
        if made and all(_identity(script) == known for script, known in made.items()):
            return
        before = {script: _identity(script) for script in target.glob("*.py")}
        copy(os.fspath(target))
        after = {script: _identity(script) for script in target.glob("*.py")}
        self._copied[target] = {
            script: known for script, known in after.items() if script in made or known != before.get(script)
        }


def _identity(file: Path) -> tuple[int, ...]:
    """Which file has this name, and since when; empty if there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


class FuyouCheckpointEngine(TorchCheckpointEngine):
    """torch files, written from stand-ins and read by mapping them."""

    def __init__(self, config_params: Any) -> None:
        super().__init__(config_params)
        self._stand_ins: StandIns | None = None
        self.failure: Exception | None = None
        self.scripts = CopiedScripts()
        self.files: list[StreamedFile] = []
        """Of the checkpoint that is being made, laid out."""
        self.read_behind: list[Callable[[Callable[[], object]], None]] = []
        """Of each frozen parameter that is written behind the call: takes what an edit of it has to wait for."""
        self.loaded: set[str] = set()
        """Real paths of the files that were mapped."""
        self.compares = True
        """What is loaded, with the checksums in its files."""

    def begin(self) -> StandIns:
        """A new checkpoint: stand-ins made from now on belong to it."""
        self._stand_ins, self.files, self.read_behind, self.failure = StandIns(), [], [], None
        return self._stand_ins

    def end(self) -> None:
        """What is saved from now on is no part of a checkpoint."""
        self._stand_ins, self.files, self.read_behind, self.failure = None, [], [], None

    def save(self, state_dict: Any, path: str) -> None:
        """Lays one file out. A failure is kept for the end of the save: until then this rank goes on with the others.

        Outside of a checkpoint (``save_16bit_model``) the file is written as a whole, and a failure raised.
        """
        if self._stand_ins is None:
            streamed_file.save(state_dict, Path(path), StandIns())
            return
        if self.failure is not None:
            return
        try:
            file = streamed_file.lay_out(state_dict, Path(path), self._stand_ins)
            self.files.append(file)
            file.fill_now()
        except Exception as error:  # whatever it is, all ranks are told: see _settle
            Path(path).unlink(missing_ok=True)
            self.failure = error

    def attempt(self, call: Callable[[], Any]) -> Any:
        """What of stock's part of a save may fail on one rank alone: as in :meth:`save`, that is told in the end."""
        if self.failure is not None:
            return None
        try:
            return call()
        except Exception as error:  # whatever it is: see _settle
            self.failure = error
            return None

    def load(self, path: str, map_location: Any = None) -> Any:
        """As stock's, but states and frozen parameters come from the mapped file when they are used, not all at once.
        The rest outlives the load, in the script's hands too, and the file may change: it is copied.
        """
        is_mappable = is_archive(path)
        if is_mappable:
            self.loaded.add(os.path.realpath(path))
        if is_mappable and self.compares:
            compare_file(path, with_tensors=False)
        load = functools.partial(torch.load, path, map_location=map_location, weights_only=False)
        with naming(path):
            loaded = load(mmap=is_mappable)
        if not isinstance(loaded, dict):
            return loaded
        mapped = [loaded.get(_FROZEN_FRAGMENTS), *states_of(loaded.get(_OPTIMIZER))]
        streamed = {id(leaf) for leaf in _pytree.tree_leaves(mapped)}
        compared = self.compared()
        for leaf in _pytree.tree_leaves(loaded):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and id(leaf) not in streamed:
                compared.check(leaf)
        if not is_mappable:
            return loaded
        try:
            return copied(loaded, mapped)
        except Exception:  # the script's classes may refuse it
            if self.compares:
                compare_file(path, with_tensors=True)
            with naming(path):
                return load(mmap=False)

    def compared(self) -> Compared:
        """For what is used of the files that were mapped so far."""
        return Compared(self.loaded, sums=self.compares)


def replace_writer(engine: Any) -> None:
    """Gives an engine our writer, unless its configuration asks for another one."""
    if not isinstance(engine.optimizer, FuyouStage3Optimizer):
        return
    setattr(engine, _WAIT, functools.partial(end_last_save, engine, is_asked=True))
    frozen_base.watch(engine)
    present = engine.checkpoint_engine
    if type(present) is TorchCheckpointEngine and present.zipfile_serialization:
        engine.checkpoint_engine = writer = FuyouCheckpointEngine(engine._config)
        writer.loaded = engine.optimizer.checkpoint_state.loaded_files
        writer.compares = engine.optimizer.rank_state.activation.config.checksum
    else:
        log_once(
            logging.WARNING,
            f"checkpoints are written by {type(present).__name__} as the configuration asks: not streamed (the rank's "
            "fp32 state is collected in host memory) and not atomic",
        )


def saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """``save_checkpoint``: into a hidden folder, then one rename, in the call or behind training."""

    @functools.wraps(original)
    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        streams = bool(save_dir) and isinstance(self.checkpoint_engine, FuyouCheckpointEngine)
        if streams:
            save_dir = os.path.abspath(save_dir)  # behind training the script may have another working directory
        client_state = {} if client_state is None else client_state
        saved = functools.partial(original, self, save_dir, exclude_frozen_parameters=exclude_frozen_parameters)
        if not save_dir or not isinstance(self.optimizer, FuyouStage3Optimizer):
            return saved(tag=tag, client_state=client_state, save_latest=save_latest)
        self.optimizer.require_between_steps("save_checkpoint()")
        with frozen_base.left_out(self, is_asked=exclude_frozen_parameters) as lacks_frozen:
            if lacks_frozen and not exclude_frozen_parameters:
                client_state = dict(client_state) | {frozen_base.SUMS: frozen_base.sums_of(self)}
            saved = functools.partial(saved, client_state=client_state)
            if not streams:
                return saved(tag=tag, save_latest=save_latest)
            with _alone(self.optimizer.checkpoint_state):
                return _save(self, saved, save_dir, tag, save_latest=save_latest, lacks_frozen=lacks_frozen)

    return save_checkpoint


@contextmanager
def _alone(state: CheckpointState) -> Iterator[None]:
    """Raises FuyouStateError within another one."""
    if state.is_saving:
        raise FuyouStateError(
            "save_checkpoint() was called within save_checkpoint(), by a signal handler, say: let the handler set a "
            "flag, and call it when that has returned"
        )
    state.is_saving = True
    try:
        yield
    finally:
        state.is_saving = False


def _save(
    engine: Any, saved: Callable[..., Any], save_dir: str, tag: Any, *, save_latest: bool, lacks_frozen: bool
) -> Any:
    """``saved``: stock's saving, of a tag."""
    end_last_save(engine)
    tag = _common_tag(str(tag if tag is not None else f"global_step{engine.global_steps}"))
    folder, name = atomic.behind_link(Path(save_dir), tag)
    hidden = atomic.incomplete_tag(name)
    lock, makers = _prepare(engine, folder, name, lacks_frozen)
    behind = _is_behind(engine, makers)
    latest = (Path(save_dir, "latest"), tag) if save_latest and (behind or dist.get_rank() == 0) else None
    parts = Parts(folder / hidden, folder / name, dist.get_rank(), makers, latest, lock)
    state: CheckpointState = engine.optimizer.checkpoint_state
    save: Save | None = None
    try:
        with _streaming(engine) as writer:
            _settle(_outcome(state.keep), str(folder / name), undo=parts.discard)
            result = saved(tag=hidden if folder == Path(save_dir) else os.fspath(folder / hidden), save_latest=False)
            _settle(writer.failure, str(folder / name), undo=parts.discard)
            save = state.save = Save(str(folder / name), writer.files, state.snapshot, parts)
            engine.optimizer.rank_state.core.finish_first = save.finish
            for edits_wait_for in writer.read_behind:
                edits_wait_for(save.wait)
        save.start(publishes=behind)
    except BaseException:
        if save is None:
            parts.end()
        else:  # all ranks wait for it together, and none finds it missing
            save.drop()
        raise
    if not behind:
        end_last_save(engine)
    return result


def end_last_save(engine: Any, *, is_asked: bool = False) -> None:
    """Waits until the checkpoint that was saved last is whole. Every rank calls it.

    Raises:
        FuyouStorageError: a rank could not write its part, and no ``step()`` has raised that yet, or the script asks
            for the checkpoint: all ranks raise.
    """
    state: CheckpointState = engine.optimizer.checkpoint_state
    save = state.save
    if save is None:
        return
    parts, is_first = save.parts, dist.get_rank() == 0
    try:
        save.wait()
        is_told, save.is_told = save.is_told and not is_asked, True
        if not _settle(save.failure, save.name, is_told=is_told, undo=parts.discard):
            return
        is_left = not save.publishes or True not in of_every_rank(save.is_published)
        _settle(
            _outcome(lambda: parts.prepare_latest() if is_left and is_first else None), save.name, undo=parts.discard
        )
        published = _outcome(lambda: parts.publish() if is_left and parts.is_maker else None)
        _settle(published, save.name, undo=parts.discard)
        _settle(_outcome(lambda: parts.write_latest() if is_left and is_first else None), save.name)
    finally:
        if save.is_over():
            state.save = engine.optimizer.rank_state.core.finish_first = None
            parts.end()


def _is_behind(engine: Any, makers: Sequence[int]) -> bool:
    """Whether this save goes on behind training: where all ranks write into one folder, see checkpoint/parts.py."""
    if engine.optimizer.rank_state.activation.config.checkpoint.save != "background":
        return False
    if len(set(makers)) == 1:
        return True
    log_once(logging.INFO, "save_checkpoint() waits until files are written: ranks save into folders of their own")
    return False


def _common_tag(tag: str) -> str:
    """The tag, checked. Ranks that name different ones would leave parts of several checkpoints."""
    tags = of_every_rank(tag)
    if len(set(tags)) > 1:
        raise FuyouStateError(f"every rank must save to the same tag; found {sorted(set(tags))}")
    return atomic.checked_tag(tag)


def _prepare(engine: Any, folder: Path, tag: str, lacks_frozen: bool) -> tuple[WritingLock, list[int]]:
    """Clears what earlier saves left, raises on every rank if the files will not fit, and makes the hidden folder. This
    rank's lock of it, and of every rank who made the folder that it writes to.
    """
    hidden, name = folder / atomic.incomplete_tag(tag), str(folder / tag)
    rank, is_first_here = dist.get_rank(), engine.local_rank <= 0
    locks: list[WritingLock] = []

    def clear() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if is_first_here or rank == 0:
            atomic.recover(folder / tag)
            discard_left(hidden)

    def make() -> None:
        with contextlib.suppress(FileExistsError):  # another machine has made it
            locks.append(WritingLock(hidden, f"{save} {rank}", is_first=True))

    def join() -> int:
        if not locks:
            locks.append(WritingLock(hidden, f"{save} {rank}"))
        which, _, maker = locks[0].maker().partition(" ")
        if which != save:  # another save's, or what one has left in a folder of this rank's own
            locks.pop().release()
            discard_left(hidden)
            locks.append(WritingLock(hidden, f"{save} {rank}", is_first=True))
        if locks[0].is_new:
            atomic.require_replaceable(folder / tag, hidden)
        return int(maker) if which == save else rank

    try:
        _settle(_outcome(lambda: clear() if rank == 0 else None), name)
        _settle(_outcome(lambda: clear() if rank != 0 else None), name)
        _require_space(engine, folder, lacks_frozen)
        save = of_rank_0(secrets.token_hex(16))
        _settle(_outcome(lambda: make() if is_first_here else None), name)
        makers = _of_every_rank(join, name)
    except BaseException:
        for lock in locks:
            if lock.is_new and lock.is_in_place():
                atomic.discard(hidden)
            lock.release()
        raise
    return locks[0], makers


def _of_every_rank(call: Callable[[], T], name: str) -> list[T]:
    """What it gives on each of them; if it failed on one, all raise as in :func:`_settle`."""
    found: list[T] = []
    _settle(_outcome(lambda: found.append(call())), name)
    return of_every_rank(found[0])


def _outcome(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # told to every rank by _settle
        return error
    return None


def _settle(
    failure: Exception | None, name: str, *, is_told: bool = False, undo: Callable[[], None] = lambda: None
) -> bool:
    """Every rank comes here with its own outcome; if one failed all raise, the failing one its own error. Where all
    who failed have been told before, nobody raises, the others log it, and False is returned. ``undo`` is called first
    in both cases.

    Raises:
        FuyouStorageError: a rank could not write, flush or rename.
    """
    mine = None if failure is None else (getattr(failure, "errno", None) or 0, str(failure), is_told)
    said = of_every_rank(mine)
    failures = {rank: found for rank, found in enumerate(said) if found is not None}
    if not failures:
        return True
    undo()
    are_told = all(told for _, _, told in failures.values())
    if failure is not None:
        if are_told:
            return False
        raise as_storage_error(failure, name)
    rank, (number, text, _) = next(iter(failures.items()))
    error = FuyouStorageError(number, f"rank {rank} could not save its part of a checkpoint: {text}")
    if not are_told:
        raise error
    get_logger().error("%s does not appear: %s", name, error)
    return False


@contextmanager
def _streaming(engine: Any) -> Iterator[FuyouCheckpointEngine]:
    """While it lasts, large tensors in state dictionaries are stand-ins, and scripts that are there stay."""
    writer: FuyouCheckpointEngine = engine.checkpoint_engine
    state: CheckpointState = engine.optimizer.checkpoint_state
    stand_ins = writer.begin()
    fragment_of, copy_script = engine._get_param_fragment_func, engine._copy_recovery_script
    state.stand_ins = stand_ins
    engine._get_param_fragment_func = lambda param: writer.attempt(
        lambda: _frozen_fragment(param, stand_ins, fragment_of, writer.read_behind)
    )
    engine._copy_recovery_script = lambda save_path: writer.attempt(
        lambda: writer.scripts.copy(copy_script, Path(save_path))
    )
    try:
        yield writer
    except BaseException:
        for file in writer.files:
            file.path.unlink(missing_ok=True)
        if state.snapshot is not None:
            state.snapshot.close()
        raise
    finally:
        state.stand_ins = state.snapshot = None
        del engine._get_param_fragment_func, engine._copy_recovery_script
        writer.end()


def _frozen_fragment(
    param: Parameter,
    stand_ins: StandIns,
    fragment_of: Callable[[Parameter], torch.Tensor],
    read_behind: list[Callable[[Callable[[], object]], None]],
) -> torch.Tensor:
    """This rank's part of a parameter that is frozen now; a stand-in if we can tell of every edit of it, or it is the
    optimizer's. What nobody but an edit changes is written with the states, behind training."""
    swapper = getattr(param, "nvme_swapper", None)
    if not hasattr(param, "ds_id") or not isinstance(swapper, FuyouParameterSwapper):
        return fragment_of(param)
    numel, dtype = param.ds_tensor.ds_numel, param.ds_tensor.dtype
    parked = swapper.parked(param)
    if parked is None and partition_of(param) is not None:
        return stand_ins.add((numel,), dtype, lambda: iter([(0, swapper.values(param))]))
    if parked is not None:
        pieces = parked.pieces()
        read_behind.append(parked.read_behind)
    elif is_what_scripts_write_to(param):
        return fragment_of(param)
    else:
        pieces = functools.partial(_pieces_of, param.ds_tensor.data)
        read_behind.append(functools.partial(swapper.read_behind, param))
    return stand_ins.add_together(
        [((numel,), dtype)], lambda: ((0, begin, values) for begin, values in pieces()), later=True
    )[0]


def _pieces_of(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    flat = values.view(-1)
    numel = max(1, _PIECE_BYTES // flat.element_size())
    return ((begin, flat[begin : begin + numel]) for begin in range(0, flat.numel(), numel))


def _require_space(engine: Any, folder: Path, lacks_frozen: bool) -> None:
    """Raises on every rank if the filesystem is too small for all ranks' files."""
    num_bytes = engine.optimizer.checkpoint_state.num_bytes if engine.save_zero_checkpoint else 0
    if engine.save_non_zero_checkpoint:
        num_bytes += _SMALL_ENTRIES + sum(buffer.nbytes for buffer in engine.module.buffers())
        if not lacks_frozen:
            frozen = [p for p in engine.module.parameters() if not p.requires_grad and hasattr(p, "ds_tensor")]
            num_bytes += sum(map(partition_bytes, frozen))

    def where() -> tuple[str, int]:
        return machine(), os.stat(folder).st_dev

    of_ranks = _of_every_rank(lambda: (where(), num_bytes), os.fspath(folder))
    mine, _ = of_ranks[dist.get_rank()]
    of_others = sum(size for place, size in of_ranks if place == mine) - num_bytes
    for message in _of_every_rank(lambda: atomic.require_space(folder, num_bytes, of_others), os.fspath(folder)):
        if message is not None:
            raise FuyouStorageError(errno.ENOSPC, message, os.fspath(folder))


def loading_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_module_state_dict``: frozen parameters on storage are written there, one by one. After the module, as in
    stock: they replace what the module's state dictionary, or the script's function, has said of them, and where that
    failed they stay. Those that a checkpoint left out stay, too, also where its weights alone are loaded: of these
    ``zero_to_fp32`` gives none, not even names, which strict loading asks for.
    """

    @functools.wraps(original)
    def load_module_state_dict(self: Any, checkpoint: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        if not isinstance(self.optimizer, FuyouStage3Optimizer):
            return original(self, checkpoint, *arguments, **named)
        fragments = checkpoint.get(_FROZEN_FRAGMENTS)  # one rank alone may refuse: before the others gather anything
        frozen_base.compare(self, checkpoint, holds_frozen=bool(fragments))
        state: CheckpointState = self.optimizer.checkpoint_state
        before = _beside_parameters(self.module)  # one rank alone may fail in that, too
        state.module_is_read(checkpoint)
        if not fragments and named.get("fetch_z3_params"):
            every = self.module.named_parameters(remove_duplicate=False)
            frozen = {name: param for name, param in every if not param.requires_grad}
            checkpoint = {**checkpoint, "module": {**frozen, **checkpoint["module"]}}
        if named.get("fetch_z3_params") or named.get("custom_load_fn"):  # parameters, too
            state.replaces()
        try:
            original(self, {**checkpoint, _FROZEN_FRAGMENTS: None}, *arguments, **named)
            if state.meetings is not None:
                state.meetings.meet()
        except BaseException:
            try:
                self.module.load_state_dict(before, strict=False)
            except Exception:  # the first failure is the one to tell
                state.replaces()
            raise
        state.replaces()
        if not fragments:
            return None
        fragments, writer = dict(fragments), self.checkpoint_engine
        compared = writer.compared() if isinstance(writer, FuyouCheckpointEngine) else Compared((), sums=False)
        for param in self.module.parameters():
            name = self.param_names.get(param)
            if param.requires_grad or name not in fragments:  # thawed since: the original leaves it, too
                continue
            compared.check(fragments[name])
            swapper = getattr(param, "nvme_swapper", None)
            if not isinstance(swapper, FuyouParameterSwapper):
                continue
            is_news = swapper.is_news(param, fragments[name])
            if partition_of(param) is None:
                swapper.before_edit(param)
                continue
            if is_news:
                swapper.replace(param, fragments[name])
            fragments[name] = param.ds_tensor.data  # what the original copies onto itself
        return original(self, {"module": {}, _FROZEN_FRAGMENTS: fragments}, custom_load_fn=_load_nothing)

    return load_module_state_dict


def _beside_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """A copy of what a module holds beside parameters, of which stage 3 loads none with it: torch replaces what it
    finds before it raises for what it misses.
    """
    found = module.state_dict()
    for name, _ in module.named_parameters(remove_duplicate=False):
        found.pop(name, None)
    copied: dict[str, Any] = from_bytes(to_bytes(found))
    return copied


def _load_nothing(src: Any, dst: Any) -> None:
    """The module is loaded already."""
