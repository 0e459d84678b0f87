"""Data: from a dataset's name, or files, to what a Trainer takes.

    args = DataArguments(dataset_name="python_docs")
    (data,) = load_tasks(args, seed=42)           # a TaskData: the task, and its rows as text and class numbers
    encoded = encode(data, tokenizer)             # an EncodedData: train, validation, test, data_collator

The stages, one file each: ``loading`` (hub, files or the built-in ``python_docs``), ``columns`` (which ones count),
``labels`` (class numbers and names), ``pairs`` (prompts and completions), ``tasks`` (all of it put together), ``encoding``
and ``metrics``. With several tasks in ``args.tasks``, ``mixing`` puts their rows together. After training, ``generation``
has prompts completed where a metric is of what a model writes.
"""

from __future__ import annotations

from .arguments import DataArguments
from .encoding import EncodedData, encode
from .mixing import Mixing, encode_jointly
from .tasks import TaskData, load_task_data, load_tasks

__all__ = [
    "DataArguments",
    "EncodedData",
    "Mixing",
    "TaskData",
    "encode",
    "encode_jointly",
    "load_task_data",
    "load_tasks",
]
