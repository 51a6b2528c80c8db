# SPDX-License-Identifier: Apache-2.0
"""What an engine has after loads of all kinds: ``loading_worker.py CASE_JSON FOLDER``; prints one JSON line.

``tasks`` of the case: functions of :data:`TASKS`. What they find is hashed, so that it can be compared with what stock
finds in the same places.
"""

from __future__ import annotations

import argparse
import collections
import copy
import hashlib
import json
import logging
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from save_worker import raised, train
from train_worker import build_engine, make_batch

from ds_fuyou.zero.saving import loading
from tests.harness.group import leave_group

FROZEN = {"model": {"frozen": ["blocks.0", "tokens"]}}


def found(engine: Any) -> str:
    """Of P16, P32 and moments of all parameters."""
    sums = hashlib.sha256()
    for _, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            sums.update(param.data.contiguous().view(torch.uint8).numpy().tobytes())
        if param.requires_grad:
            states = [safe_get_full_optimizer_state(param, moment) for moment in ("exp_avg", "exp_avg_sq")]
            for values in [safe_get_full_fp32_param(param), *states]:
                sums.update(b"" if values is None else values.contiguous().numpy().tobytes())
    return sums.hexdigest()


def all_of(engine: Any) -> str:
    """And what a load replaces beside them."""
    module, scheduler, stock = engine.module, engine.lr_scheduler, engine.optimizer
    beside = {name: held for name, held in module.state_dict().items() if name.startswith("count.")}
    counters = [engine.global_steps, engine.global_samples, engine.skipped_steps, stock.loss_scale]
    rates = [{k: v for k, v in group.items() if k != "params"} for group in stock.param_groups]
    return f"{found(engine)} {beside} {counters} {scheduler.state_dict() if scheduler else None} {rates}"


def edit_frozen(module: torch.nn.Module, value: float) -> None:
    for param in module.parameters():
        if not param.requires_grad:
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.fill_(value)


@contextmanager
def another(case: dict) -> Iterator[Any]:
    """An engine like the first one that was not trained."""
    engine = build_engine(case)
    try:
        yield engine
    finally:
        engine.destroy()


def frozen(case: dict, folder: Path) -> dict:
    """Of the tag that is named: whatever ``latest``, which stock reads without optimizer states, and a function of the
    script's have put there before. Where a load fails, as they were.
    """
    case, said = {**case, **FROZEN}, {}
    with another(case) as engine:
        train(engine, case, 1)
        for tag, value in (("a", 0.25), ("b", 0.5)):
            edit_frozen(engine.module, value)
            engine.save_checkpoint(str(folder), tag=tag)
        for tag in ("a", "b"):
            for with_states in (True, False):
                for function in (None, lambda src, dst: edit_frozen(dst, 0.75)):
                    if function and not with_states:
                        continue  # everything is gathered then
                    engine.load_checkpoint(str(folder), tag, custom_load_fn=function, load_optimizer_states=with_states)
                    said[f"{tag} {with_states} {function is not None}"] = found(engine)
        edit_frozen(engine.module, 0.125)
        engine.save_checkpoint(str(folder), tag="without", exclude_frozen_parameters=True)
        said["raised"] = raised(lambda: engine.load_checkpoint(str(folder), "b", load_optimizer_states=False))
        said["failed"] = found(engine)
    return said


def given_by_script(case: dict, folder: Path) -> dict:
    """States that the script has read from the file of a checkpoint that was loaded before, and changed."""
    with another(case) as engine:
        train(engine, case, 1)
        engine.save_checkpoint(str(folder))
        engine.load_checkpoint(str(folder))
        loaded = torch.load(next(folder.glob("*/*optim_states.pt")), mmap=True, weights_only=False)
        states = loaded["optimizer_state_dict"]
        states["fp32_flat_groups"][0].data.mul_(0.5)
        engine.optimizer.load_state_dict([states])
        return {"found": found(engine)}


def rolled_back(case: dict, folder: Path) -> dict:
    """To states that the script has kept itself (stock goes on to write to them), behind an evaluation, whose
    parameters are gathered still; without its moments, too. And masters that are made of parameters, behind one, and
    between backward and step."""

    def evaluate() -> None:
        with torch.no_grad():
            engine(**batch)

    def trained() -> str:
        train(engine, case, 1)
        return found(engine)

    said, batch = {}, make_batch(case["model"], 0, 0)
    with another(case) as engine:
        train(engine, case, 1)
        kept = copy.deepcopy(engine.optimizer.state_dict())
        for with_moments in (True, False):
            train(engine, case, 1)
            evaluate()
            engine.optimizer.load_state_dict([copy.deepcopy(kept)], load_optimizer_states=with_moments)
            said[f"moments {with_moments}"] = [found(engine), trained()]
            evaluate()
            engine.optimizer.load_state_dict([copy.deepcopy(kept)], load_optimizer_states=with_moments)
            said[f"not read, moments {with_moments}"] = trained()
        evaluate()
        engine.optimizer.refresh_fp32_params()
        said["refreshed"] = [found(engine), trained()]
        engine.backward(engine(**batch))
        engine.optimizer.refresh_fp32_params()
        engine.step()
        said["between"] = found(engine)
        param = engine.module.blocks[1].up.weight
        for what, call in (
            ("refresh", engine.optimizer.refresh_fp32_params),
            ("load", lambda: engine.optimizer.load_state_dict([copy.deepcopy(kept)])),
        ):
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.fill_(0.25)
                call()
            said[f"{what} within an edit"] = [found(engine), trained()]
    return said


def within_inference(case: dict, folder: Path) -> dict:
    """By the function that evaluates, which then goes back to the best checkpoint."""
    with another(case) as engine:
        train(engine, case, 1)
        engine.save_checkpoint(str(folder))
        train(engine, case, 1)
        with torch.inference_mode():
            engine.load_checkpoint(str(folder))
        train(engine, case, 1)
        return {"found": found(engine)}


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def flipped(case: dict, folder: Path) -> dict:
    """A bit of a checkpoint's files is another one: in the middle of each tensor that is used, and of each pickle."""
    case, said = {**case, **FROZEN}, {}
    with another(case) as engine:
        train(engine, case, 1)
        engine.save_checkpoint(str(folder))
        engine.fuyou_wait_checkpoint()
        for file in sorted(folder.glob("*/*_states.pt")):
            with zipfile.ZipFile(file) as archive:
                largest = sorted(archive.infolist(), key=lambda info: info.file_size)[-3:]
                places = {}
                for info in [*largest, archive.getinfo(f"{archive.namelist()[0].split('/')[0]}/data.pkl")]:
                    with archive.open(info) as record:
                        places[info.filename] = record._fileobj.tell() + info.file_size // 2
            for name, at in places.items():
                flip(file, at)
                try:
                    said[f"{file.name} {name}"] = raised(lambda: engine.load_checkpoint(str(folder)))
                except Exception as error:  # whatever pickle makes of it, where nobody compares
                    said[f"{file.name} {name}"] = repr(error)
                flip(file, at)
                if "optim" in file.name and "data.pkl" not in name:
                    flip(file, at)
                    alone = raised(lambda: engine.load_checkpoint(str(folder), load_optimizer_states=False))
                    said[f"{file.name} {name}, weights alone"] = alone
                    flip(file, at)
        said["whole"] = raised(lambda: engine.load_checkpoint(str(folder)))
        said["whole, weights alone"] = raised(lambda: engine.load_checkpoint(str(folder), load_optimizer_states=False))
        with patch.object(loading, "available_host_bytes", lambda: 1000):
            said["no memory"] = raised(lambda: engine.load_checkpoint(str(folder), load_optimizer_states=False))
    return said


def one_rank(case: dict, folder: Path) -> dict:
    """Rank 1's part is missing, damaged or elsewhere; what each of the ranks says, and whether it can go on."""
    said: dict = {}

    def tried(what: str, path: Path) -> None:
        text = attempted(lambda: engine.load_checkpoint(str(path)))
        before = all_of(engine)
        after = raised(lambda: train(engine, case, 1))
        said[what] = [text, before == unloaded, after]
        if "Error" in after:
            engine.load_checkpoint(str(folder / "whole"))
            assert raised(lambda: train(engine, case, 1)) == "nothing"

    case = {**case, "model": {**FROZEN["model"], "counts": True}}
    with another(case) as engine:
        rank = torch.distributed.get_rank()
        train(engine, case, 1)
        engine.save_checkpoint(str(folder / "whole"))
        edit_frozen(engine.module, 0.5)
        train(engine, case, 1)
        for what in ("states", "module", "tensor"):
            if rank == 0:
                shutil.copytree(folder / "whole", folder / what)
                part = next(
                    (folder / what).glob(f"*/*rank_1_*{'model' if what == 'module' else 'optim'}_states.pt"),
                )
                if what != "tensor":
                    part.unlink()
                else:
                    with zipfile.ZipFile(part) as archive:
                        flip(part, max(archive.infolist(), key=lambda info: info.file_size).header_offset + 9000)
            torch.distributed.barrier()
        if rank == 0:
            shutil.copytree(folder / "whole", folder / "surplus")
            for part in (folder / "surplus").glob("*/*model_states.pt"):
                held = torch.load(part, weights_only=False)
                held["module"]["surplus"] = torch.zeros(1)
                torch.save(held, part)
        torch.distributed.barrier()
        for what in ("states", "module", "surplus", "tensor"):
            unloaded = all_of(engine)
            tried(what, folder / what)
        attempted(lambda: engine.load_checkpoint(str(folder / "tensor")))
        engine.load_checkpoint(str(folder / "whole"), load_module_only=True)
        said["weights over it"] = raised(lambda: train(engine, case, 1))
        engine.load_checkpoint(str(folder / "whole"))
        kept = copy.deepcopy(engine.optimizer.state_dict())
        if rank == 1:
            kept["fp32_flat_groups"] = [values[:-1] for values in kept["fp32_flat_groups"]]
        with torch.no_grad():
            engine(**make_batch(case["model"], 0, rank))
        said["given"] = attempted(lambda: engine.optimizer.load_state_dict([kept] * 2))
        torch.distributed.barrier()
        engine.load_checkpoint(str(folder / "whole"))
        unloaded = all_of(engine)
        tried("elsewhere", folder / ("whole" if rank == 0 else "nowhere"))
        unloaded = all_of(engine)
        tried("nowhere", folder / "nowhere")
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, said)
    return {"ranks": every}


def failed_midway(case: dict, folder: Path) -> dict:
    """Loads that have replaced something when they fail."""
    said: dict = {}
    with another(case) as engine:
        train(engine, case, 1)
        engine.save_checkpoint(str(folder), tag="first")
        part = next(folder.glob("first/*model_states.pt"))
        held = torch.load(part, weights_only=False)
        held["lr_scheduler"] = 3
        torch.save(held, part)
        train(engine, case, 1)
        engine.save_checkpoint(str(folder), tag="whole")
        ways: dict[str, Any] = {
            "scheduler": lambda: engine.load_checkpoint(str(folder), "first"),
            "function": lambda: engine.load_checkpoint(str(folder), custom_load_fn=halfway),
            "weights": lambda: engine.load_checkpoint(str(folder), load_optimizer_states=False, custom_load_fn=halfway),
        }
        for what, load in ways.items():
            said[what] = [attempted(load), raised(lambda: train(engine, case, 1))]
            engine.load_checkpoint(str(folder), "whole")
            said[what].append(raised(lambda: train(engine, case, 1)))
        attempted(ways["weights"])
        engine.load_checkpoint(str(folder), "whole", load_module_only=True)
        said["weights over weights"] = raised(lambda: train(engine, case, 1))
        shutil.copytree(folder / "whole", folder / "torn")
        states = next(folder.glob("torn/*optim_states.pt"))
        flip(states, states.stat().st_size // 2)
        said["states"] = attempted(lambda: engine.load_checkpoint(str(folder), "torn"))
        engine.load_checkpoint(str(folder), "whole", load_module_only=True)
        engine.optimizer.refresh_fp32_params()
        said["weights over it"] = raised(lambda: train(engine, case, 1))
    return said


def attempted(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # the script's own among them, and stock asserts where a file is missing
        return f"{type(error).__name__}: {error}"
    return "nothing"


def halfway(src: Any, dst: torch.nn.Module) -> None:
    for param in list(dst.parameters())[:2]:
        param.data.zero_()
    raise ValueError("half of it")


def client_state(case: dict, folder: Path) -> dict:
    """Tensors without a memory of their own; and what is handed out when the files are written over."""
    given = {
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "dense": torch.arange(70_000),
        "hidden": Hidden(torch.arange(70_000)),
    }
    scheduler = Schedule()
    with another({**case, **FROZEN}) as engine:
        train(engine, case, 1)
        engine.lr_scheduler = scheduler
        engine.optimizer.param_groups[0]["scripts"] = torch.arange(70_000)
        engine.save_checkpoint(str(folder), client_state=given)
        engine.fuyou_wait_checkpoint()
        _, loaded = engine.load_checkpoint(str(folder))
        assert scheduler.given is not None
        handed_out = {
            "dense": loaded["dense"],
            "hidden": loaded["hidden"].values,
            "scheduler": scheduler.given["values"],
            "hyperparameter": engine.optimizer.param_groups[0]["scripts"],
        }
        for file in folder.glob("*/*.pt"):
            with file.open("r+b") as opened:
                opened.write(bytes(file.stat().st_size))
        engine.lr_scheduler = None
        return {
            "sparse": torch.equal(loaded["sparse"].to_dense(), torch.eye(3)),
            "rows": torch.equal(loaded["rows"].to_dense(), torch.eye(3)),
            **{name: torch.equal(values, given["dense"]) for name, values in handed_out.items()},
            "mapped": sorted(set(mapped_files()) & {str(file) for file in folder.glob("*/*.pt")}),
        }


class Hidden:
    """Of the script: nobody sees what is in it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Schedule:
    """Keeps what it is given, as torch's do."""

    given: dict | None = None

    def state_dict(self) -> dict:
        return {"values": torch.arange(70_000)}

    def load_state_dict(self, state: dict) -> None:
        self.given = state

    def step(self, **_: Any) -> None:
        pass


def mapped_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6]


def reordered(case: dict, folder: Path) -> dict:
    """The same parameters in another order, and under another name. Those of the first block missed a step."""
    said: dict = {}
    case = {**case, "model": {**case["model"], "skip": 0, "skip_at": [0]}}
    with another(case) as engine:
        train(engine, case, 1)
        engine.save_checkpoint(str(folder))
        engine.fuyou_wait_checkpoint()
        missed = engine.optimizer.rank_state.core.missed
        file, states_file = next(folder.glob("*/*model_states.pt")), next(folder.glob("*/*optim_states.pt"))
        saved, states = (torch.load(each, weights_only=False) for each in (file, states_file))
        counts = states["optimizer_state_dict"]["ds_fuyou_clock"]["missed_steps"]
        said["missed"] = dict(counts)
        shapes = saved["param_shapes"][0]
        norms = [name for name in shapes if name.endswith("norm.weight")]
        changes: dict[str, Callable[[str], str]] = {
            "swapped": lambda name: {norms[0]: norms[1], norms[1]: norms[0]}.get(name, name),
            "renamed": lambda name: name.replace("blocks.0.norm", "blocks.0.ln"),
            "moved up": lambda name: name.replace("blocks.1.", "blocks.2b.").replace("blocks.0.", "blocks.1."),
            "as it is": lambda name: name,
        }
        for what, change in changes.items():
            renamed = collections.OrderedDict((change(name), shape) for name, shape in shapes.items())
            torch.save({**saved, "param_shapes": [renamed]}, file)
            clock = states["optimizer_state_dict"]["ds_fuyou_clock"]
            clock["missed_steps"] = {change(name): number for name, number in counts.items()}
            torch.save(states, states_file)
            records: list[str] = []
            missed.restore({})
            with recorded(records):
                said[what] = raised(lambda: engine.load_checkpoint(str(folder)))
            said[f"{what} missed"] = missed.by_name()
            said[f"{what} told"] = [text for text in records if "another name" in text]
        torch.save({**saved, "param_shapes": [dict([*list(shapes.items())[1:], ("other", [500, 72])])]}, file)
        said["other shapes"] = raised(lambda: engine.load_checkpoint(str(folder)))
        torch.save(saved, file)
        said["by name"] = raised(lambda: engine.load_checkpoint(str(folder), load_optimizer_states=False))
        said["states given by the script"] = raised(
            lambda: engine.optimizer.load_state_dict([engine.optimizer.state_dict()])
        )
        given = engine.optimizer.state_dict()
        given["ds_fuyou_clock"]["missed_steps"] = {"blocks.0.ln.weight": 1}
        said["states of other names"] = raised(lambda: engine.optimizer.load_state_dict([given]))
        said["step after it"] = raised(lambda: train(engine, case, 1))
    return said


def universal(case: dict, folder: Path) -> dict:
    """Loaded where some of what missed a step is frozen."""
    case = {**case, "model": {**case["model"], "skip": 0, "skip_at": [0]}}
    with another(case) as engine:
        train(engine, case, 2)
        engine.save_checkpoint(str(folder), tag="saved")
        engine.fuyou_wait_checkpoint()
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": False}
    folders = {"input_folder": str(folder / "saved"), "output_folder": str(folder / "converted")}
    convert(argparse.Namespace(**folders, **options, inject_missing_state=False))
    (folder / "latest_universal").write_text("converted")
    case = {**case, "config": {**case["config"], "checkpoint": {"load_universal": True}}}
    said = {}
    with another({**case, "model": {**case["model"], "frozen": ["blocks.0.up"]}}) as engine:
        said["load"] = raised(lambda: engine.load_checkpoint(str(folder), tag="converted"))
        said["missed"] = engine.optimizer.rank_state.core.missed.by_name()
        said["step"] = raised(lambda: train(engine, case, 1))
    with another({**case, "groups": "two"}) as engine:
        said["groups"] = raised(lambda: engine.load_checkpoint(str(folder), tag="converted"))
        said["groups, step"] = raised(lambda: train(engine, case, 1))
    with another(case) as engine:
        (folder / "converted/zero/blocks.0.up.weight").rename(folder / "converted/zero/blocks.0.wide.weight")
        said["renamed"] = raised(lambda: engine.load_checkpoint(str(folder), tag="converted"))
    return said


@contextmanager
def recorded(records: list[str]) -> Iterator[None]:
    class Records(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Records()
    logging.getLogger("ds_fuyou").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ds_fuyou").removeHandler(handler)


def other_tag(case: dict, folder: Path) -> dict:
    """Without optimizer states stock reads the weights of ``latest``, whatever tag is named."""
    with another(case) as engine:
        said: dict = {}
        for tag in ("first", "second"):
            train(engine, case, 1)
            engine.save_checkpoint(str(folder), tag=tag)
        for tag in ("first", "second", None):
            records: list[str] = []
            with recorded(records):
                engine.load_checkpoint(str(folder), tag, load_optimizer_states=False)
            said[str(tag)] = [text for text in records if "latest" in text]
        (folder / "latest").write_text("")
        (folder / "second" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"")
        for tag in (None, "second"):
            try:
                engine.load_checkpoint(str(folder), tag)
            except Exception as error:
                said[f"{tag}, empty"] = f"{type(error).__name__}: {error}"
        return said


def changed_directory(case: dict, folder: Path) -> dict:
    """A relative folder is that of the call; where the tag is a link to a folder, that one is written to."""
    (folder / "elsewhere").mkdir(parents=True)
    before = Path.cwd()
    with another(case) as engine:
        train(engine, case, 1)
        try:
            os.chdir(folder)
            engine.save_checkpoint("relative", tag="tag")
            os.chdir("elsewhere")
            train(engine, case, 1)
            engine.fuyou_wait_checkpoint()
        finally:
            os.chdir(before)
        (folder / "disk" / "large").mkdir(parents=True)
        (folder / "linked").mkdir()
        (folder / "linked" / "best").symlink_to(folder / "disk" / "large")
        (folder / "far" / "away" / "linked").mkdir(parents=True)
        (folder / "linked" / "deep").symlink_to(folder / "far" / "away" / "linked")
        (folder / "far" / "away" / "linked" / "best").symlink_to(Path("../../../disk/other"))
        (folder / "disk" / "other").mkdir()
        for _ in range(2):
            engine.save_checkpoint(str(folder / "linked"), tag="best")
            engine.save_checkpoint(str(folder / "linked" / "deep"), tag="best")
            train(engine, case, 1)
        engine.fuyou_wait_checkpoint()
        before_load = found(engine)
        engine.load_checkpoint(str(folder / "linked"))
        is_link = (folder / "linked" / "best").is_symlink()
        engine.load_checkpoint(str(folder / "linked" / "deep"))
        behind = [sorted(path.name for path in (folder / "disk" / name).iterdir()) for name in ("", "large", "other")]
        linked = [is_link, *behind, (folder / "linked" / "latest").read_text(), found(engine) != before_load]
    every = [*(folder / "relative").rglob("*"), *folder.iterdir()]
    paths = [path.relative_to(folder) for path in every if path.name in ("tag", "latest", "relative")]
    return {"found": sorted(map(str, paths)), "linked": linked}


TASKS = {
    "one_rank": one_rank,
    "failed_midway": failed_midway,
    "within_inference": within_inference,
    "flipped": flipped,
    "given_by_script": given_by_script,
    "rolled_back": rolled_back,
    "frozen": frozen,
    "client_state": client_state,
    "reordered": reordered,
    "universal": universal,
    "other_tag": other_tag,
    "changed_directory": changed_directory,
}


def main() -> None:
    case, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    said = {task: TASKS[task](case, folder / task) for task in case["tasks"]}
    sys.stderr.write(json.dumps(said) + "\n")
    leave_group()


if __name__ == "__main__":
    main()
