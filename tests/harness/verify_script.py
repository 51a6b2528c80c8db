# SPDX-License-Identifier: Apache-2.0
"""A user's training script: ``verify_script.py DS_JSON [--unseeded] [--failing]``. Knows nothing of ds_fuyou."""

import sys

import deepspeed
import torch
from torch import nn


def main() -> None:
    if "--failing" in sys.argv:
        raise ValueError("the script's own mistake")
    if "--unseeded" not in sys.argv:
        torch.manual_seed(0)
    else:
        torch.seed()
    deepspeed.init_distributed("gloo")
    model = nn.Sequential(nn.Linear(64, 200), nn.GELU(), nn.Linear(200, 64))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
    for step in range(100):
        batch = torch.full((4, 64), 0.01 * step + 0.1, dtype=torch.bfloat16)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
