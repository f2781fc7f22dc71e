"""Estimates the effects of a factorial study: of each option, and of each pair, on latency and memory."""

from collections.abc import Iterator, Mapping, Sequence
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
    cells: list[VariantResult] = []
    logs: list[Logs] = []
    for cell, logs_of_cell in _timed(result):
        if logs_of_cell:
            cells.append(cell)
            logs.append(logs_of_cell)
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
    columns = [_MEAN]
    for term in fitted:
        columns.append(" × ".join(_names(term, options)))
    inverse = np.linalg.pinv(design)
    times, unit = _times_of_cells(logs)
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
        if aliases[row]:
            effect.aliased_with = [columns[alias] for alias in aliases[row]]
            continue
        if times.size:
            gains = -(inverse[row] @ times)
            effect.speedup = ratio(gains, result.confidence, unit)
        if peaks.size:
            growth = inverse[row] @ peaks
            effect.memory_ratio = ratio(growth, result.confidence, "process")
    return effects


def _names(
    term: Sequence[int],
    options: Sequence[str],
) -> list[str]:
    return [options[index] for index in term]


# The design -----------------------------------------------------------------------------------------------------------


def _chosen(cell: VariantResult) -> dict[str, str]:
    """Returns the axis of each option of a cell; keys that were changed do not make it another option."""
    axis_of = {}
    for axis, option in cell.choices.items():
        choice = as_choice(axis, option_name(option))
        axis_of[choice] = axis
    return axis_of


def _axes(result: StudyResult, options: Sequence[str]) -> list[str]:
    axis_of: dict[str, str] = {}
    for variant in result.variants:
        axis_of |= _chosen(variant)
    axes = []
    for option in options:
        group, _, _ = option.partition("=")
        axes.append(axis_of.get(option, group))
    return axes


def _terms(axes: Sequence[str]) -> list[Term]:
    """Returns all main effects, then the interactions of options that can be chosen together."""
    indices = range(len(axes))
    terms: list[Term] = [(index,) for index in indices]
    for first, second in combinations(indices, 2):
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
    columns = [np.ones(len(present))]
    for term in terms:
        indicators = centred[:, list(term)]
        columns.append(indicators.prod(axis=1))
    return np.column_stack(columns)


def _aliases(design: np.ndarray) -> list[list[int]]:
    """Returns for each column those that it cannot be told apart from: its neighbours in the design's null space."""
    _, singular, rows = np.linalg.svd(design, full_matrices=True)
    smallest = singular.max(initial=0.0) * _TOLERANCE
    rank = np.count_nonzero(singular > smallest)
    null = rows[rank:].T
    nonzero = np.abs(null) > _TOLERANCE
    aliases = []
    for column, involved in enumerate(nonzero):
        beside = nonzero[:, involved].any(axis=1)
        beside[column] = False
        aliases.append(np.flatnonzero(beside).tolist())
    return aliases


# What was measured of its cells ---------------------------------------------------------------------------------------


def _timed(result: StudyResult) -> Iterator[tuple[VariantResult, Logs]]:
    """Yields timed cells, with the log of the times of an image by replicate and round; a block that broke off has none.

    If there were several sessions, times are relative to the baseline of each; contrasts within one stay the same.
    """
    cells = [cell for cell in result.variants if cell.role == "variant"]
    cells = [cell for cell in cells if cell.status.timed]
    sessions = set()
    in_blocks = False
    for cell in cells:
        for measurement in cell.measurements:
            if measurement.main.latency_s:
                sessions.add(measurement.session)
                in_blocks |= any_in_block([(measurement, measurement)])
    baseline = result.baseline_variant
    for cell in cells:
        if len(sessions) > 1:
            logs = _over_baseline(cell, baseline)
        else:
            logs = _alone(cell, in_blocks)
        images = log_images(cell, baseline)
        of_image = {}
        for replicate, times in logs.items():
            if times.size:
                of_image[replicate] = times - images
        yield cell, of_image


def _over_baseline(cell: VariantResult, baseline: VariantResult) -> Logs:
    logs = {}
    pairs = paired(cell, baseline)
    for replicate, gains in logs_by_replicate(pairs).items():
        logs[replicate] = -gains
    return logs


def _alone(cell: VariantResult, in_blocks: bool) -> Logs:
    logs = {}
    for measurement in cell.measurements:
        if measurement.main.latency_s:
            logs[measurement.replicate] = log_times(measurement, in_blocks)
    return logs


def _times_of_cells(
    logs: Sequence[Logs],
) -> tuple[np.ndarray, str]:
    """Returns the log of the times, a row per cell and a column per replicate; and whether that is process or round.

    Only replicates of which every cell has times count; without any, there are no columns.
    """
    shared = set(logs[0])
    for cell in logs:
        shared &= cell.keys()
    replicates = sorted(shared)
    if len(replicates) == 1:
        times = [cell[replicates[0]] for cell in logs]
        rounds = min(row.size for row in times)
        rows = [row[:rounds] for row in times]
        return np.array(rows), "round"
    means = [_means(cell, replicates) for cell in logs]
    return np.array(means), "process"


def _means(cell: Logs, replicates: Sequence[int]) -> list[float]:
    return [cell[replicate].mean() for replicate in replicates]


def _peaks_of_cells(cells: Sequence[VariantResult]) -> np.ndarray:
    """Returns the log of the peak memory, a row per cell and a column per replicate; empty if cells lack some."""
    peaks = [_log_peaks(cell) for cell in cells]
    if len(set(map(len, peaks))) > 1:
        return np.array([])
    return np.array(peaks)


def _log_peaks(cell: VariantResult) -> list[float]:
    """Returns the log of the peak memory of each replicate: a geometric mean over its sessions, as in all ratios."""
    peaks: dict[int, list[float]] = {}
    for measurement in cell.measurements:
        if measurement.peak:
            _, gib = measurement.peak
            peaks.setdefault(measurement.replicate, []).append(gib)
    return [np.log(values).mean() for values in peaks.values()]
