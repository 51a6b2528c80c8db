# SPDX-License-Identifier: Apache-2.0
"""What two ranks see of collectives on the stand-in device; prints one JSON line a rank."""

import os

import deepspeed
import torch
from deepspeed import comm as dist

from tests.behaviour.engines import say
from tests.device.accelerator import install_from


def ranks_own() -> torch.Tensor:
    return torch.full((1000,), 1.0 + dist.get_rank(), device=f"standin:{torch.standin.current_device()}")


def seen(values: torch.Tensor) -> list[float]:
    return sorted(set(values.flatten().tolist()))


def main() -> None:
    install_from(os.environ)
    deepspeed.init_distributed("gloo")
    device, is_first = torch.standin, dist.get_rank() == 0
    device.set_device(int(os.environ["LOCAL_RANK"]))
    found: dict[str, object] = {}

    values = ranks_own()
    dist.all_reduce(values)  # groups of gloo are made
    device.synchronize()
    values = ranks_own()
    device.synchronize()
    device.take_waits()
    let_go = device.core.hold(device.current_stream().stream_id)
    handle = dist.all_reduce(values, async_op=True)
    others = ranks_own()
    dist.all_reduce(others)
    gathered = torch.empty(2000, device=values.device)
    dist.all_gather_into_tensor(gathered, ranks_own())
    part = torch.empty(500, device=values.device)
    scattered = dist.reduce_scatter_tensor(part, ranks_own(), async_op=True)
    told = ranks_own()
    dist.broadcast(told, src=1)
    found["host waits"] = len(device.take_waits())
    found["completed"] = handle.is_completed()
    let_go()
    handle.wait()
    scattered.wait()
    found["sums"] = [seen(each) for each in (values, others, gathered, part, told)]

    values = ranks_own()
    if is_first:
        handle = dist.all_reduce(values, async_op=True)
        found["before the others have come"] = seen(values)
    torch.distributed.barrier()
    if not is_first:
        handle = dist.all_reduce(values, async_op=True)
    handle.wait()
    found["after"] = seen(values)

    device.synchronize()
    found["trips"] = device.take_trips()
    torch.distributed.barrier()
    if is_first:
        try:
            for _ in range(1000):
                dist.all_reduce(values)
                device.synchronize()
        except RuntimeError as error:
            found["left alone"] = f"{error}"
    say(found)
    if not is_first:
        os._exit(0)


if __name__ == "__main__":
    main()
