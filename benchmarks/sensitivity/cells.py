"""One cell: a checkpoint is fine-tuned and scored, in and out of domain; one sealed file a cell, and none is done twice."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.artifacts import versions, write_json
from ...core.data import DataArguments, TaskData, load_task_data
from ...core.models import resolve
from ...core.options import build_options
from ...core.point_data import digest_of, evaluation_arguments
from ...core.points import Point
from ...core.probe_points import Settings, evaluate_point
from ...core.probing import MEASUREMENTS
from ...core.recipe import choose
from ...core.run import train
from ...registry.errors import DataError
from ..claims import claimed
from ..inputs import differences
from ..results import digest, sealed
from .plan import BASE, PERPLEXITY, Cell, Plan

WORK = ".work"
_QUIET = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
_DISTANCE = "weight_distance"
_SPLIT = {"split_seed": 0}  # the same rows for every seed


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a cell came to; perplexities.

    Attributes:
        validation: in domain, what learning rates are tuned on.
        test: in domain, what is reported; the validation split's where there is no test split.
        out_of_domain: on text like that of pre-training.
        distance: L2 distance between the weights before and after; 0 without fine-tuning.
        accuracy: in domain, on the same rows as ``test``, where classes are scored.
    """

    validation: float
    test: float
    out_of_domain: float
    distance: float = 0.0
    accuracy: float | None = None


@dataclass
class Study:
    """A plan at work: its data, read once, and its folder of results.

    Attributes:
        plan: what is done.
        folder: of the results, one file a cell.
    """

    plan: Plan
    folder: Path
    _weights: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.in_domain = _data(self.plan.in_domain, "in_domain")
        self.out_of_domain = _data(self.plan.out_of_domain, "out_of_domain")
        self.splits = [name for name in ("validation", "test") if name in self.in_domain.splits]
        if self.plan.probe:
            _check_classes(self)
        self._digests = [
            digest_of(self.in_domain, self.in_domain.splits),
            digest_of(self.out_of_domain, ["validation"]),
        ]

    def inputs(self, cell: Cell) -> dict[str, Any]:
        """Return what a cell's result depends on."""
        key = cell.point.label
        if key not in self._weights:
            self._weights[key] = cell.point.weights() or resolve(cell.point.reference)
        return dict(
            json.loads(
                json.dumps(
                    {
                        "model": self._weights[key],
                        "revision": cell.point.revision,
                        "learning_rate": cell.learning_rate,
                        "seed": cell.seed,
                        "rows": self._digests,
                        "training": self.plan.training if cell.learning_rate != BASE else _loading(self.plan),
                        **({"metric": self.plan.metric} if self.plan.probe else {}),
                    }
                )
            )
        )

    def path(self, cell: Cell) -> Path:
        """Return the result file of a cell."""
        return self.folder / f"{cell.name}.json"

    def found(self, cell: Cell) -> tuple[Scores | None, str]:
        """Return a cell's scores if it is done, and why it is not."""
        try:
            content = json.loads(self.path(cell).read_text(encoding="utf-8"))
            if content["sha256"] != digest(content):
                return None, "the file does not match its hash"
            changed = differences(content["inputs"], self.inputs(cell))
            return (None, f"changed: {', '.join(changed)}") if changed else (Scores(**content["scores"]), "")
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError, KeyError, TypeError):
            return None, "the file is damaged"


def _data(keys: Mapping[str, Any], name: str) -> TaskData:
    if not any(keys.get(key) for key in ("dataset_name", "data_files", "train_file", "validation_file", "test_file")):
        raise DataError(f"{name} names no data", remedy="give dataset_name, data_files or train_file")
    arguments = evaluation_arguments(keys) if name == "out_of_domain" else DataArguments(**{**_SPLIT, **keys})
    data = load_task_data(arguments, seed=0)
    if not data.task.kind.is_language_modelling:
        remedy = "give task_kind: causal_lm, with text_columns: [prompt, completion] for a classification"
        raise DataError(f"{name} is {data.task.kind.value}, which has no perplexity", remedy=remedy)
    return data


def _check_classes(study: Study) -> None:
    """Refuse what the probe would refuse only after training."""
    data = study.in_domain
    most = choose(probes=[study.plan.probe]).chosen[0].plugin.config.max_classes
    for name in study.splits:
        completions = [data.splits[name][column] for column in data.columns.text[1:]]
        found = len(set(zip(*completions, strict=True)))
        if not 2 <= found <= most:
            raise DataError(
                f"in_domain has {found} different completions in {name!r}, which are no classes",
                remedy=f"give text_columns: [prompt, completion], or metric: {study.plan.scored}:max_classes=N",
            )


def run_cells(study: Study, cells: Sequence[Cell], tell: Callable[[str], None]) -> Iterator[tuple[Cell, Scores | str]]:
    """Do every cell that is not done, one after the other; one that fails does not stop the others.

    Args:
        study: the plan at work.
        cells: what to do.
        tell: told why a cell with a file is done again, and what others have.

    Yields:
        Each cell with its scores, or with its error in one line.
    """
    work = study.folder / WORK
    work.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        scores, why = study.found(cell)
        if scores is None and why:
            tell(f"{cell.name}: {why}")
        if scores is None:
            with claimed(work, cell.name) as claim:
                if claim is None:
                    yield cell, "another worker has it"
                    continue
                try:
                    scores = study.found(cell)[0] or _do(study, cell, work)
                except Exception as error:  # noqa: BLE001  # whatever it is, the other cells go on
                    yield cell, " ".join(str(error).split()) or type(error).__name__
                    continue
        yield cell, scores


def _do(study: Study, cell: Cell, work: Path) -> Scores:
    """Fine-tune and score a cell, and write its file; the weights are not kept."""
    place = Path(tempfile.mkdtemp(prefix=f"{cell.name}.run-", dir=work))
    try:
        scores = _base(study, cell) if cell.learning_rate == BASE else _fine_tuned(study, cell, place / "run")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    content = {"inputs": study.inputs(cell), "scores": vars(scores), "versions": versions()}
    write_json(study.path(cell), sealed(json.loads(json.dumps(content))))
    return scores


def _base(study: Study, cell: Cell) -> Scores:
    return _scores(study, cell.point, cell, _in_domain(study, cell.point, cell))


def _fine_tuned(study: Study, cell: Cell, place: Path) -> Scores:
    options = build_options(
        {
            **_QUIET,
            "model_name_or_path": cell.point.reference,
            **({"model_revision": cell.point.revision} if cell.point.revision else {}),
            **_SPLIT,
            **study.plan.in_domain,
            **study.plan.training,
            "probes": [_DISTANCE],
            "probe_moments": ["end"],
            "learning_rate": cell.learning_rate,
            "seed": cell.seed,
            "do_predict": "test" in study.splits and not study.plan.probe,
            "output_dir": str(place),
        }
    )
    with redirect_stdout(io.StringIO()):  # the Trainer's own lines
        metrics = train(options)["metrics"]
    rows = [json.loads(line) for line in (place / MEASUREMENTS).read_text(encoding="utf-8").splitlines()]
    distance = next(row["value"] for row in rows if row["name"] == "distance" and "layer" not in row)
    point = Point(reference=str(place))
    prefixes = {"validation": "", "test": "test_"}
    found = (
        _in_domain(study, point, cell)
        if study.plan.probe
        else [{PERPLEXITY: metrics[prefixes[split] + PERPLEXITY]} for split in study.splits]
    )
    return _scores(study, point, cell, found, distance)


def _in_domain(study: Study, point: Point, cell: Cell) -> list[dict[str, float]]:
    """Return what is scored in domain on each split there is, validation first."""
    settings = _settings(study, cell, probe=study.plan.probe)
    return [evaluate_point(point, study.in_domain, settings, split) for split in study.splits]


def _scores(
    study: Study, point: Point, cell: Cell, found: Sequence[Mapping[str, float]], distance: float = 0.0
) -> Scores:
    settings = _settings(study, cell)
    return Scores(
        validation=found[0][study.plan.scored],
        test=found[-1][study.plan.scored],
        out_of_domain=evaluate_point(point, study.out_of_domain, settings)[PERPLEXITY],
        distance=distance,
        accuracy=found[-1].get("class_accuracy"),
    )


def _settings(study: Study, cell: Cell, **changes: Any) -> Settings:
    """Return how models are evaluated: loaded and batched as runs do."""
    batch_size = int(study.plan.training.get("per_device_eval_batch_size", 8))
    return Settings(batch_size=batch_size, seed=cell.seed, **_loading(study.plan), **changes)


def _loading(plan: Plan) -> dict[str, Any]:
    """Return the training keys that say in which precision a checkpoint is loaded and evaluated."""
    return {key: value for key, value in plan.training.items() if key in ("dtype", "bf16", "fp16")}
