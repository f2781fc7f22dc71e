"""Estimates the effects of a factorial study: of each option, and of each pair, on latency and memory."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from sdopt.record.choices import as_choice, option_name
from sdopt.record.comparisons import Effect
from sdopt.record.records import StudyResult, VariantResult
from sdopt.statistics.ratios import log_images, log_times, logs_by_replicate, paired, ratio

_TOLERANCE = 1e-9


def effects_of(result: StudyResult, options: Sequence[str]) -> list[Effect]:
    """Returns main effects and pairwise interactions of `options` (each as `memory=vae_slicing`), as ratios.

    A least-squares fit of log time on centred indicators and their products, once per round (or, with several
    processes per variant, once per replicate), as in Box, Hunter & Hunter, *Statistics for Experimenters*, chapter 5.
    The main effect of an option is its speed-up averaged over the others. The interaction of two is their joint
    speed-up over the product of each alone: above 1 they help each other. Rival options of one axis have none. If
    cells of the product are missing, effects that the rest cannot tell apart are named as aliased, without a figure.
    A cell whose only block broke off counts as missing.
    """
    timed = [variant for variant in result.variants if variant.role == "variant" and variant.status.timed]
    logs_of = _logs_of(timed, result.variant(result.baseline))
    cells = [cell for cell in timed if logs_of[cell.name]]
    if len(cells) <= 1 or not options:
        return []
    present = np.array([[float(option in _chosen(cell)) for option in options] for cell in cells])
    axis_of = {option: axis for variant in result.variants for option, axis in _chosen(variant).items()}
    axes = [axis_of.get(option, option.partition("=")[0]) for option in options]
    terms: list[tuple[int, ...]] = [(n,) for n in range(len(options))]
    terms += [pair for pair in combinations(range(len(options)), 2) if axes[pair[0]] != axes[pair[1]]]
    # An option that no cell has, or that all have, varies nothing; without its terms the others can be estimated.
    fixed = {n for n in range(len(options)) if np.ptp(present[:, n]) == 0}
    fitted = [term for term in terms if not fixed & set(term)]
    # Centred on the full product, so that an average over the other options is an average over all their levels.
    levels = [1 + axes.count(axis) for axis in axes]
    centred = present - 1 / np.array(levels)
    design = np.column_stack([np.ones(len(cells)), *(centred[:, list(term)].prod(axis=1) for term in fitted)])
    aliases = _aliases(design)
    inverse = np.linalg.pinv(design)
    times, unit = _log_times([logs_of[cell.name] for cell in cells])
    memory = [_log_peaks(cell) for cell in cells]
    found = []
    for term in terms:
        effect = Effect(tuple(options[n] for n in term))
        found.append(effect)
        if term not in fitted:
            effect.aliased_with = [options[n] for n in term if n not in fixed] or ["the mean"]
            continue
        row = 1 + fitted.index(term)
        effect.aliased_with = [
            " × ".join(options[n] for n in fitted[other - 1]) if other else "the mean" for other in aliases[row]
        ]
        if not effect.aliased_with:
            if times.size:
                effect.speedup = ratio(-(inverse[row] @ times), result.confidence, unit)
            if all(len(values) == len(memory[0]) and values for values in memory):
                effect.memory_ratio = ratio(inverse[row] @ np.array(memory), result.confidence, "process")
    return found


def _chosen(cell: VariantResult) -> dict[str, str]:
    """Returns the axis of each option of a cell; keys that were changed do not make it another option."""
    return {as_choice(axis, option_name(option)): axis for axis, option in cell.choices.items()}


def _logs_of(cells: Sequence[VariantResult], baseline: VariantResult) -> dict[str, dict[int, np.ndarray]]:
    """Returns the log of the times of an image by cell, replicate and round; a block that broke off has none.

    If there were several sessions, times are relative to the baseline of each; contrasts within one stay the same.
    """
    flat = [measurement for cell in cells for measurement in cell.measurements if measurement.shapes[0].latency_s]
    several = len({measurement.session for measurement in flat}) > 1
    in_blocks = any(measurement.shapes[0].latency_before_s for measurement in flat)
    found = {}
    for cell in cells:
        if several:
            over_baseline = logs_by_replicate(paired(cell, baseline))
            logs = {replicate: -gained for replicate, gained in over_baseline.items()}
        else:
            timed = [measurement for measurement in cell.measurements if measurement.shapes[0].latency_s]
            logs = {measurement.replicate: log_times(measurement, in_blocks) for measurement in timed}
        images = log_images(cell, baseline)
        found[cell.name] = {replicate: values - images for replicate, values in logs.items() if values.size}
    return found


def _log_times(logs: Sequence[dict[int, np.ndarray]]) -> tuple[np.ndarray, str]:
    """Returns the log of the times, a row per cell and a column per replicate; and whether that is process or round.

    Only replicates of which every cell has times count; without any, there are no columns.
    """
    replicates = sorted(set.intersection(*(set(cell) for cell in logs)))
    if len(replicates) != 1:
        return np.array([[cell[replicate].mean() for replicate in replicates] for cell in logs]), "process"
    rows = [cell[replicates[0]] for cell in logs]
    rounds = min(row.size for row in rows)
    return np.array([row[:rounds] for row in rows]), "round"


def _log_peaks(cell: VariantResult) -> list[float]:
    """Returns the log of the peak memory of each replicate: a geometric mean over its sessions, as in all ratios."""
    peaks: dict[int, list[float]] = {}
    for measurement in cell.measurements:
        if measurement.peak:
            peaks.setdefault(measurement.replicate, []).append(measurement.peak[1])
    return [float(np.log(values).mean()) for values in peaks.values()]


def _aliases(design: np.ndarray) -> list[list[int]]:
    """Returns for each column those that it cannot be told apart from: its neighbours in the design's null space."""
    _, singular, rows = np.linalg.svd(design, full_matrices=True)
    rank = int((singular > singular.max(initial=0.0) * _TOLERANCE).sum())
    null = rows[rank:].T
    found = []
    for column in range(design.shape[1]):
        mixed = null[:, np.abs(null[column]) > _TOLERANCE]
        others = np.flatnonzero(np.abs(mixed).max(axis=1) > _TOLERANCE) if mixed.size else np.array([], dtype=int)
        found.append([int(other) for other in others if other != column])
    return found
