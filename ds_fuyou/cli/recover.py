# SPDX-License-Identifier: Apache-2.0
"""``fuyou recover DIRECTORY... --checkpoint DIR | --weights FILE``: what a run that ended left in its state files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.files import may_be_replaced

__all__ = ["add_arguments", "run"]

_NOT_COMPARED = '; not compared with checksums, since the run had "checksum": false'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the state directories and what is made of them."""
    parser.add_argument(
        "directories",
        nargs="+",
        type=Path,
        metavar="DIRECTORY",
        help="NVME_PATH/ds_fuyou/RUN-rankN, one of every rank of the run",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="make a checkpoint in DIR, as engine.save_checkpoint(DIR) would have; any ZeRO-3 run loads it",
    )
    what.add_argument(
        "--weights", type=Path, metavar="FILE", help="write a state dictionary of fp32 weights, for torch.load"
    )
    parser.add_argument("--tag", help="of the checkpoint; global_step<N> without")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="CHECKPOINT",
        help="an older checkpoint of this run: frozen parameters are taken from it. If it is a folder of the Hugging "
        "Face Trainer, DIR becomes one, for resume_from_checkpoint",
    )


def run(arguments: argparse.Namespace) -> int:
    """Leaves the state files as they are; ``fuyou clean`` removes them.

    Raises:
        FuyouConfigError: options that belong to --checkpoint beside --weights; a path at which nothing can be made,
            or a checkpoint that is not there.
        FuyouStateError, FuyouStorageError: as :mod:`ds_fuyou.checkpoint.recovery`.
    """
    from ds_fuyou.checkpoint import recovery

    if arguments.weights is not None:
        if arguments.tag is not None or arguments.like is not None:
            raise FuyouConfigError("--tag and --like belong to --checkpoint; weights have neither")
        if not may_be_replaced(arguments.weights) or not arguments.weights.parent.is_dir():
            raise FuyouConfigError(f"--weights {arguments.weights} must name a regular file in a directory that exists")
        found = recovery.recover_weights(arguments.directories, arguments.weights)
        said = f"{found.num_params} parameters in fp32 as of step {found.step} (optimizer steps, counted over resumes)"
        sys.stdout.write(f"{arguments.weights}: {said}{'' if found.verified else _NOT_COMPARED}\n")
        return 0
    if arguments.checkpoint.exists() and not arguments.checkpoint.is_dir():
        raise FuyouConfigError(f"--checkpoint {arguments.checkpoint} must name a directory, or one to be made")
    if arguments.like is not None and not arguments.like.is_dir():
        raise FuyouConfigError(f"--like {arguments.like} must name an existing checkpoint")
    made = recovery.recover_checkpoint(
        arguments.directories, arguments.checkpoint, tag=arguments.tag, like=arguments.like
    )
    said = f"checkpoint of all ranks after step {made.global_steps}"
    sys.stdout.write(f"{made.folder}: {said}{'' if made.verified else _NOT_COMPARED}\n")
    if made.warning:
        sys.stderr.write(f"warning: {made.warning}\n")
    for what in made.left_out:
        sys.stdout.write(f"not in it: {what}\n")
    return 0
