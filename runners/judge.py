"""sdopt judge: compare images, and times, that any program made."""

import sys
from pathlib import Path

from sdopt.contract import Contract
from sdopt.errors import UsageError

from . import Arguments, answers, end_with_code, found_in, only_json

TYPES = ("float32", "float16", "bfloat16")


@end_with_code
def main(argv: list[str]) -> int:
    """Judges folders of images; returns 0 if all passed, 1 for a regression, 2 for a usage error, 3 if undecided."""
    arguments = _parser().parsed(argv)
    overrides = [
        word for word in arguments.candidates if "=" in word and not Path(word).exists()
    ]
    folders = [Path(word) for word in arguments.candidates if word not in overrides]

    from sdopt.apps.exchange.judging import judge_folders
    from sdopt.apps.exchange.settings import named_settings
    from sdopt.apps.exchange.study import GivenFolder

    with only_json(arguments.json) as say:
        if not folders:
            raise UsageError(
                "CANDIDATE: name a folder of images to compare with the baseline"
            )
        given = GivenFolder(
            arguments.baseline,
            folders,
            arguments.again,
            Contract(arguments.contract),
            arguments.precision,
            changes=named_settings(arguments.changes) if arguments.changes else (),
        )
        code, folder = judge_folders(
            given, overrides, arguments.output, ["sdopt", "judge", *argv]
        )
        if arguments.json:
            say(answers(found_in(folder), code))
        return code


def _parser() -> Arguments:
    parser = Arguments(
        prog="sdopt judge",
        description="Compare images that any program made with those of a baseline, by the metrics and rules of a "
        "study. Images belong together by file name, or by the prompt and seed in a prompts.csv (file, prompt, seed) "
        "beside them, or in the files, where A1111, ComfyUI, InvokeAI, SwarmUI, Fooocus and others leave them, in a "
        "program's log, a script's metadata.json or args.json, or a run's record; settings that they leave there "
        "(steps, sampler, model, …) must be the same. A times.csv (file, or prompt and seed; seconds; memory_gib; "
        "replicate; images of a call; warmup: 1 for a call that does not count) adds speed and memory.",
        epilog="examples: sdopt judge fp32/ int8/ --again fp32_once_more/; sdopt judge fp32/ int8/ gate=strict "
        "quality.features=[effnet] gate.calibration=own.json (from `sdopt calibrate --from seeds_a/ seeds_b/`)",
    )
    parser.add_argument(
        "baseline", metavar="BASELINE", type=Path, help="a folder of images"
    )
    parser.add_argument(
        "candidates",
        metavar="CANDIDATE",
        nargs="+",
        help="folders to compare with it; KEY=VALUE",
    )
    parser.add_argument(
        "--again",
        type=Path,
        metavar="FOLDER",
        help="the baseline's images, made once more: what differs is chance",
    )
    parser.add_argument(
        "--contract",
        choices=[str(contract) for contract in Contract],
        default=str(Contract.LOSSY),
        help="what is promised: the same bytes, the same up to rounding, or as good (default: %(default)s)",
    )
    parser.add_argument(
        "--changes",
        metavar="SETTING,…",
        help="settings of the images that the candidates change on purpose, as in steps,sampler, also by the name that "
        "their program has for one; others must be the baseline's",
    )
    parser.add_argument(
        "--precision",
        choices=TYPES,
        help="number type of the baseline, for rules of --contract=equivalent",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the result (default: outputs/runs/judge/<time>)",
    )
    parser.add_json()
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
