# SPDX-License-Identifier: Apache-2.0
"""Builds every compiled operator that tests use, ours and stock's: no time limit includes a build.
And byte code: where Python does not write it (``PYTHONDONTWRITEBYTECODE``) each process would compile the package,
which is half of a short run.

Two processes build at a time, each with half of the jobs: most operators are one or two large files, so that one build
after the other leaves a core idle. Locks that a killed build left are removed: stock would wait for them without end.

python tests/harness/prebuild.py             what tests use
python tests/harness/prebuild.py --all       and stock's NVMe operator, the largest of all, for what is compared with it
python tests/harness/prebuild.py NAME ...    those alone
"""

from __future__ import annotations

import argparse
import compileall
import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(_ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

CORE, DEVICE = "core", "device"
NAMES = (CORE, DEVICE, "CPULionBuilder", "CPUAdamBuilder", "ShareMemCommBuilder", "CPUAdagradBuilder")
NVME = "AsyncIOBuilder"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*NAMES, NVME))}")
    parser.add_argument("--all", action="store_true", help="stock's NVMe operator, too")
    parser.add_argument("--here", action="store_true", help="in this process, nothing but the builds")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {*NAMES, NVME}
    if unknown:
        parser.error(f"no operators: {', '.join(sorted(unknown))}")
    names = arguments.names or (*NAMES, *([NVME] if arguments.all else []))
    if arguments.here:
        for name in names:
            build(name)
        return
    for package in ("ds_fuyou", "tests"):
        compileall.compile_dir(_ROOT / package, quiet=1)
    remove_left_locks()
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    environment = {**os.environ, "MAX_JOBS": str(max(1, jobs // 2))}
    shares = [share for share in (names[0::2], names[1::2]) if share]
    builds = [subprocess.Popen([sys.executable, __file__, "--here", *share], env=environment) for share in shares]
    ends = [process.wait() for process in builds]
    if any(ends):
        sys.exit("an operator could not be built")


def remove_left_locks() -> None:
    from ds_fuyou.ops.stock_operators import build_directory, left_locks

    for lock in left_locks(build_directory()):
        sys.stdout.write(f"removed {lock}, left by a build that was killed\n")
        lock.unlink()


def build(name: str) -> None:
    if name == CORE:
        from ds_fuyou.ops.core import load_core

        load_core()
    elif name == DEVICE:
        from tests.device.build import build as build_device

        build_device()
    else:
        build_stock(name)


def build_stock(name: str) -> None:
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(name)
    if builder is None or type(builder).__name__ == "NotImplementedBuilder":
        sys.stdout.write(f"{name}: this DeepSpeed has none for {get_accelerator().device_name()}\n")
    elif not builder.is_compatible(verbose=False):
        sys.stdout.write(f"{name}: cannot be built here (libaio?)\n")
    else:
        builder.load(verbose=False)


if __name__ == "__main__":
    main()
