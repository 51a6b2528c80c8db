# SPDX-License-Identifier: Apache-2.0
"""Outputs that somebody changes past PyTorch's dispatcher: a kernel of another library that works in place, as rotary
embeddings do. Such an output cannot be handed out in a recomputation, which would change it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch

from ds_fuyou.activations.views import ByteRange, byte_view

__all__ = ["UnseenChanges", "sum_of_words"]

K = TypeVar("K", bound=Hashable)


class UnseenChanges(Generic[K]):
    """To be told of the outputs of one forward of a block and of what operators write to them.

    It holds them until it is asked: in one forward no more than a recomputation of the block holds in every backward.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[K, torch.Tensor, torch.Tensor]] = {}

    def made(self, key: K, tensors: Sequence[torch.Tensor]) -> None:
        """By the call of that key, just now. What is no plain memory is left out."""
        for tensor in filter(_is_plain, tensors):
            alias = tensor.detach()
            self._sums[tensor.untyped_storage()._cdata] = key, alias, sum_of_words(alias)

    def written(self, tensors: Sequence[torch.Tensor]) -> None:
        """By an operator that the dispatcher knows, just now."""
        for tensor in filter(_is_plain, tensors):
            known = self._sums.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self._sums[tensor.untyped_storage()._cdata] = *known[:2], sum_of_words(known[1])

    def found(self) -> set[K]:
        """Of which calls outputs are not as they were made and written, and lets all of them go. Waits for a device."""
        keys = {key for key, alias, before in self._sums.values() if not torch.equal(before, sum_of_words(alias))}
        self._sums.clear()
        return keys


def _is_plain(tensor: torch.Tensor) -> bool:
    """No sparse tensor, nor a subclass, whose storage may be none."""
    is_ours = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_ours and tensor.layout == torch.strided and not tensor._is_zerotensor()


def sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """Of the words of its storage, and of the bytes behind them: what is smaller would first be copied to words."""
    num_bytes = tensor.untyped_storage().nbytes()
    words = num_bytes // 8 * 8
    of_words = byte_view(tensor, ByteRange(0, words)).view(torch.int64).sum()
    return of_words + byte_view(tensor, ByteRange(words, num_bytes)).sum(dtype=torch.int64)
