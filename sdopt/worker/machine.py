"""Finds the device that a study runs on, in a process of its own."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.cards import planned_device, require_card, sheet_of
from sdopt.hardware.device import Device, describe_cpu, probe_device
from sdopt.schema import Hardware, Sheet
from sdopt.worker.calls import in_process
from sdopt.worker.forkserver import StartContext


@dataclass(frozen=True)
class Machine:
    """What a first worker found: the device, the CPU, and how workers start here."""

    device: Device
    cpu: dict[str, Any]
    preloaded: bool
    bad_fork: bool
    sheet: Sheet | None = None
    """The device's data sheet."""


def probe_machine(context: StartContext, wanted: str) -> Machine:
    """Asks a process of its own what `hardware.device` is. Raises UsageError where there is no such device."""
    return in_process(context, _probe, wanted, what=f"hardware.device={wanted}")


def find_machine(
    context: StartContext, hardware: Hardware, sheets: Callable[[], Mapping[str, Sheet]]
) -> tuple[Machine, StartContext]:
    """The machine that the configuration means, with its data sheet, and how workers start there.

    Args:
        sheets: the packaged data sheets, asked for where a device's name may find one.

    Raises:
        UsageError: there is no such device.
        ConflictError: the data sheet that was chosen is not that of the device.
    """
    try:
        machine = probe_machine(context, hardware.device)
    except UsageError as error:
        if hardware.sheet is None:
            raise
        hint = f"dry_run=true shows what would run on an {hardware.sheet.name}"
        raise ConflictError([f"{problem}; {hint}" for problem in error.problems]) from error
    if machine.bad_fork:
        context = multiprocessing.get_context("spawn")
        machine = probe_machine(context, hardware.device)
    require_card(hardware, machine.device)
    sheet = None if hardware.emulate_memory else hardware.sheet
    if sheet is None and machine.device.is_cuda:
        sheet = sheet_of(machine.device.name, sheets().values())
    return replace(machine, sheet=sheet), context


def planned_machine(sheet: Sheet) -> Machine:
    """The machine of a data sheet, for planning without it."""
    return Machine(planned_device(sheet), describe_cpu(), False, False, sheet)


def _probe(wanted: str) -> Machine:
    preload = sys.modules.get("sdopt.worker.preload")
    bad_fork = torch.cuda._is_in_bad_fork()
    device = probe_device("cpu" if bad_fork else wanted)
    return Machine(device, describe_cpu(), preload is not None and os.getpid() != preload.SERVER_PID, bad_fork)
