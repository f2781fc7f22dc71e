"""Rows of a load test that make other images, or do other work, are refused or said before the figures."""

import pytest

from sdopt.apps.loadtest.command import _work_beside, run
from sdopt.apps.loadtest.record import LoadRecord, LoadRow
from sdopt.apps.loadtest.report import answer_of, blocks_of
from sdopt.errors import UsageError
from sdopt.report.markdown import written
from tests.fixtures import Composers


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("workload.size:32", "workload.size is 32, and 64 in 'baseline': another task"),
        ("workload.seed:5", "workload.seed is 5"),
        ("task:img2img", "task.kind is img2img"),
    ],
)
def test_other_images_are_refused_before_anything_is_served(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a design leaves out is said, too: rows of float32 would be read as those of bfloat16."""
    words = [
        "precision=bf16",
        "study=one_at_a_time",
        f"study.options=[{option}]",
        "tracking=none",
        "workload.batch_size=1",
    ]
    with pytest.raises(UsageError, match=said):
        run(words, None, None, print)  # type: ignore[arg-type]  # nothing is started
    assert "precision=bf16: no variant has it" in capsys.readouterr().err


def record_of(chosen: list[str], unlike: list[str]) -> LoadRecord:
    rows = [
        LoadRow("baseline, greedy", "baseline", "greedy"),
        LoadRow("it, greedy", "it", "greedy"),
    ]
    rows[1].chosen, rows[1].unlike = chosen, unlike
    return LoadRecord("load", [], "now", "", 10, 0.9, 1.0, "poisson", None, rows)


def test_another_model_comes_before_the_answer_and_choices_below_it(
    composer: Composers,
) -> None:
    made = composer(["tracking=none", "workload.size=512"])
    baseline = made.variant("baseline")
    other = made.variant("it", ["model=sd_turbo", "workload.steps=1"])
    record = record_of(*_work_beside(other, baseline))
    assert answer_of(record).startswith(
        "Not the same work: it, greedy: model emoji → stabilityai/sd-turbo."
    )
    assert "it, greedy does other work by choice: workload.steps 25 → 1" in written(
        blocks_of(record)
    )
    assert _work_beside(made.variant("it", ["precision=bf16"]), baseline) == ([], [])
    assert "work" not in answer_of(record_of([], []))
    steps = made.variant("baseline", ["scheduler=dpmpp_2m"])
    spaced = made.variant("it", ["scheduler=ays"])
    [said], _ = _work_beside(spaced, steps)
    assert said.startswith("scheduler.timesteps None → [999"), "of one class"
