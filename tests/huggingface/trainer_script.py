# SPDX-License-Identifier: Apache-2.0
"""A Trainer script as people have it, told by a JSON file what to do; started by `deepspeed` or `accelerate launch`.

Nothing in it knows of the package but the end of a run that is killed. Rank 0 leaves what was logged in ``result``.
"""

import os
import signal

import torch
from texts import sequences
from told import arguments_and_model, leave, read_case
from transformers import Trainer, TrainerCallback

from tests.harness.meeting import Meeting


class GenerateBetweenSteps(TrainerCallback):
    def __init__(self, at: list) -> None:
        self.at = at
        self.texts = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.at:
            was_training = model.training
            model.eval()
            prompt = sequences(1, skip=3)[0]["input_ids"][None, :8].to(args.device)
            with torch.no_grad():
                out = model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, synced_gpus=True
                )
            self.texts.append(out[0].tolist())
            model.train(was_training)


class Killed(TrainerCallback):
    """When all ranks have committed the step."""

    def __init__(self, at: int | None, folder: str) -> None:
        self.at = at
        self.committed = Meeting(folder, "committed")
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.trainer.model_wrapped.optimizer.rank_state.core.commits.settle()
            self.committed.arrive()
            self.committed.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    case = read_case()
    args, model = arguments_and_model(case)
    killed = Killed(case.get("killed_after"), args.output_dir)
    generate = GenerateBetweenSteps(case.get("generate_after", []))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=sequences(48),
        eval_dataset=sequences(4, skip=100),
        callbacks=[generate, killed],
    )
    killed.trainer = trainer
    trainer.train(resume_from_checkpoint=case.get("resume"))
    trainer.save_model(case["save_model"])
    num_groups = len(trainer.model_wrapped.optimizer.param_groups)
    leave(trainer, case, {"texts": generate.texts, "num_groups": num_groups})


if __name__ == "__main__":
    main()
