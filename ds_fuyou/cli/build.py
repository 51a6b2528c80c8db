# SPDX-License-Identifier: Apache-2.0
"""``fuyou build``: compile the C++ core into the cache."""

from __future__ import annotations

import argparse
import sys

from ds_fuyou.ops.core import builder_module

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this command: there are none."""
    parser.epilog = "FUYOU_CACHE names the cache directory, MAX_JOBS the number of compilers at a time."


def run(arguments: argparse.Namespace) -> int:
    """Builds, loads and names the library.

    Raises:
        FuyouBuildError: no compiler, a compile error, or a cache that cannot be written.
    """
    del arguments
    builder = builder_module().FuyouCoreBuilder()
    path = builder.build()
    builder.load()
    sys.stdout.write(f"{path}\n")
    return 0
