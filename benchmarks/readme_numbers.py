# SPDX-License-Identifier: Apache-2.0
"""Puts the numbers of the newest full result into README.md: ``python benchmarks/readme_numbers.py``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["main", "table"]

_ROOT = Path(__file__).resolve().parent.parent
_MARKED = re.compile(r"(<!-- numbers:begin -->\n).*?(<!-- numbers:end -->)", re.DOTALL)
_CASES = {
    "balanced": "balanced (batch 2, sequence 256), no clipping",
    "balanced_clip1": "balanced, clipped at norm 1.0",
    "storage_bound": "storage-bound (batch 1, sequence 32)",
    "masters": "storage-bound, split masters",
    "moments": "storage-bound, moments of 8 bits",
    "compute_bound": "compute-bound (batch 8, sequence 256)",
    "dram": "everything in host memory",
    "activations": "gradient checkpointing in the script, batch 2",
    "activations_batch8": "gradient checkpointing in the script, batch 8",
    "rollout": "64 tokens generated",
    "saving": "values taken out, all on NVMe",
    "trace": "lane trace, balanced with activations on NVMe",
}
_NAMES = {
    "zero_infinity": "ZeRO-Infinity",
    "zero_offload": "ZeRO-Offload",
    "fuyou_optimizer_nvme": "this, optimizer on NVMe",
    "fuyou_all_nvme": "this, all on NVMe",
    "fuyou_dram": "this, all in host memory",
    "fuyou_swap": "this, optimizer and activations on NVMe",
    "fuyou_swap_traced": "the same, traced",
    "fuyou_off_beside_io": "this without optimizer, beside fio",
    "stock_off": "stock without optimizer",
    "fuyou_off": "this without optimizer",
    "fuyou_optimizer_nvme_whole": "the same, whole masters and fp32 moments",
    "fuyou_optimizer_nvme_int8": "this, optimizer on NVMe",
    "fuyou_all_nvme_whole": "the same, whole masters and fp32 moments",
    "fuyou_all_nvme_int8": "this, all on NVMe",
    "fuyou_dram_int8": "this, all in host memory",
    "zero_offload_gathered": "ZeRO-Offload, parameters gathered once",
    "fuyou_all_nvme_gathered": "this, all on NVMe, gathered once",
    "fuyou_all_nvme_read_once": "their bytes read once",
    "fuyou_all_nvme_merge": "adapters merged",
    "fuyou_all_nvme_evaluate": "an evaluation",
}
_NAMES_IN = {("saving", "fuyou_all_nvme"): "`state_dict`", ("moments", "fuyou_dram"): "the same, fp32 moments"}


def table(results: dict[str, Any], source: str) -> str:
    """The ratios of every case and the memory rows, as Markdown."""
    return "\n".join(_lines(results, source)) + "\n"


def _lines(results: dict[str, Any], source: str) -> Iterator[str]:
    at = results["environment"]
    foreign = max((case.get("foreign_cores", 0.0) for case in results["cases"]), default=0.0)
    yield (
        f"Measured on {at['date']}: {at['num_cores']} cores ({at['cpu']}), {at['memory_gib']:.0f} GiB, "
        f"{at['storage']}, torch {at['torch']}, DeepSpeed {at['deepspeed']}. GPT of 98 M parameters, bf16, AdamW. "
        f"Seconds (of a step, where nothing else is said), interleaved; ratio: median (quartiles). Everything else, "
        f"with the configurations: [{source}](benchmarks/results/{source})."
    )
    if foreign > 0.1:
        yield ""
        yield f"Other processes used up to {foreign:.1f} cores meanwhile, so these times are only an indication."
    yield ""
    yield "| case | compared | s | ratio |"
    yield "|---|---|---|---|"
    for case in results["cases"]:
        for ratio in case["ratios"]:
            name, pair = case["case"]["name"], (ratio["of"], ratio["to"])
            ours, theirs = (case["variants"][each]["step_secs"]["median"] for each in pair)
            yield (
                f"| {_CASES[name]} | {' / '.join(_NAMES_IN.get((name, each), _NAMES[each]) for each in pair)} | "
                f"{ours:.2f} / {theirs:.2f} | {ratio['median']:.2f} "
                f"({ratio['quartile_1']:.2f} to {ratio['quartile_3']:.2f}) |"
            )
    if results.get("memory"):
        yield ""
        yield "Peak host memory, 12 to 36 layers of width 1024 under `zero.Init`, bytes an added parameter:"
        for row in results["memory"]:
            what = "ZeRO-Infinity" if row["variant"] == "zero_infinity_params" else "this, all on NVMe"
            yield f"- {what}, clip {row['clip']:g}: {row['bytes_per_parameter']:.1f}"


def _runs(files: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Results of benchmarks/run.py; those of the planner's benchmark lie there, too."""
    for path in files:
        data = json.loads(path.read_text())
        if "stock_tuning" in data:
            yield path, data


def main() -> None:
    """Exits with a message if there is no result, or README.md has no marked place."""
    files = (_ROOT / "benchmarks" / "results").glob("*.json")
    found = [(path.name[:10], len(data["cases"]), path, data) for path, data in _runs(files)]
    if not found:
        sys.exit("there is no result in benchmarks/results: run `make bench` first")
    readme = _ROOT / "README.md"
    text = readme.read_text()
    if not _MARKED.search(text):
        sys.exit("README.md must have the lines <!-- numbers:begin --> and <!-- numbers:end -->; put them back")
    *_, path, data = max(found, key=lambda each: each[:2])  # of the last day, the one with most cases
    numbers = table(data, path.with_suffix(".md").name)
    readme.write_text(_MARKED.sub(lambda match: match[1] + numbers + match[2], text))


if __name__ == "__main__":
    main()
