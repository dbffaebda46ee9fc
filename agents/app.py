"""`App`: the agents that a worker serves, their models' endpoints, their tools' dependencies.

It also finds an app by `module:attribute`. It starts nothing.
"""

import contextlib
import importlib
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from perdure.agents.agent import Agent
from perdure.agents.endpoint import Endpoint
from perdure.contracts.errors import AppNotImportable, AuthoringError, SetupError, UnknownAgent

Lifespan = Callable[["App"], AbstractAsyncContextManager[Any]]

_ENDPOINT_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,62}(/[a-z0-9_.-]{1,63})?")
# Its models are files, not addresses.
_SCRIPTED: Final = "scripted"


class App:
    """Agents by name.

    `lifespan` takes the app and gives an async context manager (a function decorated with
    `contextlib.asynccontextmanager`) that yields what tools get as `ctx.deps`. `endpoints` are what
    stands before the colon of a model's name: with `{"local": Endpoint(...)}` an agent's model may
    be `"local:smollm"`; under a provider's name (`"openai"`) it replaces that provider's settings.
    """

    def __init__(
        self,
        agents: Iterable[Agent],
        lifespan: Lifespan | None = None,
        *,
        endpoints: Mapping[str, Endpoint] | None = None,
    ) -> None:
        self.agents: dict[str, Agent] = {}
        for agent in agents:
            _check_agent(agent)
            if agent.name in self.agents:
                raise AuthoringError(f"two agents have the name {agent.name!r}")
            self.agents[agent.name] = agent
        if lifespan is not None and inspect.isasyncgenfunction(lifespan):
            raise AuthoringError("decorate the lifespan with contextlib.asynccontextmanager")
        self.lifespan = lifespan
        self.endpoints: dict[str, Endpoint] = dict(endpoints or {})
        for name, endpoint in self.endpoints.items():
            _check_endpoint(name, endpoint)

    def agent(self, name: str) -> Agent:
        """The agent of that name. Raises UnknownAgent."""
        if name not in self.agents:
            known = ", ".join(sorted(self.agents)) or "none"
            raise UnknownAgent(f"there is no agent {name!r}; this app has: {known}")
        return self.agents[name]

    def dependencies(self) -> AbstractAsyncContextManager[Any]:
        """The lifespan, entered once per worker; it yields `ctx.deps` (None without a lifespan)."""
        return contextlib.nullcontext() if self.lifespan is None else self.lifespan(self)


def load_app(path: str) -> App:
    """Import `package.module:attribute`. Raises AppNotImportable.

    The current folder is searched last, so that an app beside the command is found and shadows
    nothing.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise AppNotImportable(f"{path!r}: name the app as `package.module:attribute`")
    found = _attribute(_import(module_name, path), attribute, path)
    if not isinstance(found, App):
        kind = type(found).__name__
        raise AppNotImportable(f"{path!r} is a {kind}, not a perdure.App")
    return found


def _import(module_name: str, path: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(module_name)
    except SetupError:
        # It says already what the author has to change.
        raise
    except Exception as error:
        # The edge to the author's module, which may raise anything while it is imported.
        reason = f"{type(error).__name__}: {error}"
        raise AppNotImportable(f"{path!r}: cannot import {module_name!r}: {reason}") from error


def _attribute(module: Any, attribute: str, path: str) -> Any:
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise AppNotImportable(f"{path!r}: the module has no {attribute!r}") from error


def _check_agent(agent: Any) -> None:
    if not isinstance(agent, Agent):
        raise AuthoringError(f"an app has agents, not a {type(agent).__name__}")


def _check_endpoint(name: Any, endpoint: Any) -> None:
    if not isinstance(name, str) or not _ENDPOINT_NAME.fullmatch(name) or name == _SCRIPTED:
        raise AuthoringError(
            f"endpoint {name!r}: its name must be lower-case letters, digits and _.- and be free"
        )
    if not isinstance(endpoint, Endpoint):
        kind = type(endpoint).__name__
        raise AuthoringError(f"endpoint {name!r} must be an Endpoint, not a {kind}")
