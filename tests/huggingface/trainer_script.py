# SPDX-License-Identifier: Apache-2.0
"""A Trainer script as people have it, told by a JSON file what to do; started by `deepspeed` or `accelerate launch`.

Nothing in it knows of the package. Rank 0 leaves what was logged in ``result``.
"""

import json
import sys

import torch
from texts import fresh_model, sequences
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


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


def main() -> None:
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    with open(arguments[0], encoding="utf-8") as handle:
        case = json.load(handle)
    built = None if case["zero_init"] else fresh_model(case["model"])
    args = TrainingArguments(
        output_dir=case["output"],
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=11,
        deepspeed=case["config_file"] if case["launcher"] == "deepspeed" else None,
        **case["arguments"],
    )
    model = built if built is not None else AutoModelForCausalLM.from_pretrained(case["pretrained"])
    generate = GenerateBetweenSteps(case.get("generate_after", []))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=sequences(48),
        eval_dataset=sequences(4, skip=100),
        callbacks=[generate],
    )
    trainer.train(resume_from_checkpoint=case.get("resume"))
    if case.get("save_model"):
        trainer.save_model(case["save_model"])
    if trainer.is_world_process_zero():
        engine = trainer.model_wrapped
        result = {
            "history": trainer.state.log_history,
            "texts": generate.texts,
            "optimizer_class": type(engine.optimizer).__name__,
            "num_groups": len(engine.optimizer.param_groups),
        }
        with open(case["result"], "w", encoding="utf-8") as handle:
            json.dump(result, handle)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
