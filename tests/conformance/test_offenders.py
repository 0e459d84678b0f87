"""The laws can fail: plugins that each break one, in a distribution of their own, are found out by it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BROKEN = {
    "strategy": {
        "shifted": ["starts_as_the_base_model"],
        "unseeded": ["same_seed_gives_the_same_bits"],
        "meddling": [
            "changes_what_requires_a_gradient_and_nothing_else",
            "exports_what_others_load",
        ],
        "forgetful": ["loads_back_to_the_bit", "exports_what_others_load"],
        "local": ["same_losses_on_every_stage"],
        "stepwise": [],
        "untidy": ["leaves_the_model_as_prepared_after_a_stage"],
        "remembering": ["resumes_in_every_earlier_stage", "resumes_in_every_earlier_stage_on_every_stage"],
    },
    "regularizer": {
        "lawful": [],
        "summing": ["same_gradients_however_split"],
        "over_parameters": ["same_gradients_on_every_stage"],
        "staying": ["leaves_the_model_plain"],
        "leaky": ["adds_no_key"],
        "restless": ["off_is_not_there", "off_is_not_there_on_every_stage"],
        "idle": ["does_something"],
        "counting": ["resumes_as_if_never_killed", "resumes_on_every_stage"],
        "undocumented": ["documents_every_option"],
    },
    "probe": {
        "looking": [],
        "noisy": [
            "leaves_no_trace",
            "leaves_no_trace_on_every_stage",
            "training_goes_on_as_without",
            "training_goes_on_as_without_on_every_stage",
        ],
        "fair_weather": ["leaves_no_trace_when_it_fails"],
        "provincial": ["measures_the_same_on_every_stage"],
        "guessing": ["same_seed_gives_the_same_measurements"],
    },
}


def all_laws(kind: str) -> list[str]:
    """Every law that some offender of the kind breaks: what the lawful one has to keep."""
    return sorted({law for laws in BROKEN[kind].values() for law in laws})


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Whether each law was kept, by ``plugin::law``; one pytest for all of them, in an environment with the offenders."""
    folder = tmp_path_factory.mktemp("offenders")
    shutil.copy(Path(__file__).with_name("offenders.py"), folder)
    metadata = folder / "offenders-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: offenders\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tunery]\noffenders = offenders\n")
    lines, asked = ["from tunery.registry.conformance import ProbeLaws, RegularizerLaws, StrategyLaws"], []
    for kind, plugins in BROKEN.items():
        for plugin, laws in plugins.items():
            lines += [
                f"class Test_{plugin}({kind.title()}Laws):",
                f"    plugin, models, stages = {plugin!r}, ('bert_classifier',), ('zero3',)",
                "    traced_stages, strategies = stages, ('full',)",
            ]
            asked += [f"test_them.py::Test_{plugin}::test_{law}" for law in laws or all_laws(kind)]
    asked.append("test_them.py::Test_fair_weather::test_leaves_no_trace")
    (folder / "test_them.py").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "--junitxml=verdicts.xml",
        "-p",
        "no:cacheprovider",
        *asked,
    ]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    kept: dict[str, bool] = {}
    for case in ElementTree.parse(folder / "verdicts.xml").getroot().iter("testcase"):
        plugin = case.attrib["classname"].rpartition(".Test_")[2]
        law = case.attrib["name"].removeprefix("test_").partition("[")[0]
        broken = case.find("failure") is not None or case.find("error") is not None
        kept[f"{plugin}::{law}"] = kept.get(f"{plugin}::{law}", True) and not broken
    return kept


@pytest.mark.parametrize(
    ("plugin", "law"),
    [(plugin, law) for plugins in BROKEN.values() for plugin, laws in plugins.items() for law in laws],
)
def test_an_offender_is_found_out(verdicts: dict[str, bool], plugin: str, law: str) -> None:
    """The law it breaks fails for it."""
    assert verdicts[f"{plugin}::{law}"] is False


@pytest.mark.parametrize(
    ("plugin", "kind"), [("stepwise", "strategy"), ("lawful", "regularizer"), ("looking", "probe")]
)
def test_what_breaks_no_law_passes(verdicts: dict[str, bool], plugin: str, kind: str) -> None:
    """The same plugin without the offence keeps each of them."""
    assert [law for law in all_laws(kind) if not verdicts[f"{plugin}::{law}"]] == []


def test_a_fault_is_what_finds_the_fair_weather_probe(verdicts: dict[str, bool]) -> None:
    """It tidies up as long as nothing fails, so that only the law with the fault sees it."""
    assert verdicts["fair_weather::leaves_no_trace"]
