# SPDX-License-Identifier: Apache-2.0
"""What moments of fewer bits do to training: the example's GPT, or a model of Llama's shape, on real text, with
warm-up, decay, clipping and weight decay, several seeds; the loss on text that was held out, and how far the curve
departs from that of fp32. ``torchao`` trains the same by torch alone: bf16 parameters, fp32 masters, torchao's
AdamW8bit.

python -m benchmarks.quality --steps 300 --seeds 2 --layers 4 --width 256 --out quality.json
PYTHONPATH=.venv/torchao python -m benchmarks.quality --model llama --moments fp32 int8 torchao
python -m benchmarks.quality --seeds 1 --moments fp32 --save weights.pt                   a model to be fine-tuned, and
python -m benchmarks.quality --text library --weights weights.pt --lr 2e-4                that, on another text

Every run is a process of its own; with --out, runs that the file has already are not made again. States are in host
memory: where they are changes no bit (tests/unit/test_rounded_moments.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
MOMENTS = ("fp32", "bf16", "int8")
OUTSIDE = "torchao"
TEXTS = ("manual", "library")
_BETAS, _EPS, _WEIGHT_DECAY, _CLIP = [0.9, 0.95], 1e-8, 0.1, 1.0
_SMOOTH = 20  # steps that a point of the curve is the mean of
_SHOWN = 100  # steps after which a run says, to stderr, how far it is
_HELD_OUT = 0.1  # of the text, its end
_BATCHES = 64  # of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text", choices=TEXTS, default="manual")
    parser.add_argument("--weights", type=Path, help="to begin with, of a run with --save and the same shape")
    parser.add_argument("--save", type=Path, help="where the last run's weights go")
    parser.add_argument("--moments", nargs="+", choices=(*MOMENTS, OUTSIDE), default=list(MOMENTS))
    parser.add_argument("--out", type=Path, help="keeps every curve")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        json.dump(trained(json.loads(arguments.run)), sys.stdout)
        return
    names = ("model", "steps", "layers", "width", "length", "batch", "lr", "text")
    shape = {name: getattr(arguments, name) for name in names}
    if arguments.weights is not None:
        shape["weights"] = hashlib.sha256(arguments.weights.read_bytes()).hexdigest()
    files = {name: str(path.absolute()) for name in ("weights", "save") if (path := getattr(arguments, name))}
    runs = _known(arguments.out, shape)
    for seed in range(arguments.seeds):
        for moments in arguments.moments:
            if f"{moments}-{seed}" in runs:
                continue
            runs[f"{moments}-{seed}"] = _of_process({**shape, **files, "moments": moments, "seed": seed})
            if arguments.out is not None:
                arguments.out.write_text(json.dumps({"shape": shape, "runs": runs}), encoding="utf-8")
    sys.stdout.write(table(runs))


def _known(out: Path | None, shape: dict[str, Any]) -> dict[str, Any]:
    """Runs of the same shape that a file has."""
    if out is None or not out.exists():
        return {}
    kept = json.loads(out.read_text(encoding="utf-8"))
    return dict(kept["runs"]) if kept["shape"] == shape else {}


def _of_process(spec: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.quality", "--run", json.dumps(spec)]
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **names}, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def trained(spec: dict[str, Any]) -> dict[str, Any]:
    """Losses of every step, and at the end on text that was held out. Prints nothing to stdout."""
    sys.path[:0] = [str(ROOT / "examples")]
    stdout = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed prints
    import deepspeed
    import torch

    if not torch.cpu._is_avx512_bf16_supported():
        _products_in_float32()
    torch.manual_seed(spec["seed"])
    steps, length, batch = spec["steps"], spec["length"], spec["batch"]
    deepspeed.init_distributed("gloo")
    model = _model(spec)
    if "weights" in spec:
        model.load_state_dict(torch.load(spec["weights"]))
    loss_of, step = (_outside if spec["moments"] == OUTSIDE else _engine)(model, spec)
    data = _text(spec["text"])
    end = int(len(data) * (1 - _HELD_OUT))
    generator = torch.Generator().manual_seed(spec["seed"])

    def rows(first: int, last: int, source: torch.Generator) -> torch.Tensor:
        starts = torch.randint(first, last - length - 1, (batch,), generator=source)
        return torch.stack([data[start : start + length + 1] for start in starts])

    losses: list[float] = []
    for done in range(1, steps + 1):
        loss = loss_of(rows(0, end, generator))
        step(loss)
        losses.append(loss.item())
        if done % _SHOWN == 0:
            print(f"step {done} of {steps}: {statistics.fmean(losses[-_SHOWN:]):.4f}", file=sys.stderr, flush=True)
    held_out, same = [], torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(_BATCHES):
            held_out.append(loss_of(rows(end, len(data), same)).item())
    if "save" in spec:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            torch.save({name: value.clone() for name, value in model.state_dict().items()}, spec["save"])
    os.dup2(stdout, 1)
    return {"losses": losses, "held_out": statistics.fmean(held_out)}


def _text(name: str) -> torch.Tensor:
    """The manual of Python, or as many bytes of the sources of its standard library; one byte an element."""
    import torch
    from text import manual

    if name == "manual":
        return manual()
    sources = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return torch.tensor(list(sources[: len(manual())]), dtype=torch.long)


Loss = Callable[["torch.Tensor"], "torch.Tensor"]


def _model(spec: dict[str, Any]) -> torch.nn.Module:
    layers, width, length = spec["layers"], spec["width"], spec["length"]
    heads = max(1, width // 64)
    if spec["model"] == "gpt":
        from finetune import GPT

        return GPT(layers, width, heads, length, 256)
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 64 * 64,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=length,
            use_cache=False,
        )
    )


def _products_in_float32() -> None:
    """Linear layers of bfloat16 multiply in float32 and round what comes out, as instructions for bfloat16 do; a CPU
    without them is an order of magnitude slower without this."""
    import torch
    import torch.nn.functional as F

    def forward(layer: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.float()
        return F.linear(values.float(), layer.weight.float(), bias).to(values.dtype)

    torch.nn.Linear.forward = forward  # type: ignore[method-assign]


def _loss_of(model: Any, spec: dict[str, Any]) -> Loss:
    """Of rows, each one longer than what the model sees."""
    import torch.nn.functional as F

    if spec["model"] == "gpt":
        return model

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    return loss


def _schedule(steps: int, lr: float) -> dict[str, Any]:
    return {"total_num_steps": steps, "warmup_num_steps": max(1, steps // 10), "warmup_max_lr": lr}


def _engine(model: torch.nn.Module, spec: dict[str, Any]) -> tuple[Loss, Callable[[torch.Tensor], None]]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": spec["batch"],
        "gradient_clipping": _CLIP,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": spec["lr"], "betas": _BETAS, "eps": _EPS, "weight_decay": _WEIGHT_DECAY},
        },
        "scheduler": {"type": "WarmupDecayLR", "params": _schedule(spec["steps"], spec["lr"])},
        "zero_optimization": {"stage": 3},
        "fuyou": {"enabled": True, "optimizer": {"moments": spec["moments"]}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return _loss_of(engine, spec), step


def _outside(model: torch.nn.Module, spec: dict[str, Any]) -> tuple[Loss, Callable[[torch.Tensor], None]]:
    """Nothing of this package, and of DeepSpeed the schedule alone."""
    import torch
    from deepspeed.runtime.lr_schedules import WarmupDecayLR
    from torchao.optim import AdamW8bit

    model.bfloat16()
    params = list(model.parameters())
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    given = {"betas": tuple(_BETAS), "eps": _EPS, "weight_decay": _WEIGHT_DECAY}
    optimizer = AdamW8bit(masters, lr=spec["lr"], **given)
    clock = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=spec["lr"])
    schedule = WarmupDecayLR(clock, **_schedule(spec["steps"], spec["lr"]))

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, _CLIP)
        optimizer.param_groups[0]["lr"].fill_(clock.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)

    return _loss_of(model, spec), step


def smoothed(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, i + 1 - _SMOOTH) : i + 1]) for i in range(len(losses))]


def table(runs: dict[str, Any]) -> str:
    """Of each kind of moments: the mean of all seeds, their spread, and how far they are from fp32 of the same seed."""
    by_kind: dict[str, dict[int, dict[str, Any]]] = {}
    for name, run in runs.items():
        kind, seed = name.split("-")
        by_kind.setdefault(kind, {})[int(seed)] = run
    lines = [
        "| moments | held-out loss, mean of seeds | spread of seeds | from fp32 | largest departure of the curve |",
        "|---|---|---|---|---|",
    ]
    exact = by_kind.get("fp32", {})
    for kind, seeds in by_kind.items():
        ends = [run["held_out"] for run in seeds.values()]
        both = [(exact[seed], run) for seed, run in seeds.items() if seed in exact]
        apart = [abs(a - b) / a for one, other in both for a, b in zip(*_curves(one, other), strict=True)]
        far = statistics.fmean(b["held_out"] / a["held_out"] - 1 for a, b in both) if both else float("nan")
        lines.append(
            f"| {kind} | {statistics.fmean(ends):.4f} | {max(ends) - min(ends):.4f} | {100 * far:+.2f} % | "
            f"{100 * max(apart, default=float('nan')):.2f} % |"
        )
    return "\n".join(lines) + "\n"


def _curves(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[float], list[float]]:
    return smoothed(one["losses"]), smoothed(other["losses"])


if __name__ == "__main__":
    main()
