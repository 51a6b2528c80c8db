# SPDX-License-Identifier: Apache-2.0
"""``python -m ds_fuyou train.py ...`` and ``deepspeed --module ds_fuyou train.py ...``.

Runs a script as if it had been started directly, with the package active even where torch's plugin
loading is switched off. The launcher puts its own ``--local_rank=N`` in front of the script's name;
it is moved behind it, where the script would have found it.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import ds_fuyou

__all__ = ["script_arguments"]

USAGE = "usage: python -m ds_fuyou SCRIPT [ARGUMENTS ...]   (commands: fuyou --help)"


def script_arguments(arguments: Sequence[str]) -> list[str] | None:
    """The script's own ``sys.argv``: its name, launcher options, its arguments. None without a name.

    Options in front of the name are the launcher's (``--local_rank=N`` or ``--local_rank N``).
    """
    leading: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        leading.append(option)
        if option in ("--local_rank", "--local-rank") and rest:
            leading.append(rest.pop(0))
    return [rest[0], *leading, *rest[1:]] if rest else None


def main() -> int:
    """Runs the script named on the command line; its exit status becomes ours."""
    argv = script_arguments(sys.argv[1:])
    if argv is None or not os.path.isfile(argv[0]):
        found = "no script" if argv is None else f"no file {argv[0]!r}"
        sys.stderr.write(f"{USAGE}\nds_fuyou {ds_fuyou.__version__}: a script file must be named, found {found}\n")
        return 2
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
