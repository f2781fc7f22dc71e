"""Estimates the effects of a factorial study: of each option, and of each pair, on latency and memory."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from sdopt.record.choices import as_choice, option_name
from sdopt.record.comparisons import Effect
from sdopt.record.records import StudyResult, VariantResult
from sdopt.statistics.pairs import (
    any_in_block,
    log_images,
    log_times,
    logs_by_replicate,
    paired,
)
from sdopt.statistics.ratios import ratio

_TOLERANCE = 1e-9

_MEAN = "the mean"

Term = tuple[int, ...]
"""An effect: the index of one option, or of two that interact."""

Logs = Mapping[int, np.ndarray]
"""Logarithms of the times of a cell, by replicate and round."""


def effects_of(result: StudyResult, options: Sequence[str]) -> list[Effect]:
    """Returns main effects and pairwise interactions of `options` (each as `memory=vae_slicing`), as ratios.

    A least-squares fit of log time on centred indicators and their products, once per round (or, with several
    processes per variant, once per replicate), as in Box, Hunter & Hunter, *Statistics for Experimenters*, chapter 5.
    The main effect of an option is its speed-up averaged over the others. The interaction of two is their joint
    speed-up over the product of each alone: above 1 they help each other. Rival options of one axis have none. If
    cells of the product are missing, effects that the rest cannot tell apart are named as aliased, without a figure.
    A cell whose only block broke off counts as missing.
    """
    timed = [
        variant
        for variant in result.variants
        if variant.role == "variant" and variant.status.timed
    ]
    logs_of = _logs_of(timed, result.baseline_variant)
    cells = [cell for cell in timed if logs_of[cell.name]]
    if len(cells) <= 1 or not options:
        return []
    axes = _axes(result, options)
    terms = _terms(axes)
    present = np.array([_presence(cell, options) for cell in cells])
    # An option that no cell has, or that all have, varies nothing; without its terms the others can be estimated.
    varied = np.ptp(present, axis=0) > 0
    fitted = [term for term in terms if varied[list(term)].all()]
    design = _design(present, axes, fitted)
    aliases = _aliases(design)
    columns = [_MEAN, *(" × ".join(_names(term, options)) for term in fitted)]
    inverse = np.linalg.pinv(design)
    times, unit = _times_of_cells([logs_of[cell.name] for cell in cells])
    peaks = _peaks_of_cells(cells)
    effects = []
    for term in terms:
        effect = Effect(tuple(_names(term, options)))
        effects.append(effect)
        if term not in fitted:
            rest = [index for index in term if varied[index]]
            effect.aliased_with = _names(rest, options) or [_MEAN]
            continue
        row = 1 + fitted.index(term)
        effect.aliased_with = [columns[alias] for alias in aliases[row]]
        if effect.aliased_with:
            continue
        if times.size:
            effect.speedup = ratio(
                -(inverse[row] @ times),
                result.confidence,
                unit,
            )
        if peaks.size:
            effect.memory_ratio = ratio(
                inverse[row] @ peaks,
                result.confidence,
                "process",
            )
    return effects


def _names(term: Sequence[int], options: Sequence[str]) -> list[str]:
    return [options[index] for index in term]


# The design -----------------------------------------------------------------------------------------------------------


def _chosen(cell: VariantResult) -> dict[str, str]:
    """Returns the axis of each option of a cell; keys that were changed do not make it another option."""
    return {
        as_choice(axis, option_name(option)): axis
        for axis, option in cell.choices.items()
    }


def _axes(result: StudyResult, options: Sequence[str]) -> list[str]:
    axis_of: dict[str, str] = {}
    for variant in result.variants:
        axis_of |= _chosen(variant)
    return [axis_of.get(option, option.partition("=")[0]) for option in options]


def _terms(axes: Sequence[str]) -> list[Term]:
    """Returns all main effects, then the interactions of options that can be chosen together."""
    terms: list[Term] = [(index,) for index in range(len(axes))]
    for first, second in combinations(range(len(axes)), 2):
        if axes[first] != axes[second]:
            terms.append((first, second))
    return terms


def _presence(cell: VariantResult, options: Sequence[str]) -> list[float]:
    chosen = _chosen(cell)
    return [float(option in chosen) for option in options]


def _design(
    present: np.ndarray,
    axes: Sequence[str],
    terms: Sequence[Term],
) -> np.ndarray:
    """Returns the design matrix: a row for each cell, and a column for the mean and for each term."""
    # Centred on the full product, so that an average over the other options is an average over all their levels.
    levels = [1 + axes.count(axis) for axis in axes]
    centred = present - 1 / np.array(levels)
    products = [centred[:, list(term)].prod(axis=1) for term in terms]
    return np.column_stack([np.ones(len(present)), *products])


def _aliases(design: np.ndarray) -> list[list[int]]:
    """Returns for each column those that it cannot be told apart from: its neighbours in the design's null space."""
    _, singular, rows = np.linalg.svd(design, full_matrices=True)
    smallest = singular.max(initial=0.0) * _TOLERANCE
    rank = int((singular > smallest).sum())
    null = rows[rank:].T
    nonzero = np.abs(null) > _TOLERANCE
    aliases = []
    for column, involved in enumerate(nonzero):
        neighbours = np.flatnonzero(nonzero[:, involved].any(axis=1))
        aliases.append([int(alias) for alias in neighbours if alias != column])
    return aliases


# What was measured of its cells ---------------------------------------------------------------------------------------


def _logs_of(
    cells: Sequence[VariantResult],
    baseline: VariantResult,
) -> dict[str, Logs]:
    """Returns the log of the times of an image by cell, replicate and round; a block that broke off has none.

    If there were several sessions, times are relative to the baseline of each; contrasts within one stay the same.
    """
    sessions = set()
    in_blocks = False
    for cell in cells:
        for measurement in cell.measurements:
            if measurement.shapes[0].latency_s:
                sessions.add(measurement.session)
                in_blocks |= any_in_block([(measurement, measurement)])
    logs_of: dict[str, Logs] = {}
    for cell in cells:
        logs = (
            _over_baseline(cell, baseline)
            if len(sessions) > 1
            else _alone(cell, in_blocks)
        )
        images = log_images(cell, baseline)
        logs_of[cell.name] = {
            replicate: times - images for replicate, times in logs.items() if times.size
        }
    return logs_of


def _over_baseline(cell: VariantResult, baseline: VariantResult) -> Logs:
    gains = logs_by_replicate(paired(cell, baseline))
    return {replicate: -gain for replicate, gain in gains.items()}


def _alone(cell: VariantResult, in_blocks: bool) -> Logs:
    logs = {}
    for measurement in cell.measurements:
        if measurement.shapes[0].latency_s:
            logs[measurement.replicate] = log_times(measurement, in_blocks)
    return logs


def _times_of_cells(logs: Sequence[Logs]) -> tuple[np.ndarray, str]:
    """Returns the log of the times, a row per cell and a column per replicate; and whether that is process or round.

    Only replicates of which every cell has times count; without any, there are no columns.
    """
    replicates = sorted(set(logs[0]).intersection(*logs[1:]))
    if len(replicates) == 1:
        [replicate] = replicates
        rounds = min(cell[replicate].size for cell in logs)
        return np.array([cell[replicate][:rounds] for cell in logs]), "round"
    rows = [_means(cell, replicates) for cell in logs]
    return np.array(rows), "process"


def _means(cell: Logs, replicates: Sequence[int]) -> list[float]:
    return [cell[replicate].mean() for replicate in replicates]


def _peaks_of_cells(cells: Sequence[VariantResult]) -> np.ndarray:
    """Returns the log of the peak memory, a row per cell and a column per replicate; empty if cells lack some."""
    rows = [_log_peaks(cell) for cell in cells]
    counts = {len(row) for row in rows}
    return np.array(rows if len(counts) == 1 else [])


def _log_peaks(cell: VariantResult) -> list[float]:
    """Returns the log of the peak memory of each replicate: a geometric mean over its sessions, as in all ratios."""
    peaks: dict[int, list[float]] = {}
    for measurement in cell.measurements:
        if measurement.peak:
            _, gib = measurement.peak
            peaks.setdefault(measurement.replicate, []).append(gib)
    return [float(np.log(values).mean()) for values in peaks.values()]
