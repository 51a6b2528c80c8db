# SPDX-License-Identifier: Apache-2.0
"""What scripts do inside a step besides forward, backward and step. Keys of a case, most of them lists of step numbers:

``zero_grad_in``        all backwards of the step, zero_grad(), then all of them again on other batches
``forget_in``           zero_grad() after the last backward: the step has no gradient
``pairs_in``            a second forward and backward, on the same batch, before the micro-batch ends
``ahead_in``            a second forward, on the same batch, before the backward of the first, and both backwards
``grad_of_inputs_in``   a forward before the micro-batch's own, and torch.autograd.grad of its loss by the first block's
                        output alone
``twice_in``            two backwards on one forward (retain_graph)
``lr_changes_in``       learning rates are halved between backward and step
``eval_within``         an evaluation forward between the first backward and what follows
``eval_late_in``        an evaluation forward right before step(), whose loss is read after it
``edit_within``         an edit under GatheredParameters there
``raise_in``            a forward that raises in its second block, and a backward that never comes
``raise_in_backward``   a backward that raises in its second block, and zero_grad(), before the step's own; of the
                        engine instead of its optimizer with ``engine_zero_grad``
``loss_factors``        factor of the loss by step, repeated: makes clipping come and go
``set_boundary``        the script calls set_gradient_accumulation_boundary and one step() for all micro-batches
``coalesce``            backwards run under coalesce_grad_reduction()
``torch_backward``      loss.backward() instead of engine.backward(loss)
``batch_size_at``       {step: train_batch_size}
``break``               {"rank", "step", "how"}: "kill" ends the process, "read" and "write" make its storage fail,
                        "copy" the second copy from then on of the stand-in device
``offload_states_in``   offload_states() and reload_states() before the step
``no_sync_in``          a backward that the script wants under no_sync(): what the refusal says is kept
``hooks_of_gradients``  hooks of the script's on every matrix' gradient: "before" DeepSpeed's, which leave it
                        transposed in memory, or "behind" them, which scale it
"""

import contextlib
import errno
import os
import signal

import torch
from models import make_batch


class ScriptError(Exception):
    """A mistake of the script."""


def transpose_in_memory(param: torch.nn.Parameter) -> None:
    param.grad = param.grad.t().contiguous().t()


def scale(param: torch.nn.Parameter) -> None:
    """In three operations, so that a device is seen to wait for the last; to be rounded, in the gradient's type."""
    param.grad.mul_(4.0).mul_(0.25).mul_(0.3)


def hook_gradients(module: torch.nn.Module, case: dict, when: str) -> None:
    """``when``: whether an engine was built already."""
    if case.get("hooks_of_gradients") == when:
        for param in module.parameters():
            if len(getattr(param, "ds_shape", param.shape)) == 2:
                param.register_post_accumulate_grad_hook(transpose_in_memory if when == "before" else scale)


def factor_of(case: dict, step: int) -> float:
    factors = case.get("loss_factors", [1.0])
    return factors[step % len(factors)]


def batch_of(case: dict, index: int) -> dict:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return make_batch(case["model"], index, rank)


def run_backward(engine, case: dict, loss: torch.Tensor, **how) -> None:
    if case.get("torch_backward"):
        engine.scale(loss).backward(**how)
    else:
        engine.backward(loss, **how)


def forward_and_backward(engine, case: dict, step: int, index: int) -> torch.Tensor:
    """One micro-batch as the case wants it; returns the loss of its first forward."""
    batch = batch_of(case, index)
    if step in case.get("raise_in", ()):
        fail_in_forward(engine, batch)
    if step in case.get("no_sync_in", ()):
        must_refuse(engine.no_sync)
    if step in case.get("raise_in_backward", ()):
        fail_in_backward(engine, case, batch)
    if step in case.get("grad_of_inputs_in", ()):
        grad_of_inputs(engine, batch)
    loss = engine(**batch) * factor_of(case, step)
    ahead = engine(**batch) * factor_of(case, step) if step in case.get("ahead_in", ()) else None
    if step in case.get("twice_in", ()):
        run_backward(engine, case, loss, retain_graph=True)
    run_backward(engine, case, loss)
    if ahead is not None:
        run_backward(engine, case, ahead)
    if step in case.get("pairs_in", ()):
        run_backward(engine, case, engine(**batch) * factor_of(case, step))
    return loss


def grad_of_inputs(engine, batch: dict) -> None:
    """As where an adversarial example is made: no parameter gets a gradient."""
    outputs: list[torch.Tensor] = []
    hook = engine.module.blocks[0].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    loss = engine(**batch)
    hook.remove()
    torch.autograd.grad(loss, outputs)


def must_refuse(no_sync) -> None:
    """In stock's words: the script that reads them is told what to do about it."""
    try:
        with no_sync():
            raise ScriptError("no_sync() was entered")
    except AssertionError as error:
        if "no_sync context manager is incompatible with gradient partitioning" not in str(error):
            raise


def fail_in_forward(engine, batch: dict) -> None:
    def fail(*_) -> None:
        raise ScriptError

    hook = engine.module.blocks[1].register_forward_hook(fail)
    with contextlib.suppress(ScriptError):
        engine(**batch)
    hook.remove()


def fail_in_backward(engine, case: dict, batch: dict) -> None:
    """As where memory did not suffice: what the half of a backward left is dropped."""

    def fail(_gradient: torch.Tensor) -> None:
        raise ScriptError

    def watch(_block: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    hook = engine.module.blocks[1].register_forward_hook(watch)
    try:
        run_backward(engine, case, engine(**batch))
        raise AssertionError("the backward did not raise")
    except ScriptError:
        if not case.get("engine_zero_grad"):  # as a hook leaves it that a signal cuts off
            left = next(p for p in engine.module.parameters() if p.requires_grad and p.numel())
            left.grad = torch.zeros_like(left)
        (engine if case.get("engine_zero_grad") else engine.optimizer).zero_grad()
    finally:
        hook.remove()


def within(engine, case: dict, step: int, edit, result: dict) -> None:
    """Between the first backward of a step and what follows."""
    if step in case.get("edit_within", ()):
        edit(engine, case)
    if step in case.get("eval_within", ()):
        engine.eval()
        with torch.no_grad():
            result["evals"].append(float(engine(**batch_of(case, 20_000 + step))))
        engine.train()


def evaluate_late(engine, case: dict, step: int) -> list[torch.Tensor]:
    """Right before step(): losses that nobody has read, so that a device may still be at them."""
    if step not in case.get("eval_late_in", ()):
        return []
    engine.eval()
    with torch.no_grad():
        losses = [engine(**batch_of(case, 40_000 + step))]
    engine.train()
    return losses


def before_step(engine, case: dict, step: int, first_index: int, micro_batches: int) -> None:
    """After the last backward of a step."""
    if step in case.get("zero_grad_in", ()):
        engine.optimizer.zero_grad()
        for micro in range(micro_batches):
            forward_and_backward(engine, case, step, 30_000 + first_index + micro)
    if step in case.get("forget_in", ()):
        engine.optimizer.zero_grad()
    if step in case.get("lr_changes_in", ()):
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.5


def break_rank(engine, case: dict, step: int) -> None:
    """Storage of one rank fails from here on, or its device, or its process ends."""
    found = case.get("break", {})
    if found.get("step") != step or found["rank"] != torch.distributed.get_rank():
        return
    if found["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if found["how"] == "copy":
        torch.standin.core.fail_copy(2)  # the first brings the batch
        return
    from ds_fuyou.ops.core import load_core

    core = load_core()
    kind = core.IoKind.READ if found["how"] == "read" else core.IoKind.WRITE
    engine.optimizer.rank_state.core.io.engine.add_fault(kind, core.IoFaultEffect.ERROR, error=errno.EIO, count=1 << 40)


def wrapped(engine, case: dict) -> contextlib.AbstractContextManager:
    return engine.coalesce_grad_reduction() if case.get("coalesce") else contextlib.nullcontext()
