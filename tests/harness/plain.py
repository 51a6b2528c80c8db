# SPDX-License-Identifier: Apache-2.0
"""The same training without DeepSpeed: what PyTorch itself makes of a script's calls."""

import torch
from deepspeed.accelerator import get_accelerator


class PlainEngine:
    """As much of an engine's interface as the cases need. AdamW in fp32, one rank."""

    loss_scale = 1.0

    def __init__(self, module: torch.nn.Module, groups: list, config: dict) -> None:
        params = config["optimizer"]["params"]
        self.module = module.to(get_accelerator().current_device_name())
        self.optimizer = torch.optim.AdamW(groups, lr=params["lr"], weight_decay=params["weight_decay"])
        self.optimizer.loss_scale = 1.0
        self._clip = config["gradient_clipping"]
        self._accumulation = config["gradient_accumulation_steps"]
        self._micro_steps = self.global_steps = 0
        self._norm = None

    def __call__(self, **batch):
        return self.module(**batch)

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def backward(self, loss, **how) -> None:
        (loss / self._accumulation).backward(**how)

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self._accumulation:
            return
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        limit = self._clip or float("inf")
        self._norm = torch.nn.utils.clip_grad_norm_(params, limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1

    def get_global_grad_norm(self):
        return self._norm

    def was_step_applied(self) -> bool:
        return True

    def eval(self) -> None:
        self.module.eval()

    def train(self) -> None:
        self.module.train()
