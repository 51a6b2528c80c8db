# SPDX-License-Identifier: Apache-2.0
"""The ``fuyou`` command. Each subcommand is one module here, imported only when it is called."""

from ds_fuyou.cli.main import main

__all__ = ["main"]
