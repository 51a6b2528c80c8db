# SPDX-License-Identifier: Apache-2.0
"""Trains each model under the stock engine and under swapping and recomputing ones, and compares P16 and losses.

Run by test_engine.py with a directory for state and one for monitors; prints one line of JSON: per model and mode what
differs, what was swapped.
"""

import copy
import json
import sys
from types import SimpleNamespace

import deepspeed
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.activations.huggingface import TINY
from tests.activations.support import Plain
from tests.harness.plans import plan_document
from tests.harness.runner import ds_config

STEPS, MICRO = 2, 2
DISABLE = torch.autograd.graph.disable_saved_tensors_hooks
MODES = {
    "swap": {"mode": "swap", "tier": "nvme"},
    "recompute": {"mode": "recompute"},
    "planned": {"mode": "auto", "tier": "nvme"},
}
SHOWN_ELSEWHERE = {
    ("deepspeed", "recompute"),
    ("deepspeed", "planned"),
    ("everything", "recompute"),
    ("drawing", "planned"),
    ("transforming", "planned"),
    ("borrowing", "swap"),
    ("borrowing", "planned"),
    ("asides", "swap"),
    ("asides", "planned"),
}
PLANNED = {  # blocks in which an output is kept, swapped, recomputed: of three, of which the model may have fewer
    "block_input": (0, 3, 0),
    "qkv": (1, 1, 1),
    "attention": (0, 2, 1),
    "mlp_up": (1, 0, 2),
    "mlp_activation": (0, 1, 2),
}


class DeepSpeedCheckpointed(Plain):
    """DeepSpeed's own checkpointing around every block, and the loss left to the script."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1])
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.training else block(x)
        return self.head(x)


def ids(seed: int) -> torch.Tensor:
    return torch.randint(300, (2, 33), generator=torch.Generator().manual_seed(seed))


def plain(**options) -> tuple:
    torch.manual_seed(0)
    return Plain(width=64, **options), lambda model, seed: model(ids(seed))


def deepspeed_checkpointed() -> tuple:
    torch.manual_seed(0)

    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        batch = ids(seed)
        return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch[:, 1:].flatten())

    return DeepSpeedCheckpointed(width=64), loss_of


class Draws(nn.Module):
    """Draws from a generator of its own, counts its calls, hands on what the block before it made, and has a sparse
    buffer. All of this is found again by a recomputation, or must not stop a run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.share, self.own = nn.Linear(64, 64), 1.0, torch.Generator().manual_seed(0)
        self.register_buffer("mixing", torch.eye(33).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        self.share *= 0.9
        h = nn.functional.gelu(self.linear(x)) * (torch.rand(x.shape, generator=self.own) < 0.5) * self.share
        h = shared["last"] = h + 0.5 * shared.get("last", 0.0)
        return x + torch.sparse.mm(self.mixing, h.float()).to(x.dtype)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(300, 64), nn.ModuleList(Draws() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, shared = self.tokens(ids[0]), {}
        for block in self.blocks:
            x = block(x, shared)
        return x.float().square().mean()


def drawing() -> tuple:
    torch.manual_seed(0)

    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        """The model is evaluated between forward and backward."""
        model.train()
        loss = model(ids(seed))
        model.eval()
        with torch.no_grad():
            evaluated = model(ids(seed + 50))
        return loss + evaluated

    return Drawing(), loss_of


class Slopes(nn.Module):
    """Uses a transform of ``torch.func``, and is interrupted once where it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_interrupted = nn.Linear(64, 64), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        h = nn.functional.gelu(self.linear(x))
        return x + h * torch.func.vmap(torch.func.grad(lambda row: (row.float() ** 3).sum()))(h)


class Transforming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(300, 64), nn.ModuleList(Slopes() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[0])
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def transforming() -> tuple:
    torch.manual_seed(0)
    return Transforming(), lambda model, seed: model(ids(seed))


class Borrows(nn.Module):
    """Reads parameters of a part of its own, before and after that has used them."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.other(x + self.part.bias))
        return x + torch.tanh(self.part(h) + self.part.bias) @ self.part.weight + self.other.bias


class Borrowing(Transforming):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Borrows() for _ in range(3))


def borrowing() -> tuple:
    torch.manual_seed(0)
    return Borrowing(), lambda model, seed: model(ids(seed))


class Aside(nn.Module):
    """What backward reaches first is handed over where nobody looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aside = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, held: SimpleNamespace, shared: dict[int, torch.Tensor]) -> SimpleNamespace:
        shared[len(shared)] = self.aside(held.inner.x)
        return SimpleNamespace(inner=SimpleNamespace(x=held.inner.x + nn.functional.gelu(self.linear(held.inner.x))))


class Asides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(300, 64), nn.ModuleList(Aside() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        held, shared = SimpleNamespace(inner=SimpleNamespace(x=self.tokens(ids[0]))), {}
        for block in self.blocks:
            held = block(held, shared)
        return sum(each.float().square().mean() for each in shared.values())


def asides() -> tuple:
    torch.manual_seed(0)
    return Asides(), lambda model, seed: model(ids(seed))


def hugging_face(name: str, checkpointing: bool) -> tuple:
    torch.manual_seed(0)
    model, batch = TINY[name]()
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    floats = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
    return model, lambda model, seed: model(**floats).loss


# what is trained by stock, what is trained by ours: they differ where stock cannot have the checkpointing
MODELS = {
    "everything": (lambda: plain(dropout=0.1, tied=True, frozen=(1,), twice=True),) * 2,
    "llama": (lambda: hugging_face("llama", False), lambda: hugging_face("llama", True)),
    "deepspeed": (lambda: plain(), deepspeed_checkpointed),
    "drawing": (drawing,) * 2,
    "transforming": (transforming,) * 2,
    "borrowing": (borrowing,) * 2,
    "asides": (asides,) * 2,
}


def planned(model: nn.Module, settings: dict) -> dict:
    layers = 3 if isinstance(model, Plain) else 2
    fates = {name: (kept, swapped - (3 - layers), again) for name, (kept, swapped, again) in PLANNED.items()}
    fates["mlp_up"] = (layers - 2, 0, 2)
    fates["mlp_activation"] = (0, layers - 2, 2)
    return plan_document(sum(param.numel() for param in model.parameters()), layers, fates, **settings)


def train(made: tuple, block: dict | None, name: str = "") -> dict:
    model, loss_of = made
    config = ds_config(gradient_accumulation_steps=MICRO)
    if block is not None:
        config["fuyou"] = block
        config["csv_monitor"] = {"enabled": True, "output_path": sys.argv[2], "job_name": name}
        if "planned" in name:
            block["plan"] = planned(model, block["plan"])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
    losses = []
    for step in range(STEPS):
        if step == 1:
            engine.eval()
            with torch.no_grad():
                losses.append(float(loss_of(engine, 99)))
            engine.train()
        for micro in range(MICRO):
            torch.manual_seed(step * MICRO + micro)
            loss = loss_of(engine, step * MICRO + micro)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    found = {"losses": losses, "params": {}}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found["params"][name] = param.data.detach().clone()
    session = engine.optimizer.rank_state.activations if block is not None else None
    if session is not None:
        found["swapped"] = session.counters.out_bytes
        found["read"] = session.counters.read_bytes
        if session.swapper is not None and session.swapper.tier is not None:
            found["left"] = session.swapper.held.now
    engine.destroy()
    return found


def interrupted(activations: dict) -> dict:
    """What is left of an engine whose first forward Ctrl-C has ended in a block."""
    model, loss_of = transforming()
    block = {"nvme_path": sys.argv[1], "optimizer": {"tier": "cpu"}, "activations": activations}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(fuyou=block))
    model.blocks[1].is_interrupted = True
    try:
        loss_of(engine, 0)
    except KeyboardInterrupt:
        engine.destroy()
    return {
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
        "modes": [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()],
        "aside": torch.autograd.graph.disable_saved_tensors_hooks is not DISABLE,
    }


def compare(stock: dict, ours: dict) -> list[str]:
    found = [] if stock["losses"] == ours["losses"] else [f"losses {stock['losses']} {ours['losses']}"]
    return found + [name for name, value in stock["params"].items() if not torch.equal(value, ours["params"][name])]


def main() -> None:
    torch.set_num_threads(2)
    deepspeed.init_distributed("gloo")
    result = {}
    for name, (stock_model, our_model) in MODELS.items():
        stock = train(stock_model(), None)
        for mode, activations in MODES.items():
            if (name, mode) in SHOWN_ELSEWHERE:
                continue  # a few seconds each for what others show already
            block = {
                "nvme_path": sys.argv[1],
                "parameters": {"tier": "nvme" if name == "everything" else "cpu"},
                "optimizer": {"tier": "nvme"},
                "activations": activations,
                "plan": {"smallest_swapped_bytes": 1024, "activation_bytes": 262144, "chunk_bytes": 65536},
            }
            ours = train(our_model(), block, f"{name}-{mode}")
            result[f"{name} {mode}"] = {
                "differs": compare(stock, ours),
                **{key: ours.get(key) for key in ("swapped", "read", "left")},
            }
    for mode in ("swap", "auto", "none"):
        result[f"interrupted {mode}"] = interrupted({"mode": mode, "tier": "nvme"})
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
