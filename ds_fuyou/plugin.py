# SPDX-License-Identifier: Apache-2.0
"""The only file that patches DeepSpeed.

[Note: two stages]
`install` runs whenever DeepSpeed is imported in a process that has the package, block or no block. It
patches one thing: `DeepSpeedConfig.__init__`, which then looks for the block after the original has
run. Everything else in `PATCH_POINTS` is applied when the first configuration with an active block is
parsed. A process that never sees a block therefore runs DeepSpeed's own code everywhere else.
`uninstall` undoes all. `VERIFY_POINTS` are applied in the runs of ``fuyou verify`` alone.

[Note: accelerate]
The Trainer and Accelerate fill in every value "auto" of the JSON before DeepSpeed sees it, and refuse
those they do not know, which would be ours. `FOREIGN_POINTS` keeps their hands off the block. These
points belong to another package: they are patched when it is imported, if ever, and pass everything
but the block's own keys on.

A configuration is parsed several times in one run (by zero.Init, by initialize, by the offload
handler); each parse is rewritten in the same way and only the first is announced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pkgutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_fuyou.autoload import forget, when_imported
from ds_fuyou.config import BLOCK_KEY, FuyouConfig
from ds_fuyou.ds_json import (
    SUPPORTED_OPTIMIZERS,
    Activation,
    activation_of,
    activation_scope,
    load_activation,
)
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.log import get_logger, is_news, log_once
from ds_fuyou.version import __version__

__all__ = ["FOREIGN_POINTS", "PATCH_POINTS", "PatchPoint", "announce", "install", "is_installed", "uninstall"]


@dataclass(frozen=True)
class PatchPoint:
    """One replaced attribute of DeepSpeed, or of a package that completes its configuration.

    Attributes:
        module: module that holds it.
        attribute: dotted attribute inside the module.
        why: what the replacement achieves.
        replace: original -> replacement. Undone by putting the original back.
        on_import: applied by `install`; otherwise when a block is first seen.
    """

    module: str
    attribute: str
    why: str
    replace: Callable[[Any], Any]
    on_import: bool = False

    def owner_and_name(self) -> tuple[Any, str]:
        owner, _, name = self.attribute.rpartition(".")
        return pkgutil.resolve_name(f"{self.module}:{owner}"), name


def _from_zero(name: str) -> Callable[[Any], Any]:
    """A replacement by its name in zero/, of which nothing is imported before a block is seen."""

    def replace(original: Any) -> Any:
        return pkgutil.resolve_name(f"ds_fuyou.zero.{name}")(original)

    return replace


def _config_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        activation = load_activation(self._param_dict)
        if activation is not None:
            activation = _recorded(self, activation)
        if activation is not None:
            _activate(self, activation)
            _keep_device_busy(self)

    return __init__


def _keep_device_busy(ds_config: Any) -> None:
    """DeepSpeed's throughput timer waits for the device before and after every micro-batch, so that each begins with an
    empty device and an empty link. Here it does not, unless the JSON says ``"synchronized": true``: a step waits for
    its norm anyway, so that what the timer says of whole steps stays right.
    """
    timer = ds_config.timers_config
    if "synchronized" not in timer.model_fields_set:
        timer.synchronized = False


def _recorded(ds_config: Any, activation: Activation) -> Activation | None:
    """The block as it runs: ``fuyou verify`` records this process, apart from other runs; None: as the reference."""
    if VERIFY_VARIABLE not in os.environ:
        return activation
    from ds_fuyou.zero.verification import Verification, apart, rewrite_to_stock

    _apply(VERIFY_POINTS)
    verification = Verification.from_environment()
    if verification is None:
        return activation
    if verification.mode != "stock":
        return apart(activation, verification)
    rewrite_to_stock(ds_config)
    return None


def _swapper_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def make_swapper(ds_config: Any, model_dtype: Any) -> Any:
        if activation_of(ds_config) is None:
            return original(ds_config, model_dtype)
        from ds_fuyou.zero.parameters.param_swapper import FuyouParameterSwapper

        return FuyouParameterSwapper(ds_config, model_dtype)

    return make_swapper


def _configure_zero_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def configure(self: Any, optimizer: Any) -> Any:
        from ds_fuyou.zero.parameters import handover, inference

        activation = activation_of(self._config)
        if activation is None:
            if optimizer is not None:  # others only compute with the parameters, and ask whoever has them
                handover.bring_home(self)
                return original(self, optimizer)
            activation = handover.activation_of_params(self.module)
            built = original(self, optimizer)
            if activation is not None:  # a program that evaluates makes a configuration of its own, as Lightning
                inference.watch(self, built, activation)
                handover.report_inference(self.module)
            return built
        # SuperOffload derives from the stock class and is first imported in the original: it must not
        # be while the name below stands for ours.
        from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401
        from deepspeed.runtime.zero import stage3

        from ds_fuyou.zero.stage3 import FuyouStage3Optimizer

        # The original imports the class by this name at call time. isinstance checks elsewhere need
        # the real one, so it is put back at once.
        stock = stage3.DeepSpeedZeroOptimizer_Stage3
        stage3.DeepSpeedZeroOptimizer_Stage3 = FuyouStage3Optimizer
        try:
            _refuse_optimizer(optimizer, self._config.bfloat16_config.bf16_master_weights_and_grads)
            _refuse_model_parallelism(self, activation.config)
            with activation_scope(activation):
                handover.take_over(self, optimizer)
                built = original(self, optimizer)
        except BaseException:
            _remove_hooks(self)
            raise
        finally:
            stage3.DeepSpeedZeroOptimizer_Stage3 = stock
        if isinstance(built, FuyouStage3Optimizer):
            built.report_to(self)
        elif optimizer is None:
            inference.watch(self, built, activation)
            handover.report_inference(self.module)
        return built

    return configure


def _remove_hooks(engine: Any) -> None:
    """An engine that could not be built must not be called by its model's next engine."""
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        hook = getattr(engine, name, None)
        if hook is not None:
            hook.remove()


def _configure_checkpointing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def configure(self: Any) -> None:
        original(self)
        if activation_of(self._config) is not None:
            from ds_fuyou.zero.saving.checkpoint_engine import replace_writer

            replace_writer(self)
        if _is_ours(self.optimizer):
            try:
                self.optimizer.resume_engine(self)  # the scheduler is there by now
            except BaseException:
                self.optimizer.undo_build()
                _remove_hooks(self)
                raise

    return configure


def _is_ours(optimizer: Any) -> bool:
    from ds_fuyou.zero.stock import is_ours

    return is_ours(optimizer)


def _engine_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.optimizer.engine_step(self) if _is_ours(self.optimizer) else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return step


VERIFY_VARIABLE = "DS_FUYOU_VERIFY"
VERIFY_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine._configure_optimizer",
        "fuyou verify: the reference gets DeepSpeed's own optimizer",
        _from_zero("verification:own_optimizer"),
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.backward",
        "fuyou verify: notes the loss",
        _from_zero("verification:record_backward"),
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.step",
        "fuyou verify: notes the norm, stops",
        _from_zero("verification:record_step"),
    ),
)


PATCH_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "deepspeed.runtime.config",
        "DeepSpeedConfig.__init__",
        "finds the block, checks it, and attaches the activation",
        _config_init,
        on_import=True,
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine._configure_optimizer",
        "groups without parameters stay in the script's optimizer",
        _from_zero("optimizer_object:keeping_empty_groups"),
    ),
    PatchPoint(
        "deepspeed.runtime.zero.partition_parameters",
        "AsyncPartitionedParameterSwapper",
        "zero.Init builds our parameter swapper",
        _swapper_factory,
    ),
    PatchPoint(
        "deepspeed.runtime.zero.partition_parameters",
        "Init._partition_param",
        "an edit goes where its own parameter lives, not where the first of the context does",
        _from_zero("parameters.param_swapper:through_own_swapper"),
    ),
    PatchPoint(
        "deepspeed.runtime.zero.partition_parameters",
        "Init._all_gather",
        "parameters gathered together are read ahead, as many at once as host memory is planned for",
        _from_zero("parameters.gathering:in_portions"),
    ),
    PatchPoint(
        "deepspeed.runtime.zero.partition_parameters",
        "GatheredParameters.__init__",
        "what is gathered to be saved is neither broadcast nor written back",
        _from_zero("parameters.param_swapper:gathers_to_read"),
    ),
    PatchPoint(
        "deepspeed.runtime.zero.partition_parameters",
        "GatheredParameters.__enter__",
        "a forward inside lets nothing go that the context has gathered, nor what was edited there",
        _from_zero("parameters.param_swapper:held_inside"),
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine._zero3_consolidated_16bit_state_dict",
        "a model that is saved is read ahead, not written back, and on storage where memory has no room",
        _from_zero("saving.consolidated:consolidated"),
    ),
    PatchPoint(
        "deepspeed.runtime.zero.parameter_offload",
        "register_external_parameter",
        "reading a small parameter that is not gathered yet leaves the order of training as it is",
        _from_zero("parameters.gathering:not_of_persistent"),
    ),
    PatchPoint(
        "deepspeed.runtime.zero.partition_parameters",
        "Init._convert_to_deepspeed_param",
        "a gather on several ranks does not wait for its partitions' copies to the device",
        _from_zero("parameters.gather_handles:copied_ahead"),
    ),
    PatchPoint(
        "deepspeed.runtime.zero.partition_parameters",
        "NoGatherHandle",
        "a gather on one rank does not stop the host",
        _from_zero("parameters.gather_handles:event_ordered"),
    ),
    PatchPoint(
        "deepspeed.runtime.zero.partition_parameters",
        "NoGatherCoalescedHandle",
        "a gather on one rank does not stop the host",
        _from_zero("parameters.gather_handles:event_ordered"),
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine._configure_zero_optimizer",
        "the engine builds our stage-3 optimizer",
        _configure_zero_optimizer,
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine._configure_checkpointing",
        "checkpoint files are streamed to storage and mapped from it",
        _configure_checkpointing,
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.save_checkpoint",
        "a checkpoint appears whole or not at all, also behind training",
        _from_zero("saving.checkpoint_engine:saving"),
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.load_module_state_dict",
        "frozen parameters on storage are loaded to storage",
        _from_zero("saving.checkpoint_engine:loading_module"),
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.step",
        "a step is committed with the engine's counters, scheduler and random states",
        _engine_step,
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.load_checkpoint",
        "a checkpoint on its way is waited for; all ranks load or none; what was loaded is committed at once",
        _from_zero("saving.loading:loading"),
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.offload_states",
        "releases gathered parameters; the stock function refuses offloaded ones",
        _from_zero("sleeping:offloading"),
    ),
    PatchPoint(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.reload_states",
        "pins host memory again, and reads ahead",
        _from_zero("sleeping:reloading"),
    ),
)


def _fill_match(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
        if ds_key_long.partition(".")[0] == BLOCK_KEY:
            return None
        return original(self, ds_key_long, *args, **kwargs)

    return fill_match


def _left_to_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def optimizer_state(self: Any, optimizer: Any) -> Any:
        if hasattr(getattr(optimizer, "_optimizer", optimizer), "checkpoint_state"):
            return {}
        return original(self, optimizer)

    return optimizer_state


FOREIGN_POINTS: tuple[PatchPoint, ...] = (
    *(
        PatchPoint(
            f"{package}.strategies.deepspeed",
            "DeepSpeedStrategy.optimizer_state",
            "Lightning asks for all states when it saves, and drops them: DeepSpeed saves them",
            _left_to_engine,
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
    PatchPoint(
        "accelerate.utils.dataclasses",
        "DeepSpeedPlugin.fill_match",
        'accelerate leaves values "auto" of the block alone',
        _fill_match,
    ),
)

_lock = threading.RLock()
_originals: dict[PatchPoint, Any] = {}


def install() -> None:
    """Applies the patch that looks for the block. Idempotent; needs DeepSpeed's engine imported."""
    _apply(point for point in PATCH_POINTS if point.on_import)
    for point in FOREIGN_POINTS:
        when_imported(point.module, functools.partial(_patch_foreign, point))


def uninstall() -> None:
    """Puts every original back. Engines that were built with a block keep working."""
    with _lock:
        for point in FOREIGN_POINTS:
            forget(point.module)
        for point, original in reversed(_originals.items()):
            owner, name = point.owner_and_name()
            setattr(owner, name, original)
        _originals.clear()


def is_installed() -> bool:
    """Whether the block would be seen by the next configuration that is parsed."""
    return any(point.on_import for point in _originals)


def _homes(config: FuyouConfig) -> Iterator[str]:
    """Class and tier, or how much of it the plan keeps in host memory."""
    shares = config.plan.resident_shares() if config.plan is not None else {}
    for name in ("parameters", "optimizer", "gradients"):
        share = shares.get(name)
        yield f"{name} {getattr(config, name).tier if share is None else f'{share:.0%} in host memory'}"


def announce(activation: Activation) -> None:
    """Says on rank 0 where state lives, and of every key that has no effect, once, that it has none."""
    from deepspeed import __version__ as deepspeed_version

    config = activation.config
    where = ", ".join(activation.state_paths) or "host memory only"
    log_once(
        logging.INFO,
        f"ds_fuyou {__version__} is active under DeepSpeed {deepspeed_version}; "
        f"tiers: {', '.join(_homes(config))}, activations {config.activations.tier}; state in {where}",
    )
    log_once(logging.DEBUG, f"patched: {', '.join(point.attribute for point in _originals)}")
    ignored = [item for item in activation.ignored if is_news(f"without effect: {item.key}")]
    if ignored:
        keys = "; ".join(f"{item.key} ({item.reason})" for item in ignored)
        log_once(logging.INFO, f"keys of the DeepSpeed configuration without effect under ds_fuyou: {keys}")


def _apply(points: Iterable[PatchPoint]) -> None:
    with _lock:
        for point in points:
            if point in _originals:
                continue
            owner, name = point.owner_and_name()
            original = getattr(owner, name)
            setattr(owner, name, point.replace(original))
            _originals[point] = original


def _patch_foreign(point: PatchPoint) -> None:
    """Never raises into the import of a package that the user may run without a block."""
    try:
        _apply([point])
    except AttributeError as error:
        get_logger().debug("%s.%s is not patched: %s", point.module, point.attribute, error)


def _activate(ds_config: Any, activation: Activation) -> None:
    """Checks DeepSpeed, applies the second stage and rewrites the parsed configuration."""
    from ds_fuyou import compat

    compat.check()
    _apply(point for point in PATCH_POINTS if not point.on_import)
    _rewrite(ds_config, activation)
    ds_config.fuyou = activation
    announce(activation)
    _tell_of_builds(ds_config)


def _tell_of_builds(ds_config: Any) -> None:
    """What DeepSpeed is about to do without a word: wait for a lock that was left, or compile."""
    from ds_fuyou.ops import stock_operators
    from ds_fuyou.storage.probe import may_be_shared

    directory = stock_operators.build_directory()
    left = stock_operators.left_locks(directory)
    if left and not may_be_shared(directory):
        stay = [lock for lock in left if not stock_operators.remove_lock(lock)]
        for lock in sorted({*left} - {*stay}):
            log_once(logging.INFO, f"{lock} is gone: who took it was killed, and all later starts would wait for it")
        left = stay
    if left:
        log_once(logging.WARNING, stock_operators.told_of_locks(left))
    missing = stock_operators.operators_to_compile(str(ds_config.optimizer_name or "Adam"))
    if missing:
        log_once(
            logging.INFO,
            f"DeepSpeed compiles {' and '.join(missing)} now, once in this environment: minutes without a word "
            f"(`{stock_operators.build_command(ds_config.optimizer_name)}` does it beforehand)",
        )


def _rewrite(ds_config: Any, activation: Activation) -> None:
    """Tells the engine that the optimizer is on the CPU and parameters are swapped.

    With the optimizer "on the CPU" the engine builds DeepSpeed's CPU optimizers and stage 3 keeps
    gradients and fp32 state in host memory, which the subclass takes over. With parameters "on NVMe"
    zero.Init builds a swapper, ours, for every tier. An optimizer object of the client passes; what
    cannot be mapped is refused by `_refuse_optimizer`, not by DeepSpeed's generic checks.
    """
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    pin_memory = activation.pin_memory
    # The swapper of a run that keeps everything in host memory never opens a file, but zero.Init
    # insists on a path.
    path = Path(activation.state_paths[0] if activation.state_paths else tempfile.gettempdir())
    ds_config.zero_config.offload_optimizer = DeepSpeedZeroOffloadOptimizerConfig(device="cpu", pin_memory=pin_memory)
    ds_config.zero_config.offload_param = DeepSpeedZeroOffloadParamConfig(
        device="nvme",
        nvme_path=path,
        pin_memory=False,  # what stays is copied to memory that is registered here, once
    )
    ds_config.zero_force_ds_cpu_optimizer = False
    ds_config.zero_allow_untested_optimizer = True


_KNOWN_OPTIMIZERS = frozenset(
    {
        ("torch.optim", "Adam"),
        ("torch.optim", "AdamW"),
        ("torch.optim", "Adagrad"),
        ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
        ("deepspeed.ops.adam", "FusedAdam"),
        ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
        ("deepspeed.ops.lion", "DeepSpeedCPULion"),
        ("deepspeed.ops.lion", "FusedLion"),
        ("apex.optimizers", "FusedAdam"),
    }
)


def _refuse_optimizer(optimizer: Any, has_bf16_masters: bool = False) -> None:
    """Only exact types whose arithmetic the core reproduces pass; a subclass may change `step`.

    None stands for an engine without an optimizer (inference under zero.Init).
    """
    if optimizer is None:
        return
    kind = type(optimizer)
    if has_bf16_masters and kind.__name__ != "DeepSpeedCPUAdam":
        raise FuyouConfigError(
            f"bf16.bf16_master_weights_and_grads is for DeepSpeedCPUAdam alone, in stock as here, not for "
            f"{kind.__module__}.{kind.__qualname__}; name Adam or AdamW in the DeepSpeed configuration, or leave the "
            f"key out"
        )
    for module, name in _KNOWN_OPTIMIZERS:
        if kind.__name__ == name and (kind.__module__ == module or kind.__module__.startswith(module + ".")):
            return
    raise FuyouConfigError(
        f"the optimizer {kind.__module__}.{kind.__qualname__} cannot run out of core; use "
        f"{', '.join(SUPPORTED_OPTIMIZERS)} in the DeepSpeed configuration, or an object of: "
        f"{', '.join(sorted(f'{module}.{name}' for module, name in _KNOWN_OPTIMIZERS))}"
    )


def _refuse_model_parallelism(engine: Any, config: FuyouConfig) -> None:
    """Tensor parallelism by an mpu object: norms and partitions would span groups that are not tested here. Several
    groups that share nothing train one model each, and may be killed at different steps.
    """
    from deepspeed import comm as dist

    mpu = getattr(engine, "mpu", None)
    if hasattr(mpu, "initialize_sequence_parallel"):  # DeepSpeed's own: what it calls parallel are sequences
        return
    size = getattr(mpu, "get_model_parallel_world_size", None) or getattr(
        mpu, "get_tensor_model_parallel_world_size", None
    )
    if size is not None and size() > 1:
        raise FuyouConfigError(
            f"the fuyou block cannot be combined with: mpu (model parallelism over {size()} ranks). "
            f"Use data parallelism over all ranks, or switch the block off"
        )
    shares = getattr(mpu, "get_data_parallel_world_size", None)
    if shares is not None and shares() < dist.get_world_size() and (config.durable or config.resume == "auto"):
        raise FuyouConfigError(
            f"the fuyou block cannot be combined with: mpu (a model for every {shares()} ranks) with resume or "
            f"durable, which are of all ranks. Leave them out, and go on from checkpoints"
        )
