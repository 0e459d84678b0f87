"""``tunery bench`` as it is typed: what it runs, lists and refuses, how it ends, and a stranger's plugin in it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tunery.benchmarks import progress
from tunery.benchmarks.regression import write_baseline
from tunery.benchmarks.results import read_results
from tunery.benchmarks.runner import Outcome


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``tunery`` in process; return exit code, output and errors."""
    from tunery.core.commands import main

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tunery", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        return int(stop.value.code or 0), told.out, told.err

    return call


@pytest.fixture
def command(place: Any, called: Callable[..., Any]) -> Callable[..., tuple[int, str, str]]:
    """Run ``tunery bench`` on the tiny suite, or one that differs from it in some keys."""

    def call(*words: str, **changes: Any) -> tuple[int, str, str]:
        base = ["bench", str(place.suite(**changes)), "--data_dir", str(place.data)]
        return called(*base, "--results", str(place.folder / "results"), *words)

    return call


def test_command(place: Any, forked: Any, command: Callable[..., Any]):
    """Cells run and are told about; what is done is not listed any more; a flag makes it stale and says why."""
    code, out, _ = command("--only", "first--*--seed1", "--jobs", "1")
    assert code == 0, out
    assert "[1/2] first--full--seed1: accuracy 0." in out
    assert "2 of 2 cells are done" in out
    code, out, err = command("--list")
    assert len(out.splitlines()) == 6
    assert err == ""
    words = shlex.split(out.splitlines()[0])
    assert words[:2] == ["tunery", "bench"]
    assert words[words.index("--only") + 1] == "first--full--seed0"
    code, out, err = command("--list", "--only", "first--full--seed1", "--learning_rate", "0.5")
    assert len(out.splitlines()) == 1
    assert "--learning_rate 0.5" in out
    assert "first--full--seed1: stale: recipe.learning_rate: 0.01 -> 0.5" in err
    assert command("--only", "first--full--seed1")[1].endswith("are done\n")
    results = read_results(place.folder / "results" / "tiny")
    write_baseline(results, place.folder / "same.json")
    assert command("--only", "first--full--seed1", "--check", str(place.folder / "same.json"))[0] == 0
    better = [replace(cell, metrics={**cell.metrics, "accuracy": 1.5}) for cell in results.cells]
    write_baseline(replace(results, cells=tuple(better)), place.folder / "better.json")
    code, out, _ = command("--only", "first--full--seed1", "--check", str(place.folder / "better.json"))
    assert code == 1
    assert "full on first: worse" in out
    (place.folder / "results" / "tiny" / "second--full--seed9.json").write_text("half")  # of no cell of this call
    out = command("--only", "first--full--seed1", "--check", str(place.folder / "same.json"))[1]
    assert "damaged: second--full--seed9.json is not JSON" in out
    assert command("--learning_rat", "1")[0] == 2


def test_a_failing_cell(forked: Any, command: Callable[..., Any]):
    """It is told about like the others, which run all the same, with the time left; the command ends with 1."""
    methods = {"broken": {"strategy": "full", "regularizers": ["lnsr:layer=7"]}, "full": {"strategy": "full"}}
    code, out, _ = command("--only", "first--*", "--jobs", "1", methods=methods, seeds=1)
    assert code == 1
    failed, done, summary = out.splitlines()
    assert re.fullmatch(r"\[1/2\] first--broken--seed0: failed: .*layer=7.*; about \d+ s left", failed)
    assert re.fullmatch(r"\[2/2\] first--full--seed0: accuracy 0\.\d+, .*; all through", done)
    assert summary.startswith("1 of 2 cells are done in ")


def test_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """As long for each cell to come as for those that ended, failed ones too; what was done before does not count."""
    clock = iter([100.0, 130.0, 160.0, 7300.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    outcome = Outcome()
    with progress.progress(waiting=4, total=6) as tell:
        outcome.done.append("a")
        tell(outcome, "a: well")
        outcome.failed["b"] = "why"
        tell(outcome, "b: failed")
        outcome.done.append("c")
        tell(outcome, "c: well")
    assert capsys.readouterr().out.splitlines() == [
        "[3/6] a: well; about 2 min left",
        "[4/6] b: failed; about 60 s left",
        "[5/6] c: well; about 40 min left",
    ]


def test_shards(command: Callable[..., Any]):
    """Each takes cells that no other does, and together they take all."""
    listed = [command("--list", "--shard", f"{number}/2")[1].splitlines() for number in (1, 2)]
    assert [len(set(lines)) for lines in listed] == [4, 4]
    assert set(listed[0]) | set(listed[1]) == set(command("--list")[1].splitlines())


def test_learning_rate_of_cells_that_search(command: Callable[..., Any]):
    """A flag that they would not heed is refused; where none of them is chosen, it is a flag like any other."""
    methods = {"one": {}, "best": {"protocol": ["dev_as_test", "learning_rate_search(1e-3, 1e-2)"]}}
    words = ["--list", "--learning_rate", "0.5"]
    code, out, err = command(*words, methods=methods)
    assert (code, out) == (2, "")
    assert err.startswith("tunery: --learning_rate for first--best--seed0, which searches for its own; change the grid")
    assert len(err.splitlines()) == 1
    assert len(command(*words, "--only", "*--one--*", methods=methods)[1].splitlines()) == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", "rte"], "--tasks is no flag of a suite; --only 'TASK--*' chooses cells by their names"),
        (["--seed", "3"], "--seed is no flag of a suite; --seeds 5 says how many, --seeds 0,4,7 which"),
        (["--output_dir", "here"], "--output_dir is no flag of a suite; --results FOLDER says where results go"),
        (["--strategy", "lora"], "--strategy is no flag of a suite; --methods lora, or a method in the suite's file"),
        (
            ["--regularizers", "l2_sp"],
            "--regularizers is no flag of a suite; --methods lora, or a method in the suite's file",
        ),
    ],
)
def test_flags_of_one_run(command: Callable[..., Any], words: list[str], says: str):
    """A suite has its own tasks, methods, seeds and folders: what sets them in a single run is answered in one line."""
    assert command(*words, "--list") == (2, "", f"tunery: {says}\n")


def test_what_cannot_be_used_is_told_before_the_first_cell(place: Any, command: Callable[..., Any]):
    """A baseline, a folder of data or one for results that is none: one line, and nothing has run."""
    (place.folder / "file").touch()
    for words, says in (
        (["--check", "nowhere.json"], "cannot read nowhere.json: No such file or directory"),
        (["--data_dir", "nowhere"], "no folder nowhere; in --data_dir"),
        (["--results", str(place.folder / "file")], f"cannot write {place.folder / 'file'}/tiny: Not a directory"),
    ):
        code, out, err = command(*words)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert says in err
    assert not (place.folder / "results").exists()


STRANGER = '''
from dataclasses import dataclass
from tunery import Regularizer, hookimpl

class Mine(Regularizer):
    """Pull the head's bias to zero."""
    name = "mine"
    summary = "a stranger's penalty"
    reference = "none"

    def attach(self, model, run):
        self.bias = model.classifier.bias

    def penalty(self, batch):
        return self.bias.square().sum()

    def detach(self, model):
        self.bias = None

@hookimpl
def tunery_regularizers():
    return [Mine]
'''


@pytest.mark.slow
def test_a_strangers_plugin(place: Any, run: Callable[..., Any], called: Callable[..., Any]):
    """Installed, it is a method by its name, and the report has it beside the suite's own, with where it comes from."""
    site = place.folder / "site"
    info = site / "strangers_penalty-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: strangers-penalty\nVersion: 2.5\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[tunery]\nmine = strangers_penalty\n", encoding="utf-8")
    (site / "strangers_penalty.py").write_text(STRANGER, encoding="utf-8")
    results = place.folder / "results" / "tiny"
    results.mkdir(parents=True)
    run(place.cells(seeds=1)[0], results)
    suite = ["bench", str(place.suite(seeds=1)), "--data_dir", str(place.data), "--results", str(results.parent)]
    ran = subprocess.run(
        [sys.executable, "-m", "tunery", *suite, "--methods", "full,mine", "--only", "first--*"],
        cwd=place.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("[2/2] first--mine--seed0: ")  # the suite's own was done
    found = {cell.method: cell for cell in read_results(results).cells}
    assert found.keys() == {"full", "mine"}
    assert found["mine"].inputs["plugins"]["regularizer mine"] == "strangers-penalty 2.5"
    assert found["mine"].score is not None
    code, out, _ = called("report", str(results))
    assert code == 0
    assert "mine" in out
    page = re.sub("(<[^>]*>)+", " ", (results / "report" / "report.html").read_text(encoding="utf-8"))
    assert "mine regularizer strangers-penalty 2.5 mine" in page
