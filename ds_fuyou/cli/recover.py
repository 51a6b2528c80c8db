# SPDX-License-Identifier: Apache-2.0
"""``fuyou recover DIRECTORY... --out FILE``: fp32 weights out of the state files of a run that ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the state directories and the file to write."""
    parser.add_argument(
        "directories",
        nargs="+",
        type=Path,
        metavar="DIRECTORY",
        help="NVME_PATH/ds_fuyou/RUN-rankN, one of every rank of the run",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="state dictionary to write, for torch.load"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the weights and leaves the state files as they are; ``fuyou clean`` removes them.

    Raises:
        FuyouStateError, FuyouStorageError: as :func:`ds_fuyou.checkpoint.recovery.recover`.
    """
    from ds_fuyou.checkpoint.recovery import recover

    found = recover(arguments.directories, arguments.out)
    said = f"{found.num_params} parameters in fp32 as of step {found.step} (optimizer steps, counted over resumes)"
    if not found.verified:
        said += '; not compared with checksums, since the run had "checksum": false'
    sys.stdout.write(f"{arguments.out}: {said}\n")
    return 0
