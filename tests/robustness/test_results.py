"""Results that are damaged or of a later schema, and paths in them that lead elsewhere: one line, exit code 2."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sdopt as library
from sdopt.config.composed import with_resumed
from sdopt.errors import UsageError
from sdopt.record.files import inside, parse_result, read_error, read_result
from sdopt.record.records import StudyResult
from sdopt.report.sweep import exit_code, read_sweep
from sdopt.schema import Tracking
from sdopt.tracking.client import Logged
from sdopt.tracking.runs import log_study
from tests.command import SMOKE, refused, sdopt
from tests.robustness.damage import RESULT, Path_, document, replaced

DOCUMENT = document()


def answer_to(damaged: Any) -> str:
    """What is said of a damaged result."""
    with pytest.raises(UsageError) as caught:
        parse_result(json.dumps(damaged).encode())
    [problem] = caught.value.problems
    assert "\n" not in problem
    return problem


FIRST_CALL = ("variants", 0, "measurements", 0, "shapes", 0, "calls", 0)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("variants",), [], "no variant has this name"),
        (("baseline",), "nobody", "nobody: no variant has this name"),
        (("comparisons", 0, "reference"), "nobody", "nobody: no variant has this name"),
        (("environment",), {}, "environment"),
        (
            ("comparisons", 0, "shapes", 0, "speedup", "estimate"),
            -1,
            "estimate: Input should be greater than 0",
        ),
        (
            ("config", "protocol", "confidence"),
            7,
            "config.protocol.confidence: Input should be less than 1",
        ),
        (
            ("variants", 0, "contract"),
            "x",
            "variants.0.contract: Input should be 'exact', 'equivalent' or 'lossy'",
        ),
        (
            (*FIRST_CALL, "seconds"),
            0.0,
            "calls.0.seconds: Input should be greater than 0",
        ),
        (
            (*FIRST_CALL, "held_gib"),
            math.inf,
            "calls.0.held_gib: Input should be a finite number",
        ),
        (("schema_version",), 99, "has schema version 99, and this sdopt reads"),
    ],
)
def test_what_cannot_be_true_is_named(path: Path_, value: Any, said: str) -> None:
    assert said in answer_to(replaced(DOCUMENT, path, value))


def test_a_later_schema_with_fields_of_its_own_is_read_where_its_version_is_ours() -> (
    None
):
    assert parse_result(
        json.dumps(DOCUMENT | {"of_the_future": {"a": 1}}).encode()
    ).variants


TRUNCATED = RESULT.read_bytes()[:5000]


@pytest.mark.parametrize("content", [TRUNCATED, b"", b"[" * 100_000], ids=range(3))
def test_each_command_says_which_file(content: bytes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    (run / "result.json").write_bytes(content)
    (run / ".hydra" / "hydra.yaml").write_text(
        "hydra: {overrides: {task: [], hydra: []}, runtime: {config_sources: []}}"
    )
    readers: list[Callable[[], Any]] = [
        lambda: library.load_result(run),
        lambda: library.load(run),
        lambda: exit_code(run),
        lambda: with_resumed([f"resume={run}"]),
    ]
    for read in readers:
        with pytest.raises(UsageError, match=r"run/result\.json: ") as caught:
            read()
        assert len(caught.value.problems) == 1


def test_a_sweep_goes_on_with_its_other_jobs(tmp_path: Path) -> None:
    for job in "0123":
        (tmp_path / "sweep" / job).mkdir(parents=True)
        shutil.copy(RESULT, tmp_path / "sweep" / job)
    (tmp_path / "sweep" / "1" / "result.json").write_bytes(TRUNCATED)
    (tmp_path / "sweep" / "2" / "result.json").unlink()
    (tmp_path / "sweep" / "2" / "error.json").write_text('{"exit_code": "x"}')
    (tmp_path / "sweep" / "4" / ".hydra").mkdir(parents=True)
    sweep = read_sweep(tmp_path / "sweep")
    assert list(sweep.studies) == ["0", "3"]
    damaged = [line.partition("sweep/")[2].partition(":")[0] for line in sweep.damaged]
    assert damaged == ["1/result.json", "2/error.json"]
    assert sweep.exit_code == 1  # the regression of the jobs that can be read
    assert {job.number for job in sweep.jobs} == {"0", "1", "2", "3", "4"}
    assert "the job has begun and has written no result" in next(
        job.because for job in sweep.jobs if job.number == "4"
    )
    finished = sdopt(tmp_path, "gate", "sweep")
    assert finished.code  # the worst of all that there is to say
    assert all(
        line.removeprefix(f"{tmp_path}/") in finished.err for line in sweep.damaged
    )
    assert finished.out.count("verdicts: ") == 2


def test_sync_goes_on_after_an_error_of_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in "ab":
        (tmp_path / job).mkdir()
        shutil.copy(RESULT, tmp_path / job)

    def log(_result: StudyResult, folder: Path, _tracking: Tracking) -> Logged:
        if folder.name == "a":
            raise KeyError("what nobody foresaw")
        return Logged("run", "1", new=True)

    monkeypatch.setattr("sdopt.tracking.runs.log_study", log)
    finished = sdopt(
        tmp_path, "sync", ".", f"tracking.uri=sqlite:///{tmp_path}/never.db"
    )
    assert finished.code == 3
    assert (
        finished.err
        == "sdopt: a: could not be logged (KeyError: 'what nobody foresaw')\n"
    )
    assert finished.out.startswith("b: logged as run in sqlite:///")


@pytest.mark.parametrize("content", ["", "{}", '{"exit_code": 2, "problems": "x"}'])
def test_an_error_that_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(content)
    with pytest.raises(UsageError, match=r"error\.json: cannot be read"):
        read_error(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "\x00", "hydra: {overrides: {task: [], hydra: [3]}}", "{" * 1000],
    ids=range(5),
)
def test_a_command_line_that_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "hydra.yaml").write_text(content)
    with pytest.raises(
        UsageError, match=r"hydra\.yaml, which records what was run there, is damaged"
    ) as caught:
        with_resumed([f"resume={tmp_path}"])
    assert len(caught.value.problems) == 1


OUTSIDE = (
    "/etc/hostname",
    "images/../../secret.png",
    "a\x00b.png",
    "",
)


def with_images(path: str) -> Any:
    image = {
        "prompt": "a",
        "prompt_index": 0,
        "image_index": 0,
        "seed": 0,
        "path": path,
    }
    return replaced(document(), ("variants", 0, "images"), [image])


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_out_is_refused_where_it_is_read(
    path: str, tmp_path: Path
) -> None:
    for damaged in (
        with_images(path),
        replaced(
            document(),
            ("redrawn",),
            {"numerical": with_images(path)["variants"][0]["images"]},
        ),
    ):
        with pytest.raises(UsageError, match="not a file of the run's folder"):
            parse_result(json.dumps(damaged).encode())
    with pytest.raises(UsageError, match="not a file of that folder"):
        inside(tmp_path, path)


def test_a_link_that_leads_out_is_refused_where_it_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "images").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "images" / "0.png").symlink_to(tmp_path / "secret.png")
    (folder / "outside").symlink_to(tmp_path)
    (folder / "result.json").write_text(json.dumps(with_images("images/0.png")))
    with pytest.raises(UsageError, match="not a file of that folder"):
        log_study(
            read_result(folder), folder, Tracking(uri=f"sqlite:///{tmp_path}/never.db")
        )
    with pytest.raises(UsageError, match="not a file of that folder"):
        inside(folder, "outside/secret.png")
    assert not (tmp_path / "never.db").exists()
    (folder / "images" / "1.png").write_bytes(b"own")
    assert inside(folder, "images/1.png").read_bytes() == b"own"


@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", " ", "a\nb", "a" * 200])
def test_the_name_of_a_study_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name="):
        parse_result(json.dumps(document() | {"name": name}).encode())


@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_a_study_is_not_written_elsewhere(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Hydra makes the folder before sdopt sees the configuration."""
    here = tmp_path / "a" / "b" / "c"
    here.mkdir(parents=True)
    said = "study.name=../../../evil: must be a name, not a path: no / and no \\, no control character, and not . or .."
    refused(here, "run", *flags, *SMOKE, "study.name=../../../evil", says=said)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not list(tmp_path.rglob("evil"))


def test_an_id_is_no_query_and_no_path() -> None:
    for wrong in ("x' or 'a' = 'a", "../x", ""):
        with pytest.raises(UsageError, match="id="):
            parse_result(json.dumps(document() | {"id": wrong}).encode())
