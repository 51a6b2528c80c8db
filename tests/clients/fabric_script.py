# SPDX-License-Identifier: Apache-2.0
"""A loop under Lightning Fabric with its DeepSpeed strategy: a checkpoint after step 2, going on from it."""

import json
from pathlib import Path

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from given import language, leave_log, leave_weights, told
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.utilities.seed import reset_seed

from tests.huggingface.texts import sequences


class OnCpu(DeepSpeedStrategy):
    """Lightning's own without its two questions whether the devices are CUDA's, and with a number for the device."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True


def main() -> None:
    config, out, options = told()
    strategy = OnCpu(config={**json.loads(Path(config).read_text()), "gradient_clipping": 0.5})
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    fabric = Fabric(accelerator="cpu", devices=num_ranks, strategy=strategy, precision="bf16-true")
    fabric.launch()
    with fabric.init_module():
        model = language()
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=2e-3, weight_decay=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    data = fabric.setup_dataloaders(torch.utils.data.DataLoader(sequences(64), batch_size=2))
    held = fabric.setup_dataloaders(torch.utils.data.DataLoader(sequences(4, skip=100), batch_size=2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if options.get("resume"):
        fabric.load(options["resume"], state)
    history, first = [], state["step"]
    for step, batch in enumerate(data):
        if step < first:
            continue
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        norm = model._forward_module.get_global_grad_norm()
        history.append({"loss": loss.item(), "norm": None if norm is None else float(norm)})
        state["step"] = step + 1
        if step + 1 == 2:
            fabric.save(out / "checkpoint-2", state)
            model.eval()
            with torch.no_grad():
                history.append({"held": [model(**batch).loss.item() for batch in held]})
            model.train()
        if step + 1 == 4:
            break
    leave_weights(model, out)
    leave_log(out, history)


if __name__ == "__main__":
    main()
