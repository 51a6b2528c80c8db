# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed-Chat's step 3 does: actor, critic, reference, reward and the actor's moving average as five engines,
each model built under a ``zero.Init`` of its own; the critic, as there, under the configuration of its evaluation,
which nobody gave a block.
"""

import json
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from given import language, leave_log, leave_weights, told

from tests.huggingface.texts import sequences

PROMPT, ANSWER = 16, 6


class Scored(torch.nn.Module):
    """A language model's trunk with a value for every token; the head has one output, as there."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.trunk = language(seed).model
        self.head = torch.nn.Linear(96, 1, bias=False, dtype=torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(ids).last_hidden_state).squeeze(-1).float()


def evaluating(config: dict) -> dict:
    """The dictionary that DeepSpeed-Chat makes for engines that do not train."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 1000, "offload_param": {"device": "cpu"}}
    kept = {key: value for key, value in config.items() if key not in ("optimizer", "zero_optimization", "fuyou")}
    return {**kept, "zero_optimization": zero}


def built(config: dict, make, seed: int) -> torch.nn.Module:
    with deepspeed.zero.Init(config_dict_or_path=config):
        torch.manual_seed(seed)
        return make(seed)


def trained(model: torch.nn.Module, config: dict):
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3, weight_decay=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def log_probs(engine, ids: torch.Tensor) -> torch.Tensor:
    logits = engine(input_ids=ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def average(actor, ema, beta: float = 0.9) -> None:
    for p, e in zip(actor.module.parameters(), ema.module.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p, e], modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                e.data.copy_(torch.lerp(p.data, e.data, beta))


def main() -> None:
    path, out, _ = told()
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("gloo")
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = json.loads(Path(path).read_text())
    quiet = evaluating(config)
    # As a user has it who gives every dictionary the block that the actor got.
    beside = {**quiet, "fuyou": config["fuyou"]} if "fuyou" in config else quiet
    actor = trained(built(config, language, 1), config)
    reference = deepspeed.initialize(model=built(beside, language, 1), config=beside)[0]
    ema = deepspeed.initialize(model=built(beside, language, 1), config=beside)[0]
    critic = trained(built(quiet, Scored, 2), config)
    reward = deepspeed.initialize(model=built(quiet, Scored, 3), config=quiet)[0]
    history = []
    for step in range(4):
        prompts = torch.stack([row["input_ids"][:PROMPT] for row in sequences(2, skip=2 * (step * num_ranks + rank))])
        with torch.no_grad():
            actor.eval()
            ids = actor.module.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=ANSWER, do_sample=False
            )
            old, known, values = log_probs(actor, ids), log_probs(reference, ids), critic(ids)
            score = reward(ids)[:, -1:]
        advantage = (score - 0.1 * (old - known))[:, PROMPT - 1 :] - values[:, PROMPT:]
        actor.train()
        ratio = (log_probs(actor, ids) - old)[:, PROMPT - 1 :].exp()
        loss = -(advantage * ratio).mean()
        actor.backward(loss)
        actor.step()
        wrong = (critic(ids)[:, PROMPT:] - values[:, PROMPT:] - advantage).square().mean()
        critic.backward(wrong)
        critic.step()
        average(actor, ema)
        norms = [float(engine.get_global_grad_norm()) for engine in (actor, critic)]
        history.append({"ids": ids.tolist(), "loss": loss.item(), "critic": wrong.item(), "norms": norms})
    leave_weights(torch.nn.ModuleList([actor.module, critic.module, ema.module]), out)
    leave_log(out, history)


if __name__ == "__main__":
    main()
