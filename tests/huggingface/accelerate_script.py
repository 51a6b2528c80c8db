# SPDX-License-Identifier: Apache-2.0
"""A loop of its own under Accelerate, told by a JSON file what to do; started by `accelerate launch`.

``optimizer``: "torch" (AdamW with two groups) or "dummy" (the JSON has it); ``scheduler``: "torch", "dummy" or
"callable" (a torch schedule for the JSON's optimizer). ``empty_group``: a third one. ``save_after``: a step; ``load``:
a directory to begin from.
"""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from texts import fresh_model, sequences
from torch.optim.lr_scheduler import LambdaLR


def groups(model) -> list:
    named = list(model.named_parameters())
    rest = [p for n, p in named if n.endswith("bias") or "norm" in n or "ln_" in n]
    ids = {id(p) for p in rest}
    return [
        {"params": [p for _, p in named if id(p) not in ids], "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0},
    ]


def schedule(optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.3 * step))


def make_optimizer(case: dict, model) -> tuple:
    kind = case["scheduler"]
    if case["optimizer"] == "torch":
        empty = [{"params": [], "weight_decay": 0.0}] if case.get("empty_group") else []
        optimizer = torch.optim.AdamW([*groups(model), *empty], lr=2e-3)
        return optimizer, schedule(optimizer) if kind == "torch" else DummyScheduler(
            optimizer, total_num_steps=8, warmup_num_steps=2
        )
    optimizer = DummyOptim(groups(model), lr=2e-3, weight_decay=0.1)
    if kind == "callable":
        return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=schedule)
    return optimizer, DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)


def evaluate(model, data) -> float:
    model.eval()
    with torch.no_grad():
        losses = [float(model(**batch).loss) for batch in data]
    model.train()
    return sum(losses) / len(losses)


def train(accelerator, prepared: tuple, case: dict, result: dict) -> None:
    model, optimizer, data, eval_data, scheduler = prepared
    step = model.global_steps
    micro = step * accelerator.gradient_accumulation_steps
    for batch in accelerator.skip_first_batches(data, micro):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        result["history"].append(
            {"loss": float(loss.detach()), "grad_norm": float(norm), "lr": [g["lr"] for g in optimizer.param_groups]}
        )
        if step % 2 == 0:
            result["history"].append({"eval_loss": evaluate(model, eval_data)})
        if step == case.get("save_after"):
            accelerator.save_state(case["state"])
        if step == case["steps"]:
            return


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as handle:
        case = json.load(handle)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(5)
    model = fresh_model(case["model"])
    optimizer, scheduler = make_optimizer(case, model)
    # Without generators of their own, loaders draw a seed from the global state, which dropout draws from as well: a
    # resumed run makes its loader's iterator after the state was restored, the uninterrupted one long before.
    data = torch.utils.data.DataLoader(sequences(64), batch_size=2, generator=torch.Generator())
    eval_data = torch.utils.data.DataLoader(sequences(4, skip=100), batch_size=2, generator=torch.Generator())
    prepared = accelerator.prepare(model, optimizer, data, eval_data, scheduler)
    result = {
        "history": [],
        "optimizer_class": type(prepared[0].optimizer).__name__,
        "num_groups": len(prepared[0].optimizer.param_groups),
        "num_weights": len(list(prepared[0].parameters())),
    }
    if case.get("load"):
        accelerator.load_state(case["load"])
    train(accelerator, prepared, case, result)
    if case.get("save_model"):
        accelerator.save_model(prepared[0], case["save_model"])
    if accelerator.is_main_process:
        with open(case["result"], "w", encoding="utf-8") as handle:
            json.dump(result, handle)
    accelerator.end_training()


if __name__ == "__main__":
    main()
