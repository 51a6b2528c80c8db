# SPDX-License-Identifier: Apache-2.0
"""``fuyou clean PATH...``: remove the state that dead runs left in swap directories, what killed saves left in folders
of checkpoints, and buffers in shared memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from ds_fuyou.errors import FuyouConfigError, FuyouStateError
from ds_fuyou.storage.directory import ROOT_NAME, is_run_name
from ds_fuyou.storage.shared_memory import SHARED_MEMORY, find_buffers, remove_buffer

__all__ = ["add_arguments", "left_in_shared_memory", "nvme_path_of", "run"]


class _Leftover(Protocol):
    """``why_not``: why it must stay; empty if it may go."""

    @property
    def path(self) -> Path: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def why_not(self) -> str: ...


_Found = TypeVar("_Found", bound=_Leftover)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the paths and the switches."""
    what = "an nvme_path, one run's directory in it, or a folder of checkpoints"
    parser.add_argument("paths", nargs="*", metavar="PATH", help=what)
    parser.add_argument(
        "--shared-memory",
        action="store_true",
        help=f"remove the buffers that DeepSpeed's collectives left in {SHARED_MEMORY}, too",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, remove nothing")


def run(arguments: argparse.Namespace) -> int:
    """Removes what no live process holds; what one holds is listed and left. Status 1 if anything is left, also what
    could not be removed: the rest goes all the same.

    Raises:
        FuyouConfigError: nothing is named, or a path is not a directory.
    """
    offer = left_in_shared_memory()
    if not arguments.paths and not arguments.shared_memory:
        raise FuyouConfigError(f"name an nvme_path, or --shared-memory ({offer or 'nothing is left there'})")
    for path in arguments.paths:
        if not os.path.isdir(path):
            raise FuyouConfigError(f"{path} must be an existing directory; name an nvme_path")
    left = sum(_clean(path, arguments.dry_run) for path in arguments.paths)
    if arguments.shared_memory:
        _clean_shared_memory(arguments.dry_run)
    elif offer:
        sys.stdout.write(f"{offer}; remove with: fuyou clean --shared-memory\n")
    return 1 if left else 0


def left_in_shared_memory() -> str:
    """How much of it no process uses, in words; empty if nothing."""
    left = [buffer for buffer in find_buffers() if not buffer.in_use]
    if not left:
        return ""
    total = sum(buffer.num_bytes for buffer in left)
    return f"{total / 1e6:.0f} MB of {SHARED_MEMORY} in {len(left)} buffers of DeepSpeed runs that ended"


def _clean(path: str, dry_run: bool) -> int:
    """How many state directories and folders are left."""
    from ds_fuyou.checkpoint.unfinished import find_unfinished, remove_unfinished
    from ds_fuyou.storage.cleanup import find_state, remove_state, state_of_others, what_it_holds

    folders = find_unfinished(Path(path))
    root, only = nvme_path_of(Path(os.path.abspath(path)))
    try:
        states = [state for state in find_state(root) if only in (None, state.path)]
    except OSError as error:
        sys.stderr.write(f"fuyou clean: {error}\n")
        return 1 + _remove(folders, remove_unfinished, dry_run)
    if not states and not folders:
        others = len(state_of_others(root))
        sys.stdout.write(f"{path}: no state found{f'; {others} directories are of other users' if others else ''}\n")
    return _remove(states, remove_state, dry_run, what_it_holds) + _remove(folders, remove_unfinished, dry_run)


def nvme_path_of(path: Path) -> tuple[Path, Path | None]:
    """The nvme_path, if the path is of the folder that runs make there, or of one run's (what ``fuyou recover`` takes):
    then that alone is meant.
    """
    if (path / ROOT_NAME).is_dir():
        return path, None
    if path.name == ROOT_NAME:
        return path.parent, None
    if path.parent.name == ROOT_NAME and is_run_name(path.name):
        return path.parent.parent, path
    return path, None


def _remove(
    found: Sequence[_Found],
    remove: Callable[[_Found], object],
    dry_run: bool,
    holds: Callable[[_Found], str] = lambda _: "",
) -> int:
    """How many are left. ``remove`` returns False if somebody has begun to use it. ``holds``: what would be lost."""
    num_left = 0
    for each in found:
        why_not = each.why_not
        try:
            if not (why_not or dry_run) and remove(each) is False:
                why_not = "in use by a running process, left alone"
        except (FuyouStateError, OSError) as error:
            num_left += 1
            sys.stderr.write(f"fuyou clean: {error}\n")
            continue
        num_left += bool(why_not)
        done = f"{each.num_bytes} bytes{', would be' if dry_run else ''} removed"
        if dry_run and (lost := holds(each)):
            done += f"; {lost}"
        sys.stdout.write(f"{each.path}: {why_not or done}\n")
    return num_left


def _clean_shared_memory(dry_run: bool) -> None:
    buffers = find_buffers()
    if not buffers:
        sys.stdout.write(f"{SHARED_MEMORY}: no buffers found\n")
    for buffer in buffers:
        if buffer.in_use or not (dry_run or remove_buffer(buffer)):
            sys.stdout.write(f"{buffer.path}: in use by a running process, left alone\n")
        else:
            sys.stdout.write(f"{buffer.path}: {buffer.num_bytes} bytes {'would be ' if dry_run else ''}removed\n")
