# SPDX-License-Identifier: Apache-2.0
"""The seam between swapped activations and stage 3: which saved tensors are gathered parameters, and what is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

from ds_fuyou.activations.blocks import Block, find_blocks
from ds_fuyou.activations.copies import copy_lane
from ds_fuyou.activations.parameters import SavedParameter, as_saved_parameter, cast_source
from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.activations.surroundings import RandomSource
from ds_fuyou.activations.swapper import Swapper
from ds_fuyou.activations.takeover import TORCH_POINTS, TakeoverPoint, directly
from ds_fuyou.activations.tier import StorageHome, SwapTier
from ds_fuyou.activations.views import ViewSpec
from ds_fuyou.config import FuyouConfig
from ds_fuyou.ds_json import Activation
from ds_fuyou.host.compute_clock import ComputeClock
from ds_fuyou.host.device import Device
from ds_fuyou.host.run_ahead import run_ahead
from ds_fuyou.log import log_once
from ds_fuyou.planner.plan import handles_activations
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.swap_space import SwapSpace
from ds_fuyou.telemetry.trace import LaneTrace
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.monitoring import tokens_in
from ds_fuyou.zero.parameters.gathering import settle
from ds_fuyou.zero.parameters.param_swapper import held_gathered
from ds_fuyou.zero.run.auto_activations import AutoActivations
from ds_fuyou.zero.run.budgets import device_budget, loss_bytes_each, unmeasured_room
from ds_fuyou.zero.run.striping import path_weights

__all__ = [
    "ActivationInput",
    "GatheredIndex",
    "attach_activations",
    "attach_auto",
    "model_blocks",
]


class _DirectDeepSpeedFunction:
    """Stands for the autograd function of ``deepspeed.checkpointing.checkpoint``, which collects outputs in a list."""

    def __init__(self, point: TakeoverPoint, original: Any) -> None:
        self._point, self._original = point, original

    def apply(self, function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        if not self._point.takes_over(function):
            return self._original.apply(function, all_outputs, *args)
        outputs = directly(function, args)
        all_outputs += [outputs] if torch.is_tensor(outputs) else outputs
        return outputs


_POINTS = (*TORCH_POINTS, TakeoverPoint(checkpointing, "CheckpointFunction", _DirectDeepSpeedFunction))


class GatheredIndex:
    """ZeRO-3's parameters by the memory they are gathered in.

    Saved tensors reach the hooks as the parameter, as a view of it, or as a detached alias; the alias is found by its
    address, which counts only while the parameter still is gathered there. In backward the view is rebuilt from what
    DeepSpeed has gathered by then, so the graph holds no gathered memory in between.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, Parameter] = {}
        self._address_of: dict[int, int] = {}  # by ds_id: where it was gathered last; older places are forgotten

    def note(self, params: Iterable[Parameter]) -> None:
        """These were just gathered for a module that runs now."""
        for param in params:
            if param.ds_status == ZeroParamStatus.AVAILABLE:
                before, now = self._address_of.get(param.ds_id), param.data_ptr()
                if before is not None and self._by_address.get(before) is param:
                    del self._by_address[before]
                self._by_address[now], self._address_of[param.ds_id] = param, now

    def find(self, tensor: torch.Tensor) -> SavedParameter | None:
        param = self._candidate(tensor)
        if param is not None and param.ds_status == ZeroParamStatus.AVAILABLE:
            values = param.data
            if values.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                return as_saved_parameter(tensor, param, values)
        source = cast_source(tensor)
        if source is None or not hasattr(source, "ds_id"):
            return None
        return SavedParameter(source, ViewSpec.of(tensor), tensor.dtype)

    def _candidate(self, tensor: torch.Tensor) -> Parameter | None:
        for known in (tensor, tensor._base):
            if hasattr(known, "ds_id") and hasattr(known, "ds_tensor"):
                return known
        return self._by_address.get(tensor.data_ptr())

    def values(self, saved: SavedParameter) -> torch.Tensor:
        """Gathered by the module's backward hook, as a rule; what is used outside of it is gathered here and released
        with the others at the end of the step.
        """
        param = saved.param
        settle([param])
        if param.ds_status != ZeroParamStatus.AVAILABLE:
            param.all_gather()
        values: torch.Tensor = param.data
        return values


@dataclass(frozen=True)
class ActivationInput:
    """What the builder needs of the rank: its configuration, the shared I/O engine, bytes it may take; of the arena's,
    ``kept_bytes`` are a home, and 0 says that nobody knows."""

    activation: Activation
    device: Device
    clock: ComputeClock
    io: IoLane
    arena_bytes: int
    kept_bytes: int
    smallest_bytes: int
    storage_budget: Callable[[], int] | None
    trace: LaneTrace | None


def model_blocks(module: torch.nn.Module, config: FuyouConfig) -> list[Block]:
    """The repeated blocks of a partitioned model, by their classes where the block names these.

    Raises:
        FuyouConfigError: ``block_classes`` names what the model does not have.
    """
    classes = config.activations.block_classes
    return find_blocks(module, classes, lambda param: int(getattr(param, "ds_numel", param.numel())))


def _draws(device: Device) -> RandomSource | None:
    return None if device.is_host else RandomSource(device.random_state, device.set_random_state)


def attach_activations(
    module: torch.nn.Module, index: GatheredIndex, given: ActivationInput
) -> ActivationSession | None:
    """Makes ``module`` swap or recompute its activations as the configuration says; None if it says neither.

    Raises:
        FuyouConfigError: ``block_classes`` names what the model does not have.
        FuyouStorageError: a path is not writable.
    """
    if not handles_activations(given.activation.config, rank_device().is_host):
        return None
    settings = given.activation.config.activations
    blocks = model_blocks(module, given.activation.config)
    if settings.mode == "recompute":
        _tell(f"activations of {_shown(blocks)} are recomputed in backward")
        return ActivationSession(module, blocks, None, blocks, _POINTS, _draws(given.device), held_gathered)
    tier = _build_tier(given)
    if tier is None and settings.mode == "auto":
        return None
    if tier is None:
        _tell("activations stay in host memory, where the device has its memory: nothing is moved")
    else:
        where = "host memory" if tier.storage is None else "storage"
        if settings.mode != "auto":  # which says what it decides
            _tell(f"activations of {_shown(blocks)} and of what lies around them are swapped to {where}")
    swapper = Swapper(
        tier,
        index,
        device=given.device.torch_device,
        smallest_bytes=given.smallest_bytes,
        resident=lambda: {b.untyped_storage()._cdata for b in module.buffers() if b.layout == torch.strided},
        clock=given.clock,
        ahead=run_ahead(given.device),
    )
    session = ActivationSession(module, blocks, swapper, (), _POINTS, _draws(given.device), held_gathered)
    if settings.mode == "swap" and not given.device.is_host:
        budget_bytes, loss_each = device_budget(given.activation.config, given.device), loss_bytes_each(module)

        def forward_begins(inputs: Any) -> None:
            loss_bytes = loss_each * tokens_in(inputs)
            swapper.room_bytes = unmeasured_room(budget_bytes, given.device, swapper.held.now, loss_bytes)

        session.watch_inputs(forward_begins)
    return session


def _planned(config: FuyouConfig) -> Mapping[str, Mapping[str, int]] | None:
    """Fates of a plan document, where there is one that says some."""
    document = config.plan.document if config.plan is not None else None
    return (document.fates or None) if document is not None else None


def attach_auto(
    module: torch.nn.Module, session: ActivationSession | None, given: ActivationInput
) -> AutoActivations | None:
    """What decides for mode "auto" after the first steps; None for any other mode."""
    config = given.activation.config
    if session is None or session.swapper is None or config.activations.mode != "auto":
        return None
    budget_bytes, loss_each = device_budget(config, given.device), loss_bytes_each(module)
    return AutoActivations(session, session.swapper, given.device, budget_bytes, loss_each, _planned(config))


def _build_tier(given: ActivationInput) -> SwapTier | None:
    copies = copy_lane(given.device)
    paths = [Path(path) for path in given.activation.state_paths]
    wanted = given.activation.config.activations.tier
    on_storage = bool(paths) and wanted != "cpu"
    if copies.device_is_host and not on_storage:
        return None
    home = None
    if on_storage:
        space = SwapSpace(paths, given.storage_budget, weights=path_weights(given.activation))
        pieces = 4 if copies.device_is_host else 8  # hooks of a device come in bursts, far ahead of it
        kept = 0 if wanted == "nvme" else given.kept_bytes or given.arena_bytes // 2
        checksum = given.activation.config.checksum
        home = StorageHome(given.io.sharing(space.path_of), space, kept, write_pieces=pieces, checksum=checksum)
    return SwapTier(given.arena_bytes, copies, home, given.device, trace=given.trace)


def _shown(blocks: list[Block]) -> str:
    if not blocks:
        return "the model, which has no blocks,"
    return f"{len(blocks)} blocks ({', '.join(sorted({type(block.module).__name__ for block in blocks}))})"


def _tell(message: str) -> None:
    log_once(logging.INFO, message)
