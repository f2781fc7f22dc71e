"""A study of several shapes in one record; the snapshot of the records holds what each figure of a shape is."""

import pytest

from sdopt.errors import UsageError
from sdopt.record.comparisons import Comparison, ShapeRatios
from sdopt.record.files import parse_result, to_json
from sdopt.record.records import MeasurementSession, StudyResult, VariantResult
from sdopt.record.samples import Interference, Memory, ShapeSamples
from sdopt.report.tables import to_dataframe
from sdopt.schema import Shape
from sdopt.statistics.disturbance import count_rounds
from sdopt.statistics.figures import flat_figures
from sdopt.statistics.ratios import compare
from sdopt.statistics.summary import summary_of
from tests.records import known, reconfigure, recorded, retime, samples_of, timed
from tests.statistics.test_ratios import variant

SMALL, LARGE = Shape(64, 1), Shape(96, 1)


def two_shapes(name: str, main_s: float, further_s: float, role: str = "variant") -> VariantResult:
    """Three processes of four rounds, a little apart from each other; the larger shape compiled two graphs."""
    made = variant(*([main_s * (1 + 0.01 * n)] * 4 for n in range(3)), name=name, role=role, memory=Memory(0.0, 1.0))
    for number, measurement in enumerate(made.measurements):
        seconds = [further_s * (1 + 0.02 * number)] * 4
        measurement.shapes.append(ShapeSamples(calls=timed(seconds), memory=Memory(0.0, 2.0), graphs=2, recompiles=1))
    reconfigure(made, "workload", size=[64, 96])
    return made


@pytest.fixture
def result() -> StudyResult:
    rows = [
        two_shapes("baseline", 2.0, 6.0),
        two_shapes("fast", 1.0, 4.0),
        two_shapes("control", 2.02, 6.3, role="control"),
    ]
    edges = [
        Comparison(name, "baseline", "it", [ShapeRatios(), ShapeRatios()]) for name in (row.name for row in rows[1:])
    ]
    made = recorded(rows, edges)
    reconfigure(made, "workload", size=[64, 96])
    compare(made)
    return made


class TestEachShape:
    def test_has_flat_figures_with_its_name_beside_those_of_the_main_shape(self, result: StudyResult) -> None:
        flat = flat_figures(result, result.variant("fast"))
        assert flat["speedup"] == flat["speedup/64x64b1"] == pytest.approx(2.0)
        assert flat["speedup/96x96b1"] == pytest.approx(1.5)
        assert flat["speedup_low/96x96b1"] < 1.5 < flat["speedup_high/96x96b1"]
        assert flat["latency/p50_s/96x96b1"] == pytest.approx(4.08, rel=1e-3)
        assert flat["throughput/images_per_s/96x96b1"] == pytest.approx(1 / flat["latency/p50_s/96x96b1"])
        assert (flat["compile/graphs/96x96b1"], flat["compile/recompiles/96x96b1"]) == (2, 1)
        assert "compile/graphs/64x64b1" not in flat
        frame = to_dataframe(summary_of(result)).set_index("variant")
        assert frame.loc["fast", "speedup/96x96b1"] == flat["speedup/96x96b1"]

    def test_disturbs_the_round_of_all(self, result: StudyResult) -> None:
        for samples in samples_of(*result.variants):
            retime(samples, interference=Interference(0.0, 0.0))
        result.variant("fast").measurements[0].shapes[1].calls[2].interference = Interference(0.5, 0.0)
        counts = known(count_rounds(result))
        assert (counts.timed, counts.disturbed) == (4, 1)


def test_a_record_is_read_as_it_was_written(result: StudyResult) -> None:
    result.environment.device["type"] = "cpu"
    result.sessions = [MeasurementSession("now")]
    again = parse_result(to_json(result))
    assert again == result
    assert again.shapes == (SMALL, LARGE)
    result.variant("fast").measurements[0].shapes[1].calls[0].seconds = -1.0
    with pytest.raises(UsageError, match=r"measurements\.0\.shapes\.1\.calls\.0\.seconds: Input should be greater"):
        parse_result(to_json(result))
