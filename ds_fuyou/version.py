# SPDX-License-Identifier: Apache-2.0
"""The version of the package; the single place that states it."""

__version__ = "0.1.0"
