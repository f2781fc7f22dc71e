"""Finds which image of one folder belongs to which of another, and checks that the two show the same.

Images belong together by their file names, or by the prompts and seeds that they were made from.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sdopt.apps.exchange.metadata import Origin
from sdopt.apps.exchange.pictures import ImportedPicture, repeated
from sdopt.apps.exchange.settings import (
    are_one_form,
    differing,
    others_apart,
    plain_key,
)
from sdopt.apps.exchange.wiring import LINKS
from sdopt.errors import UsageError
from sdopt.quality.images import read_image

Folders = tuple[Path, Path]


def partners(
    first: Sequence[ImportedPicture],
    second: Sequence[ImportedPicture],
    folders: Folders,
) -> list[ImportedPicture]:
    """Returns the second folder's images in the order of the first one's: by file name, else by prompt and seed.

    Where images of one name are of other prompts and seeds, and each has a partner, by these.

    Raises:
        UsageError: an image has no partner, or one of the same name that was made from another prompt or seed.
    """
    named = _by_name(first, second)
    if named is not None and not _numbered_otherwise(first, named):
        for picture, partner in zip(first, named, strict=True):
            _require_one_origin(picture, partner)
        return named
    origins = [picture.made_from for picture in (*first, *second)]
    if None in origins:
        raise UsageError(_lacks_a_name(first, second, folders))
    mine = _by_origin(first)
    others = _by_origin(second)
    alone = []
    for origin in {*mine, *others}:
        if len(mine[origin]) != len(others[origin]):
            alone.append(origin)
    if alone:
        origin = min(alone, key=str)
        prompt, _, seed = origin or (None, "", None)
        counts = f"{len(mine[origin])} and {len(others[origin])}"
        raise UsageError(
            f"{folders[0]} and {folders[1]}: of {len(alone)} prompts and seeds they have not as many images, as of the "
            f"seed {seed} and the prompt '{prompt}' ({counts}); compare the same prompts and seeds"
        )
    partner_of: dict[Path, ImportedPicture] = {}
    for origin, pictures in mine.items():
        # Images of one call have one seed in some programs, which number them in order.
        pictures.sort(key=_number)
        others[origin].sort(key=_number)
        for picture, partner in zip(pictures, others[origin], strict=True):
            partner_of[picture.file] = partner
    return [partner_of[picture.file] for picture in first]


def _numbered_otherwise(
    first: Sequence[ImportedPicture], named: Sequence[ImportedPicture]
) -> bool:
    """Returns whether images of one name are of other prompts and seeds, and those of both folders are the same.

    Programs that number their images name them by the order of the queue.
    """
    mine = [picture.made_from for picture in first]
    others = [picture.made_from for picture in named]
    return mine != others and None not in mine and Counter(mine) == Counter(others)


def _number(picture: ImportedPicture) -> list[str | int]:
    """Returns the name of a file in which numbers count as such: 9 comes before 10, and 0009 is 9."""
    parts: list[str | int] = [*re.split(r"(\d+)", picture.file.stem)]
    parts[1::2] = map(int, parts[1::2])
    return parts


def copies_in(folders: Sequence[Sequence[ImportedPicture]]) -> dict[int, int]:
    """Returns which images show in every folder what an earlier one shows, each with that one's position.

    The folders' images are in one order. What a safety checker blocked is plain everywhere, and yet of its own prompt.
    """
    seen: dict[tuple[str, ...], int] = {}
    copies: dict[int, int] = {}
    written_again = _written_again(folders)
    for position, partners_there in enumerate(zip(*folders, strict=True)):
        looks = [picture.looks for picture in partners_there]
        if all(look.plain for look in looks):
            continue
        pixels = tuple(look.pixels for look in looks)
        earlier = seen.setdefault(pixels, position)
        if position in written_again:
            earlier = min(earlier, written_again[position])
        if earlier != position:
            copies[position] = copies.get(earlier, earlier)
    return copies


_OF_FORMAT = 1.5
"""Levels of 255 by which a reduced image may differ from itself in a format that loses details."""


def _written_again(folders: Sequence[Sequence[ImportedPicture]]) -> dict[int, int]:
    """Returns of images that lost details the earliest one that they look like in every folder."""
    lost: list[bool] = []
    for partners in zip(*folders, strict=True):
        lost.append(any(picture.written.lossy for picture in partners))
    if not any(lost):
        return {}
    lossy = np.array(lost)
    reduced = list(map(_reduced, folders))
    brightness = reduced[0].mean(axis=1)
    earliest: dict[int, int] = {}
    for position in range(1, len(lossy)):
        # Images of another brightness are further apart; to compare all of thousands would take minutes.
        apart = np.abs(brightness[:position] - brightness[position])
        either_lost = lossy[:position] | lossy[position]
        like = np.flatnonzero((apart <= _OF_FORMAT) & either_lost)
        for side in reduced:
            apart = _distances(side[position], side[like])
            like = like[apart <= _OF_FORMAT]
        if len(like):
            earliest[position] = int(like[0])
    return earliest


_Origin = tuple[str | None, str, int] | None


def _by_origin(
    pictures: Sequence[ImportedPicture],
) -> defaultdict[_Origin, list[ImportedPicture]]:
    by_origin = defaultdict(list)
    for picture in pictures:
        by_origin[picture.made_from].append(picture)
    return by_origin


def _require_one_origin(picture: ImportedPicture, partner: ImportedPicture) -> None:
    """Raises UsageError if two images of one name are of other seeds or prompts, as far as both tell them."""
    compared: dict[str, tuple[object, object]] = {
        "seed": (picture.seed, partner.seed),
        "prompt": (picture.prompt, partner.prompt),
    }
    if None not in compared["prompt"]:
        compared["negative prompt"] = (picture.negative, partner.negative)
    for what, (mine, other) in compared.items():
        if None not in (mine, other) and mine != other:
            raise UsageError(
                f"{partner.file}: was made from another {what} than {picture.file} ({other} against {mine}); compare "
                "images of the same prompts and seeds"
            )


def _lacks_a_name(
    first: Sequence[ImportedPicture],
    second: Sequence[ImportedPicture],
    folders: Folders,
) -> str:
    names = {picture.file.stem for picture in first}
    other_names = {picture.file.stem for picture in second}
    alone = sorted(names ^ other_names)
    has, lacks = folders if alone[0] in names else folders[::-1]
    return (
        f"{lacks}: has no image named {alone[0]}, as {has} has ({len(alone)} names are in one folder only). Give "
        "the files of a pair the same name, or list file, prompt and seed in a prompts.csv in both folders"
    )


def of_other_noise(
    first: Sequence[ImportedPicture],
    second: Sequence[ImportedPicture],
    folders: Folders,
) -> list[ImportedPicture]:
    """Returns the second folder's images in the order of the first one's, where both are of the same prompts.

    Raises:
        UsageError: an image has no partner, or is the same in both folders.
    """
    pictures = _by_name(first, second)
    if pictures is None:
        by_prompt = {picture.prompt: picture for picture in second}
        prompts = [picture.prompt for picture in first]
        several = repeated(prompts) or len(by_prompt) < len(second)
        if None in prompts or several or {*prompts} != by_prompt.keys():
            raise UsageError(
                f"{folders[0]} and {folders[1]}: which images are of the same prompt? Give them the same file name, or "
                "list file, prompt and seed in a prompts.csv in both folders"
            )
        pictures = [by_prompt[prompt] for prompt in prompts]
    for picture, partner in zip(first, pictures, strict=True):
        both = f"{picture.file} and {partner.file}"
        prompts = [picture.prompt, partner.prompt]
        if None not in prompts and picture.prompt != partner.prompt:
            raise UsageError(f"{both}: are of different prompts")
        if np.array_equal(read_image(picture.file), read_image(partner.file)):
            raise UsageError(
                f"{both}: are the same image; a calibration needs the same prompts from "
                "other seeds"
            )
    return pictures


def _by_name(
    first: Sequence[ImportedPicture],
    second: Sequence[ImportedPicture],
) -> list[ImportedPicture] | None:
    """Returns the second images in the order of the first ones, by file name; None if the names are not the same."""
    by_stem = {picture.file.stem: picture for picture in second}
    names = [picture.file.stem for picture in first]
    if {*names} != by_stem.keys():
        return None
    return [by_stem[name] for name in names]


def other_settings(
    first: Sequence[ImportedPicture],
    second: Sequence[ImportedPicture],
    meant: Sequence[str] = (),
) -> list[str]:
    """Returns in words which settings partners were not made with alike; see `settings.differing`."""
    pairs = []
    others = []
    for picture, partner in zip(first, second, strict=True):
        one = picture.origin
        other = partner.origin
        pairs.append((_said_by(one), _said_by(other)))
        mine, theirs = _own_words(one, other)
        links, their_links = _links(one, other)
        others.append(({**mine, **links}, {**theirs, **their_links}))
    return [*differing(pairs, meant), *others_apart(others, meant)]


def untold(
    first: Sequence[ImportedPicture],
    second: Sequence[ImportedPicture],
) -> str:
    """Returns in words which images do not say how they were made, as their partners do; "" if none."""
    silent = baseline_silent = 0
    for picture, partner in zip(first, second, strict=True):
        says = bool(picture.origin.settings)
        other_says = bool(partner.origin.settings)
        silent += says and not other_says
        baseline_silent += other_says and not says
    words = []
    if silent:
        words.append(
            f"{silent} of {len(first)} do not say how they were made, as the baseline's do"
        )
    if baseline_silent:
        words.append(
            f"{baseline_silent} of {len(first)} of the baseline do not say how they were made, as these do"
        )
    return ", ".join(words)


_TELL_PASSES = (
    "A1111",
    "Forge",
    "ComfyUI",
    "SwarmUI",
    "InvokeAI",
    "Fooocus",
    "Draw Things",
    "mflux",
    "stable-diffusion.cpp",
)
"""Programs that name each LoRA and further pass, so that images of which they name none have none."""


def _said_by(origin: Origin) -> tuple[str, Mapping[str, str]]:
    """Returns a program and its settings; where it would name a LoRA or a pass and names none, that there is none."""
    settings = dict(origin.settings)
    words = " ".join((*settings, *origin.others, *origin.others.values())).lower()
    if origin.program in _TELL_PASSES:
        for name, hint in _PASSES.items():
            if not re.search(hint, words):
                settings[name] = "none"
    return origin.program, settings


_PASSES = {
    "LoRA": "lora",
    "refiner": "refiner|(first|last) step",
    "last step": "refiner|(first|last) step",
    "hires upscale": "upscale|hires|hrf",
    "ADetailer": "detail",
}
"""What is named where it is in use alone, and words by which it may be, under other names."""


_NO_PROGRAM = ("", "table", "JSON")
"""Where nobody says which program made an image."""


def program_of(pictures: Sequence[ImportedPicture]) -> str:
    """Returns the program that made all images that say one; "" if none does, or several did."""
    programs = {picture.origin.program for picture in pictures}
    programs -= {*_NO_PROGRAM}
    return programs.pop() if len(programs) == 1 else ""


def version_of(pictures: Sequence[ImportedPicture]) -> str:
    """Returns the version of the program that made all images; "" if none is told, or several are."""
    versions = {picture.origin.version for picture in pictures}
    if len(versions) != 1 or not program_of(pictures):
        return ""
    return versions.pop()


def batch_of(pictures: Sequence[ImportedPicture]) -> int:
    """Returns how many images the calls made that made these, at most."""
    return max(picture.origin.batch for picture in pictures)


def _own_words(
    one: Origin,
    other: Origin,
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Returns what images of one program say in its own words; of two versions or forks, what both could say."""
    if not are_one_form(one.program, other.program):
        return {}, {}
    if (one.program, one.version) == (other.program, other.version):
        return one.others, other.others
    names = {*one.others} & {*other.others}
    for name in (*one.others, *other.others):
        if _WHERE_ON.match(plain_key(name)):
            names.add(name)
    return _chosen(one.others, names), _chosen(other.others, names)


def _links(one: Origin, other: Origin) -> tuple[dict[str, str], dict[str, str]]:
    """Returns how two graphs of the same nodes are joined, where they are joined otherwise."""
    if one.wiring is None or other.wiring is None:
        return {}, {}
    mine = one.wiring.beside(other.wiring)
    theirs = other.wiring.beside(one.wiring)
    if not mine and not theirs:
        return {}, {}
    return {LINKS: mine}, {LINKS: theirs}


def _chosen(values: Mapping[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name in names}


_WHERE_ON = re.compile(
    "tiling|facerestoration|hires|mask|inpaint|softinpaint|seedresize|hypernet|extranoise|sdupscale|ultimatesdupscale|"
    "freeu|sag(enabled|scale)|pag|perturbed|selfattention|skiplayer|slg|cfgzero|dynthres|dynamicthresh|mimic|kohya|"
    "latentmodifier|stylealign|rpactive|rpdivide|cutoff|llul|tileddiffusion|multidiffusion|animatediff|controlnet|"
    "ipadapter|t2iadapter|seamless|initimage|hrf|upscale|creativity|structure$|denoisingstart|dype|zimageseedvariance|"
    "sigmaschedule|schedulerho|schedulemin|schedulemax|sharpness|styleselector"
)
"""What programs say where it is on alone, by the begin of its names: of two versions or forks, one may have it."""


_ALIKE = 0.9
"""Partners must differ by less than this share of what images that do not belong together differ by."""

_NEARER = 0.5
"""An image belongs to another partner if it differs from that one by less than this share."""


def _reduced(pictures: Sequence[ImportedPicture]) -> np.ndarray:
    return np.stack([picture.looks.reduced for picture in pictures])


def require_alike(
    first: Sequence[ImportedPicture],
    second: Sequence[ImportedPicture],
) -> None:
    """Checks that partners show the same, as images from the same noise do.

    Raises:
        UsageError: images belong to other partners; or they differ as much as images that do not belong together, and
            neither side shows one image alone.
    """
    if len(first) < 2:
        return
    mine = _reduced(first)
    other = _reduced(second)
    _require_own_partners(first, second, [_distances(one, other) for one in mine])
    if len(first) < 3:
        return
    apart = _middle(mine, np.roll(other, 1, axis=0))
    for side in (mine, other):
        if _middle(side, np.roll(side, 1, axis=0)) <= apart / 4:
            return
    if _middle(mine, other) >= _ALIKE * apart:
        names = other_settings(first, second)
        settings = f" ({', '.join(names)})" if names else ""
        raise UsageError(
            f"{first[0].file.parent} and {second[0].file.parent}: no image looks like its partner, as if they were "
            f"made from other noise{settings}. Compare images of the same prompts and seeds, made in the same size by "
            "the same sampler"
        )


def _distances(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns how far one reduced image is from each of others: (n,)."""
    far: np.ndarray = np.sqrt(np.mean((others - one) ** 2, axis=1))
    return far


def _middle(these: np.ndarray, those: np.ndarray) -> float:
    return float(np.median(_distances(these, those)))


def _require_own_partners(
    first: Sequence[ImportedPicture],
    second: Sequence[ImportedPicture],
    distances: Sequence[np.ndarray],
) -> None:
    """Raises UsageError if images clearly look like the partner of another one: by n times (n,) distances.

    Both must look most like each other, so that broken images, which look like nothing, belong nowhere.
    """
    nearest_of_second = np.argmin(distances, axis=0)
    elsewhere = []
    for number, far in enumerate(distances):
        nearest = int(far.argmin())
        if nearest == number or nearest_of_second[nearest] != number:
            continue
        if far[nearest] < _NEARER * far[number]:
            elsewhere.append((number, nearest))
    if not elsewhere:
        return
    steps = {there - here for here, there in elsewhere}
    how = ""
    if len(elsewhere) > 1 and len(steps) == 1:
        how = f", as if they were shifted by {abs(steps.pop())}"
    number, nearest = elsewhere[0]
    looks_like = first[number].file
    partner = first[nearest].file
    many = f"so do {len(elsewhere)} of {len(first)} images{how}"
    raise UsageError(
        f"{second[nearest].file}: looks like {looks_like}, and its partner is {partner} ({many}). Give the files of a "
        "pair the same name, or list file, prompt and seed in a prompts.csv in both folders"
    )
