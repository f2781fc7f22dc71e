"""Writes what a program calls its pipeline with: prompts, pictures, settings, and the noise of the measured image."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sdopt.pipelines.families import factor_of, latent_channels_of
from sdopt.pipelines.family import Family
from sdopt.pipelines.loading import call_arguments, family_of, guidance_of, part_config
from sdopt.pipelines.tasks import files_of, sized
from sdopt.programs.code import Piece, Unwritable, literal
from sdopt.record.images import open_image, open_picture
from sdopt.variant import Variant

_ROLES = {"image": ("picture", "image", "RGB"), "mask": ("mask", "mask_image", "L")}
"""By role of a file: its name in a program, the argument of the call, and PIL's mode."""


@dataclass(frozen=True)
class Work:
    """The first call of a variant's quality pass, as a worker makes it."""

    variant: Variant

    # ------------------------------------------------------------------------------------------------------- prompts

    @property
    def _places(self) -> list[int]:
        """The numbers of the prompts of the call; a short batch is filled up from the start."""
        count = self.variant.shapes[0].batch_size
        return [place % len(self.variant.pictured) for place in range(count)]

    @property
    def _seeds(self) -> list[int]:
        """The seeds of the images of the call."""
        seeds: list[int] = []
        count = self.variant.workload.images_per_prompt
        for place in self._places:
            first = self.variant.workload.seed + place * count
            seeds += range(first, first + count)
        return seeds

    @property
    def _texts(self) -> list[str]:
        return [self.variant.pictured[place] for place in self._places]

    @property
    def _negatives(self) -> list[str]:
        if self.variant.negatives:
            return [self.variant.negatives[place] for place in self._places]
        guidance = guidance_of(self.variant.model)
        if guidance.needs_negative and guidance.guides(self.variant.guidance_scale):
            return [""] * len(
                self._places
            )  # without any, the pipeline would not be guided
        return []

    def prompts(self) -> Piece:
        """Returns the lines that name the prompts, and what images should not show."""
        lines = [f"prompt = {_one_or_all(self._texts)}"]
        if self._negatives:
            lines.append(f"negative_prompt = {_one_or_all(self._negatives)}")
        return Piece(lines=tuple(lines))

    @property
    def all_texts(self) -> str:
        """All texts of the call, as a list in a program that has named them."""
        names = ["prompt"]
        if self._negatives:
            names.append("negative_prompt")
        if len(self._texts) > 1:
            names = [f"*{name}" for name in names]
        return f"[{', '.join(names)}]"

    # ---------------------------------------------------------------------------------------------------------- call

    def adaptations(self) -> Iterator[str]:
        """Yields the line that lets diffusers inpaint with a model whose latents do not have four channels."""
        unet = part_config(self.variant.model, "unet") or {}
        if (
            self.variant.task.kind == "inpaint"
            and unet.get("in_channels") == self._channels != 4
        ):
            yield "pipe.unet.register_to_config(in_channels=4)  # else diffusers takes it for one that inpaints"

    def call(self) -> Piece:
        """Returns the pictures and the arguments of the call, but its noise."""
        variant, model, size = self.variant, self.variant.model, self.variant.size
        pictures, steps = self._pictures(), self._steps()
        arguments = ["prompt=prompt"]
        if self._negatives:
            arguments.append("negative_prompt=negative_prompt")
        arguments += pictures.arguments
        if variant.task.kind != "txt2img":
            arguments.append(f"strength={variant.task.strength}")
        arguments += steps.arguments
        arguments.append(f"{guidance_of(model).argument}={variant.guidance_scale}")
        if variant.task.kind != "img2img" or not self._family.is_unet:
            arguments.append(f"height={size}, width={size}")
        if variant.workload.images_per_prompt > 1:
            arguments.append(
                f"num_images_per_prompt={variant.workload.images_per_prompt}"
            )
        for name, value in call_arguments(model).items():
            arguments.append(f"{name}={literal(value)}")
        return Piece(
            (*pictures.imports, *steps.imports), pictures.lines, tuple(arguments)
        )

    @property
    def _family(self) -> Family:
        return family_of(self.variant.model)

    def _steps(self) -> Piece:
        """Returns the argument that sets the steps, and what it imports."""
        steps, spaced = self.variant.workload.steps, self.variant.scheduler.timesteps
        if spaced is None:
            return Piece(arguments=(f"num_inference_steps={steps}",))
        if len(spaced) == steps:
            return Piece(arguments=(f"timesteps={spaced}",))
        between = f"timesteps=spread({spaced}, {steps}, pipe.scheduler)"
        return Piece(
            ("from sdopt.pipelines.sampling import spread",), arguments=(between,)
        )

    def _pictures(self) -> Piece:
        pictures = Piece()
        for role, file in files_of(self.variant.task, self.variant.model).items():
            pictures += self._picture(role, file.absolute())
        return pictures

    def _picture(self, role: str, file: Path) -> Piece:
        """Returns the lines that open a picture; by PIL alone, unless it is turned, in 16 bits or has a profile."""
        name, argument, mode = _ROLES[role]
        size, path = self.variant.size, literal(str(file))
        with open_image(file) as image:
            by_pil = np.asarray(image.convert(mode).resize((size, size)))
        pixels = np.asarray(sized(open_picture(file), role, size))
        imports: tuple[str, ...]
        if np.array_equal(by_pil, pixels):
            imports = ("from PIL import Image",)
            opened = f"Image.open({path})"
        else:
            imports = (
                "from pathlib import Path",
                "from sdopt.record.images import open_picture",
            )
            opened = f"open_picture(Path({path}))"
        line = f'{name} = {opened}.convert("{mode}").resize(({size}, {size}))'
        count = len(self._seeds)
        if count == 1:
            return Piece(imports, (line,), (f"{argument}={name}",))
        # One for each image: a single one would be encoded once, with the noise of the first.
        return Piece(imports, (line,), (f"{argument}=[{name}] * {count}",))

    # --------------------------------------------------------------------------------------------------------- noise

    @property
    def draws_itself(self) -> bool:
        """Whether the call draws its first noise: it starts from a picture, or lays out its latents in its own way."""
        return (
            self.variant.task.kind != "txt2img"
            or self._family.latents.layout != "spatial"
        )

    def noise(self, dtype: str) -> Piece:
        """Returns the noise of the call's images, drawn in float32 on the CPU; `dtype` is the type of the latents."""
        if self.variant.workload.latents is not None:
            return self._from_file(dtype)
        seeds = self._seeds
        if len(seeds) == 1:
            generator = f"torch.Generator().manual_seed({seeds[0]})"
            drawn = f"torch.randn({self._shape}, generator=generator)"
        else:
            generator = (
                f"[torch.Generator().manual_seed(seed) for seed in {_as_range(seeds)}]"
            )
            drawn = f"torch.cat([torch.randn({self._shape}, generator=one) for one in generator])"
        lines = [f"generator = {generator}"]
        arguments = ["generator=generator"]
        if not self.draws_itself:
            lines.append(f"latents = {drawn}{self._cast(dtype)}")
            arguments.insert(0, "latents=latents")
        return Piece(("import torch",), tuple(lines), tuple(arguments))

    def _from_file(self, dtype: str) -> Piece:
        """Returns the noise of a file, and the generators for schedulers that draw more of it."""
        if self._family.latents.layout != "spatial":
            raise Unwritable(
                "its pipeline lays out the noise of a file in a way of its own"
            )
        file = Path(str(self.variant.workload.latents)).expanduser().absolute()
        seeds = self._seeds
        places = [seed - self.variant.workload.seed for seed in seeds]
        lines = [
            f"latents = read_latents({literal(str(file))})",
            f"latents = latents[{places}] if len(latents) > 1 else latents.repeat({len(seeds)}, 1, 1, 1)",
            f"generator = [torch.Generator().manual_seed(seed) for seed in {_as_range(seeds)}]",
        ]
        if cast := self._cast(dtype):
            lines.append(f"latents = latents{cast}")
        imports = ("import torch", "from sdopt.pipelines.prompts import read_latents")
        return Piece(imports, tuple(lines), ("latents=latents", "generator=generator"))

    def _cast(self, dtype: str) -> str:
        if dtype == "torch.float32" or self._family.latents.kept is not None:
            return ""
        return f".to({dtype})"

    @property
    def _channels(self) -> int:
        vae = part_config(self.variant.model, "vae") or {}
        return latent_channels_of(vae) or 4

    @property
    def _shape(self) -> str:
        """The shape of one image's latents."""
        vae = part_config(self.variant.model, "vae") or {}
        side = self.variant.size // factor_of(vae)
        return f"(1, {self._channels}, {side}, {side})"


def _one_or_all(texts: list[str]) -> str:
    if len(texts) == 1:
        return literal(texts[0])
    return literal(texts)


def _as_range(numbers: list[int]) -> str:
    """Returns whole numbers as a program lists them."""
    first = numbers[0]
    last = first + len(numbers)
    if numbers == list(range(first, last)):
        return f"range({first}, {last})"
    return repr(numbers)
