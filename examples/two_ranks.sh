#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The plain engine loop on two ranks of this machine. Each rank keeps its half of every partition in a state directory
# of its own below nvme_path; nothing else changes. Arguments go to examples/finetune.py.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .work/fuyou
exec deepspeed --num_accelerators 2 examples/finetune.py \
    --deepspeed --deepspeed_config "${CONFIG:-configs/finetune_fuyou.json}" "$@"
