# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files in and out: streamed, atomic. Knows no DeepSpeed."""
