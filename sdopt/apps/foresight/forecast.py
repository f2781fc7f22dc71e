"""What a dry run and a search say before anything is measured: the entry point `sdopt.forecast`."""

from collections.abc import Sequence

from sdopt.apps.foresight.cpu import known_machine
from sdopt.apps.foresight.plan import predict, predict_here, text_of
from sdopt.config.groups import data_sheets
from sdopt.errors import UsageError
from sdopt.forecast import Expected
from sdopt.variant import Variant
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine


def expected(
    variants: Sequence[Variant], machine: Machine, context: StartContext
) -> list[Expected]:
    """Returns what `sdopt plan` predicts of variants on a card with a data sheet, or on this CPU.

    Raises:
        UsageError: a model has no configuration here, because it was not fetched; or the rates of this CPU are not
            known yet.
    """
    sheet = machine.sheet
    if sheet is None:
        cpu = dict(machine.cpu)
        threads = cpu.pop("threads")
        if known_machine(variants[0].hardware.threads or threads, cpu) is None:
            raise UsageError(
                "this machine's rates are not known yet; `sdopt plan hardware=cpu` measures them"
            )
        predictions = in_process(context, predict_here, variants, what="the networks")
    else:
        card = next(
            (key for key, other in data_sheets().items() if other == sheet),
            machine.device.name,
        )
        predictions = in_process(
            context, predict, variants, {card: sheet}, what="the networks"
        )
    return [
        Expected(each.variant, each.shape, each.seconds, text_of(each))
        for each in predictions
    ]
