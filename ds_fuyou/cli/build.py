# SPDX-License-Identifier: Apache-2.0
"""``fuyou build``: compile what a run would compile at its first start."""

from __future__ import annotations

import argparse
import sys

from ds_fuyou.errors import FuyouBuildError
from ds_fuyou.ops import stock_operators
from ds_fuyou.ops.core import builder_module

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this command."""
    parser.add_argument("--core", action="store_true", help="the C++ core alone, not DeepSpeed's operators")
    parser.add_argument(
        "--optimizer",
        default="Adam",
        type=_known,
        help="compile DeepSpeed's operator of this one: Adam (the default), AdamW, Adagrad, Lion",
    )
    parser.epilog = (
        "FUYOU_CACHE names the core's cache, TORCH_EXTENSIONS_DIR the folder of DeepSpeed's operators, MAX_JOBS the "
        "number of compilers at a time."
    )


def _known(optimizer: str) -> str:
    if optimizer.lower() not in ("adam", "adamw", "adagrad", "lion"):
        raise argparse.ArgumentTypeError(f"must be Adam, AdamW, Adagrad or Lion, found {optimizer!r}")
    return optimizer


def run(arguments: argparse.Namespace) -> int:
    """Builds and loads the core and names its file; then DeepSpeed's operators, one line each.

    Raises:
        FuyouBuildError: no compiler, a compile error, a cache that cannot be written, or a lock that a killed build
            left, at which torch would wait without end.
    """
    builder = builder_module().FuyouCoreBuilder()
    path = builder.build()
    builder.load()
    sys.stdout.write(f"{path}\n")
    if arguments.core:
        return 0
    directory = stock_operators.build_directory()
    left = stock_operators.left_locks(directory)
    if left:
        raise FuyouBuildError(stock_operators.told_of_locks(left))
    missing = stock_operators.operators_to_compile(arguments.optimizer)
    try:
        for name in stock_operators.compile_operators(arguments.optimizer):
            note = "compiling, a minute or two" if name in missing else "there"
            sys.stdout.write(f"DeepSpeed's {name} in {directory}: {note}\n")
            sys.stdout.flush()
    except (RuntimeError, ImportError) as error:  # of torch's builder: no ninja, no compiler, a compile error
        raise FuyouBuildError(f"DeepSpeed's operators could not be compiled in {directory}: {error}") from error
    return 0
