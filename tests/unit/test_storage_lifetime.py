# SPDX-License-Identifier: Apache-2.0
"""However a process ends in order, its files are gone; children and the user's handlers are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_fuyou.storage import lifetime
from tests.harness.limits import HANG_SECS
from tests.unit.storage_support import all_files

MAKE = """
import os, signal, sys, threading, time
from pathlib import Path
from ds_fuyou.storage import ending, lifetime
from ds_fuyou.storage.store import *
path = Path(sys.argv[1])
def make(run_id="run", **options):
    identity = RunIdentity("model", 0, 1, run_id)
    return SlotStore.create([path], [RegionSpec("r", 4096 * 64, 2)], identity, **options)
def committed(run_id="run", **options):
    store = make(run_id, recoverable=True, **options)
    store.commit(1, {"r": 0}, {"optimizer_step": 1})
    return store
def ready():
    print("ready", flush=True)
    time.sleep(3600)
"""
DATA = [
    "ds_fuyou",
    "ds_fuyou/run-rank0",
    *(f"ds_fuyou/run-rank0/{name}" for name in ("data", "lock", "manifest.json")),
]


def run(code: str, path: Path, number: int | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the code; with a signal number, sends that once the code says it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE + code, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first = ""
    if number is not None and process.stdout is not None:
        first = process.stdout.readline()
        process.send_signal(number)
    out, err = process.communicate(timeout=HANG_SECS)
    return subprocess.CompletedProcess([], process.returncode, first + out, err)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("make()", 0),
        ("store = make(); raise ValueError('the script failed')", 1),
        ("store = make(); sys.exit(3)", 3),
        ("make('a'); make('b').close()", 0),
    ],
)
def test_files_are_gone_after_an_end_without_close(tmp_path: Path, code: str, status: int) -> None:
    done = run(code, tmp_path)
    assert done.returncode == status, done.stderr
    assert all_files(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_files_are_gone_after_a_signal(tmp_path: Path, number: int, status: int) -> None:
    done = run("store = make(); ready()", tmp_path, number)
    assert done.returncode == status, done.stderr
    assert all_files(tmp_path) == []


OWNED = """
class Owner:  # as an engine, which is destroyed with its last reference
    def __init__(self):
        self.store = committed()
    def __del__(self):
        self.store.close()
"""
STEP, STEPPED = "ending.goes_on(); raise SystemExit(1)", "the script ended with SystemExit"
CAUGHT = "store = committed()\ntry:\n    sys.exit(0)\nexcept SystemExit:\n    pass\n"
THREAD = "; thread = threading.Thread("
KILL = "os.kill(os.getpid(), signal.SIGUSR1); time.sleep(60)"
HANDLED = "import os, signal, time\nsignal.signal(signal.SIGUSR1, {})\n"
METHOD = """
class Stopper:
    def stop(self, number, frame, status=0):
        self.finish(status)
    def finish(self, status):
        sys.exit(status)
"""
UNCLEAN = [
    (f"{HANDLED.format('lambda *_: sys.exit(0)')}def main():\n    committed(); {KILL}\nmain()", 0, "a signal ended"),
    (f"{METHOD}{HANDLED.format('Stopper().stop')}committed(); {KILL}", 0, "a signal ended the script"),
    ("store = committed(); raise ValueError('the script failed')", 1, "the script ended with ValueError"),
    ("store = committed(); sys.exit(3)", 3, "the script ended with status 3"),
    ("store = committed(); sys.exit('no data')", 1, "the script ended with status 'no data'"),
    ("store = committed(); raise SystemExit(1)", 1, "the script ended with SystemExit"),
    ("store = committed(); store.keep_because('the run failed')", 0, "the run failed"),
    ("store = committed(); store.keep_because('the run failed'); store.close()", 0, "the run failed"),
    ("def main():\n    engine = committed()\n    sys.exit(1)\nmain()", 1, "the script ended with status 1"),
    ("thread = threading.Thread(target=committed); thread.start(); thread.join(); raise KeyError(1)", 1, "KeyError"),
    (f"committed(){THREAD}target=lambda: {{}}[1]); thread.start(); thread.join()", 0, "the script ended with KeyError"),
    (f"committed(){THREAD}target=sys.exit, args=(2,)); thread.start(); thread.join()", 0, "ended with SystemExit"),
    (f"committed(){THREAD}target=sys.exit); thread.start(); thread.join(); raise SystemExit(3)", 3, "with SystemExit"),
    (f"{OWNED}def main():\n    owner = Owner()\n    sys.exit(1)\nmain()", 1, "the script ended with status 1"),
    (f"{OWNED}def main():\n    owner = Owner()\n    raise OSError\nmain()", 1, "the script ended with OSError"),
    ("store = committed(); exit(3)", 3, "the script ended with status 3"),
    ("def main():\n    committed()\n    return 3\nsys.exit(main())", 3, "the script ended with status 3"),
    (f"{CAUGHT}raise SystemExit(1)", 1, "the script ended with SystemExit"),
    (f"{CAUGHT.replace('    pass', '    ending.goes_on()')}raise SystemExit(1)", 1, "the script ended with SystemExit"),
    (
        f"def main():\n    try:\n        committed(); sys.exit(0)\n    except SystemExit:\n        {STEP}\nmain()",
        1,
        STEPPED,
    ),
    ("store = committed(); sys.exit(0.0)", 1, "the script ended with status 0.0"),
    ("import atexit; atexit.register(dict().__getitem__, 'lost'); committed()", 0, "the script ended with KeyError"),
    ("committed(); import code; code.interact(); raise SystemExit(2)", 2, "the script ended with SystemExit"),
]


@pytest.mark.parametrize(("code", "status", "why"), UNCLEAN)
def test_committed_state_stays_after_an_end_that_is_not_clean(tmp_path: Path, code: str, status: int, why: str) -> None:
    done = run(code, tmp_path)
    assert done.returncode == status, done.stderr
    assert all_files(tmp_path) == sorted([*DATA, *(f"ds_fuyou/run-rank0/commit.json{end}" for end in ("", ".tmp"))])
    (line,) = [line for line in done.stderr.splitlines() if "fuyou recover" in line]
    assert why in line
    assert f"fuyou recover {tmp_path}/ds_fuyou/run-rank0 --checkpoint DIR" in line
    assert f"fuyou clean {tmp_path}" in line
    assert done.stderr.rstrip().splitlines()[-1] == line, "the last line says how to go on"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_committed_state_stays_after_a_signal(tmp_path: Path, number: int, status: int) -> None:
    """The launcher sends SIGTERM to all ranks when one has died: theirs is needed beside what that one left."""
    done = run("committed(); ready()", tmp_path, number)
    assert done.returncode == status, done.stderr
    assert "ds_fuyou/run-rank0/commit.json" in all_files(tmp_path)
    assert "fuyou recover" in done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "committed()",
        f"def stop(*_):\n    sys.exit(0)\n{HANDLED.format('stop')}committed(); stop(10, None)",
        f"{METHOD}Stopper().stop(0, None, committed() and 0)",
        "committed(); sys.exit()",
        "committed(); sys.exit(0)",
        "try:\n    committed(); sys.exit(1)\nexcept SystemExit:\n    pass",
        "try:\n    committed(); raise ValueError('mended')\nexcept ValueError:\n    pass",
        "store = committed(); store.close(); raise ValueError('later')",
        f"{OWNED}def main():\n    owner = Owner()\nmain()",
        f"{OWNED}def main():\n    owner = Owner()\n    sys.exit(0)\nmain()",
        f"committed(){THREAD}target=lambda: {{}}[1], daemon=True); thread.start(); thread.join()",
        "hook = threading.excepthook; committed().close(); assert threading.excepthook is hook",
        "store = committed()\ntry:\n    raise ValueError\nfinally:\n    store.close()",
        "committed(); exit()",
        "def main():\n    committed()\nsys.exit(main())",
        "def main():\n    committed()\n    return 0\nexit(main())",
        f"{CAUGHT}sys.exit(0)",
        "committed(); import code; code.interact()",
        "committed(); quit(0)",
    ],
)
def test_committed_state_goes_after_a_clean_end_or_an_explicit_close(tmp_path: Path, code: str) -> None:
    done = run(code, tmp_path)
    assert all_files(tmp_path) == [], done.stderr
    assert "fuyou recover" not in done.stderr
    assert done.returncode == (1 if "raise ValueError" in code and "except" not in code else 0)


NOTEBOOK = """
import code, sys
console = code.InteractiveConsole()
for cell in sys.argv[2].split("\\n\\n"):
    console.runsource(cell, symbol="exec")
"""


def at_prompt(statements: str, path: Path, *, shell: str) -> subprocess.CompletedProcess[str]:
    """Runs statements one by one, as a user types them: ``shell`` is Python's own prompt, or a program that has one."""
    start = MAKE.replace("sys.argv[1]", repr(str(path)))
    if shell == "prompt":
        typed = [f"exec({start!r})", *statements.split("\n\n"), ""]
        command, text = [sys.executable, "-i", "-q"], "\n".join(typed)
    else:
        program = "import sys\nsys.ps1 = 'In: '\n" + NOTEBOOK
        command, text = [sys.executable, "-c", program, str(path), f"{start}\n\n{statements}"], ""
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=HANG_SECS, check=False)


@pytest.mark.parametrize("shell", ["prompt", "program"])
@pytest.mark.parametrize(
    ("statements", "why"),
    [
        ("store = committed()\n\nraise OSError('a later cell')", "the script ended with OSError"),
        (
            "store = committed()\n\nraise OSError('a later cell')\n\nprint('looked at it')",
            "the script ended with OSError",
        ),
        ("store = committed()\n\nraise KeyboardInterrupt", "the script ended with KeyboardInterrupt"),
        ("store = committed(); raise OSError('the same cell')", "the script ended with OSError"),
        ("store = committed()\n\nsys.exit(3)", "the script ended with status 3"),
        ("store = committed()\n\nexit(3)", "the script ended with status 3"),
    ],
)
def test_committed_state_stays_where_a_statement_failed(tmp_path: Path, shell: str, statements: str, why: str) -> None:
    """The frame that has built the engine returned long before, at a prompt and in a notebook."""
    done = at_prompt(statements, tmp_path, shell=shell)
    assert "ds_fuyou/run-rank0/commit.json" in all_files(tmp_path), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "fuyou recover" in line]
    assert why in line


@pytest.mark.parametrize("shell", ["prompt", "program"])
@pytest.mark.parametrize(
    "statements",
    [
        "store = committed()",
        "store = committed()\n\nexit()",
        "store = committed()\n\nsys.exit(0)",
        "1 / 0\n\nstore = committed()",
        "store = committed()\n\n1 / 0\n\nstore.close()",
    ],
)
def test_committed_state_goes_after_a_clean_end_of_statements(tmp_path: Path, shell: str, statements: str) -> None:
    done = at_prompt(statements, tmp_path, shell=shell)
    assert all_files(tmp_path) == [], done.stderr
    assert "fuyou recover" not in done.stderr


RUNNERS = [[], ["-m", "cProfile", "-o", os.devnull], ["-m", "pdb", "-c", "continue"], ["-m", "trace", "--trackcalls"]]


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: " ".join(runner[:2]) or "none")
@pytest.mark.parametrize(
    ("end", "stays"), [("", False), ("sys.exit(0)", False), ("sys.exit(1)", True), ("raise ValueError('lost')", True)]
)
def test_whoever_runs_a_script_it_ends_as_it_does(runner: list[str], end: str, stays: bool, tmp_path: Path) -> None:
    """A debugger catches what ends it, and returns; so does a profiler."""
    script = tmp_path / "script.py"
    script.write_text(f"{MAKE}committed()\n{end}\n")
    command = [sys.executable, *runner, str(script), str(tmp_path)]
    done = subprocess.run(
        command, input="q\n", capture_output=True, text=True, timeout=HANG_SECS, check=False, cwd=tmp_path
    )
    assert ("ds_fuyou/run-rank0/commit.json" in all_files(tmp_path)) == stays, done.stderr
    assert ("fuyou recover" in done.stderr) == stays


def test_an_exit_that_c_calls_is_pythons_own(tmp_path: Path) -> None:
    done = run("import atexit; atexit.register(sys.exit, 3)", tmp_path)
    assert "SystemExit: 3" in done.stderr
    assert "not deep enough" not in done.stderr


def test_ctrl_c_in_a_process_of_a_script_is_no_clean_end(tmp_path: Path) -> None:
    """Of torch's launcher, which catches it to end the process."""
    code = """
import multiprocessing
def train():
    try:
        committed()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        pass
process = multiprocessing.get_context("fork").Process(target=train)
process.start(); process.join()
sys.exit(process.exitcode)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ds_fuyou/run-rank0/commit.json" in all_files(tmp_path)
    assert "the script ended with KeyboardInterrupt" in done.stderr


def test_a_thread_that_failed_says_nothing_of_later_stores(tmp_path: Path) -> None:
    failing = f"store = committed(){THREAD}target=lambda: {{}}[1]); thread.start(); thread.join(); store.close()"
    done = run(f"{failing}; committed('later').close(); committed('last')", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {name.split("/")[1] for name in all_files(tmp_path)[1:]} == {"run-rank0"}


def test_no_state_file_gets_the_number_of_standard_error(tmp_path: Path) -> None:
    """To which C prints, whether it is open or not."""
    done = run("os.close(2); store = make(); print(os.readlink('/proc/self/fd/2'))", tmp_path)
    assert (done.returncode, done.stdout) == (0, "/dev/null\n")


def test_what_nobody_could_recover_goes_whatever_the_end(tmp_path: Path) -> None:
    never, untrained = "make(recoverable=True)", "make(recoverable=True).commit(0, {'r': 0}, {})"
    for code in (never, untrained, "make().commit(1, {'r': 0}, {})"):
        assert run(f"{code}; raise ValueError", tmp_path).returncode == 1
        assert all_files(tmp_path) == []


def test_ranks_name_the_files_of_all_ranks(tmp_path: Path) -> None:
    code = """
store = SlotStore.create([path], [RegionSpec("r", 4096, 2)], RunIdentity("model", 1, 2, "run"), recoverable=True)
store.commit(1, {"r": 0}, {}); sys.exit(1)
"""
    assert f"fuyou recover {tmp_path}/ds_fuyou/run-rank* --checkpoint" in run(code, tmp_path).stderr


def test_kept_files_stay(tmp_path: Path) -> None:
    assert run("make(keep=True); ready()", tmp_path, signal.SIGTERM).returncode == 143
    assert all_files(tmp_path) == DATA


def test_files_stay_after_a_kill(tmp_path: Path) -> None:
    assert run("make(); ready()", tmp_path, signal.SIGKILL).returncode == -signal.SIGKILL
    assert all_files(tmp_path) == DATA


def test_a_handler_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: (print("mine", flush=True), sys.exit(5)))
make(); ready()
"""
    done = run(code, tmp_path, signal.SIGTERM)
    assert (done.returncode, done.stdout) == (5, "ready\nmine\n")
    assert all_files(tmp_path) == []


def test_a_later_handler_of_the_user_wins_and_stays(tmp_path: Path) -> None:
    code = """
store = make()
handler = lambda *_: sys.exit(6)
signal.signal(signal.SIGTERM, handler)
store.close()
assert signal.getsignal(signal.SIGTERM) is handler
make(); ready()
"""
    assert run(code, tmp_path, signal.SIGTERM).returncode == 6
    assert all_files(tmp_path) == []


def test_the_handler_is_gone_with_the_last_store(tmp_path: Path) -> None:
    code = """
a, b = make("a"), make("b")
a.close()
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
b.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_store_made_in_another_thread_is_closed_too(tmp_path: Path) -> None:
    code = "thread = threading.Thread(target=make); thread.start(); thread.join()"
    assert run(code, tmp_path).returncode == 0
    assert all_files(tmp_path) == []


def test_closers_run_last_first_before_the_stores_whatever_fails(tmp_path: Path) -> None:
    code = """
store = make()
def closer(name, fail=None):
    def close():
        print(name, (path / "ds_fuyou" / "run-rank0" / "data").exists(), flush=True)
        if fail: raise fail
    return close
lifetime.register_closer(closer("first"))
lifetime.register_closer(closer("second", ValueError("second failed")))
lifetime.register_closer(closer("third", KeyboardInterrupt()))
forget = lifetime.register_closer(closer("forgotten"))
lifetime.register_closer(closer("behind"), behind_others=True)
forget()
"""
    done = run(code, tmp_path)
    assert done.stdout == "third True\nsecond True\nfirst True\nbehind True\n"
    assert "second failed" in done.stderr
    assert all_files(tmp_path) == []


def test_a_second_signal_does_not_stop_the_end(tmp_path: Path) -> None:
    code = """
make()
def closer():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    print("closed", flush=True)
lifetime.register_closer(closer)
ready()
"""
    done = run(code, tmp_path, signal.SIGTERM)
    assert (done.returncode, done.stdout) == (143, "ready\nclosed\n")
    assert all_files(tmp_path) == []


def test_a_signal_in_the_middle_of_removing_does_not_leave_half(tmp_path: Path) -> None:
    code = """
store, real = make(), os.unlink
def unlink(name, **options):
    real(name, **options)
    if name == "data":
        os.unlink = real
        os.kill(os.getpid(), signal.SIGTERM)
os.unlink = unlink
store.close()
"""
    assert run(code, tmp_path).returncode == 143
    assert all_files(tmp_path) == []


def test_a_signal_in_the_middle_of_creating_leaves_nothing(tmp_path: Path) -> None:
    code = """
from ds_fuyou.storage import data_file
def fallocate(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)
data_file.allocate_blocks = fallocate
make()
"""
    assert run(code, tmp_path).returncode == 143
    assert all_files(tmp_path) == []


@pytest.mark.parametrize(
    "end",
    ["sys.exit(0)", "store.close(); os._exit(0)", "os.kill(os.getpid(), signal.SIGTERM)", "raise ValueError"],
)
def test_a_forked_child_leaves_the_files_of_its_parent_alone(tmp_path: Path, end: str) -> None:
    code = f"""
import warnings
warnings.simplefilter("ignore")
store = make()
fd = store.extents("r", 0)[0].fd
child = os.fork()
if child == 0:
    try:
        store.extents("r", 0)
        os._exit(77)
    except RuntimeError:
        pass
    try:
        os.fstat(fd)
        os._exit(78)
    except OSError:
        pass
    {end}
status = os.waitpid(child, 0)[1]
store.commit(1, {{"r": 0}}, {{}})
print(os.waitstatus_to_exitcode(status), (path / "ds_fuyou" / "run-rank0" / "data").exists())
"""
    done = run(code, tmp_path)
    expected = {"sys": "0", "store": "0", "os": "-15", "raise": "1"}[end.partition(".")[0].split()[0]]
    assert done.stdout == f"{expected} True\n", done.stderr
    assert all_files(tmp_path) == []


def test_a_child_that_outlives_a_killed_parent_does_not_hold_its_lock(tmp_path: Path) -> None:
    from ds_fuyou.storage.cleanup import find_state

    code = """
store = make()
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    os.close(1); os.close(2)
    time.sleep(3600)
    os._exit(0)
time.sleep(3600)
"""
    process = subprocess.Popen([sys.executable, "-c", MAKE + code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=HANG_SECS)
    (state,) = find_state(tmp_path)
    alive = Path(f"/proc/{child}").exists()
    os.kill(child, signal.SIGKILL)
    assert alive
    assert not state.alive


def test_shutdown_in_this_process_closes_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_registry", lifetime._Registry())
    lifetime._registry.hooked = True
    order: list[str] = []

    class Store:
        def close(self) -> None:
            order.append("store")

        def abandon(self) -> None:
            order.append("abandoned")

    closer: Callable[[], None] = lambda: order.append("closer")  # noqa: E731
    lifetime.register_store(Store())
    lifetime.register_closer(closer)
    lifetime.shutdown()
    lifetime.shutdown()
    assert order == ["closer", "store"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
