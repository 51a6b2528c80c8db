# SPDX-License-Identifier: Apache-2.0
"""The C++ pipeline as the training thread sees it: how it is asked, how it is waited for, how its failures are told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.waiting import wait_reporting, wait_through
from ds_fuyou.storage.io import storage_error

__all__ = ["Worker"]

logger = logging.getLogger("ds_fuyou")


class Worker:
    """One pipeline until :meth:`stop`. A failure, of it or told to it, is for good: every later call raises it."""

    def __init__(self, pipeline: Any, path_of: Callable[[int], Path | None]) -> None:
        self.pipeline: Any = pipeline
        self.waited_secs = 0.0
        self.is_closed = False
        self.told = False
        """The script has met the failure as an exception, or a log line names it."""
        self._path_of = path_of
        self._failed_transfer: FuyouStorageError | None = None

    def wait(self, wait: Callable[[float], bool], what: Callable[[], str]) -> None:
        """Until ``wait(timeout_secs)`` is true; raises what failed meanwhile."""
        if self.is_closed:
            self.check()
        try:
            self.waited_secs += wait_reporting(wait, what)
        except RuntimeError as error:
            self.check()
            raise FuyouStateError(str(error)) from error

    def ask(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """A call of the pipeline that a failed one refuses: the script then sees what failed, not the refusal."""
        try:
            return call(*arguments, **named)
        except RuntimeError:
            self.check()
            raise

    def check(self) -> None:
        """Raises what a worker met, as an exception of the training thread."""
        if self.is_closed:
            raise FuyouStateError("the optimizer is closed: its engine was destroyed")
        if self.pipeline.failed:
            self.told = True
            raise self._failure()

    def fail(self, what: str, error: BaseException) -> None:
        """Something that cannot be undone went wrong outside of the pipeline."""
        number = error.errno if isinstance(error, OSError) else None
        self.pipeline.fail(f"{what} ({str(error) or type(error).__name__})", number or 0)

    def transfer_failed(self, error: FuyouStorageError) -> None:
        """A gradient or P16 could not be moved: no step can be right any more. Called by who waited for it."""
        if not self.is_closed and not self.pipeline.failed:
            self._failed_transfer, self.told = error, True
            self.pipeline.fail(str(error), 0)

    def _failure(self) -> FuyouError:
        if self._failed_transfer is not None:
            return self._failed_transfer
        failure = self.pipeline.failure
        if failure.error:
            return storage_error(failure.what, failure.error, failure.fd, failure.offset, self._path_of)
        return FuyouStateError(failure.what)

    def stop(self) -> None:
        """Joins the pipeline's thread. A failure that nobody was told is logged: there is nobody to raise it to."""
        wait_through(self.pipeline.stop, lambda: "transfers of chunks in flight to end")
        if self.pipeline.failed and not self.told:
            logger.error("closed after a failure: %s", self._failure())
            self.told = True
