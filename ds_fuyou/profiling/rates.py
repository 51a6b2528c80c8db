# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's Adam does on all cores of this machine, alone.

To be measured in a process of its own, which has used no device yet: it forks.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import wait
from multiprocessing.synchronize import Barrier
from typing import Any

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.threads import starting_threads

__all__ = ["update_rate"]

CHUNK_ELEMENTS = 4 << 20
SLICE_ELEMENTS = 64 << 10  # P32, M, V, gradient and scratch of a slice stay in the cache
_NUM_CHUNKS, _NUM_ROUNDS = 2, 6  # the first round also brings pages in
_LIMIT_SECS = 300.0


def update_rate(num_cores: int) -> float:
    """Elements a second of unscale, Adam and narrowing to bf16, by a process a core on chunks of its own: threads of
    Python wait for one another between slices, and did an eighth of it on 16 cores.

    Raises:
        FuyouStateError: a process failed, or did not end within five minutes.
    """
    from ds_fuyou.ops.core import load_core

    load_core()
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(num_cores)
    secs = context.Array("d", num_cores * _NUM_ROUNDS, lock=False)
    processes = [context.Process(target=_update, args=(place, begin, secs), daemon=True) for place in range(num_cores)]
    with starting_threads():
        for process in processes:
            process.start()
    running, end = processes, time.monotonic() + _LIMIT_SECS
    while running:
        ready = wait([process.sentinel for process in running], max(0.0, end - time.monotonic()))
        ended = [process for process in running if process.sentinel in ready]
        running = [process for process in running if process.sentinel not in ready]
        for process in ended:
            process.join()
        statuses = [process.exitcode for process in ended]
        if any(statuses) or not ended:
            for process in running:
                process.kill()
            raise FuyouStateError(f"processes that were to measure Adam ended with {statuses}")
    rounds = [max(secs[place * _NUM_ROUNDS + number] for place in range(num_cores)) for number in range(_NUM_ROUNDS)]
    return num_cores * _NUM_CHUNKS * CHUNK_ELEMENTS / min(rounds[1:])


def _update(place: int, begin: Barrier, secs: Any) -> None:
    """Seconds of each round from its common begin, at this process's ``place``."""
    import torch

    from ds_fuyou.ops.core import load_core

    torch.set_num_threads(1)
    core = load_core()
    clock = core.make_adam_clock(3e-4, 0.9, 0.999, 1e-8, 0.1, True)
    clock.increment(1, 0.9, 0.999)
    rule, kind = clock.rule(3e-4, 1e-8, 0.1, True), core.ElementType.BFLOAT16
    chunks = [[torch.rand(CHUNK_ELEMENTS) for _ in range(3)] for _ in range(_NUM_CHUNKS)]
    narrow = [torch.rand(2, CHUNK_ELEMENTS).bfloat16() for _ in chunks]
    scratch = torch.empty(SLICE_ELEMENTS)
    for number in range(_NUM_ROUNDS):
        begin.wait(_LIMIT_SECS)
        began = time.perf_counter()
        for states, halves in zip(chunks, narrow, strict=True):
            for at in range(0, CHUNK_ELEMENTS, SLICE_ELEMENTS):
                param, *moments = [part[at : at + SLICE_ELEMENTS] for part in states]
                grad, half = (part[at : at + SLICE_ELEMENTS] for part in halves)
                core.scale_gradient(kind, grad.data_ptr(), scratch.data_ptr(), SLICE_ELEMENTS, 1.0)
                rule.apply(param, scratch, moments)
                core.narrow_parameter(kind, param.data_ptr(), half.data_ptr(), SLICE_ELEMENTS)
        secs[place * _NUM_ROUNDS + number] = time.perf_counter() - began
