# SPDX-License-Identifier: Apache-2.0
"""Stock runs on the CPU are shared by the runs on the stand-in device that are compared with them."""

from tests.parity.conftest import stock_run

__all__ = ["stock_run"]
