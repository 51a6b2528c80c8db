# SPDX-License-Identifier: Apache-2.0
"""The documentation builds as a site without a warning, its links lead somewhere, and its commands are run.

Every command of a page is run here, or by a test that is named, or stands in NOT_RUN with the reason.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fuyou.cli import first_block, main
from ds_fuyou.cli.main import COMMANDS as CLI
from tests.harness.limits import HANG_SECS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
_STARTS = re.compile(
    r"(?:fuyou|make|deepspeed|accelerate|python|pip|bash|sh|axolotl|llamafactory-cli|source|export|mkdir|[A-Z_]+=\S+) "
)


def commands(page: Path) -> list[str]:
    """Lines of code that are commands, continued ones joined."""
    found, in_block = [], False
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            in_block = not in_block
        elif (in_block or line.startswith("    ")) and _STARTS.match(line.strip() + " "):
            found.append(re.sub(r" +", " ", line.partition(" #")[0]).strip())
        elif not in_block:
            found += [text for text in re.findall(r"`([^`]+)`", line) if _STARTS.match(text)]
    return found


# Names in running text, no commands.
_NAMES = re.compile(
    r"fuyou [\w-]+|fuyou plan --(?:out|trace)|accelerate launch(?: --config_file)?|llamafactory-cli train|axolotl train"
    r"|mkdir -p"
)
MENTIONED = {command: page.name for page in PAGES if page.stem != "index" for command in commands(page)}
COMMANDS = {command: page for command, page in MENTIONED.items() if not _NAMES.fullmatch(command)}

HERE = re.compile(r"fuyou (?:plan|simulate|max-model|report|init) ")
# What they begin with: the file with the test that runs them, with small sizes.
ELSEWHERE = {
    "fuyou doctor ": "tests/unit/test_doctor_config.py",
    "fuyou clean": "tests/unit/test_shared_memory.py",
    "fuyou recover": "tests/unit/test_recovery.py",
    "fuyou verify": "tests/verify/test_verify.py",
    "deepspeed --module ds_fuyou": "tests/unit/test_autoload.py",
    "deepspeed examples/": "tests/examples/test_examples.py",
    "accelerate launch --use_deepspeed": "tests/examples/test_examples.py",
    "accelerate launch --config_file": "tests/huggingface/test_presets.py",
}
# What they begin with: why not.
NOT_RUN = {
    "deepspeed train.py": "stands for a script of the reader's",
    "deepspeed --num_": "not complete; examples/two_ranks.sh is run with two ranks",
    "accelerate launch --num_processes": "not complete; the Accelerate tests have runs on one and two ranks",
    "accelerate config": "asks questions",
    "FORCE_TORCHRUN=1 llamafactory-cli train": "make test-clients runs the program, test_presets.py its arguments",
    "axolotl ": "the program is in no environment of ours; test_presets.py checks what its file names",
    "sh configs/ms_swift_fuyou.sh": "make test-clients runs the program, test_presets.py its arguments",
    "NPROC_PER_NODE=2 sh configs/ms_swift_fuyou.sh": "the same",
    "make ": "a job of the Makefile: hours, or the one that runs this",
    "pip install": "changes the environment that the tests run in",
    "python -m benchmarks": "minutes to hours: make bench",
    "python benchmarks": "minutes to hours: make bench",
    "python -m tests.clients.table": "writes the page; tests/clients/test_sample.py has what it writes",
    "python -m zipfile": "CPython's",
    "mkdir -p": "the shell's",
    "source ": "the shell's",
    "export ": "the shell's",
    "python -m deepspeed.checkpoint": "DeepSpeed's; the checkpoint tests call what it calls",
    "python zero_to_fp32.py": "the same",
}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the pages speak of, the working one."""
    from ds_fuyou.simulator.points import REQUIRED

    model = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    model |= {"vocab_size": 256, "intermediate_size": 128}
    point = dict.fromkeys(REQUIRED, "1") | {"system": "ds_fuyou", "gpu": "rtx4090", "dram_gb": "128", "model": "13B"}
    files = {
        "path/to/config.json": json.dumps(model),
        "in.csv": f"{','.join(REQUIRED)}\n{','.join(point[name] for name in REQUIRED)}\n",
    }
    for name in ("ds.json", "deepspeed_configs/zero3_bf16.json", "examples/deepspeed/ds_z3_config.json"):
        files[name] = json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_block, "find_disks", list)
    planned = ["plan", "--model", "13B", "--batch", "8", "--trace", "trace.json", "--out", "plan.json"]
    assert main(planned) == 0
    return tmp_path


@pytest.mark.parametrize("command", [text for text in COMMANDS if HERE.match(text)])
def test_commands_of_the_planner_and_of_init(command: str, reader: Path) -> None:
    words = shlex.split(command)
    assert main([*words[1:], *(["--no-png"] if words[1] == "report" else [])]) == 0


def test_every_command_is_run_or_said_why_not() -> None:
    known = (*ELSEWHERE, *NOT_RUN)
    lost = [f"{page}: {text}" for text, page in COMMANDS.items() if not HERE.match(text) and not text.startswith(known)]
    assert lost == []
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).is_file()] == []
    assert [start for start in known if not any(text.startswith(start) for text in COMMANDS)] == []
    named = {text.split()[1] for text in MENTIONED if text.startswith("fuyou ")}
    assert named - set(CLI) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_their_places_are_there(page: Path) -> None:
    """Also without the packages that build the site."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, place = target.partition("#")
        if file.startswith(("http:", "https:")):
            continue
        path = (page.parent / file) if file else page
        assert path.exists(), target
        if place:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert place in slugs, target


def test_every_page_is_listed() -> None:
    listed = (ROOT / "docs/index.md").read_text(encoding="utf-8").splitlines()
    assert [page.stem for page in PAGES if page.stem not in (*listed, "index", "README")] == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("myst_parser", reason="the extra docs is not installed")
    pytest.importorskip("furo", reason="the extra docs is not installed")
    options = ["-q", "--fail-on-warning", "--keep-going", "-d", str(tmp_path / "trees"), "-c", str(ROOT / "docs")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECS, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/docs/quickstart.html").is_file()
    assert (tmp_path / "site/searchindex.js").is_file()
