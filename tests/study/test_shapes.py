"""One process serves several shapes: what is measured and recorded of each, with the packaged model."""

from pathlib import Path

import pytest

from sdopt.config.composer import HydraComposer
from sdopt.hardware.device import Device
from sdopt.record.records import StudyResult, VariantResult
from sdopt.schema import Shape
from tests.command import SMOKE, Finished, sdopt
from tests.fixtures import CPU

SHAPES = ("workload.size=[64,72]", "workload.steps=1")

Composers = type[HydraComposer]


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
        assert result.shapes == (Shape(64, 1), Shape(72, 1))
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
        assert "speed-up, 64×64, batch 1" in traced.shown
        assert "1 graph" in (traced.folder / "table.md").read_text()

    def test_that_is_measured_whole_is_not_measured_again(self, traced: Finished) -> None:
        again = sdopt(traced.cwd, "run", f"resume={traced.folder}")
        assert again.code == 0, again.shown
        assert "already complete" in again.shown
        other = sdopt(traced.cwd, "run", f"resume={traced.folder}", "workload.size=[64,80]")
        assert other.code == 2
        assert "workload.size=[64,80]: cannot be changed together with resume" in other.shown


class TestConflicts:
    @staticmethod
    def of(composer: Composers, *overrides: str, device: Device = CPU) -> list[str]:
        return composer([*SMOKE, *overrides]).variant("it").conflicts(device)

    def test_name_the_shape_at_which_an_option_cannot_take_effect(self, composer: Composers) -> None:
        [found] = self.of(composer, "memory=[vae_slicing]", "workload.size=64", "workload.batch_size=[1,2]")
        assert found.endswith("set workload.batch_size to 2 or more (at 64×64, batch 1)")
        assert not self.of(composer, "memory=[vae_slicing]", "workload.batch_size=[2,3]")

    def test_are_those_of_any_single_shape(self, composer: Composers) -> None:
        [found] = self.of(composer, "memory=[vae_slicing]", "workload.size=[64,72]")
        assert found.endswith("set workload.batch_size to 2 or more")

    def test_of_more_graphs_than_a_compiler_makes(self, composer: Composers) -> None:
        sizes = f"workload.size={[64 + 8 * n for n in range(9)]}".replace(" ", "")
        [found] = [
            said for said in self.of(composer, "compiler=inductor", "compiler.dynamic=false", sizes) if "9" in said
        ]
        assert "compiles at most 8 and runs others eagerly: give fewer shapes, or choose compiler.dynamic=null" in found
        assert not [said for said in self.of(composer, "compiler=inductor", sizes) if "eagerly" in said]

    @pytest.mark.parametrize(
        ("chosen", "graphs", "shapes"),
        [
            ("compiler=regional", 2, 5),  # the model has blocks at two sizes of its latents
            ("compiler=regional model=sd15 model.weights=random", 4, 3),
            ("compiler=inductor caching=guidance_interval workload.steps=10", 2, 5),
        ],
    )
    def test_of_several_graphs_for_each_shape(self, composer: Composers, chosen: str, graphs: int, shapes: int) -> None:
        def found(count: int) -> list[str]:
            sizes = ",".join(str(64 + 8 * n) for n in range(count))
            return self.of(composer, *chosen.split(), "compiler.dynamic=false", f"workload.size=[{sizes}]")

        [said] = found(shapes)
        assert f"needs {graphs * shapes} graphs for {shapes} shapes" in said
        assert found(shapes - 1) == []

    @pytest.mark.parametrize(("batches", "graphs"), [("1,2,4,8,16", 6), ("1,3,5,7,9", 10)])
    def test_of_graphs_that_shapes_share(self, composer: Composers, batches: str, graphs: int) -> None:
        """Steps without guidance run half of the batch, which may be the whole batch of another shape."""
        chosen = "compiler=inductor compiler.dynamic=false caching=guidance_interval workload.steps=10"
        found = self.of(composer, *chosen.split(), f"workload.batch_size=[{batches}]")
        assert [f"needs {graphs} graphs for 5 shapes" in said for said in found] == [True] * (graphs > 8)

    @pytest.mark.parametrize(
        ("dynamic", "shapes", "fits"),
        [
            ("true", "workload.size=64", False),
            ("null", "workload.size=[64,96]", False),
            ("null", "workload.batch_size=[1,2]", True),
            ("false", "workload.size=[64,96]", True),
        ],
    )
    def test_of_sizes_that_become_symbols_beside_autograd(
        self, composer: Composers, dynamic: str, shapes: str, fits: bool
    ) -> None:
        chosen = ("compiler=inductor", f"compiler.dynamic={dynamic}", shapes)
        found = self.of(composer, *chosen, "grad_mode=enabled")
        assert fits == (found == [])
        assert fits or "autograd records for any shape" in found[0]
        assert self.of(composer, *chosen) == []

    @pytest.mark.parametrize(("targets", "fits"), [("text_encoder", True), ("text_encoder,decoder", False)])
    def test_of_sizes_that_a_text_encoder_does_not_see(self, composer: Composers, targets: str, fits: bool) -> None:
        sizes = f"workload.size={[64 + 8 * n for n in range(9)]}".replace(" ", "")
        chosen = ("compiler=inductor", f"compiler.targets=[{targets}]", sizes)
        found = self.of(composer, *chosen, "grad_mode=enabled")
        assert ["autograd records for any shape" in said for said in found] == [True] * (not fits)
        found = self.of(composer, *chosen, "compiler.dynamic=false")
        assert ["needs 9 graphs for 9 shapes" in said for said in found] == [True] * (not fits)

    def test_of_a_workspace_that_is_sized_once(self, composer: Composers) -> None:
        found = self.of(composer, "compiler=deepspeed", "workload.size=[64,72]")
        assert [said for said in found if said.endswith("give one workload.size and batch_size")]


def test_shapes_belong_to_the_whole_study(tmp_path: Path) -> None:
    lists = ["study=one_at_a_time", "study.options=[workload.batch_size:4]", "workload.size=[64,72]"]
    found = sdopt(tmp_path, "run", *SMOKE, *lists)
    assert found.code == 2
    assert "a list in workload.size or workload.batch_size applies to the whole study" in found.shown
