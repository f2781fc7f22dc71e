"""Puts the answer of a study into one sentence."""

import math
from collections import Counter
from collections.abc import Sequence

from sdopt.record.records import Status, StudyResult
from sdopt.record.verdicts import Verdict
from sdopt.report.sentences.objections import broken_because, broken_text
from sdopt.report.sentences.rulings import lower
from sdopt.statistics.bounds import TOO_MANY_PROMPTS
from sdopt.statistics.disturbance import count_rounds
from sdopt.statistics.giving_up import bound_text
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP, measure_named
from sdopt.statistics.rows import PSNR, Row
from sdopt.statistics.scale import Images, Speed
from sdopt.statistics.words import change_text, shortened, times_text, unit_text


def answer_of(result: StudyResult, rows: Sequence[Row], best: Row | None) -> str:
    """Returns the answer of a study, from its rows, best first, and the one that is recommended."""
    text = f"{_reservations(result)}{_answer(rows, best)}"
    candidates = [row for row in rows if not row.is_baseline]
    if any(row.speed for row in candidates):
        text = f"{text}{_disturbed(result)}"
    return text


def _answer(rows: Sequence[Row], best: Row | None) -> str:
    candidates = [row for row in rows if not row.is_baseline]
    if not candidates:
        return "Nothing was compared with the baseline."
    baseline = next((row for row in rows if row.is_baseline), None)
    if best is not None:
        return f"{described(best, baseline)}."
    candidates.sort(key=tells_less)
    for row in candidates:
        if _may_be_confirmed(row) and not _is_apart(row, baseline):
            return unconfirmed(row, baseline)
    return _nothing_better(candidates, baseline)


def _may_be_confirmed(row: Row) -> bool:
    """Returns whether a variant is faster, and a gate has left open whether it is to be used."""
    if row.speed is not Speed.FASTER or is_refused(row):
        return False
    return row.decision is not None and row.decision.is_open


def _is_apart(row: Row, baseline: Row | None) -> bool:
    """Returns whether a variant cannot be compared with the baseline, however often it is measured again.

    It does other work, or its images start from other noise.
    """
    if baseline is None:
        return False
    images = row.variant.config.workload.images_per_prompt
    if images != baseline.variant.config.workload.images_per_prompt:
        return True
    return bool(row.variant.other_work(baseline.variant))


def tells_less(row: Row) -> tuple[bool, bool]:
    """Returns by what a row leads an answer less than others: it was not timed, or is broken."""
    is_untimed = row.speed is None
    is_broken = bool(broken_because(row.variant))
    return is_untimed, is_broken


def is_refused(row: Row) -> bool:
    """Returns whether a variant is not to be used, whatever more runs would tell of its speed."""
    if row.images is Images.WORSE:
        return True
    return row.decision is Verdict.FAIL


def _nothing_better(candidates: Sequence[Row], baseline: Row | None) -> str:
    """Returns the answer where no variant is shown to be better than the baseline."""
    first = candidates[0]
    if first.speed is None:
        return _untimed(candidates, baseline)
    timed = [row for row in candidates if row.speed]
    usable = [row for row in timed if not is_refused(row)]
    if usable and {row.speed for row in timed} == {Speed.FEW}:
        best = usable[0]
        text = described(best, baseline)
        because = _further_reason(best)
        if because:
            text = f"{text}; {because}"
        return f"{lacking_text(best)}: {text}."
    if len(candidates) > 1:
        return _keep_the_baseline(candidates, baseline)
    text = described(first, baseline)
    if is_refused(first):
        return f"{_advice(baseline)}: {_with_reason(text, first)}."
    if first.speed is Speed.FASTER:
        return f"{_with_reason(text, first)}."
    if first.speed is Speed.SLOWER and first.disturbance:
        text = f"{text}. Not confirmed: {shortened(first.disturbance)}"
    return f"{_advice(baseline)}: {text}."


def _advice(baseline: Row | None) -> str:
    """Returns what to do where nothing is shown to be better; broken images are not to be kept."""
    if baseline is not None and baseline.variant.trips:
        return f"Images of the baseline are broken ({baseline.variant.tripped})"
    return "Keep the baseline"


def _keep_the_baseline(candidates: Sequence[Row], baseline: Row | None) -> str:
    kinds = Counter(map(_speed_and_images, candidates))
    order = []
    for speed in Speed:
        order += [str(speed), f"{speed}{_WITH_WORSE}"]
    order.append(_NOT_MEASURED)
    counts = [f"{kinds[words]} {words}" for words in order if kinds[words]]
    better = f"none of {len(candidates)} is shown to be better"
    text = f"{_advice(baseline)}: {better} ({', '.join(counts)})."
    first = candidates[0]
    if first.speed is Speed.FASTER:
        fastest = _with_reason(described(first, baseline), first)
        return f"{text} The fastest: {fastest}."
    for row in candidates:
        if row.pays:
            return f"{text} A trade: {described(row, baseline)}."
    return text


def _with_reason(text: str, row: Row) -> str:
    because = _further_reason(row)
    if not because:
        return text
    return f"{text}: {shortened(because)}"


def _further_reason(row: Row) -> str:
    """Returns why a variant does not pay; "" where that is its broken images, which its description names."""
    if row.because == broken_text(row.variant):
        return ""
    return row.because


_NOT_MEASURED = "not measured"

_WITH_WORSE = f" with {Images.WORSE} images"


def _speed_and_images(row: Row) -> str:
    """Returns a variant's speed in words, and whether it costs the images, so that "faster" alone is no riddle."""
    if row.speed is None:
        return _NOT_MEASURED
    if row.images is Images.WORSE:
        return f"{row.speed}{_WITH_WORSE}"
    return str(row.speed)


def unconfirmed(row: Row, baseline: Row | None) -> str:
    """Returns the answer for a gain that nothing speaks against and that is not shown yet: it, why, and what to do."""
    if _is_apart(row, baseline):
        return f"{_with_reason(described(row, baseline), row)}."
    because, *_ = row.because.split("; ")  # the tables have all reasons
    text = f"{described(row, baseline)}. Not confirmed yet: {lower(because)}."
    command = row.command
    if not command:  # as of other programs' images, and of what no command composes
        return text
    rulings = row.judgement.rulings if row.judgement else []
    verdicts = {ruling.verdict for ruling in rulings}
    left_open = {verdict for verdict in verdicts if verdict.is_open}
    if left_open == {Verdict.NOT_COMPARABLE}:  # as without a calibration
        return text
    when = " while nothing else runs here" if row.disturbance else ""
    prompts = max((ruling.prompts or 0 for ruling in rulings), default=0)
    # With the prompts that would settle what is open.
    if 0 < prompts <= TOO_MANY_PROMPTS:
        from sdopt.pipelines.prompts import prompts_left  # reports do without pipelines

        config = row.variant.config
        there = prompts_left(config.workload, config.model)
        if there is not None and there < prompts:
            more = "it takes another workload.prompts=FILE with more of them"
            return f"{text} workload.prompts has {there} left: {more}."
        command = with_key(command, "quality.prompt_count", prompts)
    return f"{text} To confirm it, measure it again{when}: `{command}`."


def with_key(command: str, key: str, value: object) -> str:
    """Returns a command with a value of a key, in place of the last one that it has."""
    words = command.split(" ")
    pair = f"{key}={value}"
    for place in reversed(range(len(words))):
        if words[place].startswith(f"{key}="):
            words[place] = pair
            return " ".join(words)
    return f"{command} {pair}"


def lacking_text(row: Row) -> str:
    """Returns why a speed-up tells nothing yet: too few runs, or no repeated baseline."""
    ratio = row.speedup
    if ratio is None or ratio.interval.low is None:
        return "Not enough runs to tell"
    return "Nothing shows which difference is chance"


def _reservations(result: StudyResult) -> str:
    """Returns what comes before the answer: that images of other programs were made or saved in other ways."""
    text = ""
    for variant in result.candidates:
        name = variant.name
        if variant.unlike:
            settings = ", ".join(variant.unlike)
            text += f"Not the same work: the images of {name} say {settings}, "
            text += "so what differs is not the option's alone. "
        apart = variant.files_apart(result.baseline_variant)
        if apart:
            text += f"{name}: {apart}: what a format loses counts as a difference. "
    return text


def _disturbed(result: StudyResult) -> str:
    """Returns what follows the answer if no round was free of other work; of a gate's study, its reasons say so."""
    counts = None if result.judgements else count_rounds(result)
    if counts is None or not counts.undecided:
        return ""
    if counts.undecided < counts.timed - counts.left_out:
        return ""
    share = max(counts.waited, counts.stolen, counts.on_gpu)
    return f" Not confirmed: other programs disturbed every round (up to {100 * share:.0f} % of a call)."


def _untimed(candidates: Sequence[Row], baseline: Row | None) -> str:
    """Returns the answer where no time was compared: images alone, or what failed."""
    if baseline is not None and baseline.status.failure:
        return _baseline_failed(baseline)
    images = [_untimed_images(row) for row in candidates if row.images]
    if images:
        return f"{'; '.join(images)} (not timed)."
    interrupted = [row for row in candidates if row.status is Status.INTERRUPTED]
    fastest = max(interrupted, key=_estimate, default=None)
    if fastest is not None and fastest.speedup is not None:
        so_far = _so_far(fastest, fastest.name)
        return f"Not all was measured ({fastest.because}); {so_far}."
    first = candidates[0]
    fully = "fully " if any(map(_is_begun, candidates)) else ""
    where = f"Nothing was {fully}measured beside the baseline"
    return f"{where}: {first.name}: {first.because}."


def _so_far(row: Row, name: str) -> str:
    """Returns the speed-up of what was interrupted while it was timed, or before its images were complete."""
    speedup = row.speedup.text if row.speedup else ""
    unit = unit_text(row.per_image)
    return f"so far {name}: {speedup}{unit}, not judged"


def _estimate(row: Row) -> float:
    """Returns the speed-up of a variant; 0 of one without."""
    if row.speedup is None:
        return 0.0
    return row.speedup.interval.estimate


def _is_begun(row: Row) -> bool:
    """Returns whether something of a variant was measured, and not all."""
    if row.status is Status.INTERRUPTED:
        return True
    return row.status is Status.PENDING and bool(row.variant.measurements)


def _untimed_images(row: Row) -> str:
    """Returns what is known of images alone; of worse ones what is different, by how much, and how much is allowed."""
    text = f"{row.name}: {_images_text(row)}"
    because = _further_reason(row)
    if row.images is Images.WORSE and because:
        different = lower(shortened(because))
        text = f"{text}: {different}"
    return text


def _baseline_failed(baseline: Row) -> str:
    reason = shortened(baseline.variant.reason)
    text = f"Nothing was compared: the baseline failed: {reason}"
    if baseline.status is Status.OUT_OF_MEMORY:
        text += (
            "; choose one that fits, as in "
            "study.baseline=[precision:fp16,memory:model_offload], "
            "or as the first variant of study=explicit"
        )
    return f"{text}."


# One variant ----------------------------------------------------------------------------------------------------------


def described(row: Row, baseline: Row | None, name: str = "") -> str:
    """Returns what a variant does in one line: speed, memory where it changes, and images.

    A trade is said as one: what it gains first, then what it costs. `name` is the variant's where it is not the row's.
    """
    name = name or row.name
    memory = _memory_text(row)
    images = _images_text(row)
    if row.at_least_slower is not None:
        text = f"{name} is at least {bound_text(row.at_least_slower)} slower"
        details = "; ".join(filter(None, [memory, images]))
        if not details:
            return text
        return f"{text}, {details}"
    if row.speedup is not None and row.status is Status.INTERRUPTED:
        return f"{_so_far(row, name)} ({row.because})"
    if row.speedup is None or row.speed is None:
        return f"{name} was not measured ({row.because})"
    speed = _speed_text(row, baseline)
    gained = map(measure_named, row.gains)
    saves_memory = MEMORY_RATIO in gained
    verb = ":" if row.speed is Speed.CLOSE else " is"
    text = f"{name}{verb} {speed}"
    if row.speed is not Speed.FASTER and saves_memory:
        text = f"{name} {memory}, {speed}"
    elif memory:
        text = f"{text}, {memory}"
    if not images:
        return text
    return f"{text}; {images}"


def _speed_text(row: Row, baseline: Row | None) -> str:
    unit = unit_text(row.per_image)
    if row.further:
        return f"{row.speed}{unit}: {_speedups_text(row)}"
    ratio = row.speedup
    assert ratio is not None
    if row.speed is Speed.CLOSE:
        return f"speed{unit} too close to call ({ratio.text})"
    change = f"{change_text(ratio)}{unit}{_from_to(row, baseline)}"
    if row.speed is not Speed.FEW:
        return change
    count = len(row.variant.samples)
    runs = "one run" if count == 1 else f"{count} runs"
    return f"{change} in {runs} each"


def _speedups_text(row: Row) -> str:
    """Returns the speed-up at each shape."""
    speedups = []
    for at_shape in row.shapes:
        ratio = at_shape.over_baseline.get(SPEEDUP.name)
        if ratio:
            estimate = ratio.interval.estimate
            speedups.append(f"{estimate:.2f}× at {at_shape.shape}")
    return "; ".join(speedups)


def _memory_text(row: Row) -> str:
    """Returns how the memory changes, as in `saves 22 % memory`; "" where it is not shown to."""
    if row.memory is None or not row.memory.gain:
        return ""
    ratio = row.memory.interval.estimate
    if ratio < 1:
        text = f"saves {100 * (1 - ratio):.0f} % memory"
    elif ratio < 2:
        text = f"takes {100 * (ratio - 1):.0f} % more memory"
    else:
        text = f"takes {ratio:.1f}× the memory"
    return f"{text}{_at_main_shape(row)}"


def _at_main_shape(row: Row) -> str:
    """Returns of which shape a figure is that is not shown of each one; "" where there is one shape."""
    return f" at {row.shape}" if row.further else ""


_NEARLY = 0.03
"""Share by which the ratio of two medians may differ from a mean of paired ratios, beside which it is shown."""


def _from_to(row: Row, baseline: Row | None) -> str:
    """Returns both times; "" where they tell another change than the ratio, which pairs the calls of rounds.

    That is a change outside its interval; without one, a change by more than `_NEARLY` from it.
    """
    before = baseline.time if baseline else None
    after = row.time
    if before is None or after is None or row.speedup is None:
        return ""
    interval = row.speedup.interval
    ratio = interval.estimate
    low = interval.low or ratio * (1 - _NEARLY)
    high = interval.high or ratio * (1 + _NEARLY)
    of_times = before.estimate / after.estimate
    if not low <= of_times <= high:
        return ""
    if (of_times >= 1) != (ratio >= 1):
        return ""
    return f" ({times_text(before.estimate, after.estimate)})"


_ALIKE = (
    (math.inf, "identical"),
    (40.0, "nearly identical"),
    (30.0, "similar"),
    (0.0, "visibly different"),
)
"""How alike images are that no gate judged, by the least PSNR in dB."""


def _images_text(row: Row) -> str:
    """Returns what is known of a variant's images, in words, with the figure that is read first."""
    if row.images is None:
        return ""
    text = _likeness(row, row.images)
    if text == f"images {Images.NOT_JUDGED}":
        return text
    return f"{text}{_at_main_shape(row)}"


def _likeness(row: Row, images: Images) -> str:
    if row.variant.trips:
        return f"images broken ({row.variant.tripped})"
    metric, figure = row.distance
    judged = images is not Images.NOT_JUDGED
    if metric == PSNR and not judged:
        return _unjudged_text(row.scores[PSNR].estimate, figure)
    text = f"images {images}"
    if metric == PSNR and figure not in ("", "equal"):
        text = f"{text} ({figure} dB)"
    elif metric and not judged:
        text = f"{text} ({metric} {figure})"
    return text


def _unjudged_text(psnr_db: float | None, figure: str) -> str:
    """Returns how alike images are that no gate judged; without a ratio of signal to noise they are equal."""
    if psnr_db is None:
        return "images identical"
    alike = next(word for least, word in _ALIKE if psnr_db >= least)
    return f"images {alike} ({figure} dB), not judged"
