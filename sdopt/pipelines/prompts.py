"""A workload's prompts, negative prompts and initial noise, and what of them is not read as it may be meant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError, first_line, some_of
from sdopt.pipelines.catalog import (
    PACKAGED,
    once_per_state,
    part_class,
    parts_in,
    read_json,
)
from sdopt.pipelines.families import factor_of, latent_channels_of
from sdopt.pipelines.loading import (
    family_of,
    folder_of,
    guidance_of,
    is_original,
    part_config,
)
from sdopt.pipelines.prompt_files import (
    TABLES,
    NoColumn,
    Prompt,
    PromptFile,
    Unreadable,
    read_prompts,
)
from sdopt.pipelines.weights import load_tokenizer
from sdopt.schema import Model, Task, Workload

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from torch import Tensor

_GENERAL = Path(__file__).parent / "general_prompts.txt"


def resolve_prompts(workload: Workload, model: Model) -> tuple[str, ...]:
    """Returns a workload's `prompt_count` prompts from `prompt_start` on; without a file, prompts that suit the model.

    Raises:
        UsageError: the file cannot be read, or holds no prompt from there on; or `negative_prompt` has no effect.
    """
    return tuple(prompt.text for prompt in _chosen(workload, model))


def prompts_left(workload: Workload, model: Model) -> int | None:
    """Returns how many prompts a workload's source has from `prompt_start` on; None if it cannot be read here."""
    try:
        prompts = _source(workload, model).prompts
    except UsageError:
        return None
    return max(0, len(prompts) - workload.prompt_start)


def negative_prompts(workload: Workload, model: Model) -> tuple[str, ...]:
    """Returns the negative prompt of each prompt of `resolve_prompts`; () if no prompt has one, or without guidance.

    A prompt's own, from a column of the file, comes before `workload.negative_prompt`. Where only some have one, the
    others get an empty text, so that an image does not depend on the other prompts of its batch: SDXL takes zeros for a
    negative prompt that is not given, and encodes one that is empty.
    """
    chosen = _chosen(workload, model)
    texts = [prompt.negative or workload.negative_prompt for prompt in chosen]
    if not is_guided(workload, model) or all(negative is None for negative in texts):
        return ()
    return tuple(negative or "" for negative in texts)


def is_guided(workload: Workload, model: Model) -> bool:
    """Returns whether a call uses a negative prompt: models distilled with their guidance scale do not either."""
    guidance = guidance_of(model)
    return guidance.takes_negative and guidance.guides(workload.guidance(model))


def _chosen(workload: Workload, model: Model) -> Sequence[Prompt]:
    prompts = _source(workload, model).prompts
    if not prompts:
        raise UsageError(f"workload.prompts={workload.prompts}: holds no prompt")
    chosen = prompts[workload.prompt_start :][: workload.prompt_count]
    if not chosen:
        raise UsageError(
            f"workload.prompt_start={workload.prompt_start}: must be smaller than the number of prompts, {len(prompts)}"
        )
    for prompt in chosen:
        for text in (prompt.text, prompt.negative or ""):
            if wrong := wrong_prompt(text):
                raise UsageError(f"{_named(workload)}: {prompt.place} {wrong}")
    _require_effect(workload, model, chosen)
    return chosen


def _require_effect(workload: Workload, model: Model, chosen: Sequence[Prompt]) -> None:
    """Raises UsageError if the negative prompt or the guidance scale is given and changes nothing, or is no prompt."""
    guidance = guidance_of(model)
    if workload.guidance_scale is not None and guidance.form == "none":
        what = f"no effect on this {family_of(model).title}, into whose weights guidance was distilled"
        raise UsageError(
            f"workload.guidance_scale={workload.guidance_scale:g}: has {what}: leave it out"
        )
    if workload.negative_prompt is None:
        return
    wrong = wrong_prompt(workload.negative_prompt)
    if wrong is None and not is_guided(workload, model):
        if guidance.takes_negative:
            scale = f"the guidance scale is {workload.guidance(model):g}"
            way = (
                f"leave it out, or set workload.guidance_scale above {guidance.above:g}"
            )
            wrong = f"has no effect without guidance ({scale}): {way}"
        else:
            wrong = (
                f"has no effect: this {family_of(model).title} takes none; leave it out"
            )
    if wrong is None and all(prompt.negative for prompt in chosen):
        wrong = f"has no effect, since each prompt of {workload.prompts} has a negative prompt of its own"
    if wrong is not None:
        raise UsageError(f"workload.negative_prompt: {wrong}")


def _named(workload: Workload) -> str:
    source = workload.prompts
    return f"workload.prompts={source if isinstance(source, str) else '[…]'}"


def _source(workload: Workload, model: Model) -> PromptFile:
    """Returns all prompts of the workload's source."""
    source, column = workload.prompts, workload.prompt_column
    if column is not None and (
        not isinstance(source, str) or Path(source).suffix.lower() not in TABLES
    ):
        raise UsageError(
            f"workload.prompt_column={column}: workload.prompts={source} has no columns; "
            f"name a file that ends in {', '.join(TABLES)}"
        )
    if source == "packaged":
        packaged = read_json(PACKAGED / "prompts.json")["gate"]
        general = _GENERAL.read_text(encoding="utf-8").splitlines()
        texts = packaged if (PACKAGED / model.name).is_dir() else general
        return PromptFile(tuple(Prompt(text, "") for text in texts))
    if isinstance(source, str):
        return _from_file(source, column)
    if not isinstance(source, Sequence):
        raise UsageError(
            f"workload.prompts={source}: must be packaged, a list of prompts, or a file"
        )
    for number, prompt in enumerate(source, 1):
        if not isinstance(prompt, str):
            raise UsageError(
                f"workload.prompts=[…]: number {number} is no text ({prompt}); put it in quotes"
            )
    return PromptFile(
        tuple(
            Prompt(str(prompt), f"number {number}")
            for number, prompt in enumerate(source, 1)
        )
    )


def _from_file(source: str, column: str | None) -> PromptFile:
    path = Path(source).expanduser()
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise Unreadable(
                "not a file; it is read more than once, which a pipe cannot be"
            )
        return _read(path, column)
    except NoColumn as error:
        raise UsageError(
            f"workload.prompt_column={column}: not in {source}; {error}"
        ) from error
    except Unreadable as error:
        raise UsageError(f"workload.prompts={source}: {error}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"workload.prompts={source}: cannot be read as text ({reason}); give 'packaged', a list of prompts as in "
            "[a cat,a dog], or a file with one prompt per line or a column of them"
        ) from error


_read = once_per_state(read_prompts)


def wrong_prompt(prompt: str) -> str | None:
    """Returns why a text cannot be a prompt; None if it can."""
    # Tables, logs and trackers show prompts, and an escape sequence could control the terminal.
    if odd := _CONTROL.search(prompt):
        return f"holds the control character U+{ord(odd[0]):04X}; remove it"
    if label := _PARAMETERS.search(prompt):
        return f"holds '{label[0].strip()}'; give negative prompts in a column of their own, and steps as workload.steps"
    if len(prompt) > _LONGEST:
        return f"has {len(prompt)} characters, and a prompt may have {_LONGEST}; a text encoder reads some 77 words"
    return None


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

_PARAMETERS = re.compile(
    r"(?:^|\s)negative[ _]prompts?\s*:|(?:^|\s)Steps: \d+, [A-Z]\w+[^:,]*: ",
    re.IGNORECASE,
)
"""How programs continue a prompt with its negative prompt and its parameters."""

_LONGEST = 10_000


# ---- what a user may not expect -------------------------------------------------------------------------------------


def remarks_on_prompts(workload: Workload, model: Model) -> list[str]:
    """Returns what of a user's prompts is not used, or is not read as other programs read it. Raises UsageError."""
    if workload.prompts == "packaged" and workload.negative_prompt is None:
        return []
    source, chosen, at = (
        _source(workload, model),
        _chosen(workload, model),
        _named(workload),
    )
    lines = []
    if source.unused:
        lines.append(
            f"{at}: not used: {', '.join(source.unused)}; seeds, steps, sizes and the like are keys of the workload, "
            "the same for all prompts"
        )
    if workload.prompts != "packaged" and len(chosen) < len(source.prompts):
        lines.append(
            f"{at}: {len(chosen)} of its {len(source.prompts)} prompts are used; workload.prompt_count (for images, "
            "quality.prompt_count) says how many"
        )
    if source.comments:
        lines.append(
            f"{at}: lines that begin with # are comments: {some_of(source.comments, _FIRST)}"
        )
    if source.empty:
        lines.append(
            f"{at}: rows without a prompt are left out: {some_of(source.empty, _FIRST)}"
        )
    counts = Counter((prompt.text, prompt.negative) for prompt in chosen)
    if repeated := [
        prompt.place for prompt in chosen if counts[prompt.text, prompt.negative] > 1
    ]:
        lines.append(
            f"{at}: these prompts occur more than once, and differ in their noise only: {some_of(repeated, _FIRST)}"
        )
    if any(prompt.negative for prompt in chosen) and not is_guided(workload, model):
        lines.append(
            f"{at}: negative prompts have no effect, since there is no guidance"
        )
    if named := _named_plain(workload, chosen):
        plain = "read as plain text, as diffusers does, without the meaning that other programs give to it"
        lines.append(f"{at}: {plain}: {'; '.join(named)}")
    return lines


def _named_plain(workload: Workload, chosen: Sequence[Prompt]) -> list[str]:
    """Returns how often texts hold what other programs give a meaning to, by kind, each with the first place."""
    named = []
    for kind, pattern in _PLAIN.items():
        places = []
        for place, text in _texts(workload, chosen):
            if match := pattern.search(text):
                places.append((place, match[0]))
        if places:
            first, what = places[0]
            named.append(f"{kind} in {len(places)} (first in {first}: {_short(what)})")
    return named


def _texts(workload: Workload, chosen: Iterable[Prompt]) -> Iterator[tuple[str, str]]:
    """Yields all texts that the text encoder reads, each with its place."""
    for prompt in chosen:
        yield prompt.place or "the packaged prompts", prompt.text
        if prompt.negative:
            yield f"{prompt.place}, negative", prompt.negative
    if workload.negative_prompt:
        yield "workload.negative_prompt", workload.negative_prompt


_PLAIN = {
    "weights": re.compile(
        r"\([^()]*:\s*[+-]?\d*\.?\d+\s*\)|\w::|[A-Za-z]:\d*\.\d|[\w)]\+\+|[\w)]--(?=[\s,.)]|$)"
    ),
    "networks and embeddings": re.compile(
        r"<[A-Za-z][\w-]*:[^<>]*>|\bembedding:\S+", re.IGNORECASE
    ),
    "negative parts": re.compile(
        r"(?:^|[\s|\[(])neg(?:ative)?\s*:|\s###?\s", re.IGNORECASE
    ),
    "parentheses": re.compile(r"\((?![^()]*:\s*[+-]?\d*\.?\d+\s*\))[^()]*\)"),
    "brackets": re.compile(r"\[[^\[\]]+\]"),
    "alternatives and variables": re.compile(r"\{[^{}]*\}|__[\w/*-]+__"),
    "keywords": re.compile(r"\b(?:BREAK|ADDCOMM|ADDBASE|ADDCOL|ADDROW)\b|\sAND\s"),
    "options": re.compile(
        r"(?:^|\s)(?:--[A-Za-z][\w-]*(?=[\s=]|$)|-[A-Za-z] ?\d[\d.]*(?=\s|$))"
    ),
    "list marks": re.compile(r"^(?:[-*•]|\d+[.)]|\d{3,})\s"),
    "comments and fences": re.compile(r"^(?:[;%]|```|~~~|---)"),
    "names of files": re.compile(
        r"^\S+\.(?:png|jpe?g|webp|gif|bmp|tiff?|avif|txt|[ct]sv|jsonl?)\b",
        re.IGNORECASE,
    ),
    "lines that go on": re.compile(r"\\$"),
    "quotes around the whole": re.compile(r"""^(["'`]).*\1,?$""", re.DOTALL),
    "tabs": re.compile(r"\S\t+\S"),
    "letters that were damaged before": re.compile("\ufffd|Ã[\u0080-\u00bf]|â€"),
    "escapes and entities": re.compile(
        r"\\[nrt\"'()\[\]{}]|\\u[0-9a-fA-F]{4}|&(?:amp|quot|lt|gt|nbsp|#\d+);"
    ),
    "invisible characters": re.compile(
        "[\u00ad\u200b\u2028-\u202e\u2060-\u2069\ufeff]"
    ),
    "empty cells that became words": re.compile(
        r"^(?:nan|none|null|n/a|#N/A|#NAME\?|#REF!|#VALUE!)$", re.IGNORECASE
    ),
}
"""What other programs give a meaning, by its name."""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_FIRST, _SHOWN = 3, 30


def remarks_on_length(workload: Workload, model: Model) -> list[str]:
    """Returns what of prompts a model's text encoder cuts, or has no word for.

    Call it in a process that may import the model's libraries.

    Raises:
        UsageError: the model's files are not there.
    """
    if model.weights == "random" or (
        workload.prompts == "packaged" and workload.negative_prompt is None
    ):
        return []  # the words of a random model are a substitute's
    texts = list(_texts(workload, _chosen(workload, model)))
    lines: dict[str, None] = {}
    words: set[str] = set()
    for _, text in texts:
        words.update(re.findall(r"<[\w-]+>", text))
    for tokenizer, tokens in _tokenizers(model):
        words = words and words - tokenizer.get_vocab().keys()
        limit, counts = _lengths(model, tokenizer, tokens, [text for _, text in texts])
        cut = [
            f"{place} ({count} tokens)"
            for (place, _), count in zip(texts, counts, strict=True)
            if count > limit
        ]
        if cut:
            lines[
                f"{_named(workload)}: a text encoder reads {limit} tokens and cuts {len(cut)} of {len(texts)} texts: "
                f"{some_of(cut, _FIRST)}; it reads nothing of what comes later"
            ] = None
    if words:
        saved = "load a textual inversion in diffusers, and save the pipeline with it"
        unknown = some_of(sorted(words), _FIRST)
        lines[
            f"{_named(workload)}: this model was taught no word {unknown}, and reads it as text: {saved}"
        ] = None
    return list(lines)


def cut_from(text: str, pipe: DiffusionPipeline, model: Model) -> str:
    """Returns how much of a text no text encoder of a loaded pipeline reads; "" if one reads the whole."""
    if model.weights == "random":
        return ""
    cuts = []
    for name, tokens in _tokens_read(model).items():
        tokenizer = getattr(pipe, name, None)
        if tokenizer is not None:
            limit, [count] = _lengths(model, tokenizer, tokens, [text])
            cuts.append((limit, count))
    limit, count = max(cuts)
    return f"cut after {limit} of its {count} tokens" if count > limit else ""


def _lengths(
    model: Model, tokenizer: Any, tokens: int | None, texts: list[str]
) -> tuple[int, list[int]]:
    """Returns how many tokens a call reads, and how many it makes of each text, with what it writes around it."""
    from diffusers.loaders import TextualInversionLoaderMixin

    encoding = family_of(model).encoding
    # That of FLUX.2 [dev] is a part of what prepares pictures too.
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    limit = min(tokenizer.model_max_length, tokens or tokenizer.model_max_length)
    # A trained word may have several vectors, each of which is a token.
    vectors = TextualInversionLoaderMixin().maybe_convert_prompt(texts, tokenizer)
    written = [encoding.before + text for text in vectors]
    if encoding.thinks is not None:
        chats = [[{"role": "user", "content": text}] for text in texts]
        written = tokenizer.apply_chat_template(
            chats,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=encoding.thinks,
        )
    counts = [len(ids) for ids in tokenizer(written, verbose=False)["input_ids"]]
    return limit, counts


def _tokens_read(model: Model) -> dict[str, int | None]:
    """Returns the number of tokens that a call reads, by tokenizer; None is its own limit."""
    family = family_of(model)
    tokens = dict(zip(family.tokenizers, family.encoding.tokens, strict=True))
    if model.max_sequence_length is not None:
        tokens[family.tokenizers[-1]] = model.max_sequence_length
    return tokens


def _tokenizers(model: Model) -> Iterator[tuple[Any, int | None]]:
    """Yields the tokenizers of a model, each with the number of tokens that a call reads if that is not its own."""
    folder, tokens = folder_of(model), _tokens_read(model)
    if is_original(model):
        for part in sorted(folder.glob("tokenizer*")):
            yield load_tokenizer(part, model.tokenizer), tokens.get(part.name)
        return
    for name, named in parts_in(folder).items():
        if name.startswith("tokenizer"):
            yield (
                part_class(*named).from_pretrained(
                    folder / name, local_files_only=True
                ),
                tokens.get(name),
            )


# ---- initial noise from a file: MLPerf Inference has one latent for all images ---------------------------------------


def read_latents(file: str) -> Tensor:
    """Reads the only tensor in a .pt or .safetensors file: float32 (n, channels, height, width), n ≥ 1, on the CPU.

    Raises:
        UsageError: the file cannot be read, or does not hold exactly one such tensor.
    """
    import torch
    from safetensors.torch import load_file

    path = Path(file).expanduser()
    if path.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"workload.latents={file}: give a .safetensors or a .pt file")
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch and safetensors each raise their own
        reason = first_line(error)
        if isinstance(error, UnpicklingError):  # PyTorch advises to run what it holds
            reason = "it is damaged, or holds other objects than tensors"
        raise UsageError(
            f"workload.latents={file}: cannot be read as tensors ({reason})"
        ) from error
    content = list(content.values()) if isinstance(content, dict) else content
    tensors = content if isinstance(content, list) else [content]
    if len(tensors) != 1 or not isinstance(tensors[0], torch.Tensor):
        raise UsageError(
            f"workload.latents={file}: must hold one tensor, and holds {len(tensors)} values"
        )
    latents = tensors[0].detach()
    if latents.ndim != 4 or not len(latents) or not latents.is_floating_point():
        raise UsageError(
            f"workload.latents={file}: must be floats (n, channels, height / 8, width / 8), "
            f"not {latents.dtype} {tuple(latents.shape)}"
        )
    if not latents.isfinite().all():
        raise UsageError(f"workload.latents={file}: some values are NaN or infinite")
    if (spread := float(latents.float().std())) > _WIDEST or spread < 1 / _WIDEST:
        raise UsageError(
            f"workload.latents={file}: their standard deviation is {spread:.3g}; give noise, before a scheduler has "
            "scaled it, with a standard deviation of 1"
        )
    return latents.float()


_WIDEST = 2.0
"""The largest standard deviation of latents that may be meant, and 1 / the smallest: chance alone changes that of noise
by some percent."""


def require_latents(workload: Workload, task: Task, model: Model) -> None:
    """Checks a workload's latents as far as possible without loading the model.

    Raises:
        UsageError: as in `read_latents` and `take`; or another key is set that latents make ineffective.
    """
    if workload.latents is None:
        return
    if task.kind != "txt2img":
        raise UsageError(
            f"workload.latents={workload.latents}: task={task.kind} starts from its image, not from latents"
        )
    if workload.seed:
        raise UsageError(
            f"workload.seed={workload.seed}: has no effect on noise that workload.latents gives"
        )
    latents = read_latents(workload.latents)
    images = range(len(resolve_prompts(workload, model)) * workload.images_per_prompt)
    try:
        vae = part_config(model, "vae") or {}
        channels, factor = (
            int(latent_channels_of(vae) or latents.shape[1]),
            factor_of(vae),
        )
    except (OSError, ValueError, TypeError, LookupError):
        channels, factor = (
            latents.shape[1],
            8,
        )  # it is not local; other checks report errors of the model itself
    for side in dict.fromkeys(shape.size // factor for shape in workload.shapes(model)):
        take(latents, images, (channels, side, side), workload.latents)


def take(
    latents: Tensor, images: Sequence[int], shape: tuple[int, ...], file: str
) -> list[Tensor]:
    """Returns the latents (1, channels, height, width) of the numbered images; a single latent serves all.

    Raises:
        UsageError: their shape does not fit the model, or there are too few.
    """
    if tuple(latents.shape[1:]) != tuple(shape):
        has, needs = ("×".join(map(str, part)) for part in (latents.shape[1:], shape))
        raise UsageError(
            f"workload.latents={file}: holds latents of {has}; this model and size need {needs}"
        )
    if len(latents) == 1:
        return [latents] * len(images)
    if max(images) >= len(latents):
        raise UsageError(
            f"workload.latents={file}: holds {len(latents)} latents; give one for all images, or one for each "
            f"of at least {max(images) + 1}"
        )
    return [latents[image : image + 1] for image in images]
