# SPDX-License-Identifier: Apache-2.0
"""Builds every compiled operator the tests use, ours and stock's: no test's time limit includes a build."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder

from ds_fuyou.ops.core import load_core


def main() -> None:
    load_core()
    for builder in (CPUAdamBuilder, CPULionBuilder, CPUAdagradBuilder):
        builder().load(verbose=False)
    shm = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if shm is not None:
        shm.load(verbose=False)


if __name__ == "__main__":
    main()
