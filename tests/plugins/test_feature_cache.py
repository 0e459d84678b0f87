"""Cached features: the same answers and losses, one run of the encoder a row, files, and when there is no caching."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

from tunery.core.context import infer_task, make_context
from tunery.core.recipe import choose
from tunery.plugins.feature_cache import READ_AT_THE_ENDS, _Store
from tunery.plugins.strategies.head import Head
from tunery.registry.conformance.models import LABELS
from tunery.registry.conformance.trials import Outcome, Trial, tiny_process
from tunery.registry.context import RunContext
from tunery.registry.errors import SelectionError

TEXT = sorted(READ_AT_THE_ENDS - {"vit"})


class Args:
    """What a context needs of training arguments."""

    seed = 0
    activation_checkpointing = False


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No features of other tests before or after."""
    _Store.recent = None
    yield
    _Store.recent = None


def tiny(model_type: str, labels: int = LABELS, seed: int = 0, **options: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if model_type == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    if model_type == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    if model_type in ("mistral", "olmo2", "qwen2", "qwen3"):
        sizes |= {"num_key_value_heads": 1, "head_dim": 8}
    if model_type == "vit":
        sizes |= {"image_size": 8, "patch_size": 4}
    else:
        sizes |= {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **sizes, num_labels=labels, initializer_range=0.3, **options)
    torch.manual_seed(seed)
    auto = AutoModelForImageClassification if model_type == "vit" else AutoModelForSequenceClassification
    return auto.from_config(config).eval()


def prepared(model: Any, **options: Any) -> tuple[Any, Head, RunContext]:
    run = make_context(model, Args(), [infer_task(model)])
    strategy = Head(Head.Config(**options))
    return strategy.prepare(model, run), strategy, run


def tokens(left: bool = False) -> dict[str, Tensor]:
    """Six rows of different lengths, padded on the right or on the left."""
    ids = torch.randint(3, 50, (6, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < 9 - torch.tensor([[0], [1], [2], [3], [0], [6]])).long()
    mask = mask.flip(-1) if left else mask
    return {"input_ids": ids * mask, "attention_mask": mask}


def counted(model: Any) -> list[int]:
    """Count the encoder's runs, by the embeddings', which every run begins with."""
    runs: list[int] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, args, _output: runs.append(len(args[0])))
    return runs


def answers(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("model_type", TEXT)
def test_same_answers(model_type: str, left: bool) -> None:
    """First computed, then found, in another order and another padding: the answers of the model without a cache."""
    inputs = tokens(left)
    expected = answers(tiny(model_type), inputs)
    model, *_ = prepared(tiny(model_type))
    runs = counted(model)
    torch.testing.assert_close(answers(model, inputs), expected, rtol=1e-5, atol=5e-6)
    assert runs == [1] * 6
    torch.testing.assert_close(answers(model, inputs), expected, rtol=1e-5, atol=5e-6)
    back = {name: value.flip(0) for name, value in inputs.items()}
    torch.testing.assert_close(answers(model, back), expected.flip(0), rtol=1e-5, atol=5e-6)
    assert len(runs) == 6
    if not left:
        short = {name: value[5:, :3] for name, value in inputs.items()}
        torch.testing.assert_close(answers(model, short), expected[5:], rtol=1e-5, atol=5e-6)
        assert len(runs) == 6


def test_same_answers_to_images() -> None:
    """Pictures have no pads and no tokens."""
    pixels = {"pixel_values": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    model, *_ = prepared(tiny("vit"))
    for _ in range(2):
        torch.testing.assert_close(answers(model, pixels), answers(tiny("vit"), pixels), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("model", ["bert_classifier", "vit_classifier"])
def test_same_losses(model: str) -> None:
    """Twenty steps, two and a half epochs and dropout in the encoder, have the losses of a run without a cache."""
    trial = Trial(model=model, strategy="head", steps=20, dropout=True, options={"learning_rate": 0.1})
    expected = trial.but(strategy="head:cache=false").run().logged("loss")
    assert trial.run().logged("loss") == pytest.approx(expected, rel=1e-5)


def test_encoder_runs_once_a_row_for_all_epochs_and_seeds(tmp_path: Path) -> None:
    """Three epochs and an evaluation cost 40 rows, another seed and another regularizer nothing."""
    trial = Trial(strategy="head", steps=15)
    with tiny_process():
        for number, changes in enumerate(({}, {"seed": 8}, {"regularizers": ("mhloss:heads=3",)})):
            trainer = trial.but(**changes).trainer(tmp_path / str(number))
            runs = counted(trainer.model)
            trainer.train()
            trainer.evaluate()
            assert len(runs) == (40 if number == 0 else 0)


def test_another_head_finds_them() -> None:
    """Features are those of the encoder: a head of another width, even, makes use of them."""
    first, *_ = prepared(tiny("bert"))
    answers(first, tokens())
    encoder = first.bert.state_dict()
    second = tiny("bert", labels=5, seed=1)
    second.bert.load_state_dict(encoder)
    model, *_ = prepared(second)
    runs = counted(model)
    answers(model, tokens())
    assert runs == []


def test_other_weights_are_another_encoder() -> None:
    """A model that differs in one weight, or in its config, finds nothing."""
    answers(prepared(tiny("bert"))[0], tokens())
    changed = tiny("bert")
    with torch.no_grad():
        changed.bert.encoder.layer[0].attention.self.query.weight[0, 0] += 1e-3
    for other in (changed, tiny("bert", layer_norm_eps=1e-5)):
        model, *_ = prepared(other)
        runs = counted(model)
        answers(model, tokens())
        assert len(runs) == 6


def test_resumed_in_a_new_process_it_has_the_same_bits() -> None:
    """Features computed again, in other batches, are the same bits: so are the weights of a resumed run."""
    trial = Trial(strategy="head", steps=6, save=True, dropout=True)
    straight = trial.run().bits
    _Store.recent = None
    assert trial.run(resume=5).bits == straight


def test_perturbed_weights_are_not_cached() -> None:
    """A probe that disturbs the encoder measures the disturbed one, and finds the old answers afterwards."""
    model, _, run = prepared(tiny("bert"))
    before = answers(model, tokens())
    weights = list(model.bert.parameters())
    with run.sharding.perturbed(weights), torch.no_grad(), run.sharding.written(weights):
        for weight in weights:
            weight.mul_(1.5)
        disturbed = answers(model, tokens())
        expected = tiny("bert")
        for own in expected.bert.parameters():
            own.mul_(1.5)
        torch.testing.assert_close(disturbed, answers(expected, tokens()))
    assert torch.equal(answers(model, tokens()), before)


def test_who_asks_for_more_gets_it() -> None:
    """Hidden states come from the encoder itself."""
    model, *_ = prepared(tiny("bert"))
    with torch.no_grad():
        shown = model(**tokens(), output_hidden_states=True)
        expected = tiny("bert")(**tokens(), output_hidden_states=True)
    for mine, theirs in zip(shown.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs)


# ---- strategies of several stages

LP_FT, SURT = "lp_ft:head_epochs=3", "surt:lm_epochs=1,tuning=head"
TRAINED_HEAD = {"lp_ft": "stages/head/checkpoint-7", "surt": "checkpoint-7"}  # amid the second epoch of the head alone


def staged(strategy: str) -> Trial:
    """Fifteen steps of the head alone, dropout in the encoder; for LP-FT then five of everything.

    By gradient descent: Adam makes a step of what is rounding, as an attention key's bias has it for a gradient.
    """
    steps, options = 5 if strategy.startswith("lp_ft") else 15, {"optim": "sgd", "learning_rate": 0.1}
    return Trial(strategy=strategy, steps=steps, dropout=True, tokenizer=True, options=options)


def losses_of(outcome: Outcome) -> list[float]:
    """Return the losses of every stage."""
    earlier = [json.loads(path.read_text()) for path in outcome.folder.glob("stages/*/trainer_state.json")]
    return [row["loss"] for state in earlier for row in state["log_history"] if "loss" in row] + outcome.logged("loss")


@pytest.mark.parametrize("strategy", [LP_FT, SURT])
def test_stages_have_the_losses_and_weights_of_runs_without_a_cache(strategy: str) -> None:
    """Up to rounding: rows are encoded one by one. Another seed's encoder, in memory from before, is not taken for its own."""
    trial = staged(strategy)
    trial.but(seed=8).run()
    expected, found = trial.but(strategy=f"{strategy},cache=false").run(), trial.run()
    assert len(losses_of(found)) == 20
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-5)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", [LP_FT, SURT])
def test_stages_run_a_frozen_encoder_once_a_row(strategy: str, tmp_path: Path) -> None:
    """Single rows while the head trains alone, whole batches before or after; what was scored first is scored anew."""
    with tiny_process():
        trainer = staged(strategy).trainer(tmp_path)
        trainer.evaluate()
        runs = counted(trainer.model)
        trainer.train()
        alone, whole = [1] * 40, [8] * 5
        assert runs == (alone + whole if strategy == LP_FT else whole + alone)
        assert ("forward" in vars(trainer.model.bert)) == (strategy == SURT)
        before = trainer.evaluate()["eval_loss"]
        trainer.recipe.strategy.export(trainer.model, trainer.run)
        assert "forward" not in vars(trainer.model.bert)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("strategy", [LP_FT, SURT])
def test_stages_resumed_in_a_new_process_have_the_same_bits(strategy: str) -> None:
    """Killed amid the head's training, when only some rows are cached."""
    trial = staged(strategy).but(save=True)
    straight = trial.run().bits
    _Store.recent = None
    assert trial.run(resume=TRAINED_HEAD[strategy.partition(":")[0]]).bits == straight


def test_head_finds_the_files_of_another_strategys_first_stage(tmp_path: Path) -> None:
    """The frozen encoder is the same one."""
    folder = tmp_path / "features"
    staged(f"{LP_FT},cache_dir={folder}").run()
    _Store.recent = None
    with tiny_process():
        trainer = staged(f"head:cache_dir={folder}").trainer(tmp_path / "run")
        runs = counted(trainer.model)
        trainer.train()
    assert runs == []


# ---- files


def test_files_are_found_by_a_later_process(tmp_path: Path) -> None:
    """A run files its features once; a later one reads them instead of running the encoder, and adds nothing."""
    trial = Trial(strategy=f"head:cache_dir={tmp_path / 'features'}", steps=5)
    first = trial.run()
    (file,) = (tmp_path / "features").glob("*/*.safetensors")
    assert load_file(file)["features"].shape == (40, 3, 16)
    _Store.recent = None
    with tiny_process():
        trainer = trial.but(seed=7).trainer(tmp_path / "second")
        runs = counted(trainer.model)
        trainer.train()
    assert runs == []
    assert list((tmp_path / "features").glob("*/*")) == [file]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses == first.logged("loss")


def test_damaged_file_is_named_and_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file cut short costs a warning and the encoder's run."""
    model, strategy, run = prepared(tiny("bert"), cache_dir=str(tmp_path))
    expected = answers(model, tokens())
    strategy.export(model, run)
    (file,) = tmp_path.glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    _Store.recent = None
    again, *_ = prepared(tiny("bert"), cache_dir=str(tmp_path))
    runs = counted(again)
    with caplog.at_level(logging.WARNING, logger="tunery"):
        assert torch.equal(answers(again, tokens()), expected)
    assert len(runs) == 6
    assert file.name in caplog.text


def test_filed_when_the_run_is_gone(tmp_path: Path) -> None:
    """What is scored after training is filed once the run is garbage, even while another model is built on no device."""
    model, strategy, run = prepared(tiny("bert"), cache_dir=str(tmp_path))
    answers(model, tokens())
    with torch.device("meta"):
        del model, strategy, run
        gc.collect()
    (file,) = tmp_path.glob("*/*.safetensors")
    assert load_file(file)["features"].shape == (6, 3, 16)


def test_ranks_share_files(tmp_path: Path) -> None:
    """Each of two ranks files what it has seen, and the next run reads both."""
    trial = Trial(strategy=f"head:cache_dir={tmp_path}", steps=5)
    losses = trial.run("ddp").logged("loss")
    keys = [bytes(key) for file in tmp_path.glob("*/*.safetensors") for key in load_file(file)["keys"].tolist()]
    assert len(set(keys)) == 40
    assert losses == pytest.approx(trial.run().logged("loss"), rel=1e-5)


# ---- where there is none


@pytest.mark.parametrize("unknown", [True, False], ids=["unknown head", "cache=false"])
def test_without_a_cache_the_encoder_runs_every_time(unknown: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An architecture whose head may read anything is left alone, and the log says so; an option does the same."""
    with caplog.at_level(logging.INFO, logger="tunery"):
        base = tiny("electra", embedding_size=16) if unknown else tiny("bert")
        model, *_ = prepared(base, cache=unknown)
    runs = counted(model)
    for _ in range(2):
        answers(model, tokens())
    assert runs == [6, 6]
    assert ("runs the encoder every time" in caplog.text) == unknown


def test_export_leaves_nothing_behind() -> None:
    """The exported encoder has its own forward method."""
    model, strategy, run = prepared(tiny("bert"))
    assert strategy.export(model, run) is model
    assert "forward" not in vars(model.bert)


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ("head:cache=false,cache_dir=kept", "with cache=false nothing is kept"),
        ("surt:cache_dir=kept", "with tuning=full no encoder is frozen"),
    ],
)
def test_a_folder_that_nothing_is_kept_in_is_refused(selection: str, words: str) -> None:
    """One line says which other option it contradicts."""
    with pytest.raises(SelectionError, match=words) as caught:
        choose(selection)
    assert "\n" not in str(caught.value)
