# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers. Options: ``trainer`` (SFT, DPO, KTO, Reward, GRPO, RLOO), ``arguments`` of its configuration,
``judge``: rewards come from a model instead of a function.
"""

import trl
from datasets import Dataset
from given import ARGUMENTS, leave_trainer, on_disk, paragraphs, told
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def rows(kind: str) -> Dataset:
    texts = paragraphs()[:48]
    if kind == "SFT":
        return Dataset.from_dict({"text": texts})
    prompts = [text[:40] for text in texts]
    if kind in ("GRPO", "RLOO"):
        return Dataset.from_dict({"prompt": prompts})
    chosen, rejected = [text[40:120] for text in texts], [text[120:40:-1] for text in texts]
    if kind == "KTO":
        given = {"prompt": prompts, "completion": chosen, "label": [n % 2 == 0 for n in range(len(prompts))]}
        return Dataset.from_dict(given)
    if kind == "Reward":
        chosen, rejected = ([p + a for p, a in zip(prompts, ends, strict=True)] for ends in (chosen, rejected))
        return Dataset.from_dict({"chosen": chosen, "rejected": rejected})
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def even_letters(completions: list[str], **_: object) -> list[float]:
    return [sum(ord(letter) % 2 == 0 for letter in text) / (1 + len(text)) for text in completions]


def main() -> None:
    config, out, options = told()
    kind = options["trainer"]
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(out), deepspeed=config, **{**ARGUMENTS, **options.get("arguments", {})}
    )
    policy, judge = f"{options['models']}/policy", f"{options['models']}/judge"
    data = on_disk(rows(kind), out / "rows")
    given = {"train_dataset": data, "processing_class": AutoTokenizer.from_pretrained(policy)}
    if args.eval_strategy != "no":
        given["eval_dataset"] = data.select(range(4))
    if kind in ("GRPO", "RLOO"):
        given["reward_funcs"] = even_letters
        if options.get("judge"):
            given["reward_funcs"] = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1)
    trainer = getattr(trl, f"{kind}Trainer")(model=judge if kind == "Reward" else policy, args=args, **given)
    trainer.train(resume_from_checkpoint=options.get("resume"))
    leave_trainer(trainer, out)


if __name__ == "__main__":
    main()
