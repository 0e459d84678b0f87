"""What NVFLARE's server runs as its job: our rounds, over its tasks. Loaded by the engine, by name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable

from ....registry.errors import FederationError, TuneryError
from ...console import calm
from ..arguments import read_federated_options
from ..payload import Payload
from ..run import federate
from .provision import PAYLOAD, RECIPE

_TIMEOUT = 600.0
_LOOK = 0.1


class FlareEngine:
    """Our seam over NVFLARE's tasks.

    Args:
        controller: the job's.
        context: its.
        abort: triggered when the job is to end.
    """

    at_once: int | None = None

    def __init__(self, controller: Controller, context: Any, abort: Any) -> None:
        self._controller = controller
        self._context = context
        self._abort = abort

    def nodes(self) -> Sequence[str]:
        """Return the names of the job's sites."""
        return sorted(client.name for client in self._context.get_engine().get_clients())

    def exchange(self, op: str, requests: Mapping[str, Payload], timeout: float | None) -> dict[str, Payload]:
        """Give each site a task of its own and gather what comes back in time."""
        limit = _TIMEOUT if timeout is None else timeout
        replies: dict[str, Payload] = {}
        tasks = [self._task(op, node, request, replies) for node, request in requests.items()]
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and any(task.completion_status is None for task in tasks):
            if self._abort.triggered:
                raise FederationError("the job was aborted")
            time.sleep(_LOOK)
        for task in tasks:
            if task.completion_status is None:
                self._controller.cancel_task(task)
        return dict(replies)

    def _task(self, op: str, node: str, request: Payload, replies: dict[str, Payload]) -> Any:
        def received(client_task: Any, fl_ctx: Any) -> None:
            result = client_task.result
            if isinstance(result, Shareable) and result.get_return_code() == ReturnCode.OK:
                try:
                    replies[node] = Payload.from_bytes(result[PAYLOAD])
                except (KeyError, TypeError, FederationError):
                    self._controller.log_warning(fl_ctx, f"what {node} sent is no payload")
            client_task.result = None

        data = Shareable()
        data[PAYLOAD] = request.to_bytes()
        task = Task(name=op, data=data, timeout=0, result_received_cb=received)
        self._controller.send(task, self._context, targets=[node])
        return task

    def close(self) -> None:
        """Do nothing: the job ends by itself."""


class RoundsController(Controller):  # type: ignore[misc]  # NVFLARE has no types
    """The job on the server: goes on with the rounds of the recipe the server was started with."""

    def start_controller(self, fl_ctx: Any) -> None:
        """Do nothing yet."""

    def stop_controller(self, fl_ctx: Any) -> None:
        """Do nothing more."""

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        """Run all rounds that are left, evaluate and save."""
        calm()
        recipe = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir()) / RECIPE
        try:
            options = read_federated_options(recipe, ["--resume_from_checkpoint", "last"])
            federate(options, lambda federation, _: FlareEngine(self, fl_ctx, abort_signal), simulated=False)
        except TuneryError as error:
            self.system_panic(str(error), fl_ctx)

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Any, fl_ctx: Any
    ) -> None:
        """Leave out an answer that came too late for its round."""
        self.log_warning(fl_ctx, f"an answer of {client.name} came too late")
