"""How models are named: endpoints are checked where they are declared, and show no secret."""

import subprocess
import sys
from typing import Any

import pytest

from perdure import Agent, App, Endpoint
from perdure.activities.providers import loaded_models, resolve_model
from perdure.activities.providers.part_table import MEDIA_BY_PROTOCOL, check_parts
from perdure.contracts.errors import AuthoringError, ModelPartUnsupported
from perdure.contracts.messages import MediaPart, Message, Role

LOCAL = Endpoint("openai", base_url="http://127.0.0.1:8080/v1")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"protocol": "openai"},
        {"protocol": "gopher", "base_url": "http://localhost"},
        {"protocol": "openai", "base_url": "localhost:8080"},
        {"protocol": "openai", "base_url": "file:///etc/passwd"},
        {"protocol": "openai", "base_url": "http://"},
        {"protocol": "openai", "base_url": "http://[::1"},
        {"protocol": "openai", "base_url": "http://me:hunter2@localhost"},
        {"api_key": ""},
        {"api_key": "hunter2\n"},
        {"api_key": "schlüssel"},
    ],
)
def test_an_endpoint_that_cannot_be_used_is_refused_when_it_is_declared(
    options: dict[str, Any],
) -> None:
    with pytest.raises(AuthoringError, match="endpoint") as caught:
        Endpoint(**options)

    assert "hunter2" not in str(caught.value)


def test_an_endpoint_shows_no_secret() -> None:
    endpoint = Endpoint(
        "anthropic",
        base_url="https://gateway.example.com",
        api_key="hunter2",
        headers={"x-key": "hunter2"},
    )

    assert "hunter2" not in repr(endpoint) + str(vars(endpoint))
    assert endpoint.plain_key() == "hunter2"
    assert endpoint.plain_headers() == {"x-key": "hunter2"}


@pytest.mark.parametrize("name", ["scripted", "", "Local", "a:b", 1])
def test_an_endpoint_needs_a_name_that_is_free(name: Any) -> None:
    with pytest.raises(AuthoringError, match="endpoint"):
        App([Agent("desk", "local:any")], endpoints={name: LOCAL})


def test_an_app_takes_nothing_else_for_an_endpoint() -> None:
    with pytest.raises(AuthoringError, match="must be an Endpoint"):
        App([], endpoints={"local": "http://127.0.0.1"})


@pytest.mark.parametrize(
    ("spec", "endpoints", "reason"),
    [
        ("local:", {"local": LOCAL}, "must follow the colon"),
        ("local:any", {}, "no such provider"),
        ("groq:any", {}, "not installed"),
        ("local:any", {"local": Endpoint(api_key="k")}, "no such provider"),
        ("azure:any", {"azure": Endpoint(base_url="http://localhost")}, "takes no base_url"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_when_it_is_resolved(
    spec: str, endpoints: dict[str, Endpoint], reason: str
) -> None:
    with pytest.raises(AuthoringError, match=reason):
        resolve_model(spec, endpoints)


@pytest.mark.slow
def test_a_worker_loads_what_it_can_and_leaves_the_rest_to_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    specs = ["scripted:nowhere.yaml", "nope:any", "local:any", "openai:any"]

    found = loaded_models(specs, {"local": LOCAL})

    assert set(found) == {"local:any", "openai:any"}


@pytest.mark.slow
def test_without_the_extra_a_real_model_is_refused_and_the_extra_is_named() -> None:
    program = (
        "import sys\n"
        "sys.modules['pydantic_ai'] = None\n"
        "from perdure.activities.providers import resolve_model\n"
        "from perdure.contracts.errors import AuthoringError\n"
        "try:\n    resolve_model('openai:gpt-5')\n"
        "except AuthoringError as error:\n    print(error)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert "pip install 'perdure[providers]'" in done.stdout, done.stderr


@pytest.mark.slow
def test_naming_endpoints_loads_no_provider() -> None:
    program = (
        "import sys\nfrom perdure import App, Endpoint\nimport perdure.activities.providers\n"
        "print({'pydantic_ai', 'openai', 'anthropic', 'httpx2'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("protocol", "media_type"),
    [
        ("openai chat", "application/pdf"),
        ("openai chat", "audio/wav"),
        ("openai responses", "video/mp4"),
        ("anthropic", "text/plain"),
        ("anthropic", "application/pdfx"),
        ("unheard-of", "image/png"),
    ],
)
def test_media_that_a_provider_would_not_fetch_is_refused(protocol: str, media_type: str) -> None:
    part = MediaPart(url="https://example.com/hunter2", media_type=media_type)

    with pytest.raises(ModelPartUnsupported) as caught:
        check_parts(protocol, [Message(role=Role.USER, parts=(part,))])

    assert "hunter2" not in str(caught.value)
    assert not caught.value.retryable


@pytest.mark.parametrize("protocol", MEDIA_BY_PROTOCOL)
def test_every_listed_protocol_takes_images(protocol: str) -> None:
    part = MediaPart(url="https://example.com/cat.png", media_type="image/png")

    check_parts(protocol, [Message(role=Role.USER, parts=(part,))])
