# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3's parameters among saved tensors, as the addresses at which they are gathered come and go."""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fuyou.zero.activations import GatheredIndex


def gathered(param: torch.nn.Parameter, memory: torch.Tensor) -> None:
    param.data = memory
    param.ds_status = ZeroParamStatus.AVAILABLE


def test_only_the_place_of_the_last_gather_is_known() -> None:
    params = [torch.nn.Parameter(torch.empty(0)) for _ in range(2)]
    for number, param in enumerate(params):
        param.ds_id = number
    index = GatheredIndex()
    memories = [torch.zeros(16) for _ in range(20)]
    for step in range(19):
        for number, param in enumerate(params):
            gathered(param, memories[step + number])  # each takes the place that the other one leaves
            index.note([param])
        for param in params:
            found = index.find(param.data.detach())
            assert found is not None
            assert found.param is param
    assert len(index._by_address) == 2
