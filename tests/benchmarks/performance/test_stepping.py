"""Trainers taken step by step train as trainers do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers

from tunery.benchmarks.performance import overhead, workloads
from tunery.benchmarks.performance.stepping import stepping


def weights(trainer: transformers.Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def rows():
    return workloads.byte_rows(length=16)


@pytest.fixture
def build(rows, tmp_path):
    """Trainers of the tiny model with dropout off, which two trainers in turn would draw differently."""

    def make(cls=transformers.Trainer, **options):
        model = workloads.tiny()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        options = {"lr_scheduler_type": "constant", "use_cpu": True, **options}
        return workloads.trainer(cls, model, rows, str(tmp_path), **options)

    return make


def test_two_trainers_in_turn_end_where_each_alone_does(build):
    """Three calls are three steps of training, bit for bit."""
    alone = build(max_steps=3)
    alone.train()
    pair = {name: build(overhead.CLASSES[name]) for name in (overhead.PEER, overhead.OURS)}
    with stepping(pair) as steps:
        for number in range(1, 4):
            for name, step in steps.items():
                step()
                assert pair[name].state.global_step == number
    for trainer in pair.values():
        assert trainer.state.global_step == 3
        for name, value in weights(alone).items():
            assert torch.equal(weights(trainer)[name], value)


def test_an_error_of_the_training_reaches_the_caller(build):
    """It is raised where the step was asked for."""
    trainer = build()

    def fail(*args, **kwargs):
        raise ArithmeticError("diverged")

    with pytest.raises(ArithmeticError, match="diverged"), stepping({"only": trainer}) as steps:
        steps["only"]()
        trainer.training_step = fail
        steps["only"]()


def test_an_error_while_ending_is_not_lost(build):
    """What goes wrong after the last step is raised on leaving."""
    trainer = build()

    class Fails(transformers.TrainerCallback):
        def on_train_end(self, *args, **kwargs):
            raise ArithmeticError("disk full")

    trainer.add_callback(Fails())
    with pytest.raises(ArithmeticError, match="disk full"), stepping({"only": trainer}) as steps:
        steps["only"]()


def test_a_training_that_runs_out_of_steps_is_an_error(build):
    """Silence would count the wait as a step."""
    with (
        pytest.raises(RuntimeError, match="ended by itself after 2 steps"),
        stepping({"only": build(max_steps=2)}) as s,
    ):
        for _ in range(3):
            s["only"]()


def test_twins_share_model_and_optimizer(rows, tmp_path):
    """They differ in nothing but their own code."""
    twins = overhead._twins(workloads.tiny(), rows, str(tmp_path))
    peer, ours = twins[overhead.PEER], twins[overhead.OURS]
    assert peer.model is ours.model
    assert peer.optimizer is ours.optimizer


def test_a_stepped_trainer_says_and_saves_nothing(build, tmp_path, capsys):
    """A script prints its claims and nothing else."""
    with stepping({"only": build()}) as steps:
        steps["only"]()
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


COUNT_HEAPS = """
import ctypes, sys, threading
import tunery.benchmarks.performance.overhead
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
threads = [threading.Thread(target=lambda: [bytearray(10_000) for _ in range(100)]) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(__import__("ctypes").CDLL(None), "malloc_info"), reason="counts the heaps of glibc")
def test_all_threads_of_a_script_share_one_heap(tmp_path):
    """It has to be said before torch, numpy or a tokenizer starts a thread: afterwards each keeps what it has."""
    file = tmp_path / "heaps.xml"
    subprocess.run([sys.executable, "-c", COUNT_HEAPS, str(file)], check=True, cwd=tmp_path, timeout=300)
    assert file.read_text().count("<heap nr=") == 1
