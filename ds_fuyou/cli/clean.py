# SPDX-License-Identifier: Apache-2.0
"""``fuyou clean PATH...``: remove the state that dead runs left in swap directories, and buffers in shared memory."""

from __future__ import annotations

import argparse
import os
import sys

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.storage.shared_memory import SHARED_MEMORY, find_buffers, remove_buffer

__all__ = ["add_arguments", "left_in_shared_memory", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the paths and the switches."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="an nvme_path of the configuration")
    parser.add_argument(
        "--shared-memory",
        action="store_true",
        help=f"remove the buffers that DeepSpeed's collectives left in {SHARED_MEMORY}, too",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, remove nothing")


def run(arguments: argparse.Namespace) -> int:
    """Removes what no live process holds; state that one holds is listed and left. Status 1 if any is left.

    Raises:
        FuyouConfigError: nothing is named, or a path is not a directory.
        OSError: something cannot be removed.
    """
    offer = left_in_shared_memory()
    if not arguments.paths and not arguments.shared_memory:
        raise FuyouConfigError(f"name an nvme_path, or --shared-memory ({offer or 'nothing is left there'})")
    for path in arguments.paths:
        if not os.path.isdir(path):
            raise FuyouConfigError(f"{path} must be an existing directory; name an nvme_path")
    in_use = sum(_clean(path, arguments.dry_run) for path in arguments.paths)
    if arguments.shared_memory:
        _clean_shared_memory(arguments.dry_run)
    elif offer:
        sys.stdout.write(f"{offer}; remove with: fuyou clean --shared-memory\n")
    return 1 if in_use else 0


def left_in_shared_memory() -> str:
    """How much of it no process uses, in words; empty if nothing."""
    left = [buffer for buffer in find_buffers() if not buffer.in_use]
    if not left:
        return ""
    total = sum(buffer.num_bytes for buffer in left)
    return f"{total / 1e6:.0f} MB of {SHARED_MEMORY} in {len(left)} buffers of DeepSpeed runs that ended"


def _clean(path: str, dry_run: bool) -> int:
    """How many state directories are in use."""
    from ds_fuyou.storage.cleanup import find_state, remove_state

    states = find_state(path)
    if not states:
        sys.stdout.write(f"{path}: no state found\n")
    for state in states:
        if state.alive:
            sys.stdout.write(f"{state.path}: in use by a running process, left alone\n")
        elif dry_run:
            sys.stdout.write(f"{state.path}: {state.num_bytes} bytes, would be removed\n")
        else:
            remove_state(state)
            sys.stdout.write(f"{state.path}: {state.num_bytes} bytes removed\n")
    return sum(state.alive for state in states)


def _clean_shared_memory(dry_run: bool) -> None:
    buffers = find_buffers()
    if not buffers:
        sys.stdout.write(f"{SHARED_MEMORY}: no buffers found\n")
    for buffer in buffers:
        if buffer.in_use or not (dry_run or remove_buffer(buffer)):
            sys.stdout.write(f"{buffer.path}: in use by a running process, left alone\n")
        else:
            sys.stdout.write(f"{buffer.path}: {buffer.num_bytes} bytes {'would be ' if dry_run else ''}removed\n")
