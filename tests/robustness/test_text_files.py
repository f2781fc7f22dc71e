"""Text as Windows and others write it: each file of a user is read as if it were plain UTF-8, or refused by name."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdopt.apps.exchange.pictures import read_table
from sdopt.apps.foresight.published import COLUMNS, read_figures
from sdopt.apps.traffic.twin import unit_trace
from sdopt.config.composer import composer_of
from sdopt.errors import UsageError
from sdopt.gate.calibration import FOLDER, read_calibration
from sdopt.pipelines.functions import defined
from sdopt.pipelines.prompt_files import Unreadable, read_prompts
from sdopt.text_files import NotUtf8Error, decoded

BOM = b"\xef\xbb\xbf"

READ: dict[str, Callable[[str], bytes]] = {
    "a mark": lambda text: BOM + text.encode(),
    "Windows' ends of lines": lambda text: text.replace("\n", "\r\n").encode(),
    "both": lambda text: BOM + text.replace("\n", "\r\n").encode(),
}
REFUSED: dict[str, Callable[[str], bytes]] = {
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-be"),
    "Latin-1": lambda text: ("ä" + text).encode("latin-1"),
}


def a_preset(file: Path) -> Any:
    folder = file.parent / "experiment"
    folder.mkdir(exist_ok=True)
    file.replace(folder / file.name)
    with composer_of([f"experiment={file.stem}"], file.parent) as composer:
        return composer.current.workload.steps, composer.current.study.name


def a_data_sheet(file: Path) -> Any:
    folder = file.parent / "hardware"
    folder.mkdir(exist_ok=True)
    file.replace(folder / file.name)
    with composer_of([f"hardware={file.stem}"], file.parent) as composer:
        return composer.current.hardware.sheet


PRESET = """# @package _global_
defaults:
  - override /precision: bf16
workload:
  steps: 3
study:
  name: mine
"""
SHEET = "defaults: [cpu]\nsheet: {name: Mine, device_names: [mine], memory_gib: 8, bandwidth_gb_s: 100}\n"
TABLE = "prompt,file\na red apple,a.png\nblue fish,b.png\n"
LINES = '{"prompt": "a red apple", "file": "a.png"}\n{"prompt": "blue fish", "file": "b.png"}\n'
CALIBRATION = FOLDER / "emoji-25.json"

FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "preset.yaml": (PRESET, a_preset),
    "sheet.yaml": (SHEET, a_data_sheet),
    "prompts.txt": (
        "a red apple\nblue fish\n",
        lambda file: [each.text for each in read_prompts(file, None).prompts],
    ),
    "prompts.csv": (
        TABLE,
        lambda file: [each.text for each in read_prompts(file, None).prompts],
    ),
    "prompts.tsv": (
        TABLE.replace(",", "\t"),
        lambda file: [each.text for each in read_prompts(file, None).prompts],
    ),
    "prompts.json": (
        '["a red apple",\n"blue fish"]\n',
        lambda file: read_prompts(file, None).prompts[1].text,
    ),
    "prompts.jsonl": (
        LINES,
        lambda file: [each.text for each in read_prompts(file, None).prompts],
    ),
    "times.csv": (
        "file,seconds\na.png,1.5\n",
        lambda file: [row.values for row in read_table(file)],
    ),
    "rows.jsonl": (LINES, lambda file: [row.values for row in read_table(file)]),
    "arrivals.txt": ("0\n0.5\n2\n", lambda file: unit_trace(str(file), 3, 0).tolist()),
    "figures.csv": (",".join(COLUMNS) + "\n", read_figures),
    "calibration.json": (CALIBRATION.read_text(encoding="utf-8"), read_calibration),
    "mine.py": (
        "def make():\n    return 1\n",
        lambda file: defined(f"{file}:make", "model")[1],
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.walk(1)
def test_what_windows_writes_is_read_as_what_it_says(name: str, tmp_path: Path) -> None:
    text, read = FILES[name]
    (tmp_path / name).write_bytes(text.encode())
    plain = read(tmp_path / name)
    for way in READ.values():
        (tmp_path / name).write_bytes(way(text))
        assert read(tmp_path / name) == plain


@pytest.mark.parametrize("name", FILES)
def test_another_encoding_is_refused_by_the_name_of_the_file(
    name: str, tmp_path: Path
) -> None:
    text, read = FILES[name]
    for way in REFUSED.values():
        (tmp_path / name).write_bytes(way(text))
        with pytest.raises((UsageError, Unreadable)) as refused:
            read(tmp_path / name)
        if isinstance(
            refused.value, UsageError
        ):  # where prompts are asked for, their key and their file are before it
            [line] = refused.value.problems
            assert name in line


def test_an_offset_is_a_line() -> None:
    with pytest.raises(NotUtf8Error, match="line 3 has the byte 0xe4"):
        decoded(b"a\nb\n\xe4")


def test_arguments_are_read_as_utf8_also_where_the_locale_has_none() -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "sdopt", "plän"]
    ended = subprocess.run(
        command, env=os.environ | ascii_only, capture_output=True, check=False
    )
    assert "unknown command 'plän'".encode() in ended.stderr
    assert ended.returncode == 2
