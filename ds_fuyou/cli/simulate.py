# SPDX-License-Identifier: Apache-2.0
"""``fuyou simulate``: predict the rows of a CSV."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.simulator.points import ADDED, Defaults, predict, read_points, write_points

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the files and what rows may leave out."""
    defaults = Defaults()
    parser.add_argument("--points", required=True, type=Path, metavar="IN.CSV", help="rows to predict")
    parser.add_argument("--out", required=True, type=Path, metavar="OUT.CSV", help="the same rows, predictions added")
    parser.add_argument(
        "--ssd", default=defaults.ssd, help="SSD of rows without an ssd column (%(default)s), as of plan"
    )
    parser.add_argument("--host", default=defaults.host, help="host of rows without one (%(default)s), as of plan")
    parser.add_argument("--seq", type=int, default=defaults.seq, help="sequence length likewise (%(default)s)")
    parser.add_argument("--json", action="store_true", help="also print the rows as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Predicts every row; nothing is written unless all of them can be.

    Raises:
        FuyouConfigError: with the file and line of the first wrong row.
    """
    if arguments.seq < 1:
        raise FuyouConfigError(f"--seq must be at least 1, found {arguments.seq}")
    defaults = Defaults(arguments.ssd, arguments.host, arguments.seq)
    columns, rows = read_points(arguments.points)
    predicted = []
    for number, row in enumerate(rows, start=2):
        try:
            predicted.append(predict(row, defaults))
        except FuyouConfigError as error:
            raise FuyouConfigError(f"{arguments.points} line {number}: {error}") from error
    write_points(arguments.out, columns, predicted)
    if arguments.json:
        sys.stdout.write(json.dumps([{name: row[name] for name in (*columns, *ADDED)} for row in predicted]) + "\n")
    else:
        sys.stdout.write(f"{len(predicted)} rows predicted: {arguments.out}\n")
    return 0
