# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with its DeepSpeed strategy. Options: ``order``, what is called, in turn (fit, validate, test,
predict).
"""

import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from given import language, leave_log, leave_weights, told
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy

from tests.huggingface.texts import sequences


class OnCpu(DeepSpeedStrategy):
    """Lightning's own without its two questions whether the devices are CUDA's, and with a number for the device."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Module(pl.LightningModule):
    def __init__(self, out) -> None:
        super().__init__()
        self.out, self.history, self.fits = out, [], 0

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = language()

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.history.append({"loss": loss.item()})
        return loss

    def on_train_batch_end(self, outputs, batch, index) -> None:
        if (index + 1) % 2 == 0:  # a step was made
            norm = self.trainer.strategy.deepspeed_engine.get_global_grad_norm()
            self.history.append({"norm": float(norm), "lr": self.optimizers().param_groups[0]["lr"]})

    def validation_step(self, batch, index) -> None:
        self.history.append({"validated": self.model(**batch).loss.item()})

    def test_step(self, batch, index) -> None:
        self.history.append({"tested": self.model(**batch).loss.item()})

    def predict_step(self, batch, index):
        return self.model(input_ids=batch["input_ids"]).logits.argmax(-1)

    def on_train_end(self) -> None:
        leave_weights(self.model, self.out)

    def configure_optimizers(self):
        optimizer = DeepSpeedCPUAdam(self.parameters(), lr=2e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(number: int, skip: int = 0) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(sequences(number, skip=skip), batch_size=2)


def main() -> None:
    config, out, options = told()
    torch.manual_seed(3)
    module = Module(out)
    keep = pl.callbacks.ModelCheckpoint(
        dirpath=out, filename="checkpoint-{step}", auto_insert_metric_name=False, every_n_train_steps=2, save_top_k=-1
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 1,
        strategy=OnCpu(config=json.loads(Path(config).read_text())),
        precision="bf16-true",
        max_steps=4,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for call in options.get("order", ["fit"]):
        module.history.append({"call": call})
        if call == "fit":
            module.fits += 1
            trainer.fit_loop.epoch_loop.max_steps = 4 * module.fits
            # Checkpoints lie between epochs: within one Lightning goes on at another batch, in stock too.
            trainer.fit(module, loader(8), loader(4, skip=100), ckpt_path=options.get("resume"))
        elif call == "predict":
            told_all = trainer.predict(module, loader(4, skip=200))
            module.history.append({"predicted": [row.tolist() for row in told_all]})
        else:
            getattr(trainer, call)(module, loader(4, skip=200))
    leave_log(out, module.history)


if __name__ == "__main__":
    main()
