"""Evaluates the family of models: a table of figures for the generator, and one for each companion."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DiffusionPipeline,
    FluxPipeline,
    LCMScheduler,
)
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional
from torch.utils.benchmark import Timer

from sdopt.apps.training.autoencoder import (
    encode_all,
    peak_signal_to_noise,
    pixels,
    reconstruction_psnr,
)
from sdopt.apps.training.captions import (
    STEPS,
    call,
    generate,
    real_pictures,
    records_of,
)
from sdopt.apps.training.cards import CardFigure, read_recipe
from sdopt.apps.training.clip import DEGRADATIONS, hold_out_pictures
from sdopt.apps.training.data import (
    BACKGROUNDS,
    Dataset,
    PictureRecord,
    build,
    draw_style,
)
from sdopt.apps.training.packages import STYLES
from sdopt.errors import UsageError
from sdopt.quality.available import require_features
from sdopt.quality.distances import cmmd, fid, kid
from sdopt.quality.features import ClipFeatures, FeatureExtractor, feature_extractor
from sdopt.quality.images import channels_first
from sdopt.quality.reference_sets import ReferenceSet

JUDGE = "effnet"
"""The feature extractor for the generator: EfficientNet-lite0, trained on ImageNet, independent of the family."""

NEAREST = (1, 10)
"""Values of k: the correct concept must be among the k nearest."""

CANDIDATES = 300
"""Number of concepts to rank for a coloured background; features of all concepts on each colour take too long."""

DECODED = 32
"""Number of captions whose latents the tiny autoencoder decodes."""

COMPARED = 32
"""Number of concepts, of each split, on which a LoRA is evaluated."""

FEW_STEPS = (8, 4)
"""Numbers of steps with and without the LoRA for few steps."""

JUDGED = 96
"""Number of captions on which it is evaluated."""

REFERENCE_PICTURES = 1000
"""Number of training pictures in the reference of the CLIP's distances."""

WRONG = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Shares of pictures with a wrong caption."""

Note = Callable[[str], None]
"""Receives a short description of the current step."""


def evaluate_family(
    model: Path, work: Path, note: Note
) -> dict[Path, list[CardFigure]]:
    """Returns the figures of a pipeline and of its companions, by folder.

    Companions are sought beside it, and in `companions/` beside it; a missing data set is downloaded to `work`.

    Raises:
        UsageError: the folder has no exported pipeline, or `effnet` is not installed.
        DataError: the data cannot be downloaded.
    """
    require_features(JUDGE)
    if not (model / "recipe.json").is_file():
        raise UsageError(
            f"--model {model}: there is no recipe.json; name what `sdopt train-reference` exported"
        )
    recipe = read_recipe(model)
    if not (work / "data" / "records.json").is_file():
        note("fetching and rendering the data set")
        held_out = recipe["data"]["held_out_concepts"]
        build(work / "packages", held_out_concepts=held_out, seed=recipe["seed"]).save(
            work / "data"
        )
    dataset = Dataset.load(work / "data")
    pipeline = DiffusionPipeline.from_pretrained(
        model, dtype=torch.float32, local_files_only=True
    )
    prompts = json.loads(model.with_name("prompts.json").read_text(encoding="utf-8"))
    of_pipeline = Evaluation(
        pipeline, dataset, prompts, feature_extractor(JUDGE), recipe["seed"], note
    )
    figures = {model: of_pipeline.generator()}
    if isinstance(pipeline, FluxPipeline):
        return figures  # the companions are those of the other pipeline
    companions: dict[str, Callable[[Path], list[CardFigure]]] = {
        "clip": lambda folder: evaluate_clip(folder, dataset),
        "tiny_autoencoder": of_pipeline.tiny_autoencoder,
        "loras": lambda folder: of_pipeline.loras(folder, work / "packages"),
        "loras/few_steps": of_pipeline.few_steps,
    }
    for name, evaluate in companions.items():
        for folder in (model.parent / name, model.parent / "companions" / name):
            if (folder / "recipe.json").is_file():
                note(name.replace("_", " "))
                figures[folder] = evaluate(folder)
                break
    return figures


@dataclass(frozen=True)
class Evaluation:
    """Evaluates a pipeline, and the companions that are tried in it; each method returns all figures of one model.

    Attributes:
        pipeline: in single precision; LoRAs are loaded and unloaded with diffusers' public functions.
        prompts: `training`, `held_out` and `gate`, as in `prompts.json`.
        seed: picture i of each list of captions starts from the noise of seed + i.
        note: called before each step.
    """

    pipeline: DiffusionPipeline
    dataset: Dataset
    prompts: dict[str, list[str]]
    extractor: FeatureExtractor
    seed: int = 0
    note: Note = lambda _: None

    def _generated(self, captions: Sequence[str], **options: Any) -> np.ndarray:
        return generate(self.pipeline, captions, seed=self.seed, **options)

    def _features(self, pictures: np.ndarray) -> Tensor:
        features: Tensor = self.extractor(channels_first(pictures))
        return features

    def generator(self) -> list[CardFigure]:
        """Evaluates the autoencoder and the denoiser."""
        self.note("autoencoder")
        vae, held_out, names = (
            self.pipeline.vae,
            self.dataset.indices(held_out=True),
            list(BACKGROUNDS),
        )
        coloured = self.dataset.on_named(
            held_out, [names[place % len(names)] for place in range(len(held_out))]
        )
        psnr = "autoencoder: PSNR of held-out pictures"
        figures = [
            CardFigure(
                psnr,
                (reconstruction_psnr(vae, self.dataset.images[held_out]),),
                "dB",
                24,
            ),
            CardFigure(
                f"{psnr} on coloured backgrounds",
                (reconstruction_psnr(vae, coloured),),
                "dB",
            ),
        ]

        def found(
            what: str, ranked: np.ndarray, concepts: int, target: float | None = None
        ) -> None:
            for nearest in NEAREST:
                name = (
                    f"{what}: own concept among the {nearest} nearest of {concepts:,}"
                )
                aim = target if nearest == max(NEAREST) else None
                figures.append(CardFigure(name, (_share(ranked < nearest),), "%", aim))

        self.note("features of the drawings on white")
        white, labels = (
            self._features(self.dataset.images),
            [record.label for record in self.dataset.records],
        )
        for purpose, what, target in (
            ("training", "captions seen in training", 60),
            ("held_out", "names never seen", None),
        ):
            self.note(f"generating {what}")
            made = self._features(self._generated(self.prompts[purpose]))
            found(
                what,
                concept_ranks(made, self.prompts[purpose], white, labels),
                len(set(labels)),
                target,
            )
        self.note("generating known names on unseen backgrounds")
        records = records_of(self.dataset, self.prompts["gate"])
        gate = self._features(self._generated(self.prompts["gate"]))
        found(
            "known names on unseen backgrounds",
            self._on_backgrounds(gate, records),
            CANDIDATES,
        )
        self.note("distances")
        concepts = {record.concept for record in records}
        others = {
            r.concept: r
            for r in self.dataset.records
            if r.style == "flat" and r.concept not in concepts
        }
        real = ReferenceSet.of_images(
            "real", real_pictures(self.dataset, records), self.extractor
        )
        other = self._features(
            real_pictures(self.dataset, list(others.values())[: len(records)])
        )
        kernel_distance = kid(real)
        pictures = {"": gate, " of other real pictures": other}
        for what, features in pictures.items():
            title = f"Fréchet distance to real pictures{what}, {len(features)} images"
            figures.append(CardFigure(title, (fid(features, real),)))
        for what, features in pictures.items():
            title = f"kernel distance to real pictures{what}, {len(features)} images"
            figures.append(CardFigure(title, (kernel_distance(features),)))
        return figures

    def _on_backgrounds(
        self, features: Tensor, records: Sequence[PictureRecord]
    ) -> np.ndarray:
        """Returns the rank of each picture's concept among flat drawings on the background of its caption, (n,)."""
        everything = self.dataset.records
        flat = np.array(
            [i for i, record in enumerate(everything) if record.style == "flat"]
        )
        others = np.random.default_rng(0).permutation(flat)[:CANDIDATES]
        found = np.zeros(len(records))
        for name in BACKGROUNDS:
            of_colour = [
                i
                for i, record in enumerate(records)
                if record.unseen_background == name
            ]
            if of_colour:
                self.note(f"features of the drawings on {name}")
                concepts = {records[i].concept for i in of_colour}
                shown = np.union1d(
                    others, [i for i in flat if everything[i].concept in concepts]
                )
                drawings = self._features(
                    self.dataset.on_named(shown, [name] * len(shown))
                )
                own, labels = (
                    [records[i].label for i in of_colour],
                    [everything[i].label for i in shown],
                )
                found[of_colour] = concept_ranks(
                    features[of_colour], own, drawings, labels
                )
        return found

    def tiny_autoencoder(self, folder: Path) -> list[CardFigure]:
        """Compares the `AutoencoderTiny` in `folder` with the pipeline's autoencoder."""
        teacher = self.pipeline.vae
        network = AutoencoderTiny.from_pretrained(folder, dtype=torch.float32)
        latents = call(
            self.pipeline,
            self.prompts["training"][:DECODED],
            seed=self.seed,
            output_type="latent",
        )
        held_out = encode_all(
            teacher, self.dataset.images[self.dataset.indices(held_out=True)]
        )[0]
        scaled = {
            "generated": latents,
            "held-out pictures'": teacher.config.scaling_factor * held_out,
        }
        return [
            CardFigure(
                f"times faster to decode {len(latents)} pictures",
                (speed_up(network, teacher, latents),),
                "×",
                3,
            ),
            *(
                CardFigure(
                    f"PSNR against the full decoder, {what} latents",
                    (decoder_psnr(network, teacher, given),),
                    "dB",
                )
                for what, given in scaled.items()
            ),
        ]

    def loras(self, folder: Path, packages: Path) -> list[CardFigure]:
        """Compares pictures without and with each LoRA to the style's drawings and to flat ones of the same concepts.

        All figures use mean latents of the pipeline's autoencoder; pictures start from the same noise, with and without
        the LoRA, by the seed of the LoRAs' recipe.
        """
        recipe, base, pipeline = read_recipe(folder), self.dataset, self.pipeline
        seed = recipe["seed"]
        flat = base.flat_drawings

        def latents(pictures: np.ndarray) -> Tensor:
            return encode_all(pipeline.vae, pictures)[0].flatten(1)

        figures: list[CardFigure] = []
        for style in STYLES:
            hidden = recipe[style.name]["held_out_concepts"]
            dataset = draw_style(
                style, base, packages, held_out_concepts=hidden, seed=seed
            )
            random = np.random.default_rng([seed, 5])
            for split, held_out in (
                ("concepts trained on", False),
                ("held-out concepts", True),
            ):
                places = random.permutation(dataset.indices(held_out=held_out))[
                    :COMPARED
                ]
                captions = [dataset.records[i].label for i in places]
                own = latents(dataset.images[places])
                other = latents(
                    base.images[[flat[dataset.records[i].concept] for i in places]]
                )
                before = latents(generate(pipeline, captions, seed=seed))
                pipeline.load_lora_weights(
                    folder, weight_name=f"{style.name}.safetensors"
                )
                after = latents(generate(pipeline, captions, seed=seed))
                pipeline.unload_lora_weights()
                near = [(made - own).norm(dim=1) for made in (before, after)]
                far = [(made - other).norm(dim=1) for made in (before, after)]
                nearer = [
                    _share((n < f).numpy()) for n, f in zip(near, far, strict=True)
                ]
                what = f"{style.name}, {len(places)} {split}"
                figures += [
                    CardFigure(
                        f"{what}: distance to the style's drawing",
                        tuple(float(n.mean()) for n in near),
                    ),
                    CardFigure(
                        f"{what}: nearer to it than to the flat drawing",
                        tuple(nearer),
                        "%",
                    ),
                ]
        return figures

    def few_steps(self, folder: Path) -> list[CardFigure]:
        """Compares the LoRA for few steps in `folder` with the pipeline in few and in all steps."""
        pipeline, captions = self.pipeline, self.prompts["gate"][:JUDGED]
        records = records_of(self.dataset, captions)
        real, names = (
            self._features(real_pictures(self.dataset, records)),
            [record.label for record in records],
        )
        figures: list[CardFigure] = []

        def judge(what: str, pictures: np.ndarray) -> None:
            found = _share(
                concept_ranks(self._features(pictures), names, real, names)
                < NEAREST[-1]
            )
            near = f"{what}: own concept among the {NEAREST[-1]} nearest of {len(set(names))}"
            figures.append(CardFigure(near, (found,), "%"))
            if pictures is not whole:
                psnr = float(
                    peak_signal_to_noise(pixels(pictures), pixels(whole)).mean()
                )
                figures.append(
                    CardFigure(f"{what}: PSNR against {STEPS} steps", (psnr,), "dB")
                )

        whole = self._generated(captions)
        judge(f"{STEPS} steps", whole)
        for steps in FEW_STEPS:
            judge(
                f"{steps} steps", self._generated(captions, num_inference_steps=steps)
            )
        own = pipeline.scheduler
        pipeline.load_lora_weights(folder)
        pipeline.scheduler = LCMScheduler.from_config(own.config)
        for steps in FEW_STEPS:
            drawn = self._generated(
                captions, num_inference_steps=steps, guidance_scale=1
            )
            judge(f"{steps} steps with it", drawn)
        pipeline.unload_lora_weights()
        pipeline.scheduler = own
        return figures


def _share(found: np.ndarray) -> float:
    """Returns the percentage of true elements."""
    return 100 * float(np.mean(found))


def ranks(scores: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns the number of columns with a higher score than each row's own column; ties count half. float64 (n,).

    Each row's own column is given by `own`, (n,); a higher score is better.
    """
    found: np.ndarray = rankdata(-scores, axis=1)[np.arange(len(scores)), own] - 1
    return found


def concept_ranks(
    features: Tensor,
    labels: Sequence[str],
    drawings: Tensor,
    of_drawings: Sequence[str],
) -> np.ndarray:
    """Returns, for each generated picture, the number of concepts that are nearer than its own (n,); ties count half.

    The distance to a concept is the Euclidean distance of the features to those of its nearest drawing.

    Args:
        features: of the generated pictures, (n, d).
        labels: the concept's name of each picture.
        drawings: features of real drawings, (m, d).
        of_drawings: the concept's name of each drawing.
    """
    place = {name: position for position, name in enumerate(dict.fromkeys(of_drawings))}
    of_drawing = torch.tensor([place[label] for label in of_drawings])
    nearest = torch.full((len(features), len(place)), torch.inf).scatter_reduce(
        1, of_drawing.expand(len(features), -1), torch.cdist(features, drawings), "amin"
    )
    return ranks(-nearest.numpy(), np.array([place[label] for label in labels]))


@torch.inference_mode()
def decoder_psnr(
    network: AutoencoderTiny, teacher: AutoencoderKL, latents: Tensor
) -> float:
    """Returns the mean PSNR in dB of the decoder's pictures against the teacher's, for scaled latents (n, 8, 8, 8)."""
    target = teacher.decode(latents / teacher.config.scaling_factor).sample.clamp(-1, 1)
    return float(peak_signal_to_noise(network.decode(latents).sample, target).mean())


@torch.inference_mode()
def speed_up(
    network: AutoencoderTiny, teacher: AutoencoderKL, latents: Tensor
) -> float:
    """Returns how many times faster the decoder is than its teacher."""
    threads = torch.get_num_threads()
    slow, fast = (
        Timer(
            "decode(latents)",
            globals={"decode": each.decode, "latents": latents},
            num_threads=threads,
        )
        .blocked_autorange(min_run_time=2)
        .median
        for each in (teacher, network)
    )
    return slow / fast


def evaluate_clip(folder: Path, dataset: Dataset) -> list[CardFigure]:
    """Returns all figures of the CLIP in `folder`: the retrieval of captions, and how degradations move its metrics."""
    recipe = read_recipe(folder)
    extractor, seed = ClipFeatures("emojiclip", str(folder)), recipe["seed"]
    held_out = hold_out_pictures(dataset, recipe["clip"]["held_out_share"], seed)
    others = np.setdiff1d(np.arange(len(dataset)), held_out)
    seen = np.random.default_rng([seed, 8]).permutation(others)[: len(held_out)]
    labels = dict.fromkeys(record.label for record in dataset.records)
    place = {name: position for position, name in enumerate(labels)}
    names = functional.normalize(extractor.embed_texts(list(place)), dim=1)

    def caption_ranks(indices: np.ndarray) -> np.ndarray:
        """Ranks all concepts' distinct plain names for each picture on white."""
        pictures = functional.normalize(
            extractor(channels_first(dataset.images[indices])), dim=1
        )
        return ranks(
            (pictures @ names.T).numpy(),
            np.array([place[dataset.records[i].label] for i in indices]),
        )

    found, of_training = caption_ranks(held_out), caption_ranks(seen)
    series = list(_degradation_series(extractor, dataset, held_out, others, seed))
    fine = [worsens(figure) for figure in series]
    right, pictures = "right caption", f"{len(held_out)} held-out pictures"
    return [
        CardFigure(
            f"{right} of {len(place):,} first, {pictures}",
            (_share(found < 1),),
            "%",
            30,
        ),
        CardFigure(
            f"{right} among the first ten, held-out pictures",
            (_share(found < 10),),
            "%",
            70,
        ),
        CardFigure(
            f"{right} first, training pictures", (_share(of_training < 1),), "%"
        ),
        CardFigure(
            f"degradations, of {len(fine)}, that move a metric monotonically",
            (_share(np.array(fine)),),
            "%",
            100,
        ),
        *series,
    ]


def _degradation_series(
    extractor: ClipFeatures,
    dataset: Dataset,
    held_out: np.ndarray,
    others: np.ndarray,
    seed: int,
) -> Iterator[CardFigure]:
    """Yields each metric for the held-out drawings, degraded in four ways to an increasing extent, or mislabelled.

    Distances are to drawings of the CLIP's training.
    """
    random = np.random.default_rng([seed, 7])
    chosen = random.permutation(others)[:REFERENCE_PICTURES]
    reference = ReferenceSet.of_images(
        "training drawings", dataset.images[chosen], extractor
    )
    pictures = dataset.images[held_out]
    texts = extractor.embed_texts([dataset.records[index].label for index in held_out])
    metrics: dict[str, Callable[[Tensor], float]] = {
        "CLIP score": lambda features: clip_score(features, texts),
        "FID": lambda features: fid(features, reference),
        "KID": kid(reference),
        "CMMD": cmmd(reference),
    }
    intact = extractor(channels_first(pictures))
    for way in DEGRADATIONS:
        series = [intact]
        for amount in way.tried:
            # All amounts use the same noise.
            source = np.random.default_rng([seed, 8])
            spoilt = np.stack(
                [way.spoil(picture, amount, source) for picture in pictures]
            )
            series.append(extractor(channels_first(spoilt)))
        extents = ", ".join(
            ["none", *(way.unit.format(amount) for amount in way.tried)]
        )
        for name, metric in metrics.items():
            yield CardFigure(
                f"{name}, {way.name} ({extents})",
                tuple(float(metric(features)) for features in series),
            )
    order, given, scores = random.permutation(len(texts)), np.arange(len(texts)), []
    for wrong in WRONG:
        # Each of the first pictures in `order` takes the caption of its predecessor, so none keeps its own.
        given[order] = np.where(
            np.arange(len(order)) < wrong * len(order), np.roll(order, 1), order
        )
        scores.append(clip_score(intact, texts[given]))
    yield CardFigure(
        f"CLIP score, wrong captions ({', '.join(f'{wrong:.0%}' for wrong in WRONG)})",
        tuple(scores),
    )


def clip_score(features: Tensor, texts: Tensor) -> float:
    """Returns the mean of 100 · max(cosine, 0) over pairs of embeddings, both (n, d).

    Source: Hessel et al. 2021, scaled by 100.
    """
    return float(
        100 * functional.cosine_similarity(features, texts).clamp(min=0).mean()
    )


def worsens(figure: CardFigure) -> bool:
    """Returns whether each value of a metric is worse than the one before: a lower CLIP score, a larger distance."""
    sign = -1 if figure.figure.startswith("CLIP score") else 1
    return all(sign * (after - before) > 0 for before, after in pairwise(figure.values))
