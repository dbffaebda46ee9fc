"""An app whose agents answer from a script, with the tools that it really has."""

import copy

from perdure.agents import Agent, App
from perdure.contracts.model import Model


def with_model(app: App, model: str | Model, *, agent: str | None = None) -> App:
    """A copy of the app whose agents (only `agent`, if it is named) have that model.

    Raises UnknownAgent, and AuthoringError if it is no model.
    """
    if agent is not None:
        app.agent(agent)
    agents = [
        _with_model(found, model) if agent in (None, found.name) else found
        for found in app.agents.values()
    ]
    return App(agents, app.lifespan, endpoints=app.endpoints)


def _with_model(agent: Agent, model: str | Model) -> Agent:
    copied = copy.copy(agent)
    # An agent checks its model when it is made.
    copied.model = Agent(agent.name, model).model
    return copied
