# SPDX-License-Identifier: Apache-2.0
"""What the lanes of this machine can do alone; the package measures it for ``fuyou plan --measure`` too."""

from __future__ import annotations

from ds_fuyou.profiling.rates import Rates, measure_rates

__all__ = ["Rates", "measure_rates"]
