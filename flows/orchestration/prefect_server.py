"""Runs Prefect's server on a socket that it was handed, so that its port is held from before it starts.

python -m flows.orchestration.prefect_server FILE_DESCRIPTOR
"""

from __future__ import annotations

import socket
import sys

STOP_S = 2  # for requests under way, when it is asked to stop


def main(descriptor: int) -> None:
    """Serve until a signal ends it. Raises what Prefect raises where it cannot start."""
    import uvicorn

    # Not uvicorn's own --fd: it takes the socket for a local one and leaves small answers waiting for a full packet.
    listening = socket.socket(fileno=descriptor)
    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        log_level="error",
        lifespan="on",
        timeout_graceful_shutdown=STOP_S,
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(int(sys.argv[1]))
