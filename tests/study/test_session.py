"""How a study is orchestrated: schedules, statuses, memory that runs out, rounds that others disturb, what broke off.

All of it with fake workers, and a fake meter.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from PIL import Image

from sdopt.errors import UsageError
from sdopt.record.files import read_result
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import Interference
from sdopt.report.summary import summary_of
from sdopt.report.sweep import exit_code
from sdopt.report.tables import ranking, shapes_table
from sdopt.statistics.disturbance import count_rounds
from sdopt.study.designs import CONTROL, Plan
from sdopt.study.fingerprint import inputs_of, of_model
from sdopt.study.resume import merge_resumed, missing_of
from sdopt.tracking.contents import study_tags
from sdopt.worker.machine import Machine
from sdopt.worker.protocol import WorkerError
from tests.fakes import Fakes, FakeWorker, Fault, failing, fake_study, run_fake
from tests.records import known


class Meter:
    """Counts as the kernel would that took half of the processor from some calls of a study, by their number."""

    disturbed: frozenset[int] = frozenset()
    off = ""
    calls = 0

    def __init__(self, pid: int) -> None:
        assert pid > 1

    def stop(self, seconds: float) -> Interference | None:
        assert seconds > 0
        type(self).calls += 1
        return (
            None
            if self.off
            else Interference(0.5 if self.calls in self.disturbed else 0.0, 0.0)
        )


@pytest.fixture(autouse=True)
def meter(monkeypatch: pytest.MonkeyPatch) -> type[Meter]:
    made = type("MeterOfOneTest", (Meter,), {})
    monkeypatch.setattr("sdopt.study.rounds.InterferenceMeter", made)
    return made


def calls_of(result: StudyResult) -> dict[str, list[tuple[int, int, int]]]:
    """By variant, the session, the replicate and the number of timed calls of each process."""
    return {
        row.name: [
            (m.session, m.replicate, len(m.shapes[0].calls)) for m in row.measurements
        ]
        for row in result.variants
    }


def statuses(result: StudyResult) -> dict[str, str]:
    return {row.name: str(row.status) for row in result.variants}


class TestInterleaved:
    def test_each_process_is_timed_once_a_round(self, tmp_path: Path) -> None:
        result, fakes = run_fake(
            tmp_path, fake_study(["a", "b"], rounds=3, replicates=2, warmup=1)
        )
        assert set(statuses(result).values()) == {"ok"}
        assert calls_of(result) == {
            name: [(0, 0, 3), (0, 1, 3)] for name in ("baseline", "a", "b", CONTROL)
        }
        assert len(fakes.started) == 8
        assert not any(worker.alive for worker in fakes.started)
        assert read_result(tmp_path) == result

    def test_each_round_has_an_order_of_its_own_and_the_same_one_every_time(
        self, tmp_path: Path
    ) -> None:
        names = ("baseline", "a", "b", "c", CONTROL)
        orders = []
        for folder in (tmp_path / "1", tmp_path / "2"):
            folder.mkdir()
            _, fakes = run_fake(folder, fake_study(["a", "b", "c"], rounds=6))
            timed = fakes.called[
                2 * len(names) :
            ]  # after the first and the discarded calls
            orders.append(
                [
                    tuple(timed[start : start + len(names)])
                    for start in range(0, len(timed), len(names))
                ]
            )
        assert orders[0] == orders[1]
        assert all(len(set(order)) == len(names) for order in orders[0])
        assert len(set(orders[0])) > 1

    def test_prompts_are_the_same_for_all_variants_and_differ_between_calls(
        self, tmp_path: Path
    ) -> None:
        of = {"workload": {"prompt_count": 20}}
        study = fake_study(["a"], of, rounds=2, replicates=2, warmup=1)
        prompts = tuple(f"prompt {number}" for number in range(20))
        plan = study[0]
        for variant in plan.variants:
            object.__setattr__(variant, "prompts", prompts)
        _, fakes = run_fake(tmp_path, study)
        by_replicate: dict[str, set[tuple[tuple[int, int], ...]]] = {}
        for worker in fakes.started:
            by_replicate.setdefault(worker.log.stem[-1], set()).add(tuple(worker.given))
        # The control and the baseline are the same variant: both replicates gave all variants the same batches.
        [first], [second] = by_replicate["0"], by_replicate["1"]
        assert len({*first, *second}) == len(first) + len(second) == 2 * 4

    def test_nothing_is_timed_after_the_profiler_has_looked(
        self, tmp_path: Path
    ) -> None:
        """It stays with a process on a GPU, whose launches are slower from then on."""
        _, fakes = run_fake(
            tmp_path, fake_study(rounds=2, warmup=1, stage_calls=1, energy_s=5.0)
        )
        first = fakes.started[0].requests
        assert first[:2] == ["hello", "prepare"]
        asked = [
            name for name in dict.fromkeys(first[2:]) if name != "count_operations"
        ]  # once for all of the same work
        assert asked == [
            "time_once",
            "memory_so_far",
            "measure_energy",
            "generate",
            "time_stages",
            "prove",
        ]
        assert first.count("prove") == 1
        assert first.index("memory_so_far") > max(
            i for i, name in enumerate(first) if name == "time_once"
        )

    def test_a_worker_that_compiled_a_package_is_replaced_by_one_that_loads_it(
        self, tmp_path: Path
    ) -> None:
        """What compiling leaves in memory is in no later process."""
        compiled: list[FakeWorker] = []

        def compiles(worker: FakeWorker, name: str) -> None:
            if name == "time_once" and not compiled:
                compiled.append(worker)
                worker.graphs = worker.packages = 1

        def loads(worker: FakeWorker, name: str) -> None:
            worker.earlier_s = 30.0 if name == "time_once" else 0.0

        result, fakes = run_fake(
            tmp_path,
            fake_study(["it", "later"], rounds=2),
            Fakes({"it": compiles, "later": loads}),
        )
        of_it = [worker for worker in fakes.started if worker.variant.name == "it"]
        assert [worker.log for worker in of_it] == [of_it[0].log] * 2
        assert of_it[0].requests == ["hello", "prepare", "time_once"]
        [measured] = result.variant("it").measurements
        assert measured.shapes[0].graphs == 1
        assert measured.shapes[0].compile_s
        assert measured.shapes[0].earlier_compile_s is None
        assert len(measured.shapes[0].calls) == 2
        # What an earlier run compiled is counted all the same.
        assert (
            result.variant("later").measurements[0].shapes[0].earlier_compile_s == 30.0
        )

    def test_names_that_differ_in_signs_alone_keep_their_files_apart(
        self, tmp_path: Path
    ) -> None:
        result, fakes = run_fake(
            tmp_path, fake_study(["a b", "a-b", "ä", "ö"], rounds=1)
        )
        paths = [record.path for row in result.variants for record in row.images]
        assert (
            len(paths) == len(set(paths)) == 5 + 1
        )  # no scores, so the control draws as well
        assert len({worker.log for worker in fakes.started}) == 6

    def test_images_that_are_broken_at_a_further_shape_alone_are_told(
        self, tmp_path: Path
    ) -> None:
        """Half precision may overflow at the larger size, of which the quality pass makes no image."""
        sizes = {"workload": {"size": [32, 64]}}
        result, _ = run_fake(
            tmp_path, fake_study(["it"], sizes, rounds=2), Fakes(black=["it"])
        )
        row = result.variant("it")
        [trip] = row.trips_at_shapes
        assert (trip.wire, trip.path) == ("non_finite at 64×64", "64x64b1")
        row.trips = row.trips_at_shapes  # the quality pass found nothing
        [told] = [row for row in summary_of(result).rows if row.name == "it"]
        assert not told.recommended
        assert told.because == "images are broken: non_finite at 64×64"
        assert not result.baseline_variant.trips

    def test_every_shape_is_called_first_warmed_up_timed_and_shown(
        self, tmp_path: Path
    ) -> None:
        def compiles(worker: FakeWorker, name: str) -> None:
            first = 1, 3  # one warm-up call is between the first calls at each shape
            worker.graphs = int(
                name == "time_once" and worker.requests.count(name) in first
            )

        study = fake_study(
            ["it"], {"workload": {"size": [32, 64]}}, rounds=2, warmup=2, stage_calls=1
        )
        result, _ = run_fake(tmp_path, study, Fakes({"it": compiles}))
        for row in result.variants:
            [measured] = row.measurements
            for samples in measured.shapes:
                found = (
                    len(samples.warmup_s),
                    len(samples.discarded_s),
                    len(samples.calls),
                )
                assert found == (1, 1, 2)
                assert samples.cold_start_s
                assert samples.memory
                assert samples.evidence
                compiled = (1, 0, 0.1) if row.name == "it" else (None, None, None)
                assert (
                    samples.graphs,
                    samples.recompiles,
                    samples.compile_s,
                ) == compiled
            assert len(measured.stages_s["denoiser_step"]) == 1, "at the main shape"
        assert all(
            edge.speedup
            for comparison in result.comparisons
            for edge in comparison.shapes
        )
        assert not missing_of(result).variants, "to resume it measures nothing again"
        assert "speed-up, 64×64, batch 1" in ranking(summary_of(result)).headings
        assert known(shapes_table(summary_of(result))).rows[1][5] == "1 graph, 100 ms"


class TestBlocks:
    def test_the_baseline_is_measured_around_each_block(self, tmp_path: Path) -> None:
        result, fakes = run_fake(
            tmp_path, fake_study(["a"], rounds=2, schedule="blocks")
        )
        assert (result.schedule.kind, result.schedule.reason) == (
            "blocks",
            "protocol.schedule=blocks",
        )
        assert calls_of(result) == {
            "baseline": [(0, 0, 6)],
            "a": [(0, 0, 2)],
            CONTROL: [(0, 0, 2)],
        }
        around = result.variant("baseline").measurements[0].shapes[0].latency_s
        control, a = (
            result.variant(name).measurements[0].shapes[0] for name in (CONTROL, "a")
        )
        assert (
            control.latency_before_s + control.latency_after_s + a.latency_after_s
            == around
        )
        assert a.latency_before_s == control.latency_after_s
        assert len(result.schedule.drift) == 2
        assert all(edge.shapes[0].speedup is not None for edge in result.comparisons)
        # No round is discarded right after a warm-up, and there is never more than one process.
        assert not any(
            m.shapes[0].discarded_s for row in result.variants for m in row.measurements
        )
        assert all(worker.beside < 1 for worker in fakes.started)

    def test_a_baseline_that_fails_between_two_of_them_ends_the_study(
        self, tmp_path: Path
    ) -> None:
        started = itertools.count()

        def dies_later(worker: FakeWorker, name: str) -> None:
            if (
                name == "hello"
                and "00-baseline" in worker.log.stem
                and next(started) == 2
            ):
                raise WorkerError(Status.KILLED, "gone")

        result, _ = run_fake(
            tmp_path,
            fake_study(["a"], rounds=2, schedule="blocks"),
            Fakes({"baseline": dies_later}),
        )
        assert statuses(result) == {
            "baseline": "killed",
            "a": "interrupted",
            CONTROL: "interrupted",
        }
        assert not any(edge.shapes[0].speedup for edge in result.comparisons)

    def test_say_how_far_the_baseline_drifted_meanwhile(self, tmp_path: Path) -> None:
        """Each process of it, and of the control, which is the same variant, is a tenth slower than the one before."""
        seconds = {"baseline": 0.1}

        def slower(_worker: FakeWorker, name: str) -> None:
            if name == "hello":
                seconds["baseline"] *= 1.1

        study = fake_study(["a"], rounds=8, schedule="blocks")
        result, _ = run_fake(tmp_path, study, Fakes({"baseline": slower}, seconds))
        assert sorted(result.schedule.drift.values()) == [
            pytest.approx(1.1, rel=0.03),
            pytest.approx(1.21, rel=0.03),
        ]


class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "calls"),
        [
            (failing(Status.OUT_OF_MEMORY), 0),
            (failing(Status.FAILED, "time_once", call=2 + 3), 2),
        ],
        ids=["at once", "in the third round"],
    )
    def test_of_the_baseline_end_the_study_and_are_its_answer(
        self, tmp_path: Path, fault: Fault, calls: int
    ) -> None:
        def of_baseline(worker: FakeWorker, name: str) -> None:
            if "00-baseline" in worker.log.stem:
                fault(worker, name)

        study = fake_study(["a", "b"], rounds=9, warmup=1)
        result, fakes = run_fake(tmp_path, study, Fakes({"baseline": of_baseline}))
        baseline = result.variant("baseline")
        assert baseline.status.failure
        assert result.status == "finished"
        assert {statuses(result)[name] for name in ("a", "b", CONTROL)} == {
            "interrupted"
        }
        assert (
            max(
                (count for of in calls_of(result).values() for *_, count in of),
                default=0,
            )
            <= calls + 1
        )
        assert not any(worker.alive for worker in fakes.started)
        assert result.floor is None
        assert not any(edge.shapes[0].speedup for edge in result.comparisons)
        summary = summary_of(result)
        assert "the baseline" in summary.sentence
        assert baseline.reason in summary.sentence
        assert not summary.notes, "on a gate for images that there are none of"
        assert ("study.baseline=" in summary.sentence) == (
            baseline.status is Status.OUT_OF_MEMORY
        )
        with pytest.raises(UsageError, match="retry_failed=true"):
            merge_resumed(
                read_result(tmp_path), study[1], study[0], tmp_path, retry_failed=False
            )
        plan, fresh, machine = fake_study(["a", "b"], rounds=9, warmup=1)
        again, _ = run_fake(
            tmp_path,
            (
                plan,
                merge_resumed(read_result(tmp_path), fresh, plan, tmp_path, True),
                machine,
            ),
        )
        assert set(statuses(again).values()) == {"ok"}
        assert all(edge.shapes[0].speedup for edge in again.comparisons)

    @pytest.mark.parametrize(
        ("fault", "status"),
        [
            (failing(Status.FAILED), "failed"),
            (failing(Status.KILLED, "hello"), "killed"),
            (failing(Status.TIMEOUT, "time_once", call=3), "timeout"),
            (failing(Status.OUT_OF_MEMORY), "out_of_memory"),
            (failing(Status.FAILED, "memory_so_far"), "failed"),
            # What is no timing fails no variant: it is noted, and without evidence the option is not credited.
            (failing(Status.FAILED, "prove"), "not_engaged"),
            (failing(Status.KILLED, "prove"), "killed"),
        ],
    )
    def test_end_one_variant_and_no_other(
        self, tmp_path: Path, fault: Fault, status: str
    ) -> None:
        study = fake_study(["it", "sound"], rounds=3, replicates=2, warmup=1)
        result, fakes = run_fake(tmp_path, study, Fakes({"it": fault}))
        assert result.status == "finished"
        assert statuses(result) == {
            "baseline": "ok",
            "it": status,
            "sound": "ok",
            CONTROL: "ok",
        }
        assert result.variant("it").reason
        assert exit_code(tmp_path) == 3
        assert not any(worker.alive for worker in fakes.started)
        compared = {
            edge.candidate: edge.shapes[0].speedup is not None
            for edge in result.comparisons
        }
        assert compared == {
            "it": result.variant("it").status.measured,
            "sound": True,
            CONTROL: True,
        }


@pytest.mark.parametrize("threads", [1, 2], ids=["at once", "one after the other"])
def test_processes_of_one_variant_that_fail_beside_each_other_are_one_failure(
    tmp_path: Path, threads: int
) -> None:
    """In the discarded round, in which this seed makes a pair of two of them, on two cores."""
    study = fake_study(
        ["it"],
        {"hardware": {"threads": threads}},
        rounds=1,
        replicates=3,
        shuffle_seed=4,
    )
    result, _ = run_fake(
        tmp_path, study, Fakes({"it": failing(Status.FAILED, "time_once", call=2)})
    )
    assert statuses(result) == {"baseline": "ok", "it": "failed", CONTROL: "ok"}
    assert result.variant("it").reason == "failed in time_once 2"


@pytest.mark.parametrize("variant", ["baseline", "it"])
def test_a_variant_whose_files_change_while_the_study_runs_fails(
    tmp_path: Path, variant: str
) -> None:
    """A model that is trained on under its name would be another one for each process."""
    image = tmp_path / "image.png"
    Image.new("RGB", (64, 64)).save(image)
    task = {"task": {"kind": "img2img", "image": str(image)}}
    study = fake_study(["it"], task, rounds=1, replicates=1)
    plan, result, _ = study
    for row, of_row in zip(
        result.variants, [*plan.variants, plan.baseline], strict=True
    ):
        row.inputs = inputs_of(of_row, of_model)

    def replaced(_worker: FakeWorker, name: str) -> None:
        if name == "prepare":
            Image.new("RGB", (64, 64), "red").save(image)

    result, _ = run_fake(tmp_path, study, Fakes({variant: replaced}))
    assert result.variant(variant).status is Status.FAILED
    said = result.variant(variant).reason
    assert "the contents of its image changed while the study ran" in said
    # Without a baseline nothing is compared.
    left = {"baseline": ("it", Status.INTERRUPTED), "it": ("baseline", Status.OK)}
    other, status = left[variant]
    assert result.variant(other).status is status


class TestMemory:
    OUT = Status.OUT_OF_MEMORY

    def test_that_does_not_suffice_for_all_at_once_makes_blocks(
        self, tmp_path: Path
    ) -> None:
        result, _ = run_fake(tmp_path, fake_study(rounds=2, memory_fraction=1e-9))
        assert result.schedule.kind == "blocks"
        assert "exceed" in result.schedule.reason
        assert set(statuses(result).values()) == {"ok"}

    def test_that_runs_out_beside_others_makes_blocks(self, tmp_path: Path) -> None:
        result, _ = run_fake(
            tmp_path,
            fake_study(rounds=2),
            Fakes({"it": failing(self.OUT, beside=True)}),
        )
        assert statuses(result) == {"baseline": "ok", "it": "ok", CONTROL: "ok"}
        assert result.schedule.kind == "blocks"
        assert (
            "while 2 other processes were in memory, perhaps for lack of memory"
            in result.schedule.reason
        )
        # What broke off before its first round is as if it had not been.
        assert [session.schedule for session in result.sessions] == ["blocks"]
        assert calls_of(result)["it"] == [(0, 0, 2)]

    def test_that_runs_out_within_the_rounds_makes_the_rest_blocks(
        self, tmp_path: Path
    ) -> None:
        fault = failing(self.OUT, "time_once", call=2 + 3, beside=True)
        result, _ = run_fake(
            tmp_path, fake_study(rounds=4, warmup=1), Fakes({"it": fault})
        )
        assert ", in round 3" in result.schedule.reason
        assert [session.schedule for session in result.sessions] == [
            "interleaved",
            "blocks",
        ]
        assert set(statuses(result).values()) == {"ok"}
        # Two rounds were whole; the block makes up for the other two.
        assert calls_of(result)["it"] == [(0, 0, 2), (1, 0, 2)]
        [speedup] = [
            edge.shapes[0].speedup
            for edge in result.comparisons
            if edge.candidate == "it"
        ]
        assert speedup is not None
        assert speedup.n == 4

    def test_that_runs_out_for_evidence_keeps_all_rounds(self, tmp_path: Path) -> None:
        result, _ = run_fake(
            tmp_path,
            fake_study(rounds=2),
            Fakes({"it": failing(self.OUT, "prove", beside=True)}),
        )
        assert set(statuses(result).values()) == {"ok"}
        assert [session.schedule for session in result.sessions] == [
            "interleaved",
            "blocks",
        ]
        assert calls_of(result)["it"] == [(0, 0, 2), (1, 0, 0)]

    def test_that_never_suffices_for_one_leaves_the_others_interleaved(
        self, tmp_path: Path
    ) -> None:
        result, _ = run_fake(
            tmp_path,
            fake_study(["hopeless", "sound"], rounds=2),
            Fakes({"hopeless": failing(self.OUT)}),
        )
        assert result.schedule.kind == "interleaved"
        assert statuses(result) == {
            "baseline": "ok",
            "hopeless": "out_of_memory",
            "sound": "ok",
            CONTROL: "ok",
        }
        assert "other processes" not in result.variant("hopeless").reason
        assert calls_of(result)["sound"] == [(0, 0, 2)]

    def test_that_runs_out_for_good_within_the_rounds_leaves_the_others_interleaved(
        self, tmp_path: Path
    ) -> None:
        fault = failing(self.OUT, "time_once", call=2 + 3)
        started = itertools.count()

        def later(worker: FakeWorker, name: str) -> None:
            if name == "hello" and next(started):
                raise WorkerError(self.OUT, "not even alone")
            fault(worker, name)

        result, _ = run_fake(
            tmp_path,
            fake_study(["late", "sound"], rounds=4, warmup=1),
            Fakes({"late": later}),
        )
        assert statuses(result) == {
            "baseline": "ok",
            "late": "out_of_memory",
            "sound": "ok",
            CONTROL: "ok",
        }
        assert [session.schedule for session in result.sessions] == [
            "interleaved",
            "interleaved",
        ]
        assert sum(count for _, _, count in calls_of(result)["sound"]) in (4, 5)

    def test_with_a_fixed_schedule_is_a_result(self, tmp_path: Path) -> None:
        study = fake_study(rounds=3, warmup=1, schedule="interleaved")
        result, _ = run_fake(
            tmp_path,
            study,
            Fakes({"it": failing(self.OUT, "time_once", call=4, beside=True)}),
        )
        assert result.variant("it").status is Status.OUT_OF_MEMORY
        assert (
            "2 other processes were in memory: try protocol.schedule=blocks"
            in result.variant("it").reason
        )

    def test_of_a_variant_that_was_measured_before_does_not_go_on_forever(
        self, tmp_path: Path
    ) -> None:
        plan, result, machine = fake_study(["it", "new"], rounds=2)
        run_fake(tmp_path, (plan, result, machine))
        row = result.variant("new")
        row.status, row.measurements = Status.PENDING, []
        # The variant that the missing one is compared with fails when it is timed again.
        result.comparisons[1].reference = "it"
        run_fake(tmp_path, (plan, result, machine), Fakes({"it": failing(self.OUT)}))
        assert result.variant("it").status is Status.OK
        assert "when timed again" in result.variant("it").reason
        assert result.sessions[-1].schedule == "blocks"


class TestMissing:
    @staticmethod
    def resumed(
        folder: Path, rounds: int = 2, replicates: int = 1
    ) -> tuple[StudyResult, Fakes]:
        """Goes on as `sdopt run resume=… retry_failed=true` does."""
        plan, fresh, machine = fake_study(
            ["a", "b"], rounds=rounds, replicates=replicates
        )
        merged = merge_resumed(
            read_result(folder), fresh, plan, folder, retry_failed=True
        )
        return run_fake(folder, (plan, merged, machine))

    @pytest.mark.parametrize("call", [1, 3, 4, 6])
    def test_after_an_end_at_any_call_loses_the_round_under_way_at_most(
        self, tmp_path: Path, call: int
    ) -> None:
        def ends(worker: FakeWorker, name: str) -> None:
            if name in ("time_once", "prove", "generate") and next(count) == call:
                raise KeyboardInterrupt

        count = itertools.count(1)
        with pytest.raises(KeyboardInterrupt):
            run_fake(
                tmp_path,
                fake_study(["a", "b"], rounds=2, replicates=1),
                Fakes({"a": ends}),
            )
        before = calls_of(read_result(tmp_path))
        result, _ = self.resumed(tmp_path)
        assert set(statuses(result).values()) == {"ok"}
        after = calls_of(result)
        for name, processes in before.items():
            assert after[name][: len(processes)] == processes
        assert all(
            edge.shapes[0].speedup.n >= 2
            for edge in result.comparisons
            if edge.shapes[0].speedup
        )
        assert all(edge.shapes[0].speedup for edge in result.comparisons)
        assert missing_of(result).variants == frozenset()

    def test_calls_that_were_not_compared_before_the_end_are_by_another_one(
        self, tmp_path: Path
    ) -> None:
        def ends(worker: FakeWorker, name: str) -> None:
            if name == "generate":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_fake(
                tmp_path,
                fake_study(["a", "b"], rounds=2, replicates=2),
                Fakes({"a": ends}),
            )
        result, _ = self.resumed(tmp_path, replicates=2)
        for row in result.variants:
            compared = {
                m.replicate
                for m in row.measurements
                for i in m.shapes[0].timed_images
                if i.error is not None
            }
            assert compared == {0, 1}, row.name

    def test_rounds_are_added(self, tmp_path: Path) -> None:
        run_fake(tmp_path, fake_study(["a", "b"], rounds=2, replicates=1))
        result, _ = self.resumed(tmp_path, rounds=3)
        assert all(
            processes == [(0, 0, 2), (1, 0, 1)]
            for processes in calls_of(result).values()
        )
        assert set(statuses(result).values()) == {"ok"}

    def test_of_a_precision_whose_budget_was_spent_is_nothing_until_there_is_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def study(
            replicates: int, budget_s: float
        ) -> tuple[Plan, StudyResult, Machine]:
            return fake_study(
                rounds=2, replicates=replicates, precision=0.0001, budget_s=budget_s
            )

        result, _ = run_fake(tmp_path, study(3, 1e-9))
        assert len(result.sessions) == 1
        assert known(result.precision).stopped == "protocol.budget_s=1e-09 was spent"
        assert not missing_of(result).variants
        plan, fresh, machine = study(5, 1e-9)
        with pytest.raises(
            UsageError,
            match=r"protocol\.replicates: cannot change in a study with protocol\.precision",
        ):
            merge_resumed(result, fresh, plan, tmp_path, retry_failed=False)
        monkeypatch.setattr(
            "sdopt.study.run.processes_needed", lambda result: {"it": 4}
        )
        plan, fresh, machine = study(3, 9999)
        run_fake(
            tmp_path,
            (
                plan,
                merge_resumed(result, fresh, plan, tmp_path, retry_failed=False),
                machine,
            ),
        )
        assert all(
            [m[:2] for m in calls] == [(0, 0), (0, 1), (0, 2), (1, 3)]
            for calls in calls_of(result).values()
        )
        assert known(result.precision).stopped == ""


class TestImages:
    """A pass over the images that fails costs no timings, nor does the control, which draws in larger batches."""

    QUALITY: ClassVar = {
        "metrics": True,
        "prompt_count": 4,
        "floor_prompts": 4,
        "batch_size": 1,
    }

    def run(self, folder: Path, faults: Mapping[str, Fault]) -> StudyResult:
        study = fake_study(["it"], {"quality": self.QUALITY}, rounds=2)
        for variant in study[0].variants:
            object.__setattr__(variant, "pictured", ("a", "b", "c", "d"))
        result, _ = run_fake(folder, study, Fakes(faults))
        assert set(statuses(result).values()) == {"ok"}
        assert result.schedule.kind == "interleaved"
        return result

    def limited(self, folder: Path, largest: int, status: Status) -> StudyResult:
        def fault(worker: FakeWorker, name: str) -> None:
            if worker.draw is not None and worker.draw.batch_size > largest:
                raise WorkerError(status, "too many at once")

        return self.run(folder, {"baseline": fault})

    def test_times_of_a_pass_that_is_not_whole_are_left_out(
        self, tmp_path: Path
    ) -> None:
        result = self.run(tmp_path, {"it": failing(Status.FAILED, "generate", call=2)})
        drawn = {
            row.name: (
                len(row.images),
                len(row.measurements[0].pass_s),
                len(row.measurements[0].pass_held_gib),
            )
            for row in result.variants
            if not row.is_control
        }
        assert drawn == {"baseline": (4, 4, 4), "it": (3, 0, 0)}

    def test_are_drawn_in_smaller_batches(self, tmp_path: Path) -> None:
        result = self.limited(tmp_path, 2, Status.OUT_OF_MEMORY)
        assert {kind: len(records) for kind, records in result.redrawn.items()} == {
            "numerical": 4,
            "sampling": 4,
        }
        again = "the baseline, computed in another order: drawn in smaller batches; in batches of 4: "
        assert again in result.variants[-1].reason

    @pytest.mark.parametrize(
        ("status", "tried"), [(Status.OUT_OF_MEMORY, [4, 2]), (Status.KILLED, [4])]
    )
    def test_are_left_out(
        self, tmp_path: Path, status: Status, tried: list[int]
    ) -> None:
        result = self.limited(tmp_path, 1, status)
        assert set(result.redrawn) == {"sampling"}
        reason = result.variants[-1].reason
        assert "the baseline, computed in another order: not drawn; " in reason
        assert [size for size in (4, 2) if f"in batches of {size}: " in reason] == tried


class TestDisturbedRounds:
    """Rounds that other work on the machine disturbs: timed again, left out on all sides, and counted."""

    @staticmethod
    def left_out(result: StudyResult, variant: str) -> list[int]:
        [measured] = result.variant(variant).measurements
        return [call.round for call in measured.shapes[0].calls if call.left_out]

    def test_are_timed_again_and_left_out_on_all_sides(
        self, tmp_path: Path, meter: type[Meter]
    ) -> None:
        meter.disturbed = frozenset(
            {2}
        )  # in the first of two rounds of three processes
        result, _ = run_fake(tmp_path, fake_study(rounds=2, interference=0.02))
        for row in result.variants:
            assert calls_of(result)[row.name] == [(0, 0, 3)]
            assert self.left_out(result, row.name) == [0]
            samples = row.measurements[0].shapes[0]
            assert samples.deciding_s == samples.latency_s[1:]
        assert result.comparisons[0].shapes[0].speedup is not None
        assert result.comparisons[0].shapes[0].speedup.n == 2

    @pytest.mark.parametrize(
        ("clean", "extra"), [({4, 5, 6}, 1), ({1, 2, 3, 7, 8, 9}, 1), ({7, 8, 9}, 2)]
    )
    def test_are_timed_again_until_one_is_disturbed_again_and_no_more_often_than_allowed(
        self, tmp_path: Path, meter: type[Meter], clean: set[int], extra: int
    ) -> None:
        """`clean` are calls: of three processes, one round each."""
        meter.disturbed = frozenset(range(100)) - clean
        result, _ = run_fake(
            tmp_path, fake_study(rounds=2, interference=0.02, extra_rounds=2)
        )
        for name in ("baseline", "it", CONTROL):
            assert calls_of(result)[name] == [(0, 0, 2 + extra)]

    def test_that_decide_anyway_are_counted(
        self, tmp_path: Path, meter: type[Meter]
    ) -> None:
        meter.disturbed = frozenset(range(100)) - {
            4,
            5,
            6,
        }  # only the second round is clean
        result, _ = run_fake(
            tmp_path, fake_study(rounds=2, interference=0.02, extra_rounds=2)
        )
        for name in ("baseline", "it", CONTROL):
            assert self.left_out(result, name) == [2]
        counts = known(count_rounds(result))
        assert (counts.timed, counts.disturbed, counts.left_out, counts.undecided) == (
            3,
            2,
            1,
            1,
        )
        assert study_tags(summary_of(result))["sdopt.disturbed"] == "true"

    def test_of_a_block_are_its_own(self, tmp_path: Path, meter: type[Meter]) -> None:
        meter.disturbed = frozenset({1})  # of the baseline, before the first block
        result, _ = run_fake(
            tmp_path, fake_study([], rounds=2, interference=0.02, schedule="blocks")
        )
        assert self.left_out(result, "baseline") == [0]
        assert self.left_out(result, CONTROL) == []
        [baseline], [control] = (
            result.variant(name).measurements for name in ("baseline", CONTROL)
        )
        assert control.shapes[0].latency_before_s == baseline.shapes[0].latency_s[1:3]
        assert len(baseline.shapes[0].latency_s) == 5

    def test_are_not_known_where_the_kernel_does_not_count(
        self, tmp_path: Path, meter: type[Meter]
    ) -> None:
        meter.off = "interference is not recorded here"
        result, _ = run_fake(tmp_path, fake_study(rounds=2, interference=0.02))
        for row in result.variants:
            assert [
                call.interference for call in row.measurements[0].shapes[0].calls
            ] == [None, None]
        assert result.environment.warnings == [meter.off]
        assert (tmp_path / "shown.txt").read_text().count(meter.off) == 1
