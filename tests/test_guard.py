"""Exit code 1 means a regression, and nothing else; limits of the shell that are too low end a command with a line."""

import ast
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdopt.cli import COMMANDS, main
from sdopt.config.composed import hide_passwords
from sdopt.errors import (
    UnavailableError,
    UsageError,
    command_line,
    print_problems,
    shell_word,
)
from sdopt.guard import end_with_code
from sdopt.limits import require_limits
from sdopt.record.files import read_result, to_json
from sdopt.report.blocks import Code
from sdopt.report.charts.spec import picture
from sdopt.report.terminal import shown
from sdopt.terminal import console
from sdopt.worker.forkserver import start_fork_server

WAYS_OUT = {
    "usage": (UsageError("a"), 2),
    "conflicts": (UsageError(["a", "b"]), 2),
    "unavailable": (UnavailableError("a"), 3),
    "a file": (FileNotFoundError(2, "No such file or directory", "a"), 3),
    "no memory": (MemoryError(), 3),
    "a module": (ModuleNotFoundError("No module named 'a'"), 3),
    "a defect": (ZeroDivisionError("a"), 3),
    "argparse": (SystemExit(2), 2),
    "a library's exit": (SystemExit(1), 3),
    "a library's message": (SystemExit("a"), 3),
    "an exit": (SystemExit(0), 0),
    "Ctrl-C": (KeyboardInterrupt(), 130),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_each_way_out_has_its_code(
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error, code = WAYS_OUT[way]
    page = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))

    @end_with_code
    def command(_argv: list[str]) -> int:
        raise error

    assert command([]) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert ("a defect of sdopt: ZeroDivisionError: a (at " in said) == (
        way == "a defect"
    )
    if isinstance(error, UsageError | UnavailableError):
        assert said == "".join(f"sdopt: {problem}\n" for problem in error.problems)
        assert page.read_text() == f"```\n{said}```\n", "CI's page says it too"
    if isinstance(error, KeyboardInterrupt):
        assert said == "sdopt: interrupted\n"


MISTAKES = {
    **dict.fromkeys(("run", "search", "calibrate", "doctor", "gpu-suite"), "nope=1"),
    "ui": "tracking.uri=sqlite:////nowhere/runs.db",
    "benchmark-overhead": "--nope",  # an override starts a run
    "train-reference": "nope",
    "evaluate-reference": "--nope",
}
"""For each command whose argument is no folder, one that is a mistake."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_ends_each_command_with_2(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = MISTAKES.get(command, "/nowhere")
    for arguments in (
        [given, *([given] if command == "compare" else [])],
        ["--no-such-option"],
    ):
        assert main([command, *arguments]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert said
    assert not list(tmp_path.iterdir())
    if command == "optimize":
        assert main(["optimize", "emoji", "--budjet", "4m"]) == 2
        assert "did you mean --budget?" in capsys.readouterr().err
    if (
        command == "gate"
    ):  # where a variable of CI is not set, the working folder is not meant
        for empty in ([""], ["a", "--against", ""], ["a", "--output="]):
            assert main(["gate", *empty]) == 2
            assert "is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["optimize", "search", "plan", "doctor", "load-test", "serve", "run", "gate"],
)
def test_a_folder_of_groups_is_one_and_is_there(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [command, *(["emoji"] if command in ("optimize", "gate") else [])]
    assert (
        main([*given, "--config-dir", str(tmp_path), "--config-dir", str(tmp_path)])
        == 2
    )
    assert re.search(
        r"--config-dir \S+: (this flag can be given once only|only one folder)",
        capsys.readouterr().err,
    )
    assert main([*given, "--config-dir", "/nowhere"]) == 2
    assert capsys.readouterr().err == "sdopt: --config-dir /nowhere: no such folder\n"


def test_nothing_but_a_verdict_ends_with_1() -> None:
    """No command returns a 1 of its own; and what ends a process by itself has another code."""
    folder = Path(__file__).parents[1]
    found = []
    for file in (*folder.glob("runners/*.py"), *folder.glob("sdopt/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            codes: list[ast.AST | None] = []
            if isinstance(node, ast.Return) and file.parent.name == "runners":
                either = node.value
                codes = (
                    [either.body, either.orelse]
                    if isinstance(either, ast.IfExp)
                    else [either]
                )
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("exit", "SystemExit")
            ):
                codes = [*node.args]
            if any(
                isinstance(code, ast.Constant)
                and code.value == 1
                and code.value is not True
                for code in codes
            ):
                found.append(f"{file.relative_to(folder)}: {ast.unparse(node)}")
    assert not found


def test_a_working_folder_that_is_gone_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["show"]) == 2
    assert "working folder" in capsys.readouterr().err
    assert main(["--version"]) == 0


@pytest.mark.parametrize("redirected", ["> /dev/full", ">&-", "2>&-", "| head -c 1"])
def test_output_that_nobody_reads_ends_no_command(
    redirected: str, tmp_path: Path
) -> None:
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m sdopt.cli --help {redirected}"
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [("/dev/full", 3, "No space left on device"), ("/dev/null", 0, "")],
)
def test_an_answer_for_a_program_is_written_or_has_failed(
    redirected: str, code: int, said: str, tmp_path: Path
) -> None:
    main = "with only_json(True) as say: say({'exit_code': 0})"
    lines = [
        "import sys",
        "from runners import only_json",
        "from sdopt.guard import end_with_code",
        f"def main(argv):\n    {main}\n    return 0",
        "sys.exit(end_with_code(main)([]))",
    ]
    with Path(redirected).open("w", encoding="utf-8") as stream:
        ended = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            cwd=tmp_path,
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == code
    assert said in ended.stderr


def test_an_ascii_terminal_is_spelt_for(tmp_path: Path) -> None:
    code = "from sdopt.guard import end_with_code as g; g(lambda _: print('≈1.5× … ü ☃ \\udc80') or 0)([])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "~1.5x ... u ? ?\n")


@pytest.mark.parametrize(
    "folder",
    ["plain/a", "my out/it s", "a=b,c", "it's", 'say "it"', "$HOME", "ü", "[x]", "-x"],
)
def test_a_printed_command_can_be_pasted(folder: str) -> None:
    assert shlex.split(command_line("run", f"resume={folder}")) == [
        "sdopt",
        "run",
        f"resume={folder}",
    ]
    assert shlex.split(command_line("sync", folder)) == ["sdopt", "sync", folder]
    assert shell_word("resume=my out") == "resume='my out'", "only the value is quoted"


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:secret@host/db",
        "http://me:se@cret@h",
        "x://h/db?password=secret&a",
        "https://secret@h/v1",
        "https://secret:@h/v1",
        "https://h/v1?code=secret",
    ],
)
def test_passwords_are_not_passed_on(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_problems([f"`{address}` is slow"])
    said = [
        capsys.readouterr().err,
        str(UsageError(f"tracking.uri={address}")),
        command_line(f"tracking.uri={address}"),
    ]
    assert not any("cret" in each for each in said)
    assert all("***" in each for each in said)


def test_what_a_file_says_does_not_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_problems(["a.csv: the columns are \x1b[31mred\x07, grün\r"])
    assert (
        capsys.readouterr().err
        == "sdopt: a.csv: the columns are \\x1b[31mred\\x07, grün\\r\n"
    )


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_colours_for_a_log_move_no_cursor(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(sys, "stdout", out := StringIO())
    shown = console()
    with shown.status("working"):
        shown.print("[red]done[/]")
    assert out.getvalue() == "\x1b[31mdone\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", out := StringIO())
    console().print("[red]done[/]")
    assert out.getvalue() == "done\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_columns_are_no_width(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr(sys, "stdout", out := StringIO())
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    console().print("done: a:key:b", markup=False)
    assert "done: a:key:b" in out.getvalue()


def test_a_command_is_one_line_however_narrow_the_terminal_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one in two lines the first would run alone, without what the second one chooses."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", out := StringIO())
    command = "sdopt run model=/home/me/models/one.safetensors workload.steps=25 caching=deepcache"
    console().print(shown([Code("To measure it again", [command])], 40))
    assert f"\n    {command}\n" in out.getvalue()


def test_passwords_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = read_result(
        next(
            iter(
                (Path(__file__).parents[1] / "outputs" / "records").glob("*/quickstart")
            )
        )
    )
    address = "postgresql://me:secret@host/db"
    result.config = replace(
        result.config, tracking=replace(result.config.tracking, uri=address)
    )
    assert b"secret" not in (content := to_json(result))
    assert (
        json.loads(content)["config"]["tracking"]["uri"]
        == "postgresql://me:***@host/db"
    )
    files = [tmp_path / "record" / "overrides.yaml", tmp_path / "multirun.yaml"]
    files[0].parent.mkdir()
    for file in files:
        file.write_text(f"- tracking.uri={address}\n")
    job = SimpleNamespace(
        runtime=SimpleNamespace(output_dir=tmp_path),
        sweep=SimpleNamespace(dir=tmp_path),
        output_subdir="record",  # ".hydra" unless the user names another
    )
    monkeypatch.setattr("hydra.core.hydra_config.HydraConfig.get", lambda: job)
    hide_passwords()
    assert [file.read_text() for file in files] == [
        "- tracking.uri=postgresql://me:***@host/db\n"
    ] * 2


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The limits of this process, by number: those that a test puts there, and else none."""
    found: dict[int, int] = {}
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda limit: (found.get(limit, resource.RLIM_INFINITY),) * 2,
    )
    return found


def test_each_that_is_too_low_is_a_line(
    limits: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31)  # whose processes are none
    limits |= {
        resource.RLIMIT_AS: 2**30,
        resource.RLIMIT_FSIZE: 2**20,
        resource.RLIMIT_NPROC: 20,
    }
    with pytest.raises(UnavailableError) as caught:
        start_fork_server()
    memory, file, tasks = caught.value.problems
    assert memory.startswith(
        "address space is limited to 1024 MiB, but at least 8192 MiB is required; "
    )
    assert memory.endswith("allow more (ulimit -v unlimited)")
    assert file.startswith("the size of a file is limited to 1 MiB, but")
    assert tasks.startswith(
        "processes and threads are limited to 20, and 0 run already"
    )


def test_processes_that_run_count_and_high_limits_are_enough(
    limits: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    require_limits()
    limits |= {
        resource.RLIMIT_AS: 2**36,
        resource.RLIMIT_FSIZE: 2**30,
        resource.RLIMIT_NPROC: 2**16,
    }
    require_limits()
    limits[resource.RLIMIT_NPROC] = 66 + (os.cpu_count() or 1)
    monkeypatch.setattr("sdopt.limits._running_tasks", lambda: 3)
    with pytest.raises(UnavailableError, match="3 run already"):
        require_limits()
    monkeypatch.setattr(os, "getuid", lambda: 0)
    require_limits()  # the kernel holds root to none


def test_plots_need_more_than_measuring(limits: dict[int, int]) -> None:
    limits[resource.RLIMIT_AS] = 2**34
    require_limits()
    with pytest.raises(
        UnavailableError,
        match="16384 MiB, but at least 81920 MiB is required for plots",
    ):
        picture({})
