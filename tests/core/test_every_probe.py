"""Every probe of tunery, from Python on a bare model and from ``tunery probe`` on finished runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunery import probe_model
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.traces import anatomy_of, bits_of
from tunery.registry.errors import CompatibilityError
from tunery.registry.loading import load_plugins

PROBES = {  # and what it measures, among others
    "weight_distance": "distance",
    "gaussian:gammas=[0.1],draws=1": "sensitivity",
    "interpolation:lambdas=[0.0,0.5]": "curvature",
    "interpolation:direction=fine_tuning,lambdas=[-1.0]": "curvature",
    "hessian:draws=2,iterations=2": "top_eigenvalue",
    "hessian:method=forward,draws=2": "trace",
    "feature_drift": "cka",
    "noise_stability:draws=1": "noise_stability",
    "apoz": "apoz",
    "data_perturbation:leave_one_out=2,reruns=1": "leave_one_out",
}
CAUSAL = {"class_perplexity": "class_perplexity"}
PROXIES = {"gradient_gap": "gradient_gap"}
BASES = {"bert_classifier": PROBES, "llama_causal_lm": CAUSAL}


@pytest.mark.parametrize(("name", "probe"), [(name, probe) for name, probes in BASES.items() for probe in probes])
def test_on_a_bare_model(name: str, probe: str) -> None:
    """It measures, and the model is what it was."""
    model = MODELS[name].load(base_model(name, False))
    before, built = bits_of(model), anatomy_of(model)
    found = probe_model(model, probe, MODELS[name].rows(9))
    assert {m.name for m in found} >= {BASES[name][probe]}
    assert all(math.isfinite(m.value) for m in found)
    assert bits_of(model) == before
    assert anatomy_of(model) == built


@pytest.mark.parametrize("strategy", ["full", "lora:r=2"])
@pytest.mark.parametrize("probe", PROBES)
def test_on_a_finished_run(
    strategy: str, probe: str, finished: Callable[[str], Path], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """A table for people, or a line of JSON for each row."""
    code, out, err = cli("probe", probe, "--model", finished(strategy), "--json")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row["name"] for row in rows} >= {PROBES[probe]}
    assert all(math.isfinite(row["value"]) for row in rows)


@pytest.mark.parametrize("probe", [*CAUSAL, *PROXIES])
def test_what_does_not_fit_a_run_is_refused_in_a_line(
    probe: str, finished: Callable[[str], Path], cli: Callable[..., Any]
) -> None:
    """A classifier with a head has no completions, and is no stand-in."""
    code, out, err = cli("probe", probe, "--model", finished("full"))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert probe in err


def test_a_bare_model_is_no_stand_in() -> None:
    """Refused in a line that names the probe."""
    model = MODELS["bert_classifier"].load(base_model("bert_classifier", False))
    with pytest.raises(CompatibilityError, match="gradient_gap"):
        probe_model(model, "gradient_gap", MODELS["bert_classifier"].rows(4))


def test_every_probe_is_tried() -> None:
    """A new one of tunery needs a line above."""
    tried = {probe.partition(":")[0] for probes in (PROBES, CAUSAL, PROXIES) for probe in probes}
    probes = [entry for entry in load_plugins().catalog if entry.kind == "probe"]
    assert {entry.name for entry in probes if entry.origin.distribution == "tunery"} == tried
