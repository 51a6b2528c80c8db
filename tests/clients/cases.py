# SPDX-License-Identifier: Apache-2.0
"""The matrix: which program does what, on how many ranks, from which checkpoint it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "PROGRAMS", "Case"]


@dataclass(frozen=True)
class Case:
    """``options``: what the script is told. ``checkpoint``: what a second run goes on from, below the first one's
    directory. ``plain``: the JSON has no "auto" outside of the block, for programs that do not fill them in.
    ``environment``: where it runs, a folder of ``.venv-clients``. ``zero``: more keys of ``zero_optimization``.
    ``remark``: what the table says beside the outcome.
    """

    name: str
    program: str
    shows: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (1, 2)
    checkpoint: str | None = None
    plain: bool = False
    environment: str = ""
    zero: dict[str, Any] = field(default_factory=dict)
    remark: str = ""


# In the order of the table: distributions whose versions it names.
PROGRAMS = {
    "TRL": "trl",
    "Lightning": "lightning",
    "LLaMA-Factory": "llamafactory",
    "Trainer": "transformers",
    "ms-swift": "ms-swift",
    "axolotl": "axolotl",
    "DeepSpeed-Chat": "deepspeed",
    "DeepSpeedExamples": "deepspeed",
}


_REFERENCE = "resumed, it begins with the first reference again, in stock, too: TRL does not save the one it has made"


def _trl(name: str, shows: str, trainer: str, **arguments: Any) -> Case:
    options: dict[str, Any] = {"trainer": trainer}
    if arguments.pop("judge", False):
        options["judge"] = True
    zero, remark = arguments.pop("zero", {}), arguments.pop("remark", "")
    given: dict[str, Any] = {"checkpoint": "checkpoint-2", "zero": zero, "remark": remark}
    if arguments.get("sync_ref_model"):
        given |= {"checkpoint": None, "remark": _REFERENCE}
    told = {**options, "arguments": arguments}
    return Case(f"trl-{name}", "TRL", shows, "trl_script.py", told, **given)


def _dpo(name: str, shows: str, **arguments: Any) -> Case:
    return _trl(name, shows, "DPO", max_length=96, learning_rate=1e-3, **arguments)


def _rollout(name: str, shows: str, trainer: str, **arguments: Any) -> Case:
    given = {"num_generations": 2, "max_completion_length": 8, "learning_rate": 1e-3, "beta": 0.04}
    return _trl(name, shows, trainer, **{**given, **arguments})


def _example(name: str, shows: str, script: str, arguments: str, remark: str = "", **more: Any) -> Case:
    options = {"script": script, "arguments": arguments.split(), **more}
    given: dict[str, Any] = {"plain": True, "environment": "examples", "remark": remark}
    return Case(name, "DeepSpeedExamples", shows, "examples_script.py", options, **given)


_CHAT = "applications/DeepSpeed-Chat/training"
_CHAT_DATA = "--data_path {data} --data_output_path {out}/data --seed 7 --offload --dtype bf16"
_CHAT_STEP = f"{_CHAT_DATA} --model_name_or_path {{model}} --zero_stage 3 --output_dir {{out}}/written"
_CHAT_STEP += " --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_seq_len 48 --learning_rate 1e-3"
_CHAT_PPO = f"{_CHAT_DATA} --actor_model_name_or_path {{model}} --critic_model_name_or_path {{out}}/critic"
_CHAT_PPO += " --actor_zero_stage 3 --critic_zero_stage 3 --enable_ema --num_padding_at_beginning 1"
_CHAT_PPO += " --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --output_dir {out}/written"
_CHAT_PPO += " --max_prompt_seq_len 32 --max_answer_seq_len 8 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3"
_FINETUNE = "--model_name {models}/policy --lr 1e-3 --batch_size 2 --num_train_epochs 1 --output_dir {out}/checkpoint"
_FINETUNE += " --deepspeed --deepspeed_config {config}"

_CUDA_CHECK = "Lightning's check for CUDA is left out"
_OVERLAY = "without torchaudio, which it imports; with a newer `datasets` than it asks for"

CASES = (
    _trl(
        "sft-packing",
        "SFT: packing, gradient checkpointing, accumulation, evaluation",
        "SFT",
        packing=True,
        packing_strategy="wrapped",
        max_length=96,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    ),
    _dpo("dpo", "DPO with a reference engine"),
    _dpo("dpo-sync", "DPO, `sync_ref_model`", sync_ref_model=True, ref_model_sync_steps=1),
    _dpo("dpo-precompute", "DPO, `precompute_ref_log_probs`", precompute_ref_log_probs=True),
    _trl("kto", "KTO with a reference engine", "KTO", max_length=96),
    _rollout("grpo", "GRPO with a reference engine, gathered for generation", "GRPO"),
    _rollout(
        "grpo-not-gathered",
        "GRPO, `ds3_gather_for_generation` false",
        "GRPO",
        ds3_gather_for_generation=False,
        zero={"stage3_prefetch_bucket_size": 0},
        remark="without prefetching: with it stock fails (Cannot partition a param in flight)",
    ),
    _rollout(
        "grpo-sync",
        "GRPO, `sync_ref_model`, 2 iterations",
        "GRPO",
        sync_ref_model=True,
        ref_model_sync_steps=1,
        num_iterations=2,
    ),
    _rollout("grpo-judge", "GRPO with a reward model (third engine)", "GRPO", judge=True),
    _rollout("rloo", "RLOO", "RLOO"),
    _trl("reward", "Reward", "Reward", max_length=96),
    Case(
        "lightning-fit",
        "Lightning",
        "fit: validation, accumulation, clipping, schedule, ModelCheckpoint",
        "lightning_script.py",
        {"order": ["fit"]},
        checkpoint="checkpoint-2.ckpt",
        plain=True,
        remark=_CUDA_CHECK,
    ),
    Case(
        "lightning-all",
        "Lightning",
        "validate, fit, test, predict, fit again",
        "lightning_script.py",
        {"order": ["validate", "fit", "test", "predict", "fit"]},
        plain=True,
        remark=_CUDA_CHECK,
    ),
    Case(
        "fabric",
        "Lightning",
        "Fabric: a loop of its own",
        "fabric_script.py",
        {},
        checkpoint="checkpoint-2",
        plain=True,
        remark=_CUDA_CHECK,
    ),
    Case(
        "llamafactory-full",
        "LLaMA-Factory",
        "full SFT",
        "llamafactory_script.py",
        {},
        checkpoint="checkpoint-2",
        environment="older",
        remark=_OVERLAY,
    ),
    Case(
        "llamafactory-lora",
        "LLaMA-Factory",
        "LoRA SFT",
        "llamafactory_script.py",
        {"arguments": {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}},
        checkpoint="checkpoint-2",
        environment="older",
        remark=_OVERLAY,
    ),
    Case(
        "trainer-moe",
        "Trainer",
        "Qwen3-MoE with leaf modules, `load_best_model_at_end`, `save_total_limit`",
        "trainer_script.py",
        {
            "kind": "moe",
            "arguments": {"load_best_model_at_end": True, "save_total_limit": 2, "gradient_accumulation_steps": 2},
        },
        checkpoint="checkpoint-2",
    ),
    Case(
        "trainer-t5",
        "Trainer",
        "T5, evaluation by generation",
        "trainer_script.py",
        {"kind": "t5", "arguments": {"predict_with_generate": True, "generation_max_length": 8}},
        checkpoint="checkpoint-2",
    ),
    Case(
        "trainer-vit",
        "Trainer",
        "ViT in fp32",
        "trainer_script.py",
        {"kind": "vit", "arguments": {"bf16": False}},
        checkpoint="checkpoint-2",
    ),
    Case(
        "trainer-compile",
        "Trainer",
        "GPT-2, `torch_compile` (aot_eager)",
        "trainer_script.py",
        {"kind": "gpt", "arguments": {"torch_compile": True, "torch_compile_backend": "aot_eager"}},
        checkpoint="checkpoint-2",
    ),
    Case("swift-full", "ms-swift", "full SFT", "swift_script.py", {}, checkpoint="checkpoint-2", environment="older"),
    Case(
        "swift-lora",
        "ms-swift",
        "LoRA SFT",
        "swift_script.py",
        {"arguments": {"tuner_type": "lora", "lora_rank": 4, "target_modules": "all-linear"}},
        checkpoint="checkpoint-2",
        environment="older",
        remark="all steps are of one epoch: of the next one a resumed run draws other batches, in stock, too",
    ),
    Case(
        "axolotl-full",
        "axolotl",
        "full SFT",
        "axolotl_script.py",
        {},
        checkpoint="trained/checkpoint-2",
        environment="axolotl",
    ),
    Case(
        "axolotl-lora",
        "axolotl",
        "LoRA SFT",
        "axolotl_script.py",
        {
            "arguments": {
                "adapter": "lora",
                "lora_r": 4,
                "lora_alpha": 8,
                "lora_target_linear": True,
                **{f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o", "embedding")},
            }
        },
        checkpoint="trained/checkpoint-2",
        environment="axolotl",
        remark="without its LoRA kernels, which need CUDA (`axolotl/kernels/swiglu.py` 119)",
    ),
    Case(
        "chat-step3",
        "DeepSpeed-Chat",
        "what its step 3 does (PPO): actor, critic, reference, reward, moving average",
        "chat_script.py",
        {},
        plain=True,
        remark="a script of its shape; the critic is built under a configuration without the block",
    ),
    _example(
        "chat-own-step1",
        "DeepSpeed-Chat step 1: fine-tuning",
        f"{_CHAT}/step1_supervised_finetuning/main.py",
        f"{_CHAT_STEP} --data_split 10,0,0 --print_loss",
    ),
    _example(
        "chat-own-step1-lora",
        "DeepSpeed-Chat step 1 with LoRA",
        f"{_CHAT}/step1_supervised_finetuning/main.py",
        f"{_CHAT_STEP} --data_split 10,0,0 --print_loss --lora_dim 4 --only_optimize_lora",
    ),
    _example(
        "chat-own-step2",
        "DeepSpeed-Chat step 2: the reward model",
        f"{_CHAT}/step2_reward_model_finetuning/main.py",
        f"{_CHAT_STEP} --data_split 0,10,0 --num_padding_at_beginning 1",
    ),
    _example(
        "chat-own-step2-dpo",
        "DeepSpeed-Chat step 2 as DPO, with a reference engine",
        f"{_CHAT}/step2_dpo_finetuning/main.py",
        f"{_CHAT_STEP} --data_split 0,10,0 --print_loss",
    ),
    _example(
        "chat-own-step3",
        "DeepSpeed-Chat step 3: PPO with a moving average, five engines",
        f"{_CHAT}/step3_rlhf_finetuning/main.py",
        f"{_CHAT_PPO} --data_split 0,0,10",
        "the value head made bf16: with its own fp32 stock fails; `optimizer.overlap` `backward`: its moving average "
        "is edited under `GatheredParameters` without `modifier_rank`, and what stock keeps of that depends on which "
        "parameters are gathered between steps",
        overlap="backward",
    ),
    _example(
        "examples-zenflow",
        "`finetune_llama.py` of ZenFlow",
        "training/DeepSpeed-ZenFlow/finetuning/finetune_llama.py",
        _FINETUNE,
        "of several ranks the script has only the first one save: it waits for the others without end",
    ),
    _example(
        "examples-superoffload",
        "`finetune_zero3.py` of SuperOffload, gradient checkpointing",
        "training/DeepSpeed-SuperOffload/finetune_zero3.py",
        f"{_FINETUNE} --attn_implementation sdpa --activation_checkpointing --max_length 64",
    ),
)
