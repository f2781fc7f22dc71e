"""One process serves several shapes: what is measured and recorded of each, with the packaged model."""

from pathlib import Path

import pytest

from sdopt.record.records import StudyResult, VariantResult
from sdopt.schema import Shape
from sdopt.study.resume import missing_of
from tests.command import SMOKE, Finished, refused, sdopt
from tests.fixtures import CPU, Composers

SHAPES = ("workload.size=[32,40]", "workload.steps=1")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A compiler that makes a graph for each shape, against the baseline; nothing of it but the rounds is skipped."""
    return sdopt(tmp_path_factory.mktemp("shapes"), "run", *SMOKE, *SHAPES, "compiler=trace")


@pytest.fixture
def result(traced: Finished) -> StudyResult:
    assert traced.code == 0, traced.shown
    return traced.result


def candidate(result: StudyResult) -> VariantResult:
    return result.variant("compiler=trace")


class TestAProcess:
    def test_is_called_and_timed_at_each_shape_in_each_round(self, result: StudyResult) -> None:
        assert result.shapes == (Shape(32, 1), Shape(40, 1))
        for row in result.variants:
            [measured] = row.measurements
            assert len(measured.shapes) == 2
            for samples in measured.shapes:
                assert samples.cold_start_s is not None
                assert len(samples.latency_s) == result.config.protocol.rounds
                assert len(samples.discarded_s) == 1
                assert samples.memory is not None
                assert samples.evidence
                assert all(evidence.engaged for evidence in samples.evidence)
        assert all(edge.speedup for comparison in result.comparisons for edge in comparison.shapes)
        assert not missing_of(result).variants, "to resume it measures nothing again"

    def test_counts_what_each_shape_compiled(self, result: StudyResult) -> None:
        [measured] = candidate(result).measurements
        assert [(samples.graphs, samples.recompiles) for samples in measured.shapes] == [(1, 0)] * 2
        assert all(samples.compile_s for samples in measured.shapes)
        [plain] = result.variant("baseline").measurements
        assert {(samples.graphs, samples.recompiles, samples.compile_s) for samples in plain.shapes} == {
            (None, None, None)
        }

    def test_draws_images_and_times_stages_at_the_main_shape(self, result: StudyResult) -> None:
        row = candidate(result)
        assert [image.prompt_index for image in row.images] == [0]
        assert row.measurements[0].stages_s["denoiser_step"]
        assert row.tflop_per_image == result.variant("baseline").tflop_per_image

    def test_is_shown_with_its_shapes(self, traced: Finished) -> None:
        assert "speed-up, 32×32, batch 1" in traced.shown
        assert "1 graph" in (traced.folder / "table.md").read_text()


NINE = f"workload.size={[64 + 8 * n for n in range(9)]}".replace(" ", "")
FIXED = "compiler.dynamic=false"
GUIDANCE = "compiler=inductor caching=guidance_interval workload.steps=10"


def sizes(count: int) -> str:
    return "workload.size=[" + ",".join(str(64 + 8 * n) for n in range(count)) + "]"


@pytest.mark.parametrize(
    ("overrides", "conflict"),
    [
        # An option names the shape at which it cannot take effect, or what it lacks at any.
        ("memory=[vae_slicing] workload.size=64 workload.batch_size=[1,2]", "or more (at 64×64, batch 1)"),
        ("memory=[vae_slicing] workload.batch_size=[2,3]", ""),
        ("memory=[vae_slicing] workload.size=[64,72]", "set workload.batch_size to 2 or more"),
        # A compiler makes no more than so many graphs: of each shape one, or several.
        (f"compiler=inductor {FIXED} {NINE}", "give fewer shapes, or choose compiler.dynamic=null"),
        (f"compiler=inductor {NINE}", ""),
        (f"compiler=regional {FIXED} {sizes(5)}", "needs 10 graphs for 5 shapes"),
        (f"compiler=regional {FIXED} {sizes(4)}", ""),
        (f"compiler=regional model=sd15 model.weights=random {FIXED} {sizes(3)}", "needs 12 graphs for 3 shapes"),
        (f"compiler=regional model=sd15 model.weights=random {FIXED} {sizes(2)}", ""),
        (f"{GUIDANCE} {FIXED} {sizes(5)}", "needs 10 graphs for 5 shapes"),
        (f"{GUIDANCE} {FIXED} {sizes(4)}", ""),
        # Steps without guidance run half of the batch, which may be the whole batch of another shape.
        (f"{GUIDANCE} {FIXED} workload.batch_size=[1,3,5,7,9]", "needs 10 graphs for 5 shapes"),
        (f"{GUIDANCE} {FIXED} workload.batch_size=[1,2,4,8,16]", ""),
        # Sizes that become symbols, beside autograd.
        (
            "compiler=inductor compiler.dynamic=true workload.size=64 grad_mode=enabled",
            "autograd records for any shape",
        ),
        ("compiler=inductor workload.size=[64,96] grad_mode=enabled", "autograd records for any shape"),
        ("compiler=inductor workload.size=[64,96]", ""),
        ("compiler=inductor workload.batch_size=[1,2] grad_mode=enabled", ""),
        (f"compiler=inductor {FIXED} workload.size=[64,96] grad_mode=enabled", ""),
        # A text encoder does not see the size.
        (f"compiler=inductor compiler.targets=[text_encoder,decoder] {NINE} grad_mode=enabled", "autograd records"),
        (f"compiler=inductor compiler.targets=[text_encoder,decoder] {NINE} {FIXED}", "needs 9 graphs for 9 shapes"),
        (f"compiler=inductor compiler.targets=[text_encoder] {NINE} grad_mode=enabled", ""),
        (f"compiler=inductor compiler.targets=[text_encoder] {NINE} {FIXED}", ""),
    ],
)
def test_a_conflict_names_the_shapes_or_what_is_wrong_with_any(
    composer: Composers, overrides: str, conflict: str
) -> None:
    found = composer([*SMOKE, *overrides.split()]).variant("it").conflicts(CPU)
    assert [conflict in said for said in found] == [True] * bool(conflict)


def test_a_workspace_that_is_sized_once_takes_one_shape(composer: Composers) -> None:
    found = composer([*SMOKE, "compiler=deepspeed", "workload.size=[64,72]"]).variant("it").conflicts(CPU)
    assert [said for said in found if said.endswith("give one workload.size and batch_size")]


def test_shapes_belong_to_the_whole_study(tmp_path: Path) -> None:
    lists = ["study=one_at_a_time", "study.options=[workload.batch_size:4]", "workload.size=[64,72]"]
    found = refused(tmp_path, "run", *SMOKE, *lists)
    assert "a list in workload.size or workload.batch_size applies to the whole study" in found.shown
