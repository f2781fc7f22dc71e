"""What a result names is read from its own folder alone, whoever wrote the result and wherever it points."""

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdopt.errors import UsageError
from sdopt.results.files import parse_result, read_result
from sdopt.results.folders import inside
from sdopt.schema import Tracking
from sdopt.search.answer import RECORD, TABLES
from sdopt.search.command import PLOT, logged
from sdopt.tracking.runs import log_study, log_sweep
from tests.command import SMOKE, sdopt
from tests.robustness.damage import RESULT, document, replaced

OUTSIDE = (
    "/etc/hostname",
    "../secret.png",
    "images/../../secret.png",
    "images/..",
    "a\x00b.png",
    "",
    ".",
    "\x1b[2J.png",
)


def with_images(path: str) -> Any:
    image = {"prompt": "a", "prompt_index": 0, "image_index": 0, "seed": 0, "path": path}
    return replaced(document(), ("variants", 0, "images"), [image])


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_out_is_refused_where_it_is_read(path: str, tmp_path: Path) -> None:
    for damaged in (
        with_images(path),
        replaced(document(), ("redrawn",), {"numerical": with_images(path)["variants"][0]["images"]}),
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
    for path in ("images/0.png", "outside/secret.png"):
        (folder / "result.json").write_text(json.dumps(with_images(path)))
        with pytest.raises(UsageError, match="not a file of that folder"):
            log_study(read_result(folder), folder, Tracking(uri=f"sqlite:///{tmp_path}/never.db"))
    assert not (tmp_path / "never.db").exists()
    (folder / "images" / "1.png").write_bytes(b"own")
    assert inside(folder, "images/1.png").read_bytes() == b"own"


def test_a_report_that_is_a_link_is_refused_where_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder, store = tmp_path / "sweep", Tracking(uri=f"sqlite:///{tmp_path}/never.db")
    folder.mkdir()
    result = read_result(RESULT)
    for name in ("report.html", "report.md", "plot.png"):
        (folder / name).symlink_to(tmp_path / "secret")
        send = partial(log_study, result, folder) if name == "plot.png" else partial(log_sweep, [result], folder, "")
        with pytest.raises(UsageError, match="not a file of that folder"):
            send(store)
        (folder / name).unlink()
    assert not (tmp_path / "never.db").exists()


def test_a_file_of_a_search_that_is_a_link_is_refused_where_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "search").mkdir()
    search: Any = SimpleNamespace(studies=SimpleNamespace(folder=tmp_path / "search"))
    nothing: Any = None
    for name in (RECORD, TABLES, PLOT):
        (tmp_path / "search" / name).symlink_to(tmp_path / "secret")
        with pytest.raises(UsageError, match="not a file of that folder"):
            logged(search, nothing, None, Tracking(uri=f"sqlite:///{tmp_path}/never.db"))
        (tmp_path / "search" / name).unlink()


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_sync_logs_the_studies_of_a_sweep_whose_report_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for sweep in ("one", "two"):
        (tmp_path / "sweeps" / sweep / "0").mkdir(parents=True)
        (tmp_path / "sweeps" / sweep / "multirun.yaml").touch()
        study = document() | {"id": sweep}
        (tmp_path / "sweeps" / sweep / "0" / "result.json").write_text(json.dumps(study))
    (tmp_path / "sweeps" / "one" / "report.html").symlink_to(tmp_path / "secret")
    finished = sdopt(tmp_path, "sync", "sweeps", f"tracking.uri=sqlite:///{tmp_path}/own.db")
    assert finished.code == 2
    [problem] = [line for line in finished.err.splitlines() if line.startswith("sdopt: ")]
    assert "report.html' is not a file of that folder" in problem
    logged = [line.partition(": logged as")[0] for line in finished.out.splitlines()]
    assert logged == ["sweeps/one/0", "sweeps/two/0", "sweeps/two"]
    sent = [file for file in tmp_path.rglob("report.html") if not file.is_symlink()]
    assert "secret" not in [file.read_text() for file in sent]


def test_sync_says_so_and_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text(json.dumps(with_images(str(tmp_path / "secret.png"))))
    finished = sdopt(tmp_path, "sync", "run", f"tracking.uri=sqlite:///{tmp_path}/never.db")
    assert finished.code == 2
    assert "run/result.json: damaged, or changed by hand: images: " in finished.err
    assert not (tmp_path / "never.db").exists()


@pytest.mark.parametrize("name", ["..", "../evil", "/etc/evil", "a/b", "a\\b", "", " ", "a\nb", "a" * 200, "."])
def test_the_name_of_a_study_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name="):
        parse_result(json.dumps(document() | {"name": name}).encode())


@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_a_study_is_not_written_elsewhere(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Hydra makes the folder before sdopt sees the configuration."""
    here = tmp_path / "a" / "b" / "c"
    here.mkdir(parents=True)
    finished = sdopt(here, "run", *flags, *SMOKE, "study.name=../../../evil")
    assert finished.code == 2
    assert finished.err == (
        "sdopt: study.name=../../../evil: must be a name, not a path: no / and no \\, no control character, "
        "and not . or ..\n"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not list(tmp_path.rglob("evil"))


def test_an_id_is_no_query_and_no_path() -> None:
    for wrong in ("x' or 'a' = 'a", "../x", ""):
        with pytest.raises(UsageError, match="id="):
            parse_result(json.dumps(document() | {"id": wrong}).encode())


def test_a_result_in_order_is_read() -> None:
    assert read_result(RESULT).variants
