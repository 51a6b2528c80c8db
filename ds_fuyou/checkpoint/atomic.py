# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder appears whole or not at all.

[Note: names]
Files are written to ``.incomplete-<tag>`` beside the final folder; every file is flushed by whoever wrote it.
Then one rename gives the folder its name. Where a folder of that name exists the two are exchanged in one
system call and the old one is deleted afterwards, so that at every instant the name leads to a whole
checkpoint. (A filesystem that cannot exchange takes two renames; :func:`recover` undoes half of one.) ``latest`` is
replaced by a rename, after the folder.

[Note: the lock goes last]
What a killed process leaves under a hidden name is known by the lock file in it (unfinished.py). So the lock stays in
the folder until it has its name, the folder that it replaces gets a link of it before the two are exchanged, and where
a folder is deleted it goes last. A process that is killed in between leaves an empty file in a whole checkpoint, which
the next save to that tag leaves out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path

from ds_fuyou.errors import FuyouConfigError, FuyouStateError, FuyouStorageError
from ds_fuyou.files import exchange
from ds_fuyou.storage.probe import filesystem_of

__all__ = [
    "LOCK_NAME",
    "SCRIPTS",
    "behind_link",
    "checked_tag",
    "discard",
    "flush",
    "incomplete_tag",
    "is_incomplete",
    "name_beside",
    "publish",
    "recover",
    "remove_hidden",
    "replace",
    "require_replaceable",
    "require_space",
    "write_beside",
]

logger = logging.getLogger("ds_fuyou")
LOCK_NAME = ".writing"  # of a file in a hidden folder
_PREFIX = ".incomplete-"
_REPLACED = ".replaced-"
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""That lie beside checkpoints, as DeepSpeed puts the first there."""
_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:optim|model)_states\.pt")  # of stage 3


def incomplete_tag(tag: str) -> str:
    """The tag under which a checkpoint is written until it is whole; a tag may name nested folders."""
    folder, name = os.path.split(tag)
    return os.path.join(folder, _PREFIX + name)


def behind_link(folder: Path, tag: str) -> tuple[Path, str]:
    """Where the checkpoint ``tag`` of a folder lies, and its name there: a link to a folder, on another disk perhaps,
    stays, as in stock, which writes through it. But a folder that no other can take the place of, a mount point for
    one: then the link is replaced, which is told.
    """
    final = folder / tag
    if not (final.is_symlink() and final.is_dir()):
        return folder, tag
    target = final.resolve()
    if target.stat().st_dev == target.parent.stat().st_dev and os.access(target.parent, os.W_OK):
        return target.parent, target.name
    logger.warning("%s is a link to %s, which cannot be replaced in one step: the link is", final, target)
    return folder, tag


def is_incomplete(name: str) -> bool:
    """Whether a folder of this name is one that a checkpoint is written to."""
    return name.startswith(_PREFIX)


def checked_tag(tag: str) -> str:
    """The tag as a relative path below the folder of checkpoints. FuyouConfigError if it leads elsewhere."""
    parts = Path(tag).parts
    if not parts or os.path.isabs(tag) or ".." in parts or parts[-1].startswith((_PREFIX, _REPLACED)):
        raise FuyouConfigError(f"a checkpoint's tag must name a folder below save_dir, found {tag!r}")
    if parts[0] in ("latest", "latest_universal", *SCRIPTS):
        raise FuyouConfigError(f"a checkpoint's tag must not take the name of a file beside it, found {tag!r}")
    return os.path.join(*parts)


def discard(folder: Path) -> None:
    """Removes what a save that was cut short left behind. Several ranks may do so at once."""
    with contextlib.suppress(OSError):
        remove_hidden(folder)
    shutil.rmtree(folder, ignore_errors=True)


def remove_hidden(folder: Path) -> None:
    """See [Note: the lock goes last]. Of a link, the link. Raises OSError if something cannot be removed."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LOCK_NAME):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    folder.rmdir()


def require_replaceable(final: Path, hidden: Path) -> None:
    """Looks whether the folder ``final``, if there is one, can be exchanged with ``hidden``, which is not empty.

    Raises:
        FuyouStorageError: it is of a lower layer of an overlay, which renames no such folder.
    """
    if final.is_symlink() or not final.is_dir() or filesystem_of(final) != "overlay":
        return
    try:
        os.rename(final, hidden)  # never done: a folder with something in it is not replaced
    except OSError as error:
        if error.errno != errno.EXDEV:
            return
        what = (
            "the checkpoint of this tag is part of a container's image (a lower layer of an overlay), so it cannot be "
            "replaced in one step; save to another tag or folder, or remove it first; nothing was written"
        )
        raise FuyouStorageError(error.errno, what, os.fspath(final)) from error


def recover(final: Path) -> None:
    """Where folders are exchanged in two steps: puts the old one back if a save died between them."""
    aside = final.with_name(_REPLACED + final.name)
    if aside.exists() and not final.exists():
        with contextlib.suppress(FileNotFoundError):  # another machine has just done it
            aside.rename(final)


def require_space(folder: Path, num_bytes: int, of_others: int) -> str | None:
    """None if the filesystem of ``folder`` holds ``num_bytes`` more, else what to say.

    ``of_others`` bytes of the total are written by other ranks on the same filesystem.
    """
    free = shutil.disk_usage(folder).free
    needed = num_bytes + of_others
    if free >= needed:
        return None
    return (
        f"a checkpoint in {folder} takes {needed / 1e9:.2f} GB (this rank {num_bytes / 1e9:.2f} GB); "
        f"{free / 1e9:.2f} GB are free. Free space or save elsewhere; nothing was written"
    )


def publish(incomplete: Path, final: Path) -> None:
    """Gives the whole folder its name, replacing a folder of that name: what that holds beside a checkpoint's files (a
    tokenizer, say, or checkpoints whose tags go on from this one) stays there, as in stock, which writes into it.
    """
    if not incomplete.is_dir():
        raise FuyouStateError(f"{incomplete} should hold the checkpoint that was just written; it is not there")
    for folder, _, files in os.walk(incomplete):
        for name in files:
            flush(Path(folder, name))
    to_move = _keep_beside(final, incomplete) if final.is_dir() else []
    for folder, _, _ in os.walk(incomplete):
        flush(Path(folder))
    if final.exists() or final.is_symlink():
        _exchange_locked(incomplete, final)
        if _have_moved(to_move, incomplete, final):
            _remove(incomplete)
        else:
            _keep_apart(incomplete, final)
    else:
        incomplete.rename(final)
        with contextlib.suppress(OSError):
            (final / LOCK_NAME).unlink()
    flush(final.parent)


def _keep_beside(old: Path, new: Path) -> list[Path]:
    """Files of ``old`` that are neither in ``new`` nor of ranks that this has no more come there, too: links, where
    there can be some, and copies else. What the exchange of folders then replaces loses nothing that the new one lacks,
    but what is returned, as paths below ``old``: it can be neither linked nor read, so it has to be moved.
    """
    to_move = []
    ranks = {found[1] for found in map(_RANK_FILE.fullmatch, os.listdir(new)) if found}
    for entry in os.scandir(old):
        kept, found = new / entry.name, _RANK_FILE.fullmatch(entry.name)
        is_left_out = bool(ranks) and found is not None and found[1] not in ranks
        if entry.name.startswith((_PREFIX, _REPLACED)) or is_left_out or os.path.lexists(kept):
            if entry.is_dir(follow_symlinks=False) and kept.is_dir() and not kept.is_symlink():
                to_move += [Path(entry.name, below) for below in _keep_beside(Path(entry.path), kept)]
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                shutil.copytree(entry.path, kept, symlinks=True, copy_function=_link)
            else:
                _link(entry.path, os.fspath(kept))
        except OSError:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(kept, ignore_errors=True)
            else:
                kept.unlink(missing_ok=True)
            to_move.append(Path(entry.name))
    return to_move


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target, follow_symlinks=False)
        if not os.path.islink(target):
            flush(Path(target))


def _have_moved(names: Iterable[Path], old: Path, new: Path) -> bool:
    try:
        for name in names:
            (old / name).rename(new / name)
    except OSError as error:
        logger.warning("%s: it could not be moved to the checkpoint that replaces this one: %s", old / name, error)
        return False
    return True


def _keep_apart(old: Path, new: Path) -> None:
    """Under a name that nobody clears: there is something in it that is not in the checkpoint that replaced it."""
    kept = new.with_name(f"{new.name}.kept-{secrets.token_hex(4)}")
    try:
        old.rename(kept)
        (kept / LOCK_NAME).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: what was replaced could not be renamed: %s", old, error)
    else:
        logger.warning("what was replaced is in %s", kept)


def name_beside(file: Path, text: str) -> Path:
    """Where :func:`write_beside` puts it: others may write other texts beside the same file meanwhile."""
    return file.with_name(f".{file.name}.new-{zlib.crc32(text.encode()):08x}")


def write_beside(file: Path, text: str) -> Path:
    """A small file that is to replace another one in one step, see :func:`replace`. FuyouStorageError if it cannot."""
    new = name_beside(file, text)
    try:
        with new.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise FuyouStorageError(error.errno or 0, f"writing {file.name} failed", os.fspath(file)) from error
    return new


def replace(new: Path, file: Path) -> None:
    """Durably."""
    new.replace(file)
    flush(file.parent)


def flush(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power cut. FuyouStorageError if that failed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS) or path.is_file():
            raise FuyouStorageError(error.errno or 0, "flushing a checkpoint", os.fspath(path)) from error
    finally:
        os.close(fd)


def _exchange_locked(new: Path, old: Path) -> None:
    """See [Note: the lock goes last]."""
    if not old.is_symlink():
        with contextlib.suppress(OSError):  # it is a file, not ours, or on a file system without links
            (old / LOCK_NAME).unlink(missing_ok=True)
            os.link(new / LOCK_NAME, old / LOCK_NAME)
    try:
        _exchange(new, old)
    finally:  # under that name is one or the other
        if not old.is_symlink():
            with contextlib.suppress(OSError):
                (old / LOCK_NAME).unlink()


def _exchange(one: Path, other: Path) -> None:
    """Swaps two names; in two steps where the filesystem cannot do it in one."""
    try:
        if exchange(one, other):
            return
    except OSError as error:
        raise FuyouStorageError(error.errno or 0, f"exchanging a checkpoint with {other}", os.fspath(one)) from error
    aside = other.with_name(_REPLACED + other.name)
    discard(aside)
    other.rename(aside)
    try:
        one.rename(other)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.rename(other)
        raise FuyouStorageError(error.errno or 0, f"exchanging a checkpoint with {other}", os.fspath(one)) from error
    aside.rename(one)


def _remove(replaced: Path) -> None:
    """Deletes the checkpoint that was replaced; the new one is in place, whatever happens here."""
    try:
        if replaced.is_symlink() or not replaced.is_dir():
            replaced.unlink()
        else:
            remove_hidden(replaced)
    except OSError as error:
        logger.warning("the replaced checkpoint %s could not be deleted: %s", replaced, error)
