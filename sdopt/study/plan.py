"""Plans a study: its result before anything is measured, and the disk space that it needs."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from sdopt.contract import Contract
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.device import Device
from sdopt.options.base import loading_arguments
from sdopt.pipelines.components import count_weights
from sdopt.record.comparisons import Comparison, ShapeRatios
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import Promise, Status, StudyResult, VariantResult, now
from sdopt.schema import Model, Protocol
from sdopt.study.designs import CONTROL, Plan
from sdopt.study.environment import describe_environment
from sdopt.study.fingerprint import inputs_of, of_model
from sdopt.variant import Variant
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine

_LOGS_BYTES = 4 * 2**20


def refused(plan: Plan, device: Device) -> list[str]:
    """Returns the conflicts of all candidates if none of them can run on `device`; empty if one can.

    Also empty if there are no candidates, or if the baseline itself cannot run, which `plan_result` reports.
    """
    baseline, *candidates = [variant.conflicts(device) for variant in plan.variants]
    return [] if baseline or not all(candidates) else list(chain(*candidates))


def plan_result(
    plan: Plan, name: str, design: str, config: RecordedConfig, machine: Machine, command: list[str]
) -> StudyResult:
    """Returns the result of a study before anything is measured: what will be run, compared and skipped, and why.

    Raises:
        ConflictError: the baseline cannot run here, so that there is nothing to compare with.
    """
    variants = []
    model = cache(of_model)
    for variant in plan.variants:
        conflicts = variant.conflicts(machine.device)
        variants.append(_row(variant, variant.name, "variant", conflicts))
        variants[-1].inputs = inputs_of(variant, model)
        if variant.other_work(plan.baseline):
            # Another scheduler or number of steps changes the images, and no option's contract covers that.
            variants[-1].contract = Contract.LOSSY
        if conflicts and variant is plan.baseline:
            raise ConflictError([f"the baseline '{variant.name}' cannot run: {reason}" for reason in conflicts])
    variants.append(_row(plan.baseline, CONTROL, "control", []))
    variants[-1].inputs = variants[0].inputs
    return StudyResult(
        name=name,
        design=design,
        started=now(),
        environment=describe_environment(machine, command),
        config=config,
        variants=variants,
        comparisons=[
            Comparison(*sides, [ShapeRatios() for _ in config.shapes])
            for sides in (
                *((edge.candidate, edge.reference, edge.credit) for edge in plan.edges),
                (CONTROL, plan.baseline.name, "nothing"),
            )
        ],
        baseline=plan.baseline.name,
    )


def runnable_of(plan: Plan, result: StudyResult) -> list[Variant]:
    """Returns the variants that the plan did not skip."""
    skipped = {row.name for row in result.variants if row.status is Status.SKIPPED}
    return [variant for variant in plan.variants if variant.name not in skipped]


def warmup_calls(variants: Sequence[Variant], protocol: Protocol) -> int:
    """Returns how many calls follow the first one before the rounds, for all variants alike.

    They are `protocol.warmup`, or more if an option still records graphs in some of them: one more call then follows.
    """
    recording = max((o.recording_calls for variant in variants for o in variant.optimizations.values()), default=0)
    return max(protocol.warmup, 1 + recording if recording else 0)


def _row(variant: Variant, name: str, role: str, conflicts: list[str]) -> VariantResult:
    return VariantResult(
        name=name,
        role=role,
        choices=dict(variant.choices),
        overrides=list(variant.overrides),
        config=variant.config,
        contract=variant.contract,
        promises={
            axis: Promise(option.contract, sorted(option.claims)) for axis, option in variant.optimizations.items()
        },
        snippets={axis: list(option.diffusers_lines) for axis, option in variant.applied},
        status=Status.SKIPPED if conflicts else Status.PENDING,
        # Every report puts the name before the reason.
        reason="; ".join(reason.removeprefix(f"{name}: ") for reason in conflicts),
    )


def require_room(plan: Plan, result: StudyResult, folder: Path, machine: Machine, context: StartContext) -> None:
    """Checks that the disks have space for the files of a study.

    The folder of the run receives logs, and images of at most their raw size. The temporary folder receives the data
    that options keep on disk while their process lives; in blocks, one process lives at a time.

    Raises:
        UsageError: has one line for each folder whose disk lacks space.
    """
    variants = [*runnable_of(plan, result), plan.baseline]
    images = sum(len(v.pictured) * v.workload.images_per_prompt * v.size**2 * 3 for v in variants)
    problems = _shortage(folder, images + _LOGS_BYTES, "choose another folder with hydra.run.dir=…")
    count = cache(lambda model: in_process(context, count_weights, model, what=f"model={model.name}"))
    kept = [_kept_on_disk(variant, machine.device, count) for variant in variants]
    if any(kept):
        blocks = result.config.protocol.schedule == "blocks"
        together = max(kept) if blocks else sum(kept) * result.config.replicates
        other = "" if blocks else ", or measure one process at a time with protocol.schedule=blocks"
        problems += _shortage(Path(tempfile.gettempdir()), together, f"name another folder with TMPDIR=…{other}")
    if problems:
        raise UsageError(problems)


def _kept_on_disk(variant: Variant, device: Device, count: Callable[[Model], int]) -> int:
    """Returns the bytes that the options of a variant keep on disk in each of its processes."""
    dtype = loading_arguments(option for _, option in variant.applied).get("dtype")
    width = 4 if dtype is None else dtype.itemsize
    context = variant.context(device)
    return sum(
        option.disk_bytes(context, lambda: count(variant.model) * width) for option in variant.optimizations.values()
    )


def _shortage(folder: Path, needed: int, way_out: str) -> list[str]:
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return []
    space = f"{free / 2**20:.0f} MiB are free there, and up to {needed / 2**20:.0f} MiB are needed"
    return [f"{folder}: {space}; make room, or {way_out}"]
