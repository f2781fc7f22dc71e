"""sdopt ui: the MLflow UI on localhost, on the store that runs are logged to."""

import os
import signal
import socket
import subprocess
import sys

from sdopt.errors import UnavailableError, UsageError, without_passwords

from . import Arguments, end_with_code

_PATIENCE_S = 1.0


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
    site = f"http://127.0.0.1:{arguments.port}"
    # The newest first: MLflow's own first page shows none of them.
    names = list(pages)
    for name in names[:1]:
        print(f"Leaderboard of {name}, by speed-up: {site}/{pages[name]}")
    for name in names[1:]:
        print(f"  {name}: {site}/{pages[name]}")
    print(without_passwords(f"MLflow on {tracking.uri}  (Ctrl-C ends it)"), flush=True)
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
        if (code := server.wait()) == 0:
            return 0
        raise UnavailableError(
            f"MLflow's server ended with exit code {code}; what it printed says why"
        )
    except KeyboardInterrupt:
        return 0
    finally:
        _end(server)


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
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UsageError(f"--port {port}: already in use; choose another port")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
