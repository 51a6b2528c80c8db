# SPDX-License-Identifier: Apache-2.0
"""Swapping and recomputing attached to a model: forwards in training mode run under the hooks.

Everything is attached with PyTorch's module hooks. They are plain functions that know their module by a weak
reference, so a deep copy of the model (an EMA copy, a reference model) is not swapped and not harmed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_fuyou.activations.blocks import Block
from ds_fuyou.activations.open_hooks import OpenHooks, computes_its_loss
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.activations.recompute import RecomputedForward, Stays
from ds_fuyou.activations.selective import OutputSelection
from ds_fuyou.activations.surroundings import RandomSource
from ds_fuyou.activations.swapper import Swapper
from ds_fuyou.activations.takeover import TORCH_POINTS, CheckpointTakeover, TakeoverPoint
from ds_fuyou.activations.tier import SwapCounters, SwapTier
from ds_fuyou.host.outermost_call import OutermostCall
from ds_fuyou.log import log_once

__all__ = ["ActivationSession"]


class ActivationSession:
    """What is done to forwards of ``model`` while it is in training mode and gradients are recorded.

    A forward that raises leaves nothing behind: hooks are popped, and what was moved goes with the graph.

    Args:
        blocks: known by name to the swapper and its fates.
        swapper: takes what is saved; None saves as ever.
        recomputed: those of the blocks that are computed again in backward.
        points: how gradient checkpointing is recognised in forward, and taken over.
        draws: random numbers of a device with memory of its own; None: the host's are all.
        stays: what is gathered of a block when its recomputation begins stays so inside of this.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        swapper: Swapper | None,
        recomputed: Sequence[Block] = (),
        points: Sequence[TakeoverPoint] = TORCH_POINTS,
        draws: RandomSource | None = None,
        stays: Stays = nullcontext,
    ) -> None:
        self.blocks = tuple(blocks)
        self._draws, self._stays = draws, stays
        self.swapper = swapper
        self._takeover = CheckpointTakeover(
            "their activations are swapped, not recomputed" if swapper is not None else "it recomputes whole blocks",
            points,
            None if swapper is not None else [block.module for block in blocks],
        )
        # Compilers must not trace what runs beside the model: hooks are called as they are, between graphs.
        leave_alone = torch.compiler.disable
        hooks = None if swapper is None else OpenHooks(leave_alone(swapper.pack), leave_alone(swapper.unpack))
        self._hooks = hooks
        self._is_running = False
        self.num_forwards = 0
        self.fates: dict[str, BlockFate] = {}  # as decided last
        self._configured = [module for module in model.modules() if "config" in vars(module)]
        self._cached_configs: list[Any] = []
        self._outermost = OutermostCall()
        self._handles: list[RemovableHandle] = []
        self._model = weakref.ref(model)
        self._watch(model, self._enter_model, self._leave_model)
        if swapper is not None:
            for block in blocks:
                self._watch_block(block, swapper)
        self._forwards = [
            RecomputedForward(block.module, self._takeover, draws=draws, stays=stays) for block in recomputed
        ]

    def _watch(self, module: nn.Module, enter: Callable[[nn.Module], None], leave: Callable[[Any], None]) -> None:
        own = weakref.ref(module)

        @torch.compiler.disable
        def before(called: nn.Module, args: Any) -> None:
            if called is own():
                enter(called)

        @torch.compiler.disable
        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is own():
                leave(output)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _watch_block(self, block: Block, swapper: Swapper) -> None:
        def enter(module: nn.Module) -> None:
            swapper.block = block.name

        def leave(output: Any) -> None:
            swapper.block = ""

        self._watch(block.module, enter, leave)

    @property
    def tier(self) -> SwapTier | None:
        """Where what leaves the device goes; None where nothing does."""
        return self.swapper.tier if self.swapper is not None else None

    @property
    def counters(self) -> SwapCounters:
        """What was moved since the start; zeros when nothing is."""
        return self.tier.counters if self.tier is not None else SwapCounters()

    @property
    def swaps(self) -> bool:
        """Whether anything is to leave the device by the fates that were decided."""
        every = (fate for block in self.fates.values() for fate in (block.saved, *(block.outputs or {}).values()))
        return Fate.SWAP in every

    @property
    def is_open(self) -> bool:
        """Whether a swapped forward is running."""
        return self._is_running

    def _enter_model(self, model: nn.Module) -> None:
        if not self._outermost.enter():
            return
        self._close_hooks()
        if self._is_running:  # Ctrl-C ended the last forward: it is no Exception
            self.num_forwards -= 1
            self._close_region()
        if not (torch.is_grad_enabled() and model.training):
            return
        self.num_forwards += 1
        self._is_running = True
        self._forbid_cache()
        self._warn_of_compilation(model)
        if self.swapper is not None or self._forwards:
            self._takeover.begin()
        if self.swapper is not None and self._hooks is not None:
            self.swapper.begin_forward()
            self._hooks.open()

    def _leave_model(self, output: Any) -> None:
        """``output`` is None after an exception. Where the model has no loss in its output, the script will compute
        one, and what it saves for that is swapped too: until backward begins, or another forward.
        """
        if not self._outermost.leave():
            return
        stays = self._is_running and output is not None and not computes_its_loss(output)
        if self._hooks is not None and not (stays and self._hooks.may_stay):
            self._hooks.close()
        self._close_region()

    def _close_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.close_if_on_top()

    def _close_region(self) -> None:
        self._is_running = False
        if self.swapper is not None:
            self.swapper.end_forward()
        self._takeover.end()
        for config in self._cached_configs:
            config.use_cache = True
        self._cached_configs.clear()

    def _forbid_cache(self) -> None:
        """Until the forward ends a Hugging Face model keeps no key-value cache where blocks are recomputed: recomputing
        would add to it twice, and training has no use for it. Parts of a larger model have configurations of their own.
        """
        for module in self._configured if self._forwards else ():
            config: Any = vars(module).get("config")
            if getattr(config, "use_cache", False) is True:
                self._cached_configs.append(config)
                config.use_cache = False
                log_once(
                    logging.INFO,
                    "use_cache is false in training forwards, because blocks are recomputed: last bits are those of a "
                    "run with use_cache=False, in some families others than with it. A script that trains on "
                    "past_key_values gives use_cache=True in its call",
                )

    def _warn_of_compilation(self, model: nn.Module) -> None:
        """Once, where blocks are recomputed in a model that was compiled in place (``engine.compile()``)."""
        compiled = (
            getattr(module, "_compiled_call_impl", None) for module in (model, *(b.module for b in self.blocks))
        )
        if self._forwards and any(call is not None for call in compiled):
            log_once(
                logging.WARNING,
                "blocks that are recomputed are not compiled, so results differ in rounding from those of the compiled "
                "model; set activations.mode to swap for the same results",
            )

    def watch_inputs(self, see: Callable[[Any], None]) -> None:
        """``see`` is told what every forward in training mode is given, before it saves anything."""
        model, own = self._model(), self._model

        @torch.compiler.disable
        def before(called: nn.Module, args: Any, kwargs: Any) -> None:
            if called.training and called is own() and torch.is_grad_enabled():
                see((args, kwargs))

        if model is not None:
            self._handles.append(model.register_forward_pre_hook(before, with_kwargs=True))

    def decide(self, fates: Mapping[str, BlockFate]) -> None:
        """From the next forward on, each block by its name as said, and "" for what lies around blocks; what is not
        named stays on the device. Between forwards only.
        """
        self.fates = dict(fates)
        for forward in self._forwards:
            forward.undo()
        self._forwards = []
        for block in self.blocks:
            fate = fates.get(block.name)
            if fate is not None and fate.outputs is not None:
                chosen = None
                if self.swapper is not None and fate.outputs:
                    chosen = OutputSelection(self.swapper, fate.outputs, self._draws)
                self._forwards.append(RecomputedForward(block.module, self._takeover, chosen, self._draws, self._stays))
        if self.swapper is not None:
            self.swapper.fates = {name: fate.saved for name, fate in fates.items()}

    def end_step(self) -> None:
        """A step ended: a region that an interrupt left open is closed.

        Raises:
            FuyouStorageError: a transfer of an activation failed and nobody has seen it yet.
        """
        self._outermost.forget()
        self._close_hooks()
        self._close_region()
        if self.tier is not None:
            self.tier.poll()

    def close(self) -> None:
        """Takes everything off the model and gives memory and storage back. Idempotent."""
        self._outermost.forget()
        self._close_hooks()
        self._close_region()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for forward in self._forwards:
            forward.undo()
        self._forwards.clear()
        if self.tier is not None:
            self.tier.close()
