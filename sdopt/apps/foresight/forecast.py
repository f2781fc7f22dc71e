"""What a dry run and a search say before anything is measured: the entry point `sdopt.forecast`."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter

from sdopt.apps.foresight.cpu import CpuRates, known_machine
from sdopt.apps.foresight.plan import Prediction, predict, predict_here, text_of
from sdopt.config.groups import data_sheets
from sdopt.errors import UsageError
from sdopt.forecast import Expected
from sdopt.record.files import short_digest, write_cached
from sdopt.schema import Sheet
from sdopt.scratch import cache_folder
from sdopt.study.fingerprint import code, inputs_of, of_model
from sdopt.variant import Variant
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine

_KEPT = TypeAdapter(list[Expected])


def expected(
    variants: Sequence[Variant], machine: Machine, context: StartContext
) -> list[Expected]:
    """Returns what `sdopt plan` predicts of variants on a card with a data sheet, or on this CPU.

    Raises:
        UsageError: a model has no configuration here, because it was not fetched; or the rates of this CPU are not
            known yet.
    """
    if machine.sheet is None:
        return _on_this_cpu(variants, machine, context)
    cards = {_card_of(machine, machine.sheet): machine.sheet}
    return _told(in_process(context, predict, variants, cards, what="the networks"))


def _card_of(machine: Machine, sheet: Sheet) -> str:
    for card, other in data_sheets().items():
        if other == sheet:
            return card
    return machine.device.name


def _on_this_cpu(
    variants: Sequence[Variant], machine: Machine, context: StartContext
) -> list[Expected]:
    """Returns what variants would take here, from an earlier command that asked the same: tracing takes ten seconds."""
    cpu = dict(machine.cpu)
    threads = cpu.pop("threads")
    rates = known_machine(variants[0].hardware.threads or threads, cpu)
    if rates is None:
        raise UsageError(
            "this machine's rates are not known yet; `sdopt plan hardware=cpu` measures them on an idle machine"
        )
    file = _file_of(variants, rates)
    with suppress(OSError, ValueError):
        return _KEPT.validate_json(file.read_bytes())
    predictions = _told(
        in_process(context, predict_here, variants, what="the networks")
    )
    if not any(math.isnan(prediction.seconds) for prediction in predictions):
        write_cached(file, _KEPT.dump_json(predictions))
    return predictions


def _file_of(variants: Sequence[Variant], rates: CpuRates) -> Path:
    """Returns where a prediction is kept, by all that it depends on."""
    libraries = [version(name) for name in ("diffusers", "torch", "transformers")]
    facts: list[object] = [code(), libraries, astuple(rates)]
    for variant in variants:
        facts += [
            variant.name,
            inputs_of(variant, of_model),
            repr((variant.model, variant.task, variant.scheduler, variant.workload)),
            repr((variant.hardware, variant.optimizations)),
        ]
    digest = short_digest(json.dumps(facts).encode())
    return cache_folder() / "sdopt" / "predictions" / f"{digest}.json"


def _told(predictions: Sequence[Prediction]) -> list[Expected]:
    return [
        Expected(
            prediction.variant,
            prediction.shape,
            prediction.seconds,
            text_of(prediction),
            not prediction.is_too_large,
        )
        for prediction in predictions
    ]
