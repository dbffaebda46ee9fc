"""What every activity of a worker shares: the app, its dependencies, the ledger, Temporal.

Built once by `worker.py`. It decides nothing.
"""

import asyncio
import os
import socket
from collections.abc import Coroutine
from typing import Any

from temporalio import activity
from temporalio.client import Client

from perdure.activities.ledger_calls import LedgerCalls
from perdure.activities.providers import loaded_models, resolve_model
from perdure.activities.pulse import Pulse
from perdure.activities.telemetry import Telemetry
from perdure.agents import Agent, App
from perdure.contracts.calls import Owner, TurnRef
from perdure.contracts.errors import AuthoringError
from perdure.contracts.limits import PREVIEW_CHARS_MAX
from perdure.contracts.model import Model
from perdure.contracts.turn import TurnResult
from perdure.stores.engine import Store


class Engine:
    """The worker's side of an app."""

    def __init__(
        self,
        app: App,
        store: Store,
        client: Client,
        *,
        previews: bool = True,
        grace_s: float = 10.0,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.app = app
        self.client = client
        self.previews = previews
        self.grace_s = grace_s
        self.deps: Any = None
        # Whether the server knows our search attributes; found out when the worker starts.
        self.searchable = False
        self.telemetry = telemetry if telemetry is not None else Telemetry()
        self.ledger = LedgerCalls(store, self.telemetry)
        self.pulse = Pulse(store)
        self.worker = f"{os.getpid()}@{socket.gethostname()}"
        self._models: dict[str, Model] = {}
        self._running: set[asyncio.Task[Any]] = set()

    def model(self, agent: Agent, prepared_name: str) -> Model:
        """The model a prepared request names, where it can still be had; else the agent's."""
        if not isinstance(agent.model, str):
            return agent.model
        # A changed agent must not change a request that is already prepared (promise P7).
        for name in (prepared_name, agent.model):
            try:
                if name not in self._models:
                    self._models[name] = resolve_model(name, self.app.endpoints)
                return self._models[name]
            except AuthoringError:
                if name == agent.model:
                    raise
        raise AssertionError("the agent's own model is always the last")

    async def load_models(self) -> None:
        """Load the libraries of the app's real models: before work comes, since that takes seconds
        in which a running activity could not send its heartbeat.
        """
        named = [agent.model for agent in self.app.agents.values() if isinstance(agent.model, str)]
        self._models |= await asyncio.to_thread(loaded_models, named, self.app.endpoints)

    def keep_running(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start work that may outlive its activity: an effect on its way to T2."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def shown(self, result: TurnResult | None) -> TurnResult | None:
        """The result as Temporal may hold it: without text where previews are off, and without
        the identities that the workflow has itself."""
        if result is None:
            return None
        changes: dict[str, Any] = {"turn_id": "", "request_digest": ""}
        if not self.previews and result.answer is not None:
            where = f"ledger {self.ledger.store_id}, turn {result.turn_id}"
            changes |= {"answer": None, "answer_cut": False, "answer_at": where, "output": None}
        return result.model_copy(update=changes)

    def preview(self, text: str) -> str:
        """A short text for the Temporal UI, or none."""
        if not self.previews:
            return ""
        flat = " ".join(text.split())
        cut = len(flat) > PREVIEW_CHARS_MAX
        return flat[: PREVIEW_CHARS_MAX - 1] + "…" if cut else flat

    def stamped(self, ref: TurnRef) -> TurnRef:
        """The reference with this ledger's identity."""
        return ref.model_copy(update={"store": self.ledger.store_id})

    def close(self) -> None:
        """Stop the threads."""
        self.pulse.close()
        self.ledger.close()


def current_owner(run_id: str) -> Owner:
    """Who the running activity acts for."""
    info = activity.info()
    return Owner(
        temporal_namespace=info.workflow_namespace or info.namespace,
        workflow_id=info.workflow_id or "",
        run_id=run_id,
    )
