# SPDX-License-Identifier: Apache-2.0
"""Finds the repeated blocks of a model: the unit by which activations move.

The rule: among all siblings in a list (or other container) that share a class, the ones that hold most parameters
win, and those of the same class elsewhere join (encoder and decoder of one model). Works for
``nn.ModuleList`` stacks, Hugging Face encoders and decoders, and ViT- and DiT-like models alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.log import log_once

__all__ = ["Block", "find_blocks"]


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Block:
    """One block: its dotted name in the model, and the module."""

    name: str
    module: nn.Module


def find_blocks(
    model: nn.Module,
    block_classes: Sequence[str] | None = None,
    numel_of: Callable[[nn.Parameter], int] = nn.Parameter.numel,
) -> list[Block]:
    """The blocks of ``model`` in the order in which they are defined; a module used twice appears once.

    Args:
        block_classes: class names that are blocks, instead of the rule above.
        numel_of: elements of a parameter; a partitioned parameter knows better than its ``numel``.

    Where nothing repeats, the model's top-level children are the blocks, and the log says so. An empty list means
    that the model has no children.

    Raises:
        FuyouConfigError: ``block_classes`` names a class of which the model has no module; near names are given.
    """
    if block_classes:
        return _named_blocks(model, block_classes)
    repeated = _repeated_class(model, numel_of)
    if repeated is not None:
        return [Block(name, module) for name, module in _outermost(model, lambda m: type(m) is repeated)]
    children = [Block(name, child) for name, child in model.named_children()]
    log_once(
        logging.INFO,
        f"{type(model).__name__} has no repeated blocks; its {len(children)} top-level children serve as blocks. "
        f"fuyou.activations.block_classes names others",
    )
    return children


def _named_blocks(model: nn.Module, block_classes: Sequence[str]) -> list[Block]:
    present = sorted({type(module).__name__ for module in model.modules()})
    unknown = [name for name in block_classes if name not in present]
    if unknown:
        raise FuyouConfigError(
            f"fuyou.activations.block_classes must name classes of modules in the model; {', '.join(unknown)} is none "
            f"of them. The model has: {', '.join(present)}"
        )
    wanted = frozenset(block_classes)
    return [Block(name, module) for name, module in _outermost(model, lambda m: type(m).__name__ in wanted)]


def _repeated_class(model: nn.Module, numel_of: Callable[[nn.Parameter], int]) -> type[nn.Module] | None:
    """The class whose repeated siblings hold most parameters; the outermost one where several hold the same.

    Siblings in a container come first: an encoder beside a decoder, or the projections of one attention, share a class
    too, but nobody would call them the blocks of the model.
    """
    in_containers: dict[type[nn.Module], int] = {}
    anywhere: dict[type[nn.Module], int] = {}
    for parent in model.modules():
        siblings: dict[type[nn.Module], list[nn.Module]] = {}
        for child in parent.children():
            siblings.setdefault(type(child), []).append(child)
        held = in_containers if isinstance(parent, _CONTAINERS) else anywhere
        for kind, modules in siblings.items():
            if len(modules) > 1 and not issubclass(kind, _CONTAINERS):
                numel = sum(numel_of(param) for module in modules for param in module.parameters())
                held[kind] = held.get(kind, 0) + numel
    for held in (in_containers, anywhere):
        if any(held.values()):
            return max(held, key=lambda kind: held[kind])  # outer before inner, and max takes the first
    return None


def _outermost(model: nn.Module, matches: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Matching modules that lie in no other matching module."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if module is not model and matches(module):
            yield name, module
            continue
        children = [(f"{name}.{child_name}".lstrip("."), child) for child_name, child in module.named_children()]
        stack.extend(reversed(children))
