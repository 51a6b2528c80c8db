# SPDX-License-Identifier: Apache-2.0
"""Hostile documents (``make fuzz``): ``python -m tests.faults.fuzz [--cases N] [--seed S] [--table FILE] ...``.

Manifests, commit records, contents, plans, configurations, model configurations, traces, profiles and tables of points:
a good one is changed at random, mostly so that it is still JSON with a right checksum, and given to all that read it.
Each must be read, or refused with one line of the package's own; a reader that needs longer than 20 seconds hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import logging
import os
import platform
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ds_fuyou.checkpoint.contents import check_resumable
from ds_fuyou.checkpoint.recovery import recover_weights
from ds_fuyou.cli.ds_config import read_ds_config
from ds_fuyou.ds_json import load_activation
from ds_fuyou.errors import FuyouError
from ds_fuyou.planner import document
from ds_fuyou.planner.plan import PlanInput
from ds_fuyou.planner.profile import RunProfile, StorageRates, load_profile
from ds_fuyou.simulator.models import load_model
from ds_fuyou.simulator.points import read_points
from ds_fuyou.storage import cleanup, records
from ds_fuyou.storage.store import RegionSpec, RunIdentity, SlotStore
from ds_fuyou.storage.store_files import read_directory_manifest
from ds_fuyou.telemetry.lane_times import read_trace
from tests.harness.outcomes import Outcomes, add_arguments
from tests.harness.runner import ds_config

LIMIT_SECS = 20
"""Of processor time."""
LONGEST_MESSAGE = 2000
DEEP = 100_000
BATCH = 1_000

Reader = Callable[[Path], Any]


@dataclass(frozen=True)
class Target:
    """``good``: JSON data, or text; ``put``: how it becomes a file; ``readers``: what reads it then."""

    name: str
    good: Any
    put: Callable[[str], None]
    readers: tuple[Callable[[], Any], ...]
    header: Callable[[bytes], bytes] = bytes


class _Hang(BaseException):
    pass


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise _Hang


# ---- changing documents ---------------------------------------------------------------------------------------------

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 4095, 4096, 2**31, 2**63, 2**64, 10**39, -(10**39)),
    *(0.5, 1e308, -0.0, float("nan"), float("inf")),
    *("", "a", "0", "../..", "/etc/passwd", "a\x00b", "\ud800", "x" * 5000, "-1", "1e400", "auto", "nvme"),
    *([], [[]], {}, {"a": {}}, [1, 2, 3], ["a"]),
)


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every value."""
    yield at
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield from places(value, (*at, key))


def changed(data: Any, chance: random.Random) -> Any:
    """A copy with one to three values replaced, removed, doubled, exchanged, or renamed."""
    data = copy.deepcopy(data)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        every = list(places(data))
        path = chance.choice(every)
        if not path:
            if chance.random() < 0.05:
                return chance.choice(STRANGE)
            continue
        parent = data
        for key in path[:-1]:
            parent = parent[key]
        key = path[-1]
        kind = chance.choice(["value", "value", "value", "near", "remove", "double", "exchange", "rename"])
        if kind == "value":
            parent[key] = copy.deepcopy(chance.choice(STRANGE))
        elif kind == "near" and isinstance(parent[key], int | float):
            parent[key] = parent[key] + chance.choice([-1, 1, 4096, -4096, 2**32])
        elif kind == "remove":
            del parent[key]
        elif kind == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == "exchange":
            value: Any = data
            for other in chance.choice(every):
                value = value[other] if isinstance(value, dict | list) and not _lacks(value, other) else value
            parent[key] = copy.deepcopy(value)
        elif kind == "rename" and isinstance(parent, dict):
            parent[chance.choice(["", "x", "step", "regions", str(key) + "s"])] = parent.pop(key)
    return data


def _lacks(value: Any, key: Any) -> bool:
    try:
        value[key]
    except (KeyError, IndexError, TypeError):
        return True
    return False


def text_of(data: Any, chance: random.Random) -> str:
    """JSON, rarely with a value that is deep, or a number that is long."""
    text = data if isinstance(data, str) else json.dumps(data)
    if chance.random() < 0.01:
        strange = chance.choice(
            ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "9" * 6000, "1e999", "-" + "9" * 4000]
        )
        at = [i for i, c in enumerate(text) if c in ":,"]
        text = (
            text[: chance.choice(at) + 1] + strange + "," + text[chance.choice(at) + 1 :]
            if at and chance.random() < 0.5
            else strange
        )
        if at and chance.random() < 0.7:
            cut = chance.choice(at)
            text = json.dumps(data)[: cut + 1] + strange + json.dumps(data)[_end_of_value(json.dumps(data), cut + 1) :]
    return text


def _end_of_value(text: str, at: int) -> int:
    with contextlib.suppress(ValueError):
        return json.JSONDecoder().raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))[1]
    return len(text)


def mangled(raw: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut off, put in."""
    data = bytearray(raw)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(data) + 1)
        kind = chance.choice(["flip", "flip", "cut", "insert", "repeat"])
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del data[at : at + chance.choice([1, 1, 16, len(data)])]
        elif kind == "insert":
            data[at:at] = chance.randbytes(chance.choice([1, 4, 64]))
        elif kind == "repeat":
            data[at:at] = data[at : at + 64]
    return bytes(data)


# ---- what is read ----------------------------------------------------------------------------------------------------


class StateFiles:
    """State files of one rank that `recover` takes weights from. What is read may keep nothing open."""

    def __init__(self, root: Path) -> None:
        self.path, self.out = root / "state", root / "weights.pt"
        self.path.mkdir()
        regions = [RegionSpec("state/0", 8192, 2), RegionSpec("state/1", 4096, 2), RegionSpec("params/0", 4096, 2)]
        store = SlotStore.create([self.path], regions, RunIdentity("model", 0, 1, "run"), keep=True, direct=False)
        params = [["a", [100], 0, 0, 100], ["b", [20, 5], 0, 100, 200], ["c", [], 0, 200, 201]]
        store.describe(
            {"params": params, "chunks": [[0, 0, 150], [0, 150, 201]], "engine": 0, "dtype": "torch.bfloat16"}
        )
        for step in (1, 2):
            meta = {
                "optimizer_step": step,
                "state_sums": "",
                "edition": 0,
                "training": None,
                "clock": [[step, [[0.9, 0.999]]]],
                "missed_steps": {},
            }
            store.commit(step, {region.name: step % 2 for region in regions}, {**meta, "without_moments": []})
        store.close()
        (self.directory,) = store.directories
        manifest = records.read_record(os.open(self.directory, os.O_RDONLY), self.directory, records.MANIFEST_NAME)
        # A process that has ended made it, so that nobody takes the files for a running one's.
        self.manifest = {**(manifest or {}), "process": {**(manifest or {})["process"], "start_ticks": 1}}
        self.good = {name: (self.directory / name).read_bytes() for name in os.listdir(self.directory)}

    def restore(self) -> None:
        for name in os.listdir(self.directory):
            if name not in self.good:
                os.unlink(self.directory / name)
        for name, data in self.good.items():
            if name != "data":
                (self.directory / name).write_bytes(data)

    def targets(self) -> Iterator[Target]:
        readers = (self.inspect, self.open, self.resume, self.recover)
        for name in (records.MANIFEST_NAME, records.COMMIT_NAME, records.CONTENTS_NAME):
            body = self.good[name].partition(b"\n")[2]
            good = self.manifest if name == records.MANIFEST_NAME else json.loads(body)
            yield Target(name, good, lambda text, n=name: self.put(n, text), readers)  # type: ignore[misc]

    def put(self, name: str, text: str) -> None:
        self.restore()
        body = text.encode("utf-8", "surrogatepass")
        version = self.good[name].split(b" ", 3)[2].decode()
        header = f"ds_fuyou {name} {version} {hashlib.sha256(body).hexdigest()} {len(body)}\n"
        (self.directory / name).write_bytes(header.encode() + body)

    def put_raw(self, name: str, raw: bytes) -> None:
        self.restore()
        (self.directory / name).write_bytes(raw)

    def inspect(self) -> None:
        cleanup.find_state(self.path)
        cleanup.lost_state([self.path])
        read_directory_manifest(self.directory)

    def open(self) -> None:
        store = SlotStore.open([self.directory], RunIdentity("model", 0, 1, "other"))
        try:
            store.contents()
            for commit in store.commits():
                for name, slot in commit.slots.items():
                    if name in store.regions:
                        store.extents(name, slot)
        finally:
            store.close(remove=False)

    def resume(self) -> None:
        store = SlotStore.open([self.directory], None)
        try:
            contents = store.contents()
            with records.well_formed(self.directory / records.COMMIT_NAME):
                for commit in store.commits():
                    check_resumable(commit, contents)
        finally:
            store.close(remove=False)

    def recover(self) -> None:
        recover_weights([self.directory], self.out)


PLAN = document.PlanDocument(
    model=document.Subject("gpt", 1000, 4, "0123456789abcdef"),
    world_size=1,
    residency=document.Residency(0.5, 0.0, 1.0),
    activations={},
    settings={"chunk_bytes": 1 << 20, "queue_depth": 32, "num_threads": 2},
)
BLOCK = {
    "nvme_path": ["/tmp"],
    "dram_budget_bytes": "64GB",
    "nvme_budget_bytes": 10**12,
    "parameters": {"tier": "nvme"},
    "optimizer": {"tier": "nvme", "overlap": "backward", "clip_policy": "auto"},
    "gradients": {"tier": "auto", "reduce_by": "block"},
    "activations": {"mode": "swap", "tier": "nvme", "block_classes": ["Block"]},
    "io": {"engine": "threads"},
    "checksum": True,
    "resume": "auto",
    "plan": {"chunk_bytes": 1 << 20, "queue_depth": 32, "block_bytes": 1 << 20, "num_threads": 2, "slots": 2},
}
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TRACE = {
    "traceEvents": [
        {"name": "forward", "cat": "compute", "ph": "X", "ts": 1.0, "dur": 5.0, "pid": 0, "tid": 0},
        {"name": "step", "ph": "X", "ts": 6.0, "dur": 2.0, "pid": 0, "tid": 1, "args": {"bytes": 10}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "compute"}},
    ],
    "otherData": {"dropped_spans": 0, "planned_secs": {"step": 0.1}},
}
POINTS = "system,gpu,num_ssds,dram_gb,model,batch\nfuyou,rtx4090,4,256,13B,8\nfuyou,rtx4090,4,256,13B,16\n"
PROFILE = RunProfile(
    machine="m",
    model="m",
    shape=(2, 17),
    num_elements=34.0,
    accumulation=1,
    blocks=(),
    forward_secs=0.1,
    backward_secs=0.2,
    update_rate=1e8,
    storage=StorageRates(1e9, 1e9, 1e9, 1e-10, 1e6),
    link_up=1e10,
    link_down=1e10,
    device_is_host=True,
    num_cores=2,
    host_bytes=1e10,
    device_bytes=1e10,
    given=PlanInput(10**6, 2, 2, 2, 10**5, 1 << 30),
    world_size=1,
    num_params=10**6,
)


def documents(root: Path) -> Iterator[Target]:
    file = root / "document.json"

    def put(text: str) -> None:
        _write(file, text)

    def activation() -> None:
        try:
            data = json.loads(file.read_bytes())
        except (ValueError, RecursionError):
            return  # DeepSpeed reads the file, and refuses it
        if isinstance(data, dict):
            load_activation(data)

    whole = ds_config(fuyou=BLOCK)
    yield Target("plan document", PLAN.to_json(), put, (lambda: document.load(file),))
    yield Target("configuration", whole, put, (lambda: read_ds_config(file),))
    yield Target("block", whole, put, (activation,))
    planned = {**whole, "fuyou": {"nvme_path": "/tmp", "plan": PLAN.to_json()}}
    yield Target("plan in the block", planned, put, (activation,))
    yield Target("model configuration", MODEL, put, (lambda: load_model(str(file)),))
    yield Target("trace", TRACE, put, (lambda: read_trace(file),))
    yield Target("points", POINTS, put, (lambda: read_points(file),))
    kept = root / "m-m.json"
    yield Target("profile", PROFILE.to_json(), lambda text: _write(kept, text), (lambda: load_profile("m", "m"),))


def _write(file: Path, text: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))


# ---- the sweep -------------------------------------------------------------------------------------------------------


def verdict(reader: Callable[[], Any]) -> str:
    """ "read" or "refused"; else what is wrong."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECS)
    try:
        reader()
        return "read"
    except FuyouError as error:
        said = str(error)
        if len(said) > LONGEST_MESSAGE:
            return f"a message of {len(said)} characters: {said[:80]}"
        return "refused" if "\n" not in said.strip() else f"several lines: {said[:200]!r}"
    except _Hang:
        return "hangs: " + "".join(traceback.format_exc().splitlines()[-3:])[:300]
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__, limit=-40)
        last = [each for each in place if "/ds_fuyou/" in each.filename][-1:] or place[-1:]
        return f"{type(error).__name__} in {Path(last[0].filename).name}, {last[0].name}: {str(error)[:100]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


@dataclass(frozen=True)
class Wrong:
    target: str
    what: str
    text: str


def sweep(num_cases: int, seed: int) -> tuple[Counter[tuple[str, str]], list[Wrong]]:
    """Counts by target and verdict, and what was wrong, one of a kind."""
    chance = random.Random(seed)
    counts: Counter[tuple[str, str]] = Counter()
    wrong: dict[tuple[str, str], Wrong] = {}
    before = signal.signal(signal.SIGPROF, _on_alarm)
    logging.disable(logging.CRITICAL)
    held = os.environ.get("DS_FUYOU_PROFILES")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix="fuyou-fuzz-", dir=memory) as scratch:
            os.environ["DS_FUYOU_PROFILES"] = scratch
            state = StateFiles(Path(scratch))
            targets = [*state.targets(), *documents(Path(scratch))]
            for number in range(num_cases):
                target = targets[number % len(targets)]
                made = _make(target, state, chance)
                for reader in target.readers:
                    found = verdict(reader)
                    if found in ("read", "refused"):
                        counts[target.name, found] += 1
                    else:
                        counts[target.name, "wrong"] += 1
                        wrong.setdefault((target.name, found.split(":")[0]), Wrong(target.name, found, made[:2000]))
                counts[target.name, "documents"] += 1
    finally:
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGPROF, before)
        os.environ.pop("DS_FUYOU_PROFILES")
        if held is not None:
            os.environ["DS_FUYOU_PROFILES"] = held
    return counts, list(wrong.values())


def _make(target: Target, state: StateFiles, chance: random.Random) -> str:
    if target.name in state.good and chance.random() < 0.2:
        raw = mangled(state.good[target.name], chance)
        state.put_raw(target.name, raw)
        return repr(raw)
    if isinstance(target.good, str):
        text = mangled(target.good.encode(), chance).decode("utf-8", "replace")
    else:
        text = text_of(changed(target.good, chance), chance)
        if chance.random() < 0.05:
            text = mangled(text.encode("utf-8", "surrogatepass"), chance).decode("utf-8", "replace")
    target.put(text)
    return text


def table(lines: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Of all batches."""
    counts = Counter[tuple[str, str]]()
    for line in lines:
        counts.update({(name, column): number for name, column, number in line["counts"]})
    names = list(dict.fromkeys(name for name, _ in counts))
    columns = ("documents", "read", "refused", "wrong")
    secs = sum(line["secs"] for line in lines) or 1.0
    done = [
        "# Hostile documents",
        "",
        f"`make fuzz`, seed {args.seed}: {len(lines) * BATCH / secs:.0f} documents a second, {secs / 60:.0f} minutes; "
        f"Linux {platform.release()}, torch {torch.__version__}.",
        "Every document is given to all that read it. Refused: with one line, of an exception of the package, "
        "of at most",
        f"{LONGEST_MESSAGE} characters. Wrong: another exception, or more than {LIMIT_SECS} s of processor time.",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---" + "|---:" * len(columns) + "|",
        *(f"| {name} | " + " | ".join(f"{counts[name, column]:,}" for column in columns) + " |" for name in names),
        "| all | " + " | ".join(f"{sum(counts[name, column] for name in names):,}" for column in columns) + " |",
        "",
        *dict.fromkeys(f"* {each['target']}: {each['what']}" for line in lines for each in line["wrong"]),
    ]
    return "\n".join(done).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=120_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path)
    add_arguments(parser, "fuzz.jsonl", 600.0)
    args = parser.parse_args()
    outcomes = Outcomes(args.outcomes, args.minutes)
    while len(outcomes.lines) * BATCH < args.cases and not outcomes.is_over():
        begin = time.monotonic()
        counts, wrong = sweep(BATCH, args.seed + len(outcomes.lines))
        named = [(name, column, number) for (name, column), number in counts.items()]
        secs = round(time.monotonic() - begin, 3)
        outcomes.add({"counts": named, "wrong": [asdict(each) for each in wrong], "secs": secs})
        for each in wrong:
            sys.stdout.write(f"-- {each.target}: {each.what}\n{each.text[:600]}\n")
    text = table(outcomes.lines, args)
    sys.stdout.write(text)
    if args.table is not None:
        args.table.write_text(text, encoding="utf-8")
    return int(any(line["wrong"] for line in outcomes.lines))


if __name__ == "__main__":
    sys.exit(main())
