"""sdopt gpu-suite: run all that needs a GPU within a time budget, most valuable part first."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from sdopt.errors import UsageError, print_problems

from . import Arguments, end_with_code, indented

_HELP = """\
usage: sdopt gpu-suite [key=value ...]

Run everything that needs a GPU unattended, most valuable part first: the machine, its ceilings and its noise; the tests
for GPUs; every option on three models; every published preset. Each part runs in a process of its own with a time
limit. The findings are written after each part, to <folder>/<device>/suite.json and suite.md. From these files, a
second call continues where the first stopped, also on another machine with the same card.

examples:
  sdopt gpu-suite budget_s=1500
  sdopt gpu-suite budget_s=540 'only=[environment,tests]'
  sdopt gpu-suite archive=suite.tar.xz           the results in one file, too, from which another machine goes on
  sdopt gpu-suite device=cpu budget_s=300        a trial run, with the packaged model on the CPU

keys and their defaults:
{keys}

parts, in their order; set their keys as in parts.noise.limit_s=60:
{parts}

Exit codes: 0 everything is done; 2 usage or configuration; 3 something failed, or the budget had no room for it."""


def _help() -> str:
    from sdopt.apps.suite.config import suite_config

    from .keys import own_keys

    config = suite_config([])
    *keys, _, _ = own_keys(replace(config, parts={}))  # the parts have their own list
    return _HELP.format(
        keys=indented(keys),
        parts=indented(
            f"{part.name:<28} at most {part.limit_s:.0f} s"
            for part in config.parts.values()
        ),
    )


@end_with_code
def main(argv: list[str]) -> int:
    """Runs the parts that are not done; returns the exit code."""
    began = time.monotonic()
    parser = Arguments(prog="sdopt gpu-suite", text=_help)
    parser.add_argument("overrides", nargs="*")
    overrides = parser.parsed(argv).overrides
    from sdopt.apps.suite.config import suite_config

    config = suite_config(overrides)
    from sdopt.apps.suite.record import PAGE, Ending
    from sdopt.apps.suite.run import Suite, run_suite, slug_of
    from sdopt.worker.forkserver import independent_children, start_fork_server
    from sdopt.worker.machine import probe_machine

    with independent_children():
        try:
            context = start_fork_server(torch_alone=True)
            machine, _ = probe_machine(context, config.device)
        except UsageError as error:
            hint = "device=cpu runs a trial of the suite on the CPU"
            raise UsageError(
                [f"{problem}; {hint}" for problem in error.problems]
            ) from error
    device = machine.device
    print_problems(machine.warnings)
    folder = Path(config.folder) / slug_of(device.name)
    suite = Suite(
        config,
        device,
        folder,
        began + config.budget_s,
        lambda line: print(line, flush=True),
    )
    record = run_suite(suite)
    left = [entry for entry in record.entries if not entry.ending.well]
    able = [entry for entry in record.entries if entry.ending is not Ending.LEFT_OUT]
    print(
        f"{len(able) - len(left)} of the {len(able)} parts that can run here are done: {folder / PAGE}"
    )
    for entry in left:
        print(
            f"  {entry.part}: {entry.ending}{f' ({entry.reason})' if entry.reason else ''}"
        )
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
