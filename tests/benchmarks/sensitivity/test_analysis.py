"""What planted scores say: the optimum, the inflection points, and which of the paper's scenarios it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from tunery.benchmarks.sensitivity.analysis import IN_DOMAIN, OUT_OF_DOMAIN, analyse
from tunery.benchmarks.sensitivity.cells import Scores
from tunery.benchmarks.sensitivity.pictures import draw_all
from tunery.benchmarks.sensitivity.plan import BASE, Cell
from tunery.core.points import Point

TOKENS = (1e9, 2e9, 4e9, 8e9, 1.6e10)
POINTS = [Point(reference=f"m{number}", tokens=tokens) for number, tokens in enumerate(TOKENS)]
RATES = (1e-4, 2e-4, 4e-4)


def planted(optimum, in_domain, out_of_domain):
    """Return scores whose best rate is ``optimum[n]``, with these perplexities there; seeds differ by a little."""
    scores = {}
    for number, point in enumerate(POINTS):
        scores[Cell(point, BASE, 0)] = Scores(validation=30.0, test=30.0, out_of_domain=20.0 - number)
        for rate in RATES:
            away = abs(RATES.index(rate) - RATES.index(optimum[number]))
            for seed in range(3):
                noise = 0.001 * ((7 * seed + 3 * number) % 5)
                scores[Cell(point, rate, seed)] = Scores(
                    validation=in_domain[number] + away + noise,
                    test=in_domain[number] + away + noise,
                    out_of_domain=out_of_domain[number] * rate / optimum[number] + noise,
                    distance=rate * 1e4 * (1 + 0.1 * number),
                )
    return scores


FALLS, RISES = (9.0, 8.0, 7.0, 6.5, 6.0), (9.0, 8.0, 7.0, 8.0, 9.5)
CONSTANT, SLOW, QUICK = [4e-4] * 5, [4e-4, 4e-4, 4e-4, 2e-4, 2e-4], [4e-4, 2e-4, 2e-4, 1e-4, 1e-4]


@pytest.mark.parametrize(
    ("optimum", "in_domain", "out_of_domain", "says"),
    [
        (CONSTANT, RISES, RISES, "scenario 1"),
        (SLOW, FALLS, RISES, "scenario 2"),
        (QUICK, FALLS, FALLS, "scenario 3"),
        (QUICK, RISES, FALLS, "none of the paper's scenarios"),
    ],
)
def test_scenarios(optimum, in_domain, out_of_domain, says):
    """The paper's three, and what is none of them."""
    found = analyse(planted(optimum, in_domain, out_of_domain), POINTS)
    assert found.optimal == optimum
    assert found.scenario().startswith(says)
    assert (found.tuned.inflection(OUT_OF_DOMAIN).at == 4e9) == (out_of_domain is RISES)
    assert (found.tuned.inflection(IN_DOMAIN).at == 4e9) == (in_domain is RISES)


def test_what_is_said():
    """Inflection points at every rate and tuned, the law of the distance, the scenario."""
    found = analyse(planted(SLOW, FALLS, RISES), POINTS)
    said = found.sentences()
    assert "out-of-domain perplexity with the best learning rate: degrades beyond 4B tokens, 95 % 4B-4B" in said
    assert "in-domain perplexity with the best learning rate: none up to 16B tokens" in said
    assert said[-2].startswith("distance grows as learning rate to the 1.00 ... 1.00")
    assert "a factor of at most 1.40" in said[-2]
    assert "goes from 0.0004 to 0.0002, a factor of 0.5" in said[-1]
    assert "for 3 of 5 checkpoints the least or largest that was tried" in said[-1]
    assert found.sensitivity(4e-4)[0] == pytest.approx([9.0 - 20.0 + 0.001 * ((7 * seed) % 5) for seed in range(3)])
    assert [row["optimal learning rate"] for row in found.table()] == SLOW


def test_a_base_that_degrades_itself_is_named():
    """Where the checkpoint as it is gets worse too, as with repeated data, fine-tuning is not to blame."""
    scores = planted(SLOW, FALLS, RISES)
    for number, point in enumerate(POINTS):
        scores[Cell(point, BASE, 0)] = Scores(validation=30.0, test=30.0, out_of_domain=20.0 + number)
    line = "out-of-domain perplexity with the best learning rate: degrades beyond 4B tokens, 95 % 4B-4B"
    assert f"{line}; so does the model as it is, which is not fragility" in analyse(scores, POINTS).sentences()


def test_incomplete_checkpoints_are_left_out():
    """One lacks a learning rate, one has no score before fine-tuning."""
    scores = planted(CONSTANT, FALLS, FALLS)
    del scores[Cell(POINTS[1], RATES[0], 0)], scores[Cell(POINTS[2], BASE, 0)]
    found = analyse(scores, POINTS)
    assert found.labels == ["m0", "m3", "m4"]
    assert analyse({}, POINTS) is None


def test_one_seed_tells_no_scenario():
    """A rise of one run may be chance."""
    scores = {cell: found for cell, found in planted(SLOW, FALLS, RISES).items() if cell.seed == 0}
    assert analyse(scores, POINTS).scenario().startswith("no scenario can be told")


def unordered():
    """Return the analysis of scores that rise, of models whose names say nothing of an order."""
    named = {point: Point(reference=f"org/{name}") for point, name in zip(POINTS, "edcba", strict=True)}
    scores = planted(SLOW, FALLS, RISES)
    return analyse({Cell(named[c.point], c.learning_rate, c.seed): s for c, s in scores.items()}, list(named.values()))


def test_models_in_no_order_turn_nowhere():
    """The place of a name in a list is nothing beyond which to degrade, nor a scenario of more pre-training."""
    said = unordered().sentences()
    assert len(said) == 1
    assert said[0].startswith("distance grows as learning rate")
    assert list(unordered().table()[0])[:2] == ["model", "in-domain before"]


def test_one_place_turns_nowhere():
    """There is none before it."""
    scores = {cell: found for cell, found in planted(SLOW, FALLS, RISES).items() if cell.point == POINTS[0]}
    said = analyse(scores, POINTS).sentences()
    assert not any("up to" in line or "beyond" in line for line in said)


@pytest.mark.parametrize("ordered", [True, False])
def test_models_in_no_order_are_drawn_side_by_side(ordered: bool, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """No line joins them, none says where they turn, and each is called by its name."""
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (figures.append(figure), path.write_bytes(b"")))
    draw_all(analyse(planted(SLOW, FALLS, RISES), POINTS) if ordered else unordered(), tmp_path, "planted")
    *over_models, distance = figures
    axes = [ax for figure in over_models for ax in figure.axes]
    names = [[text.get_text() for text in ax.get_xticklabels()] for ax in axes]
    places = [line for ax in axes for line in ax.lines if len(line.get_xdata()) == len(POINTS)]
    turns = [line for ax in axes for line in ax.lines if len(set(np.ravel(line.get_xdata()))) == 1]
    joined = [line for line in places if line.get_linestyle() != "None"]
    legend = [text.get_text() for text in distance.axes[0].get_legend().get_texts()]
    if ordered:
        assert names[0] == ["1B", "2B", "4B", "8B", "16B"] and joined and len(turns) == 1
        assert legend[0] == "1B tokens"
    else:
        assert all(found == list("edcba") for found in names) and places and not joined and not turns
        assert {ax.get_xlabel() for ax in axes} == {""}
        assert legend == list("edcba")


def test_pictures(tmp_path):
    """Figures 4, 5, 6 and 8."""
    names = draw_all(analyse(planted(SLOW, FALLS, RISES), POINTS), tmp_path, "planted")
    assert len(names) == 4
    assert all((tmp_path / name).stat().st_size > 10_000 for name in names)
