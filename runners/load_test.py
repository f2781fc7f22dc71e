"""sdopt load-test: which variant and policy of batching carries the most requests within a limit."""

import sys
from importlib.util import find_spec

from sdopt.errors import UsageError
from sdopt.terminal import console as terminal

from . import Arguments, composable, end_with_code, indented

_HELP = """\
usage: sdopt load-test [--config-dir DIR] [serving=single|greedy|window] [load.key=value ...] [key=value ...]
       sdopt load-test url=http://… load.rates=[…] load.limit_s=…

Compare variants and policies of batching under load. Each variant of the study is served as by `sdopt serve`, with each
policy; requests are sent at the times of a trace, whatever becomes of earlier ones, and latency counts from the
scheduled time. The answer is the highest rate at which enough requests get their image within one limit for all.

examples:
  sdopt load-test precision=bf16 caching=deepcache                baseline and candidate, with single and greedy calls
  sdopt load-test caching=deepcache serving=window 'load.policies=[single,greedy]' load.limit_s=1.5
  sdopt load-test url=http://127.0.0.1:8000 'load.rates=[1,2,4]' load.limit_s=2      any server with OpenAI's interface
  sdopt load-test url=https://host/v1 load.model=NAME load.key=OPENAI_API_KEY 'load.rates=[1,2]' load.limit_s=9
  sdopt load-test experiment=lightning_serving dry_run=true       what would be served and sent, and what cannot be

keys of the load and their defaults:
{keys}

Of `serving` it takes the policy, max_batch and window_ms. Other keys are those of `sdopt serve`, and study, experiment,
dry_run, tracking, workload.prompts, workload.prompt_column and workload.prompt_count of `sdopt run`.

Exit codes: 0 measured; 2 usage, configuration or conflict; 3 a row could not be measured."""


def _help() -> str:
    from sdopt.apps.loadtest.config import load_config

    from .keys import own_keys

    load, _, _ = load_config([])
    return _HELP.format(keys=indented(own_keys(load, "load")))


@end_with_code
def main(argv: list[str]) -> int:
    """Runs a load test; returns the exit code."""
    parser = Arguments(prog="sdopt load-test", text=_help)
    parser.add_config_dir()
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parsed(argv)

    from sdopt.worker.forkserver import independent_children, start_fork_server

    if find_spec("prometheus_client") is None:
        raise UsageError("a load test needs an extra: pip install 'sdopt[serve]'")
    from sdopt.apps.loadtest.config import load_config

    _, _, served = load_config(arguments.overrides, arguments.config_dir)
    composable(served, arguments.config_dir)
    context = start_fork_server()
    from sdopt.apps.loadtest.command import run
    from sdopt.apps.loadtest.report import blocks_of
    from sdopt.config.command import add_working_folder
    from sdopt.report.terminal import shown

    add_working_folder()
    console = terminal()
    with independent_children():
        record = run(
            arguments.overrides,
            arguments.config_dir,
            context,
            lambda line: print(line, flush=True),
        )
    if record.rows:  # a dry run has none
        console.print(shown(blocks_of(record, brief=True), console.width))
    return 3 if any(row.reason for row in record.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
