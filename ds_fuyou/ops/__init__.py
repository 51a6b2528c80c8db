# SPDX-License-Identifier: Apache-2.0
"""Typed loaders of the C++ core."""

from ds_fuyou.ops.core import builder_module, load_core

__all__ = ["builder_module", "load_core"]
