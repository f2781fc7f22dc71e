"""From overrides to predictions: what `sdopt plan` and `sdopt.plan` have in common."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.config.composer import HydraComposer, composer_of
from sdopt.config.groups import data_sheets
from sdopt.config.models import with_own_models
from sdopt.config.overrides import key_of, parsed_override
from sdopt.config.paths import options_of
from sdopt.errors import UsageError, command_line
from sdopt.foresight.cpu import sheet_of_cpu
from sdopt.foresight.latency import NAMES, PARTS, Array, Case, Table, coefficients
from sdopt.foresight.memory import blueprint
from sdopt.foresight.plan import Learned, Prediction, case_of_variant, predict, version_of
from sdopt.foresight.software import software_of
from sdopt.hardware.cards import sheet_of
from sdopt.record.files import read_result
from sdopt.schema import Sheet
from sdopt.variant import Variant
from sdopt.worker.preload import import_all

if TYPE_CHECKING:
    import pandas as pd

KEYS = {
    "plan.hardware": "the cards, as in 'plan.hardware=[t4,l4,rtx4090]'",
    "plan.measured": "a measured run whose stage times tell of this software and host",
    "plan.torch": "the version of PyTorch there, as in plan.torch=2.3; this machine's if not given",
}
"""Keys of the command itself."""


@dataclass(frozen=True)
class Planned:
    """Predictions, and the command that would measure them."""

    predictions: list[Prediction]
    command: str


def plan(*overrides: str, config_dir: str | Path | None = None) -> "pd.DataFrame":
    """Predicts seconds and GiB on cards that one does not have: a row per variant, card and shape.

    Args:
        overrides: as of `sdopt plan`: those of a study, `hardware=…` or `plan.hardware=[…]`, and `plan.measured=…`.
        config_dir: a folder with additional configuration groups, like `--config-dir`.

    Raises:
        UsageError: the overrides cannot be composed, or a card is unknown.
    """
    import pandas as pd

    found = plan_of(overrides, None if config_dir is None else Path(config_dir))
    return pd.DataFrame([each.row() for each in found.predictions])


def plan_of(overrides: Sequence[str], config_dir: Path | None = None) -> Planned:
    """Composes a study and predicts its variants. Raises UsageError."""
    import_all(("diffusers.models",))  # without what other libraries say of themselves when they are imported
    own = [override for override in overrides if key_of(override).startswith("plan.")]
    rest = [override for override in overrides if override not in own]
    rest = list(with_own_models(rest, options_of("model", config_dir)))
    asked: dict[str, Any] = {}
    for override in own:
        key = key_of(override)
        if key not in KEYS:
            raise UsageError(f"{key}: unknown key; {', '.join(f'{name} is {what}' for name, what in KEYS.items())}")
        # A version is as written: 2.10 is not 2.1.
        text = override.partition("=")[2].strip("'\"")
        asked[key] = text if key == "plan.torch" else parsed_override(override).value()
    sheets = data_sheets()
    named = asked.get("plan.hardware")
    names = named if isinstance(named, list) else [named] if named else None
    torch = asked.get("plan.torch")
    learned: Learned | None = None
    try:
        torch = torch and version_of(torch)
    except ValueError:
        raise UsageError(f"plan.torch={torch}: is no version; write it as in plan.torch=2.3") from None
    if "plan.measured" in asked:
        if torch:
            raise UsageError("plan.torch: the run of plan.measured has a PyTorch of its own; leave one of the two out")
        torch, learned = _learned(Path(str(asked["plan.measured"])), sheets)
    with composer_of(rest, config_dir) as composer:
        cards = _cards(composer, sheets, names, rest)
        variants = _variants(composer, rest)
        predictions = predict(variants, cards, sheets, learned, torch)
    return Planned(predictions, command_line("run", *rest, "protocol.replicates=3"))


def _cards(
    composer: HydraComposer, sheets: Mapping[str, Sheet], names: Sequence[Any] | None, overrides: Sequence[str]
) -> dict[str, Sheet]:
    """Returns the cards to plan for, by option of `hardware`."""
    if names is not None:
        unknown = [str(name) for name in names if str(name) not in sheets]
        if unknown:
            near = get_close_matches(unknown[0], sheets)
            meant = f"; did you mean {' or '.join(near)}?" if near else ";"
            raise UsageError(
                f"plan.hardware: no data sheet for {', '.join(unknown)}{meant} there are {', '.join(sheets)}"
            )
        return {str(name): sheets[str(name)] for name in dict.fromkeys(names)}
    sheet = composer.current.hardware.sheet
    if sheet is None and composer.current.hardware.device == "cpu":
        return {"cpu": sheet_of_cpu(composer.current.hardware)}
    if sheet is None:
        raise UsageError(
            "no card is named: choose one, as in hardware=rtx4090, or several, as in 'plan.hardware=[t4,l4,rtx4090]'; "
            "hardware=cpu is this machine"
        )
    chosen = next((str(o).partition("=")[2] for o in reversed(overrides) if key_of(o) == "hardware"), "")
    option = chosen if sheets.get(chosen) == sheet else next((n for n, s in sheets.items() if s == sheet), chosen)
    return {option or sheet.name: sheet}


def _variants(composer: HydraComposer, overrides: Sequence[str]) -> list[Variant]:
    """Returns the variants of the study, if one is asked for; else the one that the overrides compose."""
    if any(key_of(override).split(".")[0] in ("study", "experiment") for override in overrides):
        return list(composer.current.study.plan(composer).variants)
    return [composer.variant(None)]


def _learned(folder: Path, sheets: Mapping[str, Sheet]) -> tuple[tuple[int, int], Learned]:
    """Returns the PyTorch of a measured run, and what its baseline tells of software and host. Raises UsageError."""
    result = read_result(folder)
    row = result.variant(result.baseline)
    device = str(result.environment.device["name"])
    sheet = sheet_of(device, sheets.values())
    if sheet is None:
        raise UsageError(f"plan.measured={folder}: was measured on {device}, for which there is no data sheet")
    card = next(name for name, other in sheets.items() if other == sheet)
    measured = [found for found in row.measurements if found.stages_s.get("denoiser_step")]
    calls = [seconds for times in row.samples.values() for seconds in times]
    if not measured or not calls:
        raise UsageError(f"plan.measured={folder}: has no stage times; measure with protocol.stage_calls=1 or more")
    with composer_of(list(row.overrides)) as measured_composer:
        variant = measured_composer.variant(None)
    torch = version_of(result.environment.packages.get("torch", "0.0"))
    software = software_of(variant, torch)
    if isinstance(software, str):
        raise UsageError(f"plan.measured={folder}: {software}")
    shape = variant.shapes[0]
    case = case_of_variant(variant, blueprint(variant, shape), shape, card, sheet, software)
    stages = {
        name: statistics.median([t for each in measured for t in each.stages_s.get(name, [])] or [float("nan")])
        for name in ("denoiser_step", "vae_decoder")
    }
    source = f"stages of {os.fspath(folder)}"
    return torch, learn(case, stages, statistics.median(calls), coefficients().all, source)


_TRUST = 0.5
"""How much of a component's residual is taken over: a stage's time holds the card's error too."""


def learn(case: Case, stages: Mapping[str, float], call: float, coefficients: Array, source: str) -> Learned:
    """Changes coefficients by what a measured call says of the host and the software, and of the card nothing.

    One ratio over everything would carry the card's own factor to other cards, and makes predictions worse.

    Args:
        case: the measured call.
        stages: seconds by stage: `denoiser_step` (one step) and `vae_decoder`; NaN where there are none.
        call: seconds of the whole call.
        coefficients: those of the prediction.
        source: what was measured, for the evidence.
    """
    table = Table.of([case])
    parts = table.parts(coefficients)
    _, (expected,), (decoding,) = table.sums(parts)
    step, decoder = stages["denoiser_step"], stages["vae_decoder"]
    changes: dict[str, float] = {}
    words = []
    if step > 0:
        # Bound by launches it tells of the host's own speed, else of the software.
        bound = parts[len(PARTS) - 1, 0] > parts[: len(PARTS) - 1, 0].sum()
        change = _TRUST * math.log(step / expected)
        changes[f"launch_{case.software.launcher}" if bound else f"class_{case.software.name}"] = change
        words.append(f"{'launches' if bound else 'software'} {math.exp(change):.2f}×")
    if step > 0 and decoder > 0:
        changes["decoder"] = -_TRUST * (math.log(decoder / decoding) - math.log(step / expected))
        words.append(f"VAE {math.exp(-changes['decoder']):.2f}×")
    rest = call - step * case.steps - decoder
    if rest > 0:
        changes[f"fixed_{case.software.fixed}"] = math.log(max(rest, 1e-3) / float(parts[-2, 0]))
        words.append(f"fixed part {rest:.2f} s")
    vector = coefficients.copy()
    for name, change in changes.items():
        vector[NAMES.index(name)] += change
    return vector, f"with {source}: {', '.join(words) or 'nothing to learn'}"
