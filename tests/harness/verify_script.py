# SPDX-License-Identifier: Apache-2.0
"""A user's training script: ``verify_script.py DS_JSON [--unseeded] [--failing] [--failing-late] [--killed]
[--own NAME]``. Knows nothing of ds_fuyou. ``--own``: gives DeepSpeed an optimizer of torch, with two groups and a
schedule of its own. ``--failing-late``: with the block it ends in its second step;
``--killed``: in its fourth.
"""

import os
import signal
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
    given = {"model_parameters": model.parameters()}
    if "--own" in sys.argv:
        groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters()}]
        optimizer = getattr(torch.optim, sys.argv[-1])(groups, lr=1e-2, weight_decay=0.01)
        given = {"optimizer": optimizer}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, *_ = deepspeed.initialize(model=model, config=sys.argv[1], **given)
    for step in range(100):
        if "--failing-late" in sys.argv and step == 1 and "stock" not in os.environ.get("DS_FUYOU_VERIFY", ""):
            os._exit(3)
        if "--killed" in sys.argv and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.full((4, 64), 0.01 * step + 0.1, dtype=torch.bfloat16)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        if "--own" in sys.argv:
            schedule.step()


if __name__ == "__main__":
    main()
