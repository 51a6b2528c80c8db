# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import pickle

import pytest

from ds_fuyou import errors


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.FuyouConfigError, ValueError),
        (errors.FuyouStorageError, OSError),
        (errors.FuyouChecksumError, OSError),
        (errors.FuyouStateError, RuntimeError),
        (errors.FuyouBuildError, RuntimeError),
        (errors.FuyouCompatError, RuntimeError),
    ],
)
def test_members_are_builtin_errors_too(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.FuyouError)
    assert kind.__name__ in errors.__all__
    assert kind.__name__ in (errors.__doc__ or "")


def test_storage_error_names_path_offset_and_reason() -> None:
    error = errors.FuyouStorageError(errno.EIO, "chunk 3 could not be read", "/nvme/state", 8192)
    assert (error.errno, error.filename, error.offset) == (errno.EIO, "/nvme/state", 8192)
    assert str(error) == "chunk 3 could not be read (Input/output error) [/nvme/state at byte 8192]"


def test_storage_error_without_a_path() -> None:
    assert str(errors.FuyouStorageError(0, "closed")) == "closed (no error number)"


def test_storage_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.FuyouChecksumError(errno.EIO, "differs", "/nvme/state", 4096)))
    assert isinstance(error, errors.FuyouChecksumError)
    assert (error.errno, error.filename, error.offset) == (errno.EIO, "/nvme/state", 4096)
