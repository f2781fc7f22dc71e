"""`sdopt load-test` with fake workers: what it compares, what it says, and what it refuses."""

import asyncio
import json
import math
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdopt.apps.loadtest.charts import page_of
from sdopt.apps.loadtest.command import _log
from sdopt.apps.loadtest.config import load_config
from sdopt.apps.loadtest.record import LoadRecord, LoadRow, Predicted, Replicate
from sdopt.apps.loadtest.report import answer_of, blocks_of, page_table
from sdopt.apps.loadtest.run import LoadTest
from sdopt.apps.loadtest.target import Target
from sdopt.apps.traffic.figures import Window, window_of
from sdopt.apps.traffic.generator import PATH, SendSchedule, Sent, generate
from sdopt.config.composer import composer_of
from sdopt.errors import UsageError
from sdopt.record.records import Status
from sdopt.record.samples import Interference
from sdopt.report.blocks import Chart
from sdopt.report.markdown import written
from sdopt.report.page.html import html_page
from sdopt.schema import Tracking
from sdopt.tracking.client import TrackedRun
from sdopt.variant import Variant
from tests.apps.serving.test_server import Client, during, served  # noqa: F401
from tests.command import SMOKE, Finished, refused, sdopt
from tests.fakes import Fakes, failing

QUICK = ("load.requests=12", "load.limit_s=5", "load.lag_ms=60000")
SMALL = [
    each for each in SMOKE if each.startswith(("hardware", "tracking", "workload.s"))
]


def load_test(cwd: Path, *arguments: str, fakes: Fakes) -> Finished:
    """Runs the command with fake workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sdopt.apps.loadtest.command.WorkerProcess",
            lambda context, device, timeout_s, variant, log, scratch: fakes(
                variant, log, scratch, _none, _none
            ),
        )
        return sdopt(cwd, "load-test", *SMALL, *arguments)


def _none(_: object) -> None:
    pass


class TestTheCommand:
    @pytest.mark.slow
    def test_compares_policies_and_leaves_out_a_row_that_cannot_be_served(
        self, tmp_path: Path
    ) -> None:
        fakes = Fakes({"precision=bf16": failing(Status.OUT_OF_MEMORY)}, render_s=0.02)
        work = (
            "precision=bf16",
            "workload.batch_size=[1,2]",
            "load.replicates=2",
            "load.rates=[40]",
        )
        found = load_test(
            tmp_path, *QUICK, *work, "load.interference=null", fakes=fakes
        )
        assert found.code == 3, found.shown
        assert "precision=bf16, single: not measured to the end" in found.shown
        assert len(fakes.started) == 6, (
            "two policies, two processes of each; those that fail are tried once"
        )
        [path] = (tmp_path / "outputs" / "load" / "load").glob("*/load.json")
        *measured, failed, failed_too = json.loads(path.read_text())["rows"]
        assert [row["name"] for row in measured] == [
            "baseline, single",
            "baseline, greedy",
        ]
        for row in measured:
            assert [len(each["windows"]) for each in row["replicates"]] == [1, 1]
            assert row["service_s"]["1"] >= 0.02
        assert failed["replicates"] == failed_too["replicates"] == []
        assert (path.parent / "load.md").is_file()
        assert (path.parent / "report.html").stat().st_size > 10_000
        assert "of the requests within 5 s" in found.shown
        assert max(len(seeds) for seeds, *_ in fakes.rendered) > 1

    def test_an_address_that_gives_no_image_is_no_slow_server(
        self, tmp_path: Path
    ) -> None:
        found = sdopt(
            tmp_path,
            "load-test",
            "url=http://me:key@127.0.0.1:9",
            "load.rates=[1]",
            "load.limit_s=1",
            "tracking=none",
        )
        assert found.code == 3
        assert (
            "load.url=http://me:***@127.0.0.1:9: a first request got no image (Cannot conn"
            in found.shown
        )

    @pytest.mark.parametrize("status", [0, 503])
    def test_a_server_that_ends_is_said_and_what_was_measured_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
    ) -> None:
        asked: list[SendSchedule] = []

        def answered(schedule: SendSchedule, _started: Any = None) -> list[Sent]:
            asked.append(schedule)
            return [
                Sent(t, t, t + 0.1, 200 if len(asked) < 3 else status, said="gone")
                for t in schedule.times_s
            ]

        monkeypatch.setattr("sdopt.apps.loadtest.run.generate", answered)
        words = [
            "load.rates=[1,2]",
            "load.limit_s=1",
            "load.requests=10",
            "tracking=none",
            f"load.folder={tmp_path}",
        ]
        found = sdopt(tmp_path, "load-test", "url=http://127.0.0.1:9/v1", *words)
        assert found.code == 3
        assert {each.address for each in asked} == {
            "http://127.0.0.1:9/v1/images/generations"
        }
        why = f"status {status}: gone" if status else "gone"
        assert f"a last request got no image ({why})" in found.shown
        [path] = tmp_path.rglob("load.json")
        [row] = json.loads(path.read_text())["rows"]
        assert [len(each["windows"]) for each in row["replicates"]] == [2]

    def test_windows_before_a_signal_are_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []

        def answered(schedule: SendSchedule, _started: Any = None) -> list[Sent]:
            asked.append(len(schedule.times_s))
            if len(asked) == 3:
                raise KeyboardInterrupt
            return [Sent(t, t, t + 0.1, 200) for t in schedule.times_s]

        monkeypatch.setattr("sdopt.apps.loadtest.run.generate", answered)
        words = ["load.rates=[1,2]", "load.limit_s=1", "load.requests=10"]
        words += ["url=http://h", "tracking=none", "load.folder='~/loads'"]
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert sdopt(tmp_path, "load-test", *words).code == 130
        [path] = (tmp_path / "home").rglob("load.json")
        [row] = json.loads(path.read_text())["rows"]
        assert [len(each["windows"]) for each in row["replicates"]] == [1]
        assert row["reason"] == "interrupted"

    @pytest.mark.parametrize(
        ("ends", "code", "reason"),
        [(False, 3, "baseline, single: requests at 4"), (True, 143, "interrupted")],
    )
    def test_what_was_measured_of_a_row_is_kept(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        ends: bool,
        code: int,
        reason: str,
    ) -> None:
        """Where later requests cannot be sent in time, or a signal ends the server."""
        asked: list[float] = []

        def answered(schedule: SendSchedule, started: Any) -> list[Sent]:
            asked.append(schedule.times_s[-1])
            late_s = 0.0 if len(asked) == 1 else 1.0
            if ends and late_s:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)
                late_s = 0.0  # a window that comes after the signal is none
            times = schedule.times_s
            return [Sent(t, t + late_s, t + 0.1 + late_s, 200) for t in times]

        monkeypatch.setattr("sdopt.apps.loadtest.run.generate", answered)
        words = ["serving=single", "load.rates=[40,41]", "load.replicates=1"]
        words += ["load.requests=12", "load.limit_s=5", "load.interference=null"]
        found = load_test(tmp_path, *words, fakes=Fakes())
        assert found.code == code, found.shown
        assert len(asked) == (2 if ends else 4), "each window is sent thrice at most"
        [path] = (tmp_path / "outputs" / "load" / "load").glob("*/load.json")
        [row, *_] = json.loads(path.read_text())["rows"]
        [replicate] = row["replicates"]
        rates = [each["rate"] for each in replicate["windows"]]
        assert rates == [each["rate"] for each in replicate["predicted"]]
        assert len(rates) == 1
        assert row["reason"].startswith(reason)

    @pytest.mark.parametrize(
        ("patience", "sent_in_all", "reason"),
        [
            (10, [1, 10, 1, 1, 10], ""),
            (0, [1, 10], "row 0: has given no image for 0 s, since requests were"),
        ],
    )
    def test_what_was_given_up_is_not_in_the_queue_of_the_next_window(
        self,
        monkeypatch: pytest.MonkeyPatch,
        patience: int,
        sent_in_all: list[int],
        reason: str,
    ) -> None:
        """Some servers go on with the requests of clients that have left."""
        lengths: list[int] = []
        statuses = iter([200, 503, 200])  # a first request, and those that wait

        def answered(schedule: SendSchedule, _started: Any = None) -> list[Sent]:
            lengths.append(len(schedule.times_s))
            if len(schedule.times_s) == 1:
                return [Sent(0, 0, 1, next(statuses))]
            sent = [Sent(t, t, t + 0.1, 200) for t in schedule.times_s]
            sent[3] = replace(sent[3], status=0, done_s=sent[3].sent_s + 60)
            return sent

        monkeypatch.setattr("sdopt.apps.loadtest.run.generate", answered)
        monkeypatch.setattr("sdopt.apps.loadtest.run._PAUSE_S", 0)
        monkeypatch.setattr("sdopt.apps.loadtest.run._CLEARING", patience)
        words = ["load.rates=[1,2]", "load.limit_s=1", "load.requests=10"]
        load, *_ = load_config(["url=http://h", "load.replicates=1", *words])
        found = replace(record([]), limit_s=1.0)
        said: list[str] = []
        test = LoadTest(load, found, None, said.append)
        [row] = found.rows
        test.run_url(row, Target("http://h"), ["a red apple"])
        assert lengths == sent_in_all
        assert len(row.windows) == len(lengths) // 2, "what was measured is kept"
        assert row.reason.startswith(reason)
        assert bool(row.reason) == bool(reason)
        assert "row 0: waiting until it has done what was given up" in said

    def test_a_preset_says_first_what_cannot_be_served_here(
        self, tmp_path: Path
    ) -> None:
        preset = [
            "experiment=lightning_serving",
            "model=emoji",
            "hardware=cpu",
            "tracking=none",
        ]
        found = sdopt(
            tmp_path, "load-test", *preset, "load.duration_s=60", "dry_run=true"
        )
        assert found.code == 0, found.shown
        assert "float32, single: is served" in found.shown
        assert (
            "CUDA graphs, single: cannot be served here: compiler=cuda_graphs: a CUDA graph needs"
            in found.shown
        )
        assert "72 windows, each of 100 requests or more, 60 s or longer" in found.shown
        assert not (tmp_path / "outputs").exists()

    def test_the_rules_of_mlperf(self, tmp_path: Path) -> None:
        (tmp_path / "captions.tsv").write_text(
            "id\tcaption\n1\ta red apple\n2\ta dog\n"
        )
        given = [
            "experiment=mlperf_sdxl_server",
            f"workload.prompts={tmp_path / 'captions.tsv'}",
        ]
        load, policies, others = load_config([*given, "load.replicates=1"])
        assert (load.limit_s, load.early_stopping, load.replicates) == (20, True, 1)
        assert list(policies) == ["single", "greedy"]
        assert [load.count(rate) for rate in (0.5, 1, 2)] == [662, 662, 1201]
        assert others == [*given, "~load"]
        with composer_of(others) as composer:
            [baseline, *_] = composer.current.study.plan(composer).variants
        assert (
            baseline.model.name,
            baseline.workload.steps,
            baseline.guidance_scale,
        ) == ("sdxl", 20, 8)
        assert set(baseline.prompts) == {"a red apple", "a dog"}

    def test_policies_are_compared_once(self) -> None:
        assert list(load_config(["serving=single"])[1]) == ["single"]
        found = load_config(["load.policies=[single,greedy]", "serving=window"])[1]
        assert list(found) == ["single", "greedy", "window of 100 ms"]
        found = load_config(["load.policies=[single,greedy]", "serving.max_batch=2"])[1]
        largest = {name: policy.max_batch for name, policy in found.items()}
        assert largest == {"single": 1, "greedy": None, "greedy up to 2": 2}

    def test_a_preset_is_read_as_it_is_written(self, tmp_path: Path) -> None:
        preset = tmp_path / "experiment" / "mine.yaml"
        preset.parent.mkdir()
        preset.write_text("# @package _global_\nload: {title: \"für 'Q4'\"}")
        load, *_ = load_config(["experiment=mine"], tmp_path)
        assert load.title == "für 'Q4'"

    def test_what_is_late_by_early_stopping_is_fewer(self) -> None:
        found = record([2.0, 4.0, 3.0], [4.2, 8.0, 6.1])
        strict = replace(found, early_stopping=True)
        assert "(at 99 % confidence, by MLPerf's early stopping)" in answer_of(strict)
        assert strict.figures[0].bound == "<", "100 requests are too few to show it"

    @pytest.mark.slow
    def test_sends_a_disturbed_window_again_and_keeps_the_least_disturbed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shares = iter([0.5, 0.2, 0.3, 0.5, 0.01])

        class Meter:
            def __init__(self, pid: int) -> None:
                assert pid == os.getpid(), "that of the worker, which is a fake one"

            def stop(self, seconds: float, own_s: float) -> Interference:
                assert own_s > 0
                return Interference(next(shares), 0.0)

        monkeypatch.setattr("sdopt.apps.loadtest.run.InterferenceMeter", Meter)
        given = (*QUICK, "load.replicates=1", "serving=single", "load.rates=[20,40]")
        found = load_test(tmp_path, *given, fakes=Fakes(render_s=0.02))
        assert found.code == 0, found.shown
        assert found.shown.count("other work took") == 4
        assert (
            "disturbed by other work: 1 of 2 windows, by up to 20 % of the worker's processor time"
            in found.shown
        )
        assert next(shares, None) is None

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                [
                    *(
                        "hardware=cpu",
                        "gate=default",
                        "serving.queue=3",
                        "load.policies=[fast]",
                        "load.ladder=[0]",
                    ),
                    *("load.arrivals=nowhere", "load.early_stopping=true"),
                ],
                [
                    "gate=default: has no effect on a server",
                    "serving.queue=3: has no effect on a load test",
                    "load.policies: unknown policy 'fast'; choose from greedy, single, window",
                    "load.ladder=[0.0]: needs rates above 0",
                    "load.arrivals=nowhere: No such file",
                    "load.requests=100: load.early_stopping needs 459 at least",
                ],
            ),
            (
                ["url=http://x", "precision=bf16"],
                [
                    "load.rates: must be given with load.url",
                    "load.limit_s: must be given with load.url",
                    "precision=bf16: has no effect with load.url",
                ],
            ),
            (
                ["hardware=cpu", "precision=tf32"],
                ["precision=tf32: TensorFloat-32 needs a CUDA device"],
            ),
            (
                ["hardware=cpu", "experiment=mlperf_sdxl_server"],
                ["workload.prompts=captions_source.tsv: "],
            ),
        ],
    )
    def test_mistakes_are_said_at_once(
        self, tmp_path: Path, arguments: list[str], said: list[str]
    ) -> None:
        found = refused(tmp_path, "load-test", *arguments, says=said[0])
        assert [each for each in said if f"sdopt: {each}" not in found.err] == []
        assert not (tmp_path / "outputs").exists()


def window(rate: float, attainment: float, p95_s: float = 0.4) -> Window:
    return Window(
        rate,
        100,
        rate,
        attainment,
        rate * attainment,
        0.3,
        p95_s,
        None,
        0.1,
        0.2,
        1.5,
        0,
        0,
        0.001,
        False,
    )


def record(*most: list[float]) -> LoadRecord:
    """A record of rows whose attainment falls from 1 to 0.98 around a highest rate, one for each replicate."""
    rows = []
    for number, rates in enumerate(most):
        row = LoadRow(
            f"row {number}", f"row {number}", "greedy", {1: 0.2, 4: 0.3}, [1.0, 2.0]
        )
        for replicate, rate in enumerate(rates):
            windows = [window(rate - 0.5, 1.0), window(rate + 0.5, 0.98)]
            row.replicates.append(
                Replicate(
                    replicate, windows, [Predicted(rate - 0.5, 1.0, 0.1, 0.2, 0.3)]
                )
            )
        rows.append(row)
    return LoadRecord(
        "load",
        ["emoji"],
        "now",
        "sdopt load-test",
        100,
        0.99,
        1.5,
        "poisson",
        2.0,
        rows,
    )


def overloaded() -> LoadRecord:
    """Two rows at the same two rates, of which the first one carries the lower; each window has few requests."""
    found = replace(record([2.0], [2.0]), interference=0.05)
    halves = ((1.0, 0.5, 0.25, 1.6), (1.0, 0.4, 1.0, 0.9))
    for row, (first, first_s, second, second_s) in zip(found.rows, halves, strict=True):
        [replicate] = row.replicates
        low = replace(window(1.0, first), requests=12, p50_s=first_s, disturbed=0.7)
        high = replace(window(3.0, second), requests=12, p50_s=second_s, disturbed=0.8)
        replicate.windows = [low, high]
    return found


class TestTheAnswer:
    def test_is_the_ratio_of_the_same_traces(self) -> None:
        found = record([2.0, 4.0, 3.0], [4.2, 8.0, 6.1])
        said = answer_of(found)
        assert re.match(
            r"row 1 carries 2\.04× \[1\.9\d, 2\.1\d\] the requests of row 0 with 99 % ",
            said,
        ), said
        assert found.figures[1].gap == pytest.approx(2)

    def test_does_not_claim_what_the_interval_does_not_show(self) -> None:
        assert "the interval includes 1" in answer_of(
            record([2.0, 4.0, 3.0], [4.2, 3.0, 3.5])
        )
        assert "three replicates or more" in answer_of(record([2.0], [4.0]))
        slower = answer_of(record([2.0, 2.1, 2.0], [1.0, 1.1, 1.0]))
        assert slower.startswith("row 1 carries 0.51× [0.4")
        assert "includes 1" not in slower

    def test_says_what_few_and_disturbed_requests_do_not_show(self) -> None:
        found = overloaded()
        assert answer_of(found) == (
            "Not enough runs to tell: row 1 carries at least 2.92× the requests of row 0 with 99 % of the requests "
            "within 1.5 s: more than 3 instead of 1.03 a second; the rates do not bracket it; three replicates or more "
            "would give an interval; 12 requests at a rate cannot tell 99 % from less, load.requests=100 can; other "
            "work disturbed all windows of row 0 and row 1."
        )
        [alone, _] = found.rows
        assert "12 requests at a rate" in answer_of(replace(found, rows=[alone]))
        thrice = answer_of(record([2.0, 4.0, 3.0], [4.2, 8.0, 6.1]))
        for words in ("Not enough runs", "requests at a rate", "disturbed"):
            assert words not in thrice

    def test_mlflow_compares_rows_at_one_rate(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A chart has neither a place for the rate nor a sign for a bound."""
        logged: list[TrackedRun] = []
        monkeypatch.setattr(
            "sdopt.apps.loadtest.command.ask", lambda *given: logged.append(given[3])
        )
        load, *_ = load_config([])

        def of(found: LoadRecord) -> TrackedRun:
            found.write(tmp_path)
            _log(found, tmp_path, Tracking(tags={"team": "vision"}), load, "")
            return logged.pop()

        shared = overloaded()
        for row in shared.rows:
            row.tags = {"model": "emoji", "caching": row.name}
        run = of(shared)
        slow, quick = run.below
        assert (slow.metrics["load/p50_s"], quick.metrics["load/p50_s"]) == (0.5, 0.4)
        for logged_row in run.below:
            assert logged_row.parameters["rate_per_s"] == "1"
            assert logged_row.parameters["variant"] == logged_row.name
            assert {
                "team": "vision",
                "model": "emoji",
            }.items() <= logged_row.tags.items()
            assert (
                logged_row.tags["sdopt.windows"] == "2 sent, 2 disturbed by up to 80 %"
            )
        assert "load/max_rate_per_s" not in quick.metrics
        assert quick.tags["max_rate"] == "more than 3"
        assert slow.metrics["load/max_rate_per_s"] == pytest.approx(1.03, abs=0.01)
        assert run.parameters["load.limit_s"] == "1.5"
        assert (run.tags["model"], "caching" in run.tags) == ("emoji", False)
        assert run.tags["mlflow.source.name"] == "sdopt load-test"
        assert "metrics.`load/p99_s`" in run.leaderboard
        apart = of(record([2.0], [4.0]))
        for logged_row in apart.below:
            assert "load/p50_s" not in logged_row.metrics
            assert logged_row.metrics["load/at_own_rate/p50_s"] == 0.3
        assert [one.parameters["rate_per_s"] for one in apart.below] == ["1.5", "3.5"]
        assert "metrics.`load/at_own_rate/goodput`" in apart.leaderboard

    def test_of_a_bound_is_none(self) -> None:
        found = record([2.0, 2.0, 2.0], [4.0, 4.0, 4.0])
        for replicate in found.rows[1].replicates:
            replicate.windows[1] = window(4.5, 1.0)
        assert answer_of(found).startswith(
            "row 1 carries at least 2.25× the requests of row 0 with 99 % "
        )
        assert (
            "more than 4.5 instead of 2 [2, 2] a second; the rates do not bracket it"
            in answer_of(found)
        )

    def test_of_a_bound_has_the_figures_at_the_highest_rate(self) -> None:
        """The mean of the logarithm of 8 alone is a little less than that of 8."""
        found = record([7.5])
        [replicate] = found.rows[0].replicates
        replicate.windows = [replace(one, attainment=1.0) for one in replicate.windows]
        [figures] = found.figures
        assert (figures.bound, figures.typical) == (">", 8.0)

    def test_two_bounds_have_no_ratio(self) -> None:
        found = record([2.0, 2.0, 2.0], [4.0, 4.0, 4.0])
        for row in found.rows:
            for replicate in row.replicates:
                replicate.windows[1] = replace(replicate.windows[1], attainment=1.0)
        assert found.figures[1].ratio is None
        assert "cannot be told from these rates" in answer_of(found)
        assert "×" not in written(blocks_of(found))

    def test_rows_that_carry_less_than_a_bound_below_1_carry_no_more(self) -> None:
        found = record([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
        for replicate in found.rows[1].replicates:
            replicate.windows[0] = replace(replicate.windows[0], attainment=0.5)
        assert found.figures[1].ratio_bound == "<"
        assert answer_of(found).endswith("; no other row carries more.")
        found.rows.append(LoadRow("row 2", "row 2", "greedy", reason="it ended"))
        assert answer_of(found).endswith("; no other measured row carries more.")

    def test_a_row_below_a_bound_is_not_the_best(self) -> None:
        found = record([2.0, 2.0, 2.0], [4.0, 4.0, 4.0], [2.2, 2.2, 2.2])
        for replicate in found.rows[1].replicates:
            replicate.windows[0] = replace(replicate.windows[0], attainment=0.5)
        assert found.figures[1].ratio_bound == "<"
        assert answer_of(found).startswith("row 2 carries 1.10×")
        assert "| less than 1.75× |" in written(blocks_of(found))

    def test_the_notes_say_no_more_than_what_was_done(self) -> None:
        ended = record([2.0, 4.0, 3.0], [4.0])
        assert "1 to 3 replicates, each with a fresh" in written(blocks_of(ended))
        once, thrice = record([2.0], [4.0]), record([2.0, 4.0, 3.0])
        assert "intervals" in written(blocks_of(thrice))
        assert "two-sided" in written(blocks_of(thrice))
        assert "two-sided" not in written(blocks_of(once))
        assert "an empty, warm server" in written(blocks_of(once))
        for row in once.rows:
            row.service_s = {}  # a server that is only known by its address
        text = written(blocks_of(once))
        assert "empty" not in text
        assert "no card whose own counter" not in text

    @pytest.mark.parametrize("image_j", [None, 40.0])
    @pytest.mark.parametrize("price_per_hour", [None, 2.0])
    def test_energy_and_cost_are_named_where_they_are_known(
        self, image_j: float | None, price_per_hour: float | None
    ) -> None:
        found = replace(record([2.0], [4.0]), price_per_hour=price_per_hour)
        for row in found.rows:
            for each in row.replicates:
                each.windows = [replace(one, image_j=image_j) for one in each.windows]
        text = written(blocks_of(found))
        shown = re.search("(.*): of the whole device at that rate", text)
        named = {"energy": image_j, "cost": price_per_hour}
        for name, figure in named.items():
            said = shown is not None and name in shown[1]
            assert said == (figure is not None)
            assert (f"{name}: not measured here" in text) == (figure is None)

    def test_says_that_requests_were_refused(self) -> None:
        """A limit of requests in a minute is no capacity, and at the rate that is shown none is refused."""
        limited = record([2.0])
        assert "429" not in written(blocks_of(limited))
        [replicate] = limited.rows[0].replicates
        replicate.windows[1] = replace(replicate.windows[1], rejected=30)
        text = written(blocks_of(limited))
        assert "row 0: 30 of 200 requests were refused (429 or 503)" in text

    def test_says_that_images_were_fetched(self) -> None:
        linked = record([2.0], [4.0])
        assert "links" not in written(blocks_of(linked))
        replicate = linked.rows[1].replicates[0]
        replicate.windows = [
            replace(window, link_s=0.25) for window in replicate.windows
        ]
        assert (
            "row 1 answers with links: an image counts once it is fetched, which takes 0.25 s"
            in written(blocks_of(linked))
        )

    def test_says_that_images_are_repeated(self) -> None:
        cached = record([2.0], [4.0])
        assert "cache" not in written(blocks_of(cached))
        replicate = cached.rows[1].replicates[0]
        replicate.windows = [
            replace(window, repeated=40) for window in replicate.windows
        ]
        said = "Not what was asked for: row 1: 80 of 200 images are the same as another one"
        assert answer_of(cached).startswith(said)
        cached.rows[1].own_seeds = False
        assert "Not what was asked for" not in answer_of(cached)

    def test_says_that_a_lower_rate_was_not_carried(self) -> None:
        """As where a server was started anew in one window."""
        found = record([2.0, 2.0])
        assert "not the rate" not in written(blocks_of(found))
        for replicate in found.rows[0].replicates:
            replicate.windows[0] = replace(replicate.windows[0], attainment=0.5)
            replicate.windows[1] = replace(replicate.windows[1], attainment=1.0)
        text = written(blocks_of(found))
        assert text.count("in time at 1.5/s, but enough at 2.5/s: not the rate") == 1

    def test_says_why_requests_failed(self) -> None:
        found = record([2.0])
        assert "failed" not in written(blocks_of(found))
        [replicate] = found.rows[0].replicates
        why = "status 400: not this prompt"
        replicate.windows[1] = replace(replicate.windows[1], errors=3, why=why)
        text = written(blocks_of(found))
        assert f"3 of 200 requests failed, and count as late; the first: {why}" in text

    def test_claims_seeds_sizes_and_intervals_only_as_they_were(self) -> None:
        found = record([2.0, 4.0, 3.0])
        [row] = found.rows
        assert "pixels" not in written(blocks_of(found))
        for replicate in row.replicates:
            replicate.windows = [
                replace(
                    window,
                    sizes=["32x32"],
                    kinds=["png"],
                    most_images=4,
                )
                for window in replicate.windows
            ]
        assert "its images are png" not in written(blocks_of(found))
        assert answer_of(found).startswith("row 0 carries")
        row.asked_size, row.asked_kind, row.own_seeds = "64x64", "webp", False
        text = written(blocks_of(found))
        assert answer_of(found).startswith("Not what was asked for: row 0: its images")
        assert "its images are png, although requests ask for webp" in text
        assert "32x32 pixels, although requests ask for 64x64" in text
        row.asked_size = row.asked_kind = "auto"
        assert "although requests ask" not in written(blocks_of(found))
        assert "has a seed of its own" not in text
        assert "up to 4 images" in text
        assert "two-sided" in text
        for replicate in row.replicates:
            replicate.windows = [
                replace(window, attainment=1.0) for window in replicate.windows
            ]
        assert "no intervals" in written(blocks_of(found)), "bounds have none"

    def test_is_shown_everywhere(self) -> None:
        found = record([2.0, 4.0, 3.0], [4.2, 8.0, 6.1])
        text = written(blocks_of(found))
        for words in ("row 1", "2.04×", "0.4 s", "1.50", "100 requests per rate"):
            assert words in text
        page = page_of(found)
        assert b"row 1" in html_page(page)
        charts = {
            section.key: chart.views
            for section in page.sections
            for chart in section.blocks
            if isinstance(chart, Chart)
        }
        assert [name for name, _ in charts["latency"]] == ["95th", "50th"], (
            "100 requests give no 99th percentile"
        )
        assert [name for name, _ in charts["parts"]] == ["row 1", "row 0"]
        assert [name for name, _ in charts["batches"]] == [
            "images a second",
            "seconds of a call",
        ]
        assert "goodput" in charts

    def test_stands_in_a_page(self, tmp_path: Path) -> None:
        found = record([2.0, 4.0, 3.0], [4.2, 8.0, 6.1])
        found.write(tmp_path)
        assert LoadRecord.read(tmp_path) == found
        text = page_table(found)
        assert f"**{answer_of(found)}**" in text
        assert "| row 1 |" in text
        (tmp_path / "load.json").write_text("{}")
        with pytest.raises(
            UsageError, match=r"load\.json: is no load test that can be read"
        ):
            LoadRecord.read(tmp_path)

    def test_names_energy_and_cost_or_why_there_is_none(self) -> None:
        found = record([2.0, 4.0, 3.0])
        text = written(blocks_of(found))
        assert "| 0.222 |" in text, "2 an hour, and 2.5 images a second"
        assert text.count("energy: not measured here") == 1
        for replicate in found.rows[0].replicates:
            replicate.windows = [
                replace(each, image_j=30.0) for each in replicate.windows
            ]
        text = written(blocks_of(replace(found, price_per_hour=None)))
        assert "| 30 kJ |" in text
        assert "energy: not" not in text
        assert (
            text.count(
                "cost: not measured here, since hardware.price_per_hour is not given"
            )
            == 1
        )


@pytest.mark.slow
def test_overload_is_refused_and_harms_nobody(served: Variant, tmp_path: Path) -> None:  # noqa: F811
    """Twice the capacity for 20 s: the queue stays short, and what is accepted is as fast as the queue allows."""
    call_s, largest, queue = 0.1, 4, 8
    capacity = largest / call_s
    times = [number / (2 * capacity) for number in range(int(20 * 2 * capacity))]
    figures: list[Any] = []

    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGESIZE"
        )

    async def scenario(client: Client) -> None:
        await client.draw(1)
        before = memory()
        bodies = [
            {"prompt": "a red apple", "seed": number} for number in range(len(times))
        ]
        address = "http://{}:{}".format(*client.address) + PATH
        sent = await asyncio.to_thread(
            generate, SendSchedule(address, times, bodies, 30)
        )
        # Of a busy machine, a call takes longer.
        metrics = dict(
            line.rsplit(" ", 1)
            for line in (await client.get("/metrics"))[1].splitlines()
            if line[0] != "#"
        )
        took_s = float(metrics["sdopt_busy_seconds_total"]) / float(
            metrics["sdopt_call_images_count"]
        )
        worst_s = 1.1 * (math.ceil(queue / largest) + 1) * took_s + 0.05
        figures.extend(
            [
                sent,
                window_of(sent, 2 * capacity, worst_s, 0.02),
                memory() - before,
                took_s,
                worst_s,
            ]
        )

    during(scenario, served, tmp_path, Fakes(render_s=call_s), queue=queue)
    sent, found, grown, took_s, worst_s = figures
    assert {each.status for each in sent} == {200, 429}, {each.said for each in sent}
    accepted = [each.latency_s for each in sent if each.status == 200]
    assert call_s <= took_s <= 1.2 * call_s
    assert np.quantile(accepted, 0.99) <= worst_s
    assert found.goodput >= 0.9 * largest / took_s
    assert grown < 32 * 2**20
