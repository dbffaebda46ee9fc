"""Refused inputs: a typed failure that no retry can mend, and nothing written anywhere."""

import asyncio
from typing import Any

import pytest
from harness.turns import (
    Answers,
    activities_of,
    execute,
    failure_of,
    request,
    rows,
    run_turn,
    start_raw,
    text,
)
from temporalio.client import Client

from perdure import Agent, App, tool
from perdure.contracts.canonical import encoded_bytes
from perdure.contracts.limits import MESSAGE_BYTES_MAX
from perdure.contracts.messages import user_message
from perdure.stores import Store

CANARY = "canary-9d2f"
ROOM = MESSAGE_BYTES_MAX - encoded_bytes(user_message("").model_dump(mode="json"))


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


def desk(model: Answers) -> App:
    """An app of one agent."""
    return App([Agent("desk", model, tools=[echo])])


async def assert_refused(
    running: Any, client: Client, task_queue: str, store: Store, inputs: list[list[Any]], code: str
) -> None:
    """The workflow itself refuses each: no activity, no row, no word of the input in the failure.

    They run at once on one worker; `inputs` holds the arguments of each.
    """
    model = Answers(text("never"))

    async def refuse(arguments: list[Any]) -> None:
        handle = await start_raw(client, task_queue, *arguments)
        failure = await failure_of(handle)
        shown = str(arguments)[:200]
        assert (failure.type, failure.non_retryable) == (code, True), shown
        assert activities_of(await handle.fetch_history()) == [], shown
        assert CANARY not in failure.message, shown
        assert len(failure.message) <= 300, shown

    async with running(desk(model)):
        await asyncio.gather(*map(refuse, inputs))

    assert rows(store) == {}
    assert model.requests == []


async def test_a_message_of_one_character_too_many_is_refused_by_its_encoded_bytes(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    # Newlines, NULs, accents and emoji take more bytes than one.
    encoded = {"x": 1, "\n": 2, "\x00": 6, "é": 6, "😀": 12}
    inputs = [[request(char * (ROOM // size + 1))] for char, size in encoded.items()]

    await assert_refused(running, client, task_queue, file_store, inputs, "message_too_large")


async def test_the_largest_message_is_taken(running: Any, client: Client, task_queue: str) -> None:
    largest = [character * (ROOM // size) for character, size in {"x": 1, "😀": 12}.items()]
    model = Answers(text("read"))

    async with running(desk(model)):
        for number, message in enumerate(largest):
            result = await run_turn(client, task_queue, message, request_id=f"r{number}")
            assert result.answer == "read"

    assert [sent.messages[-1].text for sent in model.requests] == largest


async def test_a_blank_message_is_refused(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    blanks = ["", " \n\t", "\u2003", {"parts": [{"text": " "}, {"text": "\n"}]}]
    inputs = [[request(blank)] for blank in blanks]

    await assert_refused(running, client, task_queue, file_store, inputs, "message_blank")


async def test_a_bad_namespace_or_id_is_refused(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    changes = [
        {"namespace": ""},
        {"namespace": f"tenant/{CANARY}"},
        {"namespace": "a:b"},
        {"namespace": "n" * 129},
        {"conversation_id": ""},
        {"conversation_id": f"{CANARY} "},
        {"request_id": "r" * 129},
        {"request_id": "straße"},
        {"request_id": "r1\n"},
        {"agent": f"{CANARY}/x"},
        {"tools": [f"{CANARY}.x"]},
        {"tools": ["t" * 65]},
    ]
    inputs = [[request(**change)] for change in changes]

    await assert_refused(running, client, task_queue, file_store, inputs, "invalid_identifier")


async def test_unknown_fields_and_kinds_are_refused(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    changes: list[dict[str, Any]] = [
        {CANARY: 1},
        {"workflow_id": CANARY},
        {"limits": {"model_steps_max": 3, CANARY: 1}},
        {"message": {"parts": [{"text": "go", CANARY: CANARY}]}},
        {"message": {"parts": [{"type": CANARY, "text": "go"}]}},
        {"message": {"role": "assistant", "parts": [{"text": CANARY}]}},
    ]
    inputs = [[request() | change] for change in changes]

    await assert_refused(running, client, task_queue, file_store, inputs, "invalid_request")


async def test_values_of_another_type_are_refused(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    deep: Any = CANARY
    for _ in range(400):
        deep = {"parts": deep}
    changes: list[dict[str, Any]] = [
        {"message": 5},
        {"message": None},
        {"message": [CANARY]},
        {"message": {"parts": []}},
        {"message": {"parts": [{"text": 5}]}},
        {"message": deep},
        {"tools": CANARY},
        {"limits": {"model_steps_max": 0}},
        {"limits": {"model_steps_max": CANARY}},
        {"limits": {"model_steps_max": 1001}},
        {"agent": None},
        {"request_id": 7},
    ]
    inputs = [[request() | change] for change in changes]

    await assert_refused(running, client, task_queue, file_store, inputs, "invalid_request")


async def test_a_missing_field_is_refused(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    needed = ("agent", "conversation_id", "request_id", "message")
    inputs = [
        [{name: value for name, value in request().items() if name != missing}]
        for missing in needed
    ]

    await assert_refused(running, client, task_queue, file_store, inputs, "invalid_request")


async def test_what_is_no_object_is_refused(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    values = [None, CANARY, [CANARY], [], 7, 1.5, True, b"\x00\xff"]
    inputs = [[value] for value in values]

    await assert_refused(running, client, task_queue, file_store, inputs, "invalid_request")


async def test_another_number_of_arguments_is_refused(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    # The second argument is ours: it carries the state of a turn that continued as new.
    state = {"turn": {"conversation_id": "c1", "request_id": "r1"}, "agent": "desk"}
    inputs = [[], [request(), None], [None, state], [request(), state], [request()] * 3]

    await assert_refused(running, client, task_queue, file_store, inputs, "invalid_request")


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"agent": "nobody"}, "unknown_agent"), ({"tools": ["echo", "sudo"]}, "capability_denied")],
    ids=["unknown agent", "tools that the agent lacks"],
)
async def test_what_only_the_worker_knows_is_refused_before_anything_is_written(
    running: Any,
    client: Client,
    task_queue: str,
    file_store: Store,
    changes: dict[str, Any],
    code: str,
) -> None:
    model = Answers(text("never"))
    async with running(desk(model)):
        handle = await start_raw(client, task_queue, request() | changes)
        failure = await failure_of(handle)
        history = await handle.fetch_history()

    assert (failure.type, failure.non_retryable) == (code, True)
    assert activities_of(history) == ["call_model"]
    assert rows(file_store) == {}
    assert model.requests == []


async def test_another_namespace_cannot_take_a_conversation(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    model = Answers(text("mine"))
    async with running(desk(model)):
        await execute(client, task_queue, request(namespace="tenant.a"))
        before = rows(file_store)
        foreign = await start_raw(client, task_queue, request(namespace="tenant.b"))
        failure = await failure_of(foreign)

    assert (failure.type, failure.non_retryable) == ("namespace_mismatch", True)
    assert rows(file_store) == before
    assert len(model.requests) == 1


async def test_a_refused_request_may_be_sent_again_corrected(
    running: Any, client: Client, task_queue: str
) -> None:
    model = Answers(text("fine"))
    async with running(desk(model)):
        await failure_of(await start_raw(client, task_queue, request(""), workflow_id="w1"))
        result = await execute(client, task_queue, request("go"), workflow_id="w1")

    assert (result["status"], result["answer"]) == ("completed", "fine")


async def test_a_lone_surrogate_in_the_message_is_replaced(
    running: Any, client: Client, task_queue: str
) -> None:
    model = Answers(text("read"))
    async with running(desk(model)):
        result = await asyncio.wait_for(
            execute(client, task_queue, request("a\ud800b\x00c")), timeout=20
        )
        again = await execute(client, task_queue, request("a\ud800b\x00c"))

    assert result == again
    assert model.requests[0].messages[-1].text == "a�b␀c"
    assert len(model.requests) == 1
