"""What a result names is read from its own folder alone, whoever wrote the result and wherever it points."""

import json
from pathlib import Path
from typing import Any

import pytest

from sdopt.errors import UsageError
from sdopt.record.files import inside, parse_result, read_result
from sdopt.schema import Tracking
from sdopt.tracking.runs import log_study
from tests.command import SMOKE, sdopt
from tests.robustness.damage import document, replaced

OUTSIDE = (
    "/etc/hostname",
    "images/../../secret.png",
    "a\x00b.png",
    "",
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


@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", " ", "a\nb", "a" * 200])
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
