"""The `sdopt` command as a user gives it: in this process, or where the process is the subject in one of its own."""

import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO, StringIO
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

import psutil
from hydra.core.global_hydra import GlobalHydra
from PIL import Image

from sdopt.cli import main
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.report.catalog import HTML, MARKDOWN, REPORTS
from tests.forked import ForkedCommand

ROOT = Path(__file__).parents[1]

# On the CPU also where there is a GPU: tests of CUDA are marked as such, and ask for it.
SMALL = (
    "hardware=cpu",
    "hardware.threads=1",
    "tracking=none",
    # The least that the model draws; tests of images, of stages and of steps ask for more.
    "workload.steps=1",
    "workload.size=32",
    "workload.prompt_count=1",
    "protocol.replicates=1",
    "quality=none",
    "quality.prompt_count=1",
    # As many rounds as are asked for, whatever else the machine does.
    "protocol.interference=null",
    # The same of a variant that the processor runs slowly, as one without AVX-512 runs bfloat16.
    "protocol.give_up=null",
    # Tests of what is handed out run programs.
    "protocol.programs_s=0",
)
SMOKE = ("protocol=smoke", *SMALL)


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str
    """What it said on standard error after the line with which it began."""
    cwd: Path
    began: str = ""

    @classmethod
    def of(cls, code: int, out: str, err: str, cwd: Path) -> "Finished":
        """Takes the first sign of life of a command off what it said."""
        first, _, more = err.partition("\n")
        if first.startswith("starting: "):
            return cls(code, out, more, cwd, first)
        return cls(code, out, err, cwd)

    @property
    def folder(self) -> Path:
        """The folder of the one result that it wrote."""
        [path] = (self.cwd / "outputs").rglob("result.json")
        return path.parent

    @property
    def result(self) -> StudyResult:
        return read_result(self.folder)

    @property
    def shown(self) -> str:
        """All it said, as one line: a terminal wraps its text anywhere."""
        return " ".join((self.out + " " + self.err).split())


def _plot(*_: object, **__: object) -> bytes:
    Image.new("RGB", (90, 30)).save(drawn := BytesIO(), "PNG")
    return drawn.getvalue()


def sdopt(
    cwd: Path, *arguments: str, out: TextIO | None = None, pages: bool = False
) -> Finished:
    """Runs the command in this process, from the folder `cwd`; its workers start from this process's fork server.

    With `out`, what it prints goes there. Its pages and plots, which take half of its time, are written with `pages`
    alone, and all plots are then the same picture: `tests/report` draws them, and so does a command in a process of its
    own. Where plots cannot be drawn, as on a GPU machine without network, it draws none.
    """
    slow = (HTML, MARKDOWN, "plot.png", "tradeoff.png", "stages.png")
    printed, err = StringIO(), StringIO()
    path = list(sys.path)
    try:
        with (
            chdir(cwd),
            redirect_stdout(out or printed),
            redirect_stderr(err),
            patch("vl_convert.vegalite_to_png", _plot)
            if find_spec("vl_convert")
            else nullcontext(),
            patch(
                "sdopt.report.catalog.REPORTS",
                [each for each in REPORTS if pages or each.file not in slow],
            ),
        ):
            code = main(list(arguments))
    finally:
        sys.path[:] = path
    assert not GlobalHydra.instance().is_initialized(), (
        "Hydra's state outlives the command"
    )
    return Finished.of(code, printed.getvalue(), err.getvalue(), cwd)


def refused(cwd: Path, *arguments: str, says: str = "") -> Finished:
    """Runs the command with a mistake in it, which ends it with exit code 2 and a line for each problem.

    With `says`, which is a part of what it says, nothing is measured either.
    """
    finished = sdopt(cwd, *arguments)
    assert (finished.code, says in finished.shown) == (2, True), finished.shown
    assert "Traceback" not in finished.err
    assert not says or not list(cwd.rglob("result.json"))
    return finished


@dataclass
class Process:
    """The command in a process, and a session, of its own."""

    popen: "subprocess.Popen[str] | ForkedCommand"
    cwd: Path

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: a signal to the whole foreground group."""
        os.killpg(self.popen.pid, signal.SIGINT)

    def finish(self, timeout_s: float = 120) -> Finished:
        out, err = self.popen.communicate(timeout=timeout_s)
        code = self.popen.returncode
        assert code is not None
        return Finished.of(code, out, err, self.cwd)

    def descendants(self) -> list[str]:
        """Command lines of the process and of all that it or a descendant started: they work in its folder."""
        return working_in(self.cwd)

    def left_behind(self, patience_s: float = 10) -> list[str]:
        """Those that are there still after some patience."""
        eventually(lambda: not self.descendants(), patience_s, pause_s=0.1)
        return self.descendants()


def start(
    cwd: Path, *arguments: str, module: str = "sdopt.cli", **environment: str
) -> Process:
    """Starts the command from the folder `cwd`, which no other process works in, without waiting for it."""
    # A shell's background job ignores SIGINT, and so would the command.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=cwd,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, inherited)
    return Process(popen, cwd)


def fork(
    cwd: Path,
    *arguments: str,
    program: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Starts the command, or a program, as `start` does, in a process that has imported already what it imports."""
    return Process(ForkedCommand(cwd, arguments, environment or {}, program), cwd)


def working_in(folder: Path) -> list[str]:
    """Command lines of the processes that work in a folder or below it."""
    # The first command in this process may have started these from there.
    ours = servers()
    return [
        " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(
            ["cwd", "cmdline"]
        )  # of one that has ended, or is another user's, None
        if process.pid not in ours
        and Path(process.info["cwd"] or "/").is_relative_to(folder)
    ]


def servers() -> set[int]:
    """The processes that this one needs to start workers: the fork server, and who tracks its resources."""
    return {
        multiprocessing.forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }


def workers() -> list[int]:
    """Processes that this process's fork server has started, and theirs."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return [
        child.pid
        for child in psutil.Process(server).children(recursive=True)
        if not has_ended(child.pid)
    ]


def has_ended(pid: int) -> bool:
    """Returns whether a process has ended, also one that its parent has not asked for yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def eventually(
    condition: Callable[[], bool], limit_s: float = 60, pause_s: float = 0.02
) -> bool:
    """Waits until a condition holds; returns whether it does."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True
