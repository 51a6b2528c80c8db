# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's Adam does on all cores of this machine, alone.

To be measured in a process of its own with one OpenMP thread, so that the threads made here are the only ones.
"""

from __future__ import annotations

import threading
import time

__all__ = ["update_rate"]

CHUNK_ELEMENTS = 4 << 20
SLICE_ELEMENTS = 64 << 10  # P32, M, V, gradient and scratch of a slice stay in the cache


def update_rate(num_threads: int) -> float:
    """Elements a second of unscale, Adam and narrowing to bf16, by threads on chunks of their own."""
    import torch

    from ds_fuyou.ops.core import load_core

    core = load_core()
    clock = core.make_adam_clock(3e-4, 0.9, 0.999, 1e-8, 0.1, True)
    clock.increment(1, 0.9, 0.999)
    rule, kind = clock.rule(3e-4, 1e-8, 0.1, True), core.ElementType.BFLOAT16
    chunks = [[torch.rand(CHUNK_ELEMENTS) for _ in range(3)] for _ in range(2 * num_threads)]
    narrow = [torch.rand(2, CHUNK_ELEMENTS).bfloat16() for _ in chunks]

    def work(first: int) -> None:
        scratch = torch.empty(SLICE_ELEMENTS)
        for index in range(first, len(chunks), num_threads):
            for at in range(0, CHUNK_ELEMENTS, SLICE_ELEMENTS):
                param, *moments = [part[at : at + SLICE_ELEMENTS] for part in chunks[index]]
                grad, half = (part[at : at + SLICE_ELEMENTS] for part in narrow[index])
                core.scale_gradient(kind, grad.data_ptr(), scratch.data_ptr(), SLICE_ELEMENTS, 1.0)
                rule.apply(param, scratch, moments)
                core.narrow_parameter(kind, param.data_ptr(), half.data_ptr(), SLICE_ELEMENTS)

    def round_secs() -> float:
        threads = [threading.Thread(target=work, args=(first,)) for first in range(num_threads)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    round_secs()
    return len(chunks) * CHUNK_ELEMENTS / min(round_secs() for _ in range(5))
