# SPDX-License-Identifier: Apache-2.0
"""What is left by engines that were never built, and what is said by one that cannot leave the model its values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import HERE, environment


@pytest.mark.compat
def test_engines_that_fail_leave_nothing_open(tmp_path: Path) -> None:
    """Stock's part of one, what a resumed run puts back, and reads at its end. The second attempt goes on as the first
    one should have."""
    process = start(HERE / "failed_engines.py", [str(tmp_path)], environment(0, 1, free_port()), tmp_path / "log")
    finish([process])
    said = (tmp_path / "log").read_text(errors="replace")
    assert process.exitcode == 0, said[-3000:]
    told = [line for line in said.splitlines() if line.endswith(" left")]
    assert told[:3] == [
        "hooks failed with 'not today': 0 open, 0 left",
        "putting back failed with 'not today': 0 open, 1 left",
        "resumed after step 2: 1 open, 1 left",
    ], said[-3000:]
    assert "values of 1 parameters are lost to the model: reading parameter" in said
    assert "(Input/output error)" in said
