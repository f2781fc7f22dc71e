"""Writes what a program calls its pipeline with: prompts, pictures, settings, and the noise of the measured image."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sdopt.pipelines.loading import part_config
from sdopt.pipelines.tasks import files_of, sized
from sdopt.programs.code import Code, literal
from sdopt.record.images import open_image, open_picture
from sdopt.variant import Variant

_ROLES = {"image": ("picture", "image", "RGB"), "mask": ("mask", "mask_image", "L")}
"""By role of a file: its name in a program, the argument of the call, and PIL's mode."""


@dataclass(frozen=True)
class Work:
    """The first call of a variant's quality pass, as a worker makes it."""

    variant: Variant

    @property
    def _places(self) -> list[int]:
        """The numbers of the prompts of the call."""
        return [place % len(self.variant.pictured) for place in range(self.variant.shapes[0].batch_size)]

    @property
    def _count(self) -> int:
        """How many images each prompt has."""
        return self.variant.workload.images_per_prompt

    @property
    def _texts(self) -> list[str]:
        return [self.variant.pictured[place] for place in self._places]

    @property
    def _negatives(self) -> list[str]:
        return [self.variant.negatives[place] for place in self._places] if self.variant.negatives else []

    @property
    def _seeds(self) -> list[int]:
        first = self.variant.workload.seed
        return [first + place * self._count + image for place in self._places for image in range(self._count)]

    def prompts(self) -> Code:
        """Returns the lines that name the prompts, and what images should not show."""
        lines = [f"prompt = {_one_or_all(self._texts)}"]
        if self._negatives:
            lines.append(f"negative_prompt = {_one_or_all(self._negatives)}")
        return Code(lines=tuple(lines))

    @property
    def all_texts(self) -> str:
        """All texts of the call, as a list in a program that has named them."""
        star = "*" if len(self._texts) > 1 else ""
        names = ["prompt", *(["negative_prompt"] if self._negatives else [])]
        return f"[{', '.join(f'{star}{name}' for name in names)}]"

    def adaptations(self) -> Iterator[str]:
        """Yields the line that lets diffusers inpaint with a model whose latents do not have four channels."""
        unet, vae = (part_config(self.variant.model, part) or {} for part in ("unet", "vae"))
        channels = vae.get("latent_channels", 4)
        if self.variant.task.kind == "inpaint" and unet.get("in_channels") == channels != 4:
            yield "pipe.unet.register_to_config(in_channels=4)  # else diffusers takes it for one that inpaints"

    def call(self) -> Code:
        """Returns the pictures and the arguments of the call, but its noise."""
        workload, task, size = self.variant.workload, self.variant.task, self.variant.size
        pictures = self._pictures()
        imports, steps = self._steps()
        arguments = ["prompt=prompt", *(["negative_prompt=negative_prompt"] if self._negatives else [])]
        arguments += pictures.arguments
        if task.kind != "txt2img":
            arguments.append(f"strength={task.strength}")
        arguments += [steps, f"guidance_scale={self.variant.guidance_scale}"]
        if task.kind != "img2img":
            arguments.append(f"height={size}, width={size}")
        if workload.images_per_prompt > 1:
            arguments.append(f"num_images_per_prompt={workload.images_per_prompt}")
        return Code((*pictures.imports, *imports), pictures.lines, tuple(arguments))

    def _steps(self) -> tuple[tuple[str, ...], str]:
        """Returns what sets the steps, and what that imports."""
        steps, spaced = self.variant.workload.steps, self.variant.scheduler.timesteps
        if spaced is None:
            return (), f"num_inference_steps={steps}"
        if len(spaced) == steps:
            return (), f"timesteps={spaced}"
        return ("from sdopt.pipelines.sampling import spread",), f"timesteps=spread({spaced}, {steps}, pipe.scheduler)"

    def _pictures(self) -> Code:
        found = Code()
        for role, file in files_of(self.variant.task, self.variant.model).items():
            found += self._picture(role, file.absolute())
        return found

    def _picture(self, role: str, file: Path) -> Code:
        """Returns the lines that open a picture; by PIL alone, unless it is turned, in 16 bits or has a profile."""
        name, argument, mode = _ROLES[role]
        size, place = self.variant.size, literal(str(file))
        with open_image(file) as image:
            plain = image.convert(mode).resize((size, size))
        usual = np.array_equal(np.asarray(plain), np.asarray(sized(open_picture(file), role, size)))
        opened = f"Image.open({place})" if usual else f"open_picture(Path({place}))"
        needs: tuple[str, ...] = ("from PIL import Image",)
        if not usual:
            needs = ("from pathlib import Path", "from sdopt.record.images import open_picture")
        line = f'{name} = {opened}.convert("{mode}").resize(({size}, {size}))'
        # One for each image: a single one would be encoded once, with the noise of the first.
        each = f"{argument}={name}" if len(self._seeds) == 1 else f"{argument}=[{name}] * {len(self._seeds)}"
        return Code(needs, (line,), (each,))

    def noise(self, dtype: str) -> Code:
        """Returns the noise of the call's images; `dtype` is the type of the latents."""
        seeds = self._seeds
        imports: tuple[str, ...] = ("import torch",)
        if self.variant.workload.latents is not None:
            return self._given(dtype)
        if len(seeds) == 1:
            made, drawn = f"torch.Generator().manual_seed({seeds[0]})", "torch.randn({}, generator=generator)"
        else:
            made = f"[torch.Generator().manual_seed(seed) for seed in {_as_range(seeds)}]"
            drawn = "torch.cat([torch.randn({}, generator=one) for one in generator])"
        lines = [f"generator = {made}"]
        if self.variant.task.kind != "txt2img":  # the call draws it
            return Code(imports, tuple(lines), ("generator=generator",))
        lines.append(f"latents = {drawn.format(self._shape)}{_cast(dtype)}")
        return Code(imports, tuple(lines), ("latents=latents", "generator=generator"))

    def _given(self, dtype: str) -> Code:
        """Returns the noise of a file, and the generators for schedulers that draw more of it."""
        file = Path(str(self.variant.workload.latents)).expanduser().absolute()
        seeds = self._seeds
        places = [seed - self.variant.workload.seed for seed in seeds]
        lines = (
            f"latents = read_latents({literal(str(file))})",
            f"latents = latents[{places}] if len(latents) > 1 else latents.repeat({len(seeds)}, 1, 1, 1)",
            f"generator = [torch.Generator().manual_seed(seed) for seed in {_as_range(seeds)}]",
        )
        cast = (f"latents = latents{_cast(dtype)}",) if _cast(dtype) else ()
        imports = ("import torch", "from sdopt.pipelines.prompts import read_latents")
        return Code(imports, (*lines, *cast), ("latents=latents", "generator=generator"))

    @property
    def _shape(self) -> str:
        """The shape of one image's latents."""
        vae = part_config(self.variant.model, "vae") or {}
        side = self.variant.size // 2 ** (len(vae.get("block_out_channels", "four")) - 1)
        return f"(1, {vae.get('latent_channels', 4)}, {side}, {side})"


def _cast(dtype: str) -> str:
    return "" if dtype == "torch.float32" else f".to({dtype})"


def _one_or_all(texts: list[str]) -> str:
    return literal(texts[0] if len(texts) == 1 else texts)


def _as_range(numbers: list[int]) -> str:
    """Returns whole numbers as a program lists them."""
    whole = list(range(numbers[0], numbers[0] + len(numbers)))
    return f"range({whole[0]}, {whole[-1] + 1})" if numbers == whole else repr(numbers)
