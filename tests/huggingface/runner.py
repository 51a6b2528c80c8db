# SPDX-License-Identifier: Apache-2.0
"""Starts the scripts beside this file as users do, once stock (CPU tier) and once with a block, and compares."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.harness.cpu_info import python_path
from tests.harness.forked import accelerator, finish, start
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port
from tests.harness.runner import environment as rank_environment
from tests.harness.runner import skip_without_gpus

__all__ = ["BIN", "HERE", "clean", "ds_json", "launch", "run_command", "weight_differences", "weights", "with_block"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
TIERS = {  # optimizer, parameters, gradients
    "states": ("nvme", "cpu", "cpu"),
    "all": ("nvme", "nvme", "nvme"),
    "auto": ("auto", "auto", "auto"),
    "lora": ("cpu", "nvme", "cpu"),
}


def environment(num_ranks: int) -> dict:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env.update(
        DS_ACCELERATOR=accelerator(),
        OMP_NUM_THREADS="1" if num_ranks > 1 else "2",
        PYTHONPATH=python_path(HERE),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        PATH=os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
    )
    return env


def run_command(command: list, num_ranks: int = 1, cwd: Path = ROOT, **env: str) -> str:
    """Output of a command that must succeed; it and all it started are killed when the time is up.

    How scripts on two ranks end: [Note: aborted while ending] in tests/harness/group.py.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        env=environment(num_ranks) | env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=HANG_SECS)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        raise AssertionError(f"{command} exited with {process.returncode}:\n{output[-8000:]}")
    return output


def launcher(how: str, num_ranks: int, config_file: Path | None = None, **flags: str) -> list:
    """The command up to the script: the ``deepspeed`` command or ``accelerate launch``."""
    if how == "deepspeed":
        return [BIN / "deepspeed", "--num_accelerators", num_ranks, "--master_port", free_port()]
    more = [part for key, value in flags.items() for part in (f"--{key}", value)]
    return [
        *(BIN / "accelerate", "launch", "--use_deepspeed", "--deepspeed_config_file", config_file),
        *("--num_machines", 1, "--num_processes", num_ranks, "--main_process_port", free_port(), *more),
    ]


def launch(case: dict, script: str | Path, directory: Path, name: str, *, by_launcher: bool = True, **env: str) -> dict:
    """Runs a script with a case; returns what rank 0 left, the output added.

    ``by_launcher``: by the command that the case names; otherwise by processes with the variables it would have set.
    ``env``: variables for these processes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    num_ranks, how = case.get("num_ranks", 1), case["launcher"]
    skip_without_gpus(num_ranks)
    config_file = directory / f"{name}.ds.json"
    config_file.write_text(json.dumps(case["config"]))
    told = {**case, "output": str(directory / f"{name}.out"), "result": str(directory / f"{name}.result.json")}
    told["config_file"] = str(config_file)
    told.pop("config")
    case_file = directory / f"{name}.case.json"
    case_file.write_text(json.dumps(told))
    flags = case.get("flags", {})
    if by_launcher:
        output = run_command([*launcher(how, num_ranks, config_file, **flags), HERE / script, case_file], num_ranks)
    else:
        told_by_flags = accelerate_variables(config_file, flags) if how == "accelerate" else {}
        output = run_script(HERE / script, [case_file], directory / name, num_ranks, **told_by_flags, **env)
    return {**json.loads(Path(told["result"]).read_text()), "output": output}


def accelerate_variables(config_file: Path, flags: dict) -> dict:
    """What ``accelerate launch --use_deepspeed`` tells its processes about the flags that are used here."""
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config_file),
        **{f"ACCELERATE_{name.upper()}": str(value) for name, value in flags.items()},
    }


def run_script(script: Path, arguments: list, name: Path, num_ranks: int = 1, **env: str) -> str:
    """Runs the ranks of a script that must succeed in forked processes; returns what they said."""
    port = free_port()
    logs = [name.with_name(f"{name.name}.{rank}.log") for rank in range(num_ranks)]
    processes = [
        start(script, arguments, rank_environment(rank, num_ranks, port) | environment(num_ranks) | env, log)
        for rank, log in enumerate(logs)
    ]
    finish(processes)
    statuses = [process.exitcode for process in processes]
    said = [log.read_text(errors="replace") for log in logs]
    if any(statuses):
        tails = "\n".join(text[-8000 // num_ranks :] for text in said)
        raise AssertionError(f"{script} exited with {statuses}:\n{tails}")
    return "".join(said)


def ds_json(**changes: object) -> dict:
    """A ZeRO-3 JSON as the Hugging Face documentation gives it, with the optimizer and parameters on the CPU."""
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    return {**config, **changes}


def with_block(case: dict, path: Path, tiers: str) -> dict:
    """The same case with a block, some of its values "auto": the only edit."""
    optimizer, parameters, gradients = TIERS[tiers]
    ours = copy.deepcopy(case)
    path.mkdir(parents=True, exist_ok=True)
    ours["config"]["fuyou"] = {
        "nvme_path": str(path),
        "dram_budget_bytes": "auto",
        "optimizer": {"tier": optimizer, "clip_policy": "auto"},
        "parameters": {"tier": parameters},
        "gradients": {"tier": gradients},
        "plan": {"chunk_bytes": 131072, "queue_depth": "auto"},
    }
    return ours


def clean(history: list) -> list:
    """The log without what a clock measured, and without the Trainer's "total_flos", which counts the elements of the
    parameters that happen to be gathered when it looks."""
    noise = ("_runtime", "_per_second", "total_flos")
    return [{k: v for k, v in entry.items() if not k.endswith(noise)} for entry in history]


def weights(directory: Path) -> dict:
    """All tensors in ``*.safetensors`` of a directory."""
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def weight_differences(stock: Path, ours: Path) -> list[str]:
    """Names of saved tensors that are not equal to the bit, or that have no values: two empty ones are not "equal"."""
    import torch

    a, b = weights(stock), weights(ours)
    if not a or a.keys() != b.keys():
        return [f"{sorted(a)} != {sorted(b)}"]
    return [
        name for name in a if a[name].dtype != b[name].dtype or not a[name].numel() or not torch.equal(a[name], b[name])
    ]
