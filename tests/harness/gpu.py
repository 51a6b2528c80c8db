# SPDX-License-Identifier: Apache-2.0
"""A GPU in tests that compare bits."""

from __future__ import annotations

import os

import torch

__all__ = ["repeatable"]


def repeatable() -> None:
    """In this process equal calls give equal bits, wherever PyTorch has a kernel for that; the backward of attention in
    fp32, for one, adds in any order otherwise. Before cuBLAS is used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
