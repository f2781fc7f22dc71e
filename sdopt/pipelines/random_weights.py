"""Builds pipelines of published architectures with random weights, directly on their device, without a model hub.

Latency and memory do not depend on the values of the weights. Images do: here they only show numerical agreement.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.pipelines.catalog import part_class, parts_in, read_json
from sdopt.pipelines.parts import Pipeline, kept_in_float32, unwrapped
from sdopt.pipelines.weights import random_tokenizer

if TYPE_CHECKING:
    import torch

_POOL = 2**24 + 43  # a prime, so that no layer's rows align with it


def build_pipeline(
    folder: Path, cls: Any, device: str, dtype: torch.dtype, **given: Any
) -> Pipeline:
    """Builds the pipeline that a folder of configurations describes.

    Arguments of the class that are `given` are passed on instead of built.
    """
    index = read_json(folder / "model_index.json")
    normal = _pool().to(device)
    for name, value in index.items():
        if name in given or name.startswith("_"):
            continue
        if not isinstance(value, list):
            given[name] = value
        elif value[0] is None:
            given[name] = None
        elif name.startswith("tokenizer"):
            given[name] = random_tokenizer(folder / name, *value)
        elif name == "scheduler":
            given[name] = part_class(*value).from_pretrained(folder / name)
        else:
            network = empty_network(folder / name, *value)
            _draw(network, name, normal, device, dtype)
            given[name] = network
    return cls(**given)


def random_network(
    folder: Path, library: str, class_name: str, name: str, dtype: torch.dtype
) -> torch.nn.Module:
    """Builds one network on the CPU, with the weights that the part of this name would have in a pipeline."""
    network = empty_network(folder, library, class_name)
    _draw(network, name, _pool(), "cpu", dtype)
    return network


def empty_network(folder: Path, library: str, class_name: str) -> torch.nn.Module:
    """Builds the network that a configuration describes, with parameters on the meta device and buffers in place."""
    cls = part_class(library, class_name)
    # A class of transformers has a class for its configuration, as AltDiffusion's text encoder does too.
    has_config = hasattr(cls, "config_class")
    return _empty(
        cls,
        cls.config_class.from_pretrained(folder)
        if has_config
        else cls.load_config(folder, local_files_only=True),
    )


def _empty(cls: Any, config: Any) -> torch.nn.Module:
    from accelerate import init_empty_weights

    # Buffers are computed, not learned: with the parameters they would be lost on the meta device.
    with init_empty_weights(include_buffers=False):
        network: torch.nn.Module = (
            cls(config) if hasattr(cls, "config_class") else cls.from_config(config)
        )
    # Each name of a shared parameter has become a parameter of its own: T5 has its embeddings by two names.
    tie = getattr(network, "tie_weights", None)
    if tie is not None:
        tie()
    return network.eval()


def empty_part(folder: Path, name: str) -> torch.nn.Module:
    """Builds the network `name` of a pipeline's folder, with parameters on the meta device."""
    return empty_network(folder / name, *parts_in(folder)[name])


def empty_like(network: Any) -> torch.nn.Module:
    """Builds a network as another one was built, with parameters on the meta device."""
    plain = unwrapped(network)
    return _empty(type(plain), plain.config)


def _pool() -> torch.Tensor:
    """Draws the standard normal numbers, the same on every machine, from which all parameters are sliced.

    Drawing each of billions of weights would take longer on a CPU than everything else in a short study.
    """
    import torch

    return torch.randn(_POOL, generator=torch.Generator().manual_seed(0))


def _draw(
    network: torch.nn.Module,
    prefix: str,
    normal: torch.Tensor,
    device: str,
    dtype: torch.dtype,
) -> None:
    """Gives every parameter its values, in its final type and on its device.

    Weights of linear layers and convolutions have variance 1 / fan-in (LeCun et al. 1998, *Efficient BackProp*), so
    that a layer keeps the scale of its input; embeddings have variance 1, normalisations are the identity, biases 0.
    Every branch of these networks begins with a normalisation, so only the sum of the branches grows, with the root of
    their number: far below the largest number of half precision.
    """
    import torch

    drawn: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    in_float32 = kept_in_float32(network, dtype)
    for path, module in network.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in drawn:
                module.register_parameter(name, drawn[parameter])
                continue
            full = f"{path}.{name}" in in_float32
            values = torch.empty(
                parameter.shape, dtype=torch.float32 if full else dtype, device=device
            )
            if parameter.ndim >= 2:
                embedding = isinstance(module, torch.nn.Embedding)
                scale = (
                    1.0
                    if embedding
                    else 1 / math.sqrt(parameter.numel() / parameter.shape[0])
                )
                _fill(values.view(-1), normal, scale, f"{prefix}.{path}.{name}")
            else:
                values.fill_(name == "weight")
            drawn[parameter] = torch.nn.Parameter(values)
            module.register_parameter(name, drawn[parameter])
    network.to(device)  # the buffers
    for module in network.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            is_stored = name not in module._non_persistent_buffers_set
            if is_stored and buffer.is_floating_point():
                # As files are loaded: the positions of SD 3.5 take 0.8 GiB in float32.
                module.register_buffer(name, buffer.to(dtype))


def _fill(values: torch.Tensor, normal: torch.Tensor, scale: float, name: str) -> None:
    import torch

    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % _POOL
    filled = 0
    while filled < values.numel():
        count = min(values.numel() - filled, _POOL - start)
        # Scaled before rounding, so that every type holds the same numbers as closely as it can.
        torch.mul(
            normal[start : start + count], scale, out=values[filled : filled + count]
        )
        filled, start = filled + count, 0
