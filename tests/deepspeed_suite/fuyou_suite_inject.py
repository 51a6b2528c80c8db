# SPDX-License-Identifier: Apache-2.0
"""Adds a fuyou block to the configurations that DeepSpeed's own tests parse. Imported by every test process.

``FUYOU_SUITE_MODE`` is "watch" (stock: only note what would get a block) or "inject". What happened is appended to the
file ``FUYOU_SUITE_RECORD``, one line a configuration: "block" or "refused: reason".

``FUYOU_SUITE_OVERLAP`` is the block's ``optimizer.overlap``: tests that read parameters between steps without gathering
them need "backward" (docs/combinations.md). ``FUYOU_SUITE_PARAMETERS``, its ``parameters.tier``: tests that look into
``ds_tensor`` need "cpu", for what is on storage has one element there, in stock as here.

In both modes fp16 counts as supported: eager fp16 works on the CPU, DeepSpeed asks for native kernels.
What costs every engine seconds is done once, in the fork server: some imports, and asking for the kind of CPU.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import cpuinfo
import deepspeed.runtime.config as ds_config_module
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch._dynamo  # noqa: F401
from deepspeed.accelerator import get_accelerator

from ds_fuyou.ds_json import load_activation
from ds_fuyou.errors import FuyouConfigError

MODE = os.environ.get("FUYOU_SUITE_MODE", "watch")
WHICH = os.environ.get("FUYOU_SUITE_WHICH", "offload")
SWAP_PATH = os.environ.get("FUYOU_SUITE_SWAP", "")
OVERLAP = os.environ.get("FUYOU_SUITE_OVERLAP", "auto")
PARAMETERS = os.environ.get("FUYOU_SUITE_PARAMETERS", "nvme")
RECORD = os.environ.get("FUYOU_SUITE_RECORD", os.devnull)


def gets_a_block(config: Mapping[str, Any]) -> bool:
    """Stage 3 with an offload section that names a device; with FUYOU_SUITE_WHICH=stage3 every stage 3."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") != 3:
        return False
    if WHICH == "stage3":
        return True
    sections = (zero.get(name) or {} for name in ("offload_optimizer", "offload_param"))
    return any(section.get("device") in ("cpu", "nvme") for section in sections if isinstance(section, Mapping))


def with_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with states and gradients on storage, unless the pair is refused by name.

    Parameters too, unless it offloads the optimizer alone: then their partitions stay in memory, as tests expect.
    """
    zero = config["zero_optimization"]
    only_optimizer = bool(zero.get("offload_optimizer")) and not zero.get("offload_param")
    tiers = {"parameters": "cpu" if only_optimizer else PARAMETERS, "optimizer": "nvme", "gradients": "nvme"}
    block: dict[str, Any] = {part: {"tier": tier} for part, tier in tiers.items()}
    block["optimizer"]["overlap"] = OVERLAP
    block["nvme_path"] = SWAP_PATH or "/tmp"
    candidate = {**config, "fuyou": block}
    try:
        load_activation(candidate)
    except FuyouConfigError as error:
        note(f"refused: {error}")
        return config
    note("block")
    return candidate


def note(line: str) -> None:
    with open(RECORD, "a", encoding="utf-8") as record:
        record.write(line.replace("\n", " ") + "\n")


def _read(config: Any) -> Any:
    if isinstance(config, str) and os.path.isfile(config):
        with open(config, encoding="utf-8") as file:
            return json.load(file)
    return config


def _inject(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        found = _read(config)
        if isinstance(found, Mapping) and "fuyou" not in found and gets_a_block(found):
            changed = with_block(found)
            config = changed if MODE == "inject" else config
        original(self, config, *args, **kwargs)

    return __init__


ds_config_module.DeepSpeedConfig.__init__ = _inject(ds_config_module.DeepSpeedConfig.__init__)
type(get_accelerator()).is_fp16_supported = lambda self: True
cpuinfo.get_cpu_info = functools.partial(dict, cpuinfo.get_cpu_info())
