# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ds_fuyou import autoload, plugin
from tests.conftest import RunPython


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that stands for DeepSpeed's engine and returns its name; no hook is armed."""
    package = tmp_path / "fake_speed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "later.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(autoload, "ENGINE_MODULE", "fake_speed.engine")
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, autoload._ImportFinder)])
    monkeypatch.delenv(autoload.DISABLE_VARIABLE, raising=False)

    def write(body: str) -> str:
        (package / "engine.py").write_text(body)
        return "fake_speed.engine"

    yield write
    for name in [name for name in sys.modules if name.startswith("fake_speed")]:
        del sys.modules[name]


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each call of plugin.install: whether the engine's body had run to its end."""
    calls: list[bool] = []

    def install() -> None:
        calls.append(hasattr(sys.modules["fake_speed.engine"], "DONE"))

    monkeypatch.setattr(plugin, "install", install)
    return calls


def armed() -> bool:
    return autoload.is_awaited(autoload.ENGINE_MODULE)


def test_hook_fires_after_the_engine_was_imported(engine: Callable[[str], str], installs: list[bool]) -> None:
    name = engine("DONE = True")
    autoload._autoload()
    autoload._autoload()
    assert armed()
    assert installs == []
    module = importlib.import_module(name)
    assert installs == [True]
    assert not armed()
    assert module.__spec__ is not None
    assert "exec_module" not in vars(module.__spec__.loader)


def test_engine_imported_before(engine: Callable[[str], str], installs: list[bool]) -> None:
    importlib.import_module(engine("DONE = True"))
    autoload._autoload()
    assert installs == [True]
    assert not armed()


def test_engine_being_imported_right_now(engine: Callable[[str], str], installs: list[bool]) -> None:
    importlib.import_module(engine("from ds_fuyou import autoload\nautoload._autoload()\nDONE = True"))
    assert installs == []
    importlib.import_module("fake_speed.later")
    assert installs == [True]
    assert not armed()


def test_a_loader_that_cannot_carry_the_callback(
    engine: Callable[[str], str], installs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlottedLoader:
        __slots__ = ()

        def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
            return None

        def exec_module(self, module: ModuleType) -> None:
            module.DONE = True  # type: ignore[attr-defined]

    class Finder:
        def find_spec(
            self, fullname: str, path: object = None, target: object = None
        ) -> importlib.machinery.ModuleSpec | None:
            if fullname != "fake_speed.engine":
                return None
            return importlib.machinery.ModuleSpec(fullname, SlottedLoader())

    name = engine("")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    autoload._autoload()
    importlib.import_module(name)
    importlib.import_module("fake_speed.later")
    assert installs == [True]


def test_an_engine_that_fails_to_import_stays_hooked(engine: Callable[[str], str], installs: list[bool]) -> None:
    name = engine("raise ImportError('half installed')")
    autoload._autoload()
    with pytest.raises(ImportError, match="half installed"):
        importlib.import_module(name)
    assert installs == []
    assert armed()


def test_switched_off(engine: Callable[[str], str], installs: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_FUYOU_DISABLE", "1")
    autoload._autoload()
    importlib.import_module(engine("DONE = True"))
    assert installs == []
    assert not armed()


def test_a_failing_install_is_told_and_never_raised(
    engine: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    def install() -> None:
        raise AttributeError("DeepSpeedConfig is gone")

    monkeypatch.setattr(plugin, "install", install)
    autoload._autoload()
    importlib.import_module(engine("DONE = True"))
    assert 'a "fuyou" block in the DeepSpeed JSON would be ignored' in told()
    assert "DeepSpeedConfig is gone" in told()


def test_entry_point_is_declared() -> None:
    points = [point for point in importlib.metadata.entry_points(group="torch.backends") if point.name == "ds_fuyou"]
    assert {point.value for point in points} == {"ds_fuyou.autoload:_autoload"}
    assert points[0].load() is autoload._autoload


def test_activation_imports_the_standard_library_only(run_python: RunPython) -> None:
    code = """
import sys
before = set(sys.modules)
import ds_fuyou.autoload
ds_fuyou.autoload._autoload()
new = set(sys.modules) - before
own = {name for name in new if name.split('.')[0] == 'ds_fuyou'}
assert own == {'ds_fuyou', 'ds_fuyou.autoload', 'ds_fuyou.version'}, own
other = {name for name in new - own if name.split('.')[0].lstrip('_') not in
         {text.lstrip('_') for text in sys.stdlib_module_names} and not name.startswith('__editable__')}
assert not other, other
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.compat
@pytest.mark.parametrize(
    "imports",
    [
        "import torch, deepspeed",
        "import deepspeed",
        "import deepspeed.runtime.engine",
        "from deepspeed.runtime.config import DeepSpeedConfig",
        "import deepspeed, ds_fuyou",
        "import ds_fuyou, deepspeed",
    ],
)
def test_live_whatever_is_imported_first(run_python: RunPython, imports: str) -> None:
    done = run_python(f"{imports}\nfrom ds_fuyou import plugin\nassert plugin.is_installed()")
    assert done.returncode == 0, done.stderr


@pytest.mark.compat
def test_without_torch_plugins_the_package_must_be_imported(run_python: RunPython) -> None:
    code = "import deepspeed\n{}\nfrom ds_fuyou import plugin\nassert plugin.is_installed()"
    done = run_python(code.format("import ds_fuyou"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


def test_disabled_by_the_environment(run_python: RunPython) -> None:
    code = """
import torch, deepspeed, ds_fuyou, sys
assert 'ds_fuyou.plugin' not in sys.modules
"""
    done = run_python(code, DS_FUYOU_DISABLE="1")
    assert done.returncode == 0, done.stderr
