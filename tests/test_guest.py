"""sdopt within somebody else's program: light to import; what that had set stays; it may call from anywhere."""

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

import sdopt
from tests.command import ROOT, SMALL, SMOKE, eventually, fork, working_in


def python(cwd: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HOW = ["forked", pytest.param("anew", marks=pytest.mark.slow)]
"""How a user's program starts: forked from this process, or as a user starts it, with nothing of the tests in it."""


def program(cwd: Path, text: str, how: str) -> str:
    """Runs a program; returns what it said."""
    (script := cwd / "program.py").write_text(text)
    if how == "anew":
        return python(cwd, str(script))
    done = fork(cwd, program=script).finish(300)
    assert done.code == 0, done.err
    return done.out


def test_importing_it_imports_nothing_heavy_and_a_command_no_diffusers_itself(
    tmp_path: Path,
) -> None:
    heavy = "[m for m in ('torch', 'diffusers', 'mlflow', 'hydra', 'pandas', 'numpy') if m in sys.modules]"
    heavier = "[m for m in ('diffusers', 'transformers', 'torch._dynamo', 'mlflow') if m in sys.modules]"
    composed = "from sdopt.config.composer import composer_of; composer_of(['scheduler=euler']).__enter__()"
    program = f"import sys, sdopt; dir(sdopt); print({heavy})\nimport sdopt.launching; {composed}; print({heavier})"
    assert python(tmp_path, "-c", program).splitlines() == ["[]", "[]"]


def test_naming_a_function_leaves_the_random_numbers_of_a_program_as_they_are(
    tmp_path: Path,
) -> None:
    """A library that it imports draws from the global generator, after which a program would draw others."""
    drawn = "random.seed(1); sdopt.load_result; print(random.random())"
    said = python(tmp_path, "-c", f"import random, sdopt; {drawn}")
    assert said == python(
        tmp_path, "-c", "import random; random.seed(1); print(random.random())"
    )


@pytest.mark.slow
def test_only_workers_of_a_study_import_diffusers(tmp_path: Path) -> None:
    heavy = "[m for m in ('diffusers', 'transformers', 'torch._dynamo', 'mlflow', 'pandas') if m in sys.modules]"
    words = [*SMOKE, "precision=bf16", "scheduler=euler"]
    program = f"import sys\nfrom sdopt.launching import launch\nlaunch({words})\nprint({heavy})"
    assert python(tmp_path, "-c", program).splitlines()[-1] == "[]"


def test_every_public_name_is_there() -> None:
    assert dir(sdopt) == sorted(sdopt.__all__)
    for name in sdopt.__all__:
        assert getattr(sdopt, name) is not None
    with pytest.raises(AttributeError, match="nope"):
        sdopt.nope  # noqa: B018


@pytest.mark.parametrize("how", HOW)
def test_the_block_of_the_readme_runs_in_a_plain_script(
    tmp_path: Path, how: str
) -> None:
    [block] = re.findall(
        r"```python\n(import sdopt\n.*?)```",
        (ROOT / "README.md").read_text(),
        re.DOTALL,
    )
    assert len([line for line in block.splitlines() if line.strip()]) <= 12
    # Another study, and in small: one option, one step, and the images of one prompt.
    small = ", ".join(
        f'"{override}"'
        for override in ["layout=channels_last", *SMALL, "protocol.stage_calls=0"]
    )
    for name, other in {
        '"experiment=quickstart"': small,
        "runs/quickstart": "runs/pair",
        '"bfloat16"': '"layout=channels_last"',
    }.items():
        assert name in block
        block = block.replace(name, other)
    said = program(tmp_path, block, how)
    assert "layout=channels_last" in said
    assert said.count("pair: emoji") == 1, "a worker ran the script again"


def test_what_cannot_run_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sdopt.ConflictError, match="needs a CUDA device"):
        sdopt.run(*SMOKE, "attention=cudnn")
    assert capsys.readouterr().err == ""


PROGRAM = """
import logging, multiprocessing, os, signal, sys, threading, warnings
import hydra, torch
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
import sdopt

def state():
    loggers = {name: logging.getLogger(name) for name in ("", "app", "hydra", "mlflow", "alembic", "torch")}
    found = {
        "logging": {n: (l.level, l.disabled, list(map(id, l.handlers)), l.filters) for n, l in loggers.items()},
        "disabled": logging.root.manager.disable,
        "environment": dict(os.environ),
        "path": list(sys.path), "arguments": list(sys.argv), "folder": os.getcwd(),
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)],
        "warnings": list(warnings.filters),
        "hydra": (id(GlobalHydra.instance().hydra), HydraConfig.get().job.name, sorted(ConfigStore.instance().repo)),
        "resolvers": OmegaConf.has_resolver("mine"),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.get_rng_state().sum().item(),
                  torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "processes": (multiprocessing.get_start_method(allow_none=True), sys.modules["__main__"].__file__),
        "streams": (id(sys.stdout), id(sys.stderr), id(sys.excepthook)),
        "threads": sorted(t.name for t in threading.enumerate()),
    }
    if MLFLOW:
        import mlflow
        found["mlflow"] = (mlflow.get_tracking_uri(), mlflow.get_registry_uri(), mlflow.active_run().info.run_id)
    return found

@hydra.main(version_base="1.3", config_path="conf", config_name="mine")
def main(cfg):
    logging.getLogger("app").setLevel(logging.DEBUG)
    warnings.simplefilter("error", BytesWarning)
    signal.signal(signal.SIGHUP, lambda *_: None)
    if MLFLOW:
        import mlflow
        mlflow.set_tracking_uri("sqlite:///mine.db")
        mlflow.start_run()
    before = state()
    try:
        sdopt.run("precision=nope", "tracking=none")
    except sdopt.UsageError as error:
        print("REFUSED", error)
    after_failure = state()
    result = sdopt.run(*ARGUMENTS)
    after = state()
    for name, kept in before.items():
        found = after_failure[name], after[name]
        print("STATE", name, "same" if found == (kept, kept) else f"{kept} {found}")
    print("ROWS", len(result.variants))
    if MLFLOW:
        run = mlflow.active_run().info.run_id
        mlflow.end_run()
        print("EMPTY", mlflow.get_run(run).data.metrics, mlflow.get_run(run).data.tags.get("sdopt.role"))

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forked", "anew"])
def test_a_program_of_hydra_with_an_active_run_of_mlflow_stays_as_it_was(
    tmp_path: Path, how: str
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("lr: 0.1\n")
    mlflow = find_spec("mlflow") is not None
    tracking = ("tracking=mlflow", "tracking.uri=sqlite:///theirs.db") if mlflow else ()
    few = ("protocol.rounds=1", "protocol.warmup=0", "protocol.stage_calls=0")
    arguments = (*SMOKE, "precision=bf16", *few, *tracking)
    lines = program(
        tmp_path, f"MLFLOW, ARGUMENTS = {mlflow}, {arguments}\n{PROGRAM}", how
    ).splitlines()
    assert any(line.startswith("REFUSED precision=nope: ") for line in lines)
    groups = [line for line in lines if line.startswith("STATE ")]
    assert len(groups) == 14 + mlflow
    # Libraries add filters of warnings when they are first imported, here to read the result.
    changed = [line for line in groups if not line.endswith(" same")]
    assert [line for line in changed if not line.startswith("STATE warnings ")] == []
    assert "ROWS 3" in lines
    assert not mlflow or (
        "EMPTY {} None" in lines and (tmp_path / "theirs.db").is_file()
    )


def refused(_number: int = 0) -> str:
    try:
        sdopt.run("precision=nope", "tracking=none")
    except sdopt.UsageError as error:
        return str(error)
    return "not refused"


@pytest.mark.slow  # each call imports PyTorch in a process of its own
@pytest.mark.usefixtures("started_anew")
@pytest.mark.parametrize("where", ["a thread", "a daemonic process"])
def test_it_may_be_called_in(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    if where == "a thread":
        thread = threading.Thread(target=lambda: said.append(refused()))
        thread.start()
        thread.join()
    else:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            said += pool.map(refused, [0])
    [problem] = said
    assert problem.startswith("precision=nope: ")


class Bare:
    """A stream as programs make them, which can do no more than write; it lacks most characters."""

    def __init__(self) -> None:
        self.said = ""

    def write(self, text: str) -> None:
        text.encode("ascii")
        self.said += text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forked", "anew"])
def test_its_output_suits_any_stream(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    how: str,
) -> None:
    if how == "anew":
        request.getfixturevalue("started_anew")
    monkeypatch.chdir(tmp_path)
    closed = io.StringIO()
    closed.close()
    for name, value in (
        ("LC_ALL", "C"),
        ("PYTHONUTF8", "0"),
        ("PYTHONCOERCECLOCALE", "0"),
    ):
        monkeypatch.setenv(name, value)
    bare = Bare()
    for out, err in ((bare, sys.stderr), (closed, None)):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with pytest.raises(sdopt.UsageError, match="a dry run has no result"):
            sdopt.run(*SMOKE, "precision=bf16", "dry_run=true")
    assert "precision=bf16" in bare.said
    assert "�" not in bare.said


def test_overrides_are_arguments_of_their_own() -> None:
    with pytest.raises(sdopt.UsageError, match=r"sdopt\.run\(\*overrides\)"):
        sdopt.run(["precision=bf16"])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_study_ends_with_its_caller(number: int, tmp_path: Path) -> None:
    """By Ctrl-C, or where the caller is gone without a word."""
    script = f"import sdopt; sdopt.run(*{SMOKE}, 'protocol.rounds=10000')"
    caller = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert eventually(
        lambda: bool(list(tmp_path.rglob("result.json"))) or caller.poll() is not None,
        400,
    )
    os.kill(caller.pid, number)
    caller.communicate(timeout=120)
    assert caller.returncode != 0
    assert eventually(lambda: not working_in(tmp_path), 120), working_in(tmp_path)
