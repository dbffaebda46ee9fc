"""Pages of a worker under test: free ports, and what is served at them."""

import asyncio
import socket
import urllib.error
import urllib.request


def ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [int(item.getsockname()[1]) for item in sockets]
    for item in sockets:
        item.close()
    return found


async def get(port: int, path: str) -> tuple[int, str]:
    """Status and text of a page; 0 where nobody answers."""
    return await asyncio.to_thread(_get, f"http://127.0.0.1:{port}{path}")


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""
