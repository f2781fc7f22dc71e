"""sdopt optimize: what makes a model faster on this machine, as one sentence, a picture and a program."""

import argparse
import sys
import time

from . import Arguments, end_with_code

_EXAMPLES = """\
examples:
  sdopt optimize dreamshaper.safetensors
  sdopt optimize dreamshaper.safetensors --lora style.safetensors --memory 8 --budget 30m
  sdopt optimize stabilityai/stable-diffusion-xl-base-1.0 precision=fp16     from float16 on, instead of float32
  sdopt optimize emoji workload.steps=10 search.groups=[precision,caching]   the packaged model, and two groups only

It is `sdopt search` with the groups, the limits and the words that one model needs. Ctrl-C keeps what was found, and
the same command continues. Asked again, it answers at once; with a larger --budget, it goes on from what was measured.
In Python, `sdopt.optimize(pipe, …)` is something else: it turns options on for a pipeline that you have, and measures
nothing.

Exit codes: 0 something faster passed; 2 usage or configuration; 3 nothing passed, or it could not be measured."""


@end_with_code
def main(argv: list[str]) -> int:
    """Searches what makes one model faster; returns the exit code."""
    began = time.monotonic()
    parser = Arguments(
        prog="sdopt optimize",
        description="Find what makes a model faster on this machine, without images getting worse.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a .safetensors file, a diffusers folder, owner/name, or a name",
    )
    parser.add_argument(
        "--lora", metavar="FILE", help="a LoRA that all images are made with"
    )
    parser.add_argument(
        "--memory", metavar="GIB", type=float, help="a limit for the peak memory"
    )
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="how long to search and judge, as in 90s, 30m or 2h (default: 30m)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="begin anew, whatever earlier calls have found",
    )
    parser.add_config_dir()
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="as for sdopt search and sdopt run",
    )
    arguments = parser.parsed(argv)

    from sdopt.search.optimize import answer_of_optimize, hand_out, optimize_overrides

    from .search import searched

    model = arguments.model.removeprefix("model=")  # as all other commands want it
    chosen = (model, arguments.lora, arguments.memory, arguments.budget)
    overrides = optimize_overrides(*chosen, arguments.overrides)
    return searched(
        overrides,
        arguments.config_dir,
        began,
        answer_of_optimize,
        hand_out,
        arguments.again,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
