# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT-2 on the Python manual with a loop of its own under Accelerate. An ordinary Accelerate script.

accelerate launch --use_deepspeed --deepspeed_config_file configs/hf_trainer_fuyou.json --mixed_precision bf16 \
    examples/accelerate_loop.py --steps 20 --save .work/accelerate
Start it again with --load .work/accelerate and it goes on from there.
"""

import argparse

import torch
from accelerate import Accelerator
from text import Rows
from transformers import AutoModelForCausalLM, GPT2Config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--save", help="directory for the state after the last step")
    parser.add_argument("--load", help="directory of a saved state")
    args = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=args.hidden, n_layer=args.layers, n_head=8, n_positions=args.length)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    data = torch.utils.data.DataLoader(Rows(0, 1024, args.length), batch_size=args.batch)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    first = 0
    if args.load:
        accelerator.load_state(args.load)
        first = model.global_steps
    for step, batch in enumerate(data):
        if not first <= step < args.steps:
            continue
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # the value that counts is gradient_clipping in the JSON
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)
    if args.save:
        accelerator.save_state(args.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
