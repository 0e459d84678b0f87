"""``tunery report`` as a user calls it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunery.benchmarks.regression import compare_to_baseline
from tunery.benchmarks.reporting.words import MINUS
from tunery.benchmarks.results import read_results, sealed
from tunery.core.commands import main

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run ``tunery ARGUMENTS`` in this process; return its exit code and what it printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tunery", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def copy(made_up: Path, tmp_path: Path) -> Path:
    """A made-up suite's folder of one's own, inside ``results/``."""
    return Path(shutil.copytree(made_up, tmp_path / "results" / "made_up"))


def test_report(cli: Cli, copy: Path, monkeypatch: pytest.MonkeyPatch):
    """Without any argument, the only suite in ./results is reported; the files lie beside its results."""
    monkeypatch.chdir(copy.parents[1])
    code, out, err = cli("report")
    assert (code, err) == (0, "")
    assert "made_up, against fine_tune" in out
    assert "mmr: +" in out
    names = {path.name for path in (copy / "report").iterdir()}
    assert names >= {"report.md", "report.tex", "statistics.csv", "pairs.csv", "runs.csv"}
    assert (copy / "report" / "pairs.csv").read_text().count("\naverage,") == 10
    first = {path.name: path.read_bytes() for path in (copy / "report").iterdir()}
    assert cli("report")[0] == 0
    assert {path.name: path.read_bytes() for path in (copy / "report").iterdir()} == first


def test_damaged_files_are_named(cli: Cli, copy: Path, tmp_path: Path):
    """A file with a flipped digit is said to be damaged, and the table is what it would be without it."""
    (copy / "rte--mmr--seed0.json").unlink()
    assert cli("report", copy, "--output_dir", tmp_path / "without")[0] == 0
    broken = copy / "rte--mmr--seed1.json"
    twin = json.loads(broken.read_text())
    twin["seed"] = 0
    (copy / "rte--mmr--seed0.json").write_text(json.dumps(twin))
    code, out, _ = cli("report", copy, "--output_dir", tmp_path / "with")
    assert code == 0
    assert "damaged: rte--mmr--seed0.json does not match its hash; moved to" in out
    same = "statistics.csv"
    assert (tmp_path / "with" / same).read_bytes() == (tmp_path / "without" / same).read_bytes()


def test_damaged_files_of_earlier_results_are_named(cli: Cli, copy: Path, tmp_path: Path):
    """What is missing from a comparison because its file was damaged is told too, wherever it lay."""
    earlier = tmp_path / "earlier"
    shutil.copytree(copy, earlier)
    (earlier / "rte--mmr--seed0.json").write_text("half")
    code, out, _ = cli("report", copy, "--against", earlier)
    assert code == 0
    assert f"moved to {earlier}/damaged/rte--mmr--seed0.json" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "no folder nowhere; tunery bench SUITE writes one"),
        (["{results}/made_up", "--baseline", "mmmr"], "did you mean 'mmr'?"),
        (["{results}/made_up", "--output_dir", "{results}/made_up/suite.json"], "cannot write"),
        (["{results}/made_up", "--against", "nowhere"], "no folder nowhere"),
    ],
)
def test_bad_input(arguments: list[str], says: str, cli: Cli, copy: Path):
    """What cannot be done is said in one line."""
    code, _, err = cli("report", *(item.format(results=copy.parent) for item in arguments))
    assert code == 2
    assert len(err.splitlines()) == 1
    assert says in err


def test_several_suites(cli: Cli, copy: Path):
    """With two suites in the folder, both are named."""
    shutil.copytree(copy, copy.parent / "second")
    code, _, err = cli("report", copy.parent)
    assert (code, "known: made_up, second; name one of the suites in it" in err) == (2, True)


def test_baseline_is_kept(cli: Cli, copy: Path, tmp_path: Path):
    """The file that ``tunery bench --check`` reads: against it, the same results are not worse."""
    assert cli("report", copy, "--write_baseline", tmp_path / "baseline.json")[0] == 0
    assert compare_to_baseline(read_results(copy), tmp_path / "baseline.json").ok


def test_against_earlier_results(cli: Cli, copy: Path, cells: Any, tmp_path: Path):
    """Each cell is compared with itself: 2 points less for one method shows, what is unchanged does not."""
    later = tmp_path / "later"
    shutil.copytree(copy, later)
    rng = iter(range(100))
    for path in sorted(later.glob("*--mmr--*.json")):
        content = json.loads(path.read_text())
        content["metrics"]["accuracy"] -= 0.02 + 0.0001 * (next(rng) % 7)
        path.write_text(json.dumps(sealed(content)))
    code, out, _ = cli("report", later, "--against", copy)
    assert code == 0
    rows = [line.split() for line in out[out.index("against the same cells") :].splitlines() if "average" in line]
    change = {row[1]: row[7] for row in rows}
    assert change["mmr"].startswith(f"{MINUS}2.0")
    assert {change[method] for method in ("fine_tune", "mhloss", "lora")} == {"0.00"}
    assert "## against the same cells" in (later / "report" / "report.md").read_text()
