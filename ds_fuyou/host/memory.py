# SPDX-License-Identifier: Apache-2.0
"""Host memory of the lanes: page-aligned, exactly sized, budgeted in bytes, pinned when a device copies from it."""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import ClassVar

import torch

from ds_fuyou.errors import FuyouMemoryError
from ds_fuyou.host.device import Device
from ds_fuyou.host.threads import starting_threads, usable_cores
from ds_fuyou.libc import libc
from ds_fuyou.ops.core import load_core
from ds_fuyou.storage.types import PAGE_BYTES

__all__ = [
    "PAGE_BYTES",
    "HeapGuard",
    "HostPool",
    "PageLocks",
    "aligned_tensor",
    "bring_in_pages",
    "give_back_pages",
    "normal_tensors",
    "own_storage",
    "resident_bytes",
    "round_up_to_page",
]

_MADV_WIPEONFORK, _MADV_KEEPONFORK, _MADV_POPULATE_WRITE = 18, 19, 23
_BROUGHT_IN_BYTES = 64 * 1024 * 1024  # at least, a thread
_MOST_BRINGING_IN = 16  # threads
_LOOK_BYTES = 1024 * 1024  # freed from one look at resident memory to the next: a look costs 7 µs
_HUGE_BYTES = 8 * 1024 * 1024  # larger mappings ask for huge pages: fewer, larger disk requests


def round_up_to_page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def normal_tensors() -> AbstractContextManager[object]:
    """Inside, autograd may save the tensors that are made, also where the script is under ``torch.inference_mode()``:
    memory that an evaluation reads parameters to, and what it gathers of them, may still be used when training goes on.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def aligned_tensor(num_bytes: int, *, inherited: bool = True) -> torch.Tensor:
    """A byte tensor of ``num_bytes`` whose address is page-aligned, outside of every pool.

    It is a mapping of its own: its pages go back to the system with the last alias. (From the heap, freed buffers of
    many sizes stay resident between others; under ``zero.Init`` that grew with the model.)

    ``inherited``: a forked child finds its values. What no script looks at is zeros there: states that every step
    changes would be copied, page by page, for a data loader's workers, which hold the old ones as long as they live.

    Raises:
        FuyouMemoryError: the system refuses.
    """
    try:
        mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as error:
        raise FuyouMemoryError(num_bytes) from error
    with normal_tensors():
        made = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes)
    if num_bytes >= _HUGE_BYTES:
        _advise(made.data_ptr(), num_bytes, mmap.MADV_HUGEPAGE)
    if not inherited:
        _advise(made.data_ptr(), num_bytes, _MADV_WIPEONFORK)
    return made


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """Tells the system what becomes of whole pages. A hint: one that it does not know changes nothing, and is False."""
    return bool(libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0)


def bring_in_pages(address: int, num_bytes: int) -> bool:
    """Memory for pages that nobody has touched yet, by several threads if they are many; what they hold stays as it is.
    Whether all are there: before Linux 5.14 this does nothing.

    A device's driver would take it in the thread that registers: 2.7 GB/s on an H100's host, where it registers pages
    that are there at 39 GB/s (measured).
    """
    num_threads = max(1, min(_MOST_BRINGING_IN, len(usable_cores()), num_bytes // _BROUGHT_IN_BYTES))
    share = max(1, -(-num_bytes // num_threads // _HUGE_BYTES)) * _HUGE_BYTES
    parts = [(address + begin, min(share, num_bytes - begin)) for begin in range(0, num_bytes, share)]

    def bring_in(part: tuple[int, int]) -> bool:
        return _advise(*part, _MADV_POPULATE_WRITE)

    if len(parts) > 1:
        with suppress(RuntimeError), starting_threads(), ThreadPoolExecutor(len(parts)) as threads:
            return all([*threads.map(bring_in, parts)])
    return all([*map(bring_in, parts)])


def give_back_pages(tensor: torch.Tensor) -> None:
    """The pages of the system that a contiguous tensor fills, to the system (some have 64 KiB); of an
    :func:`aligned_tensor`. They are zeros for whoever reads them after that."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        _advise(begin, end - begin, mmap.MADV_DONTNEED)


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a contiguous 1-D CPU tensor whose storage begins and ends with it.

    Accelerate's ``save_model`` takes tensors of one storage for one tied tensor and drops all but the first. Where the
    device is the host, gathered parameters of one rank are the partitions themselves.
    """
    with normal_tensors():
        return torch.from_numpy(view.detach().view(torch.uint8).numpy()).view(view.dtype)


def resident_bytes() -> int:
    """Resident memory of this process without pages of files, from the kernel; 0 where there is no ``/proc``."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)  # half the time of a file object
    except OSError:
        return 0
    try:
        _, resident, of_files, *_ = os.read(statm, 128).split()
        return (int(resident) - int(of_files)) * mmap.PAGESIZE
    finally:
        os.close(statm)


class HeapGuard:
    """Gives the holes of the C heap back to the system before they raise the peak of resident memory.

    Large buffers that are freed between small ones that stay leave pages that glibc keeps: measured 1.6 bytes a
    parameter while ``zero.Init`` built a model, and 1.1 in every forward on the host. The heap's own count of free
    bytes cannot tell: pages given back stay in it, whether or not they were used and freed again since. But what is
    resident after a trim is in use. (Not so pages of mapped files, a checkpoint's, say: they are not counted.) So
    memory is trimmed when it grows beyond the most that ever was in use, by a sixteenth of that, at most
    ``limit_bytes``: with less, what a step takes and frees on the host would be trimmed in every step (10 ms each).
    Without glibc, or without ``/proc``, this does nothing.
    """

    def __init__(self, limit_bytes: int = 128 * 1024 * 1024) -> None:
        self._limit = limit_bytes
        self._trim = getattr(libc(), "malloc_trim", None)
        self._used = resident_bytes()
        self._freed = 0

    def check(self, freed_bytes: int = _LOOK_BYTES) -> None:
        """Gives the holes back if resident memory is larger than any use explains so far. ``freed_bytes``: the most
        that can have become holes since the last call; where it is little, nothing is looked at until it adds up.
        """
        self._freed += freed_bytes
        if self._freed < _LOOK_BYTES:
            return
        self._freed = 0
        if self._trim is not None and resident_bytes() > self._used + min(self._used // 16, self._limit):
            self._trim(0)
            self._used = max(self._used, resident_bytes())


class PageLocks:
    """Host tensors that a device copies to and from, registered with it until :meth:`release`.

    Where the device pins nothing, this does nothing. The tensors are kept alive as long as they are registered.

    [Note: registered memory and forks]
    Pages that a device has locked are copied when a process forks, all at once, for a child (a data loader's worker)
    that has no use for them; on kernels before 5.9 the parent may lose them to it, and the device goes on with pages
    that nobody sees. So while they are registered they are zeros in a child. (What PyTorch pins is not there at all.)
    """

    _everywhere: ClassVar[set[int]] = set()
    """Addresses that some page locks of this process hold."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._locked: dict[int, torch.Tensor] = {}  # by address
        self._is_paused = False

    @property
    def pins(self) -> bool:
        return self._device.pins

    def lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Registers the pages of a contiguous tensor, which no other registered tensor may share; returns it.

        Raises:
            FuyouStateError: the device refuses.
        """
        if self.pins and tensor.numel():
            if not self._is_paused:
                self._register(tensor)
            self._locked[tensor.data_ptr()] = tensor
            self._everywhere.add(tensor.data_ptr())
        return tensor

    @classmethod
    def are_held(cls, tensor: torch.Tensor) -> bool:
        """Whether some page locks have memory that begins with the tensor."""
        return tensor.data_ptr() in cls._everywhere

    def _register(self, tensor: torch.Tensor) -> None:
        self._device.register(tensor.data_ptr(), tensor.nbytes)
        _advise(tensor.data_ptr(), tensor.nbytes, _MADV_WIPEONFORK)

    def _unregister(self, tensor: torch.Tensor) -> None:
        self._device.unregister(tensor.data_ptr())
        _advise(tensor.data_ptr(), tensor.nbytes, _MADV_KEEPONFORK)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is registered, or will be when they are resumed; True where nothing is to be."""
        if not self.pins or not tensor.numel():
            return True
        return tensor.data_ptr() in self._locked

    def pause(self) -> None:
        """Takes all registrations back until :meth:`resume`. No device copy may be in flight."""
        if not self._is_paused:
            for tensor in self._locked.values():
                self._unregister(tensor)
        self._is_paused = True

    def resume(self) -> None:
        """Raises FuyouStateError if the device refuses; nothing is registered then."""
        if self._is_paused:
            with ExitStack() as undo:
                for tensor in self._locked.values():
                    self._register(tensor)
                    undo.callback(self._unregister, tensor)
                undo.pop_all()
        self._is_paused = False

    def unlock(self, tensor: torch.Tensor) -> None:
        """Takes one registration back and lets the tensor go. No device copy may be in flight from or to it."""
        locked = self._locked.pop(tensor.data_ptr(), None)
        if locked is not None:
            self._let_go(locked)

    def release(self) -> None:
        """Takes all registrations back. No device copy may be in flight."""
        while self._locked:
            _, tensor = self._locked.popitem()
            self._let_go(tensor)

    def _let_go(self, tensor: torch.Tensor) -> None:
        self._everywhere.discard(tensor.data_ptr())
        if not self._is_paused:
            self._unregister(tensor)


class HostPool:
    """One arena of page-aligned memory, cut into exactly sized blocks.

    A block returns to the pool when the last tensor that aliases it is gone, so bytes that autograd saved
    are never overwritten. For a ``device`` that pins, the arena is registered as a whole (a device's own pinned
    allocations are not promised to be page-aligned).
    """

    def __init__(self, num_bytes: int, device: Device | None = None, *, inherited: bool = False) -> None:
        """``device``: what copies from and to the arena; None if only the host and storage do.

        ``inherited``: the script sees tensors in it, so a forked child (a data loader's worker) must find their values.
        The others' is zeros there: what is pinned would be copied for each of them.
        """
        try:
            self.pool = load_core().AlignedPool(num_bytes, inherited)
        except MemoryError as error:
            raise FuyouMemoryError(num_bytes) from error
        self._pins_for = device if device is not None and device.pins else None
        self._pinned_for: Device | None = None
        self.pin()

    def try_allocate(self, num_bytes: int) -> torch.Tensor | None:
        """A byte tensor of exactly ``num_bytes``, or None when no free run is large enough now."""
        with normal_tensors():
            block: torch.Tensor | None = self.pool.allocate_tensor(num_bytes)
        return block

    @property
    def capacity_bytes(self) -> int:
        return int(self.pool.capacity_bytes)

    @property
    def used_bytes(self) -> int:
        return int(self.pool.used_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that :attr:`used_bytes` was."""
        return int(self.pool.peak_bytes)

    def give_back(self) -> None:
        """At the end of the run: unpins, and returns the pages to the system if no block is in use any more.

        The object may live on (its owner is referenced by a destroyed engine that the script still holds).
        """
        self.unpin()
        if self.used_bytes == 0:
            _advise(self.pool.base, self.capacity_bytes, mmap.MADV_DONTNEED)

    def pin(self) -> None:
        """Registers the arena with its device, if it is not. Raises FuyouStateError if the device refuses."""
        if self._pins_for is not None and self._pinned_for is None:
            self._pins_for.register(self.pool.base, self.pool.capacity_bytes)
            self._pinned_for = self._pins_for

    def unpin(self) -> None:
        """Takes the registration back, until :meth:`pin`. No device copy may be in flight."""
        device, self._pinned_for = self._pinned_for, None
        if device is not None:
            device.unregister(self.pool.base)
