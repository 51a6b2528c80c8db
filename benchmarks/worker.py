# SPDX-License-Identifier: Apache-2.0
"""One variant of a case, kept alive: trains steps when told to, and sleeps on its pipe in between.

Run as ``python benchmarks/worker.py SPEC.json`` by :mod:`benchmarks.processes`. A command is one line of
JSON on stdin, its answer one line of JSON on the original stdout; everything else the process prints goes
to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]


class Trainer:
    """The loop of examples/finetune.py, step by step. ``mode`` "off" never reaches the optimizer.

    ``device``: settings of the stand-in device (tests/device), which computes then. ``gpu_bytes``: a GPU does, of which
    this process may take so much. The host without.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        import deepspeed
        import torch
        from finetune import GPT
        from text import manual

        self.spec, self.torch = spec, torch
        if "device" in spec:
            from tests.device.accelerator import install

            install(**spec["device"])
        if "gpu_bytes" in spec:
            share = spec["gpu_bytes"] / torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        torch.manual_seed(0)
        deepspeed.init_distributed(None if "gpu_bytes" in spec else "gloo")
        if "device" in spec or "gpu_bytes" in spec:
            _train_something(GPT(1, 64, 1, 64, 256))
        self.base_rss_bytes = _status_bytes("VmRSS")
        begin = time.perf_counter()
        with deepspeed.zero.Init(config_dict_or_path=spec["config"], enabled=spec.get("zero_init", False)):
            model = GPT(**spec["model"])
        self.numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=spec["config"])
        self.start_secs = time.perf_counter() - begin
        self.data = manual()
        self.generator = torch.Generator().manual_seed(0)
        self.state = getattr(self.engine.optimizer, "rank_state", None)
        self.loss = float("nan")

    def step(self) -> tuple[float, float, float, float]:
        """Seconds of the whole step, of forward, of backward and of ``engine.step()``."""
        begin, forward_secs, backward_secs, step_secs = time.perf_counter(), 0.0, 0.0, 0.0
        for _ in range(self.engine.gradient_accumulation_steps()):
            began = time.perf_counter()
            if self.spec["mode"] == "off":
                self.engine.set_gradient_accumulation_boundary(False)
            loss = self.engine(self.batch())
            if self.spec["mode"] == "off":
                self.engine.optimizer.micro_step_id = 0  # gradients are stored, not accumulated, as in a training step
            forward = time.perf_counter()
            self.engine.backward(loss)
            backward = time.perf_counter()
            self.engine.step()
            end = time.perf_counter()
            forward_secs += forward - began
            backward_secs += backward - forward
            step_secs += end - backward
        self.loss = float(loss)
        return time.perf_counter() - begin, forward_secs, backward_secs, step_secs

    def batch(self) -> Any:
        length = self.spec["model"]["length"]
        starts = self.torch.randint(len(self.data) - length - 1, (self.spec["batch"],), generator=self.generator)
        return self.torch.stack([self.data[s : s + length + 1] for s in starts]).to(self.engine.device)

    def steps(self, num_lead: int, num_timed: int) -> dict[str, Any]:
        """``num_lead`` steps that are not timed bring the overlap into its steady state; the work that the
        last timed step leaves behind (as the lead-in left its own to the first) is drained untimed.
        """
        for _ in range(num_lead):
            self.step()
        before, begin = self.lanes(), time.perf_counter()
        parts = [self.step() for _ in range(num_timed)]
        wall = time.perf_counter() - begin
        after = self.lanes()
        self.drain()
        if "gpu_bytes" in self.spec:  # one variant after the other has the GPU
            self.torch.cuda.empty_cache()
        if self.engine.skipped_steps:
            raise RuntimeError(f"{self.engine.skipped_steps} of {self.engine.global_steps} steps were skipped")
        return {
            "secs": wall / num_timed,
            "steps": parts,
            "loss": self.loss,
            "lanes": {key: (after[key] - before[key]) / num_timed for key in after},
        }

    def rollout(self, num_tokens: int) -> dict[str, Any]:
        """A step, whose updates are drained, then so many forwards of one token each: what a generation with a cache
        computes, without attention to the cache. ``_gathered``: as TRL does, without DeepSpeed's hooks.
        """
        self.step()
        self.drain()
        return self._timed(lambda: self._generate(num_tokens))

    def _generate(self, num_tokens: int) -> None:
        import deepspeed

        ids = self.torch.zeros(1, 2, dtype=self.torch.int64, device=self.engine.device)
        gathers = self.spec["way"] == "_gathered"
        offload = self.engine.optimizer.parameter_offload
        params = list(self.engine.module.parameters())
        with self.torch.no_grad(), deepspeed.zero.GatheredParameters(params, enabled=gathers):
            if gathers:
                for hook in (*offload.forward_hooks, *offload.backward_hooks):
                    hook.remove()
                offload.forward_hooks, offload.backward_hooks = [], []
            for _ in range(num_tokens):
                self.loss = float(self.engine.module(ids))
            if gathers:
                offload._register_deepspeed_module(offload.module)

    def saving(self) -> dict[str, Any]:
        """A step, whose updates are drained, then every parameter is read once, in one of four ways."""
        self.step()
        self.drain()
        ways = {"": self._save, "_merge": self._merge, "_evaluate": self._evaluate, "_read_once": self._read_once}
        return self._timed(ways[self.spec["way"]])

    def _save(self) -> None:
        self.engine._zero3_consolidated_16bit_state_dict()

    def _merge(self) -> None:
        import deepspeed

        for module in self.engine.module.modules():
            with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False))):
                pass

    def _evaluate(self) -> None:
        """One batch of one token: next to nothing is computed."""
        self.engine.eval()
        with self.torch.no_grad():
            self.loss = float(self.engine(self.torch.zeros(1, 2, dtype=self.torch.int64, device=self.engine.device)))
        self.engine.train()

    def _read_once(self) -> None:
        from ds_fuyou.host.memory import aligned_tensor

        sources = [partition.source for partition in self.state.parameters.partitions if partition.num_bytes]
        for read in [s.start_reading(aligned_tensor(s.num_bytes)) for s in sources]:
            read.wait()

    def _timed(self, work: Any) -> dict[str, Any]:
        """What a burst of steps tells, of something else."""
        before, begin = self.lanes(), time.perf_counter()
        work()
        secs = time.perf_counter() - begin
        after = self.lanes()
        lanes = {key: after[key] - before[key] for key in after}
        return {"secs": secs, "steps": [(secs, 0.0, 0.0, 0.0)], "loss": self.loss, "lanes": lanes}

    def lanes(self) -> dict[str, float]:
        """Counters since the start: of the stand-in device, and of our lanes."""
        lanes: dict[str, float] = {}
        if "device" in self.spec:
            from tests.device.backend import usage

            lanes |= {f"device_{name}_secs": secs for name, secs in vars(usage()).items()}
            counters = self.torch.standin.core.counters()
            lanes |= {f"device_{way}_bytes": counters.get(f"bytes {way}", 0) for way in ("up", "down")}
        if self.state is None:
            return lanes
        core, parameters = self.state.core, self.state.parameters
        for name, lane in core.io.stats().items():
            lanes[f"{name}_busy_secs"], lanes[f"{name}_bytes"] = lane.busy_secs, lane.num_bytes
        lanes["update_busy_secs"] = core.pipeline.stats().update_busy_secs
        lanes["waited_secs"] = core.waited_secs + parameters.waited_secs
        lanes["redone_chunks"] = core.num_redone_chunks
        lanes["params_demanded"], lanes["params_ahead"] = parameters.num_demand_reads, parameters.num_ahead_reads
        if self.state.activations is not None:
            swapped = self.state.activations.counters
            for name in ("out_bytes", "written_bytes", "read_bytes", "waited_secs"):
                lanes[f"activation_{name}"] = getattr(swapped, name)
        return lanes

    def gpu_step(self) -> dict[str, float]:
        """What the GPU did in one step, by its own clock: seconds in which a kernel ran, and a copy of each way; bytes
        of each way, and those of them that were not copied from or to pinned memory.
        """
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.step()
            self.torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiled.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        kernels = [each for each in events if each.get("cat") == "kernel"]
        found = {"device_compute_secs": _covered_secs(kernels)}
        for way, name in (("up", "HtoD"), ("down", "DtoH")):
            copies = [each for each in events if each.get("cat") == "gpu_memcpy" and name in each["name"]]
            found[f"device_{way}_secs"] = _covered_secs(copies)
            found[f"device_{way}_bytes"] = sum(each["args"]["bytes"] for each in copies)
            found[f"device_{way}_pageable_bytes"] = sum(
                each["args"]["bytes"] for each in copies if "Pageable" in each["name"]
            )
        return found

    def drain(self) -> None:
        if self.state is not None:
            self.state.core.wait_all()

    def about(self) -> dict[str, Any]:
        """What was built: size, start-up seconds, optimizer class and the plan in use."""
        return {
            "numel": self.numel,
            "start_secs": self.start_secs,
            "optimizer": type(self.engine.optimizer).__name__,
            "plan": repr(self.state.plan) if self.state is not None else None,
            "planned_host_bytes": self.state.planned_host_bytes if self.state is not None else 0,
            "base_rss_bytes": self.base_rss_bytes,
        }

    def close(self) -> None:
        if self.state is not None:
            self.engine.destroy()


def _train_something(model: Any) -> None:
    """One step with stock: what interpreter, DeepSpeed and compiled kernels load when they are first used belongs to
    no model, and to no plan."""
    import deepspeed
    import torch

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.zeros(1, 65, dtype=torch.int64, device=engine.device)))
    engine.step()
    engine.destroy()


def _covered_secs(events: list[dict[str, Any]]) -> float:
    """Time that any of the events takes, of a trace in microseconds."""
    total = end = 0.0
    for begin, length in sorted((each["ts"], each["dur"]) for each in events):
        total += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return total / 1e6


def _status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields[field].split()[0]) * 1024


def peak_rss_bytes() -> int:
    """The kernel's high-water mark of this process's resident memory."""
    return _status_bytes("VmHWM")


def forget_peak_rss() -> None:
    """The high-water mark begins anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def answer(trainer: Trainer, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "steps":
        return trainer.steps(command["lead"], command["timed"])
    if command["do"] == "rollout":
        return trainer.rollout(command["tokens"])
    if command["do"] == "saving":
        return trainer.saving()
    if command["do"] == "thread":
        from benchmarks.training_thread import measure_thread

        return measure_thread(trainer, num_steps=command["steps"], profile=command["profile"])
    if command["do"] == "forget_peaks":
        ctypes.CDLL(None).malloc_trim(0)  # a hundred thousand waits as text: 0.3 GB that are no training's
        forget_peak_rss()
        return {}
    if command["do"] == "gpu_step":
        return trainer.gpu_step()
    if command["do"] == "memory":
        if "gpu_bytes" in trainer.spec:
            device = trainer.torch.cuda.max_memory_reserved()
        else:
            device = trainer.torch.standin.max_memory_allocated() if "device" in trainer.spec else 0
        return {"peak_rss_bytes": peak_rss_bytes(), "peak_device_bytes": device, "numel": trainer.numel}
    if command["do"] == "waits" and "device" not in trainer.spec:
        return {"waits": []}
    if command["do"] == "waits":  # of the host on the device since the last time: seconds and how often, by place
        found: dict[str, list[float]] = {}
        for wait in trainer.torch.standin.take_waits():
            place = f"{wait.what}\n{_without_directories(wait.stack)}"
            secs, number = found.get(place, [0.0, 0])
            found[place] = [secs + wait.secs, number + 1]
        return {"waits": sorted(found.items(), key=lambda item: -item[1][0])}
    raise ValueError(
        f"unknown command {command!r}; steps, rollout, saving, thread, gpu_step, memory, forget_peaks, waits and stop "
        "are known"
    )


def _without_directories(stack: str) -> str:
    """Files by their paths in this repository or below Python's libraries: where these lie is one machine's affair."""
    return re.sub(rf"(?m)^( *)(?:\S*/(?:site-packages|lib/python[\d.]+)|{re.escape(str(ROOT))})/", r"\1", stack)


def serve(replies: TextIO) -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    trainer = Trainer(spec)
    replies.write(json.dumps(trainer.about()) + "\n")
    replies.flush()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            break
        replies.write(json.dumps(answer(trainer, command)) + "\n")
        replies.flush()
    trainer.close()


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(replies)
    os._exit(0)  # stock's swapper threads may not end
