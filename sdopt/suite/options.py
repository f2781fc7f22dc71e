"""Makes a study of some options, each alone; for options that cannot run here, says why beforehand."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sdopt.config.composer import composer_of
from sdopt.config.paths import options_of
from sdopt.doctor.options import compose_options, fit_on
from sdopt.errors import UsageError
from sdopt.hardware.device import Device
from sdopt.statistics.outcomes import Standing
from sdopt.suite.record import Finding
from sdopt.variant import Variant

BASELINE = "baseline"


@dataclass(frozen=True)
class OptionStudy:
    """The overrides of a study of options, and the options that it leaves out."""

    overrides: tuple[str, ...]
    """Empty where nothing is left to measure."""
    left_out: tuple[Finding, ...]
    tried: tuple[str, ...]
    """The options that it measures, as in `memory=vae_tiling`."""


def row_of(option: str) -> str:
    """Returns the name of an option's variant in a study of options."""
    return option.replace("=", " ")


def option_study(
    overrides: Sequence[str],
    options: Sequence[str],
    settings: Mapping[str, Sequence[str]],
    device: Device,
    settled: Collection[str] = (),
) -> OptionStudy:
    """Returns the study of each of some options against the configuration without it.

    An option that needs another one is compared with that one alone.

    Args:
        overrides: the configuration that the options are tried on.
        options: what is tried: whole groups or single options, as in `layout` or `memory=vae_tiling`.
        settings: overrides to try an option with, by option, as in `memory=vae_tiling`.
        device: the device that they run on.
        settled: options to leave out, as in `memory=vae_tiling`.

    Raises:
        UsageError: the configuration is not valid, or there is no such option.
    """
    groups = dict.fromkeys(named.partition("=")[0] for named in options)
    known = {f"{group}={option}": (group, option) for group in groups for option in options_of(group)}
    if unknown := [named for named in options if named not in known and not options_of(named)]:
        raise UsageError([f"{named}: no option or group of options" for named in unknown])
    with composer_of(overrides) as composer:
        # All of the groups, because an option may need another one beside it.
        made = compose_options(composer, [pair for name, pair in known.items() if name not in settled], settings)
        baseline = composer.variant(BASELINE)
    everything = {key: variant for key, variant in made.items() if isinstance(variant, Variant)}
    rows: dict[str, list[str]] = {}
    beside: dict[str, str] = {}
    left_out: list[Finding] = []
    tried: list[str] = []
    for (group, option), variant in made.items():
        name = f"{group}={option}"
        if name not in options and group not in options:
            continue
        if isinstance(variant, list):
            left_out.append(Finding(name, str(Standing.CANNOT_RUN), "; ".join(variant)))
            continue
        if variant.choices == baseline.choices:
            continue  # the baseline's own trace proves it
        fit = fit_on(device, group, variant, everything)
        if not fit.runs or fit.reasons:
            left_out.append(Finding(name, str(Standing.CANNOT_RUN), "; ".join(fit.remarks)))
            continue
        own = [name, *settings.get(name, ())]
        tried.append(name)
        rows[row_of(name)] = [fit.beside, *own] if fit.beside else own
        if fit.beside:
            beside[row_of(name)] = fit.beside
    references = {other: f"with {row_of(other)}" for other in beside.values()}
    variants = {BASELINE: [], **{name: [other] for other, name in references.items()}, **rows}
    edges = [(name, references[beside[name]] if name in beside else BASELINE) for name in variants if name != BASELINE]
    written = ", ".join(f"{name}: [{', '.join(map(_quoted, given))}]" for name, given in variants.items())
    compared = ", ".join(f"{{candidate: {candidate}, reference: {reference}}}" for candidate, reference in edges)
    study = ("study=explicit", "study.name=options", "study.skip_conflicts=true")
    overrides = (*study, f"study.variants={{{written}}}", f"study.edges=[{compared}]") if rows else ()
    return OptionStudy(overrides, tuple(left_out), tuple(tried))


def _quoted(override: str) -> str:
    return f'"{override}"'
