"""Puts the answer of a study into one sentence, and what it rests on into notes."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.verdicts import Verdict
from sdopt.statistics.giving_up import bound_text
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP
from sdopt.statistics.objections import wires_of
from sdopt.statistics.reasons import UNDISTURBED
from sdopt.statistics.rows import PSNR, Row
from sdopt.statistics.scale import Decision, Images, Speed
from sdopt.statistics.words import change_text, shortened, times_text, unit_text


def answer_of(result: StudyResult, rows: Sequence[Row], best: Row | None) -> str:
    """Returns the answer of a study, from its rows, best first, and the one that is recommended."""
    return f"{_reservations(result)}{_answer(rows, best)}"


def _answer(rows: Sequence[Row], best: Row | None) -> str:
    candidates = sorted((row for row in rows if not row.is_baseline), key=lambda row: row.speed is None)
    baseline = next((row for row in rows if row.is_baseline), None)
    if not candidates:
        return "Nothing was compared with the baseline."
    if best is not None:
        return f"{described(best, baseline)}."
    for row in candidates:
        if row.speed is Speed.FASTER and row.decision is Decision.UNDECIDED:
            return unconfirmed(row, baseline)
    return _nothing_better(candidates, baseline)


def _nothing_better(candidates: Sequence[Row], baseline: Row | None) -> str:
    """Returns the answer where no variant is shown to be better than the baseline."""
    first = candidates[0]
    text = described(first, baseline)
    if first.speed is None:
        return _untimed(candidates, baseline)
    if all(row.speed in (Speed.FEW, None) for row in candidates):
        because = f"; {first.because}" if first.because else ""
        return f"{lacking_text(first)}: {text}{because}."
    if len(candidates) > 1:
        return _keep_the_baseline(candidates, baseline)
    if first.speed is Speed.FASTER:
        return f"{text}: {shortened(first.because)}."
    return f"Keep the baseline: {text}."


def _keep_the_baseline(candidates: Sequence[Row], baseline: Row | None) -> str:
    first, counts = candidates[0], []
    for speed in (*Speed, None):
        count = sum(row.speed is speed for row in candidates)
        if count:
            counts.append(f"{count} {speed or 'not measured'}")
    text = f"Keep the baseline: none of {len(candidates)} is shown to be better ({', '.join(counts)})."
    if first.speed is Speed.FASTER:
        return f"{text} The fastest: {described(first, baseline)}: {shortened(first.because)}."
    trade = next((row for row in candidates if row.pays), None)
    return f"{text} A trade: {described(trade, baseline)}." if trade else text


def unconfirmed(row: Row, baseline: Row | None) -> str:
    """Returns the answer for a gain that nothing speaks against and that is not shown yet: it, why, and what to do."""
    rulings = row.judgement.rulings if row.judgement else []
    disturbed = any(ruling.rule == UNDISTURBED and ruling.verdict is not Verdict.PASS for ruling in rulings)
    when = " while nothing else runs here" if disturbed else ""
    text = f"{described(row, baseline)}. Not confirmed yet: {shortened(row.because)}."
    # Of images and times of other programs, and of what no command composes, none is known.
    return f"{text} To confirm it, measure it again{when}: `{row.command}`." if row.command else text


def lacking_text(row: Row) -> str:
    """Returns why a speed-up tells nothing yet: too few runs, or no repeated baseline."""
    bounded = row.speedup is not None and row.speedup.interval.low is not None
    return "Nothing shows which difference is chance" if bounded else "Not enough runs to tell"


def _reservations(result: StudyResult) -> str:
    """Returns what comes before the answer: that images of other programs were made or saved in other ways."""
    baseline, words = result.variant(result.baseline), ""
    for variant in result.candidates:
        if variant.unlike:
            words += (
                f"Not the same work: the images of {variant.name} say {', '.join(variant.unlike)}, so what differs is "
                "not the option's alone. "
            )
        if apart := variant.files_apart(baseline):
            words += f"{variant.name}: {apart}: what a format loses counts as a difference. "
    return words


def _untimed(candidates: Sequence[Row], baseline: Row | None) -> str:
    """Returns the answer where no time was compared: images alone, or what failed."""
    first = candidates[0]
    if baseline is not None and baseline.status.failure:
        return _baseline_failed(baseline)
    pictured = [f"{row.name}: {_images_text(row)}" for row in candidates if row.images]
    if pictured:
        return f"{'; '.join(pictured)} (not timed)."
    timed = [row for row in candidates if row.speedup is not None and row.status is Status.INTERRUPTED]
    if timed:
        fastest = max(timed, key=lambda row: row.speedup.interval.estimate if row.speedup else 0.0)
        assert fastest.speedup is not None
        return f"Not all was measured ({fastest.because}); so far {fastest.name}: {fastest.speedup.text}, not judged."
    fully = "fully " if first.status is Status.INTERRUPTED else ""
    return f"Nothing was {fully}measured beside the baseline: {first.name}: {first.because}."


def _baseline_failed(baseline: Row) -> str:
    text = f"Nothing was compared: the baseline failed: {shortened(baseline.variant.reason)}"
    if baseline.status is Status.OUT_OF_MEMORY:
        text += "; choose one that fits, as in study.baseline=[precision:fp16,memory:model_offload], or as the "
        text += "first variant of study=explicit"
    return f"{text}."


# One variant ----------------------------------------------------------------------------------------------------------


def described(row: Row, baseline: Row | None, name: str = "") -> str:
    """Returns what a variant does in one line: speed, memory where it changes, and images.

    A trade is said as one: what it gains first, then what it costs. `name` is the variant's where it is not the row's.
    """
    name = name or row.name
    memory, images = _memory_text(row), _images_text(row)
    if row.at_least_slower is not None:
        details = "; ".join(filter(None, [memory, images]))
        text = f"{name} is at least {bound_text(row.at_least_slower)} slower"
        return f"{text}, {details}" if details else text
    if row.speedup is None or row.speed is None:
        return f"{name} was not measured ({row.because})"
    speed = _speed_text(row, baseline)
    saves = any(gain.partition("/")[0] == MEMORY_RATIO.name for gain in row.gains)
    if saves and row.speed is not Speed.FASTER:
        text = f"{name} {memory}, {speed}"
    else:
        text = f"{name}: {speed}" if row.speed is Speed.CLOSE else f"{name} is {speed}"
        text += f", {memory}" if memory else ""
    return f"{text}; {images}" if images else text


def _speed_text(row: Row, baseline: Row | None) -> str:
    ratio, unit = row.speedup, unit_text(row.per_image)
    assert ratio is not None
    if SPEEDUP.name not in row.claimed_ratios:  # there are several shapes
        speedups = []
        for at in row.shapes:
            at_shape = at.over_baseline.get(SPEEDUP.name)
            if at_shape:
                speedups.append(f"{at_shape.interval.estimate:.2f}× at {at.shape}")
        return f"{row.speed}{unit}: {'; '.join(speedups)}"
    if row.speed is Speed.CLOSE:
        return f"speed{unit} too close to call ({ratio.text})"
    change = f"{change_text(ratio)}{unit}{_from_to(row, baseline)}"
    if row.speed is Speed.FEW:
        count = len(row.variant.samples)
        return f"{change} in {'one run' if count == 1 else f'{count} runs'} each"
    return change


def _memory_text(row: Row) -> str:
    """Returns how the memory changes, as in `saves 22 % memory`; "" where it is not shown to."""
    if row.memory is None or not row.memory.gain:
        return ""
    ratio = row.memory.interval.estimate
    if ratio < 1:
        text = f"saves {100 * (1 - ratio):.0f} % memory"
    else:
        text = f"takes {ratio:.1f}× the memory" if ratio >= 2 else f"takes {100 * (ratio - 1):.0f} % more memory"
    return f"{text}{_at_main_shape(row)}"


def _at_main_shape(row: Row) -> str:
    """Returns of which shape a figure is that is not shown of each one; "" where there is one shape."""
    return f" at {row.shape}" if row.further else ""


def _from_to(row: Row, baseline: Row | None) -> str:
    """Returns both times; "" where they differ the other way than the ratio, which pairs the calls of each round."""
    before, after = baseline.time if baseline else None, row.time
    if not (before and after and row.speedup):
        return ""
    agree = (before.estimate >= after.estimate) == (row.speedup.interval.estimate >= 1)
    return f" ({times_text(before.estimate, after.estimate)})" if agree else ""


_ALIKE = ((math.inf, "identical"), (40.0, "nearly identical"), (30.0, "similar"), (0.0, "visibly different"))
"""How alike images are that no gate judged, by the least PSNR in dB."""


def _images_text(row: Row) -> str:
    """Returns what is known of a variant's images, in words, with the figure that is read first."""
    if row.images is None:
        return ""
    return f"{_likeness(row, row.images)}{_at_main_shape(row)}"


def _likeness(row: Row, images: Images) -> str:
    if row.variant.trips:
        return f"images broken ({wires_of(row.variant)})"
    metric, figure = row.distance
    if images is not Images.NOT_JUDGED or not metric:
        shown = metric == PSNR and figure not in ("", "equal")
        return f"images {images} ({figure} dB)" if shown else f"images {images}"
    if metric != PSNR:
        return f"images not judged ({metric} {figure})"
    score = row.scores[metric].estimate
    alike = next(word for least, word in _ALIKE if (math.inf if score is None else score) >= least)
    return f"images {alike}" if score is None else f"images {alike} ({figure} dB), not judged"


# Notes ----------------------------------------------------------------------------------------------------------------


def notes_of(result: StudyResult, rows: Sequence[Row]) -> Iterator[str]:
    """Yields what verdicts follow from, what they lack, and how to have the images judged."""
    yield from _budget_notes(result, rows)
    yield from _work_notes(result)
    yield from _judging_notes(result)


def _budget_notes(result: StudyResult, rows: Sequence[Row]) -> Iterator[str]:
    """Yields what a study left out to end within its budget, and which verdicts that leaves open."""
    budget, protocol = result.budget, result.config.protocol
    if budget is None or not budget.spared:
        return
    left_out = []
    if budget.rounds:
        left_out.append(f"{protocol.rounds - budget.rounds} of {protocol.rounds} rounds")
    for name, count in budget.processes.items():
        left_out.append(f"{result.config.replicates - count} of {result.config.replicates} processes of {name}")
    if budget.prompts:
        left_out.append(f"the images of all but {budget.prompts} prompts")
    if not budget.evidence:
        left_out.append("the evidence of all but the first process of each variant")
    if not budget.stages:
        left_out.append("the times of stages")
    text = f"protocol.budget_s={protocol.budget_s:g} left out {', '.join(left_out) or 'repeated images'}"
    open_speeds = (Speed.CLOSE, Speed.FEW)
    undecided = [row.name for row in rows if row.speed in open_speeds or row.decision is Decision.UNDECIDED]
    if undecided:
        text += f"; it may be why these are not decided: {', '.join(undecided)}"
    yield f"{text}. Resuming with a larger one measures the rest."


def _work_notes(result: StudyResult) -> Iterator[str]:
    """Yields in what the work of variants differs, as far as that is part of the comparison."""
    if result.per_image:
        names: dict[int, list[str]] = {}
        for variant in result.variants:
            names.setdefault(variant.config.images_per_call, []).append(variant.name)
        counts = "; ".join(f"{count}: {', '.join(listed)}" for count, listed in sorted(names.items()))
        yield (
            "Times and speed-ups are per image, because calls make different numbers of images "
            f"({counts}). Memory is that of a whole call."
        )
    baseline = result.variant(result.baseline)
    for variant in result.candidates:
        if chosen := _chosen_otherwise(variant, baseline):
            yield f"{variant.name} does other work by choice: {', '.join(chosen)}."


def _chosen_otherwise(variant: VariantResult, baseline: VariantResult) -> list[str]:
    """Returns what a variant chooses of the work otherwise than the baseline, beyond what its name says."""
    chosen = variant.config.chosen_beside(baseline.config)
    return [f"{key} {old} → {new}" for key, (new, old) in chosen.items() if f"{key}=" not in variant.name]


def _judging_notes(result: StudyResult) -> Iterator[str]:
    if result.judgements:
        at_shapes = chain.from_iterable(edge.shapes for edge in result.comparisons)
        bounded = any(at.speedup and at.speedup.low for at in at_shapes)
        followed = "; speed follows the two-sided intervals" if bounded else ""
        yield f"Images and pass or fail follow gate={result.gate}{followed}."
        return
    if result.variant(result.baseline).status.failure:
        return  # no gate has anything to judge
    if not any(variant.images for variant in result.variants):
        yield "There are no images to judge: measure again with gate=default, which draws them."
        return
    yield f"The images were not judged: {_how_to_judge(result)}."


def _how_to_judge(result: StudyResult) -> str:
    from sdopt.statistics.bounds import prompts_to_exclude  # imports scipy, which takes a second

    if result.is_imported:
        return "run `sdopt judge` on the folders again, with gate=default"
    # gate=default tolerates that 5 % of all prompts exceed a limit; with fewer prompts, no lossy option can pass.
    if (result.config.quality.prompt_count or 0) < prompts_to_exclude(share=0.05, confidence=0.95):
        return "measure again with gate=default, which generates more of them"
    return "add gate=default, or run `sdopt gate <folder>` on this result"
