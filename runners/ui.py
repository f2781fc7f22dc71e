"""sdopt ui: the MLflow UI on localhost, on the store that runs are logged to."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from sdopt.errors import UnavailableError, UsageError, without_passwords

from . import Arguments, end_with_code

_PATIENCE_S = 1.0
_POLL_S = 0.2


@end_with_code
def main(argv: list[str]) -> int:
    """Serves until interrupted; returns the exit code."""
    parser = Arguments(
        prog="sdopt ui",
        description="Open the MLflow UI on localhost.",
        epilog="Overrides as in sdopt run: tracking.uri=…",
    )
    parser.add_argument(
        "--port", type=int, default=5000, help="port on localhost (default: 5000)"
    )
    parser.add_argument(
        "overrides", nargs="*", help="Hydra overrides of the tracking group"
    )
    arguments = parser.parsed(argv)

    from sdopt.config.tracking import tracking_of
    from sdopt.tracking.client import address_of, is_server
    from sdopt.tracking.store import require_mlflow, store_exists, ui_pages

    tracking = tracking_of(arguments.overrides)
    require_mlflow()
    if not store_exists(tracking):
        raise UsageError(
            f"tracking.uri={tracking.uri}: has no logged results yet; run a study first"
        )
    _require_port(arguments.port)
    if is_server(tracking):
        print(
            without_passwords(
                f"This tracking server has a UI of its own: {tracking.uri}"
            )
        )
        return 0
    pages = ui_pages(tracking)
    starting = f"starting MLflow on {tracking.uri}  (Ctrl-C ends it)"
    print(without_passwords(starting), flush=True)
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        address_of(tracking),
    ]
    command += ["--host", "127.0.0.1", "--port", str(arguments.port), "--workers", "1"]
    # In a session of its own: else the terminal's Ctrl-C would also reach the server, which answers with tracebacks.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = subprocess.Popen(command, start_new_session=True)
    try:
        while server.poll() is None and not _answers(arguments.port):
            time.sleep(_POLL_S)
        if server.poll() is None:
            _print_pages(pages, f"http://127.0.0.1:{arguments.port}")
        if (code := server.wait()) == 0:
            return 0
        raise UnavailableError(
            f"MLflow's server ended with exit code {code}; what it printed says why"
        )
    except KeyboardInterrupt:
        return 0
    finally:
        _end(server)


def _print_pages(pages: Mapping[str, str], site: str) -> None:
    """Prints the links, the newest first: MLflow's own first page shows none of them."""
    said = "Leaderboard of {}"
    for name, page in pages.items():
        print(f"{said.format(name)}: {site}/{page}", flush=True)
        said = "  {}"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ends a server and all that it started: it has nothing to save, and would clean up for seconds."""
    if server.poll() is not None:
        return
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _require_port(port: int) -> None:
    if not 0 < port < 2**16:
        raise UsageError(f"--port {port}: must be between 1 and {2**16 - 1}")
    if _answers(port):
        raise UsageError(f"--port {port}: already in use; choose another port")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
