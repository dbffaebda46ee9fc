"""Every setting from the environment, in one place; read by `worker.py` and the CLI only.

`PERDURE_*` are ours; the connection to Temporal follows Temporal's own profile conventions
(`TEMPORAL_ADDRESS`, `TEMPORAL_NAMESPACE`, `TEMPORAL_PROFILE`, ...).
"""

import logging
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from temporalio.client import Client
from temporalio.envconfig import ClientConfig
from temporalio.runtime import Runtime

from perdure.contracts.errors import ServerUnreachable, SetupError
from perdure.contracts.timing import Timing
from perdure.logs import LogFormat

DEFAULT_ADDRESS = "localhost:7233"


def _on_or_off(value: object) -> object:
    return {"on": True, "off": False}.get(value.lower(), value) if isinstance(value, str) else value


def _known_level(value: str) -> str:
    if value.upper() not in logging.getLevelNamesMapping():
        raise ValueError("must be DEBUG, INFO, WARNING, ERROR or CRITICAL")
    return value.upper()


Switch = Annotated[bool, BeforeValidator(_on_or_off)]
Level = Annotated[str, AfterValidator(_known_level)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseSettings):
    """Seconds for all `*_s`.

    `previews`: whether Temporal may hold short texts of arguments and answers. `grace_s`: how long
    a stopping worker lets its tools run on. `heartbeat_timeout_s`: after how long a silent worker
    counts as lost; all other waits derive from it. Ports: 0 is off. `otel`: with `auto` an
    OTLP endpoint in the environment decides.
    """

    model_config = SettingsConfigDict(env_prefix="PERDURE_", extra="ignore")

    store_url: str = "sqlite:///perdure-data/perdure.db"
    task_queue: str = "perdure"
    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    grace_s: float = Field(default=10.0, ge=0)
    cancel_grace_s: float = Field(default=5.0, ge=0)
    previews: Switch = True
    log_level: Level = "INFO"
    log_format: LogFormat = "text"
    metrics_port: Port = 0
    temporal_metrics_port: Port = 0
    health_port: Port = 0
    health_host: str = "127.0.0.1"
    otel: Literal["auto", "on", "off"] = "auto"
    otel_content: Switch = False

    @property
    def timing(self) -> Timing:
        """The durations that everything waits by."""
        return Timing(
            heartbeat_timeout_s=self.heartbeat_timeout_s, cancel_grace_s=self.cancel_grace_s
        )


def store_url(place: str) -> str:
    """A store's URL, from a URL or from the path of a SQLite file."""
    return place if "://" in place else f"sqlite:///{place}"


def load_settings(*, store: str | None = None, task_queue: str | None = None) -> Settings:
    """Read the settings. Raises SetupError that names the variable, never its value."""
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


async def connect(
    address: str | None = None, namespace: str | None = None, *, runtime: Runtime | None = None
) -> Client:
    """Connect to Temporal as the environment says. Raises ServerUnreachable."""
    config = ClientConfig.load_client_connect_config()
    if address is not None:
        config["target_host"] = address
    if namespace is not None:
        config["namespace"] = namespace
    config.setdefault("target_host", DEFAULT_ADDRESS)
    target = str(config.get("target_host"))
    try:
        return await Client.connect(**config, runtime=runtime)
    except RuntimeError as error:
        raise ServerUnreachable(
            f"no Temporal server answers at {target}; start one with `perdure dev APP` or set "
            "TEMPORAL_ADDRESS"
        ) from error
