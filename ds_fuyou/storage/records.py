# SPDX-License-Identifier: Apache-2.0
"""Small checksummed JSON files, replaced atomically: the manifest and the commit record.

The first line names kind, format version, SHA-256 and length of the JSON text that follows, so that a torn or
altered file is told from a good one whatever byte is wrong.

[Note: room for the next record]
A run that has its space must not end because others filled the disk. So the commit record has two files: the record,
and beside it, under a temporary name, the one before. The next one is written over the latter, in the blocks that it
has, and then the two change names in one atomic step. Both are filled up with spaces, which JSON ignores, to a size
that leaves room to grow. Where a file system cannot exchange names the new one replaces the old one, and room is made
again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ds_fuyou.errors import FuyouChecksumError, FuyouStorageError, shown
from ds_fuyou.files import exchange
from ds_fuyou.storage.layout import Piece, RegionLayout, StoreLayout
from ds_fuyou.storage.types import PAGE_BYTES, JsonValue, RegionSpec, RunIdentity

__all__ = [
    "COMMIT_NAME",
    "CONTENTS_NAME",
    "ENGINE_NAME",
    "MANIFEST_NAME",
    "Manifest",
    "NotDurableError",
    "ProcessMark",
    "read_manifest",
    "read_record",
    "temporary_name",
    "typed",
    "well_formed",
    "write_manifest",
    "write_record",
]

MANIFEST_NAME = "manifest.json"
COMMIT_NAME = "commit.json"
CONTENTS_NAME = "contents.json"
ENGINE_NAME = "engine.json"
_Value = TypeVar("_Value")
_LONGEST = 4096  # of a path
_LATEST = 2**40  # seconds; what the calendar of every platform still has
_VERSIONS = {COMMIT_NAME: (1, 2)}  # that can be read, the last one is written; 1 of every other name
_HEADER_BYTES = 160  # at most
_SPARE_BYTES = 64 << 10
_NO_BOOT_ID = "unknown"
_NO_DESCRIPTOR_SECS = 5.0  # that a record waits for one


class NotDurableError(FuyouStorageError):
    """A file has its new content, but a power cut may take it back."""


@dataclass(frozen=True)
class ProcessMark:
    """Names one process for good: a pid is reused, and means nothing after a reboot or elsewhere."""

    pid: int
    start_ticks: int
    boot_id: str
    host: str

    @classmethod
    def of_this_process(cls) -> ProcessMark:
        return cls(os.getpid(), _start_ticks(os.getpid()), boot_id() or _NO_BOOT_ID, os.uname().nodename)

    def is_alive(self) -> bool:
        """False too when it ran on another host or before a reboot."""
        return self.boot_id == (boot_id() or _NO_BOOT_ID) and self.start_ticks == _start_ticks(self.pid) != 0


@dataclass(frozen=True)
class Manifest:
    """The description of a store. Every directory of the store holds one with its own ``index``; the layout of the
    first one counts, see [Note: the order of growing and shrinking] in growing.py.

    Attributes:
        store_id: random, the same in every directory of one store.
        index: which of ``directories`` this is; the first one holds the commit record.
        started: seconds since the epoch.
        keep: state stays after the run's end.
        checksum: whether chunk data is checksummed by whoever writes it.
    """

    store_id: str
    index: int
    directories: tuple[str, ...]
    identity: RunIdentity
    process: ProcessMark
    started: float
    keep: bool
    checksum: bool
    layout: StoreLayout


def temporary_name(name: str) -> str:
    """Of what is about to replace a record, or was replaced by it, see [Note: room for the next record]."""
    return f"{name}.tmp"


def write_manifest(dir_fd: int, directory: Path, manifest: Manifest) -> None:
    """Raises as :func:`write_record` does."""
    payload: dict[str, JsonValue] = {
        "store_id": manifest.store_id,
        "index": manifest.index,
        "directories": list(manifest.directories),
        "identity": vars(manifest.identity),
        "process": vars(manifest.process),
        "started": manifest.started,
        "keep": manifest.keep,
        "checksum": manifest.checksum,
        "file_bytes": list(manifest.layout.file_bytes),
        "regions": [
            {
                "name": region.spec.name,
                "num_bytes": region.spec.num_bytes,
                "stripes": [[[p.path, p.offset, p.num_bytes] for p in pieces] for pieces in region.slots],
            }
            for region in manifest.layout.regions
        ],
    }
    write_record(dir_fd, directory, MANIFEST_NAME, payload)


def read_manifest(dir_fd: int, directory: Path) -> Manifest | None:
    """None when there is none yet.

    Raises:
        FuyouStorageError: it cannot be read, or another version of the package wrote it.
        FuyouChecksumError: it is torn or was altered.
    """
    payload = read_record(dir_fd, directory, MANIFEST_NAME)
    if payload is None:
        return None
    with well_formed(directory / MANIFEST_NAME):
        return _manifest_of(payload)


@contextlib.contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Around code that takes values out of a document: a checksum says who wrote it last, not that it makes sense.

    Raises:
        FuyouStorageError: a value is missing, of another type or out of range.
    """
    try:
        yield
    except FuyouStorageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        message = f"{path.name} is not of its format ({type(error).__name__}: {str(error)[:200]})"
        raise FuyouStorageError(errno.EINVAL, f"{message}; start again from the last checkpoint", str(path)) from error


def typed(value: object, kind: type[_Value]) -> _Value:
    """``value`` if it is of this type itself; a whole number is none between true and false, and is below 2^63."""
    if type(value) is not kind or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        raise TypeError(f"{kind.__name__} expected, found {shown(value, 60)}")
    return value


def _manifest_of(payload: Mapping[str, Any]) -> Manifest:
    directories = tuple(typed(each, str) for each in typed(payload["directories"], list))
    file_bytes = tuple(typed(each, int) for each in typed(payload["file_bytes"], list))
    identity, process = typed(payload["identity"], dict), typed(payload["process"], dict)
    started = float(payload["started"])
    manifest = Manifest(
        store_id=typed(payload["store_id"], str),
        index=typed(payload["index"], int),
        directories=directories,
        identity=RunIdentity(
            typed(identity["model_fingerprint"], str),
            typed(identity["rank"], int),
            typed(identity["world_size"], int),
            typed(identity["run_id"], str),
        ),
        process=ProcessMark(
            typed(process["pid"], int),
            typed(process["start_ticks"], int),
            typed(process["boot_id"], str),
            typed(process["host"], str),
        ),
        started=started,
        keep=typed(payload["keep"], bool),
        checksum=typed(payload["checksum"], bool),
        layout=StoreLayout(tuple(_region(each, file_bytes) for each in typed(payload["regions"], list)), file_bytes),
    )
    if not 0 <= manifest.index < len(directories) == len(file_bytes):
        raise ValueError("one file of states in every directory must be there")
    if len({region.spec.name for region in manifest.layout.regions}) != len(manifest.layout.regions):
        raise ValueError("two regions have one name")
    if any("\0" in directory or len(directory) > _LONGEST for directory in directories):
        raise ValueError("a directory is none")
    if not 0 <= started < _LATEST or len(manifest.store_id + manifest.identity.model_fingerprint) > _LONGEST // 4:
        raise ValueError("the time of its start, or what it is called, is none")
    return manifest


def _region(entry: Mapping[str, Any], file_bytes: Sequence[int]) -> RegionLayout:
    name, num_bytes = typed(entry["name"], str), typed(entry["num_bytes"], int)
    slots = tuple(tuple(_piece(each, file_bytes) for each in pieces) for pieces in typed(entry["stripes"], list))
    if any(sum(piece.num_bytes for piece in pieces) != num_bytes for pieces in slots):
        raise ValueError(f"the pieces of {name} are not its {num_bytes} bytes")
    return RegionLayout(RegionSpec(name, num_bytes, len(slots)), slots)


def _piece(entry: Sequence[Any], file_bytes: Sequence[int]) -> Piece:
    path, offset, num_bytes = (typed(each, int) for each in typed(entry, list))
    if not 0 <= path < len(file_bytes) or not 0 <= offset < offset + num_bytes <= file_bytes[path]:
        raise ValueError(f"a piece lies outside of its file: {entry}")
    if offset % PAGE_BYTES or num_bytes % PAGE_BYTES:
        raise ValueError(f"a piece is not cut at pages: {entry}")
    return Piece(path, offset, num_bytes)


def write_record(
    dir_fd: int, directory: Path, name: str, payload: Mapping[str, JsonValue], *, keeps_room: bool = False
) -> None:
    """Replaces ``name`` in one atomic step; when it returns the new content survives a power cut.

    ``keeps_room``: for a record that is replaced again and again, see [Note: room for the next record].

    Raises:
        NotDurableError: it has the new content, which a power cut may take back.
        FuyouStorageError: nothing changed.
    """
    body = json.dumps(payload, separators=(",", ":"), sort_keys=True).encode()
    temporary, is_replaced = temporary_name(name), False
    try:
        fd = _open_new(dir_fd, temporary, os.O_WRONLY | os.O_CREAT | (0 if keeps_room else os.O_TRUNC))
        try:
            if keeps_room:
                body = _filled_up(name, body, os.fstat(fd).st_size, _size_of(dir_fd, name))
            text = _header(name, body) + body
            _write_all(fd, text)
            os.ftruncate(fd, len(text))
            os.fsync(fd)
        finally:
            os.close(fd)
        has_room = keeps_room and _exchange(dir_fd, temporary, name)
        if not has_room:
            os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        is_replaced = True
        os.fsync(dir_fd)
        if keeps_room and not has_room:
            with contextlib.suppress(OSError):  # this record is there; the next one may find room
                _make_room(dir_fd, temporary, len(text))
    except OSError as error:
        number, path = error.errno or errno.EIO, str(directory / name)
        if is_replaced:
            message = f"writing {name} failed; after a power cut it may say what it said before"
            raise NotDurableError(number, message, path) from error
        raise FuyouStorageError(number, f"writing {name} failed; what it said before stands", path) from error


def _open_new(dir_fd: int, name: str, flags: int) -> int:
    """:func:`_open_plain`, a little later where no descriptor is left now: a run does not end because its script opened
    many files just while a step was committed.
    """
    end = time.monotonic() + _NO_DESCRIPTOR_SECS
    while True:
        try:
            return _open_plain(dir_fd, name, flags)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() >= end:
                raise
        time.sleep(0.01)


def _open_plain(dir_fd: int, name: str, flags: int) -> int:
    """OSError if it is a link, a FIFO (which would be waited for, with locks held) or anything but a plain file."""
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file")
    return fd


def _header(name: str, body: bytes) -> bytes:
    return f"ds_fuyou {name} {_versions(name)[-1]} {hashlib.sha256(body).hexdigest()} {len(body)}\n".encode()


def _size_of(dir_fd: int, name: str) -> int:
    """0 if it is not there."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _filled_up(name: str, body: bytes, num_bytes: int, before: int) -> bytes:
    """``body`` with spaces so that it takes, with its header, a file of ``num_bytes``, or what suits it better.

    What one large record took is given back; not so where the one ``before``, of so many bytes, is large, too: the next
    may be, and others may have the blocks by then. (A withdrawn commit has a small record among large ones.)
    """
    needed = len(body) + _HEADER_BYTES
    if not needed <= num_bytes <= max(4 * (needed + _SPARE_BYTES), before):
        num_bytes = -(-(2 * needed + _SPARE_BYTES) // PAGE_BYTES) * PAGE_BYTES
    size = num_bytes - _HEADER_BYTES
    return body.ljust(size + _HEADER_BYTES - len(_header(name, b" " * size)))


def _make_room(dir_fd: int, name: str, num_bytes: int) -> None:
    fd = _open_plain(dir_fd, name, os.O_WRONLY | os.O_CREAT)
    try:
        _write_all(fd, b" " * num_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(dir_fd: int, one: str, other: str) -> bool:
    """Swaps two names of a directory. False if there is no ``other``, or the file system cannot."""
    try:
        return exchange(one, other, dir_fd=dir_fd)
    except FileNotFoundError:
        return False


def read_record(dir_fd: int, directory: Path, name: str, *, is_before: bool = False) -> dict[str, Any] | None:
    """The payload, None when the file does not exist; raises as :func:`read_manifest` does. ``is_before``: of the
    record before, see [Note: room for the next record].
    """
    try:
        with os.fdopen(_open_plain(dir_fd, temporary_name(name) if is_before else name, os.O_RDONLY), "rb") as file:
            header = file.readline(_HEADER_BYTES)
            words = header.decode("utf-8", "replace").removesuffix("\n").split(" ")
            says_its_size = words[-1] == str(os.fstat(file.fileno()).st_size - len(header))
            body = file.read() if says_its_size else b""  # whatever else lies there may be larger than memory
    except FileNotFoundError:
        return None
    except OSError as error:
        why = ": it must be a plain file" if error.errno == errno.EINVAL else ""
        message = f"reading {name} failed{why}"
        raise FuyouStorageError(error.errno or errno.EIO, message, str(directory / name)) from error
    digest = hashlib.sha256(body).hexdigest()
    version = words[2] if len(words) == 5 else ""
    is_whole = words == ["ds_fuyou", name, version, digest, str(len(body))]
    known = [str(number) for number in _versions(name)]
    if is_whole and version not in known:
        message = f"{name} must be of format {' or '.join(known)}, found {version}; use the ds_fuyou that wrote it"
        raise FuyouStorageError(errno.EINVAL, message, str(directory / name))
    if not is_whole:
        message = f"{name} is torn or was altered (checksum mismatch); start again from the last checkpoint"
        raise FuyouChecksumError(errno.EBADMSG, message, str(directory / name))
    try:
        payload: dict[str, Any] = json.loads(body)
    except (RecursionError, ValueError) as error:
        message = f"{name} cannot be read as JSON ({type(error).__name__}); start again from the last checkpoint"
        raise FuyouStorageError(errno.EINVAL, message, str(directory / name)) from error
    with well_formed(directory / name):
        return typed(payload, dict)


def _versions(name: str) -> tuple[int, ...]:
    return _VERSIONS.get(name, (1,))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; 0 when the process does not exist, is a zombie, or /proc is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def boot_id() -> str:
    """Of the system that runs; empty where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
