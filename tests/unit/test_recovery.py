# SPDX-License-Identifier: Apache-2.0
"""fp32 weights out of state files that a killed run left, and what cannot be recovered."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ds_fuyou.checkpoint.recovery import Recovered, recover_checkpoint, recover_weights
from ds_fuyou.checkpoint.training_record import text, to_bytes
from ds_fuyou.cli import main
from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.storage.store import RegionSpec, RunIdentity, SlotStore
from tests.harness.forked import finish, start
from tests.harness.runner import HERE, environment


def killed_run(tmp_path: Path, share: float = 0.0, slots: int = 2, end: str = "late") -> list[Path]:
    """State directories that a killed process left."""
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    log = tmp_path / "log"
    process = start(HERE / "killed_run.py", [*map(str, paths), str(share), str(slots), end], environment(0, 1, 0), log)
    finish([process])
    assert process.exitcode == -9, log.read_text()[-3000:]
    return [path / "ds_fuyou" / "run-rank0" for path in paths]


def rank_of(
    tmp_path: Path, run: str, rank: int, *, generation: int = 3, step: int = 3, shape: Sequence[int] = (2, 2)
) -> Path:
    """The state directory of one of two ranks of a run of one chunk, with a record of this step."""
    path = tmp_path / f"{run}{rank}"
    path.mkdir()
    regions = [RegionSpec("state/0", 4096, 2)]
    store = SlotStore.create([path], regions, RunIdentity("m", rank, 2, run), keep=True)
    store.describe({"params": [["a", list(shape), 0, 0, 2]], "chunks": [[0, 0, 2]]})
    store.commit(generation, {"state/0": 0}, {"optimizer_step": step, "state_sums": ""})
    store.close()
    return store.directories[0]


def test_weights_of_the_last_committed_step_of_a_killed_run(tmp_path: Path) -> None:
    """One of its directories is enough; the files stay as they are. It had continued a run of five steps."""
    directories = killed_run(tmp_path)
    found = recover_weights(directories[1:], tmp_path / "weights.pt")
    assert (found.step, found.num_params) == (8, 3)
    recovered = torch.load(tmp_path / "weights.pt")
    assert {name: tuple(values.shape) for name, values in recovered.items()} == {"a": (2048, 3), "b": (), "c": (50, 7)}
    expected = torch.load(tmp_path / "first" / "expected")
    for values, wanted in zip(recovered.values(), expected, strict=True):
        assert torch.equal(values.view(-1), wanted)
    assert all((directory / "data").exists() for directory in directories)
    assert [path.name for path in tmp_path.glob("*weights*")] == ["weights.pt"]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"share": 0.7}, r"P32 of 2 of 5 chunks was in host memory and is lost.*optimizer.tier"),
        ({"slots": 1}, "one slot a chunk, so its files may be a mixture"),
        ({"end": "early"}, "nothing says what the state holds"),
        ({"end": "loading"}, "the run ended .* while they were replaced"),
    ],
)
def test_what_cannot_be_recovered_is_said(run: dict, said: str, tmp_path: Path) -> None:
    directories = killed_run(tmp_path, **run)
    with pytest.raises((FuyouStateError, FuyouStorageError), match=said):
        recover_weights(directories, tmp_path / "weights.pt")
    assert not (tmp_path / "weights.pt").exists()


def test_ranks_of_two_runs_or_of_two_steps_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "weights.pt"
    first, second = rank_of(tmp_path, "A", 0), rank_of(tmp_path, "A", 1)
    assert recover_weights([second, first], out) == Recovered(step=3, num_params=1, verified=False)
    out.unlink()
    with pytest.raises(FuyouStateError, match=r"all 2 ranks of one run must be named, found A-rank0, B-rank1"):
        recover_weights([first, rank_of(tmp_path, "B", 1)], out)
    with pytest.raises(FuyouStateError, match=r"all 2 ranks of one run must be named, found A-rank1$"):
        recover_weights([second], out)
    third = rank_of(tmp_path, "C", 0)
    with pytest.raises(FuyouStateError, match=r"no commit in common \(rank 0: step 3, rank 1: step 2\)"):
        recover_weights([third, rank_of(tmp_path, "C", 1, generation=2, step=2)], out)
    assert not out.exists()


def test_a_parameter_larger_than_what_its_ranks_hold_is_refused_before_it_is_laid_out(tmp_path: Path) -> None:
    ranks = [rank_of(tmp_path, "A", rank, shape=(2**31, 2)) for rank in range(2)]
    with pytest.raises(FuyouStateError, match="says that a has 4294967296 elements; its ranks hold 4"):
        recover_weights(ranks, tmp_path / "weights.pt")
    assert not list(tmp_path.glob("*weights*"))


def test_a_directory_that_is_no_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FuyouStorageError, match="a state directory must be PATH/ds_fuyou"):
        recover_weights([tmp_path], tmp_path / "weights.pt")
    (tmp_path / "ds_fuyou").mkdir(mode=0o700)
    with pytest.raises(FuyouStorageError, match="must exist and be readable"):
        recover_weights([tmp_path / "ds_fuyou" / "run-rank0"], tmp_path / "weights.pt")


def test_no_checkpoint_without_what_the_engine_says(tmp_path: Path) -> None:
    """An older package left no outline, or one that says what it does not record; a newer one is refused."""
    directory = killed_run(tmp_path)[0]
    out = tmp_path / "made"
    with pytest.raises(FuyouStateError, match=r"the ds_fuyou that made it was an older one\. Go on from it in place"):
        recover_checkpoint([directory], out)
    for outline, said in (
        ({"version": 1, "refused": "random-LTD is not", "pickled": ""}, "since random-LTD is not. Go on"),
        ({"version": 2, "refused": "", "pickled": ""}, "of format 2, 1 is known; use the ds_fuyou that wrote it"),
        ({"version": 1, "refused": "", "pickled": text(to_bytes({}))}, "step 8, has no state of training"),
    ):
        store = SlotStore.open(
            [path / "ds_fuyou" / "run-rank0" for path in (tmp_path / "first", tmp_path / "second")], None
        )
        store.describe_engine(outline)
        store.close()
        with pytest.raises(FuyouStateError, match=said):
            recover_checkpoint([directory], out)
    assert not out.exists()


def test_options_of_a_checkpoint_beside_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover", "none", "--weights", str(tmp_path / "w.pt"), "--tag", "x"]) == 2
    assert "--tag and --like belong to --checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["recover", "none", "--weights", "w.pt", "--checkpoint", "c"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--weights", "no/w.pt"], "--weights no/w.pt must name a regular file in a directory that exists"),
        (["--weights", "folder"], "--weights folder must name a regular file in a directory that exists"),
        (["--weights", "/dev/null"], "--weights /dev/null must name a regular file in a directory that exists"),
        (["--checkpoint", "file"], "--checkpoint file must name a directory, or one to be made"),
        (["--checkpoint", "new", "--like", "no"], "--like no must name an existing checkpoint"),
    ],
)
def test_paths_at_which_nothing_can_be_made_are_told_as_they_were_given(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    assert main(["recover", "none", *options]) == 2
    assert capsys.readouterr().err == f"fuyou recover: {said}\n"


def test_runs_below_a_path_are_named_with_the_command_that_takes_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has the last line of a run that was killed."""
    out = str(tmp_path / "w.pt")
    assert main(["recover", str(tmp_path / "nope"), "--weights", out]) == 2
    assert f"{tmp_path / 'nope'} does not exist; name NVME_PATH" in capsys.readouterr().err
    directories = killed_run(tmp_path)
    for given in (tmp_path / "first", tmp_path / "first/ds_fuyou"):
        assert main(["recover", str(given), "--weights", out]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[0] == f"fuyou recover: {given} is no run; name one directory of every rank of one:"
        like, made = tmp_path, tmp_path / "checkpoint-5"
        assert main(["recover", str(given), "--checkpoint", str(made), "--like", str(like), "--tag", "t"]) == 2
        assert f"{directories[0]} --checkpoint {made} --tag t --like {like}  # " in capsys.readouterr().err
        command, _, facts = said[1].partition("  # ")
        assert command == f"  fuyou recover {directories[0]} --weights {out}"
        assert facts.endswith("B")
    assert main(["recover", *command.split()[2:]]) == 0
    shutil.rmtree(directories[0])
    assert main(["recover", str(tmp_path / "first"), "--weights", out]) == 2
    assert "is no run (PATH/ds_fuyou/RUN-rankN), and no state of one lies there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "name"), [("--weights", "data"), ("--weights", "new.pt"), ("--checkpoint", "."), ("--checkpoint", "new")]
)
def test_nothing_is_recovered_to_a_place_among_the_state_files(
    flag: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directories = killed_run(tmp_path)
    last = directories[-1]
    before = {file.name: file.read_bytes() for file in last.iterdir()}
    assert main(["recover", *map(str, directories), flag, str(last / name)]) == 2
    assert f"lies in {last}, whose state files are read" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in last.iterdir()} == before


def test_directories_that_were_copied_elsewhere_are_named_all(tmp_path: Path) -> None:
    """From another machine, say: what the manifest calls them is not there."""
    directories = killed_run(tmp_path)
    expected = torch.load(tmp_path / "first" / "expected")
    copies = []
    for directory in directories:
        copies.append(tmp_path / "copies" / directory.relative_to(tmp_path))
        shutil.copytree(directory, copies[-1])
        copies[-1].parent.chmod(0o700)
        shutil.rmtree(directory.parent)
    with pytest.raises(FuyouStorageError, match="must exist") as caught:
        recover_weights(copies[1:], tmp_path / "weights.pt")
    assert str(caught.value.filename).startswith(str(directories[0].parent.parent))
    weights = tmp_path / "weights.pt"
    weights.symlink_to(tmp_path / "copies" / "weights.pt")
    assert recover_weights(copies[::-1], weights).num_params == 3
    assert weights.is_symlink(), "another disk may be meant"
    recovered = torch.load(weights)
    assert all(torch.equal(one.view(-1), other) for one, other in zip(recovered.values(), expected, strict=True))
