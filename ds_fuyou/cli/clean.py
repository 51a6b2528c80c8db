# SPDX-License-Identifier: Apache-2.0
"""``fuyou clean PATH...``: remove the state that dead runs left in swap directories."""

from __future__ import annotations

import argparse
import os
import sys

from ds_fuyou.errors import FuyouConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the paths and the two switches."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="an nvme_path of the configuration")
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, remove nothing")


def run(arguments: argparse.Namespace) -> int:
    """Removes what no live process holds; what one holds is listed and left. Status 1 if any is left.

    Raises:
        FuyouConfigError: a path is not a directory.
        OSError: something cannot be removed.
    """
    for path in arguments.paths:
        if not os.path.isdir(path):
            raise FuyouConfigError(f"{path} must be an existing directory; name an nvme_path")
    from ds_fuyou.storage.cleanup import find_state, remove_state

    in_use = 0
    for path in arguments.paths:
        states = find_state(path)
        if not states:
            sys.stdout.write(f"{path}: no state found\n")
        for state in states:
            if state.alive:
                in_use += 1
                sys.stdout.write(f"{state.path}: in use by a running process, left alone\n")
            elif arguments.dry_run:
                sys.stdout.write(f"{state.path}: {state.num_bytes} bytes, would be removed\n")
            else:
                remove_state(state)
                sys.stdout.write(f"{state.path}: {state.num_bytes} bytes removed\n")
    return 1 if in_use else 0
