# SPDX-License-Identifier: Apache-2.0
"""``fuyou verify``: equal, different, not comparable, and what a user can do wrong."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_fuyou.cli import verify
from ds_fuyou.cli.main import main
from ds_fuyou.cli.verify import compare, explanation, nearness
from ds_fuyou.zero.verification import STORAGE
from tests.harness.ports import free_port
from tests.harness.runner import HERE, ds_config, environment

SCRIPT = str(HERE / "verify_script.py")
RECORD = {
    "losses": [1.5, 1.25],
    "norms": [0.5, 0.25],
    "applied": [True, True],
    "parameters": {"a": {"parameter": "1", "fp32 value": "2", "exp_avg": "4"}, "b": {"parameter": "3"}},
    "world_size": 1,
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    block = {"nvme_path": str(tmp_path), "plan": {"chunk_bytes": 65536}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ds_config(fuyou=block, gradient_clipping=0.1)))
    return str(file)


def test_a_script_that_trains_the_same_states_on_two_ranks(config: str, capfd, monkeypatch) -> None:
    """The user's launcher starts the ranks: each of them is compared with its own."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    launcher += ["--no_local_rank", "--master_port", str(free_port())]
    assert main(["verify", "--steps", "2", "--", *launcher, SCRIPT, config]) == 0
    said = capfd.readouterr().out
    assert "equal on 2 ranks: 2 losses, 2 gradient norms and 4 parameters" in said
    assert "(parameter, fp32 value, exp_avg, exp_avg_sq)" in said


@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Adam", marks=pytest.mark.thorough)])
def test_a_script_with_an_optimizer_of_its_own_is_compared(
    kind: str, config: str, capfd: pytest.CaptureFixture
) -> None:
    """As every script of the Trainer is whose JSON names none; its schedule changes the rates of both."""
    file = Path(config)
    written = json.loads(file.read_text())
    del written["optimizer"]
    file.write_text(json.dumps(written))
    assert main(["verify", "--steps", "3", "--", sys.executable, SCRIPT, config, "--own", kind]) == 0
    assert "equal: 3 losses, 3 gradient norms and 4 parameters" in capfd.readouterr().out


def test_states_that_stock_rounds_are_equal(config: str, capfd: pytest.CaptureFixture) -> None:
    file = Path(config)
    written = json.loads(file.read_text())
    written["bf16"].update(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    file.write_text(json.dumps(written))
    assert main(["verify", "--steps", "3", "--", sys.executable, SCRIPT, config]) == 0
    assert "equal: 3 losses, 3 gradient norms" in capfd.readouterr().out


@pytest.mark.thorough
def test_a_run_whose_moments_are_rounded_is_near(config: str, capfd: pytest.CaptureFixture) -> None:
    file = Path(config)
    written = json.loads(file.read_text())
    written["fuyou"]["optimizer"] = {"moments": "int8"}
    file.write_text(json.dumps(written))
    assert main(["verify", "--steps", "3", "--", sys.executable, SCRIPT, config]) == 0
    said = capfd.readouterr().out
    assert 'near, not equal, as "moments": "int8" is' in said
    assert "exp_avg_sq by 0 %" not in said
    assert float(said.split("fp32 value by ")[1].split()[0]) < 1.0


@pytest.mark.thorough
def test_steps_of_a_killed_run_stay_and_none_are_left(config: str, tmp_path: Path, capfd) -> None:
    """The block says that runs go on from what killed ones left, and keep what they leave: a recorded run does not."""
    file = Path(config)
    written = json.loads(file.read_text())
    (tmp_path / "swap").mkdir()
    written["fuyou"].update(nvme_path=str(tmp_path / "swap"), durable=True, resume="auto", keep_state=True)
    file.write_text(json.dumps(written))
    command = [sys.executable, SCRIPT, config]
    killed = subprocess.run([*command, "--killed"], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    before = files_in(tmp_path / "swap")
    assert before
    assert main(["verify", "--steps", "2", "--", *command]) == 0
    assert "equal: 2 losses" in capfd.readouterr().out
    assert main(["verify", "--steps", "2", "--", *command, "--failing-late"]) == 2
    assert files_in(tmp_path / "swap") == before


def test_the_folder_of_another_command_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has begun, and has no state there yet."""
    monkeypatch.setattr(verify, "_PATIENCE_SECS", 0.2)
    own, run = tmp_path / "own", tmp_path / "run"
    own.mkdir()
    run.mkdir()
    (run / f"{STORAGE}.0").write_text(f"{json.dumps(str(own))}\n")
    used = os.open(own, os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_SH)
    verify._remove_storage(run)
    assert own.exists()
    os.close(used)
    verify._remove_storage(run)
    assert not own.exists()


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_ends_its_script(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(99)"
    )
    said, own = tmp_path / "pid", tmp_path / "own"
    own.mkdir()
    fuyou = str(Path(sys.executable).with_name("fuyou"))
    command = [fuyou, "verify", "--", sys.executable, str(script), str(said)]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(own)})
    try:
        wait_until(lambda: said.exists() and said.read_text())
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
    wait_until(lambda: not Path("/proc", said.read_text()).exists())
    assert list(own.glob("fuyou-verify-*")) == []


def test_a_script_without_seeds_is_not_comparable(config: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["verify", "--steps", "1", "--", sys.executable, SCRIPT, config, "--unseeded"]) == 1
    assert "not comparable" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a script"),
        (["missing.py"], "must be an existing script"),
        (["--steps", "0", "--", sys.executable, SCRIPT], "--steps must be at least 1"),
        (["--timeout", "nan", "--", sys.executable, SCRIPT], "--timeout must be a number of seconds, found nan"),
        (["--timeout", "0", "--", sys.executable, SCRIPT], "--timeout must be a number of seconds, found 0"),
        (["no-such-program", "x"], "must be a program on the PATH"),
        ([sys.executable, "-c", "pass"], "never made its last step"),
        (["--timeout", "0.2", "--", sys.executable, "-c", "import time; time.sleep(30)"], "longer than --timeout"),
    ],
)
def test_mistakes_are_said_in_one_message(arguments: list[str], message: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capfd.readouterr().err


LAUNCHER = """
import os, pathlib, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(rank.pid))
signal.signal(signal.SIGTERM, lambda *_: (os.kill(rank.pid, 9), os.waitpid(rank.pid, 0), os._exit(1)))
rank.wait()
"""


def test_a_launcher_ends_its_ranks(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """torchrun's have sessions of their own: nobody else knows them."""
    known = tmp_path / "rank"
    assert main(["verify", "--timeout", "5", "--", sys.executable, "-c", LAUNCHER, str(known)]) == 2
    assert "longer than --timeout" in capfd.readouterr().err
    assert not Path(f"/proc/{known.read_text()}").exists()


def test_a_launcher_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(verify, "_GRACE_SECS", 0.2)
    deaf = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    assert main(["verify", "--timeout", "5", "--", sys.executable, "-c", deaf]) == 2
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_a_failing_script_shows_its_own_error(config: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["verify", "--", sys.executable, SCRIPT, config, "--failing"]) == 2
    assert "the script's own mistake" in capfd.readouterr().err


def _changed(**changes: object) -> list[dict]:
    return [{**copy.deepcopy(RECORD), **changes}]


def _altered(name: str, kind: str) -> list[dict]:
    changed = _changed()
    changed[0]["parameters"][name][kind] = "x"
    return changed


@pytest.mark.parametrize(
    ("ours", "line"),
    [
        (_changed(losses=[1.5, 1.0]), "rank 0: losses[1] is 1.25 against 1.0"),
        (_changed(norms=[0.5]), "rank 0: 2 norms against 1"),
        (_changed(applied=[True, False]), "rank 0: applied[1] is True against False"),
        (_altered("b", "parameter"), "rank 0: parameter of 1 of 2 differs: b"),
        (_altered("a", "fp32 value"), "rank 0: fp32 value of 1 of 1 differs: a"),
        (_altered("a", "exp_avg"), "rank 0: exp_avg of 1 of 1 differs: a"),
        (_changed(parameters={"a": RECORD["parameters"]["a"]}), "rank 0: other names of parameters"),
        ([RECORD, RECORD], "1 ranks against 2"),
    ],
)
def test_every_difference_is_named(ours: list[dict], line: str) -> None:
    assert line in compare([RECORD], ours)


def _sampled(**changes: object) -> list[dict]:
    return _changed(samples={"parameter": [3.0, 4.0], "exp_avg": [0.0, 0.0]}, **changes)


def test_how_far_rounded_moments_lead_is_told() -> None:
    ours = _sampled(moments="bf16", losses=[1.5, 1.25 * 1.01])
    ours[0]["samples"]["parameter"][1] = 4.05
    is_near, said = nearness(_sampled(), ours) or (None, "")
    assert is_near
    assert "losses by 0.64 %, norms by 0 %, parameter by 1 %, exp_avg by 0 %" in said
    started_apart, two_ranks = _sampled(moments="bf16", losses=[1.4, 1.25]), _sampled(moments="bf16") * 2
    for other in (_sampled(losses=[1.5, 1.0]), started_apart, two_ranks):
        assert nearness(_sampled(), other) is None


@pytest.mark.parametrize("value", [4.5, float("nan"), float("inf")])
def test_what_rounded_moments_do_not_explain_is_different(value: float) -> None:
    ours = _sampled(moments="int8")
    ours[0]["samples"]["parameter"][1] = value
    is_near, said = nearness(_sampled(), ours) or (None, "")
    assert is_near is False
    assert "DIFFERENT, by more than" in said
    later = _sampled(moments="int8", losses=[1.5, 9.0], norms=[0.5], applied=[True])
    stock = _sampled(norms=[0.5], applied=[True])
    assert nearness(stock, later) is None  # two micro-batches of one step


def test_equal_runs_have_no_differences() -> None:
    nan = _changed(norms=[0.5, float("nan")])
    assert compare(nan, json.loads(json.dumps(nan))) == []


@pytest.mark.parametrize(
    ("reduce_by", "num_ranks", "told"), [("block", 3, True), ("block", 2, False), ("bucket", 3, False)]
)
def test_a_key_that_changes_last_bits_is_named(reduce_by: str, num_ranks: int, told: bool) -> None:
    ours = [{**RECORD, "reduce_by": reduce_by}] * num_ranks
    assert ('"reduce_by": "block"' in explanation(ours)) == told
