# SPDX-License-Identifier: Apache-2.0
"""LoRA with PEFT and the Trainer, told by a JSON file what to do. With the block it also says what rank 0 keeps where.

``frozen``: names of adapter matrices that are not trained (LoRA-FA: "lora_A"). ``quantise``: the base's linear layers
hold int8 codes and a scale (as quantised bases do) instead of a weight.
"""

import torch
from peft import LoraConfig, get_peft_model
from texts import sequences
from told import arguments_and_model, leave, read_case
from transformers import Trainer


class Int8Linear(torch.nn.Module):
    """A frozen linear layer kept as int8 codes with one scale a row."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / 127
        self.codes = torch.nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = torch.nn.Parameter(scale.to(torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype))


class Adapted(torch.nn.Module):
    """A quantised layer with a low-rank adapter beside it."""

    def __init__(self, linear: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = Int8Linear(linear)
        self.lora_A = torch.nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def quantised(model):
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("up_proj", "down_proj"):
            setattr(layer.mlp, name, Adapted(getattr(layer.mlp, name)))
    return model


def adapted(model, case: dict):
    if case.get("quantise"):
        model = quantised(model)
    else:
        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    for name, param in model.named_parameters():
        if any(part in name for part in case.get("frozen", ())):
            param.requires_grad = False
    return model


def placement(optimizer) -> dict:
    """What the optimizer holds; empty without the block."""
    state = getattr(optimizer, "rank_state", None)
    if state is None:
        return {}
    core = state.core
    return {
        "layout_numel": core.layout.numel,
        "names": [span.name for span in core.layout.params],
        "frozen_bytes": state.frozen_bytes(),
        "ahead_reads": state.parameters.num_ahead_reads,
        "gradient_bytes": sum(t.numel() * t.element_size() for t in getattr(core.gradients, "_flat", [])),
        "store_bytes": state.store.total_bytes if state.store is not None else 0,
    }


def main() -> None:
    case = read_case()
    args, base = arguments_and_model(case)
    torch.manual_seed(1)
    trainer = Trainer(model=adapted(base, case), args=args, train_dataset=sequences(48))
    trainer.train(resume_from_checkpoint=case.get("resume"))
    engine = trainer.model_wrapped
    if not case.get("quantise"):
        trainer.save_model(case["save_model"])
    result = {
        "trainable": sum(p.ds_numel for p in engine.parameters() if p.requires_grad),
        "total": sum(p.ds_numel for p in engine.parameters()),
        "placement": placement(engine.optimizer),
    }
    leave(trainer, case, result)


if __name__ == "__main__":
    main()
