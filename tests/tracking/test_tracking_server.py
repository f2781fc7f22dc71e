"""MLflow as teams run it: a server that dies, PostgreSQL behind it, several at once. Nothing lost, nothing double."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.schema import Tracking
from sdopt.tracking import client, store
from sdopt.tracking.client import TrackedRun, TrackingError
from sdopt.tracking.runs import log_study
from tests.command import SMOKE, Finished, Process, eventually, fork, sdopt, start
from tests.fakes import fake_workers
from tests.tracking import postgres
from tests.tracking.test_tracking import another

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="mlflow is not installed"
)


class Server:
    """An `mlflow server` on localhost, with its artifacts in a folder; may be killed and started again."""

    def __init__(self, folder: Path, database: str, workers: int) -> None:
        self._folder, self._database, self._workers = folder, database, workers
        self._port = postgres.free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def client(self) -> "MlflowClient":
        from mlflow import MlflowClient

        return MlflowClient(self.url)

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
        ]
        command += [
            "--backend-store-uri",
            self._database,
            "--workers",
            str(self._workers),
        ]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                # Its jobs are of no concern here, and would take eight processes.
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ended = self._process.poll
        eventually(lambda: self._answers() or ended() is not None, 300, pause_s=0.5)
        assert ended() is None, (self._folder / "server.log").read_text()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A study by fake workers: what is logged, and how often, is no matter of what was measured."""
    variants = "{baseline: [], half: ['precision=bf16'], math: ['attention=math'], none: ['precision=tf32']}"
    words = ["study=explicit", "study.name=shared", f"study.variants={variants}"]
    with fake_workers():
        return sdopt(
            tmp_path_factory.mktemp("measured"),
            *("run", *SMOKE, *words, "quality.prompt_count=4"),
            pages=True,
        )


def sync(cwd: Path, url: str, *folders: Path) -> Process:
    return fork(cwd, "sync", *map(str, folders), f"tracking.uri={url}")


def contents(client: "MlflowClient", result: StudyResult) -> dict[str, Any]:
    """Everything that is logged of a study, by the name of its run, without what two stores cannot have in common."""
    experiment = client.get_experiment_by_name(result.name).experiment_id
    runs = client.search_runs([experiment], f"tags.`sdopt.study_id` = '{result.id}'")
    [parent] = [run for run in runs if run.data.tags["sdopt.role"] == "study"]
    found: dict[str, Any] = {}
    for run in runs:
        assert (
            run is parent or run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        )
        assert run.info.run_name not in found
        tags = {
            key: value
            for key, value in run.data.tags.items()
            if key != "mlflow.parentRunId"
        }
        tags = {
            key: value
            for key, value in tags.items()
            if not key.startswith(("mlflow.user", "mlflow.source"))
        }
        tags.pop("mlflow.loggedImages", None)
        found[run.info.run_name] = {
            "tags": tags,
            "params": run.data.params,
            "metrics": run.data.metrics,
            "artifacts": sorted(artifacts(client, run.info.run_id)),
            "status": run.info.status,
        }
    return found


def artifacts(
    client: "MlflowClient", run: str, path: str | None = None
) -> Iterator[str]:
    """Names of all files; an image's without the time and the number that MLflow adds to what tells it apart."""
    for item in client.list_artifacts(run, path):
        if item.is_dir:
            yield from artifacts(client, run, item.path)
        else:
            yield re.sub(r"\+timestamp\+.*?(?=\+compressed|\.png)", "", item.path)


def expected(result: StudyResult, folder: Path, store: Path) -> dict[str, Any]:
    """What is logged to a store that nothing happens to."""
    from mlflow import MlflowClient

    tracking = Tracking(
        uri=f"sqlite:///{store}/expected.db", artifacts=str(store / "expected")
    )
    log_study(result, folder, tracking)
    return contents(MlflowClient(tracking.uri), result)


def until(there: Callable[[], bool], process: Process) -> None:
    assert eventually(lambda: there() or process.popen.poll() is not None, 240)
    assert process.popen.poll() is None, process.finish().shown


@pytest.mark.slow
def test_a_server_that_dies_while_a_study_is_logged(
    finished: Finished, tmp_path: Path
) -> None:
    folder = tmp_path / "outputs" / "study"
    result = another(finished, folder)
    whole = expected(result, folder, tmp_path)
    database = tmp_path / "mlflow.db"
    server = Server(tmp_path, f"sqlite:///{database}", workers=1)

    def runs() -> int:
        with sqlite3.connect(
            f"{database.as_uri()}?mode=ro", uri=True, timeout=60
        ) as connection:
            return int(
                connection.execute(
                    "SELECT count(*) FROM runs WHERE lifecycle_stage = 'active'"
                ).fetchone()[0]
            )

    try:
        server.start()
        for there in (1, 3):
            process = sync(tmp_path, server.url, folder)
            until(lambda there=there: runs() >= there, process)  # type: ignore[misc]
            server.kill()
            ended = process.finish(240)
            assert ended.code == 3, ended.shown
            assert ended.err.startswith(f"sdopt: {server.url}: ")
            assert "Traceback" not in ended.err
            server.start()
        assert 0 < runs() < 5
        first = sync(tmp_path, server.url, folder).finish(240)
        assert (first.code, ": logged as " in first.out) == (0, True), first.shown
        second = sync(tmp_path, server.url, folder).finish(240)
        assert (second.code, ": already logged as " in second.out) == (0, True), (
            second.shown
        )
        assert contents(server.client, result) == whole
        assert runs() == 1 + len(result.variants)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    reason = postgres.missing()
    if reason is None and find_spec("psycopg2") is None:
        reason = "psycopg2 is not installed (it comes with the extra dev)"
    if reason is not None:
        if os.environ.get("SDOPT_REQUIRE_POSTGRES"):
            pytest.fail(reason)
        pytest.skip(reason)
    with postgres.postgres() as address:
        yield address


@pytest.mark.slow
def test_four_processes_at_once_on_postgresql(
    finished: Finished, tmp_path: Path, database: str
) -> None:
    from sqlalchemy import create_engine, text

    folders = [tmp_path / "outputs" / f"study {number}" for number in range(6)]
    results = [another(finished, folder) for folder in folders]
    whole = [
        expected(result, folder, tmp_path)
        for result, folder in zip(results, folders, strict=True)
    ]
    server = Server(tmp_path, database, workers=2)
    try:
        server.start()
        # Three log two studies each that were measured elsewhere; the fourth measures one of its own meanwhile.
        processes = [
            sync(tmp_path, server.url, *folders[first : first + 2])
            for first in (0, 2, 4)
        ]
        own = [
            *SMOKE,
            "workload.steps=1",
            "study.name=own",
            "tracking=mlflow",
            f"tracking.uri={server.url}",
        ]
        processes.append(fork(tmp_path / "outputs", "run", *own))
        ended = [process.finish(500) for process in processes]
        assert [one.code for one in ended] == [0] * 4, [
            one.shown for one in ended if one.code
        ]
        # And again, all of them everything.
        everything = [
            sync(tmp_path, server.url, tmp_path / "outputs") for _ in range(4)
        ]
        ended = [process.finish(500) for process in everything]
        assert [(one.code, one.out.count("already logged")) for one in ended] == [
            (0, 7)
        ] * 4, [one.shown for one in ended]

        for result, logged in zip(results, whole, strict=True):
            assert contents(server.client, result) == logged
        [path] = (tmp_path / "outputs" / "outputs").rglob("result.json")
        measured = read_result(path)
        assert set(contents(server.client, measured)) > {
            row.name for row in measured.variants
        }
        with create_engine(database).connect() as connection:
            runs = connection.execute(text("SELECT count(*) FROM runs")).scalar()
        assert runs == sum(
            1 + len(result.variants) for result in [*results, measured]
        ), "none that was deleted, either"
    finally:
        server.kill()


@pytest.mark.slow
def test_two_processes_at_once_on_sqlite(finished: Finished, tmp_path: Path) -> None:
    """Both also make its schema."""
    from mlflow import MlflowClient

    folders = [tmp_path / "outputs" / f"study {number}" for number in range(4)]
    results = [another(finished, folder) for folder in folders]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    places = [f"tracking.uri={uri}", f"tracking.artifacts={tmp_path}/artifacts"]
    processes = [start(tmp_path, "sync", *map(str, folders), *places) for _ in range(2)]
    ended = [process.finish(500) for process in processes]
    assert [one.code for one in ended] == [0, 0], [one.shown for one in ended]
    said = "".join(one.out for one in ended)
    assert said.count(": logged as ") == said.count(": already logged as ") == 4
    client = MlflowClient(uri)
    for result, folder in zip(results, folders, strict=True):
        assert contents(client, result) == expected(result, folder, tmp_path)
    experiment = client.get_experiment_by_name("shared").experiment_id
    assert len(client.search_runs([experiment])) == 4 * (1 + len(results[0].variants))


def here(tracking: Tracking, function: Any, *arguments: Any) -> Any:
    """A request that this process answers itself, so that a test can change what MLflow does."""
    return client.perform(tracking, 60, lambda: None, function, *arguments)


class TestLocked:
    """A database that somebody else writes for a while."""

    @pytest.fixture
    def local(self, tmp_path: Path) -> Tracking:
        from mlflow import MlflowClient

        tracking = Tracking(
            uri=f"sqlite:///{tmp_path}/mlflow.db",
            artifacts=str(tmp_path / "artifacts"),
            images=False,
        )
        store.ask(client.pages, tracking)  # makes its tables where that is done once
        place = (tmp_path / "artifacts" / "another").as_uri()
        MlflowClient(tracking.uri).create_experiment("another", artifact_location=place)
        return tracking

    def test_is_waited_for(
        self, finished: Finished, tmp_path: Path, local: Tracking
    ) -> None:
        result = another(finished, tmp_path / "study")
        other = sqlite3.connect(
            tmp_path / "mlflow.db", isolation_level=None, check_same_thread=False
        )
        other.execute("BEGIN IMMEDIATE")
        waiting = threading.Timer(0.3, lambda: other.execute("COMMIT"))
        waiting.start()
        try:
            assert log_study(result, tmp_path / "study", local).new
        finally:
            waiting.join()
            other.close()

    def test_is_tried_again_until_the_deadline(
        self, local: Tracking, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SQLite gives up at once where waiting could never end."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        tries, log_batch = iter(range(100)), MlflowClient.log_batch
        monkeypatch.setattr("time.sleep", lambda _: None)

        def locked_once(client: "MlflowClient", *arguments: Any, **named: Any) -> None:
            if next(tries) == 0:
                raise MlflowException("(sqlite3.OperationalError) database is locked")
            log_batch(client, *arguments, **named)

        def failing(said: str) -> Callable[..., None]:
            def fail(*_: Any, **__: Any) -> None:
                raise MlflowException(said)

            return fail

        run = TrackedRun("it", tags={"a": "b"}, parameters={"x": 1})
        monkeypatch.setattr(MlflowClient, "log_batch", locked_once)
        assert here(local, client.put, "another", run, ["tags.a = 'b'"], "digest").new
        monkeypatch.setattr(
            MlflowClient, "log_batch", failing("(IntegrityError) constraint failed: a")
        )
        with pytest.raises(
            TrackingError, match=r"constraint failed: a$"
        ):  # which time does not mend
            here(local, client.put, "another", run, ["tags.a = 'b'"], "another digest")
        monkeypatch.setattr(
            MlflowClient,
            "log_batch",
            failing("(sqlite3.OperationalError) database is locked"),
        )
        with pytest.raises(TrackingError, match="database is locked within 1 s"):
            client.perform(
                local,
                1,
                lambda: None,
                client.put,
                "another",
                run,
                ["tags.a = 'b'"],
                "another digest",
            )
        # What the first one logged is kept, and of the second one nothing is left.
        [left] = MlflowClient(local.uri).search_runs(["1", "2"], "tags.a = 'b'")
        assert left.data.tags["sdopt.digest"] == "digest"

    def test_is_one_store_from_wherever_it_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "below").mkdir()
        (tmp_path / "link").symlink_to("below")
        places = (
            (tmp_path / "below", "m.db"),
            (tmp_path, "below/m.db"),
            (tmp_path, "link/m.db"),
            (tmp_path, "below/../below/m.db"),
        )
        found = set()
        for folder, file in places:
            with chdir(folder):
                found.add(
                    store._located(
                        Tracking(uri=f"sqlite:///{file}", artifacts=None)
                    ).uri
                )
        assert found == {f"sqlite:///{tmp_path}/below/m.db"}
