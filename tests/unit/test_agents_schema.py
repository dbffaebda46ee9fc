"""How a function becomes a JSON schema, and JSON becomes its arguments."""

import datetime
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from perdure.agents import BlockingToolContext, InvalidArguments, ToolContext, tool
from perdure.contracts.errors import AuthoringError


class Address(BaseModel):
    """Where a parcel goes."""

    street: str
    zip_code: str = Field(pattern=r"^\d{5}$")


class Speed(StrEnum):
    SLOW = "slow"
    FAST = "fast"


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    return tool(function).spec.parameters


async def arguments_seen(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return await tool(function).run(arguments, ToolContext(operation_id="op"))


def test_hints_defaults_and_docstring_become_a_closed_object_schema():
    async def ship(order: int, note: str = "none") -> None:
        """Ship an order."""

    assert parameters_of(ship) == {
        "type": "object",
        "properties": {"order": {"type": "integer"}, "note": {"type": "string", "default": "none"}},
        "required": ["order"],
        "additionalProperties": False,
    }


def test_a_function_without_parameters_has_an_empty_closed_schema():
    def ping() -> None: ...

    assert parameters_of(ping) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_the_args_section_describes_parameters_and_leaves_the_description():
    def ship(order: int, address: str, ctx: BlockingToolContext) -> None:
        """Ship an order.

        It is sent at once.

        Args:
            order (int): The order's number: digits.
            address: Where it goes,
                on one line.
            ctx: Not for the model.

        Returns:
            Nothing.
        """

    made = tool(ship)

    properties = made.spec.parameters["properties"]
    assert properties["order"]["description"] == "The order's number: digits."
    assert properties["address"]["description"] == "Where it goes, on one line."
    assert "ctx" not in properties
    assert made.description == ("Ship an order.\n\nIt is sent at once.\n\nReturns:\n    Nothing.")


def test_a_description_in_the_hint_wins_over_the_docstring():
    def ship(order: Annotated[int, Field(description="from the hint", ge=1)]) -> None:
        """Ship.

        Args:
            order: from the docstring
        """

    order = parameters_of(ship)["properties"]["order"]
    assert order == {"type": "integer", "minimum": 1, "description": "from the hint"}


@pytest.mark.parametrize("hint", [ToolContext, BlockingToolContext, ToolContext | None])
def test_a_context_parameter_is_not_in_the_schema_under_any_name(hint: Any):
    def look(query: str, whatever: Any) -> None: ...

    look.__annotations__["whatever"] = hint

    assert set(parameters_of(look)["properties"]) == {"query"}


def test_names_that_pydantic_reserves_can_be_parameters():
    def odd(model_config: str, copy: int, _private: bool, schema: str, json: str) -> None: ...

    assert list(parameters_of(odd)["properties"]) == [
        "model_config", "copy", "_private", "schema", "json",
    ]  # fmt: skip


async def test_a_pydantic_model_is_passed_as_an_instance():
    def ship(address: Address, others: list[Address]) -> Any:
        return address, others

    home = {"street": "A", "zip_code": "12345"}

    address, others = await arguments_seen(ship, {"address": home, "others": [home]})

    assert address == Address(street="A", zip_code="12345")
    assert others == [address]


async def test_json_is_turned_into_the_hinted_types():
    def plan(day: datetime.date, speed: Speed, tags: set[str], mode: Literal["a", "b"]) -> Any:
        return day, speed, tags, mode

    seen = await arguments_seen(
        plan, {"day": "2024-02-29", "speed": "fast", "tags": ["x", "x"], "mode": "b"}
    )

    assert seen == (datetime.date(2024, 2, 29), Speed.FAST, {"x"}, "b")


async def test_missing_arguments_take_their_defaults():
    def plan(day: str, count: int = 3, tags: list[str] = []) -> Any:  # noqa: B006
        return day, count, tags

    assert await arguments_seen(plan, {"day": "mon"}) == ("mon", 3, [])


async def test_keyword_only_parameters_are_passed():
    def plan(*, day: str) -> Any:
        return day

    assert await arguments_seen(plan, {"day": "mon"}) == "mon"


def test_a_default_that_json_cannot_say_is_left_out_of_the_schema():
    marker: Any = object()

    def plan(count: int = marker) -> None: ...

    assert parameters_of(plan)["properties"]["count"] == {"type": "integer"}
    assert "required" not in parameters_of(plan)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "order: Field required"),
        ({"order": "x"}, "order: Input should be a valid integer"),
        ({"order": 1, "extra": 2}, "the parameters are: order, address"),
        ({"order": 1, "argument_0": 2}, "argument_0: Extra inputs are not permitted"),
        ({"order": 1, "address": {"street": "A"}}, "address.zip_code: Field required"),
    ],
)
def test_invalid_arguments_name_the_field(arguments: dict[str, Any], named: str):
    def ship(order: int, address: Address | None = None) -> None: ...

    with pytest.raises(InvalidArguments) as caught:
        tool(ship).validate_arguments(arguments)

    assert named in str(caught.value)
    assert caught.value.code == "invalid_arguments"
    assert not caught.value.retryable


def test_the_message_for_the_model_repeats_no_value():
    def ship(order: int) -> None: ...

    with pytest.raises(InvalidArguments) as caught:
        tool(ship).validate_arguments({"order": "canary"})

    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_message_for_the_model_is_bounded_and_can_be_stored():
    def ship(order: int) -> None: ...

    surplus = {f"{'x' * 200}{number}\x00": 1 for number in range(100)}

    with pytest.raises(InvalidArguments) as caught:
        tool(ship).validate_arguments(surplus)

    message = str(caught.value)
    assert 300 < len(message) <= 1000
    assert "\x00" not in message


def test_a_validator_of_the_author_that_breaks_means_invalid_arguments():
    class Odd(BaseModel):
        def model_post_init(self, context: Any) -> None:
            raise KeyError("canary")

    def ship(odd: Odd) -> None: ...

    with pytest.raises(InvalidArguments, match="their validation raised KeyError"):
        tool(ship).validate_arguments({"odd": {}})


def variadic(*values: int) -> None: ...
def variadic_by_name(**values: int) -> None: ...
def positional_only(value: int, /) -> None: ...
def without_a_hint(value) -> None: ...
def with_a_function(value: Callable[[], None]) -> None: ...
def with_an_unresolved_hint(value: "Missing") -> None: ...  # type: ignore  # noqa: F821
def with_two_contexts(one: BlockingToolContext, other: BlockingToolContext) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (variadic, "'values' cannot be passed by name"),
        (variadic_by_name, "'values' cannot be passed by name"),
        (positional_only, "'value' cannot be passed by name"),
        (without_a_hint, "'value' has no type hint"),
        (with_a_function, "no JSON schema"),
        (with_an_unresolved_hint, "'Missing' is not defined"),
        (with_two_contexts, "more than one parameter takes the context"),
    ],
)
def test_parameters_that_no_model_can_fill_are_refused(function: Any, reason: str):
    with pytest.raises(AuthoringError) as caught:
        tool(function)

    assert reason in str(caught.value)
    assert repr(function.__name__) in str(caught.value)
