"""Whole studies on the packaged model: what they measure and keep, and how they end when a variant does not."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sdopt.contract import Contract
from sdopt.record.files import write_result
from sdopt.record.records import StudyResult
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.report.sweep import exit_code
from sdopt.schema import Rule
from sdopt.study.designs import CONTROL
from sdopt.worker.draws import timed_draw
from sdopt.worker.host import PipelineHost
from tests.command import SMOKE, Finished, eventually, sdopt, start, workers
from tests.fakes import Fakes, fake_workers
from tests.fixtures import Load
from tests.records import known, reconfigure


def image(finished: Finished, variant: str, prompt: int) -> np.ndarray:
    record = finished.result.variant(variant).images[prompt]
    return np.asarray(Image.open(finished.folder / record.path), dtype=float)


class TestFinished:
    def test_statuses_and_exit_code(
        self, finished: Finished, result: StudyResult
    ) -> None:
        assert finished.code == 0
        assert result.environment.start_method == "forkserver"
        assert {row.name: str(row.status) for row in result.variants} == {
            "baseline": "ok",
            "bfloat16": "ok",
            "batches of four": "ok",
            "TensorFloat-32": "skipped",
            CONTROL: "ok",
        }
        assert "needs a CUDA device" in result.variant("TensorFloat-32").reason
        assert result.variant("TensorFloat-32").measurements == []

    def test_what_another_gate_judged_later_does_not_change_its_exit_code(
        self, result: StudyResult, tmp_path: Path
    ) -> None:
        result.gate, result.judgements = (
            "strict",
            [Judgement("c", "r", "", Contract.LOSSY, Verdict.FAIL, [])],
        )
        write_result(result, tmp_path)
        assert exit_code(tmp_path) == 0, "the study asked for no verdict"
        reconfigure(result, "gate", rules={"lossy": [Rule("mse")]})
        write_result(result, tmp_path)
        assert exit_code(tmp_path) == 1

    def test_what_is_recorded_of_each_process(self, result: StudyResult) -> None:
        for row, measured in [(v, m) for v in result.variants for m in v.measurements]:
            [samples] = measured.shapes
            assert [call.round for call in samples.calls] == [*range(6)]
            assert min(samples.latency_s) > 0
            for call in samples.calls:
                assert call.interference is not None
                assert 0 <= call.interference.waited <= 1
                assert 0 <= call.interference.stolen <= 1
            assert (len(samples.warmup_s), len(samples.discarded_s)) == (0, 1)
            assert (measured.energy_j, samples.compile_s) == ([], None)
            # What a variant reports of its start is that of its first process, which worked alone.
            assert (None not in [measured.load_s, samples.cold_start_s]) == (
                measured.replicate == 0
            )
            staged = (
                {"text_encoder": 1, "denoiser_step": 2, "vae_decoder": 1}
                if not measured.replicate
                else {}
            )
            assert {
                name: len(times) for name, times in measured.stages_s.items()
            } == staged
            memory = known(samples.memory)
            assert 0 < memory.process_loaded_gib <= known(memory.process_peak_gib) < 2
            assert memory.cuda_peak_allocated_gib is None
            assert {item.axis for item in samples.evidence} == set(row.choices) - {
                "scheduler",
                "task",
            }
            assert all(item.engaged for item in samples.evidence)
        # Operations do not depend on precision or batch.
        [counted] = {
            row.tflop_per_image for row in result.variants if row.status.measured
        }
        assert known(counted) > 0
        assert eventually(lambda: not workers())

    def test_a_batch_makes_the_images_that_single_calls_make(
        self, finished: Finished
    ) -> None:
        for prompt in range(4):
            assert np.array_equal(
                image(finished, "baseline", prompt), image(finished, CONTROL, prompt)
            )
            difference = np.abs(
                image(finished, "baseline", prompt)
                - image(finished, "batches of four", prompt)
            )
            assert difference.max() <= 2
        assert (
            np.abs(
                image(finished, "baseline", 0) - image(finished, "baseline", 1)
            ).mean()
            > 2
        )

    def test_every_file_is_in_the_runs_folder(self, finished: Finished) -> None:
        top = {
            path.relative_to(finished.cwd).parts[:2] for path in finished.cwd.rglob("*")
        }
        assert {parts[:2] for parts in top} <= {("outputs",), ("outputs", "runs")}
        assert (finished.folder / ".hydra" / "overrides.yaml").is_file()
        assert len(list((finished.folder / "logs").glob("*.log"))) == 4 * 3  # processes


def batch_of(loaded: PipelineHost, index: int = 0) -> dict[str, Any]:
    return loaded._prompts_and_noise(index, timed_draw(loaded._variant))


class TestNoise:
    """What an image starts from is the same in every variant."""

    def test_whatever_the_precision(self, session: Load) -> None:
        full, half = (
            batch_of(session())["latents"],
            batch_of(session("precision=bf16"))["latents"],
        )
        assert half.dtype == torch.bfloat16
        assert torch.equal(half, full.bfloat16())

    def test_images_of_a_prompt_differ_and_seeds_do_not_collide(
        self, session: Load
    ) -> None:
        several = session(
            "workload.prompt_count=2",
            "workload.images_per_prompt=3",
            "workload.batch_size=2",
        )
        latents = batch_of(several)["latents"]
        assert len(latents) == 6
        assert len({float(noise.sum()) for noise in latents}) == 6


def test_numbers_that_are_not_finite_are_said_where_nothing_judges_images(
    tmp_path: Path,
) -> None:
    with fake_workers(Fakes(black=["precision=bf16"])) as fakes:
        done = sdopt(
            tmp_path,
            "run",
            *SMOKE,
            "precision=bf16",
            "quality=none",
            "protocol.timeout_s=77",
        )
    assert fakes.timeout_s == 77
    assert [trip.wire for trip in done.result.variant("precision=bf16").trips] == [
        "non_finite"
    ]
    assert not done.result.variant("baseline").trips
    assert "images broken (non_finite)" in done.out


def test_a_factorial_study_has_effects(tmp_path: Path) -> None:
    with fake_workers():
        options = "study.options=[grad_mode:inference_mode,attention:math]"
        finished = sdopt(tmp_path, "run", *SMOKE, "study=factorial", options)
    assert finished.code == 0, finished.err
    result = finished.result
    assert len(result.variants) == 4 + 1
    assert [effect.options for effect in result.effects] == [
        ("grad_mode=inference_mode",),
        ("attention=math",),
        ("grad_mode=inference_mode", "attention=math"),
    ]
    assert all(effect.speedup is not None for effect in result.effects)
    assert "interaction" in finished.out


@pytest.mark.slow
def test_ctrl_c_while_libraries_are_imported(tmp_path: Path) -> None:
    process = start(
        tmp_path, *SMOKE, module="runners.run"
    )  # the command, in another way
    assert eventually(
        lambda: any("forkserver" in command for command in process.descendants())
    )
    time.sleep(1)
    process.interrupt()
    finished = process.finish(60)
    assert finished.code == 130
    assert finished.err == "sdopt: interrupted\n"
    # The server ends once it has imported what it was told to.
    assert process.left_behind(patience_s=60) == []
