# SPDX-License-Identifier: Apache-2.0
"""State dictionaries in stock's CPU-tier format, so that stock's checkpoint files, tools and loaders apply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_fuyou.checkpoint.streamed_file import StandIns
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.optimizer.chunk_values import gather
from ds_fuyou.optimizer.layout import ParamSpan

__all__ = ["CLOCK_KEY", "CheckpointStateMixin"]

CLOCK_KEY = "ds_fuyou_clock"


class CheckpointStateMixin:
    """Overrides of stage 3's save and load."""

    stand_ins: StandIns | None = None
    """While a checkpoint file is streamed: large tensors are stand-ins of this. Else they are real, in DRAM."""

    def _rigid_state_dict(self: Any) -> dict[str, Any]:
        core = self.rank_state.core
        flats = self._flat_states(self.stand_ins)
        return {
            ZERO_STAGE: ZeroStageEnum.weights,
            LOSS_SCALER: self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            PARTITION_COUNT: self.partition_count,
            OPTIMIZER_STATE_DICT: self._optimizer_state_dict(flats),
            FP32_FLAT_GROUPS: [parts[0] for parts in flats],
            CLOCK_KEY: {
                "history": [(n, [list(b) for b in betas]) for n, betas in core.clock.history],
                "missed_steps": core.missed.by_name(),
            },
        }

    def _saved_names(self: Any) -> list[str]:
        """Names of the moments as stock's optimizer of this kind saves them."""
        kind = self.rank_state.core.kind
        if kind.name == "lion":
            return ["exp_avg", "exp_avg_sq"]  # DeepSpeedCPULion keeps a second one, zero, that nothing reads
        if kind.name == "adagrad" and type(self.optimizer).__module__.startswith("torch."):
            return ["sum"]
        return list(kind.moments)

    def _flat_states(self: Any, stand_ins: StandIns | None) -> list[list[torch.Tensor]]:
        """``[sub-group][P32, moments...]``, fp32, flat; collected now, or streamed later through stand-ins.

        Before the first step there are no moments, as ``_optimizer_state_dict`` saves none.
        """
        core = self.rank_state.core
        num_parts = 1 + (len(self._saved_names()) if core.clock.step else 0)
        numels = [n for n in core.layout.sub_group_numels for _ in range(num_parts)]

        def pieces() -> Iterator[tuple[int, int, torch.Tensor]]:
            for chunk, parts in core.states.read_all(range(len(core.layout.chunks))):
                parts += [torch.zeros_like(parts[0])] * (num_parts - len(parts))
                for part, values in enumerate(parts[:num_parts]):
                    yield chunk.sub_group * num_parts + part, chunk.begin, values

        if stand_ins is not None:
            flats = stand_ins.add_together([((n,), torch.float32) for n in numels], pieces)
        else:
            flats = [torch.empty(n, dtype=torch.float32, device="cpu") for n in numels]
            for which, begin, values in pieces():
                flats[which][begin : begin + values.numel()].copy_(values)
        return [flats[i : i + num_parts] for i in range(0, len(flats), num_parts)]

    def checkpoint_bytes(self: Any) -> int:
        """Size of this rank's optimizer file, without its small entries."""
        return 4 * (1 + len(self._saved_names())) * int(self.rank_state.core.layout.numel)

    def _optimizer_state_dict(self: Any, flats: list[list[torch.Tensor]]) -> dict[str, Any]:
        """As ``optimizer.state_dict()`` of stock: one "parameter" a sub-group, in the order of the groups."""
        core = self.rank_state.core
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        num_before = 0
        for group_index, group in enumerate(self.optimizer.param_groups):
            members = [i for i, g in enumerate(self._group_of_sub_group) if g == group_index]
            ids = list(range(num_before, num_before + len(members)))
            num_before += len(members)
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": ids})
            if core.clock.step:
                for place, sub_group in zip(ids, members, strict=True):
                    moments = dict(zip(self._saved_names(), flats[sub_group][1:], strict=True))
                    state[place] = {"step": core.clock.step, **moments}
        return {"state": state, "param_groups": groups}

    def _rigid_load_state_dict(self: Any, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        self.loss_scaler = state_dict[LOSS_SCALER]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        core = self.rank_state.core
        fp32 = state_dict[FP32_FLAT_GROUPS]
        if [t.numel() for t in fp32] != list(core.layout.sub_group_numels):
            raise FuyouStateError(
                f"the checkpoint's sub-groups hold {[t.numel() for t in fp32]} elements on this rank, the model's "
                f"{list(core.layout.sub_group_numels)}; load it with the model and world size it was saved with"
            )
        saved = state_dict[OPTIMIZER_STATE_DICT] if load_optimizer_states else None
        if saved is not None:
            for group, values in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({k: v for k, v in values.items() if k != "params"})
        moments = self._saved_moments(saved) if saved is not None else None
        self._write_all(fp32, moments)
        if saved is not None:
            self._restore_clock(state_dict, saved)

    def _saved_moments(self: Any, saved: dict[str, Any]) -> list[list[torch.Tensor]] | None:
        """Moments by sub-group, None if the checkpoint was made before the first step."""
        if not saved["state"]:
            return None
        order = [
            i for g in range(len(self.optimizer.param_groups)) for i, o in enumerate(self._group_of_sub_group) if o == g
        ]
        names = self._saved_names()[: len(self.rank_state.core.kind.moments)]
        found: list[list[torch.Tensor]] = [[] for _ in order]
        for place, sub_group in enumerate(order):
            if not all(name in saved["state"][place] for name in names):
                raise FuyouStateError(
                    f"the checkpoint's optimizer kept {sorted(saved['state'][place])}, this run's keeps {names}; load "
                    "it with the optimizer it was saved with, or with load_optimizer_states=False"
                )
            found[sub_group] = [saved["state"][place][name] for name in names]
        return found

    def _write_all(self: Any, fp32: Sequence[torch.Tensor], moments: list[list[torch.Tensor]] | None) -> None:
        core = self.rank_state.core
        for chunk in core.layout.chunks:
            cut = slice(chunk.begin, chunk.end)
            param = fp32[chunk.sub_group][cut]
            parts = [param]
            if moments is None:
                parts += [torch.zeros_like(param) for _ in core.kind.moments]
            else:
                parts += [m.view(-1)[cut] for m in moments[chunk.sub_group]]
            core.states.write(chunk.index, parts, param.to(core.options.param_dtype))
        self.rank_state.step_applied()

    def _restore_clock(self: Any, state_dict: dict[str, Any], saved: dict[str, Any]) -> None:
        core = self.rank_state.core
        ours = state_dict.get(CLOCK_KEY)
        if ours is not None:
            core.clock.replay(ours["history"])
            core.missed.restore(ours["missed_steps"])
            return
        # A stock checkpoint: the betas it was made with are those it saved.
        steps = {int(entry["step"]) for entry in saved["state"].values()}
        betas = [list(hyper.betas) for hyper in self._hypers()]
        core.clock.replay([(max(steps), betas)] if steps else [])
        core.missed.restore({})

    def _restore_from_bit16_weights(self: Any) -> None:
        """P32 := P16 (loading a module without its optimizer)."""
        core = self.rank_state.core
        last: dict[int, torch.Tensor] = {}

        def present(span: ParamSpan) -> torch.Tensor:
            if span.index not in last:  # a large one spans many chunks
                last.clear()
                last[span.index] = core.params.read(span)
            return last[span.index]

        for chunk, parts in core.states.read_all(range(len(core.layout.chunks))):
            parts[0].copy_(gather(core.layout, chunk, present, torch.float32))
            core.states.write(chunk.index, parts)
