"""Models by name: `provider:what`.

A provider is loaded when it is first asked for, so a worker pays only for what it uses.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from perdure.contracts.errors import AuthoringError
from perdure.contracts.model import Model

if TYPE_CHECKING:
    from perdure.activities.providers.scripted import ScriptedModel

__all__ = ["ScriptedModel", "resolve_model"]


def resolve_model(spec: str) -> Model:
    """The model that a string names: `scripted:path.yaml`, see `ScriptedModel.from_file`.

    Raises AuthoringError for a provider that does not exist.
    """
    provider, colon, what = spec.partition(":")
    if not colon or provider not in _PROVIDERS:
        known = ", ".join(f"{name}:..." for name in _PROVIDERS)
        raise AuthoringError(f"model {spec!r}: there is no such provider; there is: {known}")
    return _PROVIDERS[provider](what)


def _scripted(path: str) -> Model:
    from perdure.activities.providers.scripted import ScriptedModel

    return ScriptedModel.from_file(path)


_PROVIDERS: Final[dict[str, Callable[[str], Model]]] = {"scripted": _scripted}


def __getattr__(name: str) -> Any:
    if name == "ScriptedModel":
        from perdure.activities.providers.scripted import ScriptedModel

        return ScriptedModel
    raise AttributeError(f"module 'perdure.activities.providers' has no attribute {name!r}")
