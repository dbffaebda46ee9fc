"""`call_model`: opens the turn, buys one answer, commits it or the turn (DESIGN 4).

The request is fixed in the ledger before the call and the answer is committed before anything else
happens, so neither a retry nor a reset buys an answer twice (promise P7).
"""

import asyncio
import json
import logging
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure.activities.answers import check_response, plan_answer
from perdure.activities.engine import Engine, current_owner
from perdure.activities.failures import as_failure
from perdure.activities.ledger_calls import to_its_end
from perdure.activities.owners import OwnerState, owner_state
from perdure.activities.recorder import Piece, Recorder, RecordingSink
from perdure.agents import Agent
from perdure.contracts.calls import CallModel, CallRef, StepKind, StepReply
from perdure.contracts.canonical import canonical_json
from perdure.contracts.errors import (
    AgentUnavailable,
    AuthoringError,
    CapabilityDenied,
    ConversationBusy,
    Fenced,
    LedgerBehind,
    ModelError,
    ModelFailed,
    ModelUnavailable,
    PerdureError,
    RequestError,
    Superseded,
)
from perdure.contracts.events import ModelPrepared, ToolCalled, UserMessageRecorded
from perdure.contracts.failpoints import failpoint
from perdure.contracts.messages import Message
from perdure.contracts.model import ModelRequest, ModelResponse
from perdure.contracts.safety import MODEL_ERROR_TRIES, backoff_s
from perdure.contracts.timing import current_timing
from perdure.contracts.tools import ToolSpec
from perdure.stores.commands import (
    CommitAnswer,
    Eviction,
    FailAttempt,
    Holder,
    PrepareKind,
    PrepareStep,
    StepState,
    TurnContext,
)
from perdure.stores.ledger import (
    commit_answer,
    fail_model_attempt,
    find_opened,
    load_context,
    record_superseded,
    turn_state,
)
from perdure.stores.partials import append_step_segments
from perdure.stores.turns import prepare_step

logger = logging.getLogger("perdure.activities")


class ModelStep:
    """One execution of `call_model`."""

    def __init__(self, engine: Engine, call: CallModel) -> None:
        self._engine = engine
        self._ledger = engine.ledger
        self._call = call
        self._ref = call.turn

    async def run(self) -> StepReply:
        """Prepare, call, commit."""
        self._ledger.require(self._ref)
        try:
            agent, selected = await self._agent()
        except (RequestError, AuthoringError) as refusal:
            return await self._refused(refusal)
        with self._engine.pulse.beating("call_model", activity.heartbeat):
            state = await self._prepare(agent, selected)
            if state.kind is not PrepareKind.READY:
                return self._reply(state, agent)
            self._ref = self._ref.model_copy(update={"epoch": state.epoch, "seq": state.seq})
            assert state.prepared is not None
            context = await self._ledger.read(load_context, self._ref.turn_id, state.prepared)
            request = self._request(agent, state.prepared, state.attempt, context)
            response = await self._answer(agent, state, request)
            return await self._commit(agent, selected, state.attempt, response)

    async def _agent(self) -> tuple[Agent, tuple[str, ...] | None]:
        if self._call.opening is not None:
            name, selected = self._call.opening.agent, self._call.opening.tools
        else:
            opened = await self._ledger.read(find_opened, self._ref.turn_id)
            if not isinstance(opened, UserMessageRecorded):
                raise LedgerBehind(f"the ledger does not know the open turn {self._ref.turn_id}")
            name, selected = opened.agent, opened.tools
        agent = self._engine.app.agent(name)
        missing = [tool for tool in selected or () if agent.tool(tool) is None]
        if missing and self._call.opening is not None:
            raise CapabilityDenied(
                f"agent {name} lacks {len(missing)} of the tools this turn asks for; "
                "tools may narrow the agent's, never widen them"
            )
        # A model that cannot be had refuses the turn before it is opened.
        self._engine.model(agent, agent.model_name)
        return agent, selected

    async def _refused(self, refusal: PerdureError) -> StepReply:
        # A deploy may have taken away the agent of a turn that is open, or ended long ago.
        status, result = await self._ledger.read(turn_state, self._ref.turn_id)
        if result is not None:
            return StepReply(kind=StepKind.OVER, result=self._engine.shown(result))
        if status is None or self._call.opening is None:
            raise refusal
        raise AgentUnavailable(f"the turn is open and cannot go on here: {refusal}")

    async def _prepare(self, agent: Agent, selected: tuple[str, ...] | None) -> StepState:
        specs = [spec.model_dump(mode="json") for spec in agent.specs(selected)]
        opening = self._call.opening
        if opening is not None:
            digest = opening.digest_for(self._ref)
            opening = opening.model_copy(update={"request_digest": digest})
        command = PrepareStep(
            turn=self._ref,
            step=self._call.step,
            owner=current_owner(opening.run_id) if opening is not None else None,
            opening=opening,
            model=agent.model_name,
            parameters_json=canonical_json(dict(agent.model_parameters)),
            instructions=agent.instructions,
            tools_json=canonical_json(specs),
            output_json=None if agent.output is None else canonical_json(agent.output.schema),
            worker=self._engine.worker,
        )
        state = await self._ledger.run_to_its_end(prepare_step, command)
        while state.kind is PrepareKind.BUSY:
            assert state.holder is not None
            eviction = await self._evict(state.holder)
            command = command.model_copy(update={"eviction": eviction})
            state = await self._ledger.run_to_its_end(prepare_step, command)
            if state.kind is not PrepareKind.BUSY:
                self._engine.telemetry.turn_lost(self._ledger.read, eviction.turn_id)
        return state

    async def _evict(self, holder: Holder) -> Eviction:
        found = await owner_state(self._engine.client, holder.owner)
        if found is OwnerState.CLOSED:
            return Eviction(turn_id=holder.turn_id, epoch=holder.epoch)
        hint = "wait for it" if found is OwnerState.ALIVE else "resume or end it first"
        raise ConversationBusy(
            f"conversation {self._ref.conversation_id} is held by turn {holder.turn_id}; {hint}"
        )

    def _request(
        self, agent: Agent, prepared: ModelPrepared, attempt: int, context: TurnContext
    ) -> ModelRequest:
        return ModelRequest(
            agent=agent.name,
            model=prepared.model,
            instructions=context.instructions,
            messages=tuple(message for message in context.messages if _has_content(message)),
            tools=_specs(context.tools_json),
            parameters=prepared.parameters,
            output_schema=None if context.output_json is None else json.loads(context.output_json),
            namespace=self._ref.namespace,
            conversation_id=self._ref.conversation_id,
            turn_id=self._ref.turn_id,
            step=prepared.step,
            attempt=attempt,
        )

    async def _answer(self, agent: Agent, state: StepState, request: ModelRequest) -> ModelResponse:
        try:
            work = self._stream(agent, state, request)
            response = await self._engine.telemetry.model_call(request, work)
            check_response(response)
            return response
        except ModelError as error:
            raise await self._failed(error, state.attempt) from None

    async def _stream(self, agent: Agent, state: StepState, request: ModelRequest) -> ModelResponse:
        model = self._engine.model(agent, request.model)
        recorder = Recorder(self._persist(state.attempt))
        sink = RecordingSink(recorder)
        try:
            async with asyncio.timeout(agent.model_timeout_s):
                response = await model.respond(request, sink)
            sink.close()
            await recorder.close()
            failpoint("model.answered")
            return ModelResponse.model_validate(response)
        except TimeoutError:
            raise ModelUnavailable(f"no answer within {agent.model_timeout_s} s") from None
        except (ModelError, asyncio.CancelledError, Superseded):
            raise
        except Exception as error:  # A model is anybody's code: what it raises is its failure.
            if isinstance(recorder.failure, PerdureError):
                # The ledger's word, not the model's.
                raise recorder.failure from None
            logger.warning("the model raised %s", type(error).__name__)
            raise ModelUnavailable(f"the model raised {type(error).__name__}") from None
        finally:
            sink.close()
            if recorder.failure is None:
                # Text that was accepted is made durable also when the response was cut off.
                await to_its_end(_close_quietly(recorder))

    def _persist(self, attempt: int) -> Any:
        async def persist(position: int, pieces: list[Piece]) -> int:
            result = await self._ledger.run(
                append_step_segments,
                self._ref.turn_id,
                self._call.step,
                attempt,
                position,
                pieces,
            )
            failpoint("model.streamed")
            return result

        return persist

    async def _failed(self, error: ModelError, attempt: int) -> ApplicationError:
        command = FailAttempt(
            turn=self._ref, step=self._call.step, attempt=attempt, error_code=error.code
        )
        errors = await self._ledger.run(fail_model_attempt, command)
        if error.retryable and errors < MODEL_ERROR_TRIES:
            delay = backoff_s(errors) if error.retry_after_s is None else error.retry_after_s
            retry = type(error)(f"the model reported {error.code} ({errors} of its tries)")
            return as_failure(retry, retry_after_s=delay)
        return as_failure(
            ModelFailed(f"the model reported {error.code} after {errors} tries; {error.advice}")
        )

    async def _commit(
        self,
        agent: Agent,
        selected: tuple[str, ...] | None,
        attempt: int,
        response: ModelResponse,
    ) -> StepReply:
        command = plan_answer(self._ref, self._call.step, attempt, response, agent, selected)
        try:
            state = await self._ledger.run_to_its_end(commit_answer, command)
        except Superseded:
            await self._keep_cost(command)
            raise
        except Fenced:
            await self._keep_cost(command)
            return StepReply(kind=StepKind.FOLLOW)
        if state.result is not None:
            self._engine.telemetry.turn_over(self._ledger.read, self._ref.turn_id, state.result)
        return self._reply(state, agent)

    async def _keep_cost(self, command: CommitAnswer) -> None:
        await self._ledger.run(record_superseded, command)

    def _reply(self, state: StepState, agent: Agent) -> StepReply:
        if state.kind is PrepareKind.OVER:
            result = self._engine.shown(state.result)
            return StepReply(kind=StepKind.OVER, result=result, **self._how(state))
        if state.kind is PrepareKind.FOLLOW:
            return StepReply(kind=StepKind.FOLLOW)
        assert state.kind is PrepareKind.COMMITTED, state.kind
        return StepReply(
            kind=StepKind.CALLS,
            agent=agent.name,
            epoch=state.epoch,
            store=self._ledger.store_id,
            seq=state.seq,
            calls=tuple(self._call_ref(called, agent) for called in state.pending),
            **self._how(state),
        )

    def _how(self, state: StepState) -> dict[str, Any]:
        first = self._call.opening is not None
        return {
            "attempts": max(1, state.attempt),
            "model_errors": state.errors,
            "searchable": first and self._engine.searchable,
        }

    def _call_ref(self, called: ToolCalled, agent: Agent) -> CallRef:
        tool = agent.tool(called.tool)
        return CallRef(
            index=called.index,
            tool=called.tool,
            safety=called.safety,
            timeout_s=tool.timeout_s if tool is not None else None,
            preview=self._engine.preview(canonical_json(called.arguments)),
        )


def _has_content(message: Message) -> bool:
    return bool(message.parts)


def _specs(tools_json: str) -> tuple[ToolSpec, ...]:
    return tuple(ToolSpec.model_validate(spec) for spec in json.loads(tools_json))


async def _close_quietly(recorder: Recorder) -> None:
    try:
        # Not for ever: a worker must be able to stop without its database.
        async with asyncio.timeout(current_timing().heartbeat_timeout_s):
            await recorder.close()
    except TimeoutError:
        recorder.abandon()
    except Exception as error:  # The first error is already on its way; this one is only logged.
        logger.warning("the stream could not be closed: %s", type(error).__name__)
