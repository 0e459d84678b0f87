"""One probe over many models: each measured by itself, kept in a file of its own, and never twice."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PrinterCallback, set_seed

from ..registry.context import Subject, Task
from ..registry.errors import CompatibilityError, DataError, RecipeError
from .alignment import whole_of
from .arguments import TrainingArguments
from .artifacts import versions, write_json
from .data import TaskData, encode
from .data.metrics import add_perplexity, compute_metrics
from .finished import load_run
from .models import check_dtype, load_class, load_model, load_processor, reason, resolve
from .point_data import Evaluated, Source
from .points import Point
from .probing import measure
from .recipe import Chosen, Recipe, choose
from .run import check_writable
from .trainer import Trainer

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What became of one point.

    Attributes:
        point: the model.
        rows: its measurements, as ``measurements.jsonl`` holds them; empty where it failed.
        error: why it failed, in one line.
        note: that it had been measured before, or why it was measured anew.
        metric: the main metric of the task it was evaluated on, if any.
    """

    point: Point
    rows: Sequence[Row] = ()
    error: str = ""
    note: str = ""
    metric: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How points are measured.

    Attributes:
        probe: the probe's selection; empty where models are only evaluated.
        data: data keys that were given; none means what a run's result records of its own.
        output_dir: where each point's measurements are kept; ``None`` keeps nothing.
        seed: of the draws, the same for every point; and of the rows that are held out or sampled.
        batch_size: rows of an evaluation batch.
        dtype: precision plain models are loaded in.
        bf16, fp16: whether models are evaluated in mixed precision.
    """

    probe: str | Mapping[str, Any] = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    output_dir: Path | None = None
    seed: int = 42
    batch_size: int = 8
    dtype: str = "float32"
    bf16: bool = False
    fp16: bool = False


def measure_points(
    points: Sequence[Point], settings: Settings, seen: Callable[[Point, int], None] = lambda point, number: None
) -> Iterator[Measured]:
    """Measure one point after the other; one that fails is reported and the others go on.

    Args:
        points: what to measure. The error of a single one is raised.
        settings: how.
        seen: told before each point which one it is, and how many there were before.

    Raises:
        TuneryError: the probe or the data cannot be used, or the only point cannot be measured.
    """
    check_dtype(settings.dtype)
    chosen = choose(probes=[settings.probe]).chosen[0]
    source = Source(settings.data, settings.seed)
    source.of(None)  # what is wrong with data for all should not fail point by point
    if settings.output_dir is not None:
        check_writable(settings.output_dir)
        settings.output_dir.mkdir(parents=True, exist_ok=True)
    for number, point in enumerate(points):
        seen(point, number)
        try:
            yield _measured(point, chosen, source, settings)
        except Exception as error:  # whatever it is, the other models go on
            if len(points) == 1:
                raise
            yield Measured(point=point, error=" ".join(str(error).split()) or type(error).__name__)


def probe_run(probe: str | Mapping[str, Any], folder: str | Path) -> Sequence[Row]:
    """Measure a finished run or checkpoint with one probe; return rows as ``measurements.jsonl`` holds them.

    Raises:
        TuneryError: the probe or the run cannot be used.
    """
    return next(measure_points([Point(reference=str(folder))], Settings(probe=probe))).rows


def _measured(point: Point, chosen: Chosen, source: Source, settings: Settings) -> Measured:
    found = source.of(point)
    data = found.content if found else None
    metric = data.task.metrics[0] if data and data.task.metrics else ""
    if settings.output_dir is None:
        return Measured(point=point, rows=_measure(point, chosen, data, settings), metric=metric)
    path = settings.output_dir / point.file_name
    inputs = _inputs(point, chosen, found, settings)
    changed, note = _changed(path, inputs), ""
    if changed == []:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Measured(point=point, rows=kept["measurements"], note="measured before", metric=metric)
    if changed:
        note = f"measured anew: another {' and '.join(changed)}"
    rows = _measure(point, chosen, data, settings)
    where = {"reference": point.reference, "revision": point.revision, "tokens": point.tokens, "step": point.step}
    write_json(path, {"point": where, "inputs": inputs, "measurements": rows, "versions": versions()})
    return Measured(point=point, rows=rows, note=note, metric=metric)


def _inputs(point: Point, chosen: Chosen, data: Evaluated | None, settings: Settings) -> dict[str, Any]:
    """Return what a measurement depends on, in the form it has after reading it back from a file."""
    inputs = {
        "model": {"reference": point.reference, "revision": point.revision},
        "weights": point.weights(),
        "probe": {key: value for key, value in chosen.describe().items() if key != "kind"},
        "data": data.digest if data else None,
        "seed": settings.seed,
        "dtype": settings.dtype,
    }
    return dict(json.loads(json.dumps(inputs)))


def _changed(path: Path, inputs: Mapping[str, Any]) -> list[str] | None:
    """Return which inputs are others than those of the file; ``None`` without a file that can be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(kept["measurements"], list)
        return [name for name, value in inputs.items() if kept["inputs"].get(name) != value]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return None


def _measure(point: Point, chosen: Chosen, data: TaskData | None, settings: Settings) -> list[Row]:
    set_seed(settings.seed)
    with _subject(point, chosen, data, settings) as subject:
        try:
            found = measure(chosen.plugin, subject)
        except CompatibilityError as error:
            if subject.evaluate is not None:
                raise
            remedy = "name what to evaluate on: --dataset_name, --data_files, --train_file or --validation_file"
            raise CompatibilityError(error.asked, known=error.known, owner=point.label, remedy=remedy) from None
    name = chosen.plugin.name
    return [
        {"model": point.label, "probe": name, "name": m.name, "value": m.value, "unit": m.unit, **m.where}
        for m in found
    ]


@contextmanager
def _subject(point: Point, chosen: Chosen, data: TaskData | None, settings: Settings) -> Iterator[Subject]:
    """Load a point and give it what a probe of a training run is given; a run brings its pre-trained values."""
    if not point.is_run():
        task, source = data.task if data else None, (point.reference, point.revision)
        with _trainer(_plain_model(point, task, settings), task, data, source, settings) as trainer:
            yield trainer.subject()
        return
    assert point.folder is not None
    loaded = load_run(point.folder, with_reference=True)
    assert loaded.reference is not None
    Recipe((*loaded.recipe.chosen, chosen)).check(loaded.model, loaded.run)
    run = dataclasses.replace(loaded.run, seed=settings.seed)
    whole = whole_of(loaded.recipe.strategy, loaded.model, run)
    if data is None:
        yield Subject(model=loaded.model, run=run, reference=loaded.reference, whole=whole)
        return
    _check_fits(data.task, run.tasks, point)
    source = _processor_source(point.folder, loaded.manifest)
    with _trainer(loaded.model, data.task, data, source, settings) as trainer:
        run = dataclasses.replace(run, tasks=(data.task,))
        yield dataclasses.replace(trainer.subject(), run=run, reference=loaded.reference, whole=whole)


def evaluate_point(point: Point, data: TaskData, settings: Settings, split: str = "validation") -> dict[str, float]:
    """Evaluate a model on one split of ``data``; return its metrics by plain name, for language models ``perplexity`` too.

    With ``settings.probe``, what that probe measures of the split takes their place: its overall values.

    Raises:
        TuneryError: the model cannot be loaded, or the data or the probe do not fit it.
    """
    set_seed(settings.seed)
    if point.folder is not None and point.is_run():
        loaded = load_run(point.folder)
        _check_fits(data.task, loaded.run.tasks, point)
        model, source = loaded.model, _processor_source(point.folder, loaded.manifest)
    else:
        model, source = _plain_model(point, data.task, settings), (point.reference, point.revision)
    with _trainer(model, data.task, data, source, settings, split) as trainer:
        if settings.probe:
            return {m.name: m.value for m in measure(trainer.recipe.probes[0], trainer.subject()) if not m.where}
        trainer.remove_callback(PrinterCallback)
        metrics = trainer.evaluate()
    found = add_perplexity(metrics) if data.task.kind.is_language_modelling else metrics
    names = ("loss", "perplexity", *data.task.metrics)  # what a model writes is not scored here
    return {name: float(found[f"eval_{name}"]) for name in names if f"eval_{name}" in found}


@contextmanager
def _trainer(
    model: Any,
    task: Task | None,
    data: TaskData | None,
    source: tuple[str, str | None],
    settings: Settings,
    split: str = "validation",
) -> Iterator[Trainer]:
    """Yield a trainer that only evaluates; ``source`` is where the tokenizer or image processor is, and its revision."""
    processor = None if data is None else load_processor(source[0], data.task, source[1])
    rows = None if data is None else encode(data, processor)
    with tempfile.TemporaryDirectory() as folder:
        yield Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                probes=[settings.probe] if settings.probe else None,  # type: ignore[list-item]
                seed=settings.seed,
                per_device_eval_batch_size=settings.batch_size,
                bf16=settings.bf16,
                fp16=settings.fp16,
                report_to="none",
                disable_tqdm=True,
            ),
            task=task,
            eval_dataset=None if rows is None else getattr(rows, split),
            data_collator=None if rows is None else rows.data_collator,
            processing_class=processor,
            compute_metrics=compute_metrics(data.task) if data else None,
        )


def _check_fits(task: Task, trained: Sequence[Task], point: Point) -> None:
    if len(trained) > 1:
        raise DataError(
            f"data of one task for a run on {len(trained)}", owner=point.label, remedy="probe an export of one task"
        )
    if task.kind is not trained[0].kind or task.num_labels != trained[0].num_labels:
        asked = f"data of {_kind(task)} for a model of {_kind(trained[0])}"
        raise DataError(asked, owner=point.label, remedy="name other data")


def _kind(task: Task) -> str:
    return f"{task.kind.value} with {task.num_labels} labels" if task.num_labels else task.kind.value


def _plain_model(point: Point, task: Task | None, settings: Settings) -> Any:
    if task is not None:
        return load_model(point.reference, task, point.revision, settings.dtype)
    try:
        config = AutoConfig.from_pretrained(resolve(point.reference), revision=point.revision or "main")
    except Exception as error:  # noqa: BLE001  # a damaged config raises whatever its class raises
        there = "" if Path(point.reference).exists() else f"no folder {point.reference}, and "
        raise RecipeError(f"{there}cannot load model {point.reference!r}: {reason(error)}") from None
    if not config.architectures:
        raise RecipeError(f"{point.label} does not say its model class", remedy="name data, which tell the task")
    revision = point.revision or "main"
    return load_class(config.architectures[0], point.reference, revision=revision, dtype=settings.dtype)


def _processor_source(folder: Path, manifest: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return where a run's tokenizer or image processor is, in its folder, else with its base model; and the revision."""
    own = any((folder / name).is_file() for name in ("tokenizer_config.json", "preprocessor_config.json"))
    base = manifest["base_model"]
    return (str(folder), None) if own else (base["name_or_path"], base.get("revision"))
