# SPDX-License-Identifier: Apache-2.0
"""Stock runs are shared with the parity tests' fixtures."""

from tests.parity.conftest import must_equal, stock_run  # noqa: F401
