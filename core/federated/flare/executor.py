"""What a site runs as its part of the job: one client worker. Loaded by the engine, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from ....registry.errors import TuneryError
from ...console import calm
from ..arguments import read_federated_options
from ..payload import Payload
from ..site import site_worker
from ..worker import ClientWorker
from .provision import PAYLOAD, RECIPE


class ClientExecutor(Executor):  # type: ignore[misc]  # NVFLARE has no types
    """The job on a site: hands every task to the site's worker, which is made at the first one and stays."""

    def __init__(self) -> None:
        super().__init__()
        self._worker: ClientWorker | None = None

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        """Return the worker's answer; what goes wrong is told to this site's log alone."""
        try:
            if self._worker is None:
                calm()
                recipe = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir()) / RECIPE
                self._worker = site_worker(fl_ctx.get_identity_name(), read_federated_options(recipe, []))
            reply = self._worker.handle(task_name, Payload.from_bytes(shareable[PAYLOAD]))
        except (TuneryError, KeyError, TypeError) as error:
            self.log_error(fl_ctx, f"this site cannot take part: {error}")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        result = Shareable()
        result[PAYLOAD] = reply.to_bytes()
        return result
