# SPDX-License-Identifier: Apache-2.0
"""Collectives of tensors on the stand-in device, in the order of streams, as NCCL's: who asks does not wait.

A collective begins behind the current stream's work and ends when all ranks have come to it. One that returns a handle
runs on a stream of the group's own, which the stream that is current in ``handle.wait()`` is made to wait for; any
other runs on the current stream. The tensors of a handle live until it was waited for. gloo does it:

1. the asking thread: on the collective's stream, an event, and a gate;
2. the thread of this module, in the order of asking: waits for the event, and for all ranks to come so far (NCCL may
   read as late), has gloo compute on the memory of the device, and opens the gate.

*Why nothing deadlocks:* the thread waits for events that lie behind earlier work alone, and for the other ranks'
threads, which have the same order; the gates of a stream are opened in the order in which they lie on it (of one thread
that asks, as DeepSpeed's). The host takes no lock and lets go of the GIL where it waits for the device. gloo's groups
are this thread's alone: what others ask of gloo meanwhile, objects and barriers, goes by the groups that scripts have.
What fails is told by the next call, and at the process's end.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.device.backend import NAME

__all__ = ["order_collectives"]

_STAGED = ("reduce", "reduce_scatter", "all_gather_coalesced", "all_to_all_single", "gather", "scatter")


class _Handle:
    """Of a collective; ``None`` for ``end``: of nothing."""

    def __init__(self, end: Any = None, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._end, self._tensors = end, tensors

    def wait(self, *_: Any, **__: Any) -> bool:
        if self._end is not None:
            _runner.raise_failure()
            torch.standin.current_stream().wait_event(self._end)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._end is None or bool(self._end.query())


class _Runner:
    """The thread, and the groups of gloo that it uses."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._groups: dict[Any, Any] = {}
        self._streams: dict[Any, torch.Stream] = {}
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def group(self, given: Any) -> Any:
        """A group of the same ranks. All of them ask for it in their first collective."""
        world = torch.distributed.group.WORLD
        key = given if given is not None else world
        if key not in self._groups:
            ranks = torch.distributed.get_process_group_ranks(key)
            self._groups[key] = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return self._groups[key]

    def stream(self, group: Any) -> torch.Stream:
        if group not in self._streams:
            self._streams[group] = torch.standin.Stream()
        return self._streams[group]

    def run(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            index = torch.standin.current_device()
            self._thread = threading.Thread(target=self._serve, args=(index,), name="standin-collectives", daemon=True)
            self._thread.start()
            atexit.register(self._stop)
        self._asked.put(work)

    def _serve(self, index: int) -> None:
        torch.standin.set_device(index)
        with torch.inference_mode():  # what was asked for in that mode is written, too
            while (work := self._asked.get()) is not None:
                work()

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _stop(self) -> None:
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(timeout=10)
        if self._failure is not None:
            sys.stderr.write(f"a collective has failed: {self._failure!r}\n")

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("a collective has failed") from self._failure


_runner = _Runner()


def _late(
    compute: Callable[[list[torch.Tensor], list[torch.Tensor], Any], None],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: Any,
    async_op: bool,
) -> _Handle | None:
    """``compute(outputs, inputs, group)`` as gloo does it. An output may be the memory of an input. A single rank's is
    a copy on the device, or nothing, where it works in place.
    """
    if torch.distributed.get_world_size(group) == 1:
        for output, given in zip(outputs, inputs, strict=True):
            if output is not given:
                output.view(-1).copy_(given.view(-1))
        return _Handle() if async_op else None
    _runner.raise_failure()
    mine = _runner.group(group)
    asking = torch.standin.current_stream()
    stream = _runner.stream(mine) if async_op else asking
    begin = asking.record_event()
    stream.wait_event(begin)
    ready = stream.record_event()
    open_gate = torch.standin.core.hold(stream.stream_id)
    end = stream.record_event()
    # As the device's threads reach them. It keeps nothing alive: who lets memory go before the end tells its stream.
    written, read = ([torch.standin.core.aliased(each.detach()) for each in some] for some in (outputs, inputs))

    def work() -> None:
        try:
            ready.synchronize()
            torch.distributed.barrier(group=mine)
            compute(written, [each.clone() for each in read], mine)
        except BaseException as error:  # raised by whoever calls next
            _runner.fail(error)
        finally:
            open_gate()

    _runner.run(work)
    return _Handle(end, [*outputs, *inputs]) if async_op else None


def order_collectives() -> None:
    """DeepSpeed's backend takes tensors of the device, and of no host, as NCCL's.

    DeepSpeed has staging for another device, which waits; what is not asked in training goes by it. And by torch's own
    ``all_gather`` the Trainer gathers.
    """
    comm = importlib.import_module("deepspeed.comm.torch")
    comm._needs_cpu_staging = lambda value: isinstance(value, torch.Tensor) and value.device.type == NAME
    backend = comm.TorchBackend
    if getattr(backend, "_ordered_for_standin", False):
        return
    backend._ordered_for_standin = True
    torch.distributed.all_gather = _staged(torch.distributed.all_gather)

    def all_reduce(self: Any, tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):  # type: ignore[no-untyped-def]
        def compute(outputs: list[torch.Tensor], inputs: list[torch.Tensor], mine: Any) -> None:
            outputs[0].copy_(inputs[0])
            torch.distributed.all_reduce(outputs[0], op=self._reduce_op(op), group=mine)

        return _late(compute, [tensor], [tensor], group, async_op)

    def broadcast(self: Any, tensor, src, group=None, async_op=False):  # type: ignore[no-untyped-def]
        def compute(outputs: list[torch.Tensor], inputs: list[torch.Tensor], mine: Any) -> None:
            outputs[0].copy_(inputs[0])
            torch.distributed.broadcast(outputs[0], src=src, group=mine)

        return _late(compute, [tensor], [tensor], group, async_op)

    def reduce_scatter_tensor(  # type: ignore[no-untyped-def]
        self: Any, output_tensor, input_tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False
    ):
        def compute(outputs: list[torch.Tensor], inputs: list[torch.Tensor], mine: Any) -> None:
            torch.distributed.reduce_scatter_tensor(outputs[0], inputs[0], op=self._reduce_op(op), group=mine)

        return _late(compute, [output_tensor], [input_tensor], group, async_op)

    def all_gather_into_tensor(self: Any, output_tensor, input_tensor, group=None, async_op=False):  # type: ignore[no-untyped-def]
        def compute(outputs: list[torch.Tensor], inputs: list[torch.Tensor], mine: Any) -> None:
            torch.distributed.all_gather_into_tensor(outputs[0], inputs[0], group=mine)

        return _late(compute, [output_tensor], [input_tensor], group, async_op)

    def all_gather(self: Any, tensor_list, tensor, group=None, async_op=False):  # type: ignore[no-untyped-def]
        def compute(outputs: list[torch.Tensor], inputs: list[torch.Tensor], mine: Any) -> None:
            torch.distributed.all_gather(outputs, inputs[0], group=mine)

        return _late(compute, tensor_list, [tensor], group, async_op)

    for ordered in (all_reduce, broadcast, reduce_scatter_tensor, all_gather_into_tensor, all_gather):
        setattr(backend, ordered.__name__, _of_the_device_alone(ordered))
    for name in _STAGED:
        setattr(backend, name, _of_the_device_alone(getattr(backend, name)))


def _of_the_device_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """As NCCL's, which takes no tensor in host memory."""

    @functools.wraps(collective)
    def checked(self: Any, *args: Any, **named: Any) -> Any:
        if any(leaf.device.type == "cpu" for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)):
            raise RuntimeError("No backend type associated with device type cpu")
        return collective(self, *args, **named)

    return checked


def _staged(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.all_gather`` that takes tensors of the device, too."""

    def by_way_of_the_host(outputs: list[torch.Tensor], given: torch.Tensor, *args: Any, **named: Any) -> Any:
        if given.device.type != NAME:
            return all_gather(outputs, given, *args, **named)
        on_host = [torch.empty_like(output, device="cpu") for output in outputs]
        done = all_gather(on_host, given.cpu(), *args, **{**named, "async_op": False})
        for output, values in zip(outputs, on_host, strict=True):
            output.copy_(values)
        return _Handle() if named.get("async_op") else done

    return by_way_of_the_host
