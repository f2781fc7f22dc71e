"""Prompts from files of each kind, and what is said of those that cannot be read."""

from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.schema import Model, Workload


def prompts(path: Path, column: str | None = None, count: int = 100) -> tuple[str, ...]:
    return resolve_prompts(Workload(prompts=str(path), prompt_column=column, prompt_count=count), Model())


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "red apple\n\n  a cat, asleep \nein Löwe\n"),
        ("a", "\ufeffred apple\r\na cat, asleep\r\nein Löwe"),
        ("a.csv", 'id,Prompt\n1,red apple\n2,"a cat, asleep"\n3,\n4,ein Löwe\n'),
        ("a.CSV", '\ufeffcaption\nred apple\n"a cat, asleep"\nein Löwe\n'),
        ("a.tsv", "Text\tid\nred apple\t1\na cat, asleep\t2\nein Löwe\t3\n"),
        ("a.jsonl", '{"prompt": "red apple"}\n{"prompt": "a cat, asleep", "id": 2}\n\n{"prompt": "ein L\\u00f6we"}\n'),
    ],
)
def test_each_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, name, text)
    assert prompts(path) == ("red apple", "a cat, asleep", "ein Löwe")
    assert prompts(path, count=2) == ("red apple", "a cat, asleep")


def test_quotes_within_a_field_stay(tmp_path: Path) -> None:
    text = 'prompt\tnote\na sign that says "open"\tx\n"a ""quoted"" one, ""twice"""\ty\n"B I G" in red\tz\n'
    expected = ('a sign that says "open"', 'a "quoted" one, "twice"', '"B I G" in red')
    assert prompts(written(tmp_path, "a.tsv", text)) == expected
    text = 'note,prompt\nx,a sign that says "open"\ny,"a ""quoted"" one, ""twice"""\nz,"""B I G"" in red"\n'
    assert prompts(written(tmp_path, "a.csv", text)) == expected


def test_a_column_is_chosen_by_name_or_guessed_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "text,Caption,title\nt,c,x\n")
    assert prompts(path) == ("c",)
    assert prompts(path, "text") == ("t",)
    assert prompts(path, "title") == ("x",)
    with pytest.raises(UsageError, match=r"workload\.prompt_column=titel: not in .*columns are text, Caption, title"):
        prompts(path, "titel")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.csv",
            "id,title\n1,x\n",
            "no column named prompt or caption or text; the columns are id, title; choose one with",
        ),
        ("a.jsonl", '{"id": 1}\n', "no column named prompt or caption or text; the columns are id; "),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "line 2 has no text in its column 'prompt'"),
        ("a.jsonl", '{"prompt": "a"}\n{"id": 3}\n', "line 2 has no text in its column 'prompt'"),
        ("a.jsonl", '["a"]\n', "line 1 is not a JSON object"),
        ("a.jsonl", "a red apple\n", "cannot be read as jsonl file"),
        ("a.csv", "id,prompt\n1,a\n2\n", "line 3 has no text in its column 'prompt'"),
        ("a.csv", 'prompt\n"a\nb\n', "cannot be read as csv file"),
        ("a.csv", "prompt\n", "holds no prompt"),
        ("a.tsv", "", "holds no prompt"),
        ("a.txt", " \n", "holds no prompt"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"^workload\.prompts=") as caught:
        prompts(written(tmp_path, name, text))
    assert said in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    for name in ("a.txt", "a.csv", "absent.jsonl"):
        if name != "absent.jsonl":
            (tmp_path / name).write_bytes(b"\xff\xfe\x00\xd8")
        with pytest.raises(UsageError, match="cannot be read as"):
            prompts(tmp_path / name)


@pytest.mark.parametrize("source", ["packaged", ["a"], "prompts.txt"])
def test_a_column_of_what_has_none(source: str | list[str]) -> None:
    with pytest.raises(
        UsageError, match=r"workload\.prompt_column=prompt: .* has no columns; name a file that ends in"
    ):
        resolve_prompts(Workload(prompts=source, prompt_column="prompt"), Model())
