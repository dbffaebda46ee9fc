"""The settings of a command: the environment's, changed by what the command line says."""

from typing import TYPE_CHECKING

from pydantic import ValidationError

from perdure.contracts.errors import SetupError

if TYPE_CHECKING:
    from perdure.settings import Settings


def store_url(place: str) -> str:
    """A store's URL, from a URL or from the path of a SQLite file."""
    return place if "://" in place else f"sqlite:///{place}"


def load_settings(*, store: str | None = None, task_queue: str | None = None) -> "Settings":
    """Read the settings. Raises SetupError that names the variable, never its value."""
    from perdure.settings import Settings

    try:
        settings = Settings()
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        variable = "PERDURE_" + "_".join(str(item) for item in problem["loc"]).upper()
        raise SetupError(f"{variable}: {problem['msg']}") from None
    changes: dict[str, str] = {}
    if store is not None:
        changes["store_url"] = store_url(store)
    if task_queue is not None:
        changes["task_queue"] = task_queue
    return settings.model_copy(update=changes)
