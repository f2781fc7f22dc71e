"""Models that have the tensors of another one, and are sampled otherwise or do other work: what tells them apart."""

import re
from collections.abc import Sequence
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.pipelines.sampling import TURBO
from sdopt.pipelines.stored import TITLE, header_of


def says(file: Path, name: str) -> bool:
    """Returns whether a file's name or title says that it is of a model, where others have the same tensors."""
    return any(calls(title, name) for title in titles_of(file))


def calls(title: str, name: str) -> bool:
    """Returns whether what an author calls a model says that it is the one of this name."""
    return _TWINS.get(name, _NOTHING).search(title) is not None


def titles_of(file: Path) -> list[str]:
    """Returns what the author calls a file: its name, and the title in it."""
    title = header_of(file).metadata.get(TITLE, "")
    return [file.stem, title] if title else [file.stem]


def assumed(titles: Sequence[str], name: str) -> str | None:
    """Returns a line if what an author calls a model leaves open which of two it is; None if it says that.

    Both have the same tensors, and are sampled in other steps and with other guidance.

    Args:
        titles: the name of its file or folder first.
        name: the one that it is taken for.
    """
    other = _UNSAID.get(name)
    if other is None or any(map(_SAID[name].search, titles)):
        return None
    return (
        f"nothing in {titles[0]} says whether it is that or {other}, whose tensors are the same, and whose steps and "
        "guidance are not"
    )


def settings_of_author(titles: Sequence[str], name: str) -> dict[str, float]:
    """Returns how a model is sampled that was trained on from a published one and has its tensors.

    Args:
        titles: what its author calls it.
        name: the published one.
    """
    for pattern, settings in _TRAINED_ON.get(name, ()):
        if any(map(pattern.search, titles)):
            return settings
    return {}


_TRAINED_ON: dict[str, tuple[tuple[re.Pattern[str], dict[str, float]], ...]] = {
    "flux_dev": (
        # Its card samples FLUX.1 Krea [dev] at 4.5.
        (re.compile("krea", re.IGNORECASE), {"guidance_scale": 4.5}),
    ),
}
"""Models that were trained on from a published one: how they are named, and what they are sampled with."""

_NOTHING = re.compile(r"(?!)")


def _word(word: str) -> str:
    """Returns an expression of a word by itself, or of one with a capital letter within a name, as in `myQwenEdit`."""
    return rf"(?:(?<![A-Za-z])(?i:{word})|(?<=[a-z\d]){word.capitalize()})(?![a-z])"


_TWINS = {
    "sd35_large_turbo": re.compile(TURBO, re.IGNORECASE),
    "z_image_turbo": re.compile(rf"{TURBO}|(?<![a-z])zit(?![a-z])", re.IGNORECASE),
    "z_image": re.compile(_word("base")),
}
"""How files of models are named that have the tensors of another one."""

_UNSAID = {
    "sd35_large": "model=sd35_large_turbo",
    "flux2_klein_4b": "black-forest-labs/FLUX.2-klein-base-4B",
    "flux2_klein_9b": "black-forest-labs/FLUX.2-klein-base-9B",
}
"""Models that a file is taken for, and those that it may be, as `model` or `model.base` takes them."""

_SAID = {
    "sd35_large": re.compile(r"large|sd[-_ ]?3|turbo", re.IGNORECASE),
    "flux2_klein_4b": re.compile("klein", re.IGNORECASE),
    "flux2_klein_9b": re.compile("klein", re.IGNORECASE),
}
"""How files of the former are named."""


def require_known_work(file: Path, kind: str, name: str) -> None:
    """Raises UsageError for a file of a model that is used otherwise than the published one with its tensors."""
    if line := other_work(file, kind, name):
        raise UsageError(f"model.path={file}: {line}")


def other_work(file: Path, kind: str, name: str) -> str | None:
    """Returns a line if a file's name or title says that its model is used otherwise than a published one; else None.

    Args:
        file: of a transformer with the tensors of the published one.
        kind: the class name of their pipeline.
        name: the published one.
    """
    titles = titles_of(file)
    for pattern, other in _RELATIVES.get(kind, ()):
        for title in titles:
            if said := pattern.search(title):
                size = "9B" if name.endswith("9b") else "4B"
                way = other.format(size=size)
                return f"its name says {said[0]}, and its tensors are those of model={name}: {way}"
    return None


def another_twin(file: Path, name: str) -> str | None:
    """Returns a line if a file's name or title says that it is the twin of a published model; None if it does not."""
    twin = _WITH_OTHER_STEPS.get(name)
    if twin is None or says(file, name) or not says(file, twin):
        return None
    return f"its name says that it is model={twin}, whose steps, guidance and scheduler are not those of model={name}"


def still_distilled(file: Path, kind: str) -> str | None:
    """Returns a line if a file is called what a distilled model is, and a pipeline guides it; None if it is not.

    Args:
        file: of a transformer, which does not say by its tensors whether it was distilled.
        kind: the class name of its pipeline, which says so.
    """
    if other_work(file, kind, ""):
        return None
    pattern = _DISTILLED_NAMES.get(kind, _NOTHING)
    for title in titles_of(file):
        if said := pattern.search(title):
            return (
                f"its name says {said[0]} and not base, and this pipeline is guided in two calls a step: of one that "
                "was distilled, give the pipeline of that"
            )
    return None


_DISTILLED_NAMES = {"Flux2KleinPipeline": re.compile("klein", re.IGNORECASE)}
"""How files are named of models into whose weights guidance was distilled, and not into those of the same tensors."""

_WITH_OTHER_STEPS = {"z_image": "z_image_turbo", "z_image_turbo": "z_image"}
"""Models that are sampled in other steps and at other levels of noise than one with the same tensors."""

_EDITS = (
    "it edits images by an instruction, which sdopt does not run; name the architecture beside model.path=… if it "
    "draws from text alone"
)

_DISTILLED = (
    "that one is distilled to 4 steps without guidance: name the file's own pipeline, as "
    "model.base=black-forest-labs/FLUX.2-klein-base-{size}"
)

_GUIDED_AGAIN = (
    "this one is guided by two calls a step: say its steps and its scale, as in model=flux_schnell model.path=… "
    "workload.steps=28 workload.guidance_scale=3.5"
)

_RELATIVES = {
    "Flux2KleinPipeline": ((re.compile(_word("base")), _DISTILLED),),
    "FluxPipeline": (
        (re.compile("kontext", re.IGNORECASE), _EDITS),
        (
            re.compile(
                r"de[-_ ]?distill|undistill|(?:libre|open)[-_ ]?flux", re.IGNORECASE
            ),
            _GUIDED_AGAIN,
        ),
    ),
    "QwenImagePipeline": ((re.compile(rf"{_word('edit')}|2509|2511"), _EDITS),),
}
"""Models with the tensors of a published one that do other work or are sampled otherwise: how files of them are named."""
