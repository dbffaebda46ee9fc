"""Structured output, settings of one turn, media and structured results through a real worker."""

from typing import Any

import pytest
from harness.turns import (
    Answers,
    Step,
    assert_next_turn_is_valid,
    begin,
    call,
    calls,
    details,
    failure_of,
    run_turn,
    start_raw,
    text,
)
from harness.turns import request as turn_request
from pydantic import BaseModel, Field, field_validator
from temporalio.client import Client

from perdure import Agent, App, ReplaySafety, ToolReturn, tool
from perdure.contracts.messages import MediaPart, MessageKind, TextPart, ThinkingPart
from perdure.contracts.model import FinishReason, ModelResponse, Usage
from perdure.contracts.turn import TurnStatus
from perdure.stores import Store
from perdure.stores.queries import Reader

pytestmark = pytest.mark.server

Running = Any


class City(BaseModel):
    """What the agent has to answer."""

    name: str
    people: int = Field(ge=0)

    @field_validator("name")
    @classmethod
    def _no_crash(cls, value: str) -> str:
        if value == "crash":
            raise RuntimeError("a validator of the author broke")
        return value


def desk(*steps: Step, **options: Any) -> tuple[App, Answers]:
    """An agent with an output type."""
    model = Answers(*steps)
    return App([Agent("desk", model, output_type=City, **options)]), model


def said(store: Store, request_id: str = "r1") -> list[tuple[str, str, str]]:
    """The transcript: role, kind and text."""
    entries = Reader(store).transcript("default", "c1")
    return [(e.message.role.value, e.message.kind.value, e.message.text) for e in entries]


async def test_an_answer_that_fits_is_the_result_as_validated_json(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    app, model = desk(text('```json\n{"people": "12", "name": "Bern"}\n```'))
    async with running(app):
        result = await run_turn(client, task_queue)

    assert result.output == {"name": "Bern", "people": 12}
    assert result.answer == '{"name":"Bern","people":12}'
    assert (result.status, result.stop_reason) == (TurnStatus.COMPLETED, "answered")
    schema = model.requests[0].output_schema
    assert schema is not None
    assert set(schema["properties"]) == {"name", "people"}


async def test_an_invalid_answer_is_repaired_in_the_same_turn(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    app, model = desk(
        text("Bern, I think"), text('{"name":"Bern"}'), text('{"name":"B","people":1}')
    )
    async with running(app):
        result = await run_turn(client, task_queue)

    assert result.output == {"name": "B", "people": 1}
    told = [request.messages[-1].text for request in model.requests[1:]]
    assert "Invalid JSON" in told[0]
    assert "people: Field required" in told[1]
    assert [(role, kind) for role, kind, _ in said(file_store)] == [
        ("user", "normal"),
        ("assistant", "normal"),
        ("user", MessageKind.REPAIR.value),
        ("assistant", "normal"),
        ("user", MessageKind.REPAIR.value),
        ("assistant", "normal"),
    ]


async def test_after_two_repairs_the_turn_fails_and_leaves_a_valid_transcript(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    app, model = desk(text("no"), text('{"name":"crash","people":1}'), text(""), text("never"))
    async with running(app):
        handle = await start_raw(client, task_queue, turn_request())
        failure = await failure_of(handle)
        again = await run_turn(client, task_queue)

    assert failure.type == "output_invalid"
    assert len(model.requests) == 3
    assert "RuntimeError" in model.requests[2].messages[-1].text
    assert (again.status, again.stop_reason) == (TurnStatus.FAILED, "output_invalid")
    assert said(file_store)[-1][1] == MessageKind.MARKER.value


async def test_calls_come_first_and_only_the_final_answer_has_to_fit(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    @tool(replay=ReplaySafety.SAFE)
    async def look() -> str:
        """Looks."""
        return "Bern has 12"

    app, model = desk(calls(call("look")), text('{"name":"Bern","people":12}'), tools=[look])
    async with running(app):
        result = await run_turn(client, task_queue)

    assert result.output == {"name": "Bern", "people": 12}
    assert [request.output_schema is not None for request in model.requests] == [True, True]


async def test_the_same_request_again_gives_the_same_output_without_a_call(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    app, model = desk(text('{"name":"Bern","people":12}'))
    async with running(app):
        first = await run_turn(client, task_queue)
        again = await run_turn(client, task_queue)

    assert first == again
    assert len(model.requests) == 1


async def test_a_large_output_stays_in_the_ledger(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    name = "x" * 20_000
    app, _ = desk(text(f'{{"name":"{name}","people":1}}'))
    async with running(app):
        result = await run_turn(client, task_queue)

    assert (result.output, result.answer_cut) == (None, True)
    assert name in str(details(file_store, result).turn.answer)


async def test_settings_of_the_turn_are_laid_over_those_of_the_agent(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    model = Answers(text("done"))
    settings = {"temperature": 0.5, "seed": 1}
    async with running(App([Agent("desk", model, model_parameters=settings)])):
        await run_turn(client, task_queue, parameters={"temperature": 0})
        await assert_next_turn_is_valid(client, task_queue, model)

    assert model.requests[0].parameters == {"temperature": 0, "seed": 1}
    assert model.requests[1].parameters == settings


async def test_an_image_by_url_reaches_the_model_and_the_transcript(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    model = Answers(text("a cat"))
    picture = {"type": "media", "url": "https://example.org/cat.png", "media_type": "image/png"}
    message = {"parts": [{"text": "What is this?"}, picture]}
    async with running(App([Agent("desk", model)])):
        await run_turn(client, task_queue, message)
        await run_turn(client, task_queue, {"parts": [picture]}, request_id="r2")

    parts = model.requests[0].messages[-1].parts
    media = MediaPart(url="https://example.org/cat.png", media_type="image/png")
    assert parts == (TextPart(text="What is this?"), media)
    entries = Reader(file_store).transcript("default", "c1")
    assert entries[2].message.parts == (media,)


class Weather(BaseModel):
    """Structured content of a tool."""

    degrees: float


async def test_structured_content_of_a_tool_is_kept_beside_its_text(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    @tool(replay=ReplaySafety.SAFE)
    async def weather() -> ToolReturn:
        """The weather."""
        return ToolReturn("It is warm.", Weather(degrees=21.5))

    @tool(replay=ReplaySafety.SAFE)
    async def broken() -> ToolReturn:
        """Its structured content is no JSON."""
        return ToolReturn("It is warm.", {"when": object()})

    model = Answers(calls(call("weather"), call("broken")), text("done"))
    async with running(App([Agent("desk", model, tools=[weather, broken])])):
        await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    results = model.requests[1].messages[-1].results
    assert [(r.text, r.structured, r.flags) for r in results] == [
        ("It is warm.", {"degrees": 21.5}, ()),
        ("It is warm.", None, ("structured_dropped",)),
    ]


async def test_an_answer_that_ran_into_its_length_says_so(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    cut = ModelResponse(parts=(TextPart(text="Once upon"),), finish_reason=FinishReason.LENGTH)
    model = Answers(cut)
    async with running(App([Agent("desk", model)])):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert (result.status, result.stop_reason) == (TurnStatus.COMPLETED, "length")
    assert result.answer == "Once upon"


async def test_a_filtered_answer_is_not_asked_for_again(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    filtered = ModelResponse(
        parts=(ThinkingPart(text="hm"),),
        finish_reason=FinishReason.CONTENT_FILTER,
        usage=Usage(input_tokens=5),
    )
    model = Answers(filtered)
    async with running(App([Agent("desk", model)])):
        handle = await begin(client, task_queue)
        result = await handle.wait()
        await assert_next_turn_is_valid(client, task_queue, model)

    assert (result.status, result.stop_reason) == (TurnStatus.FAILED, "model_failed")
    assert "model_content_refused" in str(details(file_store, result).turn.detail)
    assert len([r for r in model.requests if r.turn_id == result.turn_id]) == 1
