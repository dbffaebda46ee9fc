"""What an author writes with: `App`, `Agent`, `Endpoint`, `@tool` and the context a tool is given.

Declarations only: nothing here knows Temporal, a store or a provider. It imports `contracts`.
"""

from perdure.agents.agent import Agent
from perdure.agents.app import App, load_app
from perdure.agents.context import BlockingToolContext, ToolContext
from perdure.agents.endpoint import Endpoint
from perdure.agents.returns import ToolReturn
from perdure.agents.tool import NOT_EXECUTED, UNKNOWN, InvalidArguments, Tool, tool
from perdure.contracts.safety import ReplaySafety

__all__ = [
    "Agent",
    "App",
    "BlockingToolContext",
    "Endpoint",
    "InvalidArguments",
    "NOT_EXECUTED",
    "ReplaySafety",
    "Tool",
    "ToolContext",
    "ToolReturn",
    "UNKNOWN",
    "load_app",
    "tool",
]
