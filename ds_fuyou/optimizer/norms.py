# SPDX-License-Identifier: Apache-2.0
"""When a fast sum of squares decides what stock's slower one would have given, to the last bit of fp32.

Stock converts every gradient to fp64, takes its norm, squares and adds the norms of a sub-group, and rounds
the sum to fp32. Summed in another order the fp64 value differs in its last bits, the fp32 value hardly ever.
For terms that are not negative any order of summation of n terms has a relative error of at most (n - 1) u,
u = 2**-53 (N. Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). If both ends of the
resulting interval round to the same fp32 number, that number is stock's; if not, the caller takes the norms
again in stock's own way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["rounds_safely"]

_UNIT = 2.0**-53


def rounds_safely(sums: Sequence[float], numels: Sequence[int]) -> bool:
    """Whether the fp32 value of ``sum(sums)`` does not depend on the order in which anything was added.

    ``sums`` are sums of squares of parameters with ``numels`` elements, each within (n - 1) u of the exact one.
    A sum that is not finite has only one outcome (the step is refused) and is safe.
    """
    if not sums:
        return True
    total = math.fsum(sums) if all(math.isfinite(s) for s in sums) else math.inf
    if not math.isfinite(total):
        return True
    # Ours and stock's summation, stock's root and square a parameter, and the sum over parameters.
    terms = 2 * max(numels) + 2 * len(sums) + 16
    slack = terms * _UNIT * 1.01
    low, high = torch.tensor([total * (1.0 - slack), total * (1.0 + slack)], dtype=torch.float64).to(torch.float32)
    return bool(low == high)
