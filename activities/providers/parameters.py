"""An agent's and a turn's model parameters as the settings of a provider's client.

They are recorded in the ledger, so nothing secret is taken (headers are an endpoint's), and nothing
that would change who retries or waits.
"""

import sys
from collections.abc import Mapping
from typing import Any, Final, cast

from pydantic_ai.models import Model
from pydantic_ai.settings import ModelSettings

from perdure.contracts.errors import ModelRefused

_NOT_A_PARAMETER: Final = frozenset(
    # Time and retries are the agent's and the workflow's; a key in a header would be recorded.
    ("timeout", "request_timeout", "first_event_timeout", "max_retries", "extra_headers")
)
_SHOWN_CHARS_MAX: Final = 64


def settings_for(
    model: Model, parameters: Mapping[str, Any], defaults: Mapping[str, Any]
) -> ModelSettings:
    """The parameters over the defaults.

    Raises ModelRefused for a parameter that the model does not know or would ignore.
    """
    known = _known_to(model)
    for name in parameters:
        shown = name[:_SHOWN_CHARS_MAX]
        if name in _NOT_A_PARAMETER or name not in known:
            raise ModelRefused(f"the model parameter {shown!r} is not one of this provider's")
        if name in model.unsupported_settings:
            raise ModelRefused(f"this provider would ignore the model parameter {shown!r}")
    return cast("ModelSettings", {**defaults, **parameters})


def _known_to(model: Model) -> frozenset[str]:
    names = set(ModelSettings.__annotations__)
    for kind in type(model).__mro__:
        # The settings of a provider are declared in the package of its model.
        package = ".".join(kind.__module__.split(".")[:3])
        for name, value in vars(sys.modules.get(package, object)).items():
            if name.endswith("ModelSettings") and isinstance(value, type):
                names.update(getattr(value, "__annotations__", {}))
    return frozenset(names)
