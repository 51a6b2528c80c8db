# SPDX-License-Identifier: Apache-2.0
"""Activations out of core: what autograd saves in forward leaves the device and is back before backward needs it.

From the model inwards: :mod:`session` attaches to the model, :mod:`blocks` finds its blocks, :mod:`policy` names what
may become of them, :mod:`swapper` packs and unpacks, :mod:`tier` moves bytes between device, host memory and storage.
:mod:`recompute` and :mod:`takeover` deal with gradient checkpointing. Nothing here knows DeepSpeed.
"""
