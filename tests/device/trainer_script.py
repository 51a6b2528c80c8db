# SPDX-License-Identifier: Apache-2.0
"""The Trainer script of tests/huggingface on the stand-in device; says at its end what the device saw."""

import json
import os
import sys

import torch

from tests.device.accelerator import install_from
from tests.huggingface import trainer_script


def main() -> None:
    install_from(os.environ)
    trainer_script.main()
    torch.standin.synchronize()
    seen = {"trips": torch.standin.take_trips(), "copies": torch.standin.core.counters()}
    sys.stdout.write(f"SEEN {json.dumps(seen)}\n")


if __name__ == "__main__":
    main()
