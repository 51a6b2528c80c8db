# SPDX-License-Identifier: Apache-2.0
"""The 16-bit state dictionary of a whole model on the first rank, for whoever saves it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from torch.overrides import TorchFunctionMode

from ds_fuyou.ds_json import Activation, activation_of
from ds_fuyou.host.available_memory import available_host_bytes
from ds_fuyou.log import get_logger
from ds_fuyou.storage.memory_mapped import MappedTensors
from ds_fuyou.zero.parameters.gathering import in_use_order
from ds_fuyou.zero.parameters.param_swapper import in_order, only_reading

__all__ = ["consolidated"]


def consolidated(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_zero3_consolidated_16bit_state_dict``: gathers module by module, each as though it would be edited, which
    writes it back. Nothing is: all is read ahead, and nothing written. DeepSpeed's dictionary is part of a cycle (the
    function that fills it calls itself), which holds the whole model until Python looks for cycles; this one is not.
    What takes more than half of the host memory that is free lies in a file of ``nvme_path`` without a name, unless
    memory has room and the disk does not: the script may be about to write as much again.
    """

    @functools.wraps(original)
    def _zero3_consolidated_16bit_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        activation = activation_of(self._config)
        if activation is None:
            return original(self, *args, **kwargs)
        params = in_use_order(self.module)
        with (
            in_order(params, is_saved=True),
            only_reading(),
            _kept_in(_room_for_all(activation, self.module, params, *args, **kwargs)),
        ):
            found = original(self, *args, **kwargs)
        if found is None:  # not the first rank
            return None
        values = type(found)(found)
        found.clear()
        return values

    return _zero3_consolidated_16bit_state_dict


def _room_for_all(
    activation: Activation, module: torch.nn.Module, params: Sequence[Any], exclude_frozen_parameters: bool = False
) -> MappedTensors | None:
    """On storage, for what stock takes to host memory, on the rank that keeps it. None: in memory, as stock has it."""
    if dist.get_rank() != 0 or not activation.state_paths:
        return None
    kept = [param for param in params if param.requires_grad or not exclude_frozen_parameters]
    sizes = [param.ds_numel * param.element_size() for param in kept]
    every = (buffer for owner in module.modules() for buffer in owner.buffers(recurse=False))  # copied for each owner
    sizes += [buffer.numel() * buffer.element_size() for buffer in every]
    free = available_host_bytes()
    if 2 * sum(sizes) <= free:
        return None
    needed = MappedTensors.size_of(sum(sizes), len(sizes))
    directory = Path(activation.state_paths[0])
    try:
        directory = max(map(Path, activation.state_paths), key=lambda path: shutil.disk_usage(path).free)
        if sum(sizes) <= free and 2 * needed > shutil.disk_usage(directory).free:
            return None
        room = MappedTensors(directory, needed)
    except OSError as error:
        get_logger().warning(
            "the 16-bit weights take %d MiB of host memory, of which %d MiB are free, as they cannot be kept in %s: %s",
            sum(sizes) >> 20,
            free >> 20,
            directory,
            error,
        )
        return None
    get_logger().info(
        "the 16-bit weights of %d MiB are kept in %s while they are saved, as %d MiB of host memory are free",
        sum(sizes) >> 20,
        directory,
        free >> 20,
    )
    return room


@contextmanager
def _kept_in(room: MappedTensors | None) -> Iterator[None]:
    """Inside, what stock takes to host memory goes there."""
    if room is None:
        yield
        return
    with closing(room), _Kept(room):
        yield


class _Kept(TorchFunctionMode):
    """What ``tensor.cpu()`` returns lies in a file, as far as there is room."""

    def __init__(self, room: MappedTensors) -> None:
        super().__init__()
        self._room: MappedTensors | None = room

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.cpu or self._room is None:
            return made
        try:
            return self._room.keep(made)
        except (OSError, RuntimeError) as error:  # not raised: other ranks are in the middle of gathering
            get_logger().warning("16-bit weights stay in host memory from here on: %s", error)
            self._room = None
            return made
