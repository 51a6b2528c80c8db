# SPDX-License-Identifier: Apache-2.0
"""``engine.load_checkpoint``: all ranks load one, or none goes on as if it had.

[Note: meetings of a load]
A rank whose file is missing or damaged raises. Scripts catch that and begin anew, and the other ranks, which have
loaded theirs, would train on with it. So they meet: when every rank has read what the module needs and has found its
states, when each has loaded its module, and in the end. A rank that fails comes to the next meeting of the others,
once, and raises; there they raise, too. What a rank does alone fails between two meetings, where no other collective
waits for it: what is gathered in the end is gathered after the last one.

[Note: what a failed load leaves]
Stock loads the module, frozen parameters, scheduler and counters before it opens the file of states. Here that is read
and looked at first: a checkpoint that is not whole, or is another model's, changes nothing. Until the module is loaded
on all ranks what it has changed (buffers, what torch takes before it finds a name that it misses) is put back. What
fails later leaves a mixture, and no step is made of one; weights alone, loaded over it, leave its moments. A universal
checkpoint is not looked at before: until its states are replaced, counters and scheduler are as in stock.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from ds_fuyou.checkpoint.file_sums import compare_archive
from ds_fuyou.checkpoint.reading import naming
from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.host.available_memory import available_host_bytes
from ds_fuyou.host.memory import normal_tensors
from ds_fuyou.zero.agreement import LoadMeetings
from ds_fuyou.zero.run.neighbours import local_ranks
from ds_fuyou.zero.saving.checkpoint_engine import end_last_save
from ds_fuyou.zero.stage3 import FuyouStage3Optimizer

__all__ = ["loading"]

logger = logging.getLogger("ds_fuyou")
_READS_STATES = "_get_all_zero_checkpoints"  # of the engine


def loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_checkpoint``: a checkpoint on its way is waited for; what was loaded is committed at once."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = self.optimizer
        if not isinstance(optimizer, FuyouStage3Optimizer):
            return original(self, *args, **kwargs)
        optimizer.require_between_steps("load_checkpoint()")
        end_last_save(self)
        call = signature.bind(self, *args, **kwargs)
        state = optimizer.checkpoint_state
        meetings = LoadMeetings()
        state.begins(meetings)
        asked = call.arguments
        with_states = asked.get("load_optimizer_states", True) and not asked.get("load_module_only", False)
        if with_states:
            state.read_states = functools.partial(_read_states, self, call.arguments)
        try:
            with normal_tensors():  # parameters that stay gathered are trained with
                _find(self, call.arguments)
                result = original(*call.args, **call.kwargs)
                meetings.meet(is_there=result[0] is not None)
        except Exception as error:
            with contextlib.suppress(Exception):  # the first failure is the one to tell
                meetings.meet(error)
            raise
        finally:
            state.loading_ended()
            vars(self).pop(_READS_STATES, None)
        if result[0] is not None:
            result[1].pop("frozen_param_fragments", None)  # stock's own, and in the file's memory, which may change
            state.loaded(with_states=with_states)
            with normal_tensors():
                optimizer.checkpoint_event_epilogue()
            optimizer.checkpoint_loaded(self)
        return result

    return load_checkpoint


def _look_at_weights(engine: Any, folder: Path) -> None:
    """Before weights alone are loaded: DeepSpeed makes those of the whole model in fp32 in every rank's host memory, of
    the states of all ranks, past what compares files here. Each rank compares some of them.

    Raises:
        FuyouChecksumError: a file is not what was written.
        FuyouStateError: there is no such memory.
    """
    needed, free = 4 * engine.optimizer.rank_state.num_params * local_ranks(), available_host_bytes()
    if needed > free:
        raise FuyouStateError(
            f"load_optimizer_states=False: DeepSpeed makes the weights in fp32 in host memory, {needed} bytes for the "
            f"ranks of this machine, {free} are free; load with optimizer states, which are read chunk by chunk"
        )
    if engine.optimizer.rank_state.activation.config.checksum:
        for file in sorted(folder.glob("*_optim_states.pt"))[dist.get_rank() :: dist.get_world_size()]:
            compare_archive(file)


def _read_states(engine: Any, call: dict[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """What stock does when the module is loaded, which then finds what was read. ``checkpoint``: of the module.

    Raises:
        FuyouStateError: of other ranks, or as :meth:`CheckpointState.check`.
    """
    if engine.load_universal_checkpoint():
        return
    ranks = checkpoint["dp_world_size"]
    if ranks != engine.seq_dp_world_size:
        raise FuyouStateError(
            f"the checkpoint is of {ranks} ranks, this run has {engine.seq_dp_world_size}: DeepSpeed's "
            "ds_to_universal.py makes one of it for any number"
        )
    engine.loaded_checkpoint_dp_world_size = ranks
    found = engine._get_all_zero_checkpoints(call["load_dir"], str(call["tag"]))
    optimizer = engine.optimizer
    optimizer.checkpoint_state.check(found[dist.get_rank(group=optimizer.dp_process_group)])
    setattr(engine, _READS_STATES, lambda *_: found)


def _find(engine: Any, call: dict[str, Any]) -> None:
    """Gives a call without a tag the one that ``latest`` names: stock would read it, and say of a failure neither what
    it was nor where. Tells of a call that names another one, without optimizer states: DeepSpeed takes weights from the
    checkpoint that ``latest`` names, whatever the tag.

    Raises:
        FuyouStorageError: ``latest`` cannot be read, or is empty.
        FuyouChecksumError, FuyouStateError: as :func:`_look_at_weights`, of weights alone.
    """
    tag, is_universal = call.get("tag"), engine.load_universal_checkpoint()
    takes_weights_alone = not call.get("load_optimizer_states", True) and not is_universal
    is_asked = tag is None or takes_weights_alone
    latest = Path(call["load_dir"], "latest_universal" if is_universal else "latest")
    if not is_asked or not latest.is_file():
        return
    with naming(latest):
        named = latest.read_text(encoding="utf-8").strip()
    if not named:
        raise FuyouStorageError(
            errno.EIO,
            "it names no checkpoint: it is empty, or reads as if it were; name the tag to be loaded",
            str(latest),
        )
    if tag is None:
        call["tag"] = named
    elif named != str(tag):
        logger.warning(
            "load_optimizer_states=False: DeepSpeed reads weights of the checkpoint %r, which %s names, and not of %r; "
            "let that file name the one that is wanted",
            named,
            latest,
            str(tag),
        )
    if takes_weights_alone:
        _look_at_weights(engine, Path(call["load_dir"], named))
