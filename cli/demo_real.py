"""`perdure demo --real-model`: the demo's first scenes, with a small model in place of the script.

The model answers over HTTP, from a process of its own that outlives the workers. Its server counts
what it was asked, and that count is held against the ledger's: an answer that was bought twice, or
is missing, is seen.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from perdure.cli.demo import Show, run_demo
from perdure.cli.demo_real_front import HOST, MODEL
from perdure.cli.demo_real_model import ModelServer, ServedCall, check_installed
from perdure.cli.demo_scenes import SCENES, Check, times
from perdure.contracts.views import ModelAttemptView, TurnDetails

APP: Final = "perdure.examples.real_model:app"
AGENT: Final = "small-desk"
# Those that the model understands: it knows two tools, both of which take an order's number.
REAL_SCENES: Final = SCENES[:2]

_SCENE_TIMEOUT_S: Final = 180.0
_COMMITTED: Final = "committed"


class RealModel:
    """The model's server, and its account of the calls that each scene made."""

    def __init__(self, folder: Path) -> None:
        self.server = ModelServer(folder)
        self._accounted = 0

    async def __aenter__(self) -> object:
        await self.server.start()
        return self

    async def __aexit__(self, *exit_of: object) -> None:
        await self.server.stop()

    def environment(self) -> Mapping[str, str]:
        """Where workers find it: never through a proxy of the environment."""
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), HOST)))
        address = {"PERDURE_REAL_MODEL_URL": self.server.url}
        return address | {"NO_PROXY": direct, "no_proxy": direct}

    def announcement(self) -> str:
        """Which model answers, and where."""
        return f"A real model, {MODEL}, answers at {self.server.url}"

    def checks(self, details: TurnDetails) -> tuple[Check, ...]:
        """Every call since the last scene stands in the ledger, and no other, to the token."""
        served = self.server.served()[self._accounted :]
        self._accounted += len(served)
        return (account(served, details.model_attempts),)


def account(served: list[ServedCall], attempts: tuple[ModelAttemptView, ...]) -> Check:
    """Whether the server's calls are the ledger's attempts, in order, each answer to the token."""
    tokens = ", ".join(f"{call.input_tokens} + {call.output_tokens}" for call in served)
    pairs = zip(served, attempts, strict=False)
    return Check(
        f"the model's server was asked {times(len(served))} ({tokens} tokens), as the ledger says",
        0 < len(served) == len(attempts) and all(_agree(call, attempt) for call, attempt in pairs),
    )


def _agree(call: ServedCall, attempt: ModelAttemptView) -> bool:
    if attempt.status != _COMMITTED:
        # Its worker did not live to hear, or to say, what it cost.
        return True
    usage = attempt.usage
    recorded = ServedCall("answered", usage.input_tokens + usage.cached_tokens, usage.output_tokens)
    return call == recorded


REAL_SHOW: Final = Show(APP, AGENT, REAL_SCENES, _SCENE_TIMEOUT_S, RealModel)


async def run_real_demo(folder: Path | None, *, stay: bool) -> int:
    """See `run_demo`. Raises SetupError if a package that it needs is missing."""
    check_installed()
    return await run_demo(folder, stay=stay, show=REAL_SHOW)
