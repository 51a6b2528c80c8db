# SPDX-License-Identifier: Apache-2.0
"""Argument parsing and dispatch of the ``fuyou`` command.

A command module offers ``add_arguments(parser)`` and ``run(arguments) -> int`` (exit status). Status 0:
done; 1: the command ran and found something wrong; 2: the user must change something, said in one line.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_fuyou.errors import FuyouError
from ds_fuyou.version import __version__

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "build": "compile now what a first start would compile: the C++ core and DeepSpeed's operators",
    "clean": "remove state files and shared memory that dead runs left behind",
    "doctor": "check this machine and say how to fix what is missing",
    "init": "write a block for this machine and a model, or add it to a DeepSpeed JSON",
    "verify": "run a script with stock and with the block and compare the results bit by bit",
    "max-model": "name the largest model that trains on a machine",
    "plan": "say what fits where, how fast a step is and why",
    "recover": "make a checkpoint, or fp32 weights, of the state files of a run that was killed or kept them",
    "report": "turn a lane trace into an HTML page and a picture",
    "simulate": "predict the throughput of systems on machines, given as CSV",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit status; never shows a traceback for a user's mistake. What the terminal's
    encoding lacks is printed as a question mark; a stream that is closed is written to nowhere. Whoever stops reading,
    as ``head`` does, ends the command without a word, with the status of other programs then.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="fuyou", description="Tools around the ds_fuyou DeepSpeed plugin.")
    parser.add_argument("--version", action="version", version=f"ds_fuyou {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((text for text in arguments_given if not text.startswith("-")), None)
    try:
        for name, summary in COMMANDS.items():
            command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
            if name == chosen:
                _module(name).add_arguments(command)
        arguments = parser.parse_args(arguments_given)
        status: int = _module(arguments.command).run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 141
    except ModuleNotFoundError as error:  # the planner's commands need neither torch nor DeepSpeed, the others do
        sys.stderr.write(f"fuyou {chosen}: {error}; install ds_fuyou again, with what it depends on\n")
        return 2
    except (FuyouError, OSError) as error:
        sys.stderr.write(f"fuyou {chosen}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"fuyou {chosen}: interrupted\n")
        return 130
    return status


def _discard_output() -> None:
    """Nothing is left that the interpreter would fail to write when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _module(name: str):  # type: ignore[no-untyped-def]  # a module with the two functions above
    return importlib.import_module(f"ds_fuyou.cli.{name.replace('-', '_')}")
