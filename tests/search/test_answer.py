"""The answer of a search, its notes and its runs say no more than what its studies did."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sdopt.report.summary import summary_of
from sdopt.search.answer import _Answer, _begun, _notes, entry_of
from sdopt.search.command import parameters_of, trial_run
from sdopt.search.config import search_config, search_file
from sdopt.search.judgements import Judgements
from sdopt.search.racing import RatioStanding, Scatter
from sdopt.search.record import Fate, SearchEntry, SearchRecord, _words
from sdopt.search.run import Search
from sdopt.search.space import Combination
from tests.gate.test_judge import gate_named
from tests.records import reconfigure
from tests.report.test_claims import ended_early, measured, two_shapes


@pytest.mark.parametrize(
    ("latents", "said", "noise"),
    [
        (None, "other prompts, noise and processes", "other noise"),
        (
            "noise.safetensors",
            "other prompts and processes",
            "the noise of workload.latents",
        ),
    ],
)
def test_noise_is_other_unless_a_file_gives_it(
    latents: str | None, said: str, noise: str
) -> None:
    study = measured()
    reconfigure(study, "workload", latents=latents)
    trials, config = (
        SimpleNamespace(ended="", spoiled=[]),
        SimpleNamespace(objectives=[]),
    )
    search = cast(Search, SimpleNamespace(trials=trials, config=config))
    again, judged = _notes(search, [study, study], study, [])
    assert said in again
    assert f"each on {noise};" in judged


def test_figures_of_what_was_not_judged_are_qualified_where_there_are_some() -> None:
    trials, config = (
        SimpleNamespace(ended="", spoiled=[]),
        SimpleNamespace(objectives=[]),
    )
    search = cast(Search, SimpleNamespace(trials=trials, config=config))
    study = measured()
    judged = replace(entry("caching=tome", "winner", 3), judged=True)
    untried = entry("caching=spectrum", "not enough runs", 0)
    assert len(_notes(search, [study], study, [judged, untried])) == 1
    looked_at = entry("caching=spectrum", "not judged", 1)
    _, also = _notes(search, [study], study, [judged, looked_at])
    assert "not judged" in also


def test_the_shape_that_candidates_are_ranked_by_is_named() -> None:
    """The gain at the others may be none."""
    trials, config = (
        SimpleNamespace(ended="", spoiled=[]),
        SimpleNamespace(objectives=[]),
    )
    search = cast(Search, SimpleNamespace(trials=trials, config=config))
    [note] = _notes(search, [], two_shapes(), [])
    assert "those of 64×64, batch 1, by which candidates are ranked" in note


def entry(name: str, fate: Fate, processes: int, *overrides: str) -> SearchEntry:
    speedup = 1.5 if processes else None
    return SearchEntry(
        name, list(overrides), fate, "", speedup, None, None, None, None, processes
    )


def answered(
    entries: Sequence[SearchEntry],
    options: Sequence[str] = (),
    rows: dict[str, Any] | None = None,
    unjudged: float | None = None,
    wanted: str = "latency",
    **decided: Any,
) -> str:
    """The answer of a search that tried some entries; `rows` are those of judged studies, of which none passed."""
    judgements = SimpleNamespace(
        **{"passed": [], "undecided": [], "studies": rows or {}, **decided},
        rows=rows or {},
        wanted=wanted,
    )
    space = SimpleNamespace(
        alone=tuple, candidates=lambda _: [Combination(name, ()) for name in options]
    )
    config = SimpleNamespace(trials=None, budget_s=300.0)
    search = SimpleNamespace(
        space=space, config=config, unjudged=unjudged, ready_s=20.0
    )
    of_search = cast(Search, search), cast(Judgements, judgements), entries
    return _Answer(*of_search).sentence(ended=True)


def test_only_what_was_measured_counts_as_tried() -> None:
    """A study that its time ends leaves combinations that were proposed, and never ran."""
    entries = [
        entry("precision=bf16", "fail", 1),
        entry("attention=math", "not enough runs", 0),
        entry("attention=flash", "not enough runs", 0),
    ]
    said = answered(entries)
    kept = "nothing that was tried (1 combination) is faster and keeps the images"
    assert f"Keep the baseline: {kept}" in said
    said = answered(entries, ["precision=bf16", "attention=flash"])
    assert f"Undecided: 1 of 2 options was not tried; {kept}; precision=bf16" in said
    assert "a larger budget (search.budget_s, sdopt optimize --budget) goes on" in said
    assert answered(entries[1:]) == "No combination was tried."


@pytest.mark.parametrize("verdict", ["passed", "undecided"])
def test_beside_a_gain_it_is_said_how_many_options_were_not_tried(verdict: str) -> None:
    summary = summary_of(measured())
    name = summary.candidates[0].name
    decided: dict[str, Any] = {
        verdict: [name],
        "folders": {name: "final"},
        "studies": {"final": summary},
        "baseline_of": lambda _: summary.baseline,
    }
    rows = {row.name: row for row in summary.rows}
    options = [name, "caching=tome", "compiler=inductor"]
    tried = entry(name, "winner", 3)
    left = (
        " 2 of 3 options were not tried. The same command with a larger budget "
        "(search.budget_s, sdopt optimize --budget) goes on."
    )
    assert answered([tried], options, rows, **decided).endswith(left)
    assert "not tried" not in answered([tried], [name], rows, **decided)


@pytest.mark.parametrize(
    ("gate", "said"), [("none", "1 more gained."), ("default", "1 more passed.")]
)
def test_nothing_passes_where_no_gate_judged(gate: str, said: str) -> None:
    result = measured()
    result.config = replace(result.config, gate=gate_named(gate))
    summary = summary_of(result)
    names = [row.name for row in summary.candidates]
    decided: dict[str, Any] = {
        "passed": names,
        "folders": dict.fromkeys(names, "final"),
        "studies": {"final": summary},
        "baseline_of": lambda _: summary.baseline,
    }
    rows = {row.name: row for row in summary.rows}
    entries = [entry(name, "pass", 3) for name in names]
    assert answered(entries, names, rows, **decided).endswith(said)


def test_of_what_is_open_no_word_denies_the_gain_that_the_answer_tells() -> None:
    """Where a gain is shown, and its images are not decided."""
    record = cast(
        SearchRecord,
        SimpleNamespace(entries=[entry("tome", "undecided", 3)], distance="mse"),
    )
    [meaning] = _words(record)
    assert "gate judged" not in meaning
    assert "a gain without harm is neither shown nor excluded" in meaning


def test_what_makes_several_images_is_told_per_image() -> None:
    single = entry("workload.batch_size=4", "fail", 1)
    several = replace(single, per_image=True)
    assert "was about 1.50× faster per image, but" in answered([several])
    assert "was about 1.50× faster, but" in answered([single])


def test_a_search_for_less_memory_is_answered_in_memory() -> None:
    """What is faster is none of its business, and what takes less memory may be slower."""
    smaller = replace(
        entry("memory=group_offload", "fail", 1), speedup=0.5, memory_ratio=0.6
    )
    faster = replace(entry("caching=deepcache", "fail", 1), memory_ratio=1.1)
    said = answered([faster, smaller], wanted="memory")
    assert "tried takes less memory and keeps the images" in said
    assert "memory=group_offload took about 0.60× the memory, but" in said
    left = replace(smaller, fate="not enough runs")
    said = answered([faster, left], unjudged=390.0, wanted="memory")
    assert said.startswith(
        "Undecided: memory=group_offload took about 0.60× the memory in a first look"
    )


def test_of_equally_fast_ones_the_closest_is_judged_first() -> None:
    """Two of one speed, of which a budget may judge one: 5 % is what processes differ by."""
    noise = Scatter(0.05**2, 1)
    losses = {"spectrum": -0.637, "deepcache": -0.61, "first_block": -0.5}
    distances = {"spectrum": 1.1e-4, "deepcache": 8.2e-5, "first_block": 1e-5}
    search = SimpleNamespace(
        config=SimpleNamespace(objectives=["latency"]),
        _races=0,
        _standings=lambda _: {
            name: [RatioStanding(loss, 1, noise)] for name, loss in losses.items()
        },
        results=SimpleNamespace(
            all_findings=lambda _: {
                name: [SimpleNamespace(losses={"distance": distance})]
                for name, distance in distances.items()
            }
        ),
    )
    search._as_fast = lambda order: Search._as_fast(cast(Search, search), order)
    order = Search._closest_first(cast(Search, search), list(losses))
    assert order == ["deepcache", "spectrum", "first_block"]
    search.config.objectives = ["latency", "distance"]
    assert Search._closest_first(cast(Search, search), list(losses)) == list(losses)


def test_the_whole_budget_of_the_next_call_is_named() -> None:
    tome = entry("caching=tome", "not enough runs", 1)
    said = answered([tome], unjudged=390.0)
    assert said.endswith(
        "With search.budget_s=480 (sdopt optimize --budget 8m) the same command goes on and judges them."
    )
    more = answered([tome], ["caching=tome", "caching=deepcache"], unjudged=390.0)
    assert more == f"{said} 1 of 2 options was not tried."
    said = answered([tome], unjudged=90.0)
    assert "search.budget_s=360 " in said, "more than the 300 s that did not suffice"


def test_what_a_judgement_has_timed_is_told_before_its_images_are_judged() -> None:
    """The figures of the judged study as it stands, with their interval, and not those of the first look."""
    result = ended_early()
    results = SimpleNamespace(judged=lambda: [("final", result)])
    search = cast(Search, SimpleNamespace(results=results, config=search_file()))
    begun = _begun(search)
    assert begun.keys() == {row.name for row in result.candidates}
    name, finding = "deep cache", begun["deep cache"]
    tried = entry_of(Combination(name, ()), "not enough runs", "", [finding])
    assert f"{tried.speedup:.2f}" == f"{finding.row.speedup.interval.estimate:.2f}"  # type: ignore[union-attr]
    said = answered([replace(tried, low=1.82, high=2.34)], unjudged=390.0)
    assert said.startswith(
        "Undecided: deep cache was 1.96× [1.82, 2.34] faster so far; the budget"
    )
    result.status = "finished"
    assert not _begun(search)


def test_what_failed_is_named_and_what_was_faster_goes_on() -> None:
    failed = SimpleNamespace(name="caching=deepcache", speed="faster", images="worse")
    entries = [
        entry("caching=spectrum", "not judged", 1),
        entry("caching=tome", "not judged", 1),
        replace(entry("caching=deepcache", "fail", 3), judged=True),
    ]
    said = answered(entries, rows={"it": failed})
    assert said.startswith("Keep the baseline: one of 3 combinations was judged")
    assert "(caching=deepcache: faster, images worse)" in said
    more = "2 more were faster in a first look; caching=spectrum was about 1.50× faster"
    assert more in said
    assert "Not judged" not in answered(entries[2:], rows={"it": failed})


def test_no_password_is_among_the_parameters_of_a_run() -> None:
    storage = "mysql://me:secret@host/trials"
    config = search_config(["search.groups=[precision]", f"search.storage='{storage}'"])
    given = ["precision=bf16", "tracking.uri=https://me:secret@host"]
    parameters = parameters_of(config, given)
    assert parameters["search.storage"] == "mysql://me:***@host/trials"
    assert parameters["given"] == "precision=bf16 tracking.uri=https://me:***@host"


def test_a_run_of_a_combination_has_tags_of_its_own_work() -> None:
    record = cast(SearchRecord, SimpleNamespace(distance="mse"))
    tags = {"steps": "25", "batch": "1", "size": "64", "device": "a card"}
    chosen = entry(
        "fewer", "not enough runs", 1, "workload.steps=15", "+workload.batch_size=4"
    )
    run = trial_run(chosen, record, tags, started=0)
    assert run.tags["steps"] == run.parameters["workload.steps"] == "15"
    assert run.tags["batch"] == "4"
    assert (run.tags["size"], run.tags["device"]) == ("64", "a card")
