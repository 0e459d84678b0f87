"""What a rank keeps while weights are disturbed under ZeRO-3, where no rank has room for all of them."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tunery.registry.conformance.trials import Job, Trial, tiny_process
from tunery.registry.conformance.workers import RANKS, STAGES, on_stage


def kept_bytes(job: Job) -> list[dict[str, int]]:
    """Train with a probe; return what each disturbance keeps in this process, and what the weights it moves come to."""
    import torch

    found: list[dict[str, int]] = []

    def tensors(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                yield from tensors(item)

    def size(those: Any) -> int:
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in those}.values())

    with tiny_process():
        trainer = job.trainer()
        sharding: Any = trainer.run.sharding
        plain = sharding.perturbed

        @contextmanager
        def watched(params: Any) -> Iterator[None]:
            params = list(params)
            shards = [param.ds_tensor for param in params]
            whole = sum(param.ds_numel * param.element_size() for param in params)
            context = plain(params)
            with context:
                own = {one.untyped_storage().data_ptr() for one in (*shards, *(param.data for param in params))}
                held = tensors(list(context.gen.gi_frame.f_locals.values()))
                kept = size(one for one in held if one.untyped_storage().data_ptr() not in own)
                sizes = {
                    "kept": kept,
                    "shards": sum(shard.numel() * shard.element_size() for shard in shards),
                    "gathered": sum(param.numel() * param.element_size() for param in params),
                    "whole": whole,
                }
                found.append(sizes)
                yield

        sharding.perturbed = watched
        trainer.train()
    return found


@pytest.mark.skipif("zero3" not in STAGES, reason="DeepSpeed is not installed")
def test_a_rank_keeps_one_copy_of_its_shard(tmp_path: Path) -> None:
    """And one of what ZeRO-3 has not let go of after the last pass; before training that is nothing."""
    preset = json.loads((files("tunery.core") / "deepspeed" / "zero3.json").read_text(encoding="utf-8"))
    preset["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    trial = Trial(
        strategy="full", probes=("gaussian:gammas=[0.1,0.2],draws=1",), steps=2, options={"deepspeed": preset}
    )
    # Workers cannot import a test: they read this file.
    known = {"run_path": runpy.run_path, "file": __file__, "job": trial.job("zero3", tmp_path)}
    found = on_stage("zero3", eval, "run_path(file)['kept_bytes'](job)", known)
    assert len(found) >= 2
    assert found[0]["gathered"] == 0
    for one in found:
        assert one["shards"] < 1.1 * one["whole"] / RANKS
        assert 0 < one["kept"] <= one["shards"] + one["gathered"]
