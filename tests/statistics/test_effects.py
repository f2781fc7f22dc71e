"""Effects of a factorial study, against data whose effects are known."""

from itertools import product

import numpy as np
import pytest

from sdopt.record.files import parse_result, to_json
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.samples import Measurement, Memory, ShapeSamples
from sdopt.statistics.effects import effects_of
from tests.records import known, recorded, retime, samples_of, timed
from tests.statistics.test_ratios import variant

OPTIONS = ("precision=bf16", "layout=channels_last", "attention=math")
TRUE = {"precision=bf16": 2.0, "layout=channels_last": 1.25, "attention=math": 0.8}
JOINT = 1.5
"""What bf16 and channels_last gain together beyond the product of their speed-ups."""


def cell(options: tuple[str, ...], replicates: int) -> VariantResult:
    speedup = float(np.prod([TRUE[option] for option in options]))
    if {"precision=bf16", "layout=channels_last"} <= set(options):
        speedup *= JOINT
    memory = 0.5 if "precision=bf16" in options else 1.0
    name = ", ".join(options) or "baseline"
    made = variant(
        *[[1 / speedup] * 10] * replicates, name=name, memory=Memory(memory, memory)
    )
    made.choices = {"precision": "fp32", "layout": "contiguous", "attention": "default"}
    made.choices |= dict(option.split("=") for option in options)
    return made


def study(replicates: int = 1) -> StudyResult:
    chosen = [
        tuple(o for o, on in zip(OPTIONS, mask, strict=True) if on)
        for mask in product([0, 1], repeat=3)
    ]
    return recorded([cell(options, replicates) for options in chosen], [], "factorial")


def test_known_effects_are_found() -> None:
    found = {effect.options: effect for effect in effects_of(study(), OPTIONS)}
    assert len(found) == 6
    # Averaged over the other options, half of the cells have the partner of the interaction.
    assert known(found[("precision=bf16",)].speedup).estimate == pytest.approx(
        2.0 * JOINT**0.5
    )
    assert known(found[("layout=channels_last",)].speedup).estimate == pytest.approx(
        1.25 * JOINT**0.5
    )
    assert known(found[("attention=math",)].speedup).estimate == pytest.approx(0.8)
    assert known(
        found[("precision=bf16", "layout=channels_last")].speedup
    ).estimate == pytest.approx(JOINT)
    assert known(
        found[("precision=bf16", "attention=math")].speedup
    ).estimate == pytest.approx(1.0)
    assert known(found[("precision=bf16",)].memory_ratio).estimate == pytest.approx(0.5)
    assert not any(effect.aliased_with for effect in found.values())


def test_what_the_remaining_cells_cannot_tell_apart_is_named() -> None:
    cut = study()
    for row in cut.variants:
        if "precision=bf16" in row.name and "layout=channels_last" in row.name:
            row.status = Status.SKIPPED
    found = {effect.options: effect for effect in effects_of(cut, OPTIONS)}
    joint = found[("precision=bf16", "layout=channels_last")]
    assert joint.speedup is None
    assert joint.aliased_with
    assert found[("attention=math",)].speedup is not None


def test_two_options_of_one_axis_have_no_interaction() -> None:
    options = ("attention=math", "attention=vanilla", "precision=bf16")
    names = {effect.options for effect in effects_of(study(), options)}
    assert ("attention=math", "attention=vanilla") not in names


def test_an_option_that_never_ran_has_no_effect() -> None:
    cut = study()
    for row in cut.variants:
        if "attention=math" in row.name:
            row.status = Status.FAILED
    found = {effect.options: effect for effect in effects_of(cut, OPTIONS)}
    assert found[("attention=math",)].speedup is None
    assert "the mean" in found[("attention=math",)].aliased_with
    assert found[("precision=bf16", "attention=math")].aliased_with == [
        "precision=bf16"
    ]
    assert known(found[("precision=bf16",)].speedup).estimate == pytest.approx(
        2.0 * JOINT**0.5
    )
    assert known(
        found[("precision=bf16", "layout=channels_last")].speedup
    ).estimate == pytest.approx(JOINT)


def test_cells_of_different_sessions_are_compared_by_the_baselines_beside_them() -> (
    None
):
    """Half of the cells were measured later, on a machine three times as slow, and the baseline with them again."""
    result = study()
    later = result.variants[4:]
    for row in later:
        row.measurements[0].session = 1
        retime(
            row.measurements[0].shapes[0],
            [3 * sample for sample in row.measurements[0].shapes[0].latency_s],
        )
    baseline = result.variants[0]
    again = [3 * sample for sample in baseline.measurements[0].shapes[0].latency_s]
    baseline.measurements.append(
        Measurement(
            0,
            1,
            shapes=[
                ShapeSamples(
                    calls=timed(again), memory=baseline.measurements[0].shapes[0].memory
                )
            ],
        )
    )
    expected = {
        effect.options: effect.speedup for effect in effects_of(study(), OPTIONS)
    }
    for effect in effects_of(result, OPTIONS):
        assert known(effect.speedup).estimate == pytest.approx(
            known(expected[effect.options]).estimate
        )
        assert effect.memory_ratio is not None


def in_blocks(result: StudyResult) -> StudyResult:
    """The same study, each process but the baseline's timed between two rounds of a baseline that took 1 s."""
    for samples in samples_of(*result.variants[1:]):
        samples.latency_before_s = samples.latency_after_s = [1.0] * len(
            samples.latency_s
        )
    return result


@pytest.mark.parametrize(
    ("replicates", "unit"), [(1, "round"), (2, "round"), (3, "process")]
)
def test_a_block_that_broke_off_leaves_a_result_that_can_be_read(
    replicates: int, unit: str
) -> None:
    """Of eight cells, the last one's last block has no baseline after it: its process counts as missing."""
    result = in_blocks(study(replicates=replicates))
    result.variants[-1].measurements[-1].shapes[0].latency_after_s = []
    result.effects = effects_of(result, OPTIONS)
    assert parse_result(to_json(result)).effects == result.effects
    found = {effect.options: known(effect.speedup) for effect in result.effects}
    assert found[("precision=bf16",)].estimate == pytest.approx(2.0 * JOINT**0.5)
    assert found[("precision=bf16", "layout=channels_last")].estimate == pytest.approx(
        JOINT
    )
    assert {interval.unit for interval in found.values()} == {unit}


@pytest.mark.parametrize("replicates", [1, 2])
def test_a_session_that_times_nothing_changes_no_effect(replicates: int) -> None:
    """One that only draws further images is opened for each process."""
    result = study(replicates=replicates)
    expected = effects_of(result, OPTIONS)
    for row in result.variants:
        row.measurements += [Measurement(number, 1) for number in range(replicates)]
    assert expected
    assert effects_of(result, OPTIONS) == expected
