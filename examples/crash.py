# SPDX-License-Identifier: Apache-2.0
"""Kills examples/finetune.py again and again, starts it again each time, and compares its losses with those of a run
that nothing happened to: digit for digit. What it needs for that is `"resume": "auto"` in its fuyou block.

python examples/crash.py --deepspeed_config configs/finetune_fuyou.json --kills 10
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LINE = re.compile(r"step +(\d+)  loss (\S+)")
SIZES = ["--layers", "2", "--width", "256", "--heads", "4", "--length", "64"]


def free_port() -> int:
    """The last run's may still be taken. Of those from 32768 on, any may go to whoever only connects to something."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def command(config: Path, steps: int) -> list[str]:
    script = Path(__file__).with_name("finetune.py")
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--master_port", str(free_port()), str(script)]
    return [*launcher, "--deepspeed", "--deepspeed_config", str(config), *SIZES, "--steps", str(steps)]


def run(config: Path, steps: int, when: Callable[[int], float | None]) -> tuple[dict[int, str], list[float], int]:
    """Losses by step as printed, when each came, and the exit status. ``when(number of steps printed so far)``: seconds
    after that the launcher and all it started are killed; None: they go on."""
    process = subprocess.Popen(
        command(config, steps), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    losses: dict[int, str] = {}
    times, said = [], ""
    try:
        for line in process.stdout:
            said += line
            found = LINE.match(line)
            if found:
                losses[int(found[1])] = found[2]
                times.append(time.monotonic())
                secs = when(len(times))
                if secs is not None:
                    time.sleep(secs)
                    os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if status not in (0, -signal.SIGKILL):
        sys.exit(f"{said[-5000:]}\nthe run ended with status {status}")
    return losses, times, status


def prepared(config: Path, folder: Path) -> Path:
    """A copy of the configuration whose state goes to the folder, and that is gone on from."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = json.loads(config.read_text())
    settings["fuyou"] |= {"nvme_path": str(folder), "resume": "auto", "durable": True}
    copy = folder / "config.json"
    copy.write_text(json.dumps(settings))
    return copy


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(".work/crash"), help="for state files; emptied")
    args = parser.parse_args()
    chance, num_steps, begin = random.Random(args.seed), 7 * args.kills, time.monotonic()

    calm, times, _ = run(prepared(args.deepspeed_config, args.folder / "calm"), num_steps, lambda number: None)
    usual = (times[-1] - times[0]) / (len(times) - 1)
    print(f"{num_steps} steps without a kill, {usual:.2f} s each")

    config, num_kills, wrong, seen = prepared(args.deepspeed_config, args.folder / "killed"), 0, [], {}
    while True:
        last = chance.randint(1, 2)
        secs = chance.uniform(0, 2 * usual)
        may = num_kills < args.kills
        began = time.monotonic()
        kill = lambda number, last=last, secs=secs, may=may: secs if may and number == last else None  # noqa: E731
        losses, times, status = run(config, num_steps, kill)
        wrong += [(step, calm[step], loss) for step, loss in losses.items() if loss != calm[step]]
        seen |= losses
        if status == 0 and not may:
            break
        if status == 0:
            print("it ended before the kill came, and begins anew", flush=True)
            continue
        num_kills += 1
        first = f"first step after {times[0] - began:.1f} s"
        print(f"kill {num_kills:2d}: steps {min(losses)} to {max(losses)}, {first}", flush=True)

    print(f"{'step':>6}  {'undisturbed':>12}  {'killed':>12}")
    for step, loss in calm.items():
        print(f"{step:6d}  {loss:>12}  {seen.get(step, 'missing'):>12}{'' if seen.get(step) == loss else '   differs'}")
    is_equal = not wrong and seen.keys() == calm.keys() and num_kills == args.kills
    verdict = "the losses are equal" if is_equal else f"NOT EQUAL: {wrong or 'steps or kills are missing'}"
    print(f"killed {num_kills} times in {num_steps} steps: {verdict} ({time.monotonic() - begin:.0f} s)")
    shutil.rmtree(args.folder)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
