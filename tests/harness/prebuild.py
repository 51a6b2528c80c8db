# SPDX-License-Identifier: Apache-2.0
"""Builds every compiled operator the tests use, ours and stock's: no test's time limit includes a build."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.accelerator import get_accelerator

from ds_fuyou.ops.core import load_core
from tests.device.build import build


def main() -> None:
    load_core()
    build()
    for name in ("CPUAdamBuilder", "CPULionBuilder", "CPUAdagradBuilder", "ShareMemCommBuilder"):
        builder = get_accelerator().create_op_builder(name)
        if builder is None or type(builder).__name__ == "NotImplementedBuilder":
            sys.stdout.write(f"{name}: this DeepSpeed has none for {get_accelerator().device_name()}\n")
        else:
            builder.load(verbose=False)


if __name__ == "__main__":
    main()
