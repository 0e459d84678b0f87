"""The cost model is the paper's formula, and what it predicts is what is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    ViTConfig,
)

from tunery.core.context import infer_task
from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.cost import Cost, mean_length, missed, multiplications, predict
from tunery.core.federated.resident import Resident
from tunery.core.federated.show import show_cost


def resident(
    tiny: Any, strategy: str, keys: Mapping[str, Any] = MappingProxyType({}), **config: Any
) -> tuple[Resident, Any]:
    options = build_federated_options(
        tiny.given(
            **{
                "strategy": strategy,
                "max_steps": None,
                "save_strategy": None,
                "report_to": None,
                "learning_rate": 1e-3,
                **keys,
            }
        )
    )
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **config))
    return Resident(model, infer_task(model), None, None, options.run), options


def test_multiplications_are_the_papers(tiny: Any):
    """d (V + S) + L (4 S d^2 + S^2 d) + 2 L S d d_ff + L S d."""
    shape = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 96}
    full, _ = resident(tiny, "full", **shape)
    S, d, L, V, ff = 7, 24, 3, 50, 96
    expected = d * (V + S) + L * (4 * S * d**2 + S**2 * d) + 2 * L * S * d * ff + L * S * d
    assert multiplications(full.model, full.trainer.run, S) == expected


def test_the_papers_settings_contradict_its_claim(tiny: Any):
    """At d = 768, r = 8, t = 10, q = 0.5: (2 / t) q d = 76.8 against 8 r = 64, so alignment sends more than LoRA."""
    shape = {"hidden_size": 768, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 3072}
    proxy, options = resident(tiny, "proxy_sub_fm:ratio=0.75,retained=[],r=8,realign_every=10,share=0.5", **shape)
    rows = [[{"input_ids": [1] * 16}] * 20]
    cost = predict(proxy, rows, options)
    biases, head = 0.5 * 768 / 10, 768 * 2 + 2
    assert cost.alignment_bytes == pytest.approx(4 * (76.8 * 768 + biases))
    assert cost.adapter_bytes == 4 * (64 * 768 + head)
    assert "1.16 x the adapter's bytes" in cost.verdict() and 'has it "usually smaller"' in cost.verdict()
    rare, options = resident(tiny, "proxy_sub_fm:ratio=0.75,retained=[],r=8,realign_every=40,share=0.5", **shape)
    assert "usually" not in predict(rare, rows, options).verdict()
    full, options = resident(tiny, "full", **shape)
    ratio = cost.multiplications / predict(full, rows, options).multiplications
    assert ratio == pytest.approx(0.5, abs=0.02)  # 6 d^2 instead of 12 d^2, and LoRA's own


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({"num_train_epochs": 3}, 3 * 18),
        ({"max_steps": 10, "num_train_epochs": 3}, 2 * 18),  # batches of 4, 4, 4, 4 and 2 rows
        ({"max_steps": 6, "gradient_accumulation_steps": 2}, 2 * 18),
    ],
)
def test_rows_of_a_round(tiny: Any, keys: dict[str, Any], rows: int):
    """A training step is two passes over its rows, and a round as many steps as the Trainer takes."""
    shape = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    full, options = resident(tiny, "full", keys, **shape)
    cost = predict(full, [[{"input_ids": [1] * 7}] * 18], options)
    assert cost.multiplications == pytest.approx(2 * rows * multiplications(full.model, full.trainer.run, 7))


def test_predicted_is_measured(tiny: Any, run_federation, tmp_path: Path):
    """Bytes of a real federation, kind by kind, are those predicted."""
    strategy = "proxy_sub_fm:r=2,ratio=0.5,retained=[0],realign_every=2,realign_steps=3"
    keys = {"strategy": strategy, "server_fraction": 0.2, "num_clients": 2, "client_fraction": 1.0, "num_rounds": 4}
    result = run_federation(tmp_path / "run", **keys)
    predicted, measured = result["cost"]["predicted"], result["cost"]["measured"]
    assert measured["adapter_bytes"] == predicted["adapter_bytes"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    sent = [row["bytes"]["down_stand_in"] for row in rows]
    assert sent[0] == 2 * predicted["stand_in_bytes_once"] and sent[1] == sent[3] == 0
    which = 3 * 8 * 4  # three tensors, eight of sixteen neurons in each
    assert sent[2] == 2 * (2 * predicted["alignment_bytes"] + which)
    statistics = (16 + 1) * 8  # counts of one layer's neurons, and tokens
    assert (
        predicted["statistics_bytes"] == statistics / 2 and measured["statistics_bytes"] == statistics / 4
    )  # not the last
    assert predicted["alignment_bytes_asked"] == predicted["alignment_bytes"]  # takes part in every round
    assert measured["seconds"] > 0
    assert predicted["multiplications"] > 0


@pytest.mark.parametrize(("share", "every"), [(0.1, 10), (0.25, 4), (1.0, 10), (0.5, 1)])
def test_what_a_client_has_missed(share: float, every: int):
    """The closed form is the mean over how long ago it was asked; who is always asked gets every alignment once."""
    gaps = [share * (1 - share) ** (gap - 1) * min(1, gap / every) for gap in range(1, 500)]
    assert missed(share, every) == pytest.approx(sum(gaps))


def test_what_cannot_be_counted_is_none(tiny: Any):
    """Of an architecture whose layers are not known nothing is predicted; an image is as many tokens as patches and one."""
    full, _ = resident(tiny, "full", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    size = {"embedding_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    electra = ElectraForSequenceClassification(ElectraConfig(vocab_size=50, intermediate_size=32, **size))
    assert multiplications(electra, full.trainer.run, 7) == 0.0
    sees = SimpleNamespace(config=ViTConfig(image_size=224, patch_size=16))
    assert mean_length([[{"pixel_values": None}]], sees) == 14 * 14 + 1


def test_the_table_of_a_dry_run(capsys: pytest.CaptureFixture[str]):
    """Sizes in units, and one line where aligning takes more than the adapter."""
    show_cost(
        Cost(
            multiplications=1.5e9,
            adapter_bytes=2000,
            stand_in_bytes=3_000_000,
            alignment_bytes=2400.0,
            alignment_bytes_asked=15_600.0,
            statistics_bytes=123.0,
            every=10,
        )
    )
    told = capsys.readouterr().out
    for words in (
        "1.5e+09",
        "2 kB",
        "3 MB",
        "alignment every 10 rounds, per round",
        "2.4 kB",
        "15.6 kB or more",
        "123 bytes",
        "1.20 x the adapter's bytes",
    ):
        assert words in told
    show_cost(Cost(multiplications=1.0, adapter_bytes=2000, stand_in_bytes=0))
    assert "alignment" not in capsys.readouterr().out
