# SPDX-License-Identifier: Apache-2.0
"""How much of the states changes its tier in a step."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import pytest
import torch

from ds_fuyou.zero.run import rank_state
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 3, "width": 72, "vocabulary": 500}


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("most_steps", [2, 5])
def test_a_large_model_takes_no_more_steps_than_a_small_one(
    most_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_state, "_LEAST_MOVED_A_STEP", 0)
    monkeypatch.setattr(rank_state, "_MOST_STEPS_OF_A_MOVE", most_steps)
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    fuyou = {"nvme_path": str(tmp_path), "optimizer": {"tier": "nvme"}, "plan": {"chunk_bytes": 16384}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(fuyou=fuyou))
    state = engine.optimizer.rank_state

    def train() -> int:
        engine.backward(engine(**make_batch(MODEL, 0, 0)))
        engine.step()
        state.core.wait_all()
        return sum(state.core.place.residency.states)

    assert train() == 0
    assert state.move_to(1.0)
    seen = [train() for _ in range(most_steps + 3)]
    num_chunks = len(state.layout.chunks)
    assert seen[-1] == num_chunks
    assert sum(0 < number < num_chunks for number in seen) in range(most_steps - 2, most_steps + 3)
    engine.destroy()
