"""A study ends within its budget, and says what that left open; on workers whose calls take simulated time."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from sdopt.record.files import parse_result, to_json
from sdopt.record.records import Status, StudyResult
from sdopt.report.summary import summary_of
from sdopt.schema import Rule
from sdopt.statistics.ratios import two_samples
from sdopt.statistics.scale import Speed
from sdopt.study.ahead import Ahead, Extent
from sdopt.study.progress import Progress
from sdopt.study.resume import merge_resumed, missing_of
from sdopt.study.timeline import Timeline
from tests.fakes import Fakes, FakeWorker, NoMeter, fake_study, run_fake


@pytest.fixture(autouse=True)
def meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no other work of this machine count: calls take simulated time."""
    monkeypatch.setattr("sdopt.study.giving_up.InterferenceMeter", NoMeter)


START_S, LOAD_S = 8.0, 0.5


class SimulatedTime(Timeline):
    """A timeline whose time is what the requests to fake workers would take, one after the other.

    Images are drawn side by side: each turn, in which every process draws once, takes as long as its slowest call.
    """

    spent_s = START_S
    turn_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.drawing: set[FakeWorker] = set()

    def draw(self, worker: FakeWorker, seconds: float) -> float:
        """Returns by how many seconds a process makes a turn longer."""
        if worker in self.drawing:
            self.drawing, self.turn_s = set(), 0.0
        self.drawing.add(worker)
        longer_s = max(0.0, seconds - self.turn_s)
        self.turn_s += longer_s
        return longer_s

    @property
    @override
    def elapsed_s(self) -> float:
        return self.spent_s


def measured(
    folder: Path,
    budget_s: float | None,
    seconds: dict[str, float],
    of: Any = None,
    pace: float = 1.0,
    slowed: float = 1.0,
    slowed_images: float = 1.0,
    compiled_s: Mapping[str, float] = {},
    **protocol: Any,
) -> tuple[StudyResult, float, Any]:
    """Returns a study's result, what it took, and its plan; two processes draw and prove at once."""
    timeline = SimulatedTime()
    seconds = {
        name: pace * call_s for name, call_s in {"baseline": 1.0, **seconds}.items()
    }
    keys: dict[str, Any] = {
        "rounds": 4,
        "warmup": 1,
        "replicates": 3,
        "interference": None,
        "budget_s": budget_s,
    }
    # By itself the schedule depends on the memory that is free on this machine.
    keys |= {"schedule": "interleaved", **protocol}
    plan, planned, machine = fake_study(
        [name for name in seconds if name != "baseline"], of, **keys
    )
    if of is not None:
        pictured = tuple(
            f"number {number}" for number in range(of["quality"]["prompt_count"])
        )
        plan = replace(
            plan,
            variants=tuple(
                replace(variant, pictured=pictured) for variant in plan.variants
            ),
        )
    study = plan, planned, machine

    def costs(worker: FakeWorker, request: str) -> None:
        call_s = seconds[worker.variant.name]
        if request == "prepare" and worker.variant.name in compiled_s:
            worker.graphs = 1
            worker.compile_s = compiled_s[worker.variant.name]
            timeline.spent_s += worker.compile_s
        took_s = {
            "prepare": LOAD_S,
            "time_once": call_s,
            "prove": 2 * call_s / 2,
            "time_stages": call_s,
        }
        if request == "generate":
            images = worker.draw.batch_size if worker.draw else 1
            took_s[request] = timeline.draw(worker, 0.4 * call_s * images)
            took_s[request] *= slowed_images
        timeline.spent_s += slowed * took_s.get(request, 0.0)

    fakes = Fakes(dict.fromkeys(("baseline", *seconds), costs), seconds)
    result, _ = run_fake(folder, study, fakes, timeline)
    return result, timeline.spent_s + START_S, study


SIX = {"same": 1.0, "also same": 1.0, "fast": 0.5, "little": 0.97, "slow": 1.6}
RULES = {"exact": [Rule("mse")]}
METRICS = {"quality": {"metrics": True, "prompt_count": 24, "floor_prompts": 12}}


def test_with_enough_time_leaves_out_nothing(tmp_path: Path) -> None:
    result, took_s, _ = measured(
        tmp_path, 2000, {"same": 1.0, "also same": 1.0}, METRICS
    )
    assert result.budget is not None
    assert not result.budget.spared
    assert {
        len(m.shapes[0].calls) for row in result.variants for m in row.measurements
    } == {4}
    assert {len(row.images) for row in result.variants if not row.is_control} == {24}
    assert took_s < 2000
    assert not any("budget" in note for note in summary_of(result).notes)


@pytest.mark.parametrize(
    ("budget_s", "pace"), [(150.0, 1.0), (200.0, 1.0), (200.0, 1.5), (260.0, 2.0)]
)
@pytest.mark.walk(1)
def test_ends_within_its_budget_with_intervals_for_what_matters(
    tmp_path: Path, budget_s: float, pace: float
) -> None:
    whole, needed_s, _ = measured(tmp_path, None, SIX, METRICS, pace)
    assert needed_s > budget_s
    (tmp_path / "short").mkdir()
    result, took_s, _ = measured(tmp_path / "short", budget_s, SIX, METRICS, pace)
    assert took_s <= 1.1 * budget_s
    assert took_s >= 0.7 * budget_s
    assert all(row.status is Status.OK for row in result.variants)
    assert (
        len(result.variant("fast").samples) == len(whole.variant("fast").samples) == 3
    )
    row = summary_of(result).row("fast")
    assert row is not None
    assert row.speed is Speed.FASTER
    assert min(len(row.images) for row in result.variants if not row.is_control) >= 4
    [note] = [note for note in summary_of(result).notes if "budget" in note]
    assert "same" in note
    assert not missing_of(parse_result(to_json(result))).variants


def test_spends_no_round_on_what_is_settled_and_pairs_the_rounds_of_both(
    tmp_path: Path,
) -> None:
    result, _, _ = measured(tmp_path, 2000, {"fast": 0.5, "same": 1.0})
    assert {len(m.shapes[0].calls) for m in result.variant("fast").measurements} == {1}
    assert {len(m.shapes[0].calls) for m in result.variant("same").measurements} == {4}
    [edge] = [edge for edge in result.comparisons if edge.candidate == "fast"]
    mine, other = (
        np.log([m.shapes[0].latency_s[0] for m in result.variant(name).measurements])
        for name in ("fast", "baseline")
    )
    assert edge.shapes[0].speedup is not None
    assert edge.shapes[0].speedup.estimate == pytest.approx(
        two_samples(other, mine).ratio
    )


def test_goes_on_with_a_larger_budget(tmp_path: Path) -> None:
    result, _, (plan, *_) = measured(tmp_path, 60, {"same": 1.0, "fast": 0.5})
    assert result.budget is not None
    assert result.budget.rounds
    assert not result.budget.stages
    _, fresh, _ = fake_study(
        ("same", "fast"),
        rounds=4,
        warmup=1,
        replicates=3,
        interference=None,
        budget_s=5000,
        schedule="interleaved",
    )
    fresh.environment = result.environment
    again = merge_resumed(result, fresh, plan, tmp_path, retry_failed=False)
    assert missing_of(again).rounds == 4 - (
        again.budget.rounds if again.budget and again.budget.rounds else 1
    )
    assert {name for name, _ in missing_of(again).timed} >= {"same", "baseline"}
    assert again.budget is None
    # The evidence and the stages that were left out follow then.
    assert not any(
        measurement.stages_s
        for row in result.variants
        for measurement in row.measurements
    )
    assert missing_of(again).unfinished >= {
        (name, number) for name in ("same", "fast", "baseline") for number in (0, 1)
    }


@pytest.mark.parametrize(
    ("budget_s", "said"),
    [
        (70, "protocol.budget_s=70 left out 2 of 4 rounds, the evidence of"),
        (10, "protocol.budget_s=10 left out 2 of 4 rounds, the evidence of"),
    ],
)
def test_goes_on_with_a_budget_that_does_not_suffice_either(
    tmp_path: Path, budget_s: float, said: str
) -> None:
    """Rounds of both sessions count; a process that had no time for evidence has not failed to show any."""
    seconds = {"same": 1.0, "fast": 0.5}
    result, _, (plan, _, machine) = measured(tmp_path, 60, seconds)
    _, fresh, _ = fake_study(
        ("same", "fast"),
        rounds=4,
        warmup=1,
        replicates=3,
        interference=None,
        budget_s=budget_s,
        schedule="interleaved",
    )
    fresh.environment = result.environment
    again = merge_resumed(result, fresh, plan, tmp_path, retry_failed=False)
    timeline = SimulatedTime()
    fakes = Fakes({}, {"baseline": 1.0, **seconds})
    timeline.spent_s = 50.0
    run_fake(tmp_path, (plan, again, machine), fakes, timeline)
    assert {row.status for row in again.variants} == {Status.OK}
    assert again.budget is not None
    assert again.budget.rounds == 2
    assert again.budget.processes == {}
    [note] = [note for note in summary_of(again).notes if "budget" in note]
    assert note.startswith(said)
    assert "<" not in note, "no place to fill in"


@pytest.mark.parametrize(
    ("budget_s", "judges", "said"),
    [
        (20, True, "gate=default judges no fewer than 24 images of each variant"),
        (20, False, "one round and a few images do not fit"),
        (2000, True, ""),
    ],
)
def test_says_before_the_first_round_that_not_even_the_least_fits(
    tmp_path: Path, budget_s: float, judges: bool, said: str
) -> None:
    of = METRICS | ({"gate": {"name": "default", "rules": RULES}} if judges else {})
    _, took_s, _ = measured(tmp_path, budget_s, {"same": 1.0, "fast": 0.5}, of)
    shown = (tmp_path / "shown.txt").read_text()
    if not said:
        assert "will be exceeded" not in shown
        return
    before, _, _ = shown.partition("round 1 of")
    assert f"protocol.budget_s=20 will be exceeded: {said}" in before
    needed = re.search(r"takes about (\d+) min here: protocol.budget_s=(\d+)", before)
    assert needed
    assert int(needed[2]) == 60 * int(needed[1])
    if judges:
        assert took_s <= int(needed[2])


@pytest.mark.parametrize("schedule", ["blocks"])
def test_of_a_study_in_blocks(tmp_path: Path, schedule: str) -> None:
    result, took_s, _ = measured(
        tmp_path, 150, {"same": 1.0, "fast": 0.5}, schedule=schedule
    )
    assert took_s <= 1.25 * 150
    assert all(row.status is Status.OK for row in result.variants)
    assert all(m.shapes[0].calls for row in result.variants for m in row.measurements)


def test_estimates_follow_the_pace_of_the_machine(tmp_path: Path) -> None:
    """Everything takes twice as long as its calls say, as beside other work."""
    (tmp_path / "whole").mkdir()
    _, needed_s, _ = measured(tmp_path / "whole", None, SIX, METRICS, slowed=2.0)
    result, took_s, _ = measured(tmp_path, 260, SIX, METRICS, slowed=2.0)
    assert needed_s > 1.3 * 260
    assert took_s <= 1.15 * 260
    assert len(result.variant("fast").samples) == 3


@pytest.mark.parametrize(
    ("budget_s", "compiled_s", "slowed"),
    [
        (150.0, {}, 1.0),
        (None, {"fast": 60.0}, 1.0),
        (60.0, {}, 2.0),  # in which not even the least fits
    ],
)
def test_forecasts_hold_from_a_third_of_the_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget_s: float | None,
    compiled_s: Mapping[str, float],
    slowed: float,
) -> None:
    told: list[tuple[float, float]] = []

    def expect(progress: Progress, seconds: float) -> None:
        told.append((progress.timeline.elapsed_s, seconds))

    monkeypatch.setattr(Progress, "expect", expect)
    _, took_s, _ = measured(
        tmp_path, budget_s, SIX, METRICS, slowed=slowed, compiled_s=compiled_s
    )
    late = [(at_s, seconds) for at_s, seconds in told if at_s >= took_s / 3]
    assert len(late) > 5
    # The end that was forecast, against the end.
    assert all(abs(at_s + seconds - took_s) <= 0.2 * took_s for at_s, seconds in late)


def test_a_machine_that_becomes_busy_is_noticed_while_images_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, float]] = []

    def expect(progress: Progress, seconds: float) -> None:
        told.append((progress.timeline.elapsed_s, seconds))

    monkeypatch.setattr(Progress, "expect", expect)
    images = {"quality": {"metrics": True, "prompt_count": 96, "floor_prompts": 12}}
    _, took_s, _ = measured(tmp_path, None, SIX, images, slowed_images=4.0)
    late = [at_s for at_s, _ in told if at_s >= took_s / 3]
    assert max(after - at for at, after in pairwise(late)) <= 0.1 * took_s


@pytest.mark.parametrize(("interleaved", "seconds"), [(True, 5.0), (False, 6.0)])
def test_images_of_variants_are_foretold_side_by_side_but_in_blocks(
    interleaved: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = SimpleNamespace(processes=2)
    study = SimpleNamespace(draws_floors=lambda _row: False, sharing=sharing)
    session: Any = SimpleNamespace(study=study, interleaved=interleaved)
    drawing: list[Any] = [
        SimpleNamespace(
            first=True,
            row=None,
            measurement=SimpleNamespace(complete=False),
            seconds=alone_s,
        )
        for alone_s in (1.0, 2.0, 3.0)
    ]
    monkeypatch.setattr(
        Ahead, "_images_of_s", lambda _ahead, process, _extent: process.seconds
    )
    assert Ahead(session)._images_s(drawing, Extent(1)) == seconds


def test_compiling_is_foretold_as_others_with_the_same_compiler_took() -> None:
    def process(compiler: str, *times: float | None) -> Any:
        compile_s, cold_start_s = times or (None, None)
        samples = SimpleNamespace(compile_s=compile_s, cold_start_s=cold_start_s)
        return SimpleNamespace(
            first=True,
            active=True,
            variant=SimpleNamespace(choices={"compiler": compiler}),
            measurement=SimpleNamespace(shapes=[samples]),
        )

    ready = [
        process("eager", None, 1.0),
        process("inductor", 40.0, 41.0),
        process("inductor", 20.0, 21.0),
    ]
    waiting = [process("inductor"), process("inductor"), process("eager")]
    study = SimpleNamespace()
    session: Any = SimpleNamespace(study=study, processes=[*ready, *waiting])
    assert Ahead(session).compiling_s == 60.0
    session.processes.append(process("regional"))
    assert Ahead(session).compiling_s == 60.0, "nothing tells what another one takes"
