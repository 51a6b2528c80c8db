# SPDX-License-Identifier: Apache-2.0
"""``fuyou simulate``, ``plan`` and ``max-model`` as a user calls them, and what they say to wrong input."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fuyou.cli import main
from tests.harness.limits import HANG_SECS
from tests.planner.support import PUBLISHED

HEAD = "system,gpu,num_ssds,dram_gb,model,batch,tokens_per_s,tflops_8p"
GOOD = "fuyou,rtx4090,12,768,13B,32,,"


def _simulated(tmp_path: Path, *lines: str) -> list[dict[str, str]]:
    points, out = tmp_path / "in.csv", tmp_path / "out.csv"
    points.write_text("\n".join((HEAD, *lines)) + "\n", encoding="utf-8")
    assert main(["simulate", "--points", str(points), "--out", str(out)]) == 0
    with open(out, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_columns_are_kept_and_predictions_added(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert main(["simulate", "--points", str(PUBLISHED), "--out", str(out)]) == 0
    with open(out, encoding="utf-8", newline="") as file:
        predicted = list(csv.DictReader(file))
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        for before, after in zip(csv.DictReader(file), predicted, strict=True):
            assert {key: after[key] for key in before} == before
            assert float(after["predicted_tokens_per_s"]) > 0
            assert float(after["predicted_tflops_8p"]) > 0
            assert after["bound_lane"] in ("compute", "storage read", "storage write")
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_best_batch_beats_every_published_one(tmp_path: Path) -> None:
    fixed = [f"fuyou,rtx4090,12,768,13B,{batch},," for batch in (8, 16, 32, 64, 128)]
    *others, best = _simulated(tmp_path, *fixed, "fuyou,rtx4090,12,768,13B,best,,")
    assert float(best["predicted_tokens_per_s"]) >= max(float(row["predicted_tokens_per_s"]) for row in others) * 0.99
    assert int(best["predicted_batch"]) >= 32


def test_max_model_grows_with_dram_and_stock_needs_more(tmp_path: Path) -> None:
    drams = (32, 64, 128, 256, 768)
    rows = _simulated(
        tmp_path,
        *(f"max_model,rtx4090,12,{dram},,,," for dram in drams),
        *(f"max_model:zero_infinity,rtx4090,12,{dram},,,," for dram in drams),
    )
    sizes = [float(row["predicted_model"].removesuffix("B").replace("none", "0")) for row in rows]
    ours, stock = sizes[: len(drams)], sizes[len(drams) :]
    assert ours == sorted(ours)
    assert stock == sorted(stock)
    assert ours[-1] == 276
    assert stock[-1] == 135  # the published limit of ZeRO-Infinity on that host
    assert all(a >= b for a, b in zip(ours, stock, strict=True))


def test_more_and_faster_parts_are_never_slower(tmp_path: Path) -> None:
    for lines in (
        [f"{{}},rtx4090,{n},768,70B,16,," for n in (1, 2, 3, 6, 12)],
        [f"{{}},{gpu},12,768,13B,24,," for gpu in ("rtx3090", "rtx4090", "a100_80gb")],
    ):
        for system in ("fuyou", "zero_infinity", "ds_fuyou"):
            rows = _simulated(tmp_path, *(line.format(system) for line in lines))
            rates = [float(row["predicted_tokens_per_s"]) for row in rows]
            assert rates == sorted(rates)
            assert rates[0] > 0


def test_what_does_not_fit_is_zero_and_names_the_tier(tmp_path: Path) -> None:
    gpu, dram, disk = _simulated(
        tmp_path,
        "fuyou,rtx4090,12,768,175B,512,,",
        "zero_offload,rtx4090,12,128,13B,8,,",
        "fuyou,rtx4090,1,768,276B,1,,",
    )
    assert (gpu["predicted_tokens_per_s"], gpu["bound_lane"]) == ("0", "no fit: gpu")
    assert (dram["predicted_tokens_per_s"], dram["bound_lane"]) == ("0", "no fit: cpu")
    assert (disk["predicted_tokens_per_s"], disk["bound_lane"]) == ("0", "no fit: nvme")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fuyuo,rtx4090,12,768,13B,32,,", "did you mean fuyou"),
        ("fuyou,rtx4900,12,768,13B,32,,", "did you mean rtx4090"),
        ("fuyou,rtx4090,12,768,14B,32,,", "nearest are"),
        ("fuyou,rtx4090,twelve,768,13B,32,,", "num_ssds must be a whole number of at least 0, found 'twelve'"),
        ("fuyou,rtx4090,12,-5,13B,32,,", "dram_gb must be a positive number, at most 1000000000, found '-5'"),
        ("fuyou,rtx4090,12,nan,13B,32,,", "dram_gb must be a positive number"),
        ("fuyou,rtx4090,12,1e308,13B,32,,", "dram_gb must be a positive number, at most 1000000000, found '1e308'"),
        ("fuyou,rtx4090,12,768,13B,0,,", "batch must be a whole number of at least 1, found '0'"),
        ("fuyou,rtx4090,12,768,13B,1e300,,", "--batch must be at most 1000000000, found 1e+300"),
        ("fuyou,rtx4090,12,768,13B,inf,,", "batch must be a whole number of at least 1, found 'inf'"),
        ("fuyou,rtx4090,12,768,13B,,,", "batch must be a whole number"),
        ("fuyou,rtx4090,12,768,13B", "must have 8 cells"),
        ("fuyou,rtx4090,12,768,13B,32,,,,", "must have 8 cells"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(
    tmp_path: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    points, out = tmp_path / "in.csv", tmp_path / "out.csv"
    points.write_text(f"{HEAD}\n{GOOD}\n{line}\n", encoding="utf-8")
    assert main(["simulate", "--points", str(points), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "line 3" in error
    assert said in error
    assert "Traceback" not in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_file_that_is_no_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tmp_path / "in.csv"
    for content, said in (
        (b"system,gpu\n", "missing num_ssds"),
        (b"", "missing system"),
        (f"{HEAD},gpu\n{GOOD},rtx3090\n".encode(), "must name each column once; found twice gpu"),
        (b"\xff\xfe\x00", "readable"),
    ):
        points.write_bytes(content)
        assert main(["simulate", "--points", str(points), "--out", str(tmp_path / "o")]) == 2
        assert said in capsys.readouterr().err
    assert main(["simulate", "--points", str(tmp_path / "none.csv"), "--out", str(tmp_path / "o")]) == 2
    assert "must be a readable CSV file" in capsys.readouterr().err


def test_simulate_writes_nothing_where_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "no" / "out.csv"
    assert main(["simulate", "--points", str(PUBLISHED), "--out", str(out)]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_plan_prints_a_table_and_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "13B", "--num-ssds", "12", "--dram-gb", "128", "--batch", "16"]
    saved = tmp_path / "plan.json"
    assert main([*arguments, "--out", str(saved)]) == 0
    table = capsys.readouterr().out
    words_of_all = ("what lives where", "bounds the step", "tokens/s", "8 P", "largest batch", "upgrade", "other home")
    for words in words_of_all:
        assert words in table
    one, two, checkpoint = re.findall(r"[\d.]+ GB", next(line for line in table.splitlines() if "disk: " in line))
    on_storage = table.split("\n  storage ")[1].split("  of ")[0].strip()
    assert (one, checkpoint) == (on_storage, "154.1 GB")  # 12 bytes for each of 12.85 billion parameters
    assert float(two.split()[0]) > 1.4 * float(one.split()[0])
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    document = json.loads(saved.read_text(encoding="utf-8"))
    assert shown["residency"] == document["residency"]
    assert shown["predicted"]["largest_batch"] >= 16
    shown_rate = float(table.split(" tokens/s")[0].split()[-1])
    assert shown_rate == pytest.approx(document["predicted"]["tokens_per_s"], abs=0.06)


def test_the_largest_batch_of_short_sequences_is_no_limit_of_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "gpt:2,12,768,50257", "--gpu", "h100", "--seq"]
    assert main([*arguments, "64", "--json"]) == 0
    largest = json.loads(capsys.readouterr().out)["predicted"]["largest_batch"]
    assert largest > 512
    assert main([*arguments, "64", "--batch", str(2 * largest)]) == 2
    assert f"batch {largest} fits" in capsys.readouterr().err
    assert main([*arguments, "8"]) == 0
    assert re.search(r"largest batch that fits: \d+( or more)?, [\d.]+ tokens/s\n", capsys.readouterr().out)


def test_tokens_a_second_of_the_largest_batch_are_those_of_its_own_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "13B", "--gpu", "rtx4090", "--ssd", "990pro", "--dram-gb", "64", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["predicted"]
    assert main([*arguments, "--batch", str(found["largest_batch"])]) == 0
    asked = json.loads(capsys.readouterr().out)["predicted"]
    assert asked["largest_batch"] == found["largest_batch"] > 8
    assert found["largest_batch_tokens_per_s"] == pytest.approx(asked["tokens_per_s"], rel=0.1)
    assert found["largest_batch_tokens_per_s"] > 5 * found["tokens_per_s"]


@pytest.mark.parametrize("name", ["plan.json", "plan.html"])
def test_a_plan_that_cannot_be_written_names_the_file_that_was_asked_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / name
    assert main(["plan", "--model", "13B", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"fuyou plan: [Errno 2] No such file or directory: '{out}'\n"


def test_a_trace_replaces_another_when_it_is_whole(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("an older one")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); import signal; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from ds_fuyou.cli import main; "
        f"sys.exit(main(['plan', '--model', '13B', '--trace', {str(trace)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECS, check=False)
    assert done.returncode == 2, done.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("trace.json", "an older one")]


def test_what_is_asked_of_a_training_compares(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (["--tokens", "2e9"], ["--price", "2"], ["--compare"]):
        assert main(["plan", "--model", "6B", *asked]) == 0
        assert "ZeRO-Infinity" in capsys.readouterr().out, asked


def test_a_name_in_a_file_prints_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "_name_or_path": "one\nstep 0.01 s\x1b[2J"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "one?step 0.01 s?[2J: " in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "13B", "--gpu", "rtx4900"], "did you mean rtx4090"),
        (["--model", "13B", "--ssd", "p551"], "did you mean p5510"),
        (["--model", "13B", "--host", "dekstop"], "did you mean desktop"),
        (["--model", "gpt:1,2,3"], "four whole numbers"),
        (["--model", "gpt:2,3,64,100"], "multiple of heads"),
        (["--model", "gpt:99999999,8,1024,1000"], "layers must be from 1 to 4096, found 99999999"),
        (["--model", "no/such/file.json"], "there is no such file"),
        (["--model", "13Q"], "the sizes are 6B, 13B"),
        (["--model", "8B"], "6B is the nearest of the sizes 6B, 13B, 30B, 70B, 135B, 175B, 276B"),
        (["--model", "llama/Llama-3-8B"], "fetched from the Hub: save https://huggingface.co/llama/Llama-3-8B/resolve"),
        (["--model", "tests/planner"], "there is no tests/planner/config.json"),
        (["--model", "13B", "--batch", "0"], "--batch must be at least 1"),
        (["--model", "13B", "--accumulation", str(10**20)], "--accumulation must be at most 4096, found 1e+20"),
        (["--model", "13B", "--num-gpus", "0"], "--num-gpus must be positive"),
        (["--model", "13B", "--num-ssds", "-1"], "--num-ssds must not be negative"),
        (["--model", "13B", "--dram-gb", "nan"], "--dram-gb must be positive"),
        (["--model", "13B", "--dram-gb", "64", "--pinned-gb", "65"], "must not exceed --dram-gb 64"),
        (["--model", "13B", "--ssd-tb", "inf"], "--ssd-tb must be positive and below a million"),
        (["--model", "13B", "--num-ssds", "1", "--ssd-tb", "9"], "raise --num-ssds or lower --ssd-tb"),
        (["--model", "13B", "--system", "zero_inifnity"], "did you mean zero_infinity"),
        (["--model", "175B", "--batch", "64"], "a GPU there); batch"),
        (["--model", "13B", "--num-ssds", "0", "--dram-gb", "64"], "it fits with"),
        (["--model", "13B", "--system", "zero_3", "--compare"], "plan --system zero_3 without it"),
        (
            ["--model", "13B", "--system", "zero_offload", "--moments", "int8"],
            "--masters and --moments are of ds_fuyou",
        ),
        (["--model", "13B", "--measure", "here", "--gpu", "h100"], "--gpu cannot be given with --measure"),
        (["--profile", "p.json", "--batch", "4", "--compare"], "--batch, --compare cannot be given with --profile"),
        (["--profile", "p.json", "--out", "p.html"], "of a profile there is no page"),
    ],
)
def test_plan_says_what_is_wrong_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fuyou plan: ")
    assert said in error
    assert error.count("\n") == 1


def test_max_model_names_one_or_says_why_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["max-model", "--dram-gb", "256", "--ssd-tb", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "276B"
    assert main(["max-model", "--dram-gb", "256", "--num-ssds", "0"]) == 0
    found = capsys.readouterr().out
    assert found.startswith("13B (12.8 B parameters)")
    assert "disk: nothing, one checkpoint 154.1 GB beside" in found
    assert main(["max-model", "--dram-gb", "1", "--ssd-tb", "8"]) == 1
    assert "of host memory" in capsys.readouterr().out


def test_the_commands_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from ds_fuyou.cli import main; "
        f"main(['plan', '--model', '13B', '--num-ssds', '4', '--batch', '16', '--out', {str(tmp_path / 'p')!r}]); "
        f"main(['simulate', '--points', {str(PUBLISHED)!r}, '--out', {str(tmp_path / 'o')!r}]); "
        "main(['max-model']); "
        "sys.exit(bool({'torch', 'deepspeed', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECS, check=False)
    assert done.returncode == 0, done.stderr
