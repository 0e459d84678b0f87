"""What one process of a worker group does; see :mod:`.workers`."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import TuneryError

_COLLECTIVE = timedelta(seconds=600)  # the group's own limit is shorter


def serve(line: Connection, rank: int, ranks: int, folder: str) -> None:
    """Join the process group, then do jobs until the line is hung up.

    Args:
        line: jobs come in, as function and arguments; answers go out, as result and error.
        rank: this process.
        ranks: how many there are.
        folder: where the processes meet and write their logs; no port is needed.
    """
    log = os.open(Path(folder) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    importlib.import_module(f"{__package__}.preload")  # the server has done so, unless it is somebody else's
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=_COLLECTIVE)
    while True:
        try:
            job, arguments = line.recv()
        except EOFError:
            break
        line.send(_done(job, arguments))
    dist.barrier()
    dist.destroy_process_group()


def _done(job: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, object]:
    """Return the job's result, or ``None`` and the error: a refusal of tunery itself, anything else as text."""
    try:
        return job(*arguments), None
    except TuneryError as error:
        return None, error
    except Exception:  # noqa: BLE001  # whatever a job raises is its answer
        return None, traceback.format_exc()
    finally:
        _forget()


def _forget() -> None:
    """Undo what a run leaves in its process: accelerate's singletons and transformers' DeepSpeed config."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
