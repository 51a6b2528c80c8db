# SPDX-License-Identifier: Apache-2.0
"""What scripts do, by name. An action is ``[name, {arguments}]``; each works wherever it stands, or does nothing there,
so that any of them can be taken out of a script.

Parameters are named by numbers, modulo how many there are. :data:`OURS_ALONE` do what stock cannot, and must change
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch.nn import Parameter

from tests.scripts.models import LENGTH, VOCABULARY, ScriptError, loss_of

__all__ = ["ACTIONS", "OURS_ALONE", "Run"]

Named = tuple[str, Parameter]


class Run:
    """One rank of one run: engines, and what was seen, in order."""

    def __init__(self, engines: list[Any], directory: str, *, does_all: bool) -> None:
        """``does_all``: also what ours alone do."""
        self.engines, self.directory, self._does_all = engines, directory, does_all
        self.seen: list[tuple[str, Any]] = []
        self.saved: set[tuple[int, str]] = set()
        self.num_steps: Counter[int] = Counter()
        self.has_gradients = False

    def see(self, what: str, value: Any) -> None:
        self.seen.append((what, value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value))

    def do(self, actions: Sequence[list[Any]]) -> None:
        for name, arguments in actions:
            if self._does_all or name not in OURS_ALONE:
                ACTIONS[name](self, **arguments)

    def forward(
        self, engine: int, batch: int, size: int, order: list[int], left_out: int | None = None
    ) -> torch.Tensor:
        """Random numbers depend on the batch alone, not on what was done before."""
        torch.manual_seed(batch)
        generator = torch.Generator().manual_seed(1000 * batch + torch.distributed.get_rank())
        ids = torch.randint(VOCABULARY, (size, LENGTH + batch % 4), generator=generator)
        ids = ids.to(get_accelerator().current_device_name())
        output: torch.Tensor = self.engines[engine](ids, order, left_out)
        return loss_of(output, ids) if output.dim() else output

    def named(self, engine: int, numbers: list[int], *, trained: bool = False, even: bool = False) -> list[Named]:
        """``even``: those alone whose elements all ranks can share, as stock's setters want it."""
        every = [(n, p) for n, p in self.engines[engine].module.named_parameters() if p.requires_grad or not trained]
        chosen = list(dict.fromkeys(every[number % len(every)] for number in numbers))
        ranks = torch.distributed.get_world_size()
        return [(name, param) for name, param in chosen if not even or param.ds_numel % ranks == 0]


def micro(
    run: Run,
    engine: int,
    batch: int,
    size: int,
    order: list[int],
    *,
    factor: float = 1.0,
    again: int = 0,
    left_out: int | None = None,
    in_eval: bool = False,
    autocast: bool = False,
    steps: bool | None = None,
    within: Sequence[list[Any]] = (),
    after: Sequence[list[Any]] = (),
) -> None:
    """A micro-batch: forward, ``within``, backward, ``after``, step.

    ``again``: so many more forwards in one loss. ``left_out``: a block whose parameters get no gradient. ``steps``:
    where only ``step()`` ends a step, whether it comes now.
    """
    target = run.engines[engine]
    target.train(not in_eval)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = run.forward(engine, batch, size, order, left_out) * factor
        for number in range(again):
            loss = loss + 0.5 * run.forward(engine, batch + 7 * (number + 1), size, order)
    run.do(within)
    target.train(not in_eval)
    target.backward(loss)
    run.has_gradients = steps is None and bool(target.is_gradient_accumulation_boundary())
    ends = run.has_gradients or bool(steps)
    run.do(after)
    target.train()
    run.see("loss", loss)
    if steps is not False:
        target.step()
    if ends:
        applied, norm = bool(target.was_step_applied()), target.get_global_grad_norm()
        run.num_steps[engine] += applied
        run.see("step", (applied, None if norm is None else float(norm), float(target.optimizer.loss_scale)))
    run.has_gradients = False


def evaluate(run: Run, engine: int, batch: int, *, inference: bool) -> None:
    target = run.engines[engine]
    target.eval()
    with torch.inference_mode() if inference else torch.no_grad():
        run.see("evaluation", run.forward(engine, batch, 2, []))
    target.train()


def read(run: Run, engine: int, params: list[int]) -> None:
    named = run.named(engine, params)
    with deepspeed.zero.GatheredParameters([param for _, param in named]):
        for name, param in named:
            run.see(name, param.data)


def edit(run: Run, engine: int, params: list[int], rank: int) -> None:
    named = run.named(engine, params)
    rank %= torch.distributed.get_world_size()
    with deepspeed.zero.GatheredParameters([param for _, param in named], modifier_rank=rank):
        if torch.distributed.get_rank() == rank:
            for _, param in named:
                param.data.mul_(0.9375)


def get_states(run: Run, engine: int, params: list[int]) -> None:
    for name, param in run.named(engine, params, trained=True) if run.num_steps[engine] else ():
        run.see(f"P32 of {name}", safe_get_full_fp32_param(param))
        run.see(f"moment of {name}", safe_get_full_optimizer_state(param, "exp_avg"))


def set_states(run: Run, engine: int, params: list[int]) -> None:
    for _, param in run.named(engine, params, trained=True, even=True) if run.num_steps[engine] else ():
        safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.9)
        safe_set_full_optimizer_state(param, safe_get_full_optimizer_state(param, "exp_avg") * 0.5, "exp_avg")


def get_gradients(run: Run, engine: int, params: list[int]) -> None:
    for name, param in run.named(engine, params, trained=True) if run.has_gradients else ():
        run.see(f"gradient of {name}", safe_get_full_grad(param))


def set_gradients(run: Run, engine: int, params: list[int]) -> None:
    for _, param in run.named(engine, params, trained=True, even=True) if run.has_gradients else ():
        safe_set_full_grad(param, safe_get_full_grad(param) * 0.5)


def change(run: Run, engine: int, group: int, key: str, value: Any) -> None:
    """A hyperparameter."""
    groups = run.engines[engine].optimizer.param_groups
    groups[group % len(groups)][key] = tuple(value) if isinstance(value, list) else value


def change_clip(run: Run, engine: int, value: float) -> None:
    run.engines[engine].optimizer.clip_grad = value


def freeze(run: Run, engine: int, block: int, *, trained: bool) -> None:
    """A block is frozen, or thawed, that the engine was built to train."""
    blocks = run.engines[engine].module.blocks
    for param in blocks[block % len(blocks)].parameters():
        param.requires_grad_(trained and param.is_optimized)


def fail_in_forward(run: Run, engine: int, batch: int, at: int) -> None:
    module = run.engines[engine].module
    module.fails_at = at % len(module.blocks)
    with suppress(ScriptError):
        run.forward(engine, batch, 3, [])
    module.fails_at = None


def state_dict(run: Run, engine: int) -> None:
    for name, values in (run.engines[engine]._zero3_consolidated_16bit_state_dict() or {}).items():
        run.see(f"saved {name}", values)


def save(run: Run, engine: int, tag: str) -> None:
    run.engines[engine].save_checkpoint(f"{run.directory}/saved-{engine}", tag=tag)
    run.saved.add((engine, tag))


def load(run: Run, engine: int, tag: str) -> None:
    if (engine, tag) in run.saved:
        run.engines[engine].load_checkpoint(f"{run.directory}/saved-{engine}", tag=tag)


def release(run: Run, engine: int) -> None:
    run.engines[engine].empty_partition_cache()


# ---- ours alone ----------------------------------------------------------------------------------------------------


def fail_in_backward(run: Run, engine: int, batch: int, at: int) -> None:
    """Where a window begins: zero_grad() drops all of it."""
    target = run.engines[engine]
    if not target.optimizer.rank_state.core.window.is_empty:
        return

    def fail(_gradient: torch.Tensor) -> None:
        raise ScriptError

    def watch(_block: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    blocks = target.module.blocks
    hook = blocks[at % len(blocks)].register_forward_hook(watch)
    buffers = [(buffer, buffer.clone()) for buffer in target.module.buffers()]
    try:
        with suppress(ScriptError):
            target.backward(run.forward(engine, batch, 2, []))
    finally:
        hook.remove()
    target.optimizer.zero_grad()
    for buffer, value in buffers:
        buffer.copy_(value)


def move(run: Run, engine: int, share: float) -> None:
    state = run.engines[engine].optimizer.rank_state
    if state.store is not None and run.num_steps[engine] and state.core.window.is_empty:
        state.move_to(share, 60_000)


def place(run: Run, engine: int, what: str, share: float) -> None:
    """P16, G16 or frozen parameters change their home."""
    state = run.engines[engine].optimizer.rank_state
    if what == "frozen" and run.num_steps[engine] and state.may_place_frozen:
        state.place_frozen(share)
    elif what != "frozen" and state.store is not None and run.num_steps[engine] and state.may_place_params:
        {"params": state.place_params, "grads": state.place_grads}[what](share)


def sleep(run: Run, engine: int, *, pin: bool) -> None:
    if not run.has_gradients:
        run.engines[engine].offload_states(pin_memory=pin)
        run.engines[engine].reload_states()


_EVERYBODY: tuple[Callable[..., None], ...] = (
    *(micro, evaluate, read, edit, get_states, set_states, get_gradients, set_gradients, change, change_clip),
    *(freeze, fail_in_forward, state_dict, save, load, release),
)
_OURS: tuple[Callable[..., None], ...] = (fail_in_backward, move, place, sleep)
ACTIONS = {action.__name__: action for action in (*_EVERYBODY, *_OURS)}
OURS_ALONE = frozenset(action.__name__ for action in _OURS)
