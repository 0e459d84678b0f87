"""What a run trains and evaluates on, as flags and recipe keys: the data half of transformers' example scripts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Len, Lt

from ...registry.errors import DataError, did_you_mean


@dataclass(kw_only=True)
class DataArguments:
    """Where the data comes from, which columns count and how they are encoded.

    With ``tasks``, the other keys are what the tasks have in common, and each task adds its own. Without, exactly one source is needed: ``dataset_name``, or ``train_file`` with or without the other two files. Everything
    else is inferred where it can be, and what is given here wins.

    Raises:
        DataError: a value of the wrong type or out of range.
    """

    tasks: Annotated[list[dict[str, Any]], Len(1)] | None = field(
        default=None,
        metadata={
            "help": "Several tasks in one run, for a strategy that takes them: a list of mappings with a name and any of "
            "these data keys, for example {name: rte, train_file: rte.jsonl}."
        },
    )
    mixing: Literal["proportional", "temperature", "round_robin", "size_capped"] = field(
        default="proportional",
        metadata={
            "help": "How often the rows of each task come: proportional, temperature, round_robin (equally many of each "
            "in every batch) or size_capped."
        },
    )
    mixing_temperature: Annotated[float, Ge(1)] = field(
        default=2.0, metadata={"help": "T of mixing=temperature: tasks come in proportion to their size to the 1/T."}
    )
    mixing_cap: Annotated[int, Ge(1)] = field(
        default=1000, metadata={"help": "Rows an epoch takes of a task with mixing=size_capped, at most."}
    )
    task_kind: str | None = field(
        default=None,
        metadata={
            "help": "classification, regression, causal_lm or image_classification. Inferred: an image column means "
            "image_classification, float labels regression, other labels classification, text alone causal_lm."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "A dataset on the Hugging Face hub, a local folder, or the built-in 'python_docs'."},
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the hub dataset, for example 'mrpc' of 'nyu-mll/glue'."}
    )
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the hub dataset. Default: its main branch."}
    )
    train_file: str | None = field(default=None, metadata={"help": "Training rows: .json, .jsonl, .csv or .parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation rows, same file types."})
    test_file: str | None = field(default=None, metadata={"help": "Test rows, same file types."})
    text_columns: Annotated[list[str], Len(1)] | None = field(
        default=None,
        metadata={
            "help": "One column for single sentences, two for pairs; any further ones are joined to the second. For "
            "causal_lm two columns are prompt and completion, and only the completion is learnt."
        },
    )
    label_column: str | None = field(
        default=None, metadata={"help": "Column with the label. Inferred: label, labels, target, score, label_text."}
    )
    image_column: str | None = field(
        default=None, metadata={"help": "Column with the image. Inferred: any image feature, or image, img, pixels."}
    )
    image_shape: Annotated[list[Annotated[int, Ge(1)]], Len(2, 3)] | None = field(
        default=None,
        metadata={"help": "Height, width and, for colour, channels of an image column that holds raw uint8 bytes."},
    )
    max_length: Annotated[int, Ge(2)] = field(
        default=128,
        metadata={"help": "Longest input, in tokens. Longer texts are cut; for causal_lm the length of a block."},
    )
    max_train_samples: Annotated[int, Ge(1)] | None = field(
        default=None, metadata={"help": "Train on this many rows, drawn at random by the seed. Default: all."}
    )
    max_eval_samples: Annotated[int, Ge(1)] | None = field(
        default=None, metadata={"help": "Evaluate on this many rows of each split, drawn at random by the seed."}
    )
    metrics: Annotated[list[str], Len(1)] | None = field(
        default=None,
        metadata={
            "help": "Metrics, the main one first: accuracy, f1, macro_f1, matthews_correlation; pearson, spearman, "
            "mse; perplexity, loss. Default: by task."
        },
    )
    validation_fraction: Annotated[float, Gt(0), Lt(1)] = field(
        default=0.1,
        metadata={"help": "Share of the training rows held out, class by class, where there is no validation split."},
    )

    def __post_init__(self) -> None:
        """Check every value against its type, since recipes are read from YAML without one."""
        from pydantic import TypeAdapter, ValidationError

        hints = get_type_hints(type(self), include_extras=True)
        for name in (entry.name for entry in fields(self)):
            value = getattr(self, name)
            try:
                setattr(self, name, TypeAdapter(hints[name]).validate_python(value))
            except ValidationError as error:
                raise DataError(f"{name}={value!r}: {error.errors()[0]['msg']}", owner="the data arguments") from None

    def each(self) -> list[tuple[str | None, DataArguments]]:
        """Return the tasks one by one: the name it was given, if any, and the arguments of it alone.

        Raises:
            DataError: a key that is none of these, or a value of the wrong type or out of range.
        """
        if not self.tasks:
            return [(None, self)]
        joint = ("tasks", "mixing", "mixing_temperature", "mixing_cap")
        known = [item.name for item in fields(self) if item.name not in joint]
        shared = {name: getattr(self, name) for name in known}
        for position, task in enumerate(self.tasks):
            for key in task:
                if key not in (*known, "name"):
                    owner = f"tasks[{position}]"
                    raise DataError(f"no key {key!r}", owner=owner, remedy=did_you_mean(key, known) or "see --keys")
        return [
            (task.get("name"), DataArguments(**{**shared, **{key: task[key] for key in task if key != "name"}}))
            for task in self.tasks
        ]
