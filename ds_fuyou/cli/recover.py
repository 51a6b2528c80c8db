# SPDX-License-Identifier: Apache-2.0
"""``fuyou recover DIRECTORY... --checkpoint DIR | --weights FILE``: what a run that ended left in its state files."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_fuyou.cli.clean import nvme_path_of
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.files import may_be_replaced
from ds_fuyou.storage.cleanup import StateDirectory, find_state, holds_steps
from ds_fuyou.storage.directory import ROOT_NAME
from ds_fuyou.units import shown_bytes

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
            or among the state files;
            a checkpoint or a directory that is not there, or one of several runs.
        FuyouStateError, FuyouStorageError: as :mod:`ds_fuyou.checkpoint.recovery`.
    """
    from ds_fuyou.checkpoint import recovery

    if arguments.weights is not None:
        if arguments.tag is not None or arguments.like is not None:
            raise FuyouConfigError("--tag and --like belong to --checkpoint; weights have neither")
        if not may_be_replaced(arguments.weights) or not arguments.weights.parent.is_dir():
            raise FuyouConfigError(f"--weights {arguments.weights} must name a regular file in a directory that exists")
        _require_runs(arguments.directories, {"--weights": arguments.weights})
        _require_outside(arguments.directories, "--weights", arguments.weights)
        found = recovery.recover_weights(arguments.directories, arguments.weights)
        said = f"{found.num_params} parameters in fp32 as of step {found.step} (optimizer steps, counted over resumes)"
        sys.stdout.write(f"{arguments.weights}: {said}{'' if found.verified else _NOT_COMPARED}\n")
        return 0
    if arguments.checkpoint.exists() and not arguments.checkpoint.is_dir():
        raise FuyouConfigError(f"--checkpoint {arguments.checkpoint} must name a directory, or one to be made")
    if arguments.like is not None and not arguments.like.is_dir():
        raise FuyouConfigError(f"--like {arguments.like} must name an existing checkpoint")
    given = {"--checkpoint": arguments.checkpoint, "--tag": arguments.tag, "--like": arguments.like}
    _require_runs(arguments.directories, given)
    _require_outside(arguments.directories, "--checkpoint", arguments.checkpoint)
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


def _require_outside(directories: Sequence[Path], flag: str, target: Path) -> None:
    """Raises FuyouConfigError for a target among the state files: it would replace them, or keep them there."""
    for path in directories:
        if target.resolve().is_relative_to(path.resolve()):
            raise FuyouConfigError(f"{flag} {target} lies in {path}, whose state files are read; name another place")


def _require_runs(directories: Sequence[Path], given: Mapping[str, object]) -> None:
    """Raises FuyouConfigError for a path that is missing, or above runs: with the command that takes each of these."""
    for path in directories:
        if not path.exists():
            raise FuyouConfigError(f"{path} does not exist; name NVME_PATH, and the runs in it are listed")
    for path in directories:
        nvme_path, only = nvme_path_of(path.absolute())
        if only is not None:
            continue
        options = [f"{flag} {shlex.quote(str(value))}" for flag, value in given.items() if value is not None]
        if commands := _commands(nvme_path, " ".join(options)):
            lines = [f"{path} is no run; name one directory of every rank of one:", *commands]
            raise FuyouConfigError("\n  ".join(lines))
        raise FuyouConfigError(f"{path} is no run (PATH/{ROOT_NAME}/RUN-rankN), and no state of one lies there")


def _commands(nvme_path: Path, options: str) -> list[str]:
    """One a run, the newest first."""
    runs: dict[str, list[StateDirectory]] = {}
    for state in sorted(find_state(nvme_path), key=lambda state: (-state.started, state.rank)):
        runs.setdefault(state.run_id, []).append(state)
    found = []
    for states in runs.values():
        facts = [f"{shown_bytes(sum(state.num_bytes for state in states))}"]
        facts += ["in use by a running process"] if any(state.alive for state in states) else []
        facts += [] if all(map(holds_steps, states)) else ["holds no whole step"]
        lacking = states[0].world_size - len(states)
        facts += [f"{lacking} ranks are elsewhere"] if lacking > 0 else []
        named = " ".join(shlex.quote(str(state.path)) for state in sorted(states, key=lambda state: state.rank))
        found.append(f"fuyou recover {named} {options}  # {', '.join(facts)}")
    return found
