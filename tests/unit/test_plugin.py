# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ds_fuyou import compat, plugin
from ds_fuyou.ds_json import current_activation
from ds_fuyou.errors import FuyouCompatError, FuyouConfigError
from tests.harness import forked
from tests.harness.ports import free_port
from tests.harness.runner import environment

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def _fresh_install() -> Iterator[None]:
    plugin.uninstall()
    plugin.install()
    yield
    plugin.uninstall()
    plugin.install()


def originals() -> dict[str, Any]:
    found = {}
    for point in plugin.PATCH_POINTS:
        owner, name = point.owner_and_name()
        found[point.attribute] = getattr(owner, name)
    return found


def parse(fuyou: object = None, **settings: Any) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    raw = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, **settings}
    if fuyou is not None:
        raw["fuyou"] = fuyou
    return DeepSpeedConfig(raw)


@pytest.mark.parametrize("block", [None, {"enabled": False}])
def test_off_means_off(block: dict[str, Any] | None) -> None:
    plugin.uninstall()
    stock = originals()
    plain = parse()
    plugin.install()
    config = parse(block)
    touched = {name for name, value in originals().items() if value is not stock[name]}
    assert touched == {"DeepSpeedConfig.__init__"}
    assert not hasattr(config, "fuyou")
    assert config.zero_config == plain.zero_config
    assert config.zero_force_ds_cpu_optimizer == plain.zero_force_ds_cpu_optimizer
    assert config.zero_allow_untested_optimizer == plain.zero_allow_untested_optimizer


@pytest.mark.parametrize(("told_to", "synchronized"), [({}, False), ({"synchronized": True}, True)])
def test_the_throughput_timer_waits_for_the_device_only_if_told_to(told_to: dict[str, Any], synchronized: bool) -> None:
    assert parse({}, timers={"throughput": told_to}).timers_config.synchronized is synchronized
    assert parse(timers={"throughput": told_to}).timers_config.synchronized


def test_a_key_without_effect_is_told_once_by_all_configurations(told: Callable[[], str]) -> None:
    """An engine and its reference model have two, which differ."""
    for sections in (("offload_optimizer",), ("offload_optimizer", "offload_param")):
        zero = {"stage": 3, **{name: {"device": "cpu", "buffer_count": 7} for name in sections}}
        parse({}, zero_optimization=zero)
    assert told().count("without effect") == 2
    assert told().count("offload_optimizer.buffer_count (the staging pool is sized from the model)") == 1
    assert told().count("offload_param.buffer_count") == 1


def test_block_is_attached_and_the_offload_sections_rewritten(told: Callable[[], str]) -> None:
    for _ in range(2):
        config = parse({"nvme_path": "/nvme0", "optimizer": {"tier": "nvme"}})
        assert config.fuyou.config.nvme_path == ("/nvme0",)
        assert config.zero_config.offload_optimizer.device == "cpu"
        assert config.zero_config.offload_param.device == "nvme"
        assert str(config.zero_config.offload_param.nvme_path) == "/nvme0"
        assert config.zero_force_ds_cpu_optimizer is False
    assert told().count("is active under DeepSpeed") == 1
    assert "patched" not in told(), "that is for who asks"
    assert "optimizer nvme" in told()
    assert "state in /nvme0" in told()


def test_without_a_path_state_is_in_host_memory(told: Callable[[], str]) -> None:
    config = parse({})
    assert config.zero_config.offload_param.nvme_path is not None
    assert "state in host memory only" in told()


def test_the_first_rank_alone_speaks(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    parse({})
    assert told() == ""


def test_the_users_dictionary_is_left_alone() -> None:
    raw = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "fuyou": {"nvme_path": "/nvme0"}}
    parse(**raw)
    assert raw == {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "fuyou": {"nvme_path": "/nvme0"}}


ENGINE_SCRIPT = """
import sys, types
import torch, deepspeed

class Reached(Exception):
    pass

def ours(module, init_optimizer, *rest, **settings):
    raise Reached(type(init_optimizer).__name__)

stand = types.ModuleType("ds_fuyou.zero.stage3")
stand.FuyouStage3Optimizer = ours
sys.modules[stand.__name__] = stand
model = torch.nn.Linear(2, 2)
ds_config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "fuyou": {}}
try:
    deepspeed.initialize(model=model, {arguments})
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ("config=ds_config, optimizer=torch.optim.AdamW(model.parameters())", "Reached: AdamW"),
        ("config=ds_config, optimizer=lambda params: torch.optim.Adam(params)", "Reached: Adam"),
        (
            'config={**ds_config, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}',
            "Reached: AdamW",
        ),
        (
            "config=ds_config, optimizer=torch.optim.SGD(model.parameters())",
            "FuyouConfigError: .*SGD cannot run",
        ),
        ('config={**ds_config, "zero_optimization": {"stage": 2}}', "FuyouConfigError: .*stage 3, found 2"),
    ],
)
def test_the_engine_reaches_our_optimizer(arguments: str, outcome: str, tmp_path: Path) -> None:
    code = ENGINE_SCRIPT.replace("{arguments}", arguments)
    _, said = forked.run(code, [], environment(0, 1, free_port()), tmp_path)
    assert re.search(outcome, said), said


def test_incompatible_deepspeed_is_an_error_with_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "REQUIRED", (compat.RequiredName("os.path", "gone", (), "a test"),))
    parse()
    with pytest.raises(FuyouCompatError, match=r"os\.path\.gone"):
        parse({})


def test_uninstall_puts_everything_back() -> None:
    plugin.uninstall()
    stock = originals()
    plugin.install()
    parse({})
    assert all(value is not stock[name] for name, value in originals().items())
    plugin.uninstall()
    assert originals() == stock
    assert not plugin.is_installed()


def test_install_is_idempotent() -> None:
    before = originals()
    plugin.install()
    assert originals() == before


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    stand = ModuleType(module)
    for name, value in names.items():
        setattr(stand, name, value)
    monkeypatch.setitem(sys.modules, module, stand)


def test_swapper_is_ours_only_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import partition_parameters

    active = parse({})
    stand_in(
        monkeypatch, "ds_fuyou.zero.parameters.param_swapper", FuyouParameterSwapper=lambda *given: ("ours", *given)
    )
    swapper = partition_parameters.AsyncPartitionedParameterSwapper
    assert swapper(active, torch.bfloat16) == ("ours", active, torch.bfloat16)
    with pytest.raises(AttributeError):  # stock's own constructor, which wants an nvme section
        swapper(parse(), torch.bfloat16)


class Engine:
    """What the wrapper of `_configure_zero_optimizer` needs of an engine."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.module = torch.nn.Linear(2, 2)


def test_stage3_class_is_substituted_only_while_the_engine_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import stage3

    class Ours:
        pass

    stock = stage3.DeepSpeedZeroOptimizer_Stage3
    active = parse({})
    stand_in(monkeypatch, "ds_fuyou.zero.stage3", FuyouStage3Optimizer=Ours)
    seen = []

    def original(engine: Engine, optimizer: Any) -> str:
        seen.append(stage3.DeepSpeedZeroOptimizer_Stage3)
        if engine._config is active:
            assert current_activation() is active.fuyou
        if optimizer is None:
            raise MemoryError("while it is built")
        return "built"

    configure = plugin._configure_zero_optimizer(original)
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    assert configure(Engine(active), optimizer) == "built"
    assert configure(Engine(parse()), optimizer) == "built"
    with pytest.raises(MemoryError):
        configure(Engine(active), None)
    assert seen == [Ours, stock, Ours]
    assert stage3.DeepSpeedZeroOptimizer_Stage3 is stock


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_client_optimizers_that_map_pass(kind: type[torch.optim.Optimizer]) -> None:
    plugin._refuse_optimizer(kind(torch.nn.Linear(2, 2).parameters()))


def test_bfloat16_masters_are_for_the_optimizer_that_stock_has_them_for() -> None:
    with pytest.raises(FuyouConfigError, match=r"bf16_master_weights_and_grads is for DeepSpeedCPUAdam .*AdamW;"):
        plugin._refuse_optimizer(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()), True)
    plugin._refuse_optimizer(None, True)


def test_other_client_optimizers_are_refused_with_the_list() -> None:
    class MyAdam(torch.optim.Adam):
        """A subclass may compute anything in `step`."""

    for kind in (torch.optim.SGD, MyAdam):
        with pytest.raises(FuyouConfigError, match=r"(SGD|MyAdam) cannot run out of core; use Adam, AdamW"):
            plugin._refuse_optimizer(kind(torch.nn.Linear(2, 2).parameters()))


def test_lightning_collects_no_states_that_the_engine_saves() -> None:
    """It asks for them whenever it saves, and drops them."""

    class Strategy:
        def optimizer_state(self, optimizer: Any) -> Any:
            return optimizer.state_dict()

    asked = plugin._left_to_engine(Strategy.optimizer_state)
    of_another = SimpleNamespace(state_dict=lambda: {"state": 1})
    of_ours = SimpleNamespace(state_dict=lambda: {"state": 2}, checkpoint_state=None)
    assert asked(Strategy(), of_another) == {"state": 1}
    assert asked(Strategy(), of_ours) == asked(Strategy(), SimpleNamespace(_optimizer=of_ours)) == {}
