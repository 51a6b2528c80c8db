# SPDX-License-Identifier: Apache-2.0
"""What the server of forked.py imports, the package and its compiled operators among it: looking up and loading is half
of a short run.
"""

# ruff: noqa: E402, F401

import gc
import importlib.util
import os
from pathlib import Path

# Read when huggingface_hub is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Asked otherwise, CUDA begins in the server, and no forked process could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from tests.harness.cpu_info import look_up, use_known
from tests.harness.forked import accelerator

look_up()  # before DeepSpeed does
use_known()

import deepspeed.module_inject
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage3
import setuptools
import torch._dynamo

import ds_fuyou
import tests.harness.models
import tests.harness.runner
from ds_fuyou.ops.core import load_core

if importlib.util.find_spec("transformers") is not None:
    import accelerate.utils.deepspeed
    import peft
    import transformers.integrations.deepspeed
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.trainer

package = Path(ds_fuyou.__path__[0])
for file in (package / "zero").rglob("*.py"):  # namespace packages, which pkgutil does not walk into
    importlib.import_module(".".join(("ds_fuyou", *file.relative_to(package).with_suffix("").parts)))
load_core()
if accelerator() == "cpu":
    deepspeed.ops.__compatible_ops__  # noqa: B018  (each is probed, one by compiling)
    deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
gc.collect()
gc.freeze()  # it stays: who collects garbage need not look at it
