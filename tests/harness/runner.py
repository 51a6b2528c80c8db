# SPDX-License-Identifier: Apache-2.0
"""Runs training cases in fresh processes and compares what they leave behind, bit by bit."""

import copy
import json
import os
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.device.build import build
from tests.harness.bits import same
from tests.harness.cpu_info import python_path
from tests.harness.forked import accelerator, finish, start
from tests.harness.ports import free_port

HERE = Path(__file__).parent


def environment(
    rank: int, world_size: int, port: int, device: dict | str = "cpu", ranks_per_node: int | None = None
) -> dict:
    """``device``: a name that DeepSpeed knows, or settings of the stand-in device, which takes the CPU's place.
    ``ranks_per_node``: as torchrun says it on several nodes; one node without.
    """
    ranks_per_node = ranks_per_node or world_size
    env = dict(os.environ)
    if isinstance(device, dict):
        env["STANDIN"] = json.dumps(device)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % ranks_per_node),
        GROUP_RANK=str(rank // ranks_per_node),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(ranks_per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu" if isinstance(device, dict) else device,
        DS_FUYOU_LOG_LEVEL=os.environ.get("DS_FUYOU_LOG_LEVEL", "debug"),
        OMP_NUM_THREADS="1" if world_size > 1 else "2",
        PYTHONPATH=python_path(HERE),
    )
    return env


def skip(why: str) -> None:
    """Ends the test. Workers import this file, and a process that shares pytest with its parent copies what it uses."""
    import pytest

    pytest.skip(why)


def skip_without_gpus(world_size: int, device: dict | str | None = None) -> None:
    """Every rank on CUDA needs one. ``device``: as in :func:`environment`; what DS_ACCELERATOR names without."""
    if (device or accelerator()) == "cuda" and world_size > torch.cuda.device_count():
        skip(f"{world_size} ranks need as many GPUs")


def run_case(case: dict, directory: Path, name: str, worker: Path = HERE / "train_worker.py") -> list[dict]:
    """Trains one case by ``worker``; returns the result of every rank. A failing rank raises with its output."""
    return start_case(case, directory, name, worker)()


def start_case(
    case: dict, directory: Path, name: str, worker: Path = HERE / "train_worker.py"
) -> Callable[[], list[dict]]:
    """Starts what :func:`run_case` runs; who calls what is returned waits for it.

    ``case["device"]``: what to train on, as in :func:`environment`; without, on what DS_ACCELERATOR names. A case of
    more ranks than there are GPUs is skipped on CUDA.
    ``case["ranks_per_node"]``: ranks are told of several nodes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    device = case.get("device", accelerator())
    if isinstance(device, dict):
        if accelerator() != "cpu":
            skip("the stand-in device takes the CPU's place")
        build()
    file = directory / f"{name}.json"
    file.write_text(json.dumps(case))
    world_size, port = case.get("world_size", 1), free_port()
    skip_without_gpus(world_size, device)
    logs = [directory / f"{name}.{rank}.log" for rank in range(world_size)]
    processes = [
        start(
            worker,
            [str(file), str(directory / name)],
            environment(rank, world_size, port, device, case.get("ranks_per_node")),
            log,
        )
        for rank, log in enumerate(logs)
    ]

    def finished() -> list[dict]:
        finish(processes)
        return results_of(processes, logs, directory / name)

    return finished


def results_of(processes: Sequence[BaseProcess], logs: Sequence[Path], name: Path) -> list[dict]:
    """Of all ranks, beside what they said."""
    outputs = [log.read_text(errors="replace") for log in logs]
    statuses = [process.exitcode for process in processes]
    if any(statuses):
        said = "\n".join(output[-6000:] for status, output in zip(statuses, outputs, strict=True) if status)
        raise AssertionError(f"{name.name} exited with {statuses}:\n{said}")
    results = [torch.load(f"{name}.{rank}", weights_only=False) for rank in range(len(logs))]
    for result, output in zip(results, outputs, strict=True):
        result["output"] = output
    return results


def ds_config(**changes) -> dict:
    """A stock configuration: ZeRO-3, CPU tier. Nested keys are given as dicts and merged."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "sub_group_size": 100000000,
            # Of the tiny models some parameters are persistent and some are not, as of the models of users.
            "stage3_param_persistence_threshold": 1000,
        },
        "steps_per_print": 1000000,
    }
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict) and key == "zero_optimization":
            config[key].update(value)
        else:
            config[key] = value
    return config


def with_fuyou(case: dict, block: dict) -> dict:
    """The same case with a fuyou block added to its configuration: the only edit."""
    ours = copy.deepcopy(case)
    ours["config"]["fuyou"] = block
    return ours


def differences(
    stock: list[dict], ours: list[dict], keys: tuple = ("p16", "p32", "exp_avg", "exp_avg_sq")
) -> list[str]:
    """Every tensor or number that is not equal to the bit."""
    found = []
    for rank, (a, b) in enumerate(zip(stock, ours, strict=True)):
        for key in ("losses", "norms", "applied", "scales", "evals", "rates"):
            if a[key] != b[key]:
                found.append(f"rank {rank} {key}: {a[key]} != {b[key]}")
        for key in keys:
            if a[key].keys() != b[key].keys():
                found.append(f"rank {rank} {key}: other parameters")
                continue
            for name, tensor in a[key].items():
                if not same(tensor, b[key][name]):
                    count = int((tensor != b[key][name]).sum())
                    found.append(f"rank {rank} {key} {name}: {count} of {tensor.numel()} elements differ")
        found += [f"rank {rank} {what}" for what in differences_seen(a["seen"], b["seen"])]
    return found


def differences_seen(stock: list[dict], ours: list[dict]) -> list[str]:
    """What the public functions for states and gradients answered, one dictionary a look."""
    found = []
    for look, (a, b) in enumerate(zip(stock, ours, strict=True)):
        if a.keys() != b.keys():
            found.append(f"look {look}: {sorted(a)} != {sorted(b)}")
        found += [f"look {look} {name}" for name in a.keys() & b.keys() if not same(a[name], b[name])]
    return found
