# SPDX-License-Identifier: Apache-2.0
"""The striped slot store with its manifest and commit record, and the I/O engine's binding."""
