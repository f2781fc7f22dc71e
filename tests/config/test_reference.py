"""The generated reference of groups, options and keys."""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from runners.keys import key_rows, option_comment
from sdopt.config.groups import default_options
from sdopt.config.paths import CONF, read_yaml
from tests import reference
from tests.reference import PAGE, axis_of, class_of, main


@pytest.mark.slow  # `.ci/run` checks the page itself
def test_it_is_current_and_depends_on_no_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where nothing else is installed."""
    modules = ("declarations", "quantization", "compiler.base", "compiler.engines")
    for module in modules:
        monkeypatch.setattr(f"sdopt.options.{module}.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["--check"]) == 0, capsys.readouterr().err


OPTIONS = sorted(CONF.glob("*/*.yaml"))


def test_every_option_and_every_key_is_explained() -> None:
    for path in OPTIONS:
        assert option_comment(path), (
            f"{path} begins with no comment that says what it is"
        )
        cls = class_of(path.parent.name, path)
        rows = list(key_rows(axis_of(path), cls)) if cls else []
        unexplained = [key for key, *_, meaning in rows if not meaning]
        assert not unexplained, f"add a docstring below {', '.join(unexplained)}"


def test_the_defaults_that_it_shows_are_those_of_the_options_that_are_chosen() -> None:
    """The page shows those of the types, and Hydra composes those of the files."""
    for group, option in default_options().items():
        path = CONF / group / f"{option}.yaml"
        if group == "model" or not path.is_file():
            continue
        cls = class_of(group, path)
        of_file = read_yaml(path)
        for field in fields(cls) if cls else ():
            value = of_file.get(field.name, field.default)
            if field.default is not MISSING and not str(value).startswith("${"):
                assert value == field.default, f"{group}.{field.name}"


@pytest.mark.slow
def test_an_old_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "README.md"
    monkeypatch.setattr(reference, "PAGE", stale)
    monkeypatch.setattr(reference, "MATRIX_PAGE", tmp_path / "MATRIX.md")
    stale.write_text(PAGE.read_text() + "by hand")
    assert main(["--check"]) == 2
    assert "is out of date" in capsys.readouterr().err
    assert main([]) == 0
    assert stale.read_text() == PAGE.read_text()
