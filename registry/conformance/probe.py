"""The laws of a probe."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from .laws import PluginLaws
from .traces import changed, everything
from .trials import ONE, Job, Trial, tiny_process
from .workers import STAGES, on_stage

STEPS = 4
SERVICES = ("gathered", "written", "local", "local_of", "sum_shards", "perturbed")
EVALUATION = ("evaluation_loop", "get_eval_dataloader")


class ProbeLaws(PluginLaws):
    """Subclass it, name the plugin, and pytest checks every law of a probe.

    class TestMine(ProbeLaws):
        plugin = "mine:samples=3"

    Attributes:
        strategies: what is trained while it measures.
        traced_stages: where two processes check that it leaves no trace; those that are none of ``stages`` see the first
            model and strategy only.
    """

    kind: ClassVar[str] = "probe"
    strategies: ClassVar[tuple[str, ...]] = ("full", "lora")
    traced_stages: ClassVar[tuple[str, ...]] = STAGES

    @classmethod
    def trial(cls, model: str, **changes: Any) -> Trial:
        """Return a short training run with the probe, which measures at its beginning, end and after every second step."""
        return Trial(model=model, strategy=cls.strategies[0], probes=(cls.plugin,), steps=STEPS).but(**changes)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Add ``strategy`` and ``traced``, a stage, to what a law can ask for."""
        super().pytest_generate_tests(metafunc)
        traced = [stage for stage in self.traced_stages if self.runs_on(stage)]
        if {"traced", "strategy"} <= set(metafunc.fixturenames):
            pairs = itertools.product(traced, self.strategies)
            asked = [(stage, one) for stage, one in pairs if stage in self.stages or one == self.strategies[0]]
            metafunc.parametrize("traced, strategy", asked)
        elif "traced" in metafunc.fixturenames:
            metafunc.parametrize("traced", traced)
        elif "strategy" in metafunc.fixturenames:
            metafunc.parametrize("strategy", self.strategies)

    def test_leaves_no_trace(self, model: str, strategy: str, tmp_path: Path) -> None:
        """Measuring in the middle of an optimizer step leaves weights, gradients, optimizer, modes and RNG as they were."""
        trial = self.trial(model, strategy=strategy, dropout=True, accumulation=2)
        assert measure_midway(trial.job(ONE, tmp_path)) == []

    def test_leaves_no_trace_on_every_stage(self, traced: str, strategy: str, tmp_path: Path) -> None:
        """The same on every rank of two processes."""
        trial = self.trial(self.first_model(), strategy=strategy, dropout=True, accumulation=2, steps=2)
        assert on_stage(traced, measure_midway, trial.job(traced, tmp_path)) == []

    def test_leaves_no_trace_when_it_fails(self, model: str, tmp_path: Path) -> None:
        """The same when what the probe uses raises or is interrupted: at first, midway, and at last."""
        trial = self.trial(model, dropout=True, accumulation=2)
        failing = tuple(itertools.product((0.0, 0.5, 1.0), (_Fault, _Interruption)))
        assert measure_midway(trial.job(ONE, tmp_path), failing) == []

    def test_leaves_no_trace_when_it_fails_on_every_stage(self, traced: str, tmp_path: Path) -> None:
        """The same on every rank of two processes: an error midway, an interruption at last."""
        trial = self.trial(self.first_model(), dropout=True, accumulation=2, steps=2)
        failing = ((0.5, _Fault), (1.0, _Interruption))
        assert on_stage(traced, measure_midway, trial.job(traced, tmp_path), failing) == []

    def test_measures_the_same_on_every_stage(self, model: str, strategy: str, stage: str) -> None:
        """Two ranks of any stage measure what one process measures."""
        trial = self.trial(model, strategy=strategy)
        found, expected = trial.run(stage).measurements, trial.run().measurements
        assert [_what(row) for row in found] == [_what(row) for row in expected]
        assert found
        assert [row["value"] for row in found] == pytest.approx([row["value"] for row in expected], rel=1e-4, abs=1e-6)

    def test_training_goes_on_as_without(self, model: str, strategy: str) -> None:
        """A run that is measured every other step ends with the bits of one that is not, dropout on."""
        trial = self.trial(model, strategy=strategy, dropout=True)
        assert trial.run().bits == _unmeasured(trial).run().bits

    def test_training_goes_on_as_without_on_every_stage(self, stage: str) -> None:
        """The same on two processes."""
        trial = self.trial(self.first_model(), dropout=True)
        assert trial.run(stage).bits == _unmeasured(trial).run(stage).bits

    def test_same_seed_gives_the_same_measurements(self, model: str) -> None:
        """The same seed twice gives the same numbers to the last digit."""
        trial = self.trial(model, dropout=True)
        assert trial.run().measurements == trial.but(again=1).run().measurements


def _unmeasured(trial: Trial) -> Trial:
    return trial.but(probes=(), options={"eval_strategy": "steps"})


def _what(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "value"}


def measure_midway(job: Job, failing: Sequence[tuple[float, type[BaseException]]] = ()) -> list[str]:
    """Measure between two micro-batches and after a step; return what differs afterwards, of any rank.

    Args:
        job: the training.
        failing: where further measurements fail, and by what: 0 at the first call of what the probe is given, 1 at the
            last. Two places of the training are enough for these.
    """
    from transformers import TrainerCallback

    differing: set[str] = set()
    measured = 0

    class Midway(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            self.watch()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.watch()

        def watch(self) -> None:
            nonlocal measured
            before = everything(trainer)
            with _Failing(trainer) as counting:
                trainer.probe("evaluate")
            differing.update(changed(before, everything(trainer)))
            for place, fault in failing if measured < 2 else ():
                assert counting.calls, "the probe uses neither the model, nor its sharding, nor the evaluation"
                call = 1 + round(place * (counting.calls - 1))
                with _Failing(trainer, call, fault) as stopped:
                    trainer.probe("evaluate")
                assert stopped.raised, f"call {call} of {counting.calls} was not made again"
                found = changed(before, everything(trainer))
                differing.update(f"{what} after {fault.__name__} at {call}" for what in found)
            measured += 1

    with tiny_process():
        trainer = job.trainer(callbacks=[Midway()])
        trainer.train()
    assert measured
    return sorted(_of_all_ranks(differing))


def _of_all_ranks(differing: set[str]) -> set[str]:
    import torch.distributed as dist

    if not dist.is_initialized():
        return differing
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sorted(differing))
    return {f"{name} (rank {rank})" for rank, names in enumerate(gathered) for name in names}


class _Fault(Exception):
    """What a service raises to see whether a probe tidies up."""


class _Interruption(KeyboardInterrupt):
    """What a user does for the same reason."""


class _Failing:
    """Counts the calls a probe makes of what it is given, and raises at one of them.

    Args:
        trainer: whose sharding, evaluation and model, at its beginning and in its middle, are watched.
        at: the call that raises; 0 for none.
        fault: what it raises.

    Attributes:
        calls: how many there were.
        raised: whether the fault came back to whoever asked for the measurement.
    """

    def __init__(self, trainer: Any, at: int = 0, fault: type[BaseException] = _Fault) -> None:
        self._trainer = trainer
        self._at = at
        self._fault = fault
        self.calls = 0
        self.raised = False

    def __enter__(self) -> Self:
        sharding = self._trainer.run.sharding
        for name in SERVICES:
            setattr(sharding, name, self._watched(getattr(sharding, name)))
        for name in EVALUATION:
            setattr(self._trainer, name, self._watched(getattr(self._trainer, name)))
        modules = list(self._trainer.model.modules())
        # DeepSpeed's own record of a pass does not survive one that stops on the way under ZeRO-3.
        places = () if sharding.zero_stage == 3 else (0, len(modules) // 2)
        watched = self._watched(lambda *_: None)
        self._hooks = [modules[place].register_forward_pre_hook(watched) for place in places]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for hook in self._hooks:
            hook.remove()
        for name in EVALUATION:
            delattr(self._trainer, name)
        for name in SERVICES:
            delattr(self._trainer.run.sharding, name)
        self.raised = kind is self._fault
        return self.raised

    def _watched(self, service: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                raise self._fault
            return service(*args, **kwargs)

        return call
