"""Two results of one study: what is comparable, what is refused by name, and what got worse."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.gate.calibration import Fit
from sdopt.gate.differences import differences
from sdopt.gate.drift import judge_drift
from sdopt.gate.judge import exit_code
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.samples import TimedImage
from sdopt.record.scores import Score, Spread
from sdopt.record.verdicts import Verdict
from sdopt.report.comparing import comparison_of
from sdopt.report.markdown import written
from sdopt.report.sentences.reasons import reasons_of
from sdopt.schema import Gate, Rule
from tests.gate.test_judge import FIT, NON_INFERIOR, clip
from tests.records import disturb, known, reconfigure, retime, samples_of

Results = tuple[StudyResult, StudyResult]

BOTH_PASS = [Verdict.PASS, Verdict.PASS]

OF_SPEED = [Rule("speedup", "at_least", limit=0.9)]

GATE = Gate(
    "g",
    {
        "equivalent": [
            NON_INFERIOR,
            Rule("mse", "at_most", limit=1e-5),
            Rule("speedup", "at_least", limit=0.9),
        ],
        "lossy": [NON_INFERIOR, Rule("speedup", "at_least", limit=0.9)],
    },
)


@pytest.fixture
def results() -> Results:
    """A later and an earlier result that are the same."""
    later = clip(0.0)
    return later, deepcopy(later)


@pytest.mark.parametrize(("fell", "verdict"), [(0, Verdict.PASS), (2, Verdict.FAIL)])
def test_a_score_that_fell_fails_and_the_same_passes(
    results: Results, fell: float, verdict: Verdict
) -> None:
    later, earlier = results
    assert differences(later, earlier) == []
    score = later.variant("it").quality["clip_score_x"]
    score.per_prompt = [known(value) - fell for value in score.per_prompt]
    score.estimate = known(score.estimate) - fell
    found = judge_drift(later, earlier, GATE, FIT)
    assert {judgement.candidate: judgement.verdict for judgement in found} == {
        "baseline": Verdict.PASS,
        "it": verdict,
    }
    assert "images were not compared" in found[0].note


@pytest.mark.parametrize(
    ("digest", "verdict", "said"),
    [("same", Verdict.PASS, 0), ("other", Verdict.NOT_COMPARABLE, 1)],
)
def test_images_that_are_the_same_files_need_no_calibration(
    results: Results, digest: str, verdict: Verdict, said: int
) -> None:
    later, earlier = results
    for result in results:
        for image in result.drawn_images:
            image.digest = "same"
    later.variant("it").images[0].digest = digest
    refusal = "no calibration fits"
    of_seeds = Rule("clip_score", "non_inferior", deviations=0.25)
    gate = Gate("g", {"equivalent": [of_seeds, *OF_SPEED]})
    [_, found] = judge_drift(later, earlier, gate, Fit(refusal=refusal))
    assert found.verdict is verdict
    assert "; ".join([*reasons_of(found), found.note]).count(refusal) == said


@pytest.mark.parametrize(
    ("error", "verdict"), [(0.0, Verdict.PASS), (1e-9, Verdict.NOT_COMPARABLE)]
)
def test_latents_of_the_same_files_may_differ(
    results: Results,
    error: float,
    verdict: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for result in results:
        result.variant("it").images[0].digest = "same"
    scores = {"latents_error": Score(error, [error] * 48)}
    monkeypatch.setattr("sdopt.gate.drift._distances", lambda *_: scores)
    rule = Rule("latents_error", "every", limit=0.01, of_floor=100)
    gate = Gate("g", {"equivalent": [rule]})
    [_, found] = judge_drift(*results, gate, FIT, folders=(Path(), Path()))
    assert found.verdict is verdict, "no floor was measured"


@pytest.mark.parametrize(("limit", "least"), [(0.9, 0.9), (1.1, 1 / 1.01)])
def test_a_speedup_that_was_lost_fails_and_a_gain_need_not_be_reached_again(
    results: Results, limit: float, least: float
) -> None:
    later, earlier = results
    at_least = Rule("speedup", "at_least", limit=limit)
    rules = [at_least, Rule("speedup", "at_most", limit=0.5)]
    gate = Gate("g", {"equivalent": rules})
    assert [one.verdict for one in judge_drift(*results, gate, FIT)] == BOTH_PASS
    for samples in samples_of(later.variant("it")):
        retime(samples, [2 * seconds for seconds in samples.latency_s])
    found = judge_drift(later, earlier, gate, FIT)
    (ruling,) = [
        r for judgement in found for r in judgement.rulings if r.verdict is Verdict.FAIL
    ]
    assert ruling.metric == "speedup"
    assert ruling.estimate == pytest.approx(0.5, rel=0.05)
    assert ruling.margin == pytest.approx(least)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda r: r.environment.device.update(name="another"),
            "device: another against a device",
        ),
        (lambda r: reconfigure(r, "workload", seed=3), "workload.seed: 3 against 0"),
        (
            lambda r: reconfigure(r, "scheduler", class_name="Euler"),
            "scheduler.class_name: Euler against",
        ),
        (
            lambda r: r.environment.cpu.update(cores=64),
            "cpu.cores: 64 against None",
        ),
        (
            lambda r: r.environment.cpu.update(threads=1),
            "cpu.threads: 1 against 4",
        ),
        (
            lambda r: r.environment.gpu.update(pcie_lanes=4),
            "gpu.pcie_lanes: 4 against 16",
        ),
        (
            lambda r: r.environment.gpu.update(power_limit_w=350.0),
            r"gpu.power_limit_w: 350\.0 against 700\.0",
        ),
    ],
)
def test_other_work_is_refused_and_named(
    results: Results, change: Callable[[StudyResult], None], named: str
) -> None:
    later, earlier = results
    for result in results:
        result.environment.gpu = {"power_limit_w": 700.0, "pcie_lanes": 16}
        result.environment.cpu["threads"] = 4
    change(later)
    with pytest.raises(UsageError, match=named):
        judge_drift(later, earlier, GATE, FIT, waived=("versions", "sdopt"))


@pytest.mark.parametrize(
    ("place", "digest", "named"),
    [
        ("/new/mine.safetensors", "same", []),
        (
            "/new/mine.safetensors",
            "other",
            ["contents of model: other against same (baseline, it, control)"],
        ),
        (
            "/new/else.safetensors",
            "same",
            ["model.path: /new/else.safetensors against /old/mine.safetensors"],
        ),
    ],
)
def test_files_in_another_folder_are_told_by_their_contents(
    results: Results, place: str, digest: str, named: list[str]
) -> None:
    later, earlier = results
    for result, path, found in (
        (later, place, digest),
        (earlier, "/old/mine.safetensors", "same"),
    ):
        reconfigure(result, "model", weights="path", path=path)
        for owner in result.variants:
            reconfigure(owner, "model", weights="path", path=path)
        for row in result.variants:
            row.inputs["model"] = found
            row.inputs["options"] = "same"
            functions = [f"{Path(path).parent}/mine.py:f"]
            row.choices["patch"] = functions[0]
            row.config = replace(
                row.config, options={"patch": {"functions": functions}}
            )
    assert [what for what, _ in differences(later, earlier)] == named
    if not named:
        assert [one.verdict for one in judge_drift(*results, GATE, FIT)] == BOTH_PASS


@pytest.mark.parametrize(
    ("code", "contract"), [("same", "equivalent"), ("other", "lossy")]
)
def test_a_factory_in_another_folder_is_told_by_its_code(
    results: Results, code: str, contract: str
) -> None:
    """As in CI, where the base is checked out beside the head: its place says nothing."""
    for result, folder, digest in zip(
        results, ("/head", "/head/base"), (code, "same"), strict=True
    ):
        model = {"weights": "factory", "factory": f"{folder}/pipe.py:make"}
        reconfigure(result, "model", **model)
        for row in result.variants:
            reconfigure(row, "model", **model)
            row.inputs |= {"model": "weights", "options": digest}
    said = [
        ("contents of options: other against same (baseline, it, control)", "options")
    ]
    assert differences(*results) == (said if code == "other" else [])
    found = judge_drift(*results, GATE, FIT, waived=("options",))
    assert [one.verdict for one in found] == BOTH_PASS, found[1].rulings
    assert {one.contract for one in found} == {contract}


def test_other_versions_need_a_waiver_and_are_then_judged_as_lossy(
    results: Results,
) -> None:
    later, earlier = results
    later.environment.packages["torch"] = "9"
    with pytest.raises(UsageError, match=r"torch: 9 against None.*--waive versions"):
        judge_drift(later, earlier, GATE, FIT)
    found = judge_drift(later, earlier, GATE, FIT, waived=("versions",))
    assert {judgement.contract for judgement in found} == {"lossy"}
    assert "torch: 9 against None" in found[0].note
    assert {judgement.verdict for judgement in found} == {Verdict.PASS}


def test_another_driver_needs_a_waiver_and_is_listed(results: Results) -> None:
    later, earlier = results
    earlier.environment.device["driver"] = "570.1"
    assert differences(later, earlier) == [], "one of them does not say"
    later.environment.device["driver"] = "580.2"
    said = "device.driver: 580.2 against 570.1"
    with pytest.raises(UsageError, match=f"{said}.*--waive versions"):
        judge_drift(later, earlier, GATE, FIT)
    text = written(comparison_of(earlier, later))
    assert f"differ in (B against A):\n\n- {said}" in text
    later.environment.device["driver"] = "570.1"
    assert "environment agree" in written(comparison_of(earlier, later))
    later.environment.gpu["power_limit_w"] = 300.0
    assert "environment agree" not in written(comparison_of(earlier, later))


def test_a_card_of_the_same_name_and_other_memory_is_another_one(
    results: Results,
) -> None:
    later, earlier = results
    for result, gib in ((later, 7.7), (earlier, 11.8)):
        result.environment.device |= {"type": "cuda", "memory_total_gib": gib}
    said = "device.memory_total_gib: 7.7 against 11.8"
    assert [what for what, _ in differences(later, earlier)] == [said]
    assert f"- {said}" in written(comparison_of(earlier, later))
    later.environment.device["memory_total_gib"] = 11.6
    assert differences(later, earlier) == []


def test_other_arithmetic_by_a_variable_needs_a_waiver(results: Results) -> None:
    """Of another shell: oneDNN rounds float32 to bfloat16 then, and no version tells."""
    later, earlier = results
    later.environment.variables["ONEDNN_DEFAULT_FPMATH_MODE"] = "BF16"
    said = "ONEDNN_DEFAULT_FPMATH_MODE: BF16 against None"
    with pytest.raises(UsageError, match=f"{said}.*--waive versions"):
        judge_drift(later, earlier, GATE, FIT)
    text = written(comparison_of(earlier, later))
    assert (
        f"Not comparable, so no ratio of A and B is shown (B against A):\n\n- {said}"
        in text
    )
    assert text.count(said) == 2, "in the same words"
    assert "environment agree" not in text
    later.environment.variables.clear()
    later.environment.variables["TRITON_CACHE_DIR"] = "/tmp/kernels"
    assert differences(later, earlier) == []
    assert "Configuration and environment agree" in written(
        comparison_of(earlier, later)
    )
    later.variant("it").choices["attention"] = "xformers"
    text = written(comparison_of(earlier, later))
    assert "choose otherwise" in text
    assert "What else was configured, and the environment agree." in text


def test_a_package_that_no_variant_loads_may_differ(results: Results) -> None:
    later, earlier = results
    later.environment.packages["xformers"] = "9"
    assert not [what for what, _ in differences(later, earlier) if "xformers" in what]
    earlier.variant("it").choices["attention"] = "xformers"
    assert [
        what for what, waiver in differences(later, earlier) if waiver == "versions"
    ] == ["xformers: 9 against None"]


@pytest.mark.parametrize("which", ["judged", "earlier"])
def test_disturbed_times_of_either_result_decide_nothing(
    results: Results, which: str
) -> None:
    disturb(dict(zip(("judged", "earlier"), results, strict=True))[which])
    found = judge_drift(*results, GATE, FIT)
    assert {judgement.verdict for judgement in found} == {Verdict.INCONCLUSIVE}
    [ruling] = [each for each in found[1].rulings if each.rule == "undisturbed"]
    assert f"in the {which} result: " in ruling.reason
    [of_baseline] = [each for each in found[0].rulings if each.rule == "undisturbed"]
    assert of_baseline.reason.count("measure again") == 1


@pytest.mark.parametrize(
    ("number", "verdict"), [(0, Verdict.FAIL), (1, Verdict.NOT_COMPARABLE)]
)
def test_timed_calls_that_draw_other_images_do_not_pass(
    results: Results, number: int, verdict: Verdict
) -> None:
    results[number].variant("it").measurements[0].shapes[0].timed_images = [
        TimedImage(0, 0, 0.1)
    ]
    found = {
        judgement.candidate: judgement.verdict
        for judgement in judge_drift(*results, GATE, FIT)
    }
    assert found == {"baseline": Verdict.PASS, "it": verdict}


def give_interval(row: VariantResult, interval: int) -> None:
    row.config = replace(
        row.config, options={"axis": {"_target_": "a.B", "interval": interval}}
    )


class TestChoices:
    def test_an_axis_of_a_later_version_that_changes_nothing_is_none(
        self, results: Results
    ) -> None:
        later, earlier = results
        for row in later.variants:
            row.choices |= {"patch": "none", "compiler": "eager"}
        assert differences(*results) == differences(earlier, later) == []
        later.variant("it").choices["patch"] = "mine"
        assert [what for what, _ in differences(*results)] == [
            "patch: mine against none (it)"
        ]

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda row: give_interval(row, 3), "axis.interval: 3 against 5 (it)"),
            (
                lambda row: row.choices.update(axis="other"),
                "axis: other against it (it)",
            ),
            (
                lambda row: reconfigure(row, "workload", steps=3),
                "workload.steps: 3 against 25 (it)",
            ),
            (
                lambda row: reconfigure(row, "hardware", threads=3),
                "hardware.threads: 3 against None (it)",
            ),
        ],
    )
    def test_that_changed_need_a_waiver(
        self, results: Results, change: Callable[[VariantResult], None], named: str
    ) -> None:
        later, earlier = results
        for result in results:
            give_interval(result.variant("it"), 5)
        change(later.variant("it"))
        with pytest.raises(UsageError) as refused:
            judge_drift(later, earlier, GATE, FIT, waived=("versions", "sdopt"))
        assert named in str(refused.value)
        assert "--waive options" in str(refused.value)
        found = judge_drift(later, earlier, GATE, FIT, waived=("options",))
        assert {judgement.contract for judgement in found} == {"lossy"}
        assert named in found[0].note

    def test_another_baseline_cannot_be_waived_unless_all_changed_alike(
        self, results: Results
    ) -> None:
        later, earlier = results
        reconfigure(later.variant("baseline"), "hardware", threads=3)
        [found] = differences(later, earlier)
        assert found == (
            "hardware.threads: 3 against None (baseline)",
            "",
        )
        for row in later.variants:
            reconfigure(row, "hardware", threads=3)
        [found] = differences(later, earlier)
        assert found[1] == "options"

    def test_what_the_whole_study_changed_is_named_once(self, results: Results) -> None:
        later, earlier = results
        reconfigure(later, "workload", steps=3)
        for row in later.variants:
            reconfigure(row, "workload", steps=3)
        assert [what for what, _ in differences(later, earlier)] == [
            "workload.steps: 3 against 25"
        ]


@pytest.mark.parametrize(
    ("number", "which", "reference"),
    [
        (0, "judged", "it of the earlier result"),
        (1, "earlier", "nothing in the earlier result"),
    ],
)
def test_a_variant_that_one_result_lacks_does_not_pass(
    results: Results, number: int, which: str, reference: str
) -> None:
    lacking = results[number]
    lacking.variants = [row for row in lacking.variants if row.name != "it"]
    found = judge_drift(*results, GATE, FIT)
    assert [judgement.verdict for judgement in found] == [
        Verdict.PASS,
        Verdict.NOT_COMPARABLE,
    ]
    assert found[1].rulings[0].reason == f"the {which} result has no it"
    assert found[1].reference == reference
    assert found[0].reference == "baseline of the earlier result", "CI follows it"
    assert "held against the result of " in found[0].note
    assert exit_code(found, Gate()) == 3


class TestContents:
    """What the configuration calls by the same name may be something else."""

    def test_of_inputs_are_compared(self, results: Results) -> None:
        for digest, result in zip("ab", results, strict=True):
            result.variant("it").inputs = {"prompts": digest * 64}
        everything = ("versions", "sdopt", "options")
        with pytest.raises(
            UsageError,
            match=r"contents of prompts: aaaaaaaaaaaa against bbbbbbbbbbbb \(it\)$",
        ):
            judge_drift(*results, GATE, FIT, waived=everything)
        results[1].variant("it").inputs = {}  # an earlier sdopt did not record them
        assert differences(*results) == []

    @pytest.mark.parametrize("key", ["options", "parts"])
    def test_of_what_options_read_are_choices(self, results: Results, key: str) -> None:
        for name, waiver in (("it", "options"), ("baseline", "")):
            for digest, result in zip("ab", results, strict=True):
                result.variant(name).inputs = {key: digest}
            [found] = differences(*results)
            assert (
                found[0].startswith(f"contents of {key}: a against b ("),
                found[1],
            ) == (True, waiver)


@pytest.mark.parametrize("number", [0, 1])
def test_a_floor_that_was_raised_widens_no_limit(
    results: Results, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two results has the larger floor: the smaller one is the reference's rounding."""
    rule = Rule("mse", "every", limit=1e-3, of_floor=100)
    monkeypatch.setattr(
        "sdopt.gate.drift._distances", lambda *_: {"mse": Score(1e-5, [1e-5] * 48)}
    )
    for index, result in enumerate(results):
        result.floors = {
            "numerical": {"mse": Spread(1e-5 if index == number else 1e-8, 0.0, 12)}
        }
    gate = Gate("g", {"equivalent": [rule]})
    found = judge_drift(*results, gate, FIT, folders=(Path(), Path()))
    [ruling] = [ruling for ruling in found[1].rulings if ruling.metric == "mse"]
    assert ruling.verdict is Verdict.FAIL
    assert ruling.margin == pytest.approx(1e-6)


def test_a_gain_that_became_so_slow_that_it_was_not_timed_on_fails(
    results: Results,
) -> None:
    """That its timing was given up shows the regression better than any time."""
    later, earlier = results
    row = later.variant("it")
    row.status, row.given_up, row.reason = Status.SLOWER, True, "its calls take longer"
    for samples in samples_of(row):
        samples.trial_s, samples.trial_beside_s = [9.0, 9.0], [1.0, 1.0, 1.0]
        samples.calls = []
    found = {one.candidate: one for one in judge_drift(later, earlier, GATE, FIT)}
    assert found["it"].verdict is Verdict.FAIL
    [reason] = reasons_of(found["it"])
    assert reason.startswith("Its speed-up over its own baseline is 8"), reason
    found = {one.candidate: one for one in judge_drift(earlier, later, GATE, FIT)}
    assert found["it"].verdict is Verdict.NOT_COMPARABLE


def test_distances_to_other_images_are_not_compared(results: Results) -> None:
    later, earlier = results
    reconfigure(later, "quality", reference="my_images")
    [difference] = differences(later, earlier)
    assert difference[0] == "quality.reference: my_images against packaged"
    reconfigure(later, "quality", reference="packaged")
    assert differences(later, earlier) == []


def test_a_swap_of_the_two_results_is_said(results: Results) -> None:
    later, earlier = results
    later.started = "2025-01-01T00:00:00"
    [found, _] = judge_drift(later, earlier, GATE, FIT)
    assert "which was measured after the one that is judged" in found.note
