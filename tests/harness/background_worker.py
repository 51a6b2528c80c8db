# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written behind training: ``background_worker.py CASE_JSON WHAT FOLDER``; every rank prints one
JSON line, where it lives so long. In all of them two steps are made first.

WHAT: a function of :data:`TASKS`. Held: the thread that writes waits, as on a slow disk, until it is let go.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
from save_worker import damage_state, raised, train
from train_worker import build_engine, edit_parameters, set_states

from ds_fuyou.checkpoint.unfinished import WritingLock, find_unfinished
from ds_fuyou.errors import FuyouError, FuyouMemoryError
from ds_fuyou.host.waiting import wait_reporting
from ds_fuyou.optimizer import snapshot
from ds_fuyou.zero.saving.background_save import Save
from tests.harness.group import leave_group
from tests.harness.models import masters_digest
from tests.harness.waits import interrupted_in


class Disk:
    """os.pwrite of the writing thread: held, or failing."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.error = 0
        self.num_bytes_of_calls = 0
        """Written by others than the writing thread."""
        self.num_bytes_of_saves = 0
        self._real = os.pwrite

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if threading.current_thread().name.startswith("fuyou-save"):
            self.may_write.wait()
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            self.num_bytes_of_saves += len(data)
        else:
            self.num_bytes_of_calls += len(data)
        return self._real(fd, data, offset)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.may_write.clear()
        try:
            yield
        finally:
            self.may_write.set()


disk = Disk()


def files_of(folder: Path) -> dict[str, str]:
    """By name: of what."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def exact(engine, case: dict, folder: Path) -> dict:
    """A checkpoint written while steps are made holds what one holds that is waited for; the steps are as ever."""
    if case.get("undisturbed"):
        train(engine, case, case["free_steps"])
        train(engine, case, 4 - case["free_steps"])
        return {"digest": masters_digest(engine)}
    engine.save_checkpoint(str(folder), tag="waited", client_state={"seen": 2})
    engine.fuyou_wait_checkpoint()
    torch.distributed.barrier()
    scripts = written(folder.glob("*.py"))
    with disk.held():
        engine.save_checkpoint(str(folder), tag="behind", client_state={"seen": 2})
        before = names(folder), (folder / "latest").read_text()
        in_use = [found.why_not for found in find_unfinished(folder)]
        train(engine, case, case["free_steps"])
    train(engine, case, 4 - case["free_steps"])
    engine.fuyou_wait_checkpoint()
    torch.distributed.barrier()
    return {
        "digest": masters_digest(engine),
        "before": before,
        "in_use": in_use,
        "after": (names(folder), (folder / "latest").read_text()),
        "same": files_of(folder / "waited") == files_of(folder / "behind"),
        "scripts stay": "zero_to_fp32.py" in scripts and written(folder.glob("*.py")) == scripts,
    }


def written(files: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Which files have these names, and since when."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def frozen(engine, case: dict, folder: Path) -> dict:
    """Frozen parameters are written behind the call, and an edit of one waits for that."""
    param = next(p for p in engine.module.parameters() if not p.requires_grad)
    engine.save_checkpoint(str(folder), tag="waited")
    engine.fuyou_wait_checkpoint()
    before = disk.num_bytes_of_calls
    disk.may_write.clear()
    engine.save_checkpoint(str(folder), tag="behind")
    called = disk.num_bytes_of_calls - before
    threading.Timer(0.3, disk.may_write.set).start()
    with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
        param.data.fill_(3.0)
    was_over = engine.optimizer.checkpoint_state.save.is_over()
    engine.fuyou_wait_checkpoint()
    torch.distributed.barrier()
    with deepspeed.zero.GatheredParameters([param]):
        edited = bool((param.data == 3.0).all())
    return {
        "called": called,
        "frozen": 2 * sum(p.ds_tensor.ds_numel for p in engine.module.parameters() if not p.requires_grad),
        "waited": was_over,
        "edited": edited,
        "same": files_of(folder / "waited") == files_of(folder / "behind"),
    }


def cloned(engine, case: dict, folder: Path) -> dict:
    """Where the file system shares blocks, states are not written, and are what they were all the same."""
    engine.save_checkpoint(str(folder), tag="behind")
    train(engine, case, 3)
    engine.fuyou_wait_checkpoint()
    written = disk.num_bytes_of_saves
    engine.load_checkpoint(str(folder), tag="behind")
    engine.save_checkpoint(str(folder), tag="again")
    engine.fuyou_wait_checkpoint()
    files = [path for path in sorted((folder / "behind").iterdir()) if "optim" in path.name]
    return {
        "written": written,
        "size": sum(path.stat().st_size for path in files),
        "whole": [zipfile.ZipFile(path).testzip() for path in files],
        "same": files_of(folder / "behind") == files_of(folder / "again"),
        "digest": masters_digest(engine),
    }


def followed(engine, case: dict, folder: Path) -> dict:
    """By another save, a load, edits, states put to sleep: each waits for it, or leaves it as it is."""
    expected = masters_digest(engine)
    for tag, then in {
        "saved": lambda: engine.save_checkpoint(str(folder), tag="again"),
        "loaded": lambda: engine.load_checkpoint(str(folder)),
        "edited": lambda: edit_parameters(engine, case),
        "set": lambda: set_states(engine, case),
        "asleep": lambda: (engine.offload_states(), train(engine, case, 1), engine.reload_states()),
        "evaluated": lambda: masters_digest(engine),
    }.items():
        engine.load_checkpoint(case["two_steps"])
        disk.may_write.clear()
        engine.save_checkpoint(str(folder), tag=tag)
        threading.Timer(0.2, disk.may_write.set).start()
        then()
        engine.fuyou_wait_checkpoint()
    found = {}
    for tag in [*names(folder)]:
        engine.load_checkpoint(str(folder), tag=tag)
        found[tag] = masters_digest(engine) == expected
    return found


def destroyed(engine, case: dict, folder: Path) -> dict:
    disk.may_write.clear()
    engine.save_checkpoint(str(folder), tag="last")
    train(engine, case, 1)
    threading.Timer(0.2, disk.may_write.set).start()
    engine.destroy()
    return {}


def left(engine, case: dict, folder: Path) -> dict:
    """The script ends, and destroys nothing."""
    disk.may_write.clear()
    engine.save_checkpoint(str(folder), tag="last")
    threading.Timer(0.5, disk.may_write.set).start()
    sys.exit(0)


def preempted(engine, case: dict, folder: Path) -> dict:
    """The script's own handler saves, and ends the process."""

    def handle(*_: object) -> None:
        engine.save_checkpoint(str(folder), tag="last")
        threading.Timer(0.5, disk.may_write.set).start()
        sys.exit(0)

    signal.signal(signal.SIGTERM, handle)
    disk.may_write.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    return {}


def excepted(engine, case: dict, folder: Path) -> dict:
    disk.may_write.clear()
    engine.save_checkpoint(str(folder), tag="last")
    train(engine, case, 1)
    threading.Timer(0.2, disk.may_write.set).start()
    raise KeyError("of the script")


def hold_until_given_up(engine, folder: Path, tag: str) -> None:
    """A save; the disk is held until it is given up."""
    disk.may_write.clear()
    engine.save_checkpoint(str(folder), tag=tag)
    save = engine.optimizer.checkpoint_state.save

    def let_go() -> None:
        while not save._is_cancelled:
            time.sleep(0.01)
        disk.may_write.set()

    threading.Thread(target=let_go, daemon=True).start()


def signalled(engine, case: dict, folder: Path) -> dict:
    hold_until_given_up(engine, folder, "last")
    train(engine, case, 1)
    os.kill(os.getpid(), case["signal"])
    time.sleep(60)
    return {}


def killed(engine, case: dict, folder: Path) -> dict:
    engine.save_checkpoint(str(folder), tag="first")
    engine.fuyou_wait_checkpoint()
    disk.may_write.clear()
    engine.save_checkpoint(str(folder), tag="second")
    train(engine, case, 1)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def interrupted(engine, case: dict, folder: Path) -> dict:
    """Ctrl-C while a script waits for it gives it up, and nothing else."""
    hold_until_given_up(engine, folder, "first")
    with interrupted_in(wait_reporting, Save.wait):
        try:
            engine.fuyou_wait_checkpoint()
            said = "nothing"
        except KeyboardInterrupt:
            said = "KeyboardInterrupt"
    train(engine, case, 2)
    engine.save_checkpoint(str(folder), tag="second")
    engine.fuyou_wait_checkpoint()
    return {"said": said, "there": names(folder)}


def failing(engine, case: dict, folder: Path) -> dict:
    """On the last rank the disk fills up while the checkpoint is written."""
    is_mine = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    said: dict = {}
    disk.error = errno.ENOSPC if is_mine else 0
    engine.save_checkpoint(str(folder), tag="first")
    if is_mine:
        save = engine.optimizer.checkpoint_state.save
        save._ended.wait()
    said["step"] = raised(lambda: train(engine, case, 1))
    disk.error = 0
    if said["step"] != "nothing":
        engine.step()  # the gradients are still there
    train(engine, case, 1)
    said["hidden"] = [path.name for path in folder.rglob("*optim_states.pt")]
    said["told once"] = raised(lambda: engine.save_checkpoint(str(folder), tag="second"))
    said["wait"] = raised(engine.fuyou_wait_checkpoint)
    disk.error = errno.EIO if is_mine else 0
    engine.save_checkpoint(str(folder), tag="third")
    said["joined"] = raised(engine.fuyou_wait_checkpoint)
    engine.save_checkpoint(str(folder), tag="fourth")
    if is_mine:
        engine.optimizer.checkpoint_state.save._ended.wait()
    if raised(lambda: train(engine, case, 1)) != "nothing":
        engine.step()
    said["asked"] = raised(engine.fuyou_wait_checkpoint)
    disk.error = 0
    said["digest"] = masters_digest(engine)
    engine.load_checkpoint(str(folder))
    train(engine, case, 1)
    said["there"] = names(folder)
    said["latest"] = (folder / "latest").read_text()
    return said


def refused(engine, case: dict, folder: Path) -> dict:
    """The last rank gets no memory for states on their way, then no thread: training goes on, and so does a save."""
    is_mine = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    said: dict = {}

    def save(tag: str) -> str:
        try:
            engine.save_checkpoint(str(folder), tag=tag)
            engine.fuyou_wait_checkpoint()
        except (FuyouError, MemoryError, RuntimeError) as error:
            return str(error)
        return "nothing"

    def no_memory(num_bytes: int) -> torch.Tensor:
        raise FuyouMemoryError(num_bytes)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for place, name, stand_in in ((snapshot, "aligned_tensor", no_memory), (threading.Thread, "start", no_thread)):
        original = getattr(place, name)
        if is_mine:
            setattr(place, name, stand_in)
        said[name] = save(name)
        setattr(place, name, original)
        train(engine, case, 3)
    save("third")
    return {**said, "there": names(folder), "digest": masters_digest(engine)}


def flipped(engine, case: dict, folder: Path) -> dict:
    """What is damaged on the disk must not get into a checkpoint."""
    damage_state(engine)
    engine.save_checkpoint(str(folder), tag="bad")
    return {"wait": raised(engine.fuyou_wait_checkpoint), "there": [n for n in names(folder) if n[0] != "."]}


def apart(engine, case: dict, folder: Path) -> dict:
    """Every rank has a folder of its own: the call waits."""
    own = folder / str(torch.distributed.get_rank())
    engine.save_checkpoint(str(own), tag="first")
    return {"there": names(own)}


def in_use(engine, case: dict, folder: Path) -> dict:
    """Another process writes to the tag; one puts another folder in the place of the one that is written to; and one
    moves it away."""
    hidden, is_first = folder / ".incomplete-first", torch.distributed.get_rank() == 0
    said: dict = {}
    if is_first:
        lock = WritingLock(hidden, "theirs 0")
        (hidden / "theirs").touch()
    torch.distributed.barrier()
    said["refused"] = raised(lambda: engine.save_checkpoint(str(folder), tag="first"))
    said["theirs"] = sorted(path.name for path in hidden.iterdir())
    torch.distributed.barrier()
    if is_first:
        lock.release()
    torch.distributed.barrier()
    engine.save_checkpoint(str(folder), tag="first")
    engine.fuyou_wait_checkpoint()
    with disk.held():
        engine.save_checkpoint(str(folder), tag="second")
        torch.distributed.barrier()
        if is_first:
            (folder / ".incomplete-second").rename(folder / "moved")
            shutil.copytree(folder / "moved", folder / ".incomplete-second")
        torch.distributed.barrier()
    said["replaced"] = raised(engine.fuyou_wait_checkpoint)
    with disk.held():
        engine.save_checkpoint(str(folder), tag="third")
        torch.distributed.barrier()
        if is_first:
            (folder / ".incomplete-third").rename(folder / "away")
        torch.distributed.barrier()
    said["moved"] = raised(engine.fuyou_wait_checkpoint)
    return {**said, "there": names(folder), "latest": (folder / "latest").read_text()}


def late_names(engine, case: dict, folder: Path) -> dict:
    """Two machines write into one folder, and the second one sees late what the first one has renamed."""
    is_dir, seen = Path.is_dir, set()

    def stale(path: Path) -> bool:
        if path.name.startswith(".incomplete") and is_dir(path):
            seen.add(path)
        return path in seen or is_dir(path)

    if torch.distributed.get_rank() == 1:
        Path.is_dir = stale  # type: ignore[method-assign]
    said = raised(lambda: (engine.save_checkpoint(str(folder), tag="first"), engine.fuyou_wait_checkpoint()))
    torch.distributed.barrier()
    return {"said": said, "there": names(folder), "latest": (folder / "latest").read_text()}


def between(engine, case: dict, folder: Path) -> dict:
    """What one rank alone meets before anything is written: all raise."""
    rank, said = torch.distributed.get_rank(), {}
    real, mkdir = shutil.disk_usage, Path.mkdir

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def broken_below(path: Path, *given: object, **named: object) -> None:
        if path.name.startswith(".incomplete"):
            broken()
        mkdir(path, *given, **named)  # type: ignore[arg-type]

    shutil.disk_usage = broken if rank == 1 else real  # type: ignore[assignment]
    said["space"] = raised(lambda: engine.save_checkpoint(str(folder), tag="first"))
    shutil.disk_usage = real
    Path.mkdir = broken_below if rank == 0 else mkdir  # type: ignore[method-assign]
    said["folder"] = raised(lambda: engine.save_checkpoint(str(folder), tag="first"))
    Path.mkdir = mkdir  # type: ignore[method-assign]
    engine.save_checkpoint(str(folder), tag="first")
    engine.fuyou_wait_checkpoint()
    torch.distributed.barrier()
    return {**said, "there": names(folder)}


TASKS: dict[str, Callable] = {
    task.__name__: task
    for task in (
        cloned,
        exact,
        frozen,
        followed,
        destroyed,
        left,
        preempted,
        excepted,
        signalled,
        killed,
        interrupted,
        failing,
        flipped,
        apart,
        refused,
        in_use,
        late_names,
        between,
    )
}


def main() -> None:
    case, what, folder = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], Path(sys.argv[3])
    os.pwrite = disk.pwrite
    engine = build_engine(case)
    if what in ("apart", "late_names"):
        engine.local_rank = 0
    train(engine, case, 2)
    if "two_steps" in case:
        engine.save_checkpoint(case["two_steps"])
        engine.fuyou_wait_checkpoint()
    found = TASKS[what](engine, case, folder)
    sys.stderr.write(json.dumps(found) + "\n")
    engine.destroy()
    leave_group()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
