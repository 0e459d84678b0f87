"""A ``transformers.Trainer`` whose own training loop is taken one optimizer step at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import transformers


@contextmanager
def stepping(trainers: Mapping[str, transformers.Trainer]) -> Iterator[dict[str, Steps]]:
    """Start every trainer; inside, each is a callable that takes one optimizer step."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Steps(trainer)) for name, trainer in trainers.items()}


class Steps(transformers.TrainerCallback):
    """Runs ``trainer.train()`` in a thread that waits after every optimizer step; calling this object takes the next.

    A call lasts from one ``on_step_end`` to the next: logging, fetching the batches, forward, backward, clipping, optimizer
    and callbacks, exactly as the trainer's own loop does them. Building the trainer and preparing the run are no part of it.

    Args:
        trainer: with more ``max_steps`` than will be taken; leaving the context ends the training there.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._go, self._waiting = threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> Self:
        self._trainer.add_callback(self)
        self._thread.start()
        self._await()
        return self

    def __call__(self) -> None:
        """Take one optimizer step; an error of the training is raised here."""
        self._go.release()
        self._await()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._go.release()
        self._thread.join()
        self._trainer.remove_callback(self)
        if error is None and self._error is not None:
            raise self._error

    def _await(self) -> None:
        self._waiting.acquire()
        if self._error is not None:
            raise self._error

    def _train(self) -> None:
        try:
            self._trainer.train()
            if not self._stopping:
                raise RuntimeError(f"the training ended by itself after {self._trainer.state.global_step} steps")
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            self._error = error
        finally:
            self._waiting.release()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the first call."""
        self._pause()

    def on_step_end(self, args: Any, state: Any, control: transformers.TrainerControl, **kwargs: Any) -> None:
        """Wait for the next call, or end."""
        if not self._stopping:
            self._pause()
        control.should_training_stop |= self._stopping

    def _pause(self) -> None:
        self._waiting.release()
        self._go.acquire()
