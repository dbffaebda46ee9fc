"""The search attributes of a turn's workflow: named here, registered by `perdure dev` and compose.

They are set where the server knows them and never needed (DESIGN 3): a convenience of the UI.
"""

from typing import Final

from perdure.contracts.ids import TurnKey
from perdure.contracts.turn import TurnResult, TurnStatus

AGENT: Final = "PerdureAgent"
NAMESPACE: Final = "PerdureNamespace"
CONVERSATION: Final = "PerdureConversation"
STATUS: Final = "PerdureStatus"
STOP_REASON: Final = "PerdureStopReason"

# All are keywords.
SEARCH_ATTRIBUTES: Final = (AGENT, NAMESPACE, CONVERSATION, STATUS, STOP_REASON)
ENDED_ATTRIBUTES: Final = (STATUS, STOP_REASON)


def search_attributes(key: TurnKey, agent: str, result: TurnResult | None) -> dict[str, str]:
    """The values of a turn that is open (without a result) or ended."""
    values = {
        AGENT: agent,
        NAMESPACE: key.namespace,
        CONVERSATION: key.conversation_id,
        STATUS: TurnStatus.OPEN.value if result is None else result.status.value,
    }
    if result is not None:
        values[STOP_REASON] = result.stop_reason
    return values
