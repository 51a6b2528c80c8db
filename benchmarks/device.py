# SPDX-License-Identifier: Apache-2.0
"""Steps on the stand-in device in timed mode (``make bench-device``): the device computes by a clock and takes no core.

Storage, CPU Adam, Python and the threads of the package are real; the device's FLOPs, the bytes of its memory and the
link take the time that a scaled GPU would take (tests/device/README.md). Rates are chosen so that one lane decides.

python -m benchmarks.device --case compute_bound --rounds 3      a quick look, nothing written
python -m benchmarks.device                                      everything, written to benchmarks/results/
python -m benchmarks.device --case compute_bound --write         one case, into the file of the day
python -m benchmarks.device --scale 0.1 --rounds 1 --write       on a device ten times slower: what memory it takes
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import StockTuning, config_of
from benchmarks.floor import BYTES_A_PARAMETER
from benchmarks.processes import ForeignLoad, started
from benchmarks.rates import Rates, measure_rates
from ds_fuyou.ops.core import load_core
from tests.device.backend import preset
from tests.device.build import build

__all__ = ["CASES", "DeviceCase", "floor_secs", "main", "markdown", "measure"]

GPU = "rtx4090"
MODEL = {"num_layers": 12, "width": 768, "num_heads": 12, "length": 512, "vocabulary": 8192}  # 98 million parameters
WIDE = {"num_layers": 2, "width": 4096, "num_heads": 32, "length": 2048, "vocabulary": 2048}  # 419 million
# A model of 98 million parameters would stay on the device from pass to pass: what a model that does not fit would do.
STREAMED = {
    "stage3_max_live_parameters": 30_000_000,
    "stage3_max_reuse_distance": 30_000_000,
    "stage3_prefetch_bucket_size": 10_000_000,
}
STATE_BYTES = BYTES_A_PARAMETER | dict.fromkeys(("fuyou_swap", "fuyou_auto"), BYTES_A_PARAMETER["fuyou_optimizer_nvme"])
MOST_IDLE = 0.02
MOST_OVER_FLOOR = 1.10
MOST_OVER_PLAN = 1.05  # host memory


@dataclass(frozen=True)
class DeviceCase:
    """``speed`` scales the GPU's FLOPs and memory, ``up`` and ``down`` are bytes/s of the link.

    ``bars``: by "ours/theirs" what the quotient of step times must not exceed.
    """

    name: str
    batch: int
    speed: float
    up: float
    down: float
    variants: tuple[str, ...]
    bars: Mapping[str, float] = field(default_factory=dict)
    model: Mapping[str, int] = field(default_factory=lambda: MODEL)
    accumulation: int = 1  # sums are made by the host, of zeros
    num_timed: int = 3
    tuning: StockTuning = field(default_factory=StockTuning)

    def scaled(self, scale: float) -> DeviceCase:
        """Ours alone, on a device that is so many times as fast: bars of times are of the device as it was."""
        ours = tuple(variant for variant in self.variants if variant.startswith("fuyou_") and variant != "fuyou_off")
        return replace(self, name=f"{self.name}_x{scale:g}", speed=self.speed * scale, variants=ours, bars={})

    def only(self, names: Collection[str]) -> DeviceCase:
        """These variants, and the bars of pairs of them."""
        variants = tuple(each for each in self.variants if each in names)
        bars = {pair: bar for pair, bar in self.bars.items() if {*pair.split("/")} <= {*variants}}
        return replace(self, variants=variants, bars=bars)

    def place(self) -> dict[str, Any]:
        """Where it is computed, as benchmarks/worker.py is told."""
        return {"device": self.settings()}

    def settings(self) -> dict[str, float]:
        zeros = {"zeros": 1} if self.accumulation > 1 else {}
        return preset(GPU, speed=self.speed) | {"up_rate": self.up, "down_rate": self.down} | zeros


CASES = (
    DeviceCase(
        "compute_bound",
        64,
        0.08,
        21e9,
        21e9,
        ("zero_infinity", "fuyou_optimizer_nvme", "fuyou_off"),
        {"fuyou_optimizer_nvme/fuyou_off": 1.03, "fuyou_optimizer_nvme/zero_infinity": 0.60},
    ),
    DeviceCase(
        "balanced",
        16,
        0.05,
        4e9,
        4e9,
        ("zero_infinity", "fuyou_optimizer_nvme", "fuyou_all_nvme"),
        {"fuyou_optimizer_nvme/zero_infinity": 0.45},
    ),
    DeviceCase(
        "storage_bound",
        2,
        0.1,
        4e9,
        4e9,
        ("zero_infinity", "fuyou_optimizer_nvme_whole", "fuyou_optimizer_nvme", "fuyou_optimizer_nvme_int8"),
        {
            "fuyou_optimizer_nvme/fuyou_optimizer_nvme_whole": 0.88,
            "fuyou_optimizer_nvme_int8/fuyou_optimizer_nvme_whole": 0.45,
            "fuyou_optimizer_nvme/zero_infinity": 0.40,
            "fuyou_optimizer_nvme_int8/zero_infinity": 0.22,
        },
    ),
    DeviceCase(
        "storage_bound_all",
        2,
        0.1,
        4e9,
        4e9,
        ("fuyou_all_nvme_whole", "fuyou_all_nvme", "fuyou_all_nvme_int8"),
        {"fuyou_all_nvme/fuyou_all_nvme_whole": 0.92, "fuyou_all_nvme_int8/fuyou_all_nvme_whole": 0.58},
    ),
    DeviceCase("states_in_both", 2, 0.5, 21e9, 21e9, ("fuyou_states_in_both",), model=WIDE),
    DeviceCase(  # layouts of states where storage does not decide
        "compute_bound_states",
        64,
        0.08,
        21e9,
        21e9,
        (
            "fuyou_optimizer_nvme_whole",
            "fuyou_optimizer_nvme",
            "fuyou_optimizer_nvme_int8",
            "fuyou_dram",
            "fuyou_dram_int8",
        ),
        {
            "fuyou_optimizer_nvme/fuyou_optimizer_nvme_whole": 1.01,
            "fuyou_optimizer_nvme_int8/fuyou_optimizer_nvme_whole": 1.03,
            "fuyou_dram_int8/fuyou_dram": 1.03,
        },
    ),
    DeviceCase("link_bound_up", 2, 0.1, 1e8, 1e9, ("fuyou_optimizer_nvme",)),
    DeviceCase("link_bound_down", 2, 0.1, 1e9, 5e7, ("fuyou_optimizer_nvme",)),
    DeviceCase("accumulation_8", 2, 0.02, 1e9, 1e9, ("zero_infinity", "fuyou_all_nvme"), accumulation=8),
    DeviceCase(
        "activations",
        8,
        0.1,
        4e9,
        4e9,
        ("zero_infinity_checkpointing", "fuyou_swap", "fuyou_auto"),
        {"fuyou_auto/zero_infinity_checkpointing": 0.45},
        model=WIDE,
        num_timed=2,
    ),
    DeviceCase(  # the same, with as much host memory as that engine takes
        "activations_memory",
        8,
        0.1,
        4e9,
        4e9,
        ("zero_infinity_checkpointing", "fuyou_auto_all"),
        {"fuyou_auto_all/zero_infinity_checkpointing": 0.45},
        model=WIDE,
        num_timed=2,
    ),
)
BY_NAME = {case.name: case for case in CASES}
MEASURED_BY_FLOOR = (
    "storage_bound",
    "storage_bound_all",
    "states_in_both",
    "link_bound_up",
    "link_bound_down",
    "accumulation_8",
    "activations",
    "activations_memory",
)


def spec_of(case: DeviceCase, variant: str, directory: Path) -> dict[str, Any]:
    name = variant.removesuffix("_checkpointing")
    config = config_of(name, directory, case.tuning, case.batch, 0.0)
    config["gradient_accumulation_steps"] = case.accumulation
    config["zero_optimization"] |= STREAMED
    if variant == "fuyou_off":  # without steps "auto" would never decide; the others come to keep everything here
        config["fuyou"]["activations"] = {"mode": "none"}
    for section in {"offload_optimizer", "offload_param"} & config["zero_optimization"].keys():
        config["zero_optimization"][section]["pin_memory"] = True
    return {
        "model": {**case.model, "checkpointing": variant != name},
        "batch": case.batch,
        "mode": "off" if variant == "fuyou_off" else "train",
        "config": config,
        **case.place(),
    }


def floor_secs(
    case: DeviceCase, variant: str, numel: int, lanes: Mapping[str, float], rates: Rates
) -> dict[str, float]:
    """Seconds that each lane needs alone for what a step must do; the largest is the floor.

    Parameters cross the link twice a micro-batch, or less often where the device keeps some of them; gradients once;
    swapped activations cross it twice and lie on storage. ``compute`` is what the device was busy with. Where a plan
    decided what is on storage, the bytes that it moved are what must be moved.
    """
    settings = case.settings()
    swapped = lanes.get("activation_out_bytes", 0.0)
    if variant == "fuyou_auto_all":
        read, written = lanes["read_bytes"], lanes["write_bytes"]
    else:
        read, written = (each * numel for each in STATE_BYTES.get(variant, (12, 12)))
        read += lanes.get("activation_read_bytes", 0.0)
        written += lanes.get("activation_written_bytes", 0.0)
    passes = case.accumulation
    if variant == "fuyou_all_nvme":  # P16 is read for every pass of every micro-batch
        read += 4 * numel * (passes - 1)
    return {
        "compute": lanes["device_compute_secs"],
        "up": min(4 * numel * passes + swapped, lanes["device_up_bytes"]) / settings["up_rate"],
        "down": (2 * numel * passes + swapped) / settings["down_rate"],
        "storage": max(read / rates.read, written / rates.write, (read + written) / rates.mixed),
        "update": numel / rates.update,
    }


def measure(case: DeviceCase, num_rounds: int, directory: Path) -> dict[str, Any]:
    """Rounds of one burst a variant, in alternating order. The first steps bring overlap and plans into their state."""
    for variant in case.variants:
        (directory / variant).mkdir(parents=True, exist_ok=True)
    specs = {variant: spec_of(case, variant, directory / variant) for variant in case.variants}
    rates = measure_rates(directory)
    with tempfile.TemporaryDirectory(prefix="fuyou-bench-") as scratch, started(specs, Path(scratch)) as workers:
        bursts: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
        for worker in workers:
            worker.ask(do="steps", lead=4, timed=1)
            worker.ask(do="waits")
            worker.ask(do="forget_peaks")
        load = ForeignLoad(workers)
        for number in range(num_rounds):
            for worker in workers if number % 2 == 0 else reversed(workers):
                bursts[worker.name].append(worker.ask(do="steps", lead=1, timed=case.num_timed))
            times = "  ".join(f"{name} {runs[-1]['secs']:.3f}" for name, runs in bursts.items())
            print(f"{case.name} round {number}: {times}", flush=True)
        foreign = load.cores()
        peaks = {worker.name: worker.ask(do="memory") for worker in workers}  # before waits and traces become text
        by_gpu = {worker.name: worker.ask(do="gpu_step") for worker in workers if "gpu_bytes" in case.place()}
        waits = {worker.name: worker.ask(do="waits")["waits"][:12] for worker in workers}
        numels = {worker.name: worker.about["numel"] for worker in workers}
        about = {worker.name: worker.about for worker in workers}
    secs = {name: statistics.median(run["secs"] for run in runs) for name, runs in bursts.items()}
    variants = {}
    for name, runs in bursts.items():
        lanes = {key: statistics.median(run["lanes"][key] for run in runs) for key in runs[-1]["lanes"]}
        lanes |= by_gpu.get(name, {})
        floor = floor_secs(case, name, numels[name], lanes, rates)
        variants[name] = {
            "secs": secs[name],
            "all_secs": [run["secs"] for run in runs],
            "idle_share": max(0.0, 1 - lanes["device_compute_secs"] / secs[name]),
            "floor": floor,
            "over_floor": secs[name] / max(floor.values()),
            "lanes": lanes,
            "host_waits": waits[name],
            "peak_device_bytes": peaks[name]["peak_device_bytes"],
            "host_bytes": peaks[name]["peak_rss_bytes"] - about[name]["base_rss_bytes"],
            "planned_host_bytes": about[name]["planned_host_bytes"],
            "plan": about[name]["plan"],
        }
    ratios = {pair: secs[pair.split("/")[0]] / secs[pair.split("/")[1]] for pair in case.bars}
    return {
        "case": {**asdict(case), "settings": case.settings()},
        "foreign_cores": foreign,
        "rates": asdict(rates),
        "variants": variants,
        "ratios": {pair: {"found": ratio, "bar": case.bars[pair]} for pair, ratio in ratios.items()},
    }


def missed(name: str, variant: str, found: Mapping[str, Any]) -> list[str]:
    """The bars of ours that do not belong to a pair of variants, and are not kept."""
    if not found["planned_host_bytes"] or variant == "fuyou_off":
        return []
    lines, over = [], found["host_bytes"] / found["planned_host_bytes"]
    if over > MOST_OVER_PLAN:
        lines.append(f"{over:.3f} of the planned host memory (bar {MOST_OVER_PLAN}: missed)")
    if name in MEASURED_BY_FLOOR and found["over_floor"] > MOST_OVER_FLOOR:
        lines.append(f"{found['over_floor']:.3f} of the floor (bar {MOST_OVER_FLOOR}: missed)")
    if name == "compute_bound" and found["idle_share"] > MOST_IDLE:
        lines.append(f"the device idles {found['idle_share']:.1%} (bar {MOST_IDLE:.0%}: missed)")
    return lines


def markdown(results: Mapping[str, Any]) -> str:
    heads = "case | variant | step s | device busy s | idle | up s | down s | floor s | of lane | over floor"
    lines = [f"| {heads} | host GB | planned GB |", "|---" * 12 + "|"]
    for name, case in results["cases"].items():
        for variant, found in case["variants"].items():
            lanes, floor = found["lanes"], found["floor"]
            lane = max(floor, key=lambda each: floor[each])
            lines.append(
                f"| {name} | {variant} | {found['secs']:.3f} | {lanes['device_compute_secs']:.3f} | "
                f"{found['idle_share']:.1%} | {lanes['device_up_secs']:.3f} | {lanes['device_down_secs']:.3f} | "
                f"{floor[lane]:.3f} | {lane} | {found['over_floor']:.3f} | {found['host_bytes'] / 1e9:.2f} | "
                f"{found['planned_host_bytes'] / 1e9:.2f} |"
            )
    lines.append("")
    for name, case in results["cases"].items():
        for pair, ratio in case["ratios"].items():
            verdict = "holds" if ratio["found"] <= ratio["bar"] else "missed"
            lines.append(f"- {name}: {pair} = {ratio['found']:.3f} (bar {ratio['bar']}: {verdict})")
        for variant, found in case["variants"].items():
            lines += [f"- {name}: {variant}: {line}" for line in missed(name, variant, found)]
        lines.append(f"- {name}: {case['foreign_cores']:.2f} cores were used by others")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(BY_NAME), action="append", help="only this one; may be given again")
    parser.add_argument("--variant", action="append", help="only this one of the cases' variants")
    parser.add_argument("--rounds", type=int, default=5, help="bursts a variant (default 5)")
    parser.add_argument("--scale", type=float, help="only our variants, the device so many times as fast")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to use")
    parser.add_argument("--write", action="store_true", help="write results for a selection of cases, too")
    arguments = parser.parse_args()
    load_core()
    build()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    stem = Path(__file__).parent / "results" / f"{date}-device"
    writes = arguments.case is None or arguments.write
    results: dict[str, Any] = {"date": date, "machine": "", "gpu": GPU, "cases": {}}
    if writes and stem.with_suffix(".json").exists():  # of a run that was given other cases, or did not end
        results = json.loads(stem.with_suffix(".json").read_text())
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    failed, measured = [], {}
    cases = [BY_NAME[name] for name in arguments.case or BY_NAME]
    if arguments.variant is not None:
        cases = [case.only(arguments.variant) for case in cases]
    if arguments.scale is not None:
        cases = [case.scaled(arguments.scale) for case in cases]
    for case in cases:
        name = case.name
        with tempfile.TemporaryDirectory(prefix="fuyou-bench-", dir=arguments.directory) as directory:
            try:
                measured[name] = results["cases"][name] = measure(case, arguments.rounds, Path(directory))
            except (RuntimeError, OSError) as error:
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
                failed.append(name)
                results["cases"].pop(name, None)
        if writes:
            order = [each for name in BY_NAME for each in results["cases"] if each.split("_x")[0] == name]
            results["cases"] = {each: results["cases"][each] for each in order}
            stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
            stem.with_suffix(".md").write_text("# Steps on the timed stand-in device\n\n" + markdown(results) + "\n")
    print(markdown({"cases": measured}))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
