# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level GPT on the Python documentation that ships with every CPython. An ordinary DeepSpeed script.

deepspeed examples/finetune.py --deepspeed --deepspeed_config configs/finetune_fuyou.json
"""

import argparse
import time

import deepspeed
import torch
from text import manual
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    def __init__(
        self, num_layers: int, width: int, num_heads: int, length: int, vocabulary: int, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1]) + self.places(torch.arange(ids.shape[1] - 1, device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpointing and self.training else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero-init", action="store_true", help="build the model partitioned, for large models")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of every block")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config, enabled=args.zero_init):
        model = GPT(args.layers, args.width, args.heads, args.length, args.vocabulary, args.checkpointing)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    data = manual()
    generator = torch.Generator().manual_seed(args.seed + torch.distributed.get_rank())
    batch = engine.train_micro_batch_size_per_gpu()
    begin = time.perf_counter()
    first = engine.global_steps * engine.gradient_accumulation_steps()  # not 0 if the block has "resume": "auto"
    for micro in range(args.steps * engine.gradient_accumulation_steps()):
        starts = torch.randint(len(data) - args.length - 1, (batch,), generator=generator)
        if micro < first:  # drawn all the same: the batches of a run that goes on are those of one that was not ended
            continue
        ids = torch.stack([data[s : s + args.length + 1] for s in starts]).to(engine.device)
        loss = engine(ids)
        engine.backward(loss)
        is_last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_last and torch.distributed.get_rank() == 0:
            now = time.perf_counter()
            tokens = batch * args.length * torch.distributed.get_world_size() * engine.gradient_accumulation_steps()
            print(
                f"step {engine.global_steps:4d}  loss {loss.item():.6f}  {tokens / (now - begin):8.0f} tokens/s",
                flush=True,
            )
            begin = now


if __name__ == "__main__":
    main()
