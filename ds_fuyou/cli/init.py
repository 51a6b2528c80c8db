# SPDX-License-Identifier: Apache-2.0
"""``fuyou init``: a block for this machine and a model, alone or added to a DeepSpeed JSON.

It writes what a run cannot find out by itself: where state may lie, and tiers where the JSON's own would not fit. All
else is "auto", which a run decides by the memory that is free when it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_fuyou.cli.ds_config import BYTE_ORDER_MARK, DeepSpeedFile, read_ds_file
from ds_fuyou.cli.finding import Finding
from ds_fuyou.cli.machine_options import add_adapter_options, model_from
from ds_fuyou.config import BLOCK_KEY
from ds_fuyou.ds_json import section_of
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.files import replacing
from ds_fuyou.ops.stock_operators import build_command

__all__ = ["add_arguments", "run", "with_block"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the file, the model, and what may be said instead of looked for."""
    parser.add_argument("file", nargs="?", type=Path, metavar="DS.JSON", help="DeepSpeed JSON to add the block to")
    parser.add_argument(
        "--model", required=True, help="Hugging Face config.json, gpt:layers,heads,hidden,vocab, or a size such as 13B"
    )
    add_adapter_options(parser)
    parser.add_argument(
        "--path",
        nargs="+",
        default=[],
        metavar="DIRECTORY",
        help="directories for state; default: those the JSON names, else one on every disk of the best kind",
    )
    parser.add_argument("--ranks", type=int, help="ranks on this machine; default: one for each device found")
    parser.add_argument("--out", type=Path, metavar="OUT.JSON", help="file to write; default: DS.JSON, else the screen")


def run(arguments: argparse.Namespace) -> int:
    """Writes the block and says why it is so. Status 1: something that ``fuyou doctor`` names stands against it.

    Raises:
        FuyouConfigError: the JSON cannot be read or has a block, the model is not known, or no placement fits.
    """
    from ds_fuyou.cli.doctor_config import findings_of
    from ds_fuyou.cli.first_block import Question, choose_block

    if arguments.ranks is not None and arguments.ranks < 1:
        raise FuyouConfigError(f"--ranks must be at least 1, found {arguments.ranks}")
    given = _given(arguments)
    model = model_from(arguments)
    standing = [] if given is None else _refused(findings_of(str(arguments.file), _asked(given.config)))
    if standing:
        return _told(standing)
    config = {"zero_optimization": {"stage": 3}} if given is None else given.config
    found = choose_block(Question(model, config, tuple(map(os.path.abspath, arguments.path)), arguments.ranks))
    made = [Path(path) for path in found.new_directories if not os.path.isdir(path)]
    for path in made:
        path.mkdir()
    completed = {**config, BLOCK_KEY: found.block}
    standing = _refused(findings_of(str(arguments.file or "the block"), completed))
    if standing:
        for path in made:
            path.rmdir()
        return _told(standing)
    text = with_block(given, found.block) if given is not None else json.dumps(completed, indent=2) + "\n"
    target = arguments.out or arguments.file
    if target is None:
        sys.stdout.write(text)
    else:
        _write(target.resolve(), text)
    words = [*found.why, f"written: {target}" if target is not None else "put this into the DeepSpeed JSON"]
    stream = sys.stdout if target is not None else sys.stderr
    build = build_command(section_of(config, "optimizer").get("type"))
    stream.write("".join(f"{line}\n" for line in words) + f"next: {build}, then launch as before\n")
    return 0


def _given(arguments: argparse.Namespace) -> DeepSpeedFile | None:
    if arguments.file is None:
        return None
    given = read_ds_file(arguments.file)
    if given.config.get(BLOCK_KEY) is not None:
        raise FuyouConfigError(
            f'{arguments.file} has a "{BLOCK_KEY}" block already; take it out to have one written, or ask fuyou doctor '
            f"what it does"
        )
    if not given.is_json and arguments.out is None:
        raise FuyouConfigError(
            f"{arguments.file} has comments or the like, which would be lost; name another file with --out"
        )
    return given


def _asked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration without its paths: whether they can be used is asked of those that are chosen."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return config
    sections = {
        name: {key: value for key, value in section.items() if key != "nvme_path"} | {"device": "cpu"}
        for name in ("offload_optimizer", "offload_param")
        if isinstance(section := zero.get(name), Mapping) and section.get("device") in ("cpu", "nvme")
    }
    return {**config, "zero_optimization": {**zero, **sections}}


def _refused(findings: Any) -> list[Finding]:
    return [finding for finding in findings if not finding.ok]


def _told(findings: list[Finding]) -> int:
    for finding in findings:
        sys.stderr.write(f"FAIL  {finding.what}: {finding.found}\n      fix: {finding.fix}\n")
    sys.stderr.write("nothing was written\n")
    return 1


def with_block(given: DeepSpeedFile, block: Mapping[str, Any]) -> str:
    """The text of the file with the block as its last key; every other character stays. A file that is no JSON by the
    letter is written anew, without its comments.
    """
    config = {name: value for name, value in given.config.items() if name != BLOCK_KEY}  # it may stand there as null
    completed = {**config, BLOCK_KEY: block}
    if not given.is_json or len(config) < len(given.config):
        return json.dumps(completed, indent=2) + "\n"
    newline = "\r\n" if "\r\n" in given.text else "\n"
    end = given.text.rindex("}")
    body, after = given.text[:end].rstrip(), given.text[end:]
    first = re.match(rf"{BYTE_ORDER_MARK}?\s*\{{\s*?\n([ \t]+)\"", given.text)
    comma = "," if config else ""
    if first is not None:
        shown = json.dumps(block, indent=first[1]).replace("\n", f"\n{first[1]}")
        added = f'{comma}\n{first[1]}"{BLOCK_KEY}": {shown}\n'.replace("\n", newline)
    else:
        added = f'{comma}{" " if config else ""}"{BLOCK_KEY}": {json.dumps(block)}'
    return body + added + after


def _write(path: Path, text: str) -> None:
    with replacing(path) as part:
        with part.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
        if part != path and path.exists():
            shutil.copymode(path, part)
