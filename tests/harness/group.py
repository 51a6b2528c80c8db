# SPDX-License-Identifier: Apache-2.0
"""The end of a script that ran on several ranks.

[Note: aborted while ending]
gloo's threads keep the tensors of their last collective. One that lets go of such a tensor while the interpreter ends
asks for the GIL inside a destructor, and the process aborts: "terminate called without an active exception" (torch
2.13, two ranks, without this package as with it; seen in backtraces). A thread of ours that nobody joined would say
the same, so no run is made again for it. Instead a few barriers are the last collectives of all scripts of the tests
that run on two ranks; those of examples, which need not know, come from tests/examples/at_exit.
"""

import torch


def leave_group() -> None:
    """All ranks of the group must come here."""
    for _ in range(4):
        torch.distributed.barrier()
