"""`@tool`: a function that a model may call, with its replay safety and its JSON schema.

A tool validates arguments and runs its function. It must not convert results, count tries or know
of the ledger: that is the gate's work (`activities/`).
"""

import inspect
import math
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, Final, Generic, ParamSpec, TypeVar, overload

from pydantic import ValidationError

from perdure.agents.context import ToolContext
from perdure.agents.invoke import invoke, is_coroutine_function
from perdure.agents.schema import ArgumentsSchema, Signature, read_docstring, read_signature
from perdure.contracts.canonical import sanitise_text
from perdure.contracts.errors import AuthoringError, PerdureError
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ToolSpec

P = ParamSpec("P")
R = TypeVar("R")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

# Longer than other errors: the model needs to see what to mend, and no log ever does.
_MESSAGE_CHARS_MAX: Final = 1000
_PROBLEMS_MAX: Final = 8


class InvalidArguments(PerdureError):
    """The arguments do not fit the tool. The message is for the model: it names the fields."""

    code: ClassVar[str] = "invalid_arguments"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.args = (message[:_MESSAGE_CHARS_MAX],)


class ReconcileAnswer(Enum):
    """What a reconcile function may return instead of the tool's result."""

    NOT_EXECUTED = "not_executed"
    UNKNOWN = "unknown"


NOT_EXECUTED: Final = ReconcileAnswer.NOT_EXECUTED
"""The effect of that very generation did not happen and will not."""

UNKNOWN: Final = ReconcileAnswer.UNKNOWN
"""Nobody can tell; the call is interrupted and a person decides."""


class Tool:
    """A function that a model may call. It stays callable as the plain function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        replay: ReplaySafety = ReplaySafety.UNSAFE,
        timeout_s: float | None = None,
        name: str | None = None,
        description: str | None = None,
        reconcile: Callable[..., Any] | None = None,
    ) -> None:
        self.function = function
        self.name = getattr(function, "__name__", "") if name is None else name
        self.replay = ReplaySafety(replay)
        self.timeout_s = _checked_timeout(timeout_s, self._where)
        self.is_async = is_coroutine_function(function)
        self._signature = _checked_signature(function, self._where)
        documentation = read_docstring(function)
        self._schema = ArgumentsSchema(self._signature, documentation.parameters, self._where)
        self.description = documentation.description if description is None else description
        self.spec = self._make_spec()
        self.reconcile_function: Callable[..., Any] | None = None
        self._reconcile_signature: Signature | None = None
        if reconcile is not None:
            self.reconcile(reconcile)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function, without validation."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name!r}, replay={self.replay.value!r})"

    def reconcile(self, function: AnyFunction) -> AnyFunction:
        """Decorator: the function that says what became of a lost generation.

        It takes the context and any of the tool's parameters by name, and returns the tool's
        result, NOT_EXECUTED or UNKNOWN.
        """
        if self.replay is not ReplaySafety.RECONCILED:
            raise AuthoringError(f"{self._where}: only a RECONCILED tool has a reconcile function")
        if self.reconcile_function is not None:
            raise AuthoringError(f"{self._where}: it has a reconcile function already")
        where = f"{self._where}, its reconcile function"
        signature = _checked_signature(function, where)
        surplus = sorted(set(signature.parameters) - set(self._schema.names))
        if surplus:
            raise AuthoringError(f"{where}: the tool has no parameter {', '.join(surplus)}")
        self.reconcile_function = function
        self._reconcile_signature = signature
        return function

    def validate_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise InvalidArguments if the function cannot be called with these arguments."""
        self._validated(arguments)

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> Any:
        """Call the function and return what it returns, unchanged.

        A plain function runs in a thread of its own and gets a BlockingToolContext; it is never
        killed, so a cancelled call leaves it running.
        """
        keywords = self._validated(arguments)
        return await invoke(self.function, keywords, self._signature.context_parameter, context)

    async def run_reconcile(self, arguments: dict[str, Any], context: ToolContext) -> Any:
        """Ask the reconcile function: the tool's result, NOT_EXECUTED or UNKNOWN."""
        function, signature = self.reconcile_function, self._reconcile_signature
        if function is None or signature is None:
            raise AuthoringError(f"{self._where}: it has no reconcile function")
        keywords = self._validated(arguments)
        wanted = {name: keywords[name] for name in signature.parameters}
        return await invoke(function, wanted, signature.context_parameter, context)

    @property
    def _where(self) -> str:
        return f"tool {self.name!r}"

    def _make_spec(self) -> ToolSpec:
        try:
            return ToolSpec(
                name=self.name, description=self.description, parameters=self._schema.json_schema
            )
        except ValidationError as error:
            reason = error.errors(include_input=False)[0]["msg"]
            raise AuthoringError(f"{self._where}: its name {reason}") from error

    def _validated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._schema.validate(arguments)
        except ValidationError as error:
            raise InvalidArguments(_explain(error, self._schema.names)) from None
        except Exception as error:
            # The author's own validators run here; whatever they raise, the tool was not called.
            reason = f"their validation raised {type(error).__name__}"
            raise InvalidArguments(f"The arguments are invalid: {reason}.") from error


class FunctionTool(Tool, Generic[P, R]):
    """What `@tool` makes: a `Tool` whose call has the function's own types."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the plain function, without validation."""
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *,
    replay: ReplaySafety = ...,
    timeout_s: float | None = ...,
    name: str | None = ...,
    description: str | None = ...,
    reconcile: Callable[..., Any] | None = ...,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a tool of a coroutine function or a plain one, as `@tool` or `@tool(...)`.

    Args:
        function: the function, where the decorator has no arguments.
        **options: `replay` (nothing said: UNSAFE), `timeout_s` (nothing said: the worker's),
            `name` and `description` (nothing said: the function's), `reconcile` (the function
            that RECONCILED tools need; also `@my_tool.reconcile` afterwards).
    """
    if function is not None:
        return FunctionTool[..., Any](function, **options)

    def decorate(function: Callable[..., Any]) -> FunctionTool[..., Any]:
        return FunctionTool[..., Any](function, **options)

    return decorate


def _checked_timeout(timeout_s: float | None, where: str) -> float | None:
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
        raise AuthoringError(f"{where}: timeout_s is {timeout_s}, it must be over 0 and finite")
    return timeout_s


def _checked_signature(function: Callable[..., Any], where: str) -> Signature:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        kind = type(function).__name__
        raise AuthoringError(f"{where}: a tool is made of a function, not of a {kind}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise AuthoringError(f"{where}: a generator cannot be a tool; use ctx.output for progress")
    signature = read_signature(function, where)
    if signature.wants_blocking and is_coroutine_function(function):
        raise AuthoringError(f"{where}: a coroutine gets a ToolContext, not a blocking one")
    return signature


def _explain(error: ValidationError, names: tuple[str, ...]) -> str:
    # Without the input: the model knows what it sent, and no value may end up in a log.
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'arguments'}: {problem['msg']}"
        for problem in problems[:_PROBLEMS_MAX]
    ]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    if any(problem["type"] == "extra_forbidden" for problem in problems):
        shown.append(f"the parameters are: {', '.join(names) or 'none'}")
    return sanitise_text(f"The arguments are invalid. {'; '.join(shown)}.")
