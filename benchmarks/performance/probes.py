"""What probes cost beyond the passes they cannot do without: MiniLM (22.7 million parameters), rows of 128 tokens.

* ``gaussian, time``: G gammas x D draws against the 1 + G x D evaluations that it needs, taking turns in one process, over
  256 rows. Noise is drawn, added and taken off again once for each of them, whatever the rows: more rows, less overhead.
* ``gaussian, peak memory``: what it needs beyond an evaluation, in copies of the weights that get noise, each in a process of
  its own.
* ``hessian, time``: the trace by exact products against the same forward, backward and second backward passes written out
  with nothing around them.

``--quick`` takes 96 rows. On the CPU torch gets one thread and time is this process's processor time; see :mod:`.overhead`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.console import calm
from ...core.probing import measure, untouched
from ...core.trainer import Trainer
from ...registry.context import Subject
from . import workloads
from .claims import Claim, Run, main, ratio_claim
from .paired import peak_memory

LENGTH, BATCH = 128, 8
ROWS, QUICK_ROWS, HESSIAN_ROWS = 256, 96, 16
GAMMAS, DRAWS = (0.01, 0.1), 1
GAUSSIAN = {"name": "gaussian", "gammas": list(GAMMAS), "draws": DRAWS}
TRACE_DRAWS = 2
HESSIAN = {"name": "hessian", "draws": TRACE_DRAWS, "iterations": 0, "method": "exact"}
TIME_GOAL, MEMORY_GOAL, TRACE_GOAL = 1.05, 1.0, 1.10


def claims(run: Run) -> Iterator[Claim]:
    """Measure every claim of this script."""
    calm()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        yield gaussian_time(run, folder)
        yield gaussian_memory(folder)
        yield hessian_time(run, folder)


def gaussian_time(run: Run, folder: str) -> Claim:
    """Compare the probe to as many plain evaluations as it makes."""
    trainer = prepared(folder, GAUSSIAN, QUICK_ROWS if run.quick else ROWS)
    variants = {"probe": partial(probe, trainer), "evaluations": partial(evaluations, trainer)}
    times = run.interleave(variants, rounds=12, quick_rounds=8, warm_up=1)
    return ratio_claim("gaussian, time", times.ratio("probe", "evaluations"), TIME_GOAL, times)


def gaussian_memory(folder: str) -> Claim:
    """Compare the peak memory of the probe to that of an evaluation."""
    ours, plain = (peak_memory(partial(_alone, work, folder)) for work in (probe, evaluations))
    copy = sum(p.numel() * p.element_size() for name, p in workloads.minilm().named_parameters() if disturbed(name))
    return Claim(
        name="gaussian, peak memory",
        value=(ours.total - plain.total) / copy,
        goal=MEMORY_GOAL,
        unit="copies of the disturbed weights more",
        detail=f"probe {ours}, evaluation {plain}, a copy {copy / 2**20:.0f} MiB",
    )


def hessian_time(run: Run, folder: str) -> Claim:
    """Compare the trace to its bare passes."""
    trainer = prepared(folder, HESSIAN, HESSIAN_ROWS)
    variants: dict[str, Callable[[], object]] = {"probe": partial(probe, trainer), "passes": passes(trainer)}
    times = run.interleave(variants, rounds=20, quick_rounds=8, warm_up=1)
    return ratio_claim("hessian, time", times.ratio("probe", "passes"), TRACE_GOAL, times)


def disturbed(name: str) -> bool:
    """Whether a parameter of MiniLM gets noise: its weights, but neither norms nor the head."""
    return name.endswith("weight") and "LayerNorm" not in name and not name.startswith("classifier")


def prepared(folder: str, selection: Any, rows: int) -> Any:
    """Return a trainer with one probe and an evaluation set."""
    data = workloads.minilm_rows(LENGTH)[:rows]
    trainer = workloads.trainer(
        Trainer, workloads.minilm(), data, folder, probes=[selection], per_device_eval_batch_size=BATCH
    )
    trainer.eval_dataset = data
    return trainer


def probe(trainer: Any) -> None:
    """Measure once."""
    measure(trainer.recipe.probes[0], trainer.subject())


def evaluations(trainer: Any) -> None:
    """Evaluate as often as the probe does."""
    subject: Subject = trainer.subject()
    assert subject.evaluate is not None
    with untouched(subject.model):
        subject.model.eval()
        for _ in range(1 + len(GAMMAS) * DRAWS):
            subject.evaluate()


def passes(trainer: Any) -> Callable[[], None]:
    """Return a function that runs the forward, backward and second backward passes of the trace."""
    subject: Subject = trainer.subject()
    assert subject.batches is not None
    batches = subject.batches
    parameters = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    signs = [torch.ones_like(parameter) for parameter in parameters]

    def work() -> None:
        with untouched(subject.model), sdpa_kernel(SDPBackend.MATH):
            subject.model.eval()
            for _ in range(TRACE_DRAWS):
                for batch in batches():
                    loss = subject.model(**batch).loss
                    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
                    along = [(g * v).sum() for g, v in zip(grads, signs, strict=True) if g is not None]
                    torch.autograd.grad(torch.stack(along).sum(), parameters, allow_unused=True)

    return work


def _alone(work: Callable[[Any], None], folder: str) -> None:
    calm()
    work(prepared(folder, GAUSSIAN, QUICK_ROWS))


if __name__ == "__main__":
    sys.exit(main(claims, __doc__))
