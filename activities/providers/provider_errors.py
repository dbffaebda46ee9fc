"""What a provider's client raises, as our errors: the one place that decides what is tried again.

The client library has sorted what it knows by status and by the provider's code; the rest is done
here. No text of a provider goes into a message: it may quote prompts and keys.
"""

import json
import math
from typing import Final

import httpx2
from pydantic_ai.exceptions import (
    ContentFilterError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestTimeout,
    ModelServerError,
    ModelUnavailableError,
    UnexpectedModelBehavior,
    UserError,
)

from perdure.contracts.errors import (
    ModelContentRefused,
    ModelContextOverflow,
    ModelCredentialsRefused,
    ModelError,
    ModelProtocolError,
    ModelRateLimited,
    ModelRefused,
    ModelUnavailable,
    ModelUnknown,
)

# Of these the provider says itself that they pass.
_PASSING_STATUSES: Final = (408, 409, 425)
_TOO_LARGE: Final = 413
_CONTENT_WORDS: Final = ("content_filter", "content_policy", "moderation", "safety", "blocked")
_UNAVAILABLE = (ModelUnavailableError, ModelServerError, ModelConnectionError, ModelRequestTimeout)


def model_error(error: Exception, status: int | None) -> ModelError | None:
    """The error of ours that this one is; None for one that is nobody's we know.

    `status` is that of the response, if there was one.
    """
    match error:
        case ModelError():
            return error
        case ModelAPIError():
            return _api_error(error, status)
        case ContentFilterError():
            return ModelContentRefused("the provider filtered the answer")
        case UnexpectedModelBehavior() | json.JSONDecodeError() | UnicodeDecodeError():
            return ModelProtocolError("the response is no answer of a model")
        case UserError() | NotImplementedError():
            return ModelRefused("the provider's client does not take this request")
        case httpx2.TransportError():
            return ModelUnavailable("the connection to the provider broke")
        case _:
            return None


def setup_error(error: UserError, name: str) -> ModelError:
    """Why a provider's client could not be made, most often a key that is nowhere."""
    words = str(error).lower()
    if any(word in words for word in ("api_key", "api key", "token", "credential")):
        return ModelCredentialsRefused(
            f"there is no key for {name}: set its environment variable on the worker, or give "
            f"App(endpoints={{{name!r}: Endpoint(api_key=...)}})"
        )
    return ModelRefused(f"the provider {name} cannot be used with its settings on this worker")


def _api_error(error: ModelAPIError, status: int | None) -> ModelError:
    wait_s = _retry_after_s(error)
    match error:
        case ModelContextWindowExceededError():
            return ModelContextOverflow("the request is longer than the model's context")
        case ModelAuthenticationError():
            return ModelCredentialsRefused("the provider refused the key")
        case ModelNotFoundError():
            return ModelUnknown("the provider has no such model, or the base URL leads elsewhere")
        case ModelQuotaExceededError():
            # Waiting does not fill an account.
            return ModelRateLimited("the account's quota is used up", retryable=False)
        case ModelRateLimitError():
            return ModelRateLimited("the provider limits the rate", retry_after_s=wait_s)
        case _ if isinstance(error, _UNAVAILABLE):
            return ModelUnavailable("the provider cannot answer now", retry_after_s=wait_s)
        case _ if isinstance(error.__cause__, (json.JSONDecodeError, UnicodeDecodeError)):
            return ModelProtocolError("the stream has a malformed chunk")
        case ModelHTTPError():
            return _by_status(error, wait_s)
        case _ if _names_content(error):
            return ModelContentRefused("the provider's policy refused the content")
        case _ if status is not None and httpx2.codes.is_redirect(status):
            return ModelRefused("the endpoint answers with a redirect; write where it leads")
        case _ if error.in_stream:
            return ModelUnavailable("the provider reported an error in its stream")
        case _:
            return ModelProtocolError("the response is no answer of a model")


def _by_status(error: ModelHTTPError, wait_s: float | None) -> ModelError:
    status = error.status_code
    if status in _PASSING_STATUSES or httpx2.codes.is_server_error(status):
        return ModelUnavailable(f"the provider answered {status}", retry_after_s=wait_s)
    if status == _TOO_LARGE:
        return ModelContextOverflow("the request is larger than the provider takes")
    if _names_content(error):
        return ModelContentRefused("the provider's policy refused the content")
    if httpx2.codes.is_redirect(status):
        return ModelRefused("the endpoint answers with a redirect; write where it leads")
    return ModelRefused(f"the provider refused the request with {status}")


def _names_content(error: ModelAPIError) -> bool:
    named = f"{error.provider_error_code or ''} {error.provider_error_type or ''}".lower()
    return any(word in named for word in _CONTENT_WORDS)


def _retry_after_s(error: ModelAPIError) -> float | None:
    if error.retry_after is not None or not isinstance(error, ModelHTTPError):
        return error.retry_after
    # Fractions of a second are no valid header, and are sent all the same.
    try:
        seconds = float((error.headers or {}).get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
