"""One process of a worker group: ``python -m tunery.registry.conformance.worker``, started by :mod:`.workers`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

from ..errors import TuneryError

_COLLECTIVE = timedelta(seconds=300)


def main() -> None:
    """Join the process group, then answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TUNERY_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=_COLLECTIVE,
    )
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()
    dist.barrier()
    dist.destroy_process_group()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    module, _, name = request["job"].partition(":")
    try:
        return {"result": getattr(importlib.import_module(module), name)(request["payload"])}
    except TuneryError as error:
        return {"error": str(error), "refused": type(error).__name__}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        _forget()


def _forget() -> None:
    """Undo what a run leaves in its process: accelerate's singletons and transformers' DeepSpeed config."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


if __name__ == "__main__":
    main()
