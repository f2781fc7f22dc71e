"""Plans a study: its result before anything is measured, and the room that it needs on the disk."""

import shutil
from functools import cache
from pathlib import Path

from sdopt.errors import ConflictError, UsageError
from sdopt.optimizations.base import Contract
from sdopt.results.records import (
    Comparison,
    Promise,
    RecordedConfig,
    ShapeRatios,
    Status,
    StudyResult,
    VariantResult,
)
from sdopt.study.designs import CONTROL, Plan
from sdopt.study.environment import describe_environment
from sdopt.study.fingerprint import inputs_of, of_model
from sdopt.study.status import now
from sdopt.variant import Variant
from sdopt.worker.machine import Machine

_LOGS_BYTES = 4 * 2**20


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
            # Another scheduler or number of steps: no option promised that, and the images are others.
            variants[-1].contract = str(Contract.LOSSY)
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
            Comparison(*sides, further=[ShapeRatios() for _ in config.shapes[1:]])
            for sides in (
                *((edge.candidate, edge.reference, edge.credit) for edge in plan.edges),
                (CONTROL, plan.baseline.name, "nothing"),
            )
        ],
        baseline=plan.baseline.name,
    )


def _row(variant: Variant, name: str, role: str, conflicts: list[str]) -> VariantResult:
    return VariantResult(
        name=name,
        role=role,
        choices=dict(variant.choices),
        overrides=list(variant.overrides),
        config=variant.config,
        contract=str(variant.contract),
        promises={
            axis: Promise(str(option.contract), sorted(option.claims)) for axis, option in variant.optimizations.items()
        },
        snippets={axis: list(option.diffusers_lines) for axis, option in variant.applied},
        status=Status.SKIPPED if conflicts else Status.PENDING,
        reason="; ".join(conflicts),
    )


def require_room(plan: Plan, folder: Path) -> None:
    """Raises UsageError if the folder's disk has no room for the logs and the images, each at most of its raw size."""
    images = sum(
        len(v.pictured) * v.workload.images_per_prompt * v.size**2 * 3 for v in [*plan.variants, plan.baseline]
    )
    needed, free = images + _LOGS_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{folder}: {free / 2**20:.0f} MiB are free there, and up to {needed / 2**20:.0f} MiB are needed; "
            "make room, or choose another folder with hydra.run.dir=…"
        )
