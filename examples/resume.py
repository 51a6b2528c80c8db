# SPDX-License-Identifier: Apache-2.0
"""An ordinary DeepSpeed loop that saves every few steps and goes on from the last checkpoint when started again.

deepspeed examples/resume.py --deepspeed_config configs/finetune_fuyou.json --checkpoints .work/checkpoints --steps 10
deepspeed examples/resume.py --deepspeed_config configs/finetune_fuyou.json --checkpoints .work/checkpoints --steps 20
The second command prints steps 11 to 20, with the losses that one run of 20 steps would have printed.
"""

import argparse

import deepspeed
import torch
from finetune import GPT
from text import manual


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    deepspeed.init_distributed()
    model = GPT(args.layers, args.width, args.width // 64, args.length, 256)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    engine.load_checkpoint(args.checkpoints)  # warns and goes on when there is none yet

    data, rank = manual(), torch.distributed.get_rank()
    for step in range(engine.global_steps, args.steps):
        for micro in range(engine.gradient_accumulation_steps()):
            # Data by step, micro-batch and rank, so that a resumed run sees what the first would have seen.
            generator = torch.Generator().manual_seed(1_000_000 * rank + 1000 * step + micro)
            starts = torch.randint(
                len(data) - args.length - 1, (engine.train_micro_batch_size_per_gpu(),), generator=generator
            )
            ids = torch.stack([data[s : s + args.length + 1] for s in starts]).to(engine.device)
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
        if rank == 0:
            print(f"step {engine.global_steps:4d}  loss {loss.item():.6f}", flush=True)
        if engine.global_steps % args.save_every == 0:
            engine.save_checkpoint(args.checkpoints)


if __name__ == "__main__":
    main()
