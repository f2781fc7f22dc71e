"""Finds the device that a study runs on, from a process of its own."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.cards import planned_device, require_card, sheet_of
from sdopt.hardware.device import Device
from sdopt.hardware.nvml import describe_gpu
from sdopt.hardware.probe import default_threads, describe_cpu, probe_device
from sdopt.schema import Hardware, Sheet
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import ServerError, StartContext


@dataclass(frozen=True)
class Machine:
    """The machine as a probe from the fork server found it: the device, the CPU, and how workers start here."""

    device: Device
    cpu: dict[str, Any]
    preloaded: bool
    bad_fork: bool
    sheet: Sheet | None = None
    """The device's data sheet."""
    gpu: dict[str, Any] = field(default_factory=dict)
    """Settings of the CUDA device, and the other processes on it."""
    cards: int = 0
    """How many CUDA devices are visible."""
    warnings: tuple[str, ...] = ()
    """Warnings of settings that differ from the configuration, or that make the machine slower than necessary."""


def find_machine(
    context: StartContext,
    hardware: Hardware,
    sheets: Callable[[], Mapping[str, Sheet]],
    dry: bool = False,
) -> tuple[Machine, StartContext]:
    """Returns the machine that the configuration selects, with its data sheet, and how workers start there.

    Args:
        context: the preferred way to start workers; the returned one differs if that does not work.
        hardware: the configuration.
        sheets: returns the packaged data sheets; called if the device's name may match one.
        dry: whether nothing will run there: then a chosen data sheet is the machine.

    Raises:
        UsageError: there is no such device.
        ConflictError: the chosen data sheet does not belong to the device.
    """
    if dry and hardware.sheet is not None:
        return planned_machine(hardware.sheet), context
    try:
        machine, context = probe_machine(context, hardware.device)
    except UsageError as error:
        if hardware.sheet is None:
            raise
        hint = f"dry_run=true shows what would run on an {hardware.sheet.name}"
        raise ConflictError(
            [f"{problem}; {hint}" for problem in error.problems]
        ) from error
    require_card(hardware, machine.device)
    sheet = None if hardware.emulate_memory else hardware.sheet
    if sheet is None and machine.device.is_cuda:
        sheet = sheet_of(
            machine.device.name, sheets().values(), machine.device.memory_total_gib
        )
    return replace(machine, sheet=sheet), context


def probe_machine(context: StartContext, wanted: str) -> tuple[Machine, StartContext]:
    """Asks a fresh process for the machine with the device `wanted` (`hardware.device`).

    Returns:
        the machine, and how workers start there: if none can be forked from the fork server, they are spawned.

    Raises:
        UsageError: there is no such device.
    """
    what = f"hardware.device={wanted}"
    try:
        machine = in_process(context, _probe, wanted, what=what)
    except ServerError as error:
        slow = str(error)
    else:
        if not machine.bad_fork:
            return machine, context
        slow = "a library has started CUDA in the process that workers are forked from"
    context = multiprocessing.get_context("spawn")
    machine = in_process(context, _probe, wanted, what=what)
    slow = f"{slow}: each worker imports PyTorch again, which takes seconds"
    return replace(machine, warnings=(slow, *machine.warnings)), context


def planned_machine(sheet: Sheet) -> Machine:
    """Returns the machine of a data sheet, for planning without it."""
    return Machine(planned_device(sheet), describe_cpu(), False, False, sheet)


def _probe(wanted: str) -> Machine:
    import torch

    preload = sys.modules.get("sdopt.worker.preload")
    bad_fork = torch.cuda._is_in_bad_fork()
    device = probe_device("cpu" if bad_fork else wanted)
    failed = {} if preload is None else preload.FAILED
    preload_warnings = [
        f"workers import {module} by themselves, because it failed before: {why}"
        for module, why in failed.items()
    ]
    return Machine(
        device,
        describe_cpu() | {"threads": default_threads()},
        preloaded=preload is not None and os.getpid() != preload.SERVER_PID,
        bad_fork=bad_fork,
        gpu=describe_gpu(device),
        cards=torch.cuda.device_count() if device.is_cuda else 0,
        warnings=(*([device.warning] if device.warning else []), *preload_warnings),
    )
