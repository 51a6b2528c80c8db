# SPDX-License-Identifier: Apache-2.0
"""Builds every compiled operator that tests and benchmarks use, ours and stock's: no time limit includes a build.
And byte code: where Python does not write it (``PYTHONDONTWRITEBYTECODE``) each process would compile the package,
which is half of a short run.

Locks that a killed build left are removed: stock would wait for them without end.
"""

import compileall
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.accelerator import get_accelerator

from ds_fuyou.ops.core import load_core
from ds_fuyou.ops.stock_operators import build_directory, left_locks
from tests.device.build import build

STOCK = ("CPUAdamBuilder", "CPULionBuilder", "CPUAdagradBuilder", "ShareMemCommBuilder", "AsyncIOBuilder")


def main() -> None:
    for package in ("ds_fuyou", "tests"):
        compileall.compile_dir(Path(__file__).resolve().parent.parent.parent / package, quiet=1)
    for lock in left_locks(build_directory()):
        sys.stdout.write(f"removed {lock}, left by a build that was killed\n")
        lock.unlink()
    load_core()
    build()
    for name in STOCK:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or type(builder).__name__ == "NotImplementedBuilder":
            sys.stdout.write(f"{name}: this DeepSpeed has none for {get_accelerator().device_name()}\n")
        elif not builder.is_compatible(verbose=False):
            sys.stdout.write(f"{name}: cannot be built here (libaio?)\n")
        else:
            builder.load(verbose=False)


if __name__ == "__main__":
    main()
