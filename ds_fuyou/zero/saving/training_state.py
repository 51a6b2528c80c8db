# SPDX-License-Identifier: Apache-2.0
"""What a run needs to go on beside its parameters and optimizer states: taken at the end of every step, for the commit
record, and put back by a run that resumes.

Counters of the engine, the loss scaler, hyperparameters of the groups, the learning-rate scheduler, schedules of
DeepSpeed's data pipeline (curriculum, random-LTD), states of random generators, persistent buffers of the model, what
its modules give as ``get_extra_state()``, and what the script handed over as ``engine.fuyou_client_state`` (anything
that can be pickled, as ``client_state`` of a checkpoint). Kilobytes, as a rule: it is written in every step.

[Note: what cannot be recorded]
A scheduler, or what the script handed over, may hold what pickle refuses, and a scheduler may have no ``state_dict``.
Training goes on then, a warning names what it is, once, and the record says that nothing can be gone on from it;
weights can be taken out all the same.

[Note: buffers of the model]
Most never change, and some are large (masks): the script makes them again. So a record holds small ones, and of the
large ones those that the script replaced or wrote to since the engine was built, by PyTorch's own count of writes,
which leaves out what goes by way of ``.data``. One that was not there when the engine was built, or had another shape,
gets into a recovered checkpoint; a run that goes on in place has nowhere to put it and is refused, as stock refuses to
load it strictly: that is told when it is recorded first.

[Note: when generators are put back]
Where the script says so (``engine.fuyou_restore_random_states()``), at the latest before the first forward in training
mode; not when the engine is built: scripts make their data loaders in between, which draw seeds from the same
generators. A checkpoint that is loaded before comes after what was resumed, so they stay as they are. So they do before
a forward whose script has set another seed since the engine was built than the recorded one: it seeds every step, or
epoch, and what was recorded is the stream of an earlier one. (Seeded as before, it makes its loaders' order again.)
"""

from __future__ import annotations

import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, cast

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from ds_fuyou.checkpoint.training_record import SMALL_BUFFERS, VERSION, TrainingRecord, text, to_bytes
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.log import log_once
from ds_fuyou.storage.types import JsonValue

__all__ = ["TrainingState"]

_CLIENT_STATE, _RESTORE = "fuyou_client_state", "fuyou_restore_random_states"  # of the engine
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_LARGE_BYTES = 1 << 20
_SMALL_BUFFER_BYTES = 64 << 10
_EXTRA_STATE = "_extra_state"  # of a module, in torch's state dictionaries


class _Buffers:
    """Persistent buffers of a model, which checkpoints hold, too; see [Note: buffers of the model]."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        present = self.all()
        self._built = {name: _mark(buffer) for name, buffer in present.items()}
        self._shapes = {name: buffer.shape for name, buffer in present.items()}
        self._saved: dict[str, tuple[Callable[[torch.Tensor], bool], bytes]] = {}

    def all(self) -> dict[str, torch.Tensor]:
        """As there are now, by all names that a state dictionary has for them."""
        return {
            prefix + name: buffer
            for prefix, owner in _modules(self._module)
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set
        }

    def changed(self) -> dict[str, bytes]:
        """Those that a record holds, pickled, small ones together. Large ones are copied if they have changed."""
        found, small = {}, dict[str, torch.Tensor]()
        for name, buffer in self.all().items():
            if self._shapes.get(name) != buffer.shape:
                _tell_late(name)
            if buffer.nbytes <= _SMALL_BUFFER_BYTES:
                small[name] = buffer.detach().cpu().clone()  # of views no more than themselves
            elif name not in self._built or not self._built[name](buffer):
                is_same, data = self._saved.get(name, (None, b""))
                if is_same is None or not is_same(buffer):
                    data = to_bytes(buffer.detach().cpu())
                    self._saved[name] = _mark(buffer), data
                found[name] = data
        return {**found, SMALL_BUFFERS: to_bytes(small)} if small else found


def _tell_late(name: str) -> None:
    log_once(
        logging.WARNING,
        f"buffer {name} was not there, or had another shape, when the engine was built: no run goes on from this one's "
        "state files in place unless its script has made it before deepspeed.initialize(); what fuyou recover makes of "
        "them has it",
    )


def _modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """It and those in it, by every name that they have, as a prefix."""
    for name, owner in module.named_modules(remove_duplicate=False):
        yield f"{name}." if name else "", owner


def _with_extra_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Those that put something into a state dictionary beside parameters and buffers, by its names."""
    nothing = torch.nn.Module.get_extra_state
    return {
        prefix + _EXTRA_STATE: owner for prefix, owner in _modules(module) if type(owner).get_extra_state is not nothing
    }


def _mark(buffer: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is this one, and was not written to since."""
    if buffer.is_inference():  # writes to these are not counted
        return lambda other: False
    this, version = weakref.ref(buffer), buffer._version

    def is_same(other: torch.Tensor) -> bool:
        return other._version == version and this() is other

    return is_same


class TrainingState:
    """Of one rank. ``all_generators``: Python's and NumPy's, too, not PyTorch's alone."""

    def __init__(self, optimizer: Any, module: torch.nn.Module, *, all_generators: bool) -> None:
        self._optimizer, self._module, self._all = optimizer, module, all_generators
        self._buffers = _Buffers(module)
        self._pending: Mapping[str, Any] | None = None
        self._resumed_at = self._built_seed = 0
        self._hook: Any = None
        self._told_large = False
        self._frozen = ""
        self._rates: list[float] | None = None  # of the last step

    def attach(self, engine: Any, frozen: str) -> None:
        """What scripts find on an engine, resumed or not. ``frozen``: of the base they have built (``digest_of``)."""
        self._frozen = frozen
        setattr(engine, _CLIENT_STATE, None)
        setattr(engine, _RESTORE, self.put_back_generators)

    def step_begins(self, engine: Any) -> None:
        """Rates that are not those of the last record were set between the steps, by a scheduler that the script steps
        itself as a rule: none of the engine's, so that a run that goes on from that record does not know of it, unless
        the script hands it over.
        """
        if getattr(engine, "lr_scheduler", None) is not None:
            return
        rates = [float(group["lr"]) for group in self._optimizer.optimizer.param_groups]
        if self._rates not in (None, rates):
            log_once(
                logging.WARNING if getattr(engine, _CLIENT_STATE) is None else logging.INFO,
                "learning rates change between steps, and the engine has no scheduler: a run that goes on from this "
                'one\'s files ("resume": "auto") begins with the rates of the last step. Unless the script sets them '
                "by the number of the step, give deepspeed.initialize the scheduler, or hand its state over as "
                "engine.fuyou_client_state before engine.step(), and in a run that resumes load it and step it once, "
                "as it was behind that step",
            )
        self._rates = rates

    # ---- taking -------------------------------------------------------------------------------------------

    def take(self, engine: Any, *, begins_step: bool = False) -> JsonValue:
        """For a record; None if it cannot be written down. ``begins_step``: who goes on from it has no gradients of the
        step that has begun, and makes all of it.
        """
        pickled = self._pickled(engine)
        if pickled is None:
            return None
        counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
        accumulation = int(engine.gradient_accumulation_steps())  # scripts may change it
        if begins_step:
            counters["micro_steps"] -= counters["micro_steps"] % accumulation
        return {
            "version": VERSION,
            "counters": counters,
            "accumulation": accumulation,
            "frozen": self._frozen,
            "generators": {name: text(state) for name, state in self._generators().items()},
            "pickled": text(pickled),
        }

    def _pickled(self, engine: Any) -> bytes | None:
        stock = self._optimizer
        parts: dict[str, tuple[str, Callable[[], object]]] = {
            "what the script handed over (engine.fuyou_client_state)": (
                "client",
                lambda: _client_of(engine),
            ),
            "the learning-rate scheduler": ("scheduler", lambda: _state_of(getattr(engine, "lr_scheduler", None))),
            "schedules of the data pipeline": (
                "schedules",
                lambda: {k: v.state_dict() for k, v in _schedules(engine).items()},
            ),
            "the loss scaler": ("scaler", lambda: (stock.loss_scaler, stock.dynamic_loss_scale)),
            "hyperparameters": ("groups", lambda: [_hypers(group) for group in stock.optimizer.param_groups]),
            "buffers of the model": ("buffers", self._buffers.changed),
            "what modules of the model give as get_extra_state()": (
                "extra",
                lambda: {name: owner.get_extra_state() for name, owner in _with_extra_state(self._module).items()},
            ),
        }
        try:
            found = to_bytes({key: take() for key, take in parts.values()})
        except Exception as error:  # whatever pickle and the objects' own methods raise
            blamed = [name for name, (_, take) in parts.items() if _size(take) is None]
            log_once(
                logging.WARNING,
                f"{' and '.join(blamed) or 'the state of training'} cannot be pickled ({error}): no run can go on from "
                "this one's state files, weights alone can be recovered",
            )
            return None
        if len(found) > _LARGE_BYTES and not self._told_large:
            self._told_large = True
            sizes = {name: _size(take) or 0 for name, (_, take) in parts.items()}
            most = max(sizes, key=lambda name: sizes[name])
            log_once(
                logging.WARNING,
                f"every step's commit record holds {len(found)} bytes now, most of them {most}: a step waits for that",
            )
        return found

    def _generators(self) -> dict[str, bytes]:
        found = {"torch": _bytes(torch.get_rng_state())}
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            found["device"] = _bytes(accelerator.get_rng_state())
        if self._all:
            found["python"] = to_bytes(random.getstate())
            found["numpy"] = to_bytes(numpy.random.get_state())
        return found

    # ---- putting back -------------------------------------------------------------------------------------

    def put_back(self, engine: Any, taken: Mapping[str, Any]) -> None:
        """Raises FuyouStateError, and leaves all as it is, if a newer version of this package took it, it cannot be
        read here, or this run has another scheduler, other groups or other buffers. (Where a module refuses its extra
        state, what comes before is put back already: the engine is not built then.)"""
        try:
            record = TrainingRecord.decode(taken)
            client, counters = record.client(), {name: int(record.counters[name]) for name in _COUNTERS}
        except FuyouStateError:
            raise
        except Exception as error:  # of the script's own classes, which may not be at hand
            raise _differs(f"the state of training cannot be read by this script ({error!r})") from error
        stock, scheduler, buffers = self._optimizer, getattr(engine, "lr_scheduler", None), self._buffers.all()
        groups = stock.optimizer.param_groups
        if (scheduler is None) != (record.scheduler is None):
            one, other = ("none", "one") if record.scheduler is None else ("one", "none")
            raise _differs(f"that run had a learning-rate scheduler: {one}; this one: {other}")
        if len(groups) != len(record.groups):
            raise _differs(f"its run had {len(record.groups)} parameter groups, this one has {len(groups)}")
        schedules = _schedules(engine)
        if schedules.keys() != record.schedules.keys():
            raise _differs(f"it recorded {sorted(record.schedules)} of the data pipeline, this has {sorted(schedules)}")
        if record.frozen is not None and record.frozen != self._frozen:
            raise _differs("its script had built frozen parameters with other values, or frozen others")
        for name, values in record.buffers.items():
            if name not in buffers or buffers[name].shape != values.shape:
                raise _differs(f"this run's model has no buffer {name} of shape {tuple(values.shape)} when it is built")
        takers = _with_extra_state(self._module)
        without = sorted(record.extra.keys() - takers.keys())
        if without:
            raise _differs(f"no module of this run's model takes {', '.join(without)}")
        if scheduler is not None and record.scheduler is not None:  # first: it may refuse
            try:
                scheduler.load_state_dict(*record.scheduler)
            except Exception as error:  # the script's own class
                raise _differs(f"the learning-rate scheduler does not take its state ({error!r})") from error
        for name, schedule in schedules.items():
            if schedule is not None:
                schedule.load_state_dict(record.schedules[name])
            else:
                _load_when_made(engine, record.schedules[name])
        for name, count in counters.items():
            setattr(engine, name, count)
        accumulation = int(engine.gradient_accumulation_steps())
        if record.accumulation not in (None, accumulation):  # a step begins with its first micro-batch
            engine.micro_steps -= engine.micro_steps % accumulation
        stock.loss_scaler, stock.dynamic_loss_scale = record.scaler
        for group, hypers in zip(groups, record.groups, strict=True):
            group.update(hypers)
        with torch.no_grad():
            for name, values in record.buffers.items():
                buffers[name].copy_(values)
        for name, values in record.extra.items():  # behind buffers, as torch does
            try:
                takers[name].set_extra_state(values)
            except Exception as error:  # the script's own class
                raise _differs(f"{name} is not taken by its module ({error!r})") from error
        setattr(engine, _CLIENT_STATE, client)
        self._pending, self._resumed_at = record.generator_states(), counters["global_steps"]
        self._built_seed = torch.initial_seed()
        self._hook = self._module.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)

    def _before_forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._pending is not None:
            self._refuse_trainer()
        if self._pending is not None and torch.initial_seed() not in (self._built_seed, _seed_of(self._pending)):
            log_once(
                logging.INFO,
                "the script has set a seed of its own since this run went on from its files: random generators stay as "
                "it has them (engine.fuyou_restore_random_states() puts them back)",
            )
            self._forget_generators()
        else:
            self.put_back_generators()

    def _refuse_trainer(self) -> None:
        """Transformers' counts steps and batches by itself, and does not ask an engine where it stands."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_globals.get("__name__") != "transformers.trainer":
            frame = frame.f_back
        state = None if frame is None else getattr(frame.f_locals.get("self"), "state", None)
        step = getattr(state, "global_step", self._resumed_at)
        if step != self._resumed_at:
            raise FuyouStateError(
                f'this run went on from step {self._resumed_at} in place ("resume": "auto"), and the Trainer from its '
                f"step {step}: it would train what has been trained again. Make a checkpoint of the state files, as "
                "OUTPUT_DIR/checkpoint-N with --like an older one (fuyou recover), and let the Trainer resume from "
                'that; or remove them (fuyou clean). Leave "resume" out with the Trainer'
            )

    def put_back_generators(self) -> None:
        """Random generators are as at the end of the step that was gone on from. Once; nothing in a run that begins."""
        states = self._pending
        self._forget_generators()
        if states is not None:
            _put_back_generators(states)

    def loaded_over(self, engine: Any) -> None:
        """A checkpoint, whatever was resumed: random generators stay as the script has them now."""
        if self._pending is not None:
            log_once(
                logging.WARNING,
                f"a checkpoint was loaded over step {self._resumed_at}, which this run had gone on from in place: it "
                f"goes on from what was loaded, at step {engine.global_steps}",
            )
        self._forget_generators()
        self._rates = None  # the checkpoint's are others

    def _forget_generators(self) -> None:
        self._pending = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _differs(why: str) -> FuyouStateError:
    return FuyouStateError(
        f"this run cannot go on from the state files in nvme_path: {why}. Undo that to go on; fuyou recover makes a "
        "checkpoint of them, fuyou clean removes them, and another nvme_path leaves them alone"
    )


def _seed_of(states: Mapping[str, Any]) -> int:
    """That PyTorch's generator was given last."""
    return torch.Generator().set_state(states["torch"]).initial_seed()


def _put_back_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if "device" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["device"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        numpy.random.set_state(states["numpy"])


def _client_of(engine: Any) -> bytes | None:
    """Pickled apart: it may hold classes of the script's."""
    client = getattr(engine, _CLIENT_STATE, None)
    return None if client is None else to_bytes(client)


def _schedules(engine: Any) -> dict[str, Any]:
    """What checkpoints hold the states of, by the names that they have there; None for what is not made yet."""
    found = {}
    if engine.random_ltd_enabled():
        found["random_ltd"] = getattr(engine, "random_ltd_scheduler", None)
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    return found


def _load_when_made(engine: Any, state: Mapping[str, Any]) -> None:
    """The engine makes its random-LTD schedule after its checkpoint writer, when it has been resumed already."""
    make = engine._configure_random_ltd_scheduler

    def made(configs: Mapping[str, Any]) -> Any:
        del engine._configure_random_ltd_scheduler
        schedule = make(configs)
        schedule.load_state_dict(state)
        return schedule

    engine._configure_random_ltd_scheduler = made


def _hypers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _size(take: Callable[[], object]) -> int | None:
    """Of what it takes, pickled; None if that fails."""
    try:
        return len(to_bytes(take()))
    except Exception:
        return None


def _state_of(scheduler: Any) -> Any:
    if scheduler is None:
        return None
    if not hasattr(scheduler, "state_dict"):
        raise TypeError(f"{type(scheduler).__name__} has no state_dict()")
    return (scheduler.state_dict(),)


def _bytes(state: torch.Tensor) -> bytes:
    return cast("bytes", state.cpu().numpy().tobytes())
