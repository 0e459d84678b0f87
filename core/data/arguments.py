"""What a run trains and evaluates on, as flags and recipe keys: the data half of transformers' example scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Len, Lt

from ...registry.errors import DataError, did_you_mean
from ...registry.selection import parse_selections

JOINT = ("tasks", "mixing", "mixing_temperature", "mixing_cap")  # keys of several tasks in one run
SOURCES = ("dataset_name", "data_files", "train_file")
# What says nothing any more once the data come from elsewhere.
_OF_SOURCE = (
    *SOURCES,
    "dataset_config_name",
    "dataset_revision",
    "validation_file",
    "test_file",
    "text_columns",
    "references_column",
    "label_column",
    "image_column",
    "image_shape",
)
DECODING = ("num_beams", "length_penalty", "no_repeat_ngram_size", "max_new_tokens")


@dataclass(kw_only=True)
class DataArguments:
    """Where the data comes from, which columns count and how they are encoded.

    With ``tasks``, the other keys are what the tasks have in common, and each task adds its own. Without, exactly one source
    is needed: ``dataset_name``, ``data_files``, or ``train_file`` with or without the other two files. Everything else is
    inferred where it can be, and what is given here wins.

    Raises:
        DataError: a value of the wrong type or out of range.
    """

    tasks: Annotated[list[dict[str, Any]], Len(1)] | None = field(
        default=None,
        metadata={
            "help": "Several tasks in one run, for a strategy that takes them: a list of mappings with a name and any of "
            "these data keys, for example {name: rte, train_file: rte.jsonl}. As flags, NAME:KEY=VALUE,...: those of the "
            "recipe's tasks to train and what to change about them, for example rte:data_files=folder. Texts of any kind go "
            "together on a decoder; images go with images."
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
    data_files: str | None = field(
        default=None,
        metadata={
            "help": "A folder with a file train and perhaps validation and test: .json, .jsonl, .csv or .parquet."
        },
    )
    train_file: str | None = field(default=None, metadata={"help": "Training rows: .json, .jsonl, .csv or .parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation rows, same file types."})
    test_file: str | None = field(default=None, metadata={"help": "Test rows, same file types."})
    text_columns: Annotated[list[str], Len(1)] | None = field(
        default=None,
        metadata={
            "help": "One column for single sentences, two for pairs; any further ones are joined to the second. For "
            "causal_lm two columns are prompt and completion, and only the completion is learnt; a prompt may be a list, "
            "which is written a line an item, and a list of completions is as many rows."
        },
    )
    references_column: str | None = field(
        default=None,
        metadata={
            "help": "Column with a list of texts that bleu and chrf compare with where it holds any. Default: all "
            "completions of the prompt."
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
        default=None,
        metadata={
            "help": "Evaluate on this many rows of each split, drawn at random by the seed; for bleu and chrf, on "
            "this many prompts with all their rows. Default: all."
        },
    )
    metrics: Annotated[list[str], Len(1)] | None = field(
        default=None,
        metadata={
            "help": "Metrics, the main one first: accuracy, f1, macro_f1, matthews_correlation; pearson, spearman, "
            "mse; perplexity, loss, and of generated completions bleu, chrf (after training, on validation and test). "
            "Default: by task."
        },
    )
    num_beams: Annotated[int, Ge(1)] = field(
        default=10, metadata={"help": "Beams of the search for a completion, for bleu and chrf; 1 is greedy."}
    )
    length_penalty: float = field(
        default=0.8, metadata={"help": "A beam's log-probability is divided by its length to this power."}
    )
    no_repeat_ngram_size: Annotated[int, Ge(0)] = field(
        default=4, metadata={"help": "A completion repeats no n-gram of its own of this size; 0 allows all."}
    )
    max_new_tokens: Annotated[int, Ge(1)] = field(
        default=64, metadata={"help": "Longest completion that is generated, in tokens."}
    )
    validation_fraction: Annotated[float, Gt(0), Lt(1)] = field(
        default=0.1,
        metadata={"help": "Share of the training rows held out, class by class, where there is no validation split."},
    )
    test_split: Literal["test", "validation"] = field(
        default="test",
        metadata={
            "help": "Which split is the test split. With validation, it is the test split (the labels of many a test split "
            "are secret), and a validation split is held out of train."
        },
    )
    leave_out: Annotated[float, Ge(0), Lt(1)] = field(
        default=0.0,
        metadata={"help": "Share of the training rows to leave out at random: other ones with every seed of the run."},
    )
    split_seed: Annotated[int, Ge(0)] | None = field(
        default=None,
        metadata={"help": "Seed of the rows held out and of the samples drawn. Default: data_seed, else seed."},
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

    @property
    def decoding(self) -> dict[str, Any]:
        """How completions are generated, by the names of transformers' ``GenerationConfig``."""
        return {name: getattr(self, name) for name in DECODING}

    def each(self) -> list[tuple[str | None, DataArguments]]:
        """Return the tasks one by one: the name it was given, if any, and the arguments of it alone.

        A task's own source takes the place of one they have in common, and of what was said about that one's columns.

        Raises:
            DataError: a key that is none of these, or a value of the wrong type or out of range.
        """
        if not self.tasks:
            return [(None, self)]
        known = [item.name for item in fields(self) if item.name not in JOINT]
        shared = {name: getattr(self, name) for name in known}
        sourceless = {name: value for name, value in shared.items() if name not in _OF_SOURCE}
        common = any(shared[name] for name in SOURCES)
        for position, task in enumerate(self.tasks):
            for key in task:
                if key not in (*known, "name"):
                    owner = f"tasks[{position}]"
                    raise DataError(f"no key {key!r}", owner=owner, remedy=did_you_mean(key, known) or "see --keys")
        return [
            (
                task.get("name"),
                DataArguments(
                    **(sourceless if common and _names_source(task) else shared)
                    | {key: value for key, value in task.items() if key != "name"}
                ),
            )
            for task in self.tasks
        ]


def _names_source(keys: Mapping[str, Any]) -> bool:
    return any(name in keys for name in SOURCES)


def choose_tasks(tasks: Sequence[Mapping[str, Any]], flags: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tasks that flags ask for, each as ``NAME`` or ``NAME:KEY=VALUE,...``.

    A task that ``tasks`` has is that one with these keys changed; where they name another source, the old one's files and
    columns are forgotten. Any other is a new one, and names data or columns of its own.

    Raises:
        SelectionError: a flag that cannot be read, or one name twice.
        DataError: a task that ``tasks`` does not have, without data or columns of its own.
    """
    known = {task.get("name"): task for task in tasks}
    chosen = []
    for selection in parse_selections(list(flags), "task"):
        if selection.name not in known and not any(key in selection.options for key in _OF_SOURCE):
            names = [str(name) for name in known]
            remedy = did_you_mean(selection.name, names) or f"a new one is {selection.name}:label_column=COLUMN"
            raise DataError(f"no task {selection.name!r}", known=names, owner="--tasks", remedy=remedy)
        moved = any(key in selection.options for key in SOURCES)
        kept = {
            key: value for key, value in known.get(selection.name, {}).items() if not moved or key not in _OF_SOURCE
        }
        chosen.append({**kept, "name": selection.name, **selection.options})
    return chosen
