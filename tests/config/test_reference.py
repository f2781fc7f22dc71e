"""The generated reference of groups, options and keys."""

import shutil
from pathlib import Path

import pytest

from sdopt.config import reference
from sdopt.config.paths import CONF
from sdopt.config.reference import PAGE, main, page


def test_it_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_every_option_of_every_group_is_explained() -> None:
    text = page()
    for path in CONF.glob("*/*.yaml"):
        [row] = [
            line for line in text.splitlines() if line.startswith((f"| `{path.stem}` |", f"| `{path.stem}` (default"))
        ][:1]
        assert row.split("|")[2].strip(), f"{path} begins with no comment that says what it is"


def test_every_key_has_a_meaning() -> None:
    rows = [
        line
        for line in page().splitlines()
        if line.startswith("| `") and line.count("|") == 5 and "." in line.split("|")[1]
    ]
    assert len(rows) > 60
    unexplained = [row.split("|")[1].strip() for row in rows if not row.split("|")[4].strip()]
    assert not unexplained, f"add a docstring below {', '.join(unexplained)}"


def test_an_old_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "README.md"
    shutil.copyfile(PAGE, stale)
    monkeypatch.setattr(reference, "PAGE", stale)
    assert main(["--check"]) == 0
    stale.write_text(stale.read_text() + "by hand")
    assert main(["--check"]) == 1
    assert "is not current" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
