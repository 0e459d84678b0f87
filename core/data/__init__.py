"""Data: from a dataset's name, or files, to what a Trainer takes.

    args = DataArguments(dataset_name="python_docs")
    data = load_task_data(args, seed=42)          # a TaskData: the task, and its rows as text and class numbers
    encoded = encode(data, tokenizer)             # an EncodedData: train, validation, test, data_collator

The stages, one file each: ``loading`` (hub, files or the built-in ``python_docs``), ``columns`` (which ones count),
``labels`` (class numbers and names), ``tasks`` (all of it put together), ``encoding`` and ``metrics``.
"""

from __future__ import annotations

from .arguments import DataArguments
from .encoding import EncodedData, encode
from .tasks import TaskData, load_task_data

__all__ = ["DataArguments", "EncodedData", "TaskData", "encode", "load_task_data"]
