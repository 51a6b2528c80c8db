# SPDX-License-Identifier: Apache-2.0
"""Stage 3 whose optimizer states, gradients and parameters live where the plan says.

The subclass keeps stock's sub-groups, norms, loss scaling and hooks, and replaces what holds memory (flat
buffers) and what updates it (the loop in ``step``). Private names of stock that it relies on are listed and
checked in compat.py.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import LOSS_SCALER, PARTITION_COUNT, ZERO_STAGE
from deepspeed.comm import get_world_size
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.nn import Parameter

from ds_fuyou.ds_json import Activation, current_activation
from ds_fuyou.errors import FuyouConfigError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.compute_clock import Phase
from ds_fuyou.host.device import failure_of
from ds_fuyou.host.run_ahead import run_ahead
from ds_fuyou.log import get_logger
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.rules import GroupHyper, optimizer_kind
from ds_fuyou.state_layout import BF16, FP32
from ds_fuyou.telemetry.report import LaneTimes
from ds_fuyou.telemetry.tier_bytes import TierBytes
from ds_fuyou.telemetry.trace import Lane
from ds_fuyou.zero.activations import ActivationInput, GatheredIndex, attach_activations, attach_auto, model_blocks
from ds_fuyou.zero.agreement import all_or_none
from ds_fuyou.zero.compute_spans import ComputeSpans
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.gradient_flow import GradientFlow
from ds_fuyou.zero.hp_access import HpAccess
from ds_fuyou.zero.monitoring import StepMonitor, count_tokens
from ds_fuyou.zero.optimizer_object import (
    give_back,
    hide_states,
    refuse_change,
    require_hidden,
    require_type,
    run_hooks,
)
from ds_fuyou.zero.parameters.across_batches import AcrossBatches
from ds_fuyou.zero.parameters.gathering import (
    edits_kept,
    for_training,
    release_gathered,
    replaced,
    shapes_alone,
    unwatch_gathers,
    watch_forwards,
    watch_gathers,
)
from ds_fuyou.zero.parameters.handover import owners
from ds_fuyou.zero.run.rank_state import RankState
from ds_fuyou.zero.run.run_design import TrainedModel
from ds_fuyou.zero.run.run_facts import known_run
from ds_fuyou.zero.run.run_plan import RunPlan
from ds_fuyou.zero.saving.checkpoint_outline import outline_of
from ds_fuyou.zero.saving.checkpoint_state import CheckpointState, UniversalReader, read_universal_state
from ds_fuyou.zero.saving.frozen_base import digest_of
from ds_fuyou.zero.saving.training_state import TrainingState
from ds_fuyou.zero.sleeping import fall_asleep
from ds_fuyou.zero.stock import (
    bound_gathered,
    combined_grad_norm,
    forget_modules,
    is_boundary,
    iter_module_params,
    reused_numel,
    staying_numel,
    watch_releases,
    without_prefetch_to_host,
)

__all__ = ["FuyouStage3Optimizer"]

logger = logging.getLogger("ds_fuyou")


class FuyouStage3Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """Drop-in for DeepSpeedZeroOptimizer_Stage3 when the JSON has an active fuyou block."""

    rank_state: RankState
    run_plan: RunPlan
    checkpoint_state: CheckpointState
    training_state: TrainingState
    hp_access: HpAccess
    _were_gathered: Sequence[Parameter] = ()
    _monitor: StepMonitor | None = None
    _across_batches: AcrossBatches | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self.undo_build()
            raise

    __init__.__wrapped__ = DeepSpeedZeroOptimizer_Stage3.__init__  # type: ignore[attr-defined]  # compat.py looks at it

    # ---- memory: none of stock's model-sized buffers -------------------------------------------------------

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        """Stock: one pinned flat buffer a group. Here P16 has its place in the rank state."""
        for _ in self.trainable_param_groups:
            self.param_groups_fp16_flat_cpu_memory.append(torch.empty(0, dtype=self.dtype, device="cpu"))

    def _setup_for_real_optimizer(self) -> None:
        """Stock: fp32 partitions, states, gradient buffers. Here: plan, store, streamed initialisation."""
        try:
            self._build(current_activation())
        except BaseException:
            self.parameter_offload.destroy()  # the model must not keep the hooks of an engine that was never built
            self._forget_modules()
            raise

    def _build(self, activation: Activation) -> None:
        require_type(self.dtype)
        if getattr(self, "torch_autocast_gradscaler", None) is not None:  # of an engine before: it is global
            raise FuyouConfigError(
                "another engine of this process has torch_autocast with float16, and DeepSpeed scales the losses of "
                "all engines by it; ours does not work with that scaler. Use bfloat16 there"
            )
        release_gathered(self.module)  # DeepSpeed gathers some on the way here, if a forward before was interrupted
        if activation.config.activations.block_classes:
            model_blocks(self.module, activation.config)  # a name that is none is told before anything is built
        kind = optimizer_kind(self.optimizer, BF16 if self.master_weights_and_grads_dtype is torch.bfloat16 else FP32)
        model = TrainedModel(
            activation,
            self.fp16_groups,
            self._names(),
            kind,
            self.dtype,
            self.gradient_accumulation_dtype,
            self.gradient_accumulation_steps,
            rank_device(pin_memory=activation.pin_memory),
            reused_numel(self.parameter_offload),
            staying_numel(self.parameter_offload.get_param_coordinator()),
        )
        self._known = known_run(model, self.module)
        self._group_of_sub_group = [self.sub_group_to_group_id[i] for i in range(len(self.fp16_groups))]
        self.rank_state = RankState(model, self._hypers(), self._known.profile)
        try:
            owners.update(dict.fromkeys(self._owned_ids(), self))
            self._build_on(activation)
        except BaseException:
            self._disown()
            self.rank_state.close()  # no engine will: threads, files and memory go with the exception
            raise

    def _names(self) -> dict[Parameter, str]:
        """Of the model's parameters, in their order, and of what a script trains beside it (a loss's own weights)."""
        names = {param: name for name, param in self.module.named_parameters()}
        trained = [param for group in self.fp16_groups for param in group]
        for number, param in enumerate(param for param in trained if param not in names):
            names[param] = f"beside the model.{number}"
        return names

    def _build_on(self, activation: Activation) -> None:
        """Fills the rank state and takes the places of stock's buffers and hooks."""
        with all_or_none("put its parameters and states into their place"):
            self.rank_state.initialize(lambda param: param.nvme_swapper.values(param))
        for ids in self.fp16_partitioned_groups_flat_id:
            placeholder = torch.empty(0, dtype=self.master_weights_and_grads_dtype, device="cpu")
            placeholder.ds_id = f"{ids[0]}_{ids[-1]}"
            placeholder.requires_grad = True
            self.fp32_partitioned_groups_flat.append(placeholder)
        self._show_params()
        self.rank_state.params_placed = self._params_placed
        for group in self.optimizer.param_groups:
            group["params"] = []
        hide_states(self.optimizer)
        # Nothing of stock's buffer, but of its type: DeepSpeed's own helpers ask for its device.
        self.grad_partitions_flat_buffer = torch.empty(0, dtype=self.gradient_accumulation_dtype, device="cpu")
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, torch.Tensor] = {}
        self.subgroup_to_device = dict.fromkeys(range(len(self.fp16_groups)), "cpu")
        self.gradient_flow = GradientFlow(
            self,
            self.rank_state,
            self._hypers,
            lambda: self._multiplier(None),
            lambda: self.run_plan.holds_updates,
        )
        self.checkpoint_state = CheckpointState(self.rank_state, self.optimizer, self._group_of_sub_group, self._hypers)
        generators = activation.config.random_states
        self.training_state = TrainingState(self, self.module, all_generators=generators == "all")
        self.hp_access = HpAccess(self.rank_state, self.master_weights_and_grads_dtype, lambda: is_boundary(self))
        self._watch_modules(self._attach_activations(activation))

    def _show_params(self) -> None:
        for sub_group in range(len(self.fp16_groups)):
            self.fp16_partitioned_groups_flat[sub_group] = self.rank_state.core.flat_params(sub_group)

    def _params_placed(self) -> None:
        """Where stock, and its coordinator, look for parameters."""
        self._show_params()
        self._bound_gathered()

    def _bound_gathered(self) -> None:
        state = self.rank_state
        if state.device.is_host:
            coordinator = self.parameter_offload.get_param_coordinator()
            bound_gathered(coordinator, state.parameters, self.dtype.itemsize)

    def _attach_activations(self, activation: Activation) -> GatheredIndex:
        """Swapping or recomputing as configured; the index learns where parameters are gathered."""
        state = self.rank_state
        index = GatheredIndex()
        given = ActivationInput(
            activation,
            state.device,
            state.clock,
            state.core.io,
            arena_bytes=state.plan.activation_bytes,
            kept_bytes=state.plan.kept_activation_bytes,
            smallest_bytes=state.plan.smallest_swapped_bytes,
            storage_budget=None if activation.config.nvme_budget_bytes == "auto" else state.unused_storage_bytes,
            trace=state.trace,
        )
        state.activations = attach_activations(self.module, index, given)
        auto = attach_auto(self.module, state.activations, given)
        ahead = run_ahead(state.device)
        if ahead is not None:
            coordinator = self.parameter_offload.get_param_coordinator()
            watch_releases(coordinator, ahead.let_go, state.device.current_stream)  # before what stays is left out
            self._across_batches = AcrossBatches(coordinator, state.device, lambda: is_boundary(self))
        self.run_plan = RunPlan(state, self.module, auto, self._leave_out, self._known, self._across_batches)
        return index

    def _leave_out(self, secs: float, work: LaneTimes) -> None:
        self.rank_state.report.leave_out(secs, work)
        if self._monitor is not None:
            self._monitor.leave_out(secs, work)

    def report_to(self, engine: Any) -> None:
        """The engine that this optimizer was built for: its monitors are told of every step."""
        self._monitor = StepMonitor(engine, self.rank_state, self._tier_bytes)

    @contextmanager
    def engine_step(self, engine: Any) -> Iterator[None]:
        """Around ``engine.step()``: what it applies is committed when it has ended, with the engine's state of
        training. Where an exception or a signal ends it, the step before stays the last that can be gone on from."""
        core = self.rank_state.core
        if core.keeps_steps and self.rank_state.activation.config.resume == "auto":
            self.training_state.step_begins(engine)
        core.commits.holds_orders, self._is_ending = True, False
        try:
            yield
        except Exception:  # of one rank, it may be: the others come to the collectives of the step's end
            if self._is_ending:
                self._end_step()
            raise
        finally:
            core.commits.holds_orders = False
        if core.commits.has_unordered:
            core.commits.order(self.training_state.take(engine) if core.keeps_steps else None)
        if self._is_ending:
            self._end_step()

    def require_between_steps(self, what: str) -> None:
        """
        Raises:
            FuyouStateError: the engine is within its ``step()``.
        """
        if self.rank_state.core.commits.holds_orders:
            raise FuyouStateError(
                f"{what} was called within engine.step(), by a signal handler, say: what there is of the model is then "
                "of two steps. Let the handler set a flag, and call it when step() has returned"
            )

    def resume_engine(self, engine: Any) -> None:
        """The engine is built: what a resumed run was is put back, and its files are this one's."""
        state = self.rank_state
        self.training_state.attach(engine, digest_of(engine))
        resumed: Any = state.resumed
        with all_or_none("describe its engine, or take over what that run was"):
            if state.store is not None and state.core.options.num_slots >= 2:  # states may leave memory later
                try:
                    state.store.describe_engine(outline_of(engine))
                except FuyouStorageError as error:
                    if resumed is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    logger.warning("%s: a checkpoint recovered from it will have that run's configuration", error)
            if resumed is not None and state.store is not None:
                self.training_state.put_back(engine, resumed.meta["training"])
                state.store.adopt(keep=state.activation.config.keep_state)

    def checkpoint_loaded(self, engine: Any) -> None:
        """``engine.load_checkpoint()`` has loaded one."""
        self.training_state.loaded_over(engine)
        core = self.rank_state.core
        if core.keeps_steps:
            core.commits.replaced(self.training_state.take(engine, begins_step=True))

    def _watch_modules(self, index: GatheredIndex) -> None:
        """Before DeepSpeed fetches a module's parameters, ours are made available and read-ahead moves on."""
        coordinator = self.parameter_offload.get_param_coordinator()
        watch_gathers(self.module, coordinator)
        self._forward_hooks = watch_forwards(self.module)
        stock_fetch = coordinator.fetch_sub_module
        state = self.rank_state
        self._token_count = count_tokens(state, self.module)
        self._tier_bytes = TierBytes(state, state.device.allocated_bytes)
        clock, on_host = state.clock, state.device.is_host
        compute = None if state.trace is None else ComputeSpans(state.trace, self.module, self._tier_bytes, clock)
        self._compute_spans = compute
        sweep = None if on_host else self.gradient_flow.sweep

        def fetch_sub_module(current_submodule: torch.nn.Module, forward: bool) -> None:
            if compute is not None:
                compute.enter(current_submodule, forward)
            if forward and sweep is not None:
                sweep()
            params = iter_module_params(current_submodule)
            recorder = self.run_plan.clock.recorder
            # Where the device is the host nobody tells waits apart.
            waits = not on_host and any(param.ds_status is not ZeroParamStatus.AVAILABLE for param in params)
            if waits or recorder is not None:
                with (
                    nullcontext() if recorder is None else recorder.paused(),
                    clock.within(Phase.PARAMETERS) if waits else nullcontext(),
                ):
                    state.before_module(params)
                    stock_fetch(current_submodule, forward)
            else:
                if params:
                    state.before_module(params)
                stock_fetch(current_submodule, forward)
            if params and state.activations is not None:
                index.note(params)

        coordinator.fetch_sub_module = for_training(fetch_sub_module)
        without_prefetch_to_host(coordinator)
        self._bound_gathered()

    def _hypers(self) -> list[GroupHyper]:
        """The hyperparameters of every sub-group as they are now."""
        groups = [GroupHyper.of(group) for group in self.optimizer.param_groups]
        return [groups[i] for i in self._group_of_sub_group]

    # ---- gradients: stock's hooks and ends, as GradientFlow serves them ------------------------------------

    def create_reduce_and_remove_grad_hooks(self) -> None:
        with shapes_alone(param for group in self.fp16_groups for param in group):
            super().create_reduce_and_remove_grad_hooks()

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Parameter) -> None:
        self.gradient_flow.collect(param)

    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: list[torch.Tensor]) -> None:
        self.gradient_flow.hand_over(params_to_release, grad_partitions)

    def independent_gradient_partition_epilogue(self) -> None:
        self.gradient_flow.end_micro_batch()
        for param_id in self.params_already_reduced:
            self.params_already_reduced[param_id] = False
        self._epilogue_ran_this_backward = True
        self.run_plan.clock.backward_ended()

    def _finalize_offload_gradient_accumulation(self) -> None:
        self.gradient_flow.end_unmanaged()

    def complete_grad_norm_calculation_for_cpu_offload(self, params: list[Parameter]) -> torch.Tensor:
        self.gradient_flow.put_norms(params)
        norm: torch.Tensor = super().complete_grad_norm_calculation_for_cpu_offload(params)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradient_flow.forget()
        if set_to_none and self.rank_state.device.is_host:  # stock fails for those that are still there
            for param in self.rank_state.model.trained:
                param.grad = None
        super().zero_grad(set_to_none)
        self.reset_cpu_buffers()

    # ---- the step -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One transaction: validate what backward prepared, publish it or redo it, or skip the step."""
        self.rank_state.require_parameters()
        self.checkpoint_state.require_whole()
        self._raise_failed_save()
        trace, clock = self.rank_state.trace, self.rank_state.clock
        if self._compute_spans is not None:
            self._compute_spans.leave()
        clock.enter(Phase.STEP)
        try:
            with nullcontext() if trace is None else trace.span(Lane.OPTIMIZER, "step()"):
                self._step()
        except BaseException:
            self.gradient_flow.step_was_cut_short()
            raise
        finally:
            clock.enter(Phase.OUTSIDE)

    def _raise_failed_save(self) -> None:
        """Before anything is changed: the script may go on, and step again."""
        save = self.checkpoint_state.save
        if save is not None and save.failure is not None:
            self.rank_state.core.check()
            save.raise_failure()

    def _step(self) -> None:
        require_hidden(self.optimizer)
        if self.rank_state.activations is not None:
            self.rank_state.activations.end_step()
        self._pre_step()
        self._partition_all_parameters()
        self.gradient_flow.finish()
        core = self.rank_state.core
        core.check()
        core.commits.settle()
        self._overflow_check_and_loss_scale_update_compat()
        if self.overflow:
            self.run_plan.step_skipped()
            self.rank_state.step_skipped()
            return
        run_hooks(self.optimizer)
        multiplier = self._multiplier(self._scaled_norm)
        core.apply(self._hypers(), multiplier, expected_multiplier=self._multiplier(None))
        self.rank_state.step_applied()
        self.reset_cpu_buffers()
        self.rank_state.report.step(self.rank_state)
        if self._monitor is not None:
            self._monitor.step_applied()
        self.invalidate_secondary_tensor()
        self._is_ending = True
        if not core.commits.holds_orders:
            self._end_step()

    def _end_step(self) -> None:
        """The step is committed, or its commit is ordered. P16 may move: nothing is gathered yet."""
        self._is_ending = False
        self.run_plan.step_applied()
        self._gather_persistent()

    def _overflow_check_and_loss_scale_update_compat(self) -> None:
        """Stock's order of decisions: raw overflow, norm, invalid norm, loss scale, clean-up, global norm."""
        self.overflow = False
        if self.dtype == torch.float16:
            self.check_overflow()
        self._scaled_norm = None
        if not self.overflow:
            self._scaled_norm, invalid = combined_grad_norm(self._get_norm_groups())
            self.overflow = self.overflow or invalid
        self._update_scale(self.overflow)
        if self.overflow:
            self._global_grad_norm = float("inf")
            self.rank_state.core.skip()
            self._overflow_clean_up(self.loss_scale)
            return
        self._global_grad_norm = self._scaled_norm / self.loss_scale

    def _multiplier(self, total_norm: torch.Tensor | None) -> float:
        """The fp32 factor by which stock's ``unscale_and_clip_grads`` multiplies every gradient."""
        combined: Any = self.loss_scale
        if self.clip_grad > 0.0 and total_norm is not None:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            combined = torch.clamp(clip, min=1.0) * self.loss_scale
        return float(torch.ones(1, dtype=torch.float32, device="cpu").mul_(1.0 / combined).item())

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Stock reads a buffer of all gradients; here their norms tell."""
        from deepspeed import comm as dist

        local = not self.rank_state.core.intake.norms.all_finite()
        flag = get_accelerator().ByteTensor([int(local)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=flag, op=dist.ReduceOp.MAX)
        return bool(flag[0].item())

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        if value is not self.optimizer.state:
            refuse_change()

    # ---- single states and gradients, as DeepSpeed's public functions ask for them ---------------------------

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        """True: readers and writers of single states go through our overrides, which write back."""
        return True

    def _get_fp32_opt_state_partition(
        self, param: Parameter, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        return self.hp_access.state(param, optim_state_key, to_write=not release_swap_buffers)

    def _optimizer_states_and_gradient_swap_out(self, sub_group_id: int, timer_names: Any = None) -> None:
        self.hp_access.put_state()

    def set_full_hp_param(self, value: torch.Tensor, param: Parameter, optim_state_key: str | None = None) -> None:
        self.hp_access.set_state(param, value, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: Parameter, optim_state_key: str | None = None) -> None:
        self.hp_access.set_local_state(param, value, optim_state_key)

    def _get_fp32_grad_state_partition(self, param: Parameter, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        return self.hp_access.gradient(param, to_write=not release_swap_buffers)

    def _writeback_swap_state(self, sub_group_id: int, write_opt_state: bool, write_gradients: bool) -> None:
        self.hp_access.put_gradient()

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Parameter) -> None:
        self.hp_access.set_gradient(param, value)

    def set_local_grad_for_param(self, value: torch.Tensor, param: Parameter) -> None:
        self.hp_access.set_local_gradient(param, value)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Parameter]) -> None:
        """Applies ``update_func(full_gradient, param)`` to every trainable parameter's gradient."""
        for param in param_list:
            if param.requires_grad:
                self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Copies of all gradient partitions, of the type of stock's masters: ``[sub-group][index in it]``."""
        return {
            group_index: {i: self.hp_access.gradient(param, to_write=False)[0] for i, param in enumerate(group)}
            for group_index, group in enumerate(self.fp16_groups)
        }

    def offload_states(
        self,
        include: Any = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """As the engine's: of what ``include`` names nothing is on the device but what goes all the same."""
        self.rank_state.require_parameters()
        fall_asleep(self.rank_state, self, device, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        self.rank_state.require_parameters()
        self.rank_state.wake()

    # ---- checkpoints --------------------------------------------------------------------------------------

    def _rigid_state_dict(self) -> dict[str, Any]:
        return {
            **self.state_header(),
            LOSS_SCALER: self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            **self.checkpoint_state.entries(),
        }

    def state_header(self) -> dict[str, Any]:
        """What a state dictionary says in every step."""
        return {ZERO_STAGE: ZeroStageEnum.weights, PARTITION_COUNT: self.partition_count}

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        if self.checkpoint_state.meetings is None:
            self.checkpoint_state.check_together(state_dict, load_optimizer_states=load_optimizer_states)
        with self._replaced():
            self.checkpoint_state.load(state_dict, load_optimizer_states=load_optimizer_states)
        self.loss_scaler = state_dict[LOSS_SCALER]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]

    def _restore_from_bit16_weights(self) -> None:
        with self._replaced():
            self.checkpoint_state.restore_from_params()

    def _replaced(self) -> AbstractContextManager[None]:
        """``load_checkpoint`` has partitioned all parameters by then. Nothing is copied from P16 that changes."""
        self.rank_state.device.synchronize()
        return nullcontext() if self.checkpoint_state.meetings is not None else replaced(self.module)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        compares = self.rank_state.activation.config.checksum
        saved = read_universal_state(checkpoint_dir, compares=compares)
        self.checkpoint_state.load_universal(saved, self._universal_reader(checkpoint_dir))
        self._load_global_state_stage3(saved)

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(
        self, checkpoint_dir: str, load_from_fp32_weights: bool
    ) -> None:
        reader = self._universal_reader(checkpoint_dir)
        self.checkpoint_state.load_universal_module(reader, load_from_fp32_weights=load_from_fp32_weights)

    def _universal_reader(self, checkpoint_dir: str) -> UniversalReader:
        return UniversalReader(self.rank_state, checkpoint_dir, self.load_hp_checkpoint_state, self.param_names)

    def checkpoint_event_prologue(self) -> None:
        available = ZeroParamStatus.AVAILABLE
        self._were_gathered = [param for param in self.persistent_parameters if param.ds_status is available]
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        if self.checkpoint_state.meetings is not None:
            return  # of a load: when all ranks have loaded theirs
        again, self._were_gathered = self._were_gathered, []
        if not self._gather_persistent() and again:  # in the middle of a forward, it may be
            again[0].all_gather(again)
        self.invalidate_secondary_tensor()

    def _gather_persistent(self) -> bool:
        """As stock, where every update ends inside ``step()`` anyway, and where all that is trained is persistent: that
        is small, and scripts read it as they would without ZeRO (programs save what a plain ``state_dict()`` has of
        adapters, one rank alone). So, too, where torch_autocast has several ranks gather in 16 bits: this gather does
        not round, the one before a use does. Otherwise persistent parameters are gathered at their first use: here it
        would wait for all of their updates. Whether they are."""
        waits = self.rank_state.core.options.overlap is not Overlap.BACKWARD_AND_FORWARD
        if not self.persistent_parameters or not (waits or self._trains_persistent or self._gathers_round):
            return False
        self.persistent_parameters[0].all_gather(self.persistent_parameters)
        return True

    @cached_property
    def _trains_persistent(self) -> bool:
        persistent = set(self.persistent_parameters)
        return all(param in persistent for group in self.fp16_groups for param in group)

    @cached_property
    def _gathers_round(self) -> bool:
        """Whether a gather before a use gives other values than the partitions hold."""
        params = self.persistent_parameters
        return get_world_size() > 1 and any(getattr(p, "comm_dtype", p.dtype) != p.dtype for p in params)

    def _owned_ids(self) -> list[int]:
        return [param.ds_id for group in self.fp16_groups for param in group]

    def _disown(self) -> None:
        for ds_id in self._owned_ids():
            if owners.get(ds_id) is self:
                del owners[ds_id]

    def _forget_modules(self) -> None:
        forget_modules(self.module, self.parameter_offload.get_param_coordinator())

    def undo_build(self) -> None:
        """What came behind our part has failed: the script gets no engine that it could destroy."""
        state = self.__dict__.get("rank_state")
        if state is None or state.has_ended:
            return
        with ExitStack() as ending:
            ending.callback(state.close)
            if state.store is not None and state.resumed is not None:  # also where all of it had been taken over
                ending.callback(state.store.keep_because, "the engine could not be built")
            self._take_off(ending, self.parameter_offload.destroy)

    def _take_off(self, ending: ExitStack, *stock_ends: Callable[[], None]) -> None:
        """All that is to end, from the last line to the first, what fails keeping nothing else from it: what the model
        has of an engine, and DeepSpeed's own ends.
        """
        ending.callback(unwatch_gathers, self.module, self.parameter_offload.get_param_coordinator())
        ours = (*self._forward_hooks, self._token_count)
        theirs = (hook for name in ("_grad_acc_hooks", "_leaf_module_hooks") for hook in self.__dict__.get(name, ()))
        for hook in (*ours, *theirs):
            ending.callback(hook.remove)
        ending.callback(self.run_plan.close)
        ending.callback(self._forget_modules)
        for end in stock_ends:
            ending.callback(end)
        ending.callback(self._disown)

    def lose_parameters(self) -> None:
        """Another training engine takes them: this one makes no further steps."""
        self._end("another engine trains its parameters now")

    def destroy(self) -> None:
        self._end("it was destroyed")

    def _end(self, why: str) -> None:
        if self.rank_state.has_ended:
            return
        # DeepSpeed's engine ends in whatever thread collects it
        with self.rank_state.device.as_current(), edits_kept(self.module):
            self._end_here(why)

    def _end_here(self, why: str) -> None:
        stock_ends = (super().destroy, partial(release_gathered, self.module))
        with ExitStack() as ending:
            ending.callback(self.fp16_partitioned_groups_flat.clear)
            ending.callback(self.rank_state.close, why)
            self._take_off(ending, *(partial(self._unless_failed, end) for end in stock_ends))
            if self._across_batches is not None:
                ending.callback(self._across_batches.forget)
            ending.callback(give_back, self.optimizer)

    def _unless_failed(self, part: Callable[[], None]) -> None:
        """Where the device has failed, its errors are told alone."""
        try:
            part()
        except RuntimeError as error:
            if not failure_of(self.rank_state.device):
                raise
            get_logger().error("while the engine ended, its device having failed: %s", error)
