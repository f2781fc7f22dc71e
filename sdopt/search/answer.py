"""Answers a search: the record of all candidates, and the answer in one sentence."""

import math
from collections.abc import Sequence
from dataclasses import replace

from sdopt.record.records import Status, StudyResult
from sdopt.report.header import header_of
from sdopt.report.program import said_of
from sdopt.schema import Gate
from sdopt.search.findings import RATIOS, CandidateFinding, findings_of
from sdopt.search.racing import UNKNOWN, front_of
from sdopt.search.record import Fate, SearchEntry, SearchRecord
from sdopt.search.run import Search, standing_of
from sdopt.search.space import Combination
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Decision, Speed
from sdopt.statistics.sentences import described, unconfirmed
from sdopt.statistics.summary import Summary, summary_of
from sdopt.statistics.words import shortened, start_words


def record_of(search: Search, judged: StudyResult | None, ended: bool = True) -> SearchRecord:
    """Returns what a search has found so far; `judged` is the study of the finalists, once the search has reached it.

    `ended` is false if the search was interrupted before it took all its steps.
    """
    found = search.all_findings(("screen-", "race-"))
    summary = summary_of(judged) if judged else None
    answers = {row.name: row for row in summary.candidates} if summary else {}
    last = findings_of(judged, search.config, Gate()) if judged else {}
    passed = [name for name, finding in last.items() if answers[name].pays and not finding.out]
    winner = passed[0] if passed else None
    # A finalist that was faster, and of which neither that nor the opposite is shown.
    open_still = [
        name
        for name, finding in last.items()
        if (row := answers[name]).status is Status.OK
        and row.decision is not Decision.FAIL
        and row.speed is not Speed.SLOWER
        and not (row.pays or finding.out)
        and (finding.speedup or 0) > 1
    ]
    undecided = open_still[0] if open_still and not winner else None
    objectives = search.config.objectives
    front = front_of({name: [last[name].losses[objective] for objective in objectives] for name in passed})
    entries = []
    for candidate in search.trials.candidates:
        name = candidate.name
        if name in last:
            fate = Fate.PASSED if name in passed else _not_passed(answers[name], last[name])
            fate = Fate.WINNER if name == winner else fate
            entry = entry_of(candidate, fate, _because(answers[name], last[name]), [last[name]])
            speedup = answers[name].speedup
            low, high = (speedup.interval.low, speedup.interval.high) if speedup else (None, None)
            entries.append(
                replace(entry, judged=True, low=low, high=high, on_front=name in front, command=answers[name].command)
            )
        else:
            fate, why = search.dropped.get(name, (Fate.OPEN, ""))
            entries.append(entry_of(candidate, fate, why, found.get(name, [])))
    best = _fastest(entries, Fate.OPEN)
    fastest = f"; the fastest so far, not judged: {best.name}, about {best.speedup:.2f}×" if best else ""
    so_far = f"The search has not ended; {len(entries)} combinations were proposed so far{fastest}."
    if search.unjudged is not None and best is not None:
        so_far = _unjudged(best, search)
    started = search.trials.started
    shown = next(iter(search.results("screen-")), judged)
    return SearchRecord(
        name=search.config.title,
        folder=str(search.studies.folder),
        started=started.isoformat(timespec="seconds") if started else "",
        header=header_of(shown) if shown else [],
        objectives=list(objectives),
        distance=search.config.distance,
        sentence=_sentence(winner, undecided, passed, summary, last, entries)
        if ended and search.unjudged is None
        else so_far,
        entries=sorted(entries, key=lambda entry: (list(Fate).index(entry.fate), -(entry.speedup or 0.0))),
        conflicts=search.trials.conflicts,
        left_out=list(search.space.left_out),
        notes=_notes(search, judged),
        winner=winner,
        undecided=undecided,
        lines=list(answers[winner].lines) if winner else [],
        program_run=said_of(answers[winner].variant.program) if winner else "",
    )


def _unjudged(best: SearchEntry, search: Search) -> str:
    """Returns what a search says of its best candidate if the budget left no time to judge it."""
    needed_s = search.config.budget_s - search.budget.left_s + (search.unjudged or 0.0)
    return (
        f"Undecided: {best.name} was about {best.speedup:.2f}× faster in a first look; the budget of "
        f"{search.config.budget_s / 60:.3g} min left no time to judge its images. The same command with about "
        f"{math.ceil(needed_s / 60)} min goes on, and judges them."
    )


def _not_passed(row: Row, finding: CandidateFinding) -> Fate:
    """Returns the fate of a judged candidate that did not pass: whether something speaks against it."""
    against = row.decision is Decision.FAIL or row.speed is Speed.SLOWER or row.status is not Status.OK
    return Fate.FAILED if against or finding.out else Fate.UNDECIDED


def _because(row: Row, finding: CandidateFinding) -> str:
    """Returns why a finalist passed or not; the row repeats the gate's objections."""
    out = finding.out if row.pays else row.because
    images = f"images {row.images}" if row.images else ""
    return "; ".join(filter(None, (str(row.speed or ""), out, images)))


def entry_of(candidate: Combination, fate: Fate, because: str, findings: Sequence[CandidateFinding]) -> SearchEntry:
    """Returns the entry of a candidate: means over its studies, the largest memory, and the last study's images."""
    timed = [finding for finding in findings if "latency" in finding.losses]
    last = findings[-1] if findings else None
    return SearchEntry(
        name=candidate.name,
        overrides=list(candidate.overrides),
        fate=fate,
        because=because,
        speedup=math.exp(-standing_of(timed, "latency", UNKNOWN).loss) if timed else None,
        memory_ratio=last.memory_ratio if last else None,
        latency_s=last.latency_s if last else None,
        image_s=last.image_s if last else None,
        per_image=any(finding.per_image for finding in findings),
        memory_gib=max((finding.memory_gib for finding in findings if finding.memory_gib), default=None),
        distance=last.distance if last else None,
        processes=sum(finding.processes for finding in findings),
        start=last.start if last else None,
        recompiles=last.recompiles if last else None,
        columns=dict(last.columns) if last else {},
    )


def _sentence(
    winner: str | None,
    undecided: str | None,
    passed: Sequence[str],
    summary: Summary | None,
    last: dict[str, CandidateFinding],
    entries: Sequence[SearchEntry],
) -> str:
    tried = len(entries)
    row = summary.row(winner) if summary and winner else None
    if summary is not None and row is not None:
        start = start_words(last[row.name].start)
        told = [described(row, summary.row(summary.result.baseline))]
        told += [f"{start[0]} more {start[1]}, {start[2]}"] if start else []
        also = f" {len(passed) - 1} more passed." if len(passed) > 1 else ""
        which = "that the gate passes" if summary.result.config.gate.judges else "with a gain; no gate judged"
        best = "The only combination that was tried" if tried == 1 else f"The best of {tried} combinations {which}"
        return f"{'; '.join(told)}. {best}.{also}"
    if summary is None:
        if not tried:
            return "No combination was tried."
        best_out = _fastest(entries, Fate.FAILED)
        refused = (
            f"; {best_out.name} was about {best_out.speedup:.2f}×, but: {shortened(best_out.because)}"
            if best_out
            else ""
        )
        kept = f"none of the {tried} combinations that were tried is faster and keeps the images"
        return f"Keep the baseline: {kept}{refused}."
    row = summary.row(undecided) if undecided else None
    if row is not None:
        return unconfirmed(row, summary.row(summary.result.baseline))
    judged = len(summary.candidates)
    none = f"{judged} of {tried} combinations were judged, and none of them is"
    if judged == 1:
        none = f"one of {tried} combinations was judged, and it is not" if tried > 1 else "the only combination is not"
    return f"Keep the baseline: {none} shown to be better."


def _fastest(entries: Sequence[SearchEntry], fate: Fate) -> SearchEntry | None:
    faster = [entry for entry in entries if entry.fate is fate and (entry.speedup or 0) > 1]
    return max(faster, key=lambda entry: entry.speedup or 0, default=None)


def _notes(search: Search, judged: StudyResult | None) -> list[str]:
    config = search.config
    notes = [search.trials.ended] if search.trials.ended else []
    if spoiled := search.trials.spoiled:
        notes.append(
            "Combinations were not screened if they contain an option whose images were already bad without the others "
            f"(search.skip_spoiled=false screens them, too): {'; '.join(spoiled)}."
        )
    if noise := _noise(search):
        which = "the best one" if len(config.objectives) == 1 else "any of the front"
        notes.append(
            f"A candidate is dropped only if another one is better in {' and '.join(config.objectives)} by more "
            f"than noise explains ({noise}). The chance that {which} was dropped is at most {100 * config.error:g} % "
            "(search.error)."
        )
    if judged is not None:
        notes.append(
            "The judged candidates were measured again, with other prompts, noise and processes than those they were "
            "chosen by. The figures of all other candidates are means of one or a few processes, and those of the best "
            "ones are too good, because they are the best of many."
        )
    return notes


def _noise(search: Search) -> str:
    """Returns how far processes or prompts differ; "" if no control measured it."""
    spreads = []
    for objective in search.config.objectives:
        noise = search.noise(objective, ("screen-", "race-"))
        if objective not in RATIOS:
            spreads.append(f"{objective}: from prompt to prompt")
        elif noise.degrees:
            spread = 100 * math.expm1(math.sqrt(noise.variance))
            controls = "1 repeated baseline" if noise.degrees == 1 else f"{noise.degrees} repeated baselines"
            spreads.append(f"{objective}: {spread:.1f} % from process to process, by {controls}")
        else:
            return ""
    return "; ".join(spreads)
