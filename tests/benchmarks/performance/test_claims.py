"""The line a claim prints, and the exit code of a script."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tunery.benchmarks.performance import claims as claims_module
from tunery.benchmarks.performance.claims import Claim, Run, main, ratio_claim
from tunery.benchmarks.performance.paired import Estimate
from tunery.registry.errors import RecipeError

GOOD = Claim(name="step", value=1.004, goal=1.01, low=0.99, high=1.02, detail="ours 5 ms")
BAD = Claim(name="extra", value=300.0, goal=250.0, unit="us more")


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """How often a script asked to keep what it frees; the tests' own process goes on giving it back."""
    asked = []
    monkeypatch.setattr(claims_module, "keep_freed_memory", lambda: asked.append(None))
    return asked


def test_line():
    """Name, number, goal and verdict come first, in this order."""
    assert str(GOOD) == "step: 1.004 (<= 1.01) ok; 0.99 to 1.02; ours 5 ms"
    assert str(BAD) == "extra: 300 us more (<= 250 us more) short"


@pytest.mark.parametrize(("value", "ok"), [(1.0, True), (1.01, True), (1.0101, False), (float("nan"), False)])
def test_a_claim_is_met_up_to_its_goal(value, ok):
    """What could not be measured is short."""
    assert Claim(name="step", value=value, goal=1.01).ok is ok


def test_ratio_claim_takes_over_value_and_interval():
    """The median decides, not the interval around it."""
    claim = ratio_claim("step", Estimate(value=1.005, low=0.9, high=1.2), 1.01, detail=42)
    assert (claim.value, claim.low, claim.high, claim.detail, claim.ok) == (1.005, 0.9, 1.2, "42", True)


@pytest.mark.parametrize(
    ("claims", "code"), [([GOOD], 0), ([BAD], 1), ([GOOD, BAD], 1), ([BAD, GOOD], 1), ([], 1)], ids=str
)
def test_exit_code(claims, code, capsys, kept):
    """One short claim is enough for 1, wherever it stands; so is having claimed nothing."""
    assert main(lambda run: claims, "", []) == code
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [str(claim) for claim in claims]
    assert printed.err == ""
    assert len(kept) == 1


def test_claims_are_printed_as_they_are_measured(capsys):
    """The first line is out before the second measurement begins."""

    def claims(run: Run) -> Iterator[Claim]:
        yield GOOD
        assert capsys.readouterr().out == f"{GOOD}\n"
        yield BAD

    assert main(claims, "", []) == 1


def test_an_error_a_user_can_mend_is_one_line_and_2(capsys):
    """No traceback, and no claim either."""

    def claims(run: Run) -> Iterator[Claim]:
        raise RecipeError("model 'x': no package 'x'", remedy="pip install x")
        yield GOOD

    assert main(claims, "", []) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "model 'x': no package 'x'; pip install x\n"


def test_json_holds_the_claims_and_where_they_were_measured(tmp_path):
    """A file for machines, beside the lines for people."""
    file = tmp_path / "claims.json"
    assert main(lambda run: [GOOD, BAD], "", ["--quick", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert [(claim["name"], claim["value"], claim["goal"], claim["ok"]) for claim in report["claims"]] == [
        ("step", 1.004, 1.01, True),
        ("extra", 300.0, 250.0, False),
    ]
    assert report["claims"][1]["low"] is None
    assert report["quick"] is True
    assert {"python", "torch", "transformers", "cpus"} <= report["environment"].keys()


def test_json_into_no_folder_is_refused_before_anything_is_measured(tmp_path, capsys):
    """Minutes of measuring are not lost to a misspelt folder."""

    def claims(run: Run) -> list[Claim]:
        raise AssertionError("measured")

    with pytest.raises(SystemExit) as stop:
        main(claims, "", ["--json", str(tmp_path / "no" / "claims.json")])
    assert stop.value.code == 2
    assert "--json: there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "count"), [([], 30), (["--quick"], 9)])
def test_quick_takes_fewer_rounds(argv, count):
    """Warm-up comes on top."""
    calls: list[None] = []

    def claims(run: Run) -> Iterator[Claim]:
        times = run.interleave({"only": lambda: calls.append(None)}, rounds=30, quick_rounds=9, warm_up=2)
        assert len(times.seconds["only"]) == count
        yield GOOD

    assert main(claims, "", argv) == 0
    assert len(calls) == count + 2
