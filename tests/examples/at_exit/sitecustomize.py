# SPDX-License-Identifier: Apache-2.0
"""On the path of an example that runs on several ranks: what it need not say itself, said when its interpreter ends.

See [Note: aborted while ending] in tests/harness/group.py. Registered first, hence run last.
"""

import atexit
import sys

from tests.harness.cpu_info import use_known


def leave_if_a_rank() -> None:
    torch = sys.modules.get("torch")
    if torch is None or hasattr(sys, "last_type") or not torch.distributed.is_initialized():
        return  # no rank, or one that failed: others may not come to a barrier
    from tests.harness.group import leave_group  # imports torch, which only ranks have done

    leave_group()


atexit.register(leave_if_a_rank)
use_known()  # as any process that tests start; there is one such file
