# SPDX-License-Identifier: Apache-2.0
"""``fuyou max-model``: the largest GPT that trains on a machine."""

from __future__ import annotations

import argparse
import json
import sys

from ds_fuyou.cli.machine_options import add_machine_options, machine_from
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.cost import Workload
from ds_fuyou.planner.presets import model_shapes
from ds_fuyou.simulator.choose import Chosen, choose, largest_model, room_line, try_choose
from ds_fuyou.simulator.models import published_model
from ds_fuyou.simulator.systems import find_policy

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Machine, and the least workload that must fit."""
    add_machine_options(parser)
    parser.add_argument("--batch", type=int, default=1, help="sequences that must fit (%(default)s)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--system", default="ds_fuyou", help="policy (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the largest published size that trains. Status 1 if none does.

    Raises:
        FuyouConfigError: something is misspelt or contradictory.
    """
    machine, policy = machine_from(arguments), find_policy(arguments.system)
    models = [model for name in model_shapes() if (model := published_model(name)) is not None]
    found = largest_model(models, arguments.batch, arguments.seq, machine, policy)
    if found is None:
        try:
            choose(Workload(models[0], arguments.batch, arguments.seq), machine, policy)
        except FuyouConfigError as error:
            why = f"none of {', '.join(m.name for m in models)} trains: {error}"
            sys.stdout.write(f"{json.dumps({'model': None, 'why': why}) if arguments.json else why}\n")
        return 1
    chosen = try_choose(Workload(found, arguments.batch, arguments.seq), machine, policy)
    rate = chosen.tokens_per_s if isinstance(chosen, Chosen) else 0.0
    if arguments.json:
        shown = {"model": found.name, "params": found.params, "system": policy.name, "tokens_per_s": round(rate, 3)}
        sys.stdout.write(json.dumps(shown) + "\n")
    else:
        sys.stdout.write(
            f"{found.name} ({found.params / 1e9:.1f} B parameters) on {machine.name}: {rate:.1f} tokens/s\n"
        )
        if isinstance(chosen, Chosen) and (room := room_line(chosen)):
            sys.stdout.write(f"{room}\n")
    return 0
