"""Says below the answer of a study what it rests on, and how to have the images judged."""

from collections.abc import Iterator, Sequence

from sdopt.record.records import Budget, Status, StudyResult, VariantResult
from sdopt.statistics.bounds import prompts_to_exclude
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Speed

NOT_ENDED = (
    "the study has not ended: its process still runs, was killed, or lost its machine"
)


def notes_of(result: StudyResult, rows: Sequence[Row]) -> Iterator[str]:
    """Yields what verdicts follow from, what they lack, and how to have the images judged."""
    if result.status == "running":
        yield f"{NOT_ENDED[:1].upper()}{NOT_ENDED[1:]}. Resuming measures the rest."
    yield from _budget_notes(result, rows)
    yield from _work_notes(result)
    yield from copy_notes(result)
    yield from _judging_notes(result)


def _budget_notes(result: StudyResult, rows: Sequence[Row]) -> Iterator[str]:
    """Yields what a study left out to end within its budget, and which verdicts that leaves open."""
    if result.budget is None or not result.budget.spared:
        return
    left_out = ", ".join(_spared(result, result.budget)) or "repeated images"
    if result.only_slower:
        yield f"Nothing is left to compare, so that these were left out: {left_out}."
        return
    text = f"protocol.budget_s={result.config.protocol.budget_s:g} left out {left_out}"
    undecided = []
    for row in rows:
        is_open = row.decision is not None and row.decision.is_open
        if is_open or row.speed in (Speed.CLOSE, Speed.FEW):
            undecided.append(row.name)
    if undecided:
        text += f"; it may be why these are not decided: {'; '.join(undecided)}"
    yield f"{text}. Resuming with a larger protocol.budget_s measures the rest."


def _spared(result: StudyResult, budget: Budget) -> Iterator[str]:
    rounds = result.config.protocol.rounds
    replicates = result.config.replicates
    if budget.rounds:
        yield f"{rounds - budget.rounds} of {rounds} rounds"
    for name, count in budget.processes.items():
        yield f"{replicates - count} of {replicates} processes of {name}"
    if budget.prompts:
        yield f"the images of all but {budget.prompts} prompts"
    if not budget.evidence:
        yield "the evidence of all but the first process of each variant"
    if not budget.stages:
        yield "the times of stages"


def _work_notes(result: StudyResult) -> Iterator[str]:
    """Yields in what the work of variants differs, as far as that is part of the comparison."""
    if result.per_image:
        yield (
            "Times and speed-ups are per image, because calls make different numbers of images "
            f"({_images_of_calls(result)}). Memory is that of a whole call."
        )
    baseline = result.baseline_variant
    for variant in result.candidates:
        count = variant.config.workload.images_per_prompt
        if variant.images and count != baseline.config.workload.images_per_prompt:
            yield (
                f"Images of {variant.name} are not compared: with another number for each prompt they start from other "
                "noise. workload.batch_size makes several in a call from the same."
            )
        chosen = _chosen_otherwise(variant, baseline)
        if chosen:
            yield f"{variant.name} does other work by choice: {', '.join(chosen)}."


def copy_notes(result: StudyResult) -> Iterator[str]:
    """Yields which imported images are no further evidence, since they show the same as others in every folder."""
    named = []
    for image in result.baseline_variant.images:
        for copy in image.copies:
            named.append(f"{copy} of {image.file}")
    if not named:
        return
    count = len(named) + len(result.baseline_variant.images)
    listed = ", ".join([*named[:3], *(["…"] if len(named) > 3 else [])])
    yield (
        f"{len(named)} of {count} images are copies of others in every folder, and each picture counts once: {listed}."
    )


def _images_of_calls(result: StudyResult) -> str:
    """Returns which variants make how many images in a call."""
    names: dict[int, list[str]] = {}
    for variant in result.variants:
        count = variant.config.images_per_call
        names.setdefault(count, []).append(variant.name)
    counts = []
    for count in sorted(names):
        counts.append(f"{count}: {', '.join(names[count])}")
    return "; ".join(counts)


def _chosen_otherwise(variant: VariantResult, baseline: VariantResult) -> list[str]:
    """Returns what a variant chooses of the work otherwise than the baseline, beyond what its name says."""
    chosen = []
    for key, (after, before) in variant.config.chosen_beside(baseline.config).items():
        if f"{key}=" not in variant.name:
            chosen.append(f"{key} {before} → {after}")
    return chosen


def _judging_notes(result: StudyResult) -> Iterator[str]:
    if result.judgements:
        intervals = ""
        if _bounded(result):
            intervals = "; speed follows the two-sided intervals, and not the gate's one-sided bounds"
        yield f"Images and pass or fail follow gate={result.gate}{intervals}."
        return
    if result.baseline_variant.status.failure:
        return  # no gate has anything to judge
    drawn = [variant for variant in result.candidates if variant.images]
    if result.only_slower and not drawn:
        return  # nor has it here
    if result.config.gate.judges:
        yield from _left_notes(result)
        return
    if not any(variant.images for variant in result.variants):
        if result.status == "finished":
            yield "There are no images to judge: measure again with gate=default, which draws them."
        return
    if all(variant.trips for variant in drawn):
        return  # broken images need no gate, and where none were drawn, it has nothing to judge
    others = "other " if any(variant.trips for variant in drawn) else ""
    yield f"The {others}images were not judged: {_how_to_judge(result)}."


def _left_notes(result: StudyResult) -> Iterator[str]:
    """Yields what the study's own gate has left open, of what it can judge at all."""
    gate = result.config.gate
    if all(variant.status is Status.SKIPPED for variant in result.candidates):
        return
    what = "The images were not judged"
    if not any(variant.images for variant in result.variants):
        what = "There are no images to judge"
    if result.status != "finished":
        yield f"{what}: resuming measures what is missing, and then gate={gate.name} judges."
    else:
        yield f"{what}: run `sdopt gate <folder> gate={gate.name}` on this result."


def _bounded(result: StudyResult) -> bool:
    """Returns whether any speed-up has an interval."""
    for comparison in result.comparisons:
        for ratios in comparison.shapes:
            if ratios.speedup and ratios.speedup.low:
                return True
    return False


def _how_to_judge(result: StudyResult) -> str:

    if result.is_imported:
        return "run `sdopt judge` on the folders again, with gate=default"
    # gate=default tolerates that 5 % of all prompts exceed a limit; with fewer prompts, no lossy option can pass.
    if (result.config.quality.prompt_count or 0) < prompts_to_exclude(
        share=0.05, confidence=0.95
    ):
        return "measure again with gate=default, which generates more of them"
    return "add gate=default, or run `sdopt gate <folder>` on this result"
