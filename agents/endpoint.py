"""`Endpoint`: where a model is asked, and with which key.

A declaration that is checked when it is made. It opens no connection, and shows no secret.
"""

from collections.abc import Mapping
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

from pydantic import SecretStr

from perdure.contracts.errors import AuthoringError

EndpointProtocol = Literal["openai", "openai-responses", "anthropic"]

PROTOCOLS: Final = get_args(EndpointProtocol)


class Endpoint:
    """An address that speaks one of the `PROTOCOLS`, or what a known provider is to be given.

    With a `protocol` it is a server of its own: `base_url` is needed, and no key of the environment
    is ever sent there. Without one, its name in `App(endpoints=...)` must be a provider's, whose
    key or address it replaces. `headers` are sent with each request and never recorded.
    """

    def __init__(
        self,
        protocol: EndpointProtocol | None = None,
        *,
        base_url: str | None = None,
        api_key: SecretStr | str | None = None,
        headers: Mapping[str, SecretStr | str] | None = None,
    ) -> None:
        if protocol is not None and protocol not in PROTOCOLS:
            raise AuthoringError(f"endpoint: its protocol must be one of {', '.join(PROTOCOLS)}")
        if protocol is not None and base_url is None:
            raise AuthoringError(f"endpoint: protocol {protocol!r} needs a base_url")
        if protocol is None and base_url is None and api_key is None and not headers:
            raise AuthoringError("endpoint: say its protocol and base_url, or what it replaces")
        self.protocol: EndpointProtocol | None = protocol
        self.base_url = None if base_url is None else _checked_url(base_url)
        self.api_key = None if api_key is None else _checked_key(api_key)
        self.headers = {name: _secret(value) for name, value in (headers or {}).items()}

    def __repr__(self) -> str:
        return f"Endpoint({self.protocol!r}, base_url={self.base_url!r})"

    def plain_headers(self) -> dict[str, str]:
        """The headers as they are sent: secrets."""
        return {name: value.get_secret_value() for name, value in self.headers.items()}

    def plain_key(self) -> str | None:
        """The key as it is sent: a secret."""
        return None if self.api_key is None else self.api_key.get_secret_value()


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable:
        raise AuthoringError("endpoint: its base_url must begin with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise AuthoringError("endpoint: its base_url must hold no password; use api_key or headers")
    return url


def _checked_key(key: SecretStr | str) -> SecretStr:
    secret = _secret(key)
    value = secret.get_secret_value()
    if not value.strip() or not value.isascii() or not value.isprintable():
        raise AuthoringError("endpoint: its api_key is empty or has characters no header takes")
    return secret


def _secret(value: SecretStr | str) -> SecretStr:
    return value if isinstance(value, SecretStr) else SecretStr(value)
