"""`sdopt.run`: a study within somebody else's program, which stays as it was.

The study runs in a process of its own. So the caller's loggers, environment, paths, signals, threads, and its own use
of Hydra, MLflow and PyTorch are never touched, and it may call from a thread, a notebook or a daemonic worker.
"""

import codecs
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sdopt.apart import start_apart
from sdopt.errors import ENDINGS, SdoptError, UnavailableError, require_texts
from sdopt.guard import PLAIN, explained, patient_streams
from sdopt.terminal import OVERWRITES

if TYPE_CHECKING:
    from sdopt.report.outcome import Outcome


def run(*overrides: str, config_dir: str | Path | None = None) -> "Outcome":
    """Measures a study like `sdopt run`, and returns its result.

    As with the command, the result, plots and images are also written to a folder in `outputs/runs/` and to MLflow;
    `hydra.run.dir=…` and `tracking=none` change that. A variant that fails is a row with a status and a reason, not an
    exception. Everything runs in a process of its own, which is given this one's environment and `sys.path`, and whose
    output is shown here.

    Args:
        overrides: command-line overrides, such as `"experiment=quickstart"` and `"protocol.rounds=20"`.
        config_dir: a folder with additional configuration groups, like `--config-dir`.

    Raises:
        UsageError: the overrides cannot be composed, or the study cannot run here; `problems` has a line for each.
        UnavailableError: the study was aborted, for example by a full disk; completed measurements are kept.
        KeyboardInterrupt: Ctrl-C; completed measurements are kept in the folder.
    """
    require_texts("run", overrides)
    # A stream that is not the process's own, as in a notebook, is written to from here.
    streams = [sys.stdout, sys.stderr]
    piped: dict[str, int | None] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    plain_streams = sys.__stdout__, sys.__stderr__
    for name, stream, plain in zip(piped, streams, plain_streams, strict=True):
        if stream is None:
            piped[name] = subprocess.DEVNULL
        elif stream is plain:
            piped[name] = None
    for stream in streams:
        with suppress(AttributeError, ValueError, OSError):
            stream.flush()
    # A notebook writes over a line that begins with a carriage return, which is enough for a bar.
    notebook = (
        {OVERWRITES: "1"} if piped["stdout"] and "ipykernel" in sys.modules else {}
    )
    process, channel = start_apart(
        "sdopt.guest", "serve", os.environ | notebook, **piped
    )
    with ExitStack() as until_done:
        until_done.callback(process.wait)
        until_done.callback(process.kill)
        until_done.enter_context(channel)
        readers = {
            pipe.fileno(): (until_done.enter_context(pipe), stream)
            for pipe, stream in zip(
                (process.stdout, process.stderr), streams, strict=True
            )
            if pipe is not None
        }
        channel.send(
            (
                overrides,
                config_dir,
                [name for name, to in piped.items() if to == subprocess.PIPE],
            )
        )
        outcome, error = _followed(
            process, channel, {fd: stream for fd, (_, stream) in readers.items()}
        )
        with suppress(subprocess.TimeoutExpired):  # it removes its temporary files
            process.wait(30)
    if error is not None:
        raise error
    return outcome  # type: ignore[no-any-return]


def _followed(
    process: "subprocess.Popen[bytes]", channel: Connection, streams: dict[int, TextIO]
) -> Any:
    """Shows what the process prints until it answers; passes on Ctrl-C, and a further one more firmly."""
    decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in streams}
    firmly = iter((signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
    answer: Any = None
    waited_for: list[Any] = [channel, *streams]
    while waited_for:
        try:
            for ready in wait(waited_for):
                if ready is channel:
                    with suppress(EOFError, OSError):
                        answer = channel.recv()
                    waited_for.remove(channel)
                elif text := os.read(ready, 65536):  # type: ignore[arg-type]
                    _show(decoders[ready].decode(text), streams[ready])  # type: ignore[index]
                else:
                    waited_for.remove(ready)
            if (
                answer is not None
                and channel not in waited_for
                and not wait(waited_for, 0)
            ):
                break  # a worker that outlives it may hold its streams
        except KeyboardInterrupt:
            process.send_signal(next(firmly, signal.SIGKILL))
    if answer is None:
        return None, UnavailableError(
            f"the process of the study ended with code {process.wait()}; see its output above"
        )
    return answer


def _show(text: str, stream: TextIO) -> None:
    """Writes to a stream of the caller's, whatever it is: one that is closed or lacks a character ends no study."""
    with suppress(OSError, ValueError, AttributeError):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, PLAIN).decode(encoding))
        stream.flush()


def serve(channel: Connection) -> None:
    """Runs the study that comes through a pipe, and answers with its result or error: the main function there."""
    from sdopt.launching import run as measure

    overrides, config_dir, piped = channel.recv()
    for name in piped:
        getattr(sys, name).reconfigure(encoding="utf-8")
    for number in (signal.SIGINT, *ENDINGS):
        signal.signal(number, signal.default_int_handler)
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    outcome: Outcome | None = None
    problem: BaseException | None = None
    try:
        with patient_streams():
            outcome = measure(*overrides, config_dir=config_dir)
    except KeyboardInterrupt:
        problem = KeyboardInterrupt()
    except (SdoptError, OSError) as error:
        problem = error
    except Exception as error:
        problem = UnavailableError(explained(error))
    sys.stdout.flush()
    with suppress(OSError):  # the caller's process has ended
        channel.send((outcome, problem))


def _end_with(channel: Connection) -> None:
    """Ends the study, with what it has measured, when the caller's process ends without a word."""
    with suppress(EOFError, OSError):
        channel.recv()
    os.kill(os.getpid(), signal.SIGTERM)
