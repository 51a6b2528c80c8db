# SPDX-License-Identifier: Apache-2.0
"""How long a test waits for what has to come."""

__all__ = ["HANG_SECS"]

HANG_SECS = 900.0
"""Whatever takes longer hangs. On a loaded machine the slowest process of a test takes a minute; nothing is measured by
it. The limit of a test (pyproject.toml) is longer, so that this one is met first and what was said until then is told.
"""
