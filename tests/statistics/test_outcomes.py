"""What a study says of its options, and of a GPU beside the table."""

import pytest

from sdopt.apps.suite.outcomes import Standing, outcomes_of
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import GpuState
from sdopt.report.notes import busy_note, gpu_notes, throttling_note
from sdopt.statistics.row_figures import busy_share
from tests.records import reconfigure, retime


class TestThrottling:
    def test_names_the_rounds_and_what_held_the_clocks(
        self, result: StudyResult
    ) -> None:
        first, second = (
            result.variant(name).measurements[0] for name in ("baseline", "bfloat16")
        )
        retime(
            first.shapes[0],
            gpu=[
                GpuState(),
                GpuState(throttled=["power limit"]),
                GpuState(throttled=["power limit"]),
            ],
        )
        retime(
            second.shapes[0],
            gpu=[
                GpuState(),
                GpuState(),
                GpuState(throttled=["power limit", "temperature"]),
            ],
        )
        assert throttling_note(result) == (
            "Rounds in which the GPU was throttled (power limit, temperature): baseline 2 of 3, bfloat16 1 of 3."
        )
        assert throttling_note(result) in gpu_notes(result)


class TestBusy:
    def test_is_the_traced_work_over_the_untraced_step(
        self, result: StudyResult
    ) -> None:
        row = result.variant("baseline")
        row.measurements = row.measurements[:1]
        [measured] = row.measurements
        measured.shapes[0].denoiser_busy_s, measured.stages_s["denoiser_step"] = (
            0.003,
            [0.001, 0.009, 0.020],
        )
        assert busy_share(row) == pytest.approx(0.3)
        assert "baseline 30 %" in busy_note(result)
        measured.shapes[0].denoiser_busy_s = 0.02
        assert busy_share(row) == 1.0
        assert busy_note(result) == ""


def test_settings_that_distort_are_named(result: StudyResult) -> None:
    result.environment.variables = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    result.environment.gpu = {
        "processes": [{"pid": 1, "gib": 2.5}, {"pid": 2, "gib": None}]
    }
    assert gpu_notes(result) == [
        "CUDA_LAUNCH_BLOCKING=1 was set: each kernel was waited for before the next was launched.",
        "2 other processes were on the GPU when the study began, with 2.5 GiB.",
    ]
    result.environment.gpu = {}
    result.environment.variables = {
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
        "OMP_PROC_BIND": "true",
    }
    [note] = gpu_notes(result)
    assert note.startswith("ONEDNN_DEFAULT_FPMATH_MODE=BF16 was set")


def standings(result: StudyResult) -> dict[tuple[str, str], Standing]:
    return {
        (found.group, found.option): found.standing for found in outcomes_of(result)
    }


@pytest.mark.parametrize(
    ("status", "standing"),
    [
        *(
            (status, Standing.CANNOT_RUN)
            for status in (Status.FAILED, Status.OUT_OF_MEMORY, Status.KILLED)
        ),
        # A limit of time says nothing of an option.
        *(
            (status, None)
            for status in (Status.TIMEOUT, Status.INTERRUPTED, Status.PENDING)
        ),
    ],
)
def test_what_failed_alone_cannot_run(
    result: StudyResult, status: Status, standing: Standing | None
) -> None:
    assert standings(result)["precision", "bf16"] in (
        Standing.TOOK_EFFECT,
        Standing.NO_GAIN,
    )
    row = result.variant("bfloat16")
    row.status, row.measurements = status, []
    assert standings(result).get(("precision", "bf16")) is standing


def test_untrained_weights_say_nothing_of_what_images_decide(
    result: StudyResult,
) -> None:
    """They may skip no step where a trained model skips half of them."""
    row = result.variant("bfloat16")
    row.promises["precision"].by_image = True
    assert ("precision", "bf16") in standings(result)
    for variant in result.variants:
        reconfigure(variant, "model", weights="random")
    assert ("precision", "bf16") not in standings(result)
