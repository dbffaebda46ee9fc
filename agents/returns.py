"""`ToolReturn`: a tool's result as text for the model with structured content beside it.

A plain value only; what is stored of it is decided where results are bounded.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolReturn:
    """`text` is for the model; `structured` (JSON, or a pydantic model) for programs that read the
    transcript. No model is sent the latter.
    """

    text: str
    structured: Any = None
