"""sdopt doctor: describe this machine, its peak speed, and which options run on it."""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import ConflictError, UsageError, command_line, print_problems
from sdopt.schema import Hardware
from sdopt.terminal import console as terminal

from . import Arguments, composable, end_with_code

if TYPE_CHECKING:
    from sdopt.apps.doctor.diagnosis import Diagnosis
    from sdopt.hardware.ceilings import Ceiling
    from sdopt.record.samples import Interference
    from sdopt.worker.forkserver import StartContext
    from sdopt.worker.machine import Machine


@end_with_code
def main(argv: list[str]) -> int:
    """Prints the diagnosis; returns the exit code."""
    parser = Arguments(
        prog="sdopt doctor",
        description="Describe this machine: its hardware, its peak speed, and which options run on it, or why not.",
        epilog="examples: sdopt doctor precision=fp16; sdopt doctor hardware=a10 (what would run on an A10)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="Hydra overrides for the configuration in which each option is checked",
    )
    parser.add_config_dir()
    parser.add_argument(
        "--quick",
        action="store_true",
        help="skip measuring the ceilings, which takes some seconds",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="say of each option what it needs or why it does not run",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print everything as JSON, raw samples included",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the ceilings as a data sheet: my_conf/hardware/NAME.yaml",
    )
    arguments = parser.parsed(argv)
    composable(arguments.overrides, arguments.config_dir)

    from sdopt.worker.forkserver import independent_children, start_fork_server

    with independent_children():
        return _diagnose(arguments, start_fork_server(torch_alone=True))


def _diagnose(arguments: argparse.Namespace, context: "StartContext") -> int:
    from sdopt.apps.doctor.diagnosis import diagnose, observed_ceilings
    from sdopt.apps.doctor.options import check_options
    from sdopt.apps.doctor.tables import brief_tables, tables
    from sdopt.config.command import add_working_folder
    from sdopt.config.composer import composer_of
    from sdopt.config.groups import data_sheets, optimization_options
    from sdopt.hardware.probe import list_cards
    from sdopt.locks import reserve
    from sdopt.worker.child import in_process

    console = terminal()
    add_working_folder()
    with composer_of(arguments.overrides, arguments.config_dir) as composer:
        machine, context, planned = _machine(composer.current.hardware, context)
        _require_ceilings(arguments, planned)
        print_problems(machine.warnings)
        with console.status("asking the devices"):
            cards = in_process(context, list_cards, what="the CUDA devices")
            options = check_options(
                composer,
                optimization_options(arguments.config_dir),
                machine.device,
                data_sheets(),
            )
        ceilings: list[Ceiling] = []
        interference: Interference | None = None
        if not planned and not arguments.quick:
            with (
                reserve(machine.device, "sdopt doctor") as holder,
                console.status("measuring the ceilings"),
            ):
                if holder:
                    disturbed = "the ceilings come out too low, and measuring them disturbs it; --quick skips them"
                    print_problems(
                        [f"{holder} measures on {machine.device.name}: {disturbed}"]
                    )
                ceilings, interference = in_process(
                    context, observed_ceilings, machine.device, what="the ceilings"
                )
    started_by = context.get_start_method()
    found = diagnose(
        machine, cards, planned, options, ceilings, started_by, interference
    )
    if arguments.json:
        print(_as_json(found))
    else:
        console.print(tables(found) if arguments.all else brief_tables(found))
    if arguments.save:
        _save(found, arguments.save)
    return 0


def _machine(
    hardware: Hardware, context: "StartContext"
) -> "tuple[Machine, StartContext, bool]":
    """Returns the machine, how workers start there, and whether the machine is only planned from a data sheet."""
    from sdopt.config.groups import data_sheets
    from sdopt.worker.machine import find_machine, planned_machine

    try:
        return *find_machine(context, hardware, data_sheets), False
    except ConflictError:
        if hardware.sheet is None or hardware.emulate_memory:
            raise
        return planned_machine(hardware.sheet), context, True
    except UsageError as error:
        if hardware.device != "auto":
            raise
        print_problems(error.problems)
        return *find_machine(
            context, replace(hardware, device="cpu"), data_sheets
        ), False


def _require_ceilings(arguments: argparse.Namespace, planned: bool) -> None:
    """Raises UsageError if `--save` has nothing to save or no folder for it, or if a flag would have no effect."""
    if arguments.save and (planned or arguments.quick):
        raise UsageError(
            "--save: needs measured ceilings; leave out --quick, and choose a device of this machine"
        )
    if arguments.save and arguments.save.absolute().parent.name != "hardware":
        raise UsageError(
            f"--save {arguments.save}: must be in a folder called hardware, as in my_conf/hardware/name.yaml"
        )
    if arguments.save:  # before minutes of measuring
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(arguments.save.parent, os.W_OK):
            raise UsageError(
                f"--save {arguments.save}: its folder cannot be written; choose another"
            )


def _as_json(found: "Diagnosis") -> str:
    plain = asdict(found)
    for kept, ceiling in zip(plain["ceilings"], found.ceilings, strict=True):
        kept |= {
            "rate": None if ceiling.failure else ceiling.rate,
            "unit": ceiling.unit,
        }
    return json.dumps(plain, indent=1)


def _save(found: "Diagnosis", path: Path) -> None:
    from sdopt.apps.doctor.tables import sheet_yaml

    path.write_text(sheet_yaml(found), encoding="utf-8")
    print(
        command_line(
            "run", "--config-dir", path.parent.parent, f"hardware={path.stem}"
        ),
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
