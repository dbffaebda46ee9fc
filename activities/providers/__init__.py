"""Models by name: `provider:what`, see `docs/providers.md`.

A provider is loaded when it is first asked for, so a worker pays only for what it uses.
"""

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from perdure.agents import Endpoint
from perdure.contracts.errors import AuthoringError, ModelError
from perdure.contracts.model import Model

if TYPE_CHECKING:
    from perdure.activities.providers.direct import DirectModel
    from perdure.activities.providers.scripted import ScriptedModel

__all__ = ["ScriptedModel", "loaded_models", "resolve_model"]

_SCRIPTED: Final = "scripted"
# What the extra installs: one of these is missing where it was not.
_EXTRA: Final = frozenset(("pydantic_ai", "httpx2", "openai", "anthropic"))


def resolve_model(spec: str, endpoints: Mapping[str, Endpoint] | None = None) -> Model:
    """The model that a string names: `scripted:path.yaml` (see `ScriptedModel.from_file`), a
    provider's (`openai:gpt-5`), or one of an endpoint (`local:smollm`).

    Raises AuthoringError for a provider that does not exist or is not installed.
    """
    provider, colon, what = spec.partition(":")
    if provider == _SCRIPTED and colon:
        from perdure.activities.providers.scripted import ScriptedModel

        return ScriptedModel.from_file(what)
    if not colon:
        raise AuthoringError(
            f"model {spec!r}: no provider is named; there is: scripted:file.yaml, openai:gpt-5, ..."
        )
    try:
        from perdure.activities.providers.direct import DirectModel
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise AuthoringError(
            f"model {spec!r}: real models need an extra: pip install 'perdure[providers]'"
        ) from None
    return DirectModel(spec, endpoints or {})


def loaded_models(specs: Iterable[str], endpoints: Mapping[str, Endpoint]) -> dict[str, Model]:
    """The real models of those names, with their libraries loaded.

    One that cannot be had, or lacks its key, is left to the turn that asks for it.
    """
    found: dict[str, Model] = {}
    for spec in specs:
        if spec.partition(":")[0] == _SCRIPTED:
            continue
        with contextlib.suppress(AuthoringError, ModelError):
            found[spec] = model = resolve_model(spec, endpoints)
            cast("DirectModel", model).load()
    return found


def __getattr__(name: str) -> Any:
    if name == "ScriptedModel":
        from perdure.activities.providers.scripted import ScriptedModel

        return ScriptedModel
    raise AttributeError(f"module 'perdure.activities.providers' has no attribute {name!r}")
