"""Times of calls beside images: which of them count, and of how many images they are."""

from pathlib import Path

import pytest

from sdopt.apps.exchange.metadata import origin_from
from sdopt.apps.exchange.times import times_in
from sdopt.errors import UsageError
from sdopt.report.sentences.notes import notes_of
from sdopt.statistics.comparing import compare
from tests.apps.exchange.test_unlike_folders import judged, plain, web_ui


def table(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "times.csv").write_text(text)
    return folder


def listed(seconds: dict[int, list[float]], column: str = "", marked: int = 0) -> str:
    """Returns a table of calls by process; the first `marked` of each have 1 in a further column."""
    names = ["file", "replicate", "seconds", *([column] if column else [])]
    lines = [",".join(names)]
    for replicate, calls in seconds.items():
        for number, call in enumerate(calls):
            mark = [str(int(number < marked))] if column else []
            lines.append(",".join([f"{number}.png", str(replicate), str(call), *mark]))
    return "\n".join(lines)


COMPILED = {n: [30.0 + n, 2.0, 2.1, 2.05, 2.02] for n in range(3)}


def test_calls_that_compile_are_not_averaged_without_a_word(tmp_path: Path) -> None:
    """https://github.com/pytorch/torchchat/issues/721: slower with a compiler, whose time was in the mean."""
    with pytest.raises(UsageError, match="takes 15 times as long as any later one"):
        times_in(table(tmp_path / "a", listed(COMPILED)))


@pytest.mark.parametrize("column", ["warmup", "Warm-up", "is_warmup"])
def test_calls_that_are_marked_do_not_count(tmp_path: Path, column: str) -> None:
    marked = times_in(table(tmp_path / "a", listed(COMPILED, column, marked=1)))
    assert [row.text("seconds") for row in marked.replicates[0]] == [
        "2.0",
        "2.1",
        "2.05",
        "2.02",
    ]
    all_count = times_in(table(tmp_path / "b", listed(COMPILED, column)))
    assert len(all_count.rows) == 15


@pytest.mark.parametrize(
    "seconds",
    [
        {0: [30.0, 2.0]},
        {0: [3.0, 2.0, 2.1, 2.0]},
        {0: [30.0, 2.0, 2.1, 2.0], 1: [2.0, 2.1, 2.0, 2.2]},
        {0: [2.0, 2.1, 30.0, 2.0]},
    ],
    ids=["too few", "a little slower", "one of two processes", "a later call"],
)
def test_other_calls_count(tmp_path: Path, seconds: dict[int, list[float]]) -> None:
    found = times_in(table(tmp_path / "a", listed(seconds)))
    assert len(found.rows) == sum(map(len, seconds.values()))


def timed(folder: Path, seconds: float, images: str = "") -> Path:
    names = ["file", "seconds", *(["images"] if images else [])]
    lines = [",".join(names)]
    for number, file in enumerate(sorted(folder.glob("*.png"))):
        values = [
            file.name,
            f"{seconds + number / 1000}",
            *([images] if images else []),
        ]
        lines.append(",".join(values))
    (folder / "times.csv").write_text("\n".join(lines))
    return folder


def test_times_of_batches_are_compared_per_image(tmp_path: Path) -> None:
    """A call of four images that takes twice the time of one is twice as fast."""
    base = timed(plain(tmp_path / "base"), 2.0, images="1")
    other = timed(plain(tmp_path / "other"), 4.0, images="4")
    assert judged(base, other).candidates[0].unlike == [
        "times.csv: images 4 (baseline 1)"
    ]
    result = judged(base, other, changes="images")
    compare(result)
    speedup = result.comparisons[0].shapes[0].speedup
    assert speedup is not None
    assert speedup.estimate == pytest.approx(2, rel=0.01)
    assert any("per image" in note for note in notes_of(result, []))


def test_images_of_batches_ask_of_how_many_times_are(tmp_path: Path) -> None:
    base = timed(web_ui(tmp_path / "base"), 2.0)
    other = timed(web_ui(tmp_path / "other", 0, **{"Batch size": "4"}), 4.0)
    [said] = judged(base, other).candidates[0].unlike
    assert said.startswith("times.csv: seconds of calls of 4 images (baseline 1)")
    timed(base, 2.0, images="1")
    timed(other, 1.0, images="1")
    assert judged(base, other).candidates[0].unlike == []


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        ({"num_images_per_prompt": 4}, 4),
        ({"batch_size": 2, "num_images_per_prompt": 4}, 8),
        ({"n_samples": 3}, 3),
        ({"num_outputs": 2, "seed": 1}, 2),
    ],
)
def test_images_tell_how_many_a_call_made(values: dict[str, int], batch: int) -> None:
    assert origin_from("JSON", values).batch == batch
