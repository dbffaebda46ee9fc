"""Real models, asked through pydantic-ai's direct API: one streamed request, no retry, our errors.

Loaded when the first such model is resolved; `pip install 'perdure[providers]'` brings its library.
It must not log or keep what is said.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from pydantic_ai import messages as pai
from pydantic_ai.direct import model_request_stream
from pydantic_ai.models import StreamedResponse

from perdure.activities.providers.from_provider import read_response
from perdure.activities.providers.parameters import settings_for
from perdure.activities.providers.part_table import check_parts
from perdure.activities.providers.provider_clients import Client, check_name, make_client
from perdure.activities.providers.provider_errors import model_error
from perdure.activities.providers.stream_watch import StreamWatch, watching
from perdure.activities.providers.to_provider import to_messages, to_parameters
from perdure.agents import Endpoint
from perdure.contracts.errors import AuthoringError, ModelProtocolError
from perdure.contracts.limits import ANSWER_PARTS_BYTES_MAX
from perdure.contracts.model import ModelRequest, ModelResponse, ModelSink

# They write whole prompts at their lowest levels.
_LOGGERS: Final = (
    *("openai", "anthropic", "groq", "google_genai", "mistralai", "cohere", "botocore"),
    *("httpx", "httpx2", "httpcore", "httpcore2"),
)


class DirectModel:
    """The model of a name such as `openai:gpt-5` or `local:smollm`, with its client.

    Raises AuthoringError for a provider that does not exist. A key which is missing fails the
    turn that needs it, not its worker.
    """

    def __init__(self, spec: str, endpoints: Mapping[str, Endpoint]) -> None:
        self._origin, _, self._model_name = spec.partition(":")
        self._endpoint = endpoints.get(self._origin)
        self._client: Client | None = None
        self.name = spec
        if not self._model_name:
            raise AuthoringError(f"model {spec!r}: a model's name must follow the colon")
        check_name(self._origin, self._endpoint)

    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        """Ask once, streaming into the sink. Raises ModelError."""
        # In a thread, as heartbeats must go on.
        client = self._client or await asyncio.to_thread(self.load)
        check_parts(client.protocol, request.messages)
        settings = settings_for(client.model, request.parameters, client.defaults)
        schemas = bool(client.model.profile.get("supports_json_schema_output", False))
        with watching() as watch:
            try:
                async with model_request_stream(
                    client.model,
                    to_messages(request, client.speaker, enforces_schemas=schemas),
                    model_settings=settings,
                    model_request_parameters=to_parameters(request, enforces_schemas=schemas),
                    # Prompts go into traces only by our own switch.
                    instrument=False,
                ) as stream:
                    return await self._read(stream, sink, watch)
            except Exception as error:  # The edge to the providers' libraries.
                known = model_error(error, watch.status)
                if known is None:
                    raise
                # Without its cause, which quotes the provider.
                raise known from None

    def load(self) -> Client:
        """The client, made at the first call: for seconds, as its library is loaded.

        Raises ModelCredentialsRefused where a key is missing.
        """
        if self._client is None:
            _quieten()
            self._client = make_client(self._origin, self._model_name, self._endpoint)
        return self._client

    async def _read(
        self, stream: StreamedResponse, sink: ModelSink, watch: StreamWatch
    ) -> ModelResponse:
        size = 0
        async for event in stream:
            match event:
                case pai.PartStartEvent(part=pai.TextPart(content=said)):
                    size += len(said)
                    await _say(sink.text, said)
                case pai.PartDeltaEvent(delta=pai.TextPartDelta(content_delta=said)):
                    size += len(said)
                    await _say(sink.text, said)
                case pai.PartStartEvent(part=pai.ThinkingPart(content=said)):
                    size += len(said)
                    await _say(sink.thinking, said)
                case pai.PartDeltaEvent(delta=pai.ThinkingPartDelta(content_delta=said)):
                    size += len(said or "")
                    await _say(sink.thinking, said or "")
                case pai.PartDeltaEvent(delta=pai.ToolCallPartDelta(args_delta=str(args))):
                    size += len(args)
                case _:
                    pass
            if size > ANSWER_PARTS_BYTES_MAX:
                # Arguments of a call never reach the sink, which has the same bound.
                raise ModelProtocolError("the stream is longer than any answer", retryable=False)
        watch.check_end()
        return read_response(stream.get(), self._origin)


def _quieten() -> None:
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        # Whoever has set a level of their own meant it.
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)


async def _say(channel: Any, said: str) -> None:
    if said:
        await channel(said)
