# SPDX-License-Identifier: Apache-2.0
"""What the wheel carries."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from tests.conftest import RunPython

ROOT = Path(__file__).resolve().parents[2]


def test_wheel_holds_the_sources_the_builder_and_the_entry_points(run_python: RunPython, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("ds_fuyou", "op_builder"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for file in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    if (ROOT / "README.md").exists():
        shutil.copy(ROOT / "README.md", tree)
    pip = [
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(tmp_path),
        str(tree),
    ]
    done = run_python(pip, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "ds_fuyou/op_builder/fuyou_core.py" in names
    assert not [name for name in names if name.startswith(("op_builder/", "tests/"))]
    sources = {
        str(path.relative_to(ROOT)) for path in (ROOT / "ds_fuyou").rglob("*.[ch]*") if path.suffix in (".cpp", ".h")
    }
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ds_fuyou").rglob("*.py")}
    assert sources
    assert sources | modules | {"ds_fuyou/py.typed"} <= names
    assert "ds_fuyou = ds_fuyou.autoload:_autoload" in points
    assert "fuyou = ds_fuyou.cli:main" in points
    assert any(name.endswith("licenses/LICENSE") for name in names)
