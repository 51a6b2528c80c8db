# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a storage a tensor covers, and how to make the same tensor over other bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["ALIGN_BYTES", "ByteRange", "ViewSpec", "alias_of", "byte_view", "byte_view_within", "is_movable"]

ALIGN_BYTES = 512
"""Ranges begin at multiples of it, so a tensor that comes back lies as it lay before in a cache line and a vector
register, or in what CUDA's allocator gives: kernels then take the same path and round alike."""


class ByteRange(NamedTuple):
    """Bytes [begin, end) of a storage."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def covers(self, other: ByteRange) -> bool:
        return self.begin <= other.begin and other.end <= self.end


class ViewSpec(NamedTuple):
    """A strided tensor without its bytes. One is made for every tensor that autograd saves."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int  # of the first element, counted from the begin of the storage

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ViewSpec:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset() * tensor.dtype.itemsize)

    def bytes(self) -> ByteRange:
        """The bytes between the first and the last element, both included; empty for a tensor without elements."""
        last = 0
        for size, stride in zip(self.size, self.stride, strict=True):
            if size == 0:
                return ByteRange(self.offset_bytes, self.offset_bytes)
            last += (size - 1) * stride
        return ByteRange(self.offset_bytes, self.offset_bytes + (last + 1) * self.dtype.itemsize)

    def over(self, memory: torch.Tensor, begin: int) -> torch.Tensor:
        """The tensor over ``memory`` (contiguous bytes), whose first byte is byte ``begin`` of the storage."""
        offset = memory.storage_offset() * memory.element_size() + self.offset_bytes - begin
        result = torch.empty(0, dtype=self.dtype, device=memory.device)
        return result.set_(memory.untyped_storage(), offset // self.dtype.itemsize, self.size, self.stride)

    def within(self, memory: torch.Tensor, begin: int) -> torch.Tensor:
        """As :meth:`over`, sharing the version counter of ``memory``: who changes the tensor is seen there. It has
        elements.
        """
        itemsize, offset = self.dtype.itemsize, memory.storage_offset() + self.offset_bytes - begin
        if memory.numel() % itemsize:
            memory = memory.as_strided((itemsize,), (1,), 0)
        return memory.view(self.dtype).as_strided(self.size, self.stride, offset // itemsize).detach()


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a history, and with the version counter of ``tensor``, also inside of a dispatch mode:
    there PyTorch leaves out what counts changes, and ``detach`` alone gives a counter of its own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def byte_view(tensor: torch.Tensor, span: ByteRange) -> torch.Tensor:
    """Bytes ``span`` of the tensor's storage as a flat tensor that shares them."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), span.begin, (span.num_bytes,), (1,))


def byte_view_within(tensor: torch.Tensor, span: ByteRange) -> torch.Tensor:
    """As :func:`byte_view`, sharing the version counter of the tensor, which needs no gradient and has elements."""
    element = tensor.as_strided((1,), (1,), 0)
    return element.view(torch.uint8).as_strided((span.num_bytes,), (1,), span.begin)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the tensor is plain strided memory on the device: no subclass, sparse, quantised or lazy tensor, nor the
    zeros without memory that forward-mode differentiation makes.
    """
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == device.type
        and device.index in (None, tensor.device.index)  # a script may have others in use
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )
