"""sdopt doctor: what this machine is, how fast it can be, and which options run on it."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import end_with_code

if TYPE_CHECKING:
    from sdopt.worker.forkserver import StartContext


@end_with_code
def main(argv: list[str]) -> int:
    """Prints the diagnosis; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sdopt doctor",
        description="Say what this machine is, how fast it is at best, and which options run on it, or why not.",
        epilog="examples: sdopt doctor precision=fp16; sdopt doctor hardware=a10 (what would run on an A10)",
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides: the configuration that each option is tried on")
    parser.add_argument("--config-dir", type=Path, metavar="FOLDER", help="a folder with groups of your own")
    parser.add_argument("--quick", action="store_true", help="measure no ceilings (they take some seconds)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, raw samples included")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the ceilings as a data sheet: my_conf/hardware/NAME.yaml"
    )
    arguments = parser.parse_args(argv)

    from sdopt.worker.forkserver import independent_children, start_fork_server

    with independent_children():
        return _diagnose(arguments, start_fork_server())


def _diagnose(arguments: argparse.Namespace, context: "StartContext") -> int:
    from dataclasses import asdict, replace

    from rich.console import Console

    from sdopt.config.composer import composer_of
    from sdopt.config.groups import data_sheets, optimization_options
    from sdopt.doctor.diagnosis import diagnose, list_cards
    from sdopt.doctor.options import check_options
    from sdopt.doctor.tables import sheet_yaml, tables
    from sdopt.errors import ConflictError, UsageError
    from sdopt.measure.ceilings import measure_ceilings
    from sdopt.worker.calls import in_process
    from sdopt.worker.machine import find_machine, planned_machine

    console = Console()
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with composer_of(arguments.overrides, arguments.config_dir) as composer:
        hardware = composer.current.hardware
        planned = False
        try:
            machine, context = find_machine(context, hardware, data_sheets)
        except ConflictError:
            if hardware.sheet is None or hardware.emulate_memory:
                raise
            machine, planned = planned_machine(hardware.sheet), True
        except UsageError as error:
            if hardware.device != "auto":
                raise
            print(f"sdopt: {error}", file=sys.stderr)
            machine, context = find_machine(context, replace(hardware, device="cpu"), data_sheets)
        if arguments.save and (planned or arguments.quick):
            raise UsageError("--save: there are no ceilings to save of a card that is not here, or with --quick")
        if arguments.save and arguments.save.absolute().parent.name != "hardware":
            raise UsageError(f"--save {arguments.save}: a data sheet goes into a folder called hardware")
        with console.status("asking the devices"):
            cards = in_process(context, list_cards, what="the CUDA devices")
            options = check_options(composer, optimization_options(arguments.config_dir), machine.device, data_sheets())
        ceilings = []
        if not planned and not arguments.quick:
            with console.status("measuring the ceilings"):
                ceilings = in_process(context, measure_ceilings, machine.device, what="the ceilings")
    found = diagnose(machine, cards, planned, options, ceilings)
    if arguments.json:
        rates = [{"rate": ceiling.rate, "unit": ceiling.unit} for ceiling in ceilings]
        plain = asdict(found)
        plain["ceilings"] = [kept | rate for kept, rate in zip(plain["ceilings"], rates, strict=True)]
        print(json.dumps(plain, indent=1))
    else:
        console.print(tables(found, console.width))
    if arguments.save:
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        arguments.save.write_text(sheet_yaml(found))
        print(f"sdopt run --config-dir {arguments.save.parent.parent} hardware={arguments.save.stem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
