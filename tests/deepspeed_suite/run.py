# SPDX-License-Identifier: Apache-2.0
"""Runs DeepSpeed's own unit tests, stock and with the block, and writes both pass sets side by side.

    python -m tests.deepspeed_suite.run --repo PATH_OF_A_DEEPSPEED_CHECKOUT

The tests come from the checkout, DeepSpeed itself is the installed one. Every test runs with the block first; those
that fail with it run again in stock. Exits with 1 if one of them passes there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEST_LIMIT_SECS = 150

FILES = (
    "runtime/half_precision/test_zero_optim_overflow.py",
    "runtime/zero/test_zero_grad_clip.py",
    "runtime/zero/test_ignore_unused_parameters.py",
    "runtime/zero/test_nvme_checkpointing.py",
    "runtime/zero/test_zero_tensor_fragment.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_late_module_attach.py",
    "runtime/zero/test_zero_leaf_module.py",
    "runtime/zero/test_zero_nesting_init.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_ancestry.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_dynamic_class.py",
    "runtime/zero/test_zero_hook_attribute_delegation.py",
    "runtime/zero/test_zero_linear_direct_init.py",
    "runtime/zero/test_zero_allreduce_fetch_params.py",
    "runtime/zero/test_zero_autocast_mixed_dtype.py",
    "runtime/zero/test_zero_offloadpp.py",
    "runtime/zero/test_zero_tiled.py",
    "runtime/zero/test_zeropp.py",
    "v1/zero/test_zero_cpu_offload_grad_accum.py",
    "v1/zero/test_zero_coalesce_grad_reduction.py",
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py",
    "v1/zero/test_zero_hook_count_regression.py",
    "v1/zero/test_offload_states.py",
    "v1/zero/test_zero.py",
    "v1/zero/test_zero_user_backward.py",
    "v1/zero/test_overlap_comm_record_stream.py",
    "v1/zero/test_zero_autocast.py",
    "v1/zero/test_zero_functorch_linear.py",
    "v1/zero/test_zero_init_pg_contradiction.py",
    "v1/zero/test_zero_torch_func.py",
    "v1/half_precision/test_bf16.py",
    "v1/half_precision/test_mixed_precision_dtype.py",
    "v1/half_precision/test_with_autocast.py",
    "v1/pin_memory/test_destroy_unpin.py",
    "v1/compile/test_compile_zero.py",
    "v1/compile/test_offload_opt_states.py",
    "v1/compile/test_offload_activation.py",
    "v1/moe/test_moe.py",
    "v1/moe/test_autoep_integration.py",
    "v1/moe/test_autoep_checkpoint.py",
    "v1/moe/test_autoep_grad_parity.py",
    "runtime/half_precision/test_fp16.py",
    "runtime/half_precision/test_fp8.py",
    "runtime/half_precision/onebit/test_onebit.py",
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_multiple_models.py",
    "runtime/test_mup_optimizers.py",
    "runtime/test_no_sync_ctxt.py",
    "runtime/zenflow/test_zf.py",
    "checkpoint/test_zero_optimizer.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_universal_checkpoint.py",
    "checkpoint/test_convert_checkpoint.py",
    "checkpoint/test_mics_optimizer.py",
    "ops/adam/test_adamw.py",
    "ops/lion/test_lion.py",
    "ops/muon/test_muon.py",
    "ops/muon/test_muon_partial_training.py",
    "linear/test_ctx.py",
    "hybrid_engine/test_he_lora.py",
    "inference/quantization/test_intX_quantization.py",
    "profiling/flops_profiler/test_flops_profiler.py",
    "sequence_parallelism/test_ulysses.py",
    "ulysses_alst/test_tiled_compute.py",
    "ulysses_alst/test_ulysses_sp_hf.py",
    "model_parallelism/test_autotp_training.py",
    "model_parallelism/test_tp_plan_e2e.py",
)


@dataclass
class FileResult:
    """Outcomes by test: with the block of all, and in stock of those that get a block and fail with it."""

    ours: dict[str, dict] = field(default_factory=dict)
    stock: dict[str, dict] = field(default_factory=dict)
    finished: bool = True

    def with_block(self, *outcomes: str) -> list[str]:
        return [test for test, r in self.ours.items() if "block" in r["notes"] and r["outcome"] in outcomes]

    def refused(self) -> list[str]:
        """The pair with the block is refused by name, in the configuration or by the engine."""
        early = [test for test, r in self.ours.items() if any(note.startswith("refused") for note in r["notes"])]
        return early + self.with_block("refused")

    def unlike_stock(self) -> list[str]:
        """Fail with the block, and pass in stock."""
        return [
            test for test in self.with_block("failed", "died") if self.stock.get(test, {}).get("outcome") == "passed"
        ]


def read_results(path: Path) -> dict[str, dict]:
    """The last line of a test counts: the first one only says that it was started."""
    found: dict[str, dict] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        entry = json.loads(line)
        found[entry.pop("test")] = entry
    return found


def own_extensions(work: Path) -> Path:
    """A copy of the built operators: a test that is killed while it loads one leaves a lock that others wait for."""
    copy = work / "torch_extensions"
    if not copy.exists():
        from torch.utils.cpp_extension import _get_build_directory

        built = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(_get_build_directory("cpu_adam", False)).parent)
        copy.mkdir(parents=True)
        shutil.copytree(built, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock"))
    for lock in copy.glob("*/lock"):
        lock.unlink()
    return copy


def environment(mode: str, which: str, work: Path, results: Path, only: Path | None) -> dict[str, str]:
    swap = work / "swap"
    swap.mkdir(exist_ok=True)
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(own_extensions(work)),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "FUYOU_SUITE_MODE": mode,
        "FUYOU_SUITE_WHICH": which,
        "FUYOU_SUITE_SWAP": str(swap),
        "FUYOU_SUITE_RECORD": str(work / "record"),
        "FUYOU_SUITE_RESULTS": str(results),
    }
    env.pop("FUYOU_SUITE_ONLY", None)
    return env | ({"FUYOU_SUITE_ONLY": str(only)} if only else {})


def run_file(repo: Path, file: str, env: dict[str, str], limit_secs: float) -> bool:
    """Runs one file, again from where it broke off if a test takes the session down. Whether it came to its end.

    A test over its limit ends the session with the status of a failed test, so tests are counted.
    """
    results = Path(env["FUYOU_SUITE_RESULTS"])
    left_over, ended = (results.with_name(results.name + end) for end in (".left", ".ended"))
    if ended.exists():
        return True
    end = datetime.datetime.now().timestamp() + limit_secs
    command = [sys.executable, "-m", "pytest", "-q", "-p", "fuyou_suite_plugin", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", f"--timeout={TEST_LIMIT_SECS}", "--timeout-method=thread", f"unit/{file}"]
    while (left := end - datetime.datetime.now().timestamp()) > 0:
        before = len(read_results(results))
        left_over.unlink(missing_ok=True)
        with open(results.with_suffix(".log"), "ab") as log:
            process = subprocess.Popen(
                command, cwd=repo / "tests", env=env, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                kept = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
                if kept and json.loads(kept[-1])["outcome"] == "died":  # it may have needed the time of another run
                    results.write_text("".join(f"{line}\n" for line in kept[:-1]), encoding="utf-8")
                return False
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        done = len(read_results(results)) - before
        if left_over.exists() and done == int(left_over.read_text(encoding="utf-8")):
            ended.touch()
            return True
        if done == 0:
            return False  # no test was even started
    return False


def compare_file(repo: Path, file: str, which: str, work: Path, limit_secs: float) -> FileResult:
    name = file.replace("/", "-").removesuffix(".py")
    ours, stock, only = (work / f"{name}.{part}" for part in ("fuyou", "stock", "only"))
    finished = run_file(repo, file, environment("inject", which, work, ours, None), limit_secs)
    result = FileResult(read_results(ours), finished=finished)
    failed = result.with_block("failed", "died")
    if failed and finished:
        only.write_text("\n".join(failed), encoding="utf-8")
        result.finished &= run_file(repo, file, environment("watch", which, work, stock, only), limit_secs)
        result.stock = read_results(stock)
    return result


def table(results: dict[str, FileResult], which: str, revision: str) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("deepspeed", "torch"))
    what = "stage-3 configuration that offloads" if which == "offload" else "stage-3 configuration"
    lines = [
        "# DeepSpeed's own unit tests with the fuyou block",
        "",
        f"{datetime.date.today()}, {versions}, Python {sys.version.split()[0]}, cpu accelerator; tests of revision",
        f"{revision}. Every {what} gets a block with optimizer and gradients on storage, and",
        "with parameters on storage unless it offloads the optimizer alone. What fails with it ran again in stock.",
        "fp16 counts as supported in both runs (it works eagerly on the CPU).",
        "",
        "| file under tests/unit | with a block | pass | refused | fail in stock, too | fail |",
        "|---|---|---|---|---|---|",
    ]
    columns = [0] * 5
    for file, r in results.items():
        note = "" if r.finished else " (cut off by the time limit)"
        failed, unlike = len(r.with_block("failed", "died")), len(r.unlike_stock())
        passed, refused = len(r.with_block("passed")), len(r.refused())
        row = [passed + refused + failed, passed, refused, failed - unlike, unlike]
        columns = [total + number for total, number in zip(columns, row, strict=True)]
        lines.append(f"| {file}{note} | {' | '.join(map(str, row))} |")
    lines.append(f"| **all {len(results)}** | {' | '.join(map(str, columns))} |")
    lines += ["", f"Passed by stock and not by ours: {columns[4]}", ""]
    for r in results.values():
        lines += [f"- `{test}`: {r.ours[test].get('at') or r.ours[test]['outcome']}" for test in r.unlike_stock()]
    notes = {note for r in results.values() for x in r.ours.values() for note in x["notes"]} - {"block"}
    lines += ["", "Refused pairs:", ""] + [f"- {note.removeprefix('refused: ')}" for note in sorted(notes)]
    return "\n".join(lines) + "\n"


def revision_of(repo: Path) -> str:
    asked = subprocess.run(["git", "-C", str(repo), "describe", "--always", "--tags"], capture_output=True, text=True)
    if asked.returncode == 0:
        return asked.stdout.strip()
    version = repo / "version.txt"
    return version.read_text(encoding="utf-8").strip() if version.exists() else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True, help="a checkout of DeepSpeed's repository")
    parser.add_argument("--which", choices=("offload", "stage3"), default="offload", help="what gets a block")
    parser.add_argument("--files", nargs="*", default=FILES, help="files under tests/unit")
    parser.add_argument("--limit-secs", type=float, default=1200, help="for each file and run")
    parser.add_argument("--revision", help="of the tests, where the checkout does not know it")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--work", type=Path, help="where results of single tests go and are continued from")
    given = parser.parse_args()
    if not (given.repo / "tests" / "unit" / "common.py").is_file():
        parser.error(f"{given.repo} must be a checkout of DeepSpeed; it has no tests/unit/common.py")
    work = given.work or Path(tempfile.mkdtemp(prefix="fuyou-suite-"))
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, FileResult] = {}
    for file in given.files:
        if (given.repo / "tests" / "unit" / file).is_file():
            results[file] = compare_file(given.repo.resolve(), file, given.which, work, given.limit_secs)
            r = results[file]
            passed, failed = len(r.with_block("passed")), len(r.with_block("failed", "died"))
            sys.stdout.write(f"{file}: {passed} pass, {failed} fail, {len(r.unlike_stock())} of them not in stock\n")
            sys.stdout.flush()
    text = table(results, given.which, given.revision or revision_of(given.repo))
    sys.stdout.write(text)
    given.out.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.date.today()}-deepspeed-tests-{given.which}"
    (given.out / f"{stem}.md").write_text(text, encoding="utf-8")
    summary = {file: {"stock": r.stock, "ours": r.ours} for file, r in results.items()}
    (work / f"{stem}.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    sys.stdout.write(f"details: {work}\n")
    return 1 if any(r.unlike_stock() for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
