"""Makes the client for a model's name: a named endpoint's, or a provider's that pydantic-ai knows.

No client tries anything again by itself: the activity does, and counts. Keys are read here, handed
to the client and kept nowhere else.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from pydantic_ai.exceptions import UserError
from pydantic_ai.models import Model, infer_model
from pydantic_ai.providers import Provider, infer_provider, infer_provider_class

from perdure.activities.providers.provider_errors import setup_error
from perdure.activities.providers.stream_watch import watched_client
from perdure.activities.providers.to_provider import Speaker
from perdure.agents import Endpoint
from perdure.contracts.errors import AuthoringError

_GATEWAY: Final = "gateway/"
# Sent to a server of one's own that asks for no key; the clients insist on one.
_NO_KEY: Final = "none"
_RESPONSES: Final = "openai responses"


@dataclass(frozen=True)
class Client:
    """A model that can be asked, and what is asked with it."""

    model: Model
    protocol: str
    speaker: Speaker
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])


def check_name(origin: str, endpoint: Endpoint | None) -> None:
    """Raises AuthoringError for a provider that does not exist or lacks its package."""
    if endpoint is not None and endpoint.protocol is not None:
        return
    if origin.startswith(_GATEWAY):
        if endpoint is not None:
            raise AuthoringError(f"endpoint {origin!r}: a gateway is set up by its environment")
        return
    try:
        kind = infer_provider_class(origin)
    except ValueError:
        raise AuthoringError(
            f"model {origin}:...: there is no such provider; there is: scripted:, openai:, "
            "anthropic: and others (docs/providers.md), and what App(endpoints={...}) names"
        ) from None
    except ImportError:
        raise AuthoringError(
            f"model {origin}:...: its client is not installed: "
            f"pip install 'pydantic-ai-slim[{origin}]'"
        ) from None
    if endpoint is not None:
        _check_replaces(origin, kind, endpoint)


def make_client(origin: str, name: str, endpoint: Endpoint | None) -> Client:
    """The client. Slow: it loads the provider's library.

    Raises ModelCredentialsRefused where a key is missing, ModelRefused for other settings.
    """
    defaults: dict[str, Any] = {}
    try:
        if endpoint is not None and endpoint.protocol is not None:
            model = _own_server(origin, name, endpoint)
        else:
            model = infer_model(f"{origin}:{name}", _provider_factory(endpoint))
            if endpoint is not None and endpoint.headers:
                defaults["extra_headers"] = endpoint.plain_headers()
            if "max_retries" not in model.unsupported_settings:
                defaults["max_retries"] = 0
    except UserError as error:
        raise setup_error(error, origin) from None
    protocol = _protocol_of(model, origin)
    if protocol == _RESPONSES:
        # The ledger is the memory; nothing has to be kept with the provider.
        defaults["openai_store"] = False
        _build_event_types()
    speaker = Speaker(origin, model.system, model.base_url)
    return Client(model=model, protocol=protocol, speaker=speaker, defaults=defaults)


def _build_event_types() -> None:
    # They are built when they are first read: a second in which no heartbeat could be sent.
    from openai.types.responses import ResponseStreamEvent

    union, *_ = get_args(ResponseStreamEvent)
    for kind in get_args(union):
        kind.model_rebuild()


def _own_server(origin: str, name: str, endpoint: Endpoint) -> Model:
    if endpoint.protocol == "anthropic":
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(**_client_options(endpoint))
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    openai_client = AsyncOpenAI(**_client_options(endpoint))
    # Read from the environment, and none of this server's business.
    openai_client.organization = openai_client.project = None
    provider = OpenAICompatibleProvider(origin, openai_client=openai_client)
    if endpoint.protocol == "openai-responses":
        return OpenAIResponsesModel(name, provider=provider)
    return OpenAIChatModel(name, provider=provider)


def _client_options(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "base_url": endpoint.base_url,
        "api_key": endpoint.plain_key() or _NO_KEY,
        "default_headers": endpoint.plain_headers(),
        "http_client": watched_client(),
        "max_retries": 0,
    }


def _provider_factory(endpoint: Endpoint | None) -> Callable[[str], Provider[Any]]:
    def make(name: str) -> Provider[Any]:
        if name.startswith(_GATEWAY):
            return infer_provider(name)
        kind = infer_provider_class(name)
        options: dict[str, Any] = {}
        if endpoint is not None and endpoint.api_key is not None:
            options["api_key"] = endpoint.plain_key()
        if endpoint is not None and endpoint.base_url is not None:
            options["base_url"] = endpoint.base_url
        if _takes_our_http_client(kind):
            options["http_client"] = watched_client()
        return kind(**options)

    return make


def _check_replaces(origin: str, kind: type[Provider[Any]], endpoint: Endpoint) -> None:
    given = {"api_key": endpoint.api_key, "base_url": endpoint.base_url}
    for option, value in given.items():
        if value is not None and option not in _options_of(kind):
            raise AuthoringError(
                f"endpoint {origin!r}: this provider takes no {option}; use its environment"
            )


def _options_of(kind: type[Provider[Any]]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.__init__).parameters


def _takes_our_http_client(kind: type[Provider[Any]]) -> bool:
    # Some clients still need the older library of the same shape; they bring their own.
    option = _options_of(kind).get("http_client")
    wanted = "" if option is None else str(option.annotation)
    return any(name in wanted for name in ("httpx2", "AsyncHTTPClient", "OpenAIHTTPClient"))


def _protocol_of(model: Model, origin: str) -> str:
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if "OpenAIResponsesModel" in kinds:
        return _RESPONSES
    if "OpenAIChatModel" in kinds:
        return "openai chat"
    if "AnthropicModel" in kinds:
        return "anthropic"
    return origin
