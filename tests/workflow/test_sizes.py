"""Temporal holds identities and decisions: its history does not grow with what was said (P9)."""

from collections.abc import Callable
from typing import Any

import pytest
from harness.turns import Answers, begin, call, calls, text
from temporalio.client import Client

from perdure import Agent, App, ReplaySafety, tool
from perdure.client import TurnHandle
from perdure.contracts.messages import assistant_message, user_message
from perdure.stores import Store
from perdure.stores.transcript import ConversationAppend, append_messages, ensure_conversation

pytestmark = pytest.mark.server

KIB = 1024
BLOCK = "x" * 5 * KIB


@tool(replay=ReplaySafety.SAFE)
async def echo(word: str) -> str:
    """Give back what came."""
    return word


def desk(model: Answers) -> App:
    """One agent with one tool."""
    return App([Agent("desk", model, "Be brief.", [echo])])


async def size_of(client: Client, handle: TurnHandle) -> tuple[int, int]:
    """Events and bytes of a finished turn's history."""
    result = await handle.wait()
    assert result.status == "completed"
    history = await client.get_workflow_handle(handle.workflow_id).fetch_history()
    return len(history.events), sum(event.ByteSize() for event in history.events)


def talk(store: Store, conversation_id: str, messages: int) -> None:
    """Give a conversation a past of messages of 500 characters."""
    store.transact(ensure_conversation, "default", conversation_id)
    if messages:
        said = (user_message("u" * 500), assistant_message("a" * 500)) * (messages // 2)
        append = ConversationAppend(
            namespace="default", conversation_id=conversation_id, expected_version=0, messages=said
        )
        store.transact(append_messages, append)


async def test_a_turn_with_one_tool_is_23_events_and_4_kb_whatever_was_said_before(
    client: Client, task_queue: str, file_store: Store, running: Callable[..., Any]
) -> None:
    sizes: dict[int, tuple[int, int]] = {}
    for messages in (0, 20, 200):
        conversation_id = f"conversation-{messages:03d}"
        talk(file_store, conversation_id, messages)
        model = Answers(calls(call("echo", word="a word")), text("That was a word."))
        queue = f"{task_queue}-{messages}"
        async with running(desk(model), queue=queue):
            handle = await begin(client, queue, "Say a word", conversation_id=conversation_id)
            sizes[messages] = await size_of(client, handle)
        assert len(model.requests[0].messages) == messages + 1

    assert {events for events, _ in sizes.values()} == {23}
    assert max(size for _, size in sizes.values()) <= 4 * KIB
    assert max(size for _, size in sizes.values()) <= 1.02 * min(size for _, size in sizes.values())


async def test_fifty_calls_of_5_kb_one_after_the_other_stay_under_110_kb(
    client: Client, task_queue: str, running: Callable[..., Any]
) -> None:
    steps = [calls(call("echo", word=BLOCK)) for _ in range(50)]
    async with running(desk(Answers(*steps, text("done")))):
        _, size = await size_of(client, await begin(client, task_queue))

    assert size < 110 * KIB


async def test_fifty_calls_of_5_kb_at_once_stay_under_110_kb(
    client: Client, task_queue: str, running: Callable[..., Any]
) -> None:
    many = calls(*(call("echo", word=BLOCK) for _ in range(50)))
    async with running(desk(Answers(many, text("done")))):
        _, size = await size_of(client, await begin(client, task_queue))

    assert size < 110 * KIB
