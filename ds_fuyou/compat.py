# SPDX-License-Identifier: Apache-2.0
"""The private DeepSpeed names the package relies on, checked against the installed version.

`REQUIRED` is the whole list; whoever uses a new private name adds it here. `check` runs when a
configuration with an active block is first parsed, never without one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ds_fuyou.errors import FuyouCompatError
from ds_fuyou.log import log_once

__all__ = ["OLDEST", "REQUIRED", "TESTED", "RequiredName", "check", "problems"]

OLDEST = "0.18.9"
TESTED = ("0.18.9", "0.19.8")
OLDEST_TORCH = "2.7"


@dataclass(frozen=True)
class RequiredName:
    """A name that must exist, and the parameters it must accept.

    Attributes:
        module: importable module.
        attribute: dotted attribute of it; private methods by their mangled name.
        parameters: names that must be among its parameters; nothing is called when empty.
        why: who uses it and for what.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    why: str


def _of(module: str, owner: str, *names: tuple[str, str, str]) -> Iterator[RequiredName]:
    """``owner``: a class of the module, or nothing. Each of ``names``: attribute, parameters, why."""
    for name, parameters, why in names:
        yield RequiredName(module, f"{owner}.{name}" if owner else name, tuple(parameters.split()), why)


REQUIRED: tuple[RequiredName, ...] = (
    *_of(
        "deepspeed.runtime.config",
        "",
        ("DeepSpeedConfig.__init__", "self config mpu", "plugin: sees every parsed configuration"),
    ),
    *_of(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine",
        ("_configure_zero_optimizer", "self optimizer", "plugin: the stage-3 class is substituted while it runs"),
        ("offload_states", "self include device", "plugin: gathered parameters are released instead"),
        ("empty_partition_cache", "self", "plugin: called by offload_states"),
        (
            "_configure_optimizer",
            "self client_optimizer model_parameters",
            "plugin: empty groups stay; fuyou verify",
        ),
        ("backward", "self loss", "plugin: wrapped under fuyou verify"),
        ("step", "self", "plugin: wrapped, a step is committed at its end; under fuyou verify"),
        ("load_checkpoint", "self load_dir tag", "plugin: wrapped, what was loaded is committed"),
        ("_configure_checkpointing", "self", "plugin: the checkpoint writer is replaced after it"),
        (
            "save_checkpoint",
            "self save_dir tag client_state save_latest exclude_frozen_parameters",
            "plugin: wrapped, folders appear whole",
        ),
        ("load_module_state_dict", "self checkpoint", "plugin: wrapped, frozen parameters go to storage"),
        ("_save_checkpoint", "self save_dir tag", "zero: what a checkpoint says is left with the state files"),
        (
            "_get_zero_ckpt_name",
            "self checkpoints_path tag",
            "zero: what a checkpoint says is left with the state files",
        ),
        ("curriculum_learning_enabled", "self", "zero: what a checkpoint says is left with the state files"),
        ("random_ltd_enabled", "self", "zero: what a checkpoint says is left with the state files"),
        ("_configure_random_ltd_scheduler", "self configs", "zero: a resumed schedule is put back when it is made"),
        ("_get_param_fragment_func", "self param", "zero: replaced while a checkpoint is saved"),
        (
            "_get_zero_frozen_param_attributes",
            "self attr_func",
            "zero: replaced while a checkpoint without frozen parameters is saved",
        ),
        ("_copy_recovery_script", "self save_path", "zero: replaced while a checkpoint is saved"),
        ("reload_states", "self non_blocking", "plugin: replaced, host memory is pinned again"),
        ("_zero3_consolidated_16bit_state_dict", "self", "plugin: wrapped, a model that is saved is read ahead"),
    ),
    *_of(
        "deepspeed.monitor.monitor",
        "",
        ("MonitorMaster.write_events", "self event_list", "zero: is told of every step"),
    ),
    *_of(
        "deepspeed.runtime.zero.partition_parameters",
        "",
        (
            "AsyncPartitionedParameterSwapper",
            "ds_config model_dtype",
            "plugin: zero.Init builds it by this module-level name",
        ),
        ("NoGatherHandle.__init__", "self param", "gather_handles: subclassed under this module-level name"),
        ("NoGatherCoalescedHandle.__init__", "self params", "gather_handles: subclassed under this module-level name"),
        ("ZeroParamStatus.AVAILABLE", "", "activations: whether a saved tensor lies in a gathered parameter"),
        (
            "Init._partition_param",
            "self param buffer has_been_updated free_data",
            "plugin: wrapped, edits go where their own parameter lives",
        ),
        (
            "Init._convert_to_deepspeed_param",
            "self param",
            "plugin: wrapped, partitions are copied to the device without a wait",
        ),
        (
            "Init._ensure_availability_of_partitioned_params",
            "self params",
            "gather_handles: called, partitions are in host memory before they are copied to the device",
        ),
        (
            "Init._all_gather",
            "self param_list async_op hierarchy",
            "plugin: wrapped, parameters gathered together are read ahead",
        ),
        (
            "GatheredParameters.__init__",
            "self params modifier_rank fwd_module enabled",
            "plugin: wrapped, what is gathered to be saved is not written back",
        ),
        (
            "GatheredParameters.__enter__",
            "self",
            "plugin: wrapped, a forward inside lets nothing go that is gathered there",
        ),
    ),
    *_of(
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        (
            "__init__",
            "self module init_optimizer param_names timers ds_config clip_grad sub_group_size",
            "zero: base class of the optimizer",
        ),
        ("_create_param_groups_fp16_flat_cpu_memory", "self", "zero: replaced, no flat host copy of P16"),
        ("_setup_for_real_optimizer", "self", "zero: replaced, no model-sized host buffers"),
        ("create_reduce_and_remove_grad_hooks", "self", "zero: wrapped, hooks are hung without values"),
        ("reduce_independent_p_g_buckets_and_remove_grads", "self param", "zero: replaced, gradients leave by block"),
        (
            "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
            "self params_to_reduce communication_data_type",
            "zero: called to average over ranks",
        ),
        (
            "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
            "self buffer_to_reduce communication_data_type",
            "zero: called with reduce_scatter off",
        ),
        (
            "partition_grads",
            "self params_to_release grad_partitions",
            "zero: replaced, G16 goes to the out-of-core optimizer",
        ),
        ("independent_gradient_partition_epilogue", "self", "zero: replaced, end of backward"),
        ("complete_grad_norm_calculation_for_cpu_offload", "self params", "zero: wrapped, norms by sub-group"),
        ("_constant_buffered_norm2", "self input", "zero: called, stock's own norm"),
        ("_get_norm_groups", "self", "zero: called in step"),
        ("zero_grad", "self set_to_none", "zero: wrapped, gradients that have left param.grad are forgotten too"),
        ("has_overflow", "self partition_gradients", "zero: replaced, no gradient buffer to look at"),
        ("_overflow_clean_up", "self prev_scale", "zero: called in step"),
        (
            "_get_fp32_opt_state_partition",
            "self param release_swap_buffers optim_state_key",
            "zero: replaced, single states",
        ),
        ("_get_fp32_grad_state_partition", "self param release_swap_buffers", "zero: replaced, single gradients"),
        (
            "set_full_hp_param",
            "self value param optim_state_key",
            "zero: replaced, single states of parameters that ranks cannot share out evenly",
        ),
        (
            "set_fp32_grad_for_param",
            "self value param",
            "zero: replaced, single gradients of parameters that ranks cannot share out evenly",
        ),
        (
            "load_hp_checkpoint_state_from_checkpoint_dir_stage3",
            "self checkpoint_dir",
            "zero: replaced, universal checkpoints",
        ),
        ("load_hp_checkpoint_state", "self folder key", "zero: called, one parameter of a universal checkpoint"),
        ("_load_global_state_stage3", "self sd", "zero: called, loss scale of a universal checkpoint"),
        ("_rigid_state_dict", "self", "checkpoint: replaced, stock's CPU-tier format"),
        ("_rigid_load_state_dict", "self state_dict load_optimizer_states", "checkpoint: replaced"),
        ("_partition_all_parameters", "self", "zero: called in step"),
        ("_pre_step", "self", "zero: called in step"),
    ),
    *_of(
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine",
        "",
        ("TorchCheckpointEngine", "config_params", "zero: base class of the checkpoint writer"),
    ),
    *_of(
        "deepspeed.runtime.zero.partitioned_param_coordinator",
        "PartitionedParameterCoordinator",
        ("__init__", "self prefetch_nvme", "zero: its prefetch to host memory is turned off"),
        ("fetch_sub_module", "self current_submodule forward", "zero: watched, the order of use"),
        ("reset_step", "self", "zero: watched, forwards of an engine without an optimizer"),
        (
            "release_and_reset_all",
            "self module",
            "zero: watched, the end of what stays on the device while gradients accumulate",
        ),
        (
            "_PartitionedParameterCoordinator__release_param",
            "self param free_data",
            "zero: watched, what stays on the device while gradients accumulate",
        ),
        (
            "_PartitionedParameterCoordinator__params_to_release",
            "self submodule_to_release step_id",
            "zero: forgets its answers when other parameters are on storage, or an engine has ended",
        ),
    ),
    *_of(
        "deepspeed.runtime.zero.partitioned_param_coordinator",
        "",
        ("iter_params", "module recurse", "zero: a module's parameters"),
    ),
    *_of(
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "",
        (
            "CheckpointFunction.forward",
            "ctx run_function all_outputs args",
            "activations: DeepSpeed's own checkpointing is taken over",
        ),
    ),
    *_of(
        "deepspeed.runtime.zero.parameter_offload",
        "",
        ("DeepSpeedZeRoOffload.destroy", "self", "zero: watched, the end of an engine without an optimizer"),
        ("FWD_MODULE_STACK", "", "zero: forgets the modules of an engine that has ended"),
    ),
    *_of(
        "deepspeed.runtime.zero.offload_config",
        "",
        ("DeepSpeedZeroOffloadOptimizerConfig", "", "plugin: what the engine is told about optimizer offloading"),
        ("DeepSpeedZeroOffloadParamConfig", "", "plugin: what zero.Init is told about parameter offloading"),
    ),
)


def check() -> None:
    """Verifies versions and names; warns once about an untested DeepSpeed.

    Raises:
        FuyouCompatError: DeepSpeed or torch is too old, or a name or parameter is missing.
    """
    version = installed_version("deepspeed")
    off = problems()
    torch_version = installed_version("torch")
    if _number(torch_version) < _number(OLDEST_TORCH):
        off.insert(0, f"torch is {torch_version}, must be {OLDEST_TORCH} or newer")
    if _number(version) < _number(OLDEST):
        off.insert(0, f"DeepSpeed must be {OLDEST} or newer")
    if off:
        raise FuyouCompatError(
            f"ds_fuyou does not fit the installed DeepSpeed {version}: {'; '.join(off)}. Versions that work: "
            f'{TESTED[0]} .. {TESTED[-1]}. Install one of them, or set "enabled": false in the fuyou block'
        )
    if _number(version) not in [_number(tested) for tested in TESTED]:
        log_once(
            logging.WARNING,
            f"DeepSpeed {version} is untested with ds_fuyou (tested: {', '.join(TESTED)}); "
            f"every private name it needs is present",
        )


def problems(required: tuple[RequiredName, ...] | None = None) -> list[str]:
    """One line for each name that is missing or has lost a parameter; empty when all is well."""
    lines = []
    for name in REQUIRED if required is None else required:
        problem = _problem(name)
        if problem:
            lines.append(f"{name.module}.{name.attribute} {problem} (needed for {name.why})")
    return lines


def _problem(name: RequiredName) -> str | None:
    try:
        found: object = importlib.import_module(name.module)
    except ImportError as error:
        return f"cannot be imported: {error}"
    for part in name.attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            return "does not exist"
    # The plugin's own wrappers carry the original's signature by functools.wraps.
    if not name.parameters or not callable(found):
        return None
    try:
        accepted = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return "has no signature to check"
    kinds = [parameter.kind for parameter in accepted.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        return None  # a decorator of DeepSpeed's (instrument_w_nvtx) hides the signature; the name exists
    missing = [parameter for parameter in name.parameters if parameter not in accepted]
    return f"lacks the parameters {', '.join(missing)}" if missing else None


def installed_version(distribution: str) -> str:
    """Also of one that lies on the path without metadata. Raises ImportError if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        module = importlib.import_module(distribution)
        return str(getattr(module, "__version__", "0"))


def _number(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))
