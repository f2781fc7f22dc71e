"""`sdopt search` as a user gives it: it screens, judges anew, goes on after Ctrl-C, and says what it found."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from sqlalchemy import create_engine, text

from runners import gate, report
from sdopt.errors import UnavailableError, UsageError
from sdopt.gate.calibration import FOLDER, read_calibration
from sdopt.pipelines.catalog import PACKAGED
from sdopt.record.comparisons import BreakEven
from sdopt.record.files import read_result, write_result
from sdopt.record.records import Status
from sdopt.report.blocks import Chart
from sdopt.report.page.html import html_page
from sdopt.report.terminal import shown
from sdopt.schema import Model
from sdopt.search.command import _since
from sdopt.search.config import search_file
from sdopt.search.plot import search_chart, search_plot
from sdopt.search.record import (
    FINAL,
    PAGE,
    RECORD,
    SearchEntry,
    SearchRecord,
    blocks_of,
    load_line,
    markdown_of,
    page_of,
    read_record,
)
from sdopt.search.results import Results
from sdopt.search.space import Combination
from sdopt.search.studies import CALIBRATE, Studies
from sdopt.statistics.comparing import compare
from sdopt.study.fingerprint import of_model
from sdopt.study.plan import describe_environment
from sdopt.variant import Variant
from sdopt.worker.machine import Machine
from tests.command import SMALL, Finished, refused, sdopt
from tests.fakes import Fakes, failing, fake_study, fake_workers
from tests.pipelines.test_hub import in_cache, offline
from tests.records import retime

SEARCH = (
    "search",
    "search.groups=[layout,precision]",
    "search.options={precision: [fp32, bf16, tf32]}",
    "search.side_by_side=3",
    "search.finalists=1",
    "search.races=0",
    "search.screen=[protocol.replicates:1,protocol.rounds:1,protocol.warmup:0]",
    *(
        each
        for each in SMALL
        if not each.startswith(("tracking", "protocol.replicates"))
    ),
    *("gate=none", "protocol.replicates=3", "protocol.rounds=1", "protocol.warmup=0"),
)
CANDIDATE = Combination("layout=channels_last", ("layout=channels_last",))
COMBINATIONS = {
    "layout=channels_last",
    "precision=bf16",
    "layout=channels_last, precision=bf16",
}


@dataclass(frozen=True)
class Searched:
    """A search that was interrupted before the judging, and then went on."""

    interrupted: Finished
    said: str
    """What lay in the folder then."""
    finished: Finished
    folder: Path


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    cwd = tmp_path_factory.mktemp("search")
    measure = Studies.measure

    def interrupted(
        self: Studies, stage: str, *rest: object, **named: object
    ) -> object:
        if stage == FINAL:
            raise KeyboardInterrupt
        return measure(self, stage, *rest, **named)  # type: ignore[arg-type]

    with fake_workers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Studies, "measure", interrupted)
        # Whatever was measured to be fastest goes on, and that may be the baseline.
        patch.setattr("sdopt.search.racing.is_gain", lambda _: True)
        first = sdopt(cwd, *SEARCH, "tracking=none")
    [folder] = (cwd / "outputs" / "searches").iterdir()
    said = (folder / "search.md").read_text()
    with fake_workers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdopt.search.racing.is_gain", lambda _: True)
        # MLflow keeps a connection for each address, and another test may have used a relative one.
        second = sdopt(cwd, *SEARCH, f"tracking.uri=sqlite:///{cwd}/outputs/mlflow.db")
    return Searched(first, said, second, folder)


class TestSearch:
    def test_screens_every_combination_keeps_what_was_found_and_goes_on_from_there(
        self, searched: Searched
    ) -> None:
        assert searched.interrupted.code == 130
        assert "The same command continues the search" in searched.interrupted.err
        assert (
            "The search has not ended; 3 combinations proposed so far" in searched.said
        )
        assert "| layout=channels_last |" in searched.said
        assert "screen-00" in searched.interrupted.out
        assert "screen-" not in searched.finished.out.partition("judging 1")[0]
        record = json.loads((searched.folder / "search.json").read_text())
        assert {entry["name"] for entry in record["entries"]} == COMBINATIONS
        assert any("precision=tf32" in reason for reason in record["left_out"])
        assert "cannot run here: 1 option; dry_run=true" in searched.interrupted.out
        assert searched.finished.code == (0 if record["winner"] else 3)
        assert record["sentence"] in searched.finished.shown

    def test_judges_on_prompts_noise_and_an_order_that_it_has_not_seen(
        self, searched: Searched
    ) -> None:
        screened, judged = (
            read_result(searched.folder / "screen-00"),
            read_result(searched.folder / FINAL),
        )
        assert (
            judged.config.workload.prompt_start == 24
        )  # a race would have shown so many
        assert judged.config.workload.seed != screened.config.workload.seed
        assert (
            judged.config.protocol.shuffle_seed != screened.config.protocol.shuffle_seed
        )
        prompts = [
            {image.prompt for row in each.variants for image in row.images}
            for each in (screened, judged)
        ]
        assert prompts[0]
        assert prompts[1]
        assert not prompts[0] & prompts[1]

    def test_stands_for_the_study_that_judged_where_results_are_read(
        self, searched: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy = tmp_path / "search"
        shutil.copytree(searched.folder, copy)
        page = (copy / PAGE).read_text()
        monkeypatch.chdir(tmp_path)
        assert report.main([str(copy), "tracking=none"]) == 0
        assert (copy / FINAL / PAGE).is_file()
        assert (copy / PAGE).read_text() == page
        against = ["--against", str(searched.folder), "--output", str(tmp_path / "out")]
        assert gate.main([str(copy), *against]) == 2  # of a study with itself
        shown = json.loads(sdopt(tmp_path, "show", str(copy), "--json").out)
        assert shown["search"]["folder"]
        assert len(shown["studies"]) == 1
        shutil.rmtree(copy / FINAL)
        assert report.main([str(copy), "tracking=none"]) == 2
        shown = json.loads(sdopt(tmp_path, "show", str(copy), "--json").out)
        assert shown["exit_code"] == 0
        assert shown["studies"] == []

    def test_is_a_run_with_one_for_each_option_in_mlflow(
        self, searched: Searched
    ) -> None:
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{searched.finished.cwd}/outputs/mlflow.db")
        [experiment] = [
            found for found in client.search_experiments() if found.name == "search"
        ]
        runs = client.search_runs([experiment.experiment_id])
        [parent] = [run for run in runs if run.data.tags["sdopt.role"] == "search"]
        trials = [run for run in runs if run.data.tags["sdopt.role"] == "trial"]
        record = json.loads((searched.folder / "search.json").read_text())
        judged = {entry["name"] for entry in record["entries"] if entry["judged"]}
        assert judged
        assert {run.info.run_name for run in trials} == COMBINATIONS - judged
        assert judged <= {run.info.run_name for run in runs}
        assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {
            parent.info.run_id
        }
        assert all(run.data.metrics["speedup"] > 0 for run in trials)
        assert all(run.data.metrics["start/first_image_s"] > 0 for run in trials)
        assert parent.data.tags["mlflow.note.content"].startswith(
            f"**{record['sentence']}**"
        )
        youngest_first = sorted(trials, key=lambda run: -run.info.start_time)
        assert [run.info.run_name for run in youngest_first] == [
            entry["name"] for entry in record["entries"] if not entry["judged"]
        ]
        [study] = [run for run in runs if run.data.tags["sdopt.role"] == "study"]
        assert study.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert {file.path for file in client.list_artifacts(parent.info.run_id)} >= {
            "search.json",
            "search.md",
        }

    def test_names_the_winner_and_how_to_take_it_over(self, searched: Searched) -> None:
        """The finalist's times are divided by ten, as if the option had been that much faster."""
        judged = read_result(searched.folder / FINAL)
        [finalist] = judged.candidates
        for measurement in finalist.measurements:
            retime(
                measurement.shapes[0],
                [0.1 * seconds for seconds in measurement.shapes[0].latency_s],
            )
        compare(judged)
        write_result(judged, searched.folder / FINAL)
        again = sdopt(searched.finished.cwd, *SEARCH, "tracking=none")
        assert again.code == 0
        assert (
            "answered before: a larger budget goes on from there, and --again begins anew"
            in again.shown
        )
        assert f"{finalist.name} is " in again.shown
        assert "× faster (" in again.shown
        record = json.loads((searched.folder / "search.json").read_text())
        assert record["winner"] == finalist.name
        assert (
            f"sdopt.load('outputs/searches/{searched.folder.name}/final', variant='{finalist.name}')"
            in again.shown
        )
        [entry] = [entry for entry in record["entries"] if entry["fate"] == "winner"]
        assert entry["low"] > 1
        assert entry["command"].startswith("sdopt run hardware=cpu")

    def test_goes_on_with_the_same_libraries_and_files_alone(
        self, searched: Searched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else its candidates would be compared across two arithmetics, or an old answer be given of a new model."""
        monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        store = f"tracking.uri=sqlite:///{searched.finished.cwd}/outputs/mlflow.db"
        for more in ([store], ["tracking=none", "search.budget_s=9000"]):
            with fake_workers():
                said = refused(searched.finished.cwd, *SEARCH, *more).shown
            assert "cannot go on, since its studies were of others" in said
            assert "ONEDNN_DEFAULT_FPMATH_MODE: was None, now BF16" in said
            assert "--again" in said

    def test_does_not_go_on_with_another_model_at_its_path(
        self, searched: Searched
    ) -> None:
        [first] = searched.folder.glob("screen-00/result.json")
        result = read_result(first)
        before = first.read_bytes()
        for row in result.variants:
            row.inputs["model"] = "0123456789abcdef"
        write_result(result, first.parent)
        longer = (*SEARCH, "tracking=none", "search.budget_s=9000")
        said = refused(searched.finished.cwd, *longer).shown
        first.write_bytes(before)
        assert "the contents of its model: was 0123456789abcdef" in said

    def test_of_files_that_do_not_belong_to_the_trials_is_refused(
        self, searched: Searched
    ) -> None:
        storage = searched.finished.cwd / "outputs" / "optuna.db"
        with create_engine(f"sqlite:///{storage}").begin() as database:
            database.execute(text("update studies set study_name = 'other'"))
        longer = (*SEARCH, "tracking=none", "search.budget_s=9000")
        assert "do not belong together" in refused(searched.finished.cwd, *longer).shown


def test_goes_on_with_the_weights_alone_that_a_repository_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main branch has moved since: what the next study would fetch is looked at first."""
    at_first = in_cache(tmp_path, PACKAGED / "emoji", "somebody/small")
    offline(monkeypatch, tmp_path)
    plan, earlier, machine = fake_study()
    model = Model(weights="hub", hub_id="somebody/small")
    baseline = replace(plan.baseline, model=model)
    earlier.environment = describe_environment(machine, [], None)
    earlier.variants[0].inputs = {"model": of_model(baseline.model)}
    space = SimpleNamespace(variants=lambda _: [baseline])
    prepared: Any = SimpleNamespace(machine=machine, space=space, context=None)
    monkeypatch.setattr("sdopt.search.command.fetch", lambda *_: None)
    assert list(_since(earlier, prepared)) == []

    def fetched(*_: object) -> None:
        moved = at_first.with_name("f" * 40)
        shutil.copytree(at_first, moved)
        file = next((moved / "unet").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        (at_first.parents[1] / "refs" / "main").write_text(moved.name)

    monkeypatch.setattr("sdopt.search.command.fetch", fetched)
    [said] = _since(earlier, prepared)
    assert said.startswith("the contents of its model: was ")


def test_a_model_that_changes_during_a_search_ends_it(tmp_path: Path) -> None:
    studies = Studies([*SMALL], search_file(), None, tmp_path)
    with fake_workers():
        result = studies.measure("screen-00", [CANDIDATE])
        (tmp_path / "race-0").mkdir()
        for row in result.variants:
            row.inputs["model"] = "0123456789abcdef"
        write_result(result, tmp_path / "race-0")
        with pytest.raises(UnavailableError, match="were 0123456789abcdef in race-0"):
            studies.measure("screen-01", [CANDIDATE])


def test_a_study_whose_baseline_fails_says_why_and_is_measured_again_by_the_next_call(
    tmp_path: Path,
) -> None:
    screen = ["protocol.replicates:1", "protocol.rounds:1", "protocol.warmup:0"]
    studies = Studies([*SMALL], replace(search_file(), screen=screen), None, tmp_path)
    with (
        fake_workers(Fakes({"baseline": failing(Status.OUT_OF_MEMORY)})),
        pytest.raises(
            UnavailableError,
            match="screen-00: the baseline failed: out_of_memory in prepare",
        ),
    ):
        studies.measure("screen-00", [CANDIDATE])
    assert [row.status for row in read_result(tmp_path / "screen-00").candidates] == [
        Status.INTERRUPTED
    ]
    with fake_workers():
        result = studies.measure("screen-00", [CANDIDATE])
    assert [row.status for row in result.candidates] == [Status.OK]


def test_a_gate_that_wants_more_prompts_than_are_left_is_refused(
    tmp_path: Path,
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(40)))
    studies = Studies([f"workload.prompts={prompts}"], search_file(), None, tmp_path)
    with pytest.raises(
        UsageError,
        match=r"the gate judges 96 prompts that .* name a file of at least 120",
    ):
        studies.require_final([CANDIDATE])


def test_a_dry_run_shows_the_space_and_what_it_takes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sdopt.search.command.foreseen",
        lambda *_: (None, ["seconds on this machine"], set()),
    )
    dry = sdopt(
        tmp_path, "search", "search.groups=[layout]", "dry_run=true", "tracking=none"
    )
    assert dry.code == 0
    assert "channels_last, contiguous" in dry.shown
    assert "seconds on this machine" in dry.shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fits", [True, False])
def test_a_dry_run_for_a_card_that_is_not_there_shows_what_it_would_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """Where the baseline does not fit, nothing could be measured."""
    asked: list[str] = []

    def foretell(
        variants: Sequence[Variant], machine: Machine, _context: object
    ) -> tuple[None, list[str], set[str]]:
        asked.append(machine.device.name)
        return None, [], set() if fits else {variants[0].name}

    monkeypatch.setattr("sdopt.search.command.foreseen", foretell)
    dry = sdopt(
        tmp_path,
        *("search", "search.groups=[layout]", "hardware=rtx4090"),
        *("dry_run=true", "tracking=none"),
    )
    assert dry.code == (0 if fits else 3)
    assert ("the baseline does not fit in the memory of" in dry.shown) != fits
    assert "channels_last, contiguous" in dry.shown
    assert asked == ["NVIDIA GeForce RTX 4090"]


@pytest.mark.parametrize(
    ("given", "measured"),
    [
        ([], False),  # the packaged model at 25 steps
        (["workload.steps=4"], True),
        (["workload.steps=4", "gate=none"], False),
        (["workload.steps=4", f"gate.calibration={FOLDER / 'emoji-25.json'}"], False),
    ],
)
def test_a_search_calibrates_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], measured: bool
) -> None:
    asked: list[str] = []

    def measure(studies: Studies, stage: str, candidates: Any, **_: Any) -> Any:
        assert not candidates
        asked.extend([stage, *studies.overrides(stage)])
        return SimpleNamespace(status="finished")

    monkeypatch.setattr(Studies, "measure", measure)
    monkeypatch.setattr(
        "sdopt.search.studies.calibration_of",
        lambda _: read_calibration(FOLDER / "emoji-25.json"),
    )
    studies = Studies(given, search_file(), None, tmp_path)
    studies.calibrate(lambda _: None)
    assert (asked[:1] == [CALIBRATE]) is measured
    named = [
        word
        for word in studies.overrides(FINAL)
        if word.startswith("gate.calibration=")
    ]
    assert (f"gate.calibration='{tmp_path / 'calibration.json'}'" in named) is measured
    if measured:
        assert {"quality.prompt_count=24", "quality.floor_prompts=24"} <= set(asked)


EAGER = SearchEntry(
    "layout=channels_last",
    ["layout=channels_last"],
    "pass",
    "",
    1.1,
    1.0,
    0.9,
    0.5,
    0.0,
    3,
)
COMPILED = replace(
    EAGER,
    name="compiler=inductor",
    fate="winner",
    start=BreakEven(32.0, 31.2, 1.0, 310.0),
    recompiles=2.0,
)


def record(*entries: SearchEntry) -> SearchRecord:
    return SearchRecord(
        "search",
        "folder",
        "",
        [],
        ["latency"],
        "mse",
        "Nothing.",
        list(entries),
        {},
        [],
        [],
    )


def terminal(found: SearchRecord) -> str:
    written = StringIO()
    Console(file=written, width=80).print(shown(blocks_of(found, brief=True), 80))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def test_the_start_has_a_column_where_it_says_something() -> None:
    assert "| start |" not in markdown_of(record(EAGER))
    assert (
        "| +31.2 s, repaid after 310 images; 2 compiled again later |"
        in markdown_of(record(COMPILED, EAGER))
    )
    assert " +31.2 s\n" in terminal(record(COMPILED)), "without when it is repaid"
    assert "again later" in terminal(record(replace(COMPILED, start=None)))
    assert '"images": 310.0' in json.dumps(asdict(record(COMPILED)))


def test_a_time_stands_beside_that_of_the_baseline_of_its_study() -> None:
    beside = replace(EAGER, latency_s=0.466, baseline_s=0.86)
    later = replace(EAGER, name="precision=bf16", latency_s=0.397, baseline_s=0.46)
    text = markdown_of(record(beside, later))
    assert "| 860 → 466 ms |" in text
    assert "| 460 → 397 ms |" in text
    assert "need not be the ratio of the two latencies" in text
    of_image = replace(beside, image_s=0.2, baseline_image_s=0.4, per_image=True)
    assert "| 400 → 200 ms |" in markdown_of(record(of_image))
    assert "| 900 ms |" in markdown_of(record(EAGER)), "as an earlier version wrote it"
    slower = markdown_of(record(replace(EAGER, fate="not judged")))
    assert "not judged: it has no gain, or others were chosen" in slower


def test_the_plot_loses_no_candidate_and_has_a_unit_that_fits() -> None:
    screened = replace(EAGER, fate="not judged", distance=None, memory_gib=0.075)
    judged = replace(EAGER, name="compiler=inductor", memory_gib=0.08, judged=True)
    few = record(replace(judged, distance=0.01), screened, screened)
    spec = json.dumps(search_plot(few))
    assert "memory (MiB)" in spec
    assert spec.count('"name": "layout=channels_last"') == 2
    most = record(judged, replace(screened, distance=0.02, memory_gib=2.0))
    assert "how far images are" in json.dumps(search_plot(most))


@pytest.mark.parametrize(
    ("distances", "ticks"),
    [
        ([0.02, 0.011, 0.023], [0.005, 0.01, 0.02]),
        ([0.00028], [5e-5, 1e-4, 2e-4]),
        ([1e-7, 1e-2], [1e-6, 1e-5, 1e-4, 1e-3, 1e-2]),
        ([1e-12, 1e-2], [1e-9, 1e-7, 1e-5, 1e-3]),
        ([0.0], [0.2, 0.5, 1.0]),
    ],
)
def test_the_curved_axis_of_distances_says_so_and_has_ticks_to_read_it_by(
    distances: list[float], ticks: list[float]
) -> None:
    found = record(*(replace(EAGER, distance=distance) for distance in distances))
    chart = search_chart(found)
    assert chart is not None
    [(_, spec)] = chart.views
    x = next(
        layer["encoding"]["x"] for layer in spec["layer"] if "x" in layer["encoding"]
    )
    assert x["axis"]["values"] == pytest.approx([0.0, *ticks])
    assert "logarithmic" in x["title"][-1]
    assert "title" not in spec, "a page has it, and is narrower on a phone"


def test_the_line_that_loads_names_the_users_own_groups() -> None:
    found = record(replace(COMPILED, judged=True))
    assert load_line(found, COMPILED.name).endswith(
        "('folder/final', variant='compiler=inductor')"
    )
    assert load_line(replace(found, config_dir="/my conf"), COMPILED.name).endswith(
        "variant='compiler=inductor', config_dir='/my conf')"
    )
    won = replace(found, winner=COMPILED.name)
    assert "sdopt.load(" in markdown_of(won)
    assert "sdopt.load(" not in markdown_of(replace(won, loads=False))


def test_the_tenth_judged_study_comes_after_the_second(tmp_path: Path) -> None:
    for number in ("", "-1", "-2", "-10"):
        folder = tmp_path / f"final{number}"
        folder.mkdir()
        (folder / "result.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sdopt.search.results.read_result", lambda folder: folder.parent.name
        )
        results = Results(cast(Studies, SimpleNamespace(folder=tmp_path)))
        found = [str(name) for name in results.of("final-")]
    assert found == ["final-1", "final-2", "final-10"]


def test_a_record_is_read_as_it_was_written_and_no_other_one(tmp_path: Path) -> None:
    written = asdict(record(COMPILED, EAGER))
    (tmp_path / RECORD).write_text(json.dumps(written))
    assert read_record(tmp_path) == record(COMPILED, EAGER)
    for key, value in (("fate", "lost"), ("speedup", "fast"), ("shape", 1)):
        changed = {**written, "entries": [written["entries"][0] | {key: value}]}
        (tmp_path / RECORD).write_text(json.dumps(changed))
        with pytest.raises(UsageError, match=key):
            read_record(tmp_path)


@pytest.mark.parametrize("start", [None, BreakEven(32.0, 31.2, 1.0, 310.0)])
def test_a_name_breaks_between_its_options_in_a_narrow_terminal(
    start: BreakEven | None,
) -> None:
    options = ["precision=bf16", "layout=channels_last", "caching=guidance_interval"]
    many = replace(
        EAGER,
        name=", ".join(options),
        fate="undecided",
        low=0.95,
        high=1.25,
        start=start,
    )
    lines = terminal(record(many)).splitlines()
    assert max(map(len, lines)) <= 80
    for option in options:
        assert any(option in line for line in lines[:8])
    assert any("1.25]" in line for line in lines[:8])


def test_the_front_is_joined_in_a_plot_of_its_objectives() -> None:
    fast = replace(EAGER, name="fast", speedup=1.5, memory_gib=1.0, on_front=True)
    small = replace(EAGER, name="small", memory_gib=0.2, on_front=True)
    drawn = search_plot(replace(record(fast, small), objectives=["latency", "memory"]))
    assert drawn is not None
    assert b"fast" in html_page(page_of(record(fast, small), [Chart([("", drawn)])]))
    assert drawn != search_plot(
        replace(
            record(replace(fast, on_front=False), small),
            objectives=["latency", "memory"],
        )
    )


def test_a_calibration_that_is_cut_off_tells_about_how_long_its_rest_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([8, 20])
    monkeypatch.setattr(Studies, "_images_so_far", lambda _: next(made))
    interrupted = SimpleNamespace(status="interrupted")
    monkeypatch.setattr(Studies, "measure", lambda *_, **__: interrupted)
    studies = Studies(["workload.steps=4"], search_file(), None, tmp_path)
    left_s = studies.calibrate(lambda _: None, limit_s=60.0)
    assert left_s == pytest.approx((48 - 20) * 60 / (20 - 8))
    assert not (tmp_path / "calibration.json").exists()
