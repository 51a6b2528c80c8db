# SPDX-License-Identifier: Apache-2.0
"""What the server of forked.py imports. Its children begin as fresh interpreters do, except that the kind of CPU, for
which DeepSpeed starts two processes and waits for seconds, is known already.
"""

# ruff: noqa: F401

import functools
import importlib.util
import os

# Read when huggingface_hub is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import cpuinfo
import deepspeed.module_inject
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage3
import torch._dynamo

if importlib.util.find_spec("transformers") is not None:
    import accelerate.utils.deepspeed
    import peft
    import transformers.integrations.deepspeed
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.trainer

cpuinfo.get_cpu_info = functools.partial(dict, cpuinfo.get_cpu_info())
