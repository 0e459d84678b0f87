"""What a study leaves: tables, pictures, numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from tunery.benchmarks.studies.report import Finding, Run, main


def findings(run: Run) -> Iterator[Finding]:
    """Yield one finding with a picture and one without."""
    sample = torch.rand(run.count(5, 2), generator=run.generator()).tolist()
    yield Finding(
        name="drawn",
        title="[x; y] is no markup",
        columns=("k", "value"),
        rows=list(enumerate(sample)),
        verdict="[bold] stays",
        draw=lambda axes: axes.plot(sample, label="line"),
    )
    yield Finding(name="plain", title="t", columns=("a", "b", "c"), rows=[(True, None, "x")], verdict="v")


def run(out: Path, *flags: str) -> dict:
    """Run the study and return its file."""
    assert main(findings, "example", "what it is", [*flags, "--output_dir", str(out)]) == 0
    return json.loads((out / "results.json").read_text())


def test_files_and_tables(tmp_path, capsys):
    """Brackets are printed as they are; a picture is a PNG; nothing else is left."""
    result = run(tmp_path / "a" / "b")
    printed = capsys.readouterr().out
    assert "[x; y] is no markup" in printed and "[bold] stays" in printed
    assert "yes" in printed and "-" in printed
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"results.json", "drawn.png"}
    with Image.open(tmp_path / "a" / "b" / "drawn.png") as picture:
        assert picture.format == "PNG"
    assert result["findings"]["plain"]["rows"] == [{"a": True, "b": None, "c": "x"}]
    assert result["findings"]["drawn"]["verdict"] == "[bold] stays"
    assert (result["study"], result["quick"], result["seed"]) == ("example", False, 0)
    assert "torch" in result["versions"]


def test_seed_decides_and_quick_is_smaller(tmp_path):
    """The same seed gives the same file, another seed other numbers."""
    first, again = (run(tmp_path / name, "--seed", "3")["findings"] for name in "ab")
    other, quick = (
        run(tmp_path / "c", "--seed", "4")["findings"],
        run(tmp_path / "d", "--quick", "--seed", "3")["findings"],
    )
    assert first == again
    assert first != other
    assert quick["drawn"]["rows"] == first["drawn"]["rows"][:2]


def test_threads_are_given_back(tmp_path):
    """The study runs on one thread, its caller on as many as before."""
    before = torch.get_num_threads()
    seen = []
    torch.set_num_threads(2)
    try:
        main(lambda run: seen.append(torch.get_num_threads()) or [], "example", "", ["--output_dir", str(tmp_path)])
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_output_dir_that_cannot_be_made(tmp_path, capsys):
    """One line, before anything is measured."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit) as stop:
        main(lambda run: pytest.fail("measured"), "example", "", ["--output_dir", str(file)])
    assert stop.value.code == 2
    assert f"--output_dir: {file} cannot be made: File exists" in capsys.readouterr().err
