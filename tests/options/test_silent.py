"""What would be wrong without a word if it were not refused: one row a situation, beside a neighbour that runs.

Each of these runs without an error, or would run: what comes out is another image, or an option without effect. A row
names the option that refuses, and not its words, so that these can change and the refusal cannot go.
"""

import pytest

from sdopt.hardware.device import Device
from tests.fixtures import CPU, Compose
from tests.options.hosts import card

CARD = card()

SDXL = "model=sdxl model.weights=random"
TEN = "workload.steps=10"
TILES = "memory=vae_tiling workload.size"
PAIR = "workload.batch_size=2 workload.prompt_count=2"
FREEZING = "environment=inductor_freezing compiler=inductor"

OTHER_IMAGES = [
    ("compiler", CPU, "compiler=trace lora=hotswap", "compiler=trace lora=loaded"),
    ("compiler", CPU, "compiler=aot lora=hotswap", "compiler=aot lora=loaded"),
    (
        "compiler",
        CPU,
        "compiler=onnxruntime lora=hotswap",
        "compiler=onnxruntime lora=loaded",
    ),
    (
        "environment.inductor_freezing",
        CARD,
        f"{FREEZING} lora=hotswap",
        f"{FREEZING} lora=loaded",
    ),
    (
        "memory.group_offload",
        CARD,
        "memory=group_offload lora=hotswap",
        "memory=group_offload lora=loaded",
    ),
    (
        "attention",
        CPU,
        "attention=fused_qkv lora=loaded",
        "attention=fused_qkv lora=fused",
    ),
    (
        "precision",
        CARD,
        "precision=int8_torchao memory=layerwise_casting",
        "precision=int8_torchao",
    ),
    (
        "precision",
        CARD,
        "precision=int8_sdnq lora=loaded",
        "precision=int8_sdnq lora=fused",
    ),
]
"""Another image than the one that was asked for, such as one without the LoRA."""

HIDDEN = [
    (
        "compiler",
        CPU,
        "compiler=trace precision=autocast_fp16",
        "compiler=trace precision=fp16",
    ),
    ("compiler", CPU, "compiler=trace attention=math", "compiler=trace"),
    (
        "compiler",
        CPU,
        "compiler=aot attention=sliced",
        "compiler=inductor attention=sliced",
    ),
    (
        "memory.layerwise_casting",
        CARD,
        "memory=layerwise_casting compiler=inductor",
        "memory=layerwise_casting",
    ),
    (
        "caching",
        CPU,
        f"caching=first_block compiler=trace {PAIR} {TEN}",
        f"caching=first_block {PAIR} {TEN}",
    ),
    (
        "caching",
        CPU,
        f"caching=pyramid_attention compiler=inductor {TEN}",
        f"caching=pyramid_attention {TEN}",
    ),
    (
        "memory.sequential_guidance",
        CPU,
        "memory=sequential_guidance caching=deepcache workload.steps=5",
        "memory=sequential_guidance caching=spectrum workload.steps=20",
    ),
]
"""Two options of which one undoes or hides the other."""

WITHOUT_EFFECT = [
    ("caching", CPU, "caching=deepcache workload.steps=1", f"caching=deepcache {TEN}"),
    (
        "caching",
        CPU,
        "caching=first_block workload.steps=1",
        f"caching=first_block {TEN}",
    ),
    (
        "caching",
        CPU,
        "caching=pyramid_attention workload.steps=1",
        f"caching=pyramid_attention {TEN}",
    ),
    (
        "caching",
        CPU,
        "caching=spectrum workload.steps=4",
        "caching=spectrum workload.steps=20",
    ),
    (
        "caching",
        CPU,
        f"caching=guidance_interval caching.start=0 caching.stop=1 {TEN}",
        f"caching=deepcache {TEN}",
    ),
    (
        "caching",
        CPU,
        f"caching=guidance_interval workload.guidance_scale=1 {TEN}",
        f"caching=guidance_interval workload.guidance_scale=4 {TEN}",
    ),
    (
        "caching",
        CPU,
        f"{SDXL} caching=tome",
        f"{SDXL} caching=tome caching.max_downsample=2",
    ),
    (
        "memory.sequential_guidance",
        CPU,
        "memory=sequential_guidance workload.guidance_scale=1",
        "memory=sequential_guidance workload.guidance_scale=4",
    ),
    ("memory.vae_slicing", CPU, "memory=vae_slicing", f"memory=vae_slicing {PAIR}"),
    ("memory.vae_tiling", CPU, f"{TILES}=64", f"{TILES}=96"),
]
"""Options that would do nothing at the workload, so that their figure would be the baseline's."""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages are there: that one is missing must not be the reason."""
    monkeypatch.setattr("sdopt.options.declarations.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("axis", "device", "wrong", "right"), [*OTHER_IMAGES, *HIDDEN, *WITHOUT_EFFECT]
)
def test_what_would_be_silently_wrong_is_refused(
    variant: Compose, axis: str, device: Device, wrong: str, right: str
) -> None:
    group, _, option = axis.partition(".")
    reasons = variant(*wrong.split()).conflicts(device)
    assert reasons
    assert all(
        reason.startswith((f"{axis}=", f"{group}={option or group}"))
        for reason in reasons
    ), reasons
    assert not variant(*right.split()).conflicts(device)
