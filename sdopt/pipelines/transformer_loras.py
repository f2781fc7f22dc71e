"""LoRAs for transformers: every trainer's names become diffusers' own, and whatever has no layer is named.

Kohya's scripts and musubi write `lora_unet_double_blocks_0_img_attn_qkv.lora_down`, ai-toolkit
`diffusion_model.layers.0.attention.to_q.lora_A`, XLabs `double_blocks.0.processor.qkv_lora1.down`, and peft
`base_model.model.transformer_blocks.0.attn.to_q.lora_A`, where diffusers has `transformer.` instead.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError, some_of
from sdopt.pipelines.originals import Place, parted, places_in
from sdopt.pipelines.parts import shape_of
from sdopt.text_files import read_text

if TYPE_CHECKING:
    import torch

MATRIX = re.compile(
    r"(.+?)[._]lora(\d?)(?:_linear_layer)?[._](A|B|down|up)(?:\.\w+)?\.weight"
)
"""The name of a matrix: its module, XLabs' number of a stream, and which of the two it is."""

_ALPHA = ".alpha"

_OF_A_NETWORK = (
    (
        re.compile(
            r"lora_te_|lora_te1_|text_encoder\.|text_encoders\.clip_l\.transformer\."
        ),
        "text_encoder",
    ),
    (
        re.compile(r"lora_te2_|text_encoder_2\.|text_encoders\.clip_g\.transformer\."),
        "text_encoder_2",
    ),
    (
        re.compile(r"lora_te3_|text_encoder_3\.|text_encoders\.\w+\.transformer\."),
        "text_encoder_3",
    ),
    (re.compile(r"lora_unet_|lora_transformer_|lycoris_|unet\."), "transformer"),
    (
        re.compile(
            r"(base_model\.model\.)?(model\.)?(diffusion_model\.|transformer\.)?"
        ),
        "transformer",
    ),
)
"""How names begin that are of a network; the last is without any beginning."""


@dataclass
class Converted:
    """A LoRA under the names that diffusers gives its tensors.

    Attributes:
        tensors: the pairs of matrices, with alphas and scales multiplied into the second one.
        left: names of the file that have no place in the networks.
        widths: what is wrong with matrices of other shapes than their layers.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    widths: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Returns why it would not arrive as a whole, or would change nothing; [] if it does neither."""
        if self.left:
            return [
                f"holds {some_of(self.left)}, for which this model has no layer, and would be left out"
            ]
        if self.widths:
            return [f"cannot be loaded into this model: {self.widths[0]}"]
        if not self.tensors:
            return [
                "holds no LoRA: none of its names ends in .lora_A.weight or .lora_down.weight"
            ]
        if not any(map(self._changes, self.tensors)):
            return ["changes nothing: each of its updates is zero"]
        return []

    def _changes(self, name: str) -> bool:
        """Returns whether a tensor is a first matrix whose update is not zero."""
        if ".lora_A." not in name:
            return False
        up = self.tensors[name.replace(".lora_A.", ".lora_B.")]
        return bool(self.tensors[name].any()) and bool(up.any())


def converted(
    stored: Mapping[str, torch.Tensor],
    networks: Mapping[str, Any],
    scales: Mapping[str, Scales] | None = None,
) -> Converted:
    """Returns a LoRA as diffusers names it.

    Args:
        stored: the tensors of a file.
        networks: those that diffusers loads a LoRA into, by the attribute of the pipeline, with or without weights.
        scales: of the matrices without an alpha, by network; None is 1.
    """
    result, modules = Converted(), dict[str, dict[str, str]]()
    settings = scales or {}
    for name in stored:
        match = MATRIX.fullmatch(name)
        if match:
            which = "down" if match[3] in ("A", "down") else "up"
            pair = modules.setdefault(match[1] + match[2], {})
            # Of several adapters, or of a layer in parts, the last would be taken.
            if pair.setdefault(which, name) != name:
                result.left.append(name)
        elif not name.endswith(_ALPHA):
            result.left.append(name)
    layers = {part: _layers(network) for part, network in networks.items()}
    for module, pair in modules.items():
        part, plain = _network_of(module)
        place = layers.get(part, {}).get(letters_of(plain))
        if place is None or len(pair) < 2:
            result.left += pair.values()
            continue
        down, up = (stored[pair[which]].float() for which in ("down", "up"))
        alpha = stored.get(module + _ALPHA)
        scale = (
            float(alpha) / down.shape[0]
            if alpha is not None
            else settings.get(part, Scales()).of(plain, down.shape[0])
        )
        _place(result, module, part, place, networks[part], down, up * scale)
    with_matrices = {f"{module}{_ALPHA}" for module in modules}
    result.left += [
        name for name in stored if name.endswith(_ALPHA) and name not in with_matrices
    ]
    return result


def _place(
    found: Converted,
    module: str,
    part: str,
    place: Place,
    network: Any,
    down: torch.Tensor,
    up: torch.Tensor,
) -> None:
    """Adds the matrices of one module of a file for each layer of diffusers that has some of its rows."""
    shapes = [shape_of(network.get_submodule(name).weight) for name in place.modules]
    if down.shape[0] != up.shape[1]:
        ranks = f"{down.shape[0]} and {up.shape[1]}"
        found.widths.append(f"the two matrices of {module} are of ranks {ranks}")
        return
    down, up = _as_layers(down, up, len(shapes[0]))
    parts = parted(up, place, [shape[0] for shape in shapes])
    if down.shape[2:] != shapes[0][2:]:
        sizes = f"{list(down.shape[2:])}, and this model's layer {list(shapes[0][2:])}"
        found.widths.append(f"its update of {module} has a kernel of {sizes}")
        return
    if parts is None or down.shape[1] != shapes[0][1]:
        update, layer = (
            (down.shape[1], up.shape[0]),
            (shapes[0][1], sum(shape[0] for shape in shapes)),
        )
        found.widths.append(
            f"its update of {module} is from {update[0]} to {update[1]} channels, and this model's layer from {layer[0]} to "
            f"{layer[1]}"
        )
        return
    for name, rows in zip(place.modules, parts, strict=True):
        key = f"{part}.{name}"
        if f"{key}.lora_A.weight" in found.tensors:
            found.left.append(f"{module} (a second update of {name})")
            return
        found.tensors[f"{key}.lora_A.weight"] = down.clone()
        found.tensors[f"{key}.lora_B.weight"] = rows.clone()


def _as_layers(
    down: torch.Tensor, up: torch.Tensor, dimensions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns matrices with as many dimensions as a layer: some trainers save all of them as convolutions of one pixel."""

    def as_layer(matrix: torch.Tensor) -> torch.Tensor:
        if math.prod(matrix.shape[2:]) != 1:
            return matrix
        return matrix.reshape(*matrix.shape[:2], *[1] * (dimensions - 2))

    return as_layer(down), as_layer(up)


def _network_of(module: str) -> tuple[str, str]:
    """Returns the attribute of the network that a module of a file is of, and the rest of its name."""
    for start, part in _OF_A_NETWORK:
        if match := start.match(module):
            return part, module[match.end() :]
    return "transformer", module


def _layers(network: Any) -> dict[str, Place]:
    """Returns where layers with a matrix lie in a network, by the letters of their names."""
    places: dict[str, Place] = {}
    for name, place in places_in(network).items():
        modules = [
            network.get_submodule(part)
            for part in place.modules
            if _is_module(network, part)
        ]
        if len(modules) == len(place.modules) and all(
            _has_matrix(part) for part in modules
        ):
            # transformers 5 has no `text_model` in CLIP's encoder any more.
            for written in {
                name,
                f"text_model.{name}",
                name.removeprefix("text_model."),
            }:
                places.setdefault(letters_of(written), place)
    return places


def _is_module(network: Any, name: str) -> bool:
    try:
        network.get_submodule(name)
    except AttributeError:
        return False
    return True


def _has_matrix(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim > 1


def letters_of(name: str) -> str:
    """Returns a name without dots, dashes and underscores, which kohya's names do not tell apart."""
    return re.sub(r"[\W_]", "", name)


@dataclass(frozen=True)
class Scales:
    """What a trainer's settings say of the scale of matrices without an alpha: alpha / rank, or alpha / √rank.

    diffusers reads its own settings in the header of a file, and not those of peft in the file beside it.
    """

    alpha: float | None = None
    alphas: Mapping[str, float] = field(default_factory=dict)
    rooted: bool = False

    def of(self, module: str, rank: int) -> float:
        """Returns the scale of a module's update; patterns are expressions that match the end of its name, as in peft."""
        alpha = self.alpha
        for pattern, other in self.alphas.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = other
                break
        if alpha is None:
            return 1.0
        return float(alpha) / (rank**0.5 if self.rooted else rank)


def scales_beside(file: Path, metadata: Mapping[str, str]) -> dict[str, Scales]:
    """Returns the scales that the header of a file says, or peft's `adapter_config.json` beside it, by network."""
    said = _settings_of(file, metadata)
    return {part: _scales_in(settings) for part, settings in said.items()}


def changed_weights(file: Path, metadata: Mapping[str, str]) -> str | None:
    """Returns the name of a start of training that took an update out of the weights first; None if it took none.

    The matrices of such a LoRA are for what was left of the weights, unless it was converted when it was saved.
    """
    for settings in _settings_of(file, metadata).values():
        start = str(settings.get("init_lora_weights")).lower()
        if start.startswith(_TAKEN_OUT):
            return start
    return None


_TAKEN_OUT = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""How such starts begin, as peft names them."""


def _settings_of(file: Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns the settings of a trainer in the header of a file or beside it, by network."""
    said: dict[str, dict[str, Any]] = {}
    if text := metadata.get("lora_adapter_metadata"):
        where = f"{file}: lora_adapter_metadata in its header"
        for key, value in _object_in(text, where).items():
            part, _, setting = key.rpartition(".")
            said.setdefault(part or "transformer", {})[setting] = value
    elif (beside := settings_beside(file)) is not None:
        said["transformer"] = _object_in(read_text(beside), str(beside))
    return said


def _object_in(text: str, where: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise UsageError(f"{where} is no JSON object, which says how a LoRA is scaled")
    return settings


def _scales_in(settings: Mapping[str, Any]) -> Scales:
    return Scales(
        settings.get("lora_alpha"),
        settings.get("alpha_pattern") or {},
        bool(settings.get("use_rslora")),
    )


def settings_beside(file: Path) -> Path | None:
    """Returns peft's file of settings beside a LoRA that peft has saved; None without one."""
    beside = file.with_name("adapter_config.json")
    return (
        beside
        if file.name == "adapter_model.safetensors" and beside.is_file()
        else None
    )
