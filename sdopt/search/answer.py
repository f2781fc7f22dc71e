"""Answers a search: the record of all candidates, and the answer in one sentence."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from sdopt.config.models import own_functions
from sdopt.errors import counted
from sdopt.preparation import remarks_on_model
from sdopt.record.records import StudyResult
from sdopt.report.columns import OF_ONE_STUDY, further_columns, values_of
from sdopt.report.header import header_of
from sdopt.report.program import said_of, said_of_whole
from sdopt.report.sentences.answer import described, unconfirmed
from sdopt.schema import Gate
from sdopt.search.findings import RATIOS, CandidateFinding, findings_of
from sdopt.search.judgements import Judgements
from sdopt.search.racing import UNKNOWN, front_of
from sdopt.search.record import Fate, SearchEntry, SearchRecord
from sdopt.search.results import standing_of
from sdopt.search.run import SLACK, Search, budget_text
from sdopt.search.space import Combination
from sdopt.statistics.rows import Row
from sdopt.statistics.words import shortened, start_words, unit_text


def record_of(search: Search, ended: bool = True) -> SearchRecord:
    """Returns what a search has found so far; `ended` is false if it was interrupted before it took all its steps."""
    by_name = search.results.all_findings(("screen-", "race-"))
    judgements = search.judgements
    winner = next(iter(judgements.passed), None)
    undecided = None if winner else next(iter(judgements.undecided), None)
    begun = _begun(search)
    entries = []
    for candidate in search.trials.candidates:
        if candidate.name in judgements.rows:
            entries.append(
                _judged_entry(candidate, judgements, search.config.objectives)
            )
        else:
            fate, why = search.dropped.get(candidate.name, ("not enough runs", ""))
            if search.unjudged is not None and candidate.name not in search.dropped:
                why = "search.budget_s left no time to judge it"
            entry = entry_of(candidate, fate, why, by_name.get(candidate.name, []))
            finding = begun.get(candidate.name)
            if finding is not None and candidate.name not in search.dropped:
                entry = _with_interval(
                    entry_of(candidate, fate, why, [finding]), finding
                )
            entries.append(entry)
    studies = [summary.result for summary in judgements.studies.values()]
    example = next(iter(search.results.of("screen-")), next(iter(studies), None))
    started = search.trials.started
    best = winner or undecided
    answer = _Answer(search, judgements, entries)
    named = None if best else answer.best("not enough runs")
    row = judgements.rows[best] if best else None
    said = (
        said_of if winner else said_of_whole
    )  # of what is undecided, no lines are shown
    return SearchRecord(
        name=search.config.title,
        folder=str(search.studies.folder),
        started=started.isoformat(timespec="seconds") if started else "",
        header=header_of(example) if example else [],
        objectives=list(search.config.objectives),
        distance=search.config.distance,
        sentence=answer.sentence(ended),
        entries=sorted(
            entries,
            key=lambda entry: (
                entry is not named,  # which the answer names
                get_args(Fate).index(entry.fate),
                -(entry.speedup or 0.0),
            ),
        ),
        conflicts=search.trials.conflicts,
        left_out=list(search.space.left_out),
        notes=_notes(search, studies, example, entries),
        winner=winner,
        undecided=undecided,
        lines=list(row.lines) if row and winner else [],
        program_run=said(row.variant.program) if row else "",
        judged=list(judgements.studies),
        remarks=remarks_on_model(search.space.variants([])[0]),
        config_dir=_whole(search.studies.config_dir),
        loads=row is None or not own_functions(row.variant.overrides),
    )


def _whole(folder: Path | None) -> str:
    """Returns a folder as a program finds it from anywhere; "" without one."""
    return "" if folder is None else str(folder.expanduser().absolute())


def _begun(search: Search) -> dict[str, CandidateFinding]:
    """Returns what a judged study that its time ended has timed of its candidates, by name."""
    timed = {}
    for _, result in search.results.judged()[-1:]:
        if result.status != "interrupted":
            continue
        for name, finding in findings_of(result, search.config, Gate()).items():
            if "latency" in finding.losses:
                timed[name] = finding
    return timed


def _with_interval(entry: SearchEntry, finding: CandidateFinding) -> SearchEntry:
    """Returns an entry with the interval of the speed-up that its study shows."""
    interval = finding.row.speedup.interval if finding.row.speedup else None
    if interval is None:
        return entry
    return replace(entry, low=interval.low, high=interval.high)


def _judged_entry(
    candidate: Combination, judgements: Judgements, objectives: Sequence[str]
) -> SearchEntry:
    """Returns the entry of a candidate that was judged, with the figures of that study."""
    name, passed = candidate.name, judgements.passed
    fate: Fate
    row, finding = judgements.rows[name], judgements.findings[name]
    fate = "fail" if name in judgements.failed else "undecided"
    if name in passed:
        fate = "winner" if name == passed[0] else "pass"
    losses = {}
    for other in passed:
        of_other = judgements.findings[other].losses
        losses[other] = [of_other[objective] for objective in objectives]
    entry = entry_of(candidate, fate, _because(row, finding), [finding])
    return replace(
        _with_interval(entry, finding),
        judged=True,
        # As the tables of its study have it.
        memory_gib=entry.memory_gib if row.peak_gib is None else row.peak_gib,
        on_front=name in front_of(losses),
        command=row.command,
        study=judgements.folders[name],
    )


class _Answer:
    """The answer of a search in words.

    Args:
        search: what was measured, and within which budget.
        judgements: what its judged studies decided.
        entries: all candidates so far.
    """

    def __init__(
        self, search: Search, judgements: Judgements, entries: Sequence[SearchEntry]
    ) -> None:
        self._search, self._judgements, self._entries = search, judgements, entries
        self._of_memory = judgements.wanted == "memory"
        self._tried = sum(map(_was_tried, entries))

    def sentence(self, ended: bool) -> str:
        """Returns the answer, and what is still to do; `ended` is false if it was interrupted."""
        search = self._search
        if ended and search.unjudged is None:
            return self._whole()
        best = self.best("not enough runs")
        passed = f"{self._winning()} " if self._judgements.passed else ""
        if search.unjudged is not None and best is not None:
            return f"{passed}{self._unjudged(best)}"
        so_far = ""
        if best is not None:
            so_far = (
                f"; the best so far, not judged: {best.name}, which {self._gain(best)}"
            )
        proposed = counted(len(self._entries), "combination")
        return f"{passed}The search has not ended; {proposed} proposed so far{so_far}."

    def _whole(self) -> str:
        judgements = self._judgements
        if judgements.passed:
            return self._winning()
        if not judgements.studies:
            return self._nothing_judged()
        if judgements.undecided:
            first = judgements.undecided[0]
            of_first = judgements.rows[first], judgements.baseline_of(first)
            return f"{unconfirmed(*of_first)}{self._left()}"
        return f"{self._kept(self._none_passed())}{self._not_judged()}"

    def _winning(self) -> str:
        """Returns the answer of a search with a winner."""
        judgements = self._judgements
        winner, *others = judgements.passed
        start = start_words(judgements.rows[winner].break_even)
        said = described(judgements.rows[winner], judgements.baseline_of(winner))
        if start:
            said += f"; {start[0]} more {start[1]}, {start[2]}"
        gate = judgements.studies[judgements.folders[winner]].result.config.gate
        which, gained = "that the gate passes", "passed"
        if not gate.judges:
            which, gained = "with a gain (no gate judged)", "gained"
        best = f"Of {self._tried} combinations that were tried, it was ranked first among those {which}"
        if self._tried == 1:
            best = "The only combination that was tried"
        more = f" {len(others)} more {gained}." if others else ""
        return f"{said}. {best}.{more}{self._left()}"

    def _unjudged(self, best: SearchEntry) -> str:
        """Returns what is said of the best candidate if the budget left no time to judge it."""
        search = self._search
        needed_min = math.ceil(SLACK * (search.ready_s + (search.unjudged or 0.0)) / 60)
        # What did not suffice is not named again: the estimate may be below what it takes.
        needed_min = max(needed_min, math.floor(search.config.budget_s / 60) + 1)
        untried = self._untried()
        left = f" {untried}." if untried else ""
        look = "in a first look" if best.low is None else "so far"
        return (
            f"Undecided: {best.name} {self._gain(best)} {look}; the budget of "
            f"{search.config.budget_s / 60:.3g} min left no time to judge its images. With {budget_text(needed_min)} "
            f"the same command goes on and judges them.{left}"
        )

    def _nothing_judged(self) -> str:
        """Returns the answer of a search of which no combination was worth to be judged."""
        if not self._tried:
            return "No combination was tried."
        best, refused = self.best("fail"), ""
        if best is not None:
            refused = (
                f"; {best.name} {self._gain(best)}, but: {shortened(best.because)}"
            )
        kept = f"none of the {self._tried} combinations that were tried"
        if self._tried == 1:
            kept = "nothing that was tried (1 combination)"
        gains = "takes less memory" if self._of_memory else "is faster"
        return self._kept(f"{kept} {gains} and keeps the images{refused}")

    def _none_passed(self) -> str:
        """Returns that all that were judged failed, and by what the first of them did."""
        rows = self._judgements.rows
        none = f"{len(rows)} of {self._tried} combinations were judged, and none of them passes"
        if len(rows) == 1:
            which = "the only combination that was tried"
            if self._tried > 1:
                which = f"one of {self._tried} combinations"
            none = f"{which} was judged, and it does not pass"
        row = next(iter(rows.values()))
        verdicts = [str(row.speed or ""), f"images {row.images}" if row.images else ""]
        return f"{none} ({row.name}: {', '.join(filter(None, verdicts))})"

    def _not_judged(self) -> str:
        """Returns how many gained in a first look and were not judged; "" if none did."""
        better = self._better("not judged")
        if not better:
            return ""
        best = f"{better[0].name} {self._gain(better[0])}"
        also = f"{best} in a first look"
        if len(better) > 1:
            gained = "took less memory" if self._of_memory else "were faster"
            also = f"{len(better)} more {gained} in a first look; {best}"
        return f" Not judged: {also}; a larger budget goes on with what is left."

    def _kept(self, reason: str) -> str:
        """Returns the answer of a search without a winner: a baseline is kept where nothing is left to try."""
        untried = self._untried()
        if not untried:
            return f"Keep the baseline: {reason}."
        return f"Undecided: {untried}; {reason}. {self._goes_on}"

    def _left(self) -> str:
        """Returns what more time would try; "" if every option was tried."""
        untried = self._untried()
        return f" {untried}. {self._goes_on}" if untried else ""

    def _untried(self) -> str:
        """Returns how many options were not tried alone; "" if all were."""
        space = self._search.space
        options = space.candidates(space.alone())
        tried = {entry.name for entry in self._entries if _was_tried(entry)}
        left = sum(option.name not in tried for option in options)
        verb = "was" if left == 1 else "were"
        return f"{left} of {len(options)} options {verb} not tried" if left else ""

    @property
    def _goes_on(self) -> str:
        """How the same command tries what was not tried."""
        config = self._search.config
        limit = "budget (search.budget_s, sdopt optimize --budget)"
        if config.trials is not None and config.trials <= len(self._entries):
            limit = "search.trials"
        return f"The same command with a larger {limit} goes on."

    def best(self, fate: Fate) -> SearchEntry | None:
        """Returns the entry of a fate that gained most of what is wanted; None if none gained."""
        return next(iter(self._better(fate)), None)

    def _better(self, fate: Fate) -> list[SearchEntry]:
        """Returns the entries of a fate that gained what is wanted, the largest gain first."""

        def gain(entry: SearchEntry) -> float:
            if self._of_memory:
                return 1 / (entry.memory_ratio or math.inf)
            return entry.speedup or 0.0

        of_fate = [entry for entry in self._entries if entry.fate == fate]
        better = [entry for entry in of_fate if gain(entry) > 1]
        return sorted(better, key=gain, reverse=True)

    def _gain(self, entry: SearchEntry) -> str:
        """Returns a gain that no interval goes with, as in `was about 1.90× faster per image`."""
        if self._of_memory:
            return f"took about {entry.memory_ratio:.2f}× the memory"
        times = f"about {entry.speedup:.2f}×"
        if entry.low is not None and entry.high is not None:
            times = f"{entry.speedup:.2f}× [{entry.low:.2f}, {entry.high:.2f}]"
        return f"was {times} faster{unit_text(entry.per_image)}"


def _was_tried(entry: SearchEntry) -> bool:
    """Returns whether a candidate was measured, or failed: a study that its time ends leaves some that never ran."""
    return entry.fate != "not enough runs" or entry.processes > 0


def _because(row: Row, finding: CandidateFinding) -> str:
    """Returns why a finalist passed or not; the row repeats the gate's objections."""
    out = finding.out if row.pays else row.because
    images = f"images {row.images}" if row.images else ""
    return "; ".join(filter(None, (str(row.speed or ""), out, images)))


def entry_of(
    candidate: Combination,
    fate: Fate,
    because: str,
    findings: Sequence[CandidateFinding],
) -> SearchEntry:
    """Returns the entry of a candidate: means over its studies, the largest memory, and the last study's images."""
    entry = SearchEntry(candidate.name, list(candidate.overrides), fate, because)
    if not findings:
        return entry
    timed = [finding for finding in findings if "latency" in finding.losses]
    peaks = [finding.row.largest_memory_gib for finding in findings]
    last = findings[-1]
    row, losses, baseline = last.row, last.losses, last.baseline
    return replace(
        entry,
        speedup=math.exp(-standing_of(timed, "latency", UNKNOWN).loss)
        if timed
        else None,
        memory_ratio=math.exp(losses["memory"]) if "memory" in losses else None,
        latency_s=row.latency.estimate if row.latency else None,
        baseline_s=baseline.latency.estimate if baseline and baseline.latency else None,
        image_s=row.image_time.estimate if row.image_time else None,
        baseline_image_s=baseline.image_time.estimate
        if baseline and baseline.image_time
        else None,
        per_image=any(finding.row.per_image for finding in findings),
        memory_gib=max(filter(None, peaks), default=None),
        distance=losses.get("distance"),
        processes=sum(finding.processes for finding in findings),
        start=row.break_even,
        recompiles=row.figures.get("compile/recompiles"),
        columns=values_of(row, further_columns(OF_ONE_STUDY)),
    )


def _notes(
    search: Search,
    studies: Sequence[StudyResult],
    example: StudyResult | None,
    entries: Sequence[SearchEntry],
) -> list[str]:
    config = search.config
    notes = [search.trials.ended] if search.trials.ended else []
    if example and len(example.shapes) > 1:
        notes.append(
            f"Speed-ups, times and images are those of {example.shapes[0]}, by which candidates are ranked; "
            "each study has the other shapes."
        )
    if spoiled := search.trials.spoiled:
        notes.append(
            "Combinations were not screened if they contain an option whose images were already bad without the others "
            f"(search.skip_spoiled=false screens them, too): {'; '.join(spoiled)}."
        )
    beaten = any(entry.fate == "beaten" for entry in entries)
    if beaten and (noise := _noise(search)):
        which = "the best one" if len(config.objectives) == 1 else "any of the front"
        notes.append(
            f"A candidate is beaten only if another one is better in {' and '.join(config.objectives)} by more "
            f"than noise explains ({noise}). The chance that {which} was beaten is at most {100 * config.error:g} % "
            "(search.error)."
        )
    # A file of latents gives every study its noise.
    fixed = any(study.config.workload.latents for study in studies)
    if studies:
        others = "prompts and processes" if fixed else "prompts, noise and processes"
        notes.append(
            f"What was judged was measured again, with other {others} than those by which it was chosen."
        )
        if any(entry.processes and not entry.judged for entry in entries):
            notes.append(
                "Figures of what was not judged are means of one or a few processes; those of the best are too good, "
                "because they are the best of many."
            )
    if len(studies) > 1:
        noise = "the noise of workload.latents" if fixed else "other noise"
        notes.append(
            f"{len(studies)} calls judged, each on {noise}; each has the chance of a wrong pass that the gate has."
        )
    return notes


def _noise(search: Search) -> str:
    """Returns how far processes or prompts differ; "" if no control measured it."""
    spreads = []
    for objective in search.config.objectives:
        noise = search.results.noise(objective, ("screen-", "race-"))
        if objective not in RATIOS:
            spreads.append(f"{objective}: from prompt to prompt")
        elif noise.degrees:
            spread = 100 * math.expm1(math.sqrt(noise.variance))
            controls = (
                "1 repeated baseline"
                if noise.degrees == 1
                else f"{noise.degrees} repeated baselines"
            )
            spreads.append(
                f"{objective}: {spread:.1f} % from process to process, by {controls}"
            )
        else:
            return ""
    return "; ".join(spreads)
