# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed-style builders of the C++ core; installed as ``ds_fuyou.op_builder``.

DeepSpeed probes a top-level package of this name for a marker to find out whether it runs from its own
source tree, so this package defines no such marker, has no module called like one of DeepSpeed's, and
imports nothing by itself.
"""
