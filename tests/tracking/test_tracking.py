"""MLflow as a projection of `result.json`: what is logged, once, and that nothing is lost where it cannot be."""

import json
import shutil
import socket
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import chdir, closing
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from runners import sync
from sdopt.conclusion import Conclusion
from sdopt.errors import UsageError, without_passwords
from sdopt.locks import exclusive
from sdopt.record.comparisons import Effect, Interval
from sdopt.record.files import read_result, write_result
from sdopt.record.records import Status, StudyResult
from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.report import catalog
from sdopt.report.catalog import HTML, MARKDOWN, REPORTS, ReportFile, markdown_table
from sdopt.report.sentences.answer import described
from sdopt.report.summary import summary_of
from sdopt.report.sweep import Sweep
from sdopt.schema import Tracking
from sdopt.statistics.words import sampling_text
from sdopt.tracking import client
from sdopt.tracking.client import (
    NOTE,
    Logged,
    RefusedError,
    TrackedRun,
    TrackingError,
    cause_of,
)
from sdopt.tracking.contents import (
    common_tags,
    logged_metrics,
    run_name,
    time_of,
    variant_run,
)
from sdopt.tracking.runs import (
    digest_of,
    download_run,
    log_study,
    log_sweep,
    update_verdicts,
)
from sdopt.tracking.store import ask, end_process, require_store, shown_by, ui_pages
from tests.command import SMOKE, Finished, refused, sdopt
from tests.fakes import fake_study, fake_workers
from tests.records import known, reconfigure
from tests.report.test_claims import ended_early

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Copied = tuple[StudyResult, Path]

needs_mlflow = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="mlflow is not installed"
)


class Store:
    """A local store, and the runs in it."""

    def __init__(self, folder: Path, images: bool = True) -> None:
        self.folder = folder
        self.tracking = Tracking(
            uri=f"sqlite:///{folder}/mlflow.db",
            artifacts=str(folder / "artifacts"),
            images=images,
        )

    @property
    def overrides(self) -> list[str]:
        return [
            f"tracking.uri={self.tracking.uri}",
            f"tracking.artifacts={self.tracking.artifacts}",
        ]

    @property
    def client(self) -> "MlflowClient":
        from mlflow import MlflowClient

        return MlflowClient(self.tracking.uri)

    def runs(self, experiment: str) -> list["Run"]:
        found = self.client.get_experiment_by_name(experiment)
        return list(self.client.search_runs([found.experiment_id])) if found else []

    def of_study(self, result: StudyResult) -> tuple["Run", dict[str, "Run"]]:
        """The study's own run, and those of its variants by name."""
        ours = [
            run
            for run in self.runs(result.name)
            if run.data.tags.get("sdopt.study_id") == result.id
        ]
        [parent] = [run for run in ours if run.data.tags["sdopt.role"] == "study"]
        children = [run for run in ours if run is not parent]
        assert all(
            run.data.tags["mlflow.parentRunId"] == parent.info.run_id
            for run in children
        )
        named = {run.info.run_name: run for run in children}
        assert len(named) == len(children)
        return parent, named

    def artifacts(self, run: "Run", path: str | None = None) -> list[str]:
        return [item.path for item in self.client.list_artifacts(run.info.run_id, path)]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Making its schema takes seconds: one for all tests, each of which logs studies of its own."""
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def logged(
    store: Store, finished: Finished, tmp_path_factory: pytest.TempPathFactory
) -> Store:
    """The store with the finished study in it."""
    with chdir(elsewhere := tmp_path_factory.mktemp("elsewhere")):
        log_study(finished.result, finished.folder, store.tracking)
    assert list(elsewhere.iterdir()) == []
    return store


@pytest.fixture(autouse=True)
def without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages take most of the time of logging, and only some tests look at them."""
    monkeypatch.setattr(
        catalog,
        "REPORTS",
        [each for each in REPORTS if each.file not in (HTML, MARKDOWN)],
    )


def another(finished: Finished, folder: Path) -> StudyResult:
    """The finished study as if it were another one: with an identity and a folder of its own."""
    shutil.copytree(finished.folder, folder)
    result = finished.result
    result.id = uuid.uuid4().hex
    write_result(result, folder)
    return result


def refuse_all(result: StudyResult, gate: str) -> None:
    """Lets every candidate have failed a gate."""
    ruling = Ruling("every", "mse", Verdict.FAIL, "worse")
    result.gate = gate
    result.judgements = [
        Judgement(row.name, result.baseline, "", row.contract, Verdict.FAIL, [ruling])
        for row in result.candidates
    ]


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Copied:
    folder = tmp_path / "outputs" / "runs" / "shared" / "copied"
    return another(finished, folder), folder


@needs_mlflow
def test_a_report_is_among_the_artifacts_and_a_later_one_takes_its_place(
    store: Store, copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "REPORTS", REPORTS)
    result, folder = copied
    with chdir(tmp_path):
        run = log_study(result, folder, store.tracking).run
    parent, _ = store.of_study(result)
    assert {"report.html", "report.md"} <= set(store.artifacts(parent))
    # That of a run id has no images, and leaves the one that has them.
    done = sdopt(tmp_path, "report", run, *store.overrides)
    assert done.code == 0, done.err
    assert (
        "data:image/webp"
        not in (tmp_path / "outputs" / "reports" / run / "report.html").read_text()
    )
    assert (
        "data:image/webp"
        in Path(store.client.download_artifacts(run, "report.html")).read_text()
    )
    result.environment.warnings = ["a warning of later"]
    write_result(result, folder)
    done = sdopt(tmp_path, "report", str(folder), *store.overrides)
    assert done.out.splitlines()[1] == f"MLflow: among the artifacts of run {run}"
    assert (
        "a warning of later"
        in Path(store.client.download_artifacts(run, "report.html")).read_text()
    )


@needs_mlflow
class TestStudy:
    def test_is_an_experiment_with_a_run_for_the_study_and_for_each_variant(
        self, logged: Store, result: StudyResult
    ) -> None:
        parent, children = logged.of_study(result)
        assert set(children) == {row.name for row in result.variants}
        for name in {*parent.data.tags, *children["bfloat16"].data.tags}:
            if name != "mlflow.loggedImages":
                with pytest.raises(UsageError, match=f"{name} is sdopt's own"):
                    require_store(Tracking(tags={name: "mine"}), "shared")
        assert parent.info.status == "FINISHED"
        assert parent.data.tags["sdopt.status"] == "finished"
        assert parent.data.tags["mlflow.note.content"] == markdown_table(
            summary_of(result)
        )
        assert parent.data.tags["mlflow.note.content"].startswith(
            f"**{summary_of(result).sentence}**"
        )
        assert float(parent.data.tags["sdopt.floor"]) == pytest.approx(
            result.floor, abs=1e-4
        )
        # MLflow would show all parameters and metrics above the pictures.
        assert len(parent.data.params) <= 4
        assert parent.data.metrics["options/tried"] == 2, (
            "TensorFloat-32 cannot run here"
        )
        assert len(parent.data.metrics) <= 6

    def test_only_options_are_rows_and_bars_and_each_run_is_described(
        self, logged: Store, result: StudyResult
    ) -> None:
        parent, children = logged.of_study(result)
        charted = {"speedup", "memory_ratio", "quality/psnr_db"}
        [control] = [row.name for row in result.variants if row.is_control]
        for run in (parent, children["baseline"], children[control]):
            assert not charted & run.data.metrics.keys(), run.info.run_name
        assert charted & children["bfloat16"].data.metrics.keys()
        notes = {
            name: run.data.tags["mlflow.note.content"] for name, run in children.items()
        }
        row = known(summary_of(result).row("bfloat16"))
        assert described(row, summary_of(result).row("baseline")) in notes["bfloat16"]
        assert row.because in notes["bfloat16"]
        assert "once more" in notes[control]

    def test_runs_last_as_long_as_the_study_and_say_who_measured_what(
        self, logged: Store, result: StudyResult
    ) -> None:
        parent, children = logged.of_study(result)
        assert result.finished is not None
        began, ended = (
            int(1000 * datetime.fromisoformat(moment).timestamp())
            for moment in (result.started, result.finished)
        )
        assert (parent.info.start_time, parent.info.end_time) == (began, ended)
        for run in [parent, *children.values()]:
            assert 0 <= run.info.start_time - began <= len(children)
            assert run.info.end_time == ended
            assert run.data.tags["mlflow.source.name"].startswith("sdopt run")
            assert run.data.tags["mlflow.user"]
            searchable = [
                run.data.tags[name] for name in ("model", "size", "steps", "device")
            ]
            assert searchable == ["emoji", "32", "2", result.environment.device["name"]]
        newest = max(children, key=lambda name: children[name].info.start_time)
        assert newest == "baseline"

    def test_an_experiment_opens_as_a_leaderboard(self, logged: Store) -> None:
        tags = logged.client.get_experiment_by_name("shared").tags
        assert tags["mlflow.note.content"].startswith("**shared ")
        view = json.loads(tags["mlflow.sharedViewState.sdopt"])
        assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`speedup`", False)
        columns = {
            "metrics.`speedup`",
            *(
                f"tags.`{name}`"
                for name in ("speed", "images", "size", "steps", "batch")
            ),
        }
        assert columns <= set(view["selectedColumns"])
        assert view["compareRunCharts"][0]["metricKey"] == "speedup"
        page = ui_pages(logged.tracking)["shared"]
        assert page.endswith("viewStateShareKey=sdopt")
        assert without_passwords(page) == page

    def test_that_compared_nothing_leaves_the_answer_of_an_earlier_one(
        self, logged: Store, copied: Copied
    ) -> None:
        result, folder = copied
        [*_, control] = [row for row in result.variants if row.is_control]
        result.variants = [result.baseline_variant, control]
        result.comparisons = []
        before = logged.client.get_experiment_by_name("shared").tags
        log_study(result, folder, replace(logged.tracking, images=False))
        assert logged.client.get_experiment_by_name("shared").tags == before

    def test_the_note_of_an_experiment_stays_that_of_the_user(
        self, store: Store
    ) -> None:
        def note_after(answer: str, by_hand: str | None = None) -> str:
            run = client.TrackedRun(leaderboard=("metrics.`speedup`",))
            if by_hand is not None:
                store.client.set_experiment_tag(here.experiment_id, NOTE, by_hand)
            ask(client.put, store.tracking, "told", run, [], answer, (), answer)
            return str(store.client.get_experiment(here.experiment_id).tags[NOTE])

        place = client.place_of(store.tracking, "told")
        here = store.client.get_experiment(
            store.client.create_experiment("told", place)
        )
        assert note_after("**1** faster") == "**1** faster"
        assert note_after("**2** faster") == "**2** faster"
        assert note_after("**3** faster", "read the wiki") == "read the wiki"
        assert note_after("**4** faster", "") == "**4** faster"

    def test_what_a_gate_says_later_reaches_the_runs_and_logging_again_adds_nothing(
        self, copied: Copied, store: Store, tmp_path: Path
    ) -> None:
        result, folder = copied
        reconfigure(
            result,
            "tracking",
            kind="mlflow",
            uri=store.tracking.uri,
            artifacts=store.tracking.artifacts,
        )
        write_result(result, folder)
        log_study(result, folder, store.tracking)
        # The store is that of the result, since the command names no other.
        done = sdopt(tmp_path, "gate", str(folder), "tracking.deadline_s=90")
        judged = read_result(folder)
        parent, children = store.of_study(judged)
        run = parent.info.run_id  # another one, if the gate leaves none to recommend
        assert f"MLflow: the verdicts of run {run} are up to date" in done.shown
        assert parent.data.tags["gate.name"] == "default"
        assert "sdopt gate" in parent.data.tags["mlflow.note.content"]
        assert "verdicts.md" in store.artifacts(parent)
        [judgement] = [j for j in judged.judgements if j.candidate == "bfloat16"]
        assert children["bfloat16"].data.tags["gate"] == judgement.verdict
        decided = {Verdict.PASS: 1, Verdict.FAIL: 0}.get(judgement.verdict)
        assert children["bfloat16"].data.metrics.get("gate/passed") == decided
        before = len(store.runs("shared"))
        again = log_study(judged, folder, store.tracking)
        assert (again.run, again.new) == (run, False)
        assert len(store.runs("shared")) == before

    def test_verdicts_that_leave_the_best_option_are_added_to_the_same_run(
        self, copied: Copied, store: Store
    ) -> None:
        result, folder = copied
        refuse_all(result, "first")
        first = log_study(result, folder, store.tracking)
        refuse_all(result, "second")
        later = summary_of(result)
        assert update_verdicts(later, folder, store.tracking, {}) == first.run
        parent, _ = store.of_study(result)
        assert parent.data.tags["gate.name"] == "second"
        again = log_study(result, folder, store.tracking)
        assert (again.run, again.new) == (first.run, False)

    def test_has_no_figures_of_a_best_option_once_the_gate_has_refused_it(
        self, copied: Copied, store: Store
    ) -> None:
        result, folder = copied
        result.judgements, result.gate = [], ""
        log_study(result, folder, store.tracking)
        summary = summary_of(result)
        if summary.best is None:  # by chance of the times
            recommended = {"best/speedup": 2.0}
            changes = {"": TrackedRun(metrics=recommended)}
            query = [f"tags.`sdopt.study_id` = '{result.id}'"]
            ask(client.amend, store.tracking, result.name, query, changes)
        refuse_all(result, "default")
        refused = summary_of(result)
        assert refused.best is None
        assert update_verdicts(refused, folder, store.tracking, {})
        parent, _ = store.of_study(result)
        assert not [name for name in parent.data.metrics if name.startswith("best/")]
        assert parent.data.metrics["options/recommended"] == 0
        for judgement in result.judgements:
            judgement.verdict = Verdict.INCONCLUSIVE
        assert update_verdicts(summary_of(result), folder, store.tracking, {})
        _, children = store.of_study(result)
        assert "gate/passed" not in children["bfloat16"].data.metrics

    def test_a_variant_has_tags_parameters_metrics_images_and_evidence(
        self, logged: Store, result: StudyResult
    ) -> None:
        _, children = logged.of_study(result)
        half, four = children["bfloat16"].data, children["batches of four"].data
        assert (half.tags["status"], half.tags["contract"], half.tags["precision"]) == (
            "ok",
            "lossy",
            "bf16",
        )
        assert half.params["precision"] == "bf16"
        assert not {"attention", "layout", "workload.steps"} & half.params.keys(), (
            "all variants have these in common"
        )
        assert four.params["workload.batch_size"] == "4"
        assert children["baseline"].data.params["workload.batch_size"] == "1"
        assert half.metrics["speedup"] == pytest.approx(
            known(result.comparisons[0].shapes[0].speedup).estimate
        )
        assert half.metrics["latency/p50_s"] > 0
        assert len(half.metrics) <= 10, (
            "MLflow draws a chart of each; `table.csv` has the rest"
        )
        assert "speedup" not in children["baseline"].data.metrics
        assert (
            len(
                [
                    p
                    for p in logged.artifacts(children["bfloat16"], "images")
                    if p.endswith(".png")
                ]
            )
            == 4
        )
        file = Path(
            logged.client.download_artifacts(
                children["bfloat16"].info.run_id, "evidence.json"
            )
        )
        axes = {item["axis"] for item in json.loads(file.read_text())["evidence"]}
        assert axes >= {"precision", "attention", "compiler", "layout", "grad_mode"}


@needs_mlflow
class TestOnce:
    def test_what_was_logged_in_part_is_logged_anew(
        self, store: Store, copied: Copied
    ) -> None:
        result, folder = copied
        record = result.variant("bfloat16").images[-1]
        record.digest = ""  # as of an older record: a replaced image would be left out
        picture = folder / record.path
        content = picture.read_bytes()
        picture.write_bytes(b"")
        with pytest.raises(UsageError, match=r"cannot be read as an image"):
            log_study(result, folder, store.tracking)
        picture.write_bytes(content)
        assert log_study(result, folder, store.tracking).new
        _, children = store.of_study(result)
        assert len(children) == len(result.variants)

    def test_a_study_that_goes_on_is_logged_when_it_has_ended(
        self, store: Store, copied: Copied
    ) -> None:
        """`sdopt sync` may pass by while it runs."""
        result, folder = copied
        result.status, result.finished = "running", None
        write_result(result, folder)
        assert (
            sdopt(
                folder, "sync", str(folder), f"tracking.uri={store.tracking.uri}"
            ).code
            == 0
        )
        result.status, result.finished = "finished", result.started
        write_result(result, folder)
        log_study(result, folder, store.tracking)
        parent, _ = store.of_study(result)
        assert parent.data.tags["sdopt.status"] == "finished"

    def test_an_older_copy_takes_nobodys_place(
        self, store: Store, copied: Copied
    ) -> None:
        result, folder = copied
        result.finished = "2026-01-02T00:00:00+00:00"
        log_study(result, folder, store.tracking)
        result.finished = "2026-01-01T00:00:00+00:00"
        with pytest.raises(UsageError, match="an earlier state"):
            log_study(result, folder, store.tracking)
        parent, _ = store.of_study(result)
        assert parent.info.end_time == time_of("2026-01-02T00:00:00+00:00")


@needs_mlflow
class TestPlaces:
    """A store that is not what it was: renamed, deleted, moved."""

    @pytest.fixture
    def own(self, tmp_path: Path) -> Store:
        return Store(tmp_path / "a", images=False)

    def test_a_renamed_experiment_has_what_was_logged(
        self, own: Store, copied: Copied
    ) -> None:
        first = log_study(*copied, own.tracking)
        own.client.rename_experiment(first.experiment, "another name")
        again = log_study(*copied, own.tracking)
        assert (again.run, again.new) == (first.run, False)
        assert own.client.get_experiment_by_name("shared") is None

    def test_a_deleted_experiment_takes_the_result_once_it_is_restored(
        self, own: Store, copied: Copied
    ) -> None:
        first = log_study(*copied, own.tracking)
        own.client.delete_experiment(first.experiment)
        with pytest.raises(RefusedError, match="'active' state"):
            log_study(*copied, own.tracking)
        own.client.restore_experiment(first.experiment)
        assert not log_study(*copied, own.tracking).new

    def test_artifacts_lie_where_their_experiment_began(
        self, own: Store, copied: Copied, tmp_path: Path
    ) -> None:
        first = log_study(*copied, own.tracking)
        elsewhere = replace(own.tracking, artifacts=str(tmp_path / "elsewhere"))
        for request in (
            lambda: require_store(elsewhere, "shared"),
            lambda: log_study(*copied, elsewhere),
        ):
            with pytest.raises(
                (UsageError, RefusedError),
                match=r"tracking\.artifacts=.*elsewhere would have no effect",
            ):
                request()
        (own.folder / "artifacts").rename(tmp_path / "elsewhere")
        with pytest.raises(UsageError, match=r"has no result\.json"):
            download_run(first.run, own.tracking)
        (tmp_path / "elsewhere").rename(own.folder / "artifacts")
        assert download_run(first.run, own.tracking)[0].id == copied[0].id
        gone = replace(own.tracking, uri="sqlite:////nowhere/runs.db")
        for tracking in (own.tracking, gone):
            with pytest.raises(
                UsageError,
                match=r"neither a file .*; name another store with tracking\.uri=",
            ):
                download_run("a name with blanks", tracking)

    def test_a_project_that_was_moved_goes_on_in_a_new_experiment(
        self,
        own: Store,
        copied: Copied,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """MLflow keeps whole paths, and would make the old folder anew."""
        first = log_study(*copied, own.tracking)
        own.folder.rename(tmp_path / "b")
        moved = Store(tmp_path / "b", images=False)
        assert require_store(moved.tracking, "shared") is None
        with pytest.raises(RefusedError, match="`sdopt sync` logs the result anew"):
            ask(
                client.amend,
                moved.tracking,
                "shared",
                [f"tags.`sdopt.study_id` = '{copied[0].id}'"],
                {"": TrackedRun(files={"page.html": b"later"})},
            )
        capsys.readouterr()
        again = log_study(*copied, moved.tracking)
        assert "logged to 'shared 2'" in capsys.readouterr().err
        assert again.new
        assert download_run(again.run, moved.tracking)[0].id == copied[0].id
        assert moved.client.get_run(first.run).info.lifecycle_stage == "deleted"
        assert not log_study(*copied, moved.tracking).new
        assert not own.folder.exists()

    def test_a_server_elsewhere_keeps_no_artifacts_near_here(self) -> None:
        """They would lie on this machine, where its users do not look for them."""
        away, folder = "http://team:5000", "/nowhere/mlartifacts/1"

        def lying(place: str) -> SimpleNamespace:
            return SimpleNamespace(artifact_location=place, name="shared")

        with pytest.raises(RefusedError, match="--artifacts-destination"):
            client._require_near(lying(folder), Tracking(uri=away))
        for uri, place in (
            ("http://localhost:5000", folder),
            ("sqlite:///mlflow.db", folder),
            (away, "mlflow-artifacts:/1"),
        ):
            client._require_near(lying(place), Tracking(uri=uri, artifacts=None))

    def test_a_folder_may_have_any_name_that_a_checkout_has(
        self, copied: Copied, tmp_path: Path
    ) -> None:
        """SQLAlchemy takes %2F for a slash: a checkout of a branch in Jenkins has such a name."""
        here = Store(tmp_path / "feature%2Fa b#c@d:e", images=False)
        here.folder.mkdir()
        logged = log_study(*copied, here.tracking)
        assert download_run(logged.run, here.tracking)[0].id == copied[0].id
        assert {path.parent for path in tmp_path.rglob("mlflow.db")} == {here.folder}

    def test_a_process_that_was_stopped_is_not_waited_for_without_end(
        self,
        own: Store,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        require_store(own.tracking, "shared")
        own.client.create_experiment("there")
        monkeypatch.setattr("sdopt.tracking.store._PATIENCE_S", 0.1)
        monkeypatch.setattr("sdopt.tracking.store._QUEUE", 1)
        with exclusive(own.folder / "mlflow.db.lock"):
            warning = require_store(replace(own.tracking, deadline_s=0.1), "shared")
        assert f"{own.tracking.uri}: another process holds it" in str(warning)
        assert "waiting for another process that writes it" in capsys.readouterr().err

    def test_a_run_is_complete_when_it_is_said_to_be(
        self, own: Store, copied: Copied, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
        monkeypatch.setenv("MLFLOW_ACTIVE_MODEL_ID", "m-of-another-program")
        end_process()  # the next one has these
        log_study(*copied, own.tracking)
        end_process()
        _, variants = own.of_study(copied[0])
        measured = [
            variants[row.name].data for row in copied[0].variants if row.status.measured
        ]
        assert measured
        assert all(data.metrics and data.params for data in measured)

    @pytest.mark.parametrize(
        ("tracking", "said"),
        [
            (
                Tracking(tags={"sdopt.digest": "1"}),
                r"tracking\.tags: sdopt\.digest is sdopt's own",
            ),
            *(
                (Tracking(tags={name: "1"}), f"tags: {name} is sdopt's own")
                for name in ("device", "gate", "precision", "mlflow.user")
            ),
            (
                Tracking(uri="http://localhost:1", artifacts="mine"),
                r"tracking\.artifacts=mine: .* leave it out",
            ),
            *(
                (Tracking(uri=uri), f"tracking.uri=.*{said}")
                for uri, said in {
                    "./mlruns": "filesystem",
                    "sqlite:///:memory:": "names no database",
                    "": "names no database",
                    "ftp://somewhere": "dialects:ftp",
                    "localhost:5000": "unsupported URI",
                    "sqlite:mine.db": "SQLAlchemy URL",
                    "file:///mlruns": "dialects:file",
                    "mysql+nodriver://a:secret@with@at@somewhere/b?password=secret": "nodriver",
                    "postgresql://a:***@somewhere/b": "password is not recorded",
                    "databricks": "[Dd]atabricks authentication",
                }.items()
            ),
        ],
    )
    def test_what_keeps_no_result_is_refused_before_measuring(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        tracking: Tracking,
        said: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError, match=said) as caught:
            require_store(tracking, "shared")
        assert "secret" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_a_deleted_experiment_is_refused(self, store: Store) -> None:
        """Whatever is logged to it later, by `sdopt sync`, would be refused as well."""
        place = client.place_of(store.tracking, "gone")
        store.client.delete_experiment(store.client.create_experiment("gone", place))
        with pytest.raises(UsageError, match="'gone' is deleted: restore it"):
            require_store(store.tracking, "gone")

    def test_a_database_with_other_tables_is_refused(self, tmp_path: Path) -> None:
        with closing(sqlite3.connect(tmp_path / "other.db")) as other, other:
            other.execute("CREATE TABLE mine (x)")
        with pytest.raises(UsageError, match="other tables"):
            require_store(Tracking(uri=f"sqlite:///{tmp_path}/other.db"), "shared")

    def test_another_store_that_the_environment_names_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert require_store(Tracking(), "shared") is None
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team:5000")
        assert "tracking.uri=http://team:5000 uses it" in str(
            require_store(Tracking(), "shared")
        )
        own = Tracking(uri=f"sqlite:///{tmp_path}/own.db")
        assert require_store(own, "shared") is None
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
        assert "results go to the experiment 'shared'" in str(
            require_store(own, "shared")
        )
        both = str(require_store(Tracking(), "shared"))
        assert "http://team:5000 uses it" in both
        assert "MLFLOW_EXPERIMENT_NAME=mine: is not read" in both
        assert require_store(own, "mine") is None
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "12")
        assert "MLFLOW_EXPERIMENT_ID=12" in str(require_store(own, "mine"))
        tagged = sdopt(tmp_path, "sync", "tracking.tags={team: vision}")
        assert "tracking.tags: has no effect on a finished result" in tagged.err

    def test_of_two_that_logged_the_same_one_is_kept(
        self, own: Store, copied: Copied
    ) -> None:
        """What the other had begun is deleted with the next logging, also if it had ended."""
        result, folder = copied
        first = log_study(result, folder, own.tracking)
        tags = {"sdopt.study_id": result.id, "sdopt.role": "study"}
        begun = own.client.create_run(first.experiment, tags=tags).info.run_id
        ended = own.client.create_run(
            first.experiment, tags=tags | {"sdopt.digest": digest_of(result)}
        ).info.run_id
        kept = log_study(result, folder, own.tracking)
        assert not kept.new
        left = {run.info.run_id for run in own.runs("shared")}
        assert left & {first.run, begun, ended} == {kept.run}


@needs_mlflow
def test_a_report_of_any_bytes_is_an_artifact(
    store: Store, copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One entry of `REPORTS` is all that it takes, and what was rendered for the run's folder is not made again."""
    content, made = b"\x89\xff\xfe\x00 no text", []

    def render(_: catalog.Rendering) -> bytes:
        made.append(1)
        return content

    monkeypatch.setattr(
        catalog, "REPORTS", [ReportFile("weights", "weights.bin", render)]
    )
    result, folder = copied
    config = replace(result.config, tracking=store.tracking)
    end = Conclusion(config, folder, context=None)  # type: ignore[arg-type]
    summary = summary_of(result)
    end.track(summary, end.report(summary))
    parent, _ = store.of_study(result)
    assert "weights.bin" in store.artifacts(parent)
    kept = store.client.download_artifacts(
        parent.info.run_id, "weights.bin", str(tmp_path)
    )
    assert Path(kept).read_bytes() == content
    assert made == [1]


@needs_mlflow
def test_any_prompt_and_any_name_of_a_study_are_taken_and_long_texts_cut(
    store: Store, copied: Copied
) -> None:
    result, folder = copied
    result.name = "a study: 'one', \"two\", b/c, %41 [x]"
    prompts = [
        'a "quoted", listed: one?',
        "50 % = half",
        "../../up/and/away",
        "日本語",
        "",
        "x" * 500,
        "a/b\\c\nd",
        "c",
    ]
    names = ("baseline", "bfloat16")
    images = [each for name in names for each in result.variant(name).images]
    for record, prompt in zip(images, prompts, strict=True):
        record.prompt = prompt
    result.variant("TensorFloat-32").reason = "because | " * 2000
    reconfigure(result, "workload", prompts=["a prompt"] * 2000)
    log_study(result, folder, store.tracking)
    parent, children = store.of_study(result)
    assert {"result.json", "table.md"} <= set(store.artifacts(parent))
    for name in names:
        assert (
            len(
                [
                    p
                    for p in store.artifacts(children[name], "images")
                    if p.endswith(".png")
                ]
            )
            == 4
        )
    for run in (parent, children["TensorFloat-32"]):
        assert (
            len(run.data.tags["mlflow.note.content"]) <= 5000
        )  # a server before MLflow 2.17 takes no more
    assert "cut here" in parent.data.tags["mlflow.note.content"]


def test_the_name_of_a_sweeps_job_says_what_it_alone_has(tmp_path: Path) -> None:
    _, result, _ = fake_study()
    job = tmp_path / "1"
    assert run_name(result, job) == "1: it"
    shared = [
        "precision=bf16",
        "workload.prompts=['a: red apple']",
        "workload.steps=10,20",
        "tracking.uri=http://127.0.0.1:5000",
        "tracking.note='my sweep'",
    ]
    recorded = {"hydra": {"overrides": {"task": shared}}}
    (tmp_path / "multirun.yaml").write_text(json.dumps(recorded))
    # As Hydra writes it.
    result.environment.command = [
        *("sdopt", "run", "precision=bf16", r"workload.prompts=[a\:\ red\ apple]"),
        *("workload.steps=20", r"tracking.uri=http\://127.0.0.1\:5000"),
        r"tracking.note=my\ sweep",
    ]
    assert run_name(result, job) == "1: it, workload.steps=20"
    summary, [it] = summary_of(result), result.candidates
    # Beside its speed-up, for parallel coordinates.
    assert variant_run(summary, it, job, images=False).parameters == {
        "workload.steps": "20"
    }
    baseline = variant_run(summary, result.baseline_variant, job, images=False)
    assert not baseline.parameters
    # As one pastes it.
    assert baseline.tags["mlflow.source.name"] == (
        r"sdopt run precision=bf16 workload.prompts='[a\:\ red\ apple]' workload.steps=20"
    )
    result.candidates[0].name = "attention=math, layout=contiguous"
    result.environment.command[2:] = ["layout=contiguous", "attention=math"]
    assert run_name(result, job) == "1: attention=math, layout=contiguous"


@needs_mlflow
def test_a_sweep_is_a_run_above_its_studies(
    sweep: Finished, sweep_folder: Path
) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{sweep.cwd}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("pair")
    runs = list(client.search_runs([experiment.experiment_id]))
    [above] = [run for run in runs if run.data.tags["sdopt.role"] == "sweep"]
    studies = [run for run in runs if run.data.tags["sdopt.role"] == "study"]
    assert len(studies) == 3
    assert all(
        run.data.tags["mlflow.parentRunId"] == above.info.run_id for run in studies
    )
    assert (
        above.data.tags["mlflow.note.content"]
        == (sweep_folder / "sweep.md").read_text()
    )
    tags = {"study": "pair", "model": "emoji", "steps": "1"}
    tags["mlflow.source.name"] = above.data.tags["mlflow.source.name"]
    assert tags.items() <= above.data.tags.items()
    assert tags["mlflow.source.name"].startswith("sdopt run -m ")
    assert "tracking" not in tags["mlflow.source.name"]
    assert "attention=default,math,cudnn" in tags["mlflow.source.name"]
    for common in ("device", "torch", "mlflow.user"):
        assert above.data.tags[common] == studies[0].data.tags[common]
    assert "sdopt.study_id" not in above.data.tags
    assert above.info.start_time == min(run.info.start_time for run in studies)
    assert above.info.end_time == max(run.info.end_time for run in studies)
    assert above.data.tags["answer"] in above.data.tags["mlflow.note.content"]
    assert above.data.params["attention"] == "default, math, cudnn"
    assert above.data.params["steps"] == "1"
    assert above.data.metrics["options/tried"] == 1
    swept = {run.data.params["attention"] for run in studies}
    assert swept == {"default", "math", "cudnn"}
    kept = {item.path for item in client.list_artifacts(above.info.run_id)}
    assert kept == {"sweep.md", "report.md", "report.html"}


def test_of_a_sweep_that_was_interrupted_mlflow_says_so(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {"0": finished.result, "1": finished.result}
    for study in jobs.values():
        study.config = replace(study.config, tracking=Tracking(tags={"team": "vision"}))
    jobs["1"].status = "interrupted"
    for row in jobs["1"].candidates:
        row.status = Status.INTERRUPTED
        row_effect = Effect((row.name,), Interval(1.1))
        jobs["1"].effects.append(row_effect)
    asked: list[Any] = []
    monkeypatch.setattr("sdopt.tracking.runs.ask", lambda *given: asked.append(given))
    whole = {"0": jobs["0"]}
    sweeps = [Sweep(tmp_path, whole, {}), Sweep(tmp_path, whole, {}, waiting={"1": ""})]
    for sweep in [*sweeps, Sweep(tmp_path, jobs, {})]:
        log_sweep(sweep, "", Tracking())
    runs = [run for _, _, _, run, *_ in asked]
    assert [run.status for run in runs] == ["FINISHED", "KILLED", "KILLED"]
    assert [run.metrics["options/tried"] for run in runs] == [2, 2, 2]
    effects = [name for name in runs[-1].metrics if name.startswith("effect/")]
    assert not effects, "ratios of several studies have no sum"
    assert {run.tags["team"] for run in runs} == {"vision"}
    assert all(note.startswith(f"**sweep {tmp_path.name}:** ") for *_, note in asked)


def test_what_was_interrupted_is_killed_and_says_once_how_far_it_came(
    finished: Finished, tmp_path: Path
) -> None:
    result = finished.result
    it = result.variant("bfloat16")
    it.status, it.reason = Status.INTERRUPTED, "interrupted after 0 of 2 rounds"
    for measurement in it.measurements:
        measurement.shapes[0].calls = []
    result.comparisons = []
    run = variant_run(summary_of(result), it, tmp_path, images=False)
    assert run.status == "KILLED"
    assert run.tags[NOTE].count(it.reason) == 1
    assert sampling_text(result).startswith("0 to ")


def test_what_an_interrupted_study_has_timed_ranks_beside_nothing_complete() -> None:
    result = ended_early()
    summary = summary_of(result)
    row = summary.row("deep cache")
    assert row is not None
    assert row.speedup is not None
    assert logged_metrics(summary, row.variant) == {
        "partial/speedup": row.speedup.interval.estimate,
        "partial/latency/p50_s": row.figures["latency/p50_s"],
        "partial/memory_ratio": row.figures["memory_ratio"],
    }
    [control] = [variant for variant in result.variants if variant.is_control]
    assert "repeated/partial/speedup" in logged_metrics(summary, control)


def test_of_a_lora_runs_have_the_file(tmp_path: Path) -> None:
    """Two searches, one with a LoRA, have variants of the same names."""
    _, result, _ = fake_study()
    chosen = {"path": "me/some-lora", "weight_name": "lora.safetensors"}
    config = replace(result.config, options={**result.config.options, "lora": chosen})
    assert common_tags(result, config)["lora_file"] == "some-lora/lora.safetensors"
    assert "lora_file" not in common_tags(result, result.config)
    assert "tags.`lora_file`" in TrackedRun().leaderboard


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that is not there, which is asked once, without the seconds between more tries."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    end_process()  # the next one has it
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
    end_process()


@needs_mlflow
class TestNothingIsLost:
    def test_an_error_is_told_by_what_happened(self) -> None:
        full = "(sqlite3.OperationalError) database or disk is full"
        how = "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block)"
        assert cause_of(OSError(f"{how}\n{full}\n[SQL: INSERT INTO tags]")) == full
        assert cause_of(TimeoutError()) == "TimeoutError"

    @pytest.mark.parametrize(
        ("uri", "said", "refused"),
        [
            ("http://host", "failed with error code 403 != 200. Response: no", True),
            (
                "http://host",
                "failed with error code 429 != 200. Response: later",
                False,
            ),
            ("http://host", "too many 502 error responses", False),
            ("http://host", "SSLError(certificate has expired)", True),
            ("http://host", "NewConnectionError(Connection refused)", False),
            ("http://host", "Response body is not in a valid JSON format", True),
            ("postgresql://host/b", "could not connect to server", False),
            ("postgresql://host/b", "password authentication failed", True),
            ("sqlite:///here.db", "file is not a database", True),
            ("sqlite:///here.db", "database or disk is full", False),
        ],
    )
    def test_what_waiting_does_not_mend_is_refused(
        self, uri: str, said: str, refused: bool
    ) -> None:
        """What passes by itself lets a study be measured: its result is logged later."""
        error = client._explained(OSError(said), Tracking(uri=uri))
        assert str(error) == said
        assert isinstance(error, RefusedError) is refused

    def test_where_the_server_is_dead(
        self, tmp_path: Path, dead: str, store: Store
    ) -> None:
        with fake_workers():
            unlogged = sdopt(
                tmp_path, "run", *SMOKE, "tracking=mlflow", f"tracking.uri={dead}"
            )
        assert unlogged.code == 0
        assert unlogged.result.status == "finished"
        assert f"not logged to {dead}" in unlogged.err
        assert (
            f"`sdopt sync {unlogged.folder} tracking.uri={Tracking().uri}` logs it here, "
            f"`sdopt sync {unlogged.folder} tracking.uri={dead}` to that store later"
            in unlogged.err
        )
        assert "Traceback" not in unlogged.err

        first = sdopt(unlogged.cwd, "sync", str(unlogged.folder), *store.overrides)
        assert first.code == 0, first.err
        assert "logged" in first.out
        before = len(store.runs("pair"))
        second = sdopt(unlogged.cwd, "sync", str(unlogged.folder), *store.overrides)
        assert f"{unlogged.folder}: already logged as " in second.out, second.shown
        assert len(store.runs("pair")) == before > 0
        assert not (unlogged.cwd / "mlruns").exists()

    def test_where_the_database_cannot_be_made(
        self, copied: Copied, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        for uri in (
            f"sqlite:///{tmp_path}/file/mlflow.db",
            "ftp://nowhere",
            "postgresql://nobody@127.0.0.1:1/none",
        ):
            with pytest.raises(TrackingError, match=r"mlflow\.db|ftp|postgresql"):
                log_study(*copied, Tracking(uri=uri))


@needs_mlflow
class TestSync:
    def test_logs_everything_below_a_folder(
        self, sweep: Finished, tmp_path: Path
    ) -> None:
        """The database is gone; the artifacts, with copies of the results among them, are not."""
        shutil.copytree(sweep.cwd / "outputs", tmp_path / "outputs")
        (tmp_path / "outputs" / "mlflow.db").unlink()
        # The same places as by default; MLflow keeps one store open per address, and this process has been elsewhere.
        places = [
            f"tracking.uri=sqlite:///{tmp_path}/outputs/mlflow.db",
            f"tracking.artifacts={tmp_path}/outputs/mlartifacts",
        ]
        found = sdopt(tmp_path, "sync", *places)
        assert found.code == 0, found.err
        logged = [
            line.partition(": ")[0]
            for line in found.out.splitlines()
            if ": logged as " in line
        ]
        assert [Path(line).name for line in logged[:3]] == ["0", "1", "2"]
        assert len(logged) == 4  # and the sweep above them
        assert sdopt(tmp_path, "sync", *places).out.count("already logged") == 4

    def test_without_a_store_each_result_goes_to_its_own(
        self, copied: Copied, tmp_path: Path
    ) -> None:
        own = Store(tmp_path)
        result, folder = copied
        result.config = replace(result.config, tracking=own.tracking)
        write_result(result, folder)
        logged = sdopt(tmp_path, "sync", str(folder), "tracking.deadline_s=90")
        assert logged.code == 0, logged.err
        assert f" in {own.tracking.uri}" in logged.out
        assert own.runs("shared")
        assert not (tmp_path / "outputs" / "mlflow.db").exists()

    def test_a_run_of_a_project_that_was_moved_says_where_its_result_was(self) -> None:
        store, run = MagicMock(), MagicMock()
        store.get_run.return_value, store.list_artifacts.return_value = run, []
        run.info.artifact_uri = "/gone/artifacts"
        with pytest.raises(UsageError, match="json in /gone/artifacts"):
            client.read(store, Tracking(), "1")

    def test_the_usual_store_counts_where_it_is_named(self) -> None:
        usual, own = Tracking(), Tracking(uri="http://127.0.0.1:1")
        named = [f"tracking.uri={usual.uri}"]
        assert sync._store_for(usual, own, named) == usual
        assert sync._store_for(usual, own, []) == own

    def test_within_a_folder_its_name_and_its_sweep_are_known(
        self, sweep: Finished, store: Store
    ) -> None:
        [folder] = (sweep.cwd / "outputs" / "sweeps" / "pair").iterdir()
        assert sdopt(folder / "1", "sync", ".", *store.overrides).code == 0
        names = [run.info.run_name for run in store.runs("pair")]
        assert f"sweep {folder.name}" in names
        assert any(name.startswith("1: ") for name in names)

    def test_one_unreadable_result_does_not_keep_the_others_and_none_is_said(
        self, store: Store, copied: Copied, tmp_path: Path
    ) -> None:
        result, folder = copied
        folder.rename(tmp_path / "artifacts")  # the name of what MLflow keeps
        broken = tmp_path / "a broken one"
        broken.mkdir()
        (broken / "result.json").write_text("{")
        found = refused(tmp_path, "sync", ".", *store.overrides)
        assert "a broken one" in found.err
        assert found.out.startswith("artifacts: logged as ")
        assert store.of_study(result)[0].info.status == "FINISHED"
        (tmp_path / "empty").mkdir()
        found = sdopt(tmp_path, "sync", "empty", *store.overrides)
        assert (found.code, found.err) == (
            2,
            "sdopt: empty: no result.json at or below it\n",
        )


class TestWithoutMlflow:
    """As on a GPU machine where it is not installed."""

    @pytest.fixture(autouse=True)
    def missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [
            name for name in sys.modules if name.partition(".")[0] == "mlflow"
        ]:
            monkeypatch.delitem(sys.modules, name)
        blocked: Any = None
        monkeypatch.setitem(sys.modules, "mlflow", blocked)

    def test_choosing_it_is_a_mistake_before_anything_is_measured(
        self, tmp_path: Path
    ) -> None:
        done = refused(tmp_path, "run", *SMOKE, "tracking=mlflow")
        assert "mlflow is not installed" in done.err
        assert "tracking=none" in done.err
        assert not list(tmp_path.rglob("result.json"))
        with fake_workers():
            finished = sdopt(tmp_path, "run", *SMOKE)
        assert finished.code == 0, finished.err
        assert finished.result.status == "finished"

    @pytest.mark.parametrize("command", ["sync", "ui"])
    def test_commands_that_need_it_say_so(
        self, tmp_path: Path, finished: Finished, command: str
    ) -> None:
        found = refused(
            tmp_path, command, *([str(finished.folder)] if command == "sync" else [])
        )
        assert "mlflow is not installed" in found.err


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        (Tracking().uri, "sdopt ui"),
        (
            "sqlite:////some where/m.db",
            "sdopt ui tracking.uri='sqlite:////some where/m.db'",
        ),
    ],
)
def test_a_run_of_a_local_database_is_shown_by_a_command(uri: str, said: str) -> None:
    assert shown_by(Tracking(uri=uri), Logged("0123", "1", True)) == said


def test_two_processes_that_log_one_run_to_a_server_log_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[Any] = []

    def found(*_: Any) -> list[Any]:
        earlier = list(logged)
        time.sleep(0.05)  # an answer of a server
        return earlier

    def created(_client: Any, _home: str, run: Any, digest: str) -> str:
        run_id = str(len(logged))
        info = SimpleNamespace(run_id=run_id, experiment_id="1")
        tags = {"sdopt.digest": digest}
        logged.append(SimpleNamespace(info=info, data=SimpleNamespace(tags=tags)))
        return run_id

    for name, stand_in in (("_found", found), ("_created", created)):
        monkeypatch.setattr(client, name, stand_in)
    for name in ("_experiment", "_require_near"):
        monkeypatch.setattr(client, name, lambda *_: "1")
    server = Tracking(uri="http://127.0.0.1:9")
    mine = ["tags.a = 'b'"]
    arguments = MagicMock(), server, "pair", TrackedRun("it"), mine, "digest"
    threads = [Thread(target=client.put, args=arguments) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(logged) == 1


def test_artifacts_are_not_written_to_where_a_project_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a copy, the folder is still there: only that of the same name within the usual store tells it."""
    monkeypatch.chdir(tmp_path)
    usual = Tracking(
        uri=f"sqlite:///{tmp_path}/outputs/mlflow.db",
        artifacts=f"{tmp_path}/outputs/mlartifacts",
    )
    shared = replace(usual, uri=f"sqlite:///{tmp_path}/shared.db")
    server = replace(usual, uri="http://localhost:5000", artifacts=None)
    before, named = tmp_path / "before" / "outputs" / "mlartifacts", tmp_path / "named"

    def elsewhere(folder: Path, tracking: Tracking) -> bool:
        place = (folder / "pair").as_uri()
        experiment = SimpleNamespace(name="pair", artifact_location=place)
        return client._is_elsewhere(experiment, tracking)

    assert not elsewhere(Path(usual.artifacts or ""), usual)
    for folder in (before, named):
        assert elsewhere(folder, usual)
        assert elsewhere(folder, shared)
        assert not elsewhere(folder, server)
        folder.mkdir(parents=True)
    assert elsewhere(before, usual)
    assert not elsewhere(before, shared)
    assert not elsewhere(named, usual)
    (tmp_path / "outputs").symlink_to(before.parent)
    assert not elsewhere(before, usual)
