#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Full fine-tuning with ms-swift 4 (ms-swift 3 has --train_type where 4 has --tuner_type); more arguments are passed on.
# SWIFT names another command than `swift`, NPROC_PER_NODE the ranks.
NPROC_PER_NODE=${NPROC_PER_NODE:-1} exec ${SWIFT:-swift} sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type full \
    --dataset AI-ModelScope/alpaca-gpt4-data-en#500 \
    --deepspeed configs/hf_trainer_fuyou.json \
    --torch_dtype bfloat16 \
    --max_length 2048 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --num_train_epochs 1 \
    --learning_rate 1e-5 \
    --optim adamw_torch \
    --logging_steps 10 \
    --save_steps 500 \
    --output_dir .work/ms_swift "$@"
