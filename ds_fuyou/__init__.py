# SPDX-License-Identifier: Apache-2.0
"""Out-of-core training for DeepSpeed, overlapped with backward and the next forward.

Importing the package activates it: the next import of DeepSpeed (or the one that already happened)
learns the top-level ``fuyou`` block of the DeepSpeed JSON. Without that block nothing changes. This
module and `ds_fuyou.autoload` run on every ``import torch``, hence standard library only.
"""

from ds_fuyou.autoload import _autoload
from ds_fuyou.version import __version__

__all__ = ["__version__"]

_autoload()
