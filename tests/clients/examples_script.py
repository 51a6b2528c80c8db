# SPDX-License-Identifier: Apache-2.0
"""A script of DeepSpeedExamples, as it is, from the checkout that DEEPSPEED_EXAMPLES names.

Options: ``script`` (its path in there), ``overlap`` of the block's optimizer, and ``arguments``; {models}, {data},
{config} and {out} in them are filled in. What it prints of losses and scores is the log; times are left out.
DeepSpeed-Chat makes its configuration itself: there the block is added to the dictionary that it trains with.
"""

import builtins
import json
import logging
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import datasets
import deepspeed
import torch
from given import is_first, leave_log, leave_weights, paragraphs, told
from safetensors.torch import load_file, save_file

NUMBERS = re.compile(r"loss|ppl|score|reward|acc", re.IGNORECASE)
CLOCK = re.compile(r"\(duration.*|[,|]?\s*(time|latency|tflops|tokens/s)\b.*|>.*seconds.*", re.IGNORECASE)


def rows() -> tuple[datasets.DatasetDict, datasets.DatasetDict]:
    """In the columns of the data sets that the scripts ask for: preferences, and instructions."""
    texts = paragraphs()[:12]
    prompts = [f"Human: {text[:30]} Assistant:" for text in texts]
    preferences = {
        "prompt": prompts,
        "chosen": [text[30:80] for text in texts],
        "rejected": [text[80:30:-1] for text in texts],
    }
    instructions = {
        "instruction": [text[:40] for text in texts[:8]],
        "input": [""] * 8,
        "output": [text[40:120] for text in texts[:8]],
    }
    both = (datasets.Dataset.from_dict(columns) for columns in (preferences, instructions))
    first, second = (datasets.DatasetDict({"train": data, "test": data.select(range(2))}) for data in both)
    return first, second


def make_critic(policy: Path, critic: Path) -> None:
    """As step 2 saves one: the trunk of the policy and a head."""
    from transformers import AutoModel, AutoTokenizer

    trunk = AutoModel.from_pretrained(policy)
    torch.manual_seed(3)
    head = torch.randn(1, trunk.config.hidden_size) * 0.02
    state = {f"rwtransformer.{name}": value for name, value in trunk.state_dict().items()}
    critic.mkdir()
    trunk.config.save_pretrained(critic)
    AutoTokenizer.from_pretrained(policy).save_pretrained(critic)
    torch.save({**state, "v_head.weight": head.to(torch.bfloat16)}, critic / "pytorch_model.bin")


def make_opt(directory: Path) -> None:
    """The family that DeepSpeed-Chat's own scripts train."""
    from transformers import AutoTokenizer, GPT2TokenizerFast, OPTConfig, OPTForCausalLM

    made = AutoTokenizer.from_pretrained(directory.parent / "policy")
    tokenizer = GPT2TokenizerFast(  # this class can write its vocabulary
        tokenizer_object=made.backend_tokenizer,
        bos_token=made.eos_token,
        eos_token=made.eos_token,
        pad_token=made.pad_token,
    )
    config = OPTConfig(
        vocab_size=512,
        hidden_size=96,
        word_embed_proj_dim=96,
        ffn_dim=200,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(5)
    OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def keep_lines(log: list[dict[str, Any]]) -> None:
    """Of what is printed or logged from now on."""
    stock_print = builtins.print

    def kept(*parts: Any, **how: Any) -> None:
        stock_print(*parts, **how)
        note(" ".join(map(str, parts)))

    def note(line: str) -> None:
        line = CLOCK.sub("", line)
        if NUMBERS.search(line):
            log.append({"line": line.strip()})

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    builtins.print = kept
    logging.getLogger().addHandler(Handler())  # loggers of their own hand on what they are told


def add_block(config: str, overlap: str | None) -> None:
    """To the dictionary of DeepSpeed-Chat's engines that train."""
    from dschat.utils import ds_utils

    block = json.loads(Path(config).read_text()).get("fuyou")
    if block is not None and overlap is not None:
        block["optimizer"]["overlap"] = overlap
    made = ds_utils.get_train_ds_config

    def with_block(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**made(*args, **kwargs), **({} if block is None else {"fuyou": block})}

    ds_utils.get_train_ds_config = with_block


def make_heads_bf16() -> None:
    """Of reward models for PPO: stock's reward engine would compute with a trunk in bf16 and a head in fp32."""
    from dschat.utils.model.reward_model import RewardModel

    built = RewardModel.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.v_head.to(torch.bfloat16)

    RewardModel.__init__ = __init__


def main() -> None:
    config, out, options = told()
    checkout = Path(os.environ["DEEPSPEED_EXAMPLES"])
    script = checkout / options["script"]
    deepspeed.init_distributed("gloo")
    models = Path(options["models"])
    opt, data = out / "opt", out / "Dahoas" / "rm-static"
    preferences, instructions = rows()
    if is_first():
        shared = models / "opt"
        if not shared.exists():
            make_opt(shared)
        opt.symlink_to(shared)
        make_critic(shared, out / "critic")
        preferences.save_to_disk(str(data))
    torch.distributed.barrier()
    filled = {"models": str(models), "model": str(opt), "data": str(data), "config": config, "out": str(out)}
    sys.argv = [str(script), *(str(part).format(**filled) for part in options["arguments"])]
    sys.argv.append(f"--local_rank={os.environ['LOCAL_RANK']}")  # as DeepSpeed's launcher does
    if "DeepSpeed-Chat" in options["script"]:
        sys.path.insert(0, str(checkout / "applications" / "DeepSpeed-Chat"))
        add_block(config, options.get("overlap"))
        if "step3" in options["script"]:
            make_heads_bf16()
    datasets.load_dataset = lambda *_, **__: instructions  # the one that a network would bring
    engines: list[Any] = []
    initialize = deepspeed.initialize

    def noted(*args: Any, **kwargs: Any) -> Any:
        made = initialize(*args, **kwargs)
        engines.append(made[0])
        return made

    deepspeed.initialize = noted
    log: list[dict[str, Any]] = []
    keep_lines(log)
    runpy.run_path(str(script), run_name="__main__")
    for number, engine in enumerate(engines):
        leave_weights(engine.module, out / f"engine-{number}")
    if is_first():
        (out / "final").mkdir()
        found = {f"engine {n}": load_file(out / f"engine-{n}/final/model.safetensors") for n in range(len(engines))}
        found |= {file.parent.name: torch.load(file) for file in (out / "written").glob("**/pytorch_model.bin")}
        every = {f"{where}: {name}": value.clone() for where, values in found.items() for name, value in values.items()}
        save_file(every, out / "final" / "model.safetensors")
    leave_log(out, log)


if __name__ == "__main__":
    main()
