"""Prompt files that are damaged: which line, and what is wrong with it."""

from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.schema import Model, Workload


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"a\nb\x1b[31m\n", "line 2 holds the control character U+001B"),
        ("a.txt", b"a\x00b\n", "line 1 holds the control character U+0000"),
        ("a.jsonl", b'{"prompt": "\\ud800"}\n', "line 1 holds the control character U+D800"),
        ("a.csv", b"prompt\nok\na cat, asleep\n", "line 3 has more fields than the header"),
        ("a.tsv", b"prompt\na\tb\n", "line 2 has more fields than the header"),
        ("a.jsonl", b"[" * 100_000, "nested too deeply"),
        ("a.txt", b"", "holds no prompt"),
        ("a.csv", b"prompt\n", "holds no prompt"),
        ("a.txt", b"a" * 1_000_000, "line 1 has 1000000 characters"),
        ("a.csv", b"prompt\n" + b"a" * 1_000_000, "field larger than field limit"),
        ("a.txt", b"a\nL\xf6we\n", "line 2 is not valid UTF-8 (byte 0xf6)"),
        ("a.txt", "a\nb".encode("utf-16"), "line 1 is not valid UTF-8"),
    ],
)
def test_is_said_with_its_line(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        resolve_prompts(Workload(prompts=str(tmp_path / name)), Model())
    [problem] = caught.value.problems
    assert problem.startswith(f"workload.prompts={tmp_path / name}: ")
    assert said in problem
    assert len(problem) < 400


@pytest.mark.parametrize("source", ["/dev/zero", "/tmp"])
def test_what_is_no_file_is_not_waited_for(source: str) -> None:
    with pytest.raises(UsageError, match="not a file"):
        resolve_prompts(Workload(prompts=source), Model())


def test_of_a_list_the_number_is_said() -> None:
    with pytest.raises(UsageError, match=r"workload\.prompts=\[…\]: number 2 holds the control character"):
        resolve_prompts(Workload(prompts=["a", "b\x07"]), Model())
