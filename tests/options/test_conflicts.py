"""What options conflict with: on a device, with a model, a workload and other options, where all packages are there."""

import shutil
from importlib.metadata import PackageNotFoundError
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from sdopt.errors import UsageError
from sdopt.hardware.device import Device
from sdopt.options.declarations import outdated
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from tests.fixtures import CPU, Compose
from tests.options.hosts import card
from tests.pipelines.single_file import edit

CARD = card()

TWO = "workload.batch_size=2 workload.prompt_count=2"
LARGE = "workload.size=96"
"""The VAE of the packaged model has tiles of 64 pixels: 96 take two each way."""
TEN = "workload.steps=10"
SD15, SDXL = "model=sd15 model.weights=random", "model=sdxl model.weights=random"
HALF_TASK = "task=inpaint task.strength=0.5"
BLOCKS = "memory.group_offload.offload_type=block_level"
NO_STREAM = "memory.group_offload.use_stream=false"
TWO_BLOCKS = "memory=group_offload memory.group_offload.num_blocks_per_group=2"
FIXED = f"precision=fp16_vae_fix {SDXL}"
DEEPSPEED, BY_DEEPSPEED = (
    f"attention=deepspeed precision=fp16 {SD15}",
    f"compiler=deepspeed {SD15}",
)
TINY, TILED = (
    "memory=tiny_vae memory.tiny_vae",
    "memory=vae_tiling memory.vae_tiling.tile_size",
)
ON_CUDA = "cudnn_benchmark|expandable_segments|tunable_op|coordinate_descent"
INDUCTORS = "inductor|inductor_dynamic|regional|whole_step"
REPLAYED = "compiler=inductor compiler.mode=reduce-overhead"


def case(overrides: str, *reasons: str, on: Device = CPU) -> list[Any]:
    """Overrides, each with every one of its values (`a|b`), and a part of each conflict that they have."""
    words = [
        [f"{key}={value}" for value in values.split("|")]
        for key, _, values in (word.partition("=") for word in overrides.split())
    ]
    return [
        pytest.param(each, on, reasons, id=f"{' '.join(each)} on {on.type}")
        for each in product(*words)
    ]


CACHING = [
    case(
        "caching=deepcache|first_block",
        "the first step skips nothing: set workload.steps to 2 or more",
    ),
    case(
        "caching=spectrum workload.steps=4",
        "all of 4 steps run, and none is forecast: set workload.steps to ",
    ),
    case(
        f"caching=first_block compiler=trace workload.batch_size=2 {TEN}",
        "each of 2 images decides for itself, and",
    ),
    case(
        f"caching=deepcache caching.branch=4 {TEN}",
        "caching.branch=4: this model has the branches 0 to 3",
    ),
    case("caching=pyramid_attention", "no step of 1 reuses an output"),
    case(
        "caching=pyramid_attention caching.start=0.5 workload.steps=3",
        "between the shares 0.5 and 0.9: set ",
    ),
    case(
        f"caching=pyramid_attention caching.spatial=null caching.cross=null {TEN}",
        "caching.spatial and caching.cross are both null",
        "no step of 10 reuses an output",
    ),
    case(
        f"caching=guidance_interval caching.start=0 {TEN} caching.stop=1",
        "all of 10 steps lie between",
    ),
    case(
        f"caching=guidance_interval workload.guidance_scale=1 {TEN}",
        "there is no guidance to skip",
    ),
    case(
        f"caching=guidance_interval caching.start=0.9 {TEN}",
        "caching.start=0.9 must be less than",
    ),
    case(
        f"caching=pyramid_attention compiler=inductor {TEN}",
        "choose compiler=eager, or caching=deepcache",
    ),
    case(
        f"caching=deepcache|first_block|guidance_interval|spectrum compiler=inductor {TEN}"
    ),
    case(f"caching=deepcache compiler=regional {TEN}"),
    # Steps that a task leaves out do not count.
    case(f"caching=deepcache|pyramid_attention {HALF_TASK} workload.steps=4"),
    case(
        f"{SDXL} caching=tome",
        "attention only from a downsampling by 2 on: set caching.max_downsample=2",
    ),
    case(f"{SDXL} caching=tome caching.max_downsample=2|4"),
    case(
        "caching=tome caching.max_downsample=8 workload.size=8",
        "merges none of 1 tokens: set a larger workload.size",
    ),
    case(
        "caching=tome caching.max_downsample=8 caching.ratio=0.01",
        "merges none of 64 tokens: set caching.ratio to 0.016 or more",
    ),
    case(
        f"caching=deepcache {HALF_TASK} workload.steps=3",
        "set workload.steps to 4 or more",
    ),
]

SANA, QWEN = (
    f"model={name} model.weights=random workload.steps=4"
    for name in ("sana_1600m", "qwen_image")
)
"""Models whose VAEs halve an image five times, and have tiles of another default."""

MEMORY = [
    case(
        "memory=sequential_guidance workload.guidance_scale=1",
        "there is no guidance, and so no second half",
    ),
    case(
        "memory=sequential_guidance caching=deepcache|guidance_interval workload.steps=5",
        "caching=none or spectrum",
    ),
    case(
        "memory=sequential_guidance compiler=trace",
        "choose compiler=eager, inductor or regional",
    ),
    case(
        "memory=precomputed_embeddings model=emoji_dit memory.precomputed_embeddings.max_sequence_length=8",
        "without it, 24 tokens are read: set model.max_sequence_length=8, which",
    ),
    case(
        "memory=precomputed_embeddings model=emoji_dit memory.precomputed_embeddings.max_sequence_length=24|null"
    ),
    case(
        "memory=vae_slicing",
        "needs a batch of several images: set workload.batch_size to 2 or more",
    ),
    case(f"memory=vae_slicing {TWO}"),
    case("memory=vae_slicing workload.images_per_prompt=2"),
    case("memory=vae_tiling", "a tile of 64 pixels holds the whole image of 64"),
    case(f"{SANA} {TILED}=160", "tile_size=160: must be a multiple of 128"),
    case(f"{SANA} {TILED}=256"),
    case(f"{QWEN} memory=vae_tiling workload.size=512"),
    case(
        f"{QWEN} memory=vae_tiling workload.size=256",
        "a tile of 256 pixels holds the whole image of 256",
    ),
    case(f"memory=vae_tiling {LARGE}"),
    case(f"{TILED}=96 {LARGE}", "a tile of 96 pixels holds the whole image of 96"),
    case(
        f"{TILED}=68 {LARGE}",
        "memory.vae_tiling.tile_size=68: must be a multiple of 32",
    ),
    case(
        f"{TILED}=80 {LARGE}",
        "memory.vae_tiling.tile_size=80: must be a multiple of 32",
    ),
    case(f"{TILED}=96 workload.size=128"),
    case(f"memory=[vae_tiling,tiny_vae] memory.vae_tiling.tile_size=72 {LARGE}"),
    case(
        f"memory=[vae_tiling,tiny_vae] memory.vae_tiling.tile_size=72 {LARGE} task=img2img workload.steps=2",
        "memory.vae_tiling.tile_size=72: must be a multiple of 64",
        "tiles of a start image to 4 channels, and this model has 8: choose one of the two options",
    ),
    case(
        f"memory=[tiny_vae,vae_tiling] {LARGE}",
        "a tile of 512 pixels holds the whole image of 96",
    ),
    case(f"memory=[vae_tiling,tiny_vae] memory.vae_tiling.tile_size=64 {LARGE}"),
    case(
        f"memory=[vae_tiling,tiny_vae] memory.vae_tiling.tile_size=64 {LARGE} workload.steps=2 task=img2img|inpaint",
        "tiles of a start image to 4 channels, and this model has 8: choose one of the two options",
    ),
    case(
        f"{TINY}.path={ARCHITECTURES}/taesd",
        f"memory.tiny_vae.path={ARCHITECTURES}/taesd: ",
    ),
    case(
        f"{TINY}.path={PACKAGED}/tiny_autoencoder {SD15}",
        "it has latent_channels=8, and the model's own VAE latent_channels=4",
    ),
    case(f"{TINY}.path=/nowhere", "/nowhere/config.json"),
    case(
        f"{TINY}.path={PACKAGED}/emoji/vae",
        "is of class AutoencoderKL, and must be an AutoencoderTiny",
    ),
    case(f"{TINY}.path=/a memory.tiny_vae.hub_id=b/c", "set only one of them"),
    case(
        "memory=layerwise_casting compiler=inductor",
        "its hooks would cast weights inside compiled code",
    ),
]

OFFLOAD = [
    case(
        "memory=model_offload|sequential_offload",
        "offloading to host memory needs a CUDA device",
    ),
    case("memory=model_offload|sequential_offload|group_offload", on=CARD),
    case("memory=group_offload"),
    case(
        "memory=group_offload memory.group_offload.wait_in=memory",
        "choose wait_in=disk",
    ),
    case(
        "memory=group_offload memory.group_offload.use_stream=true",
        "use_stream=true: needs a CUDA device",
    ),
    case(
        "memory=[model_offload,group_offload]",
        "memory=model_offload: offloads the same weights as memory.group_offload: choose one of them",
        "memory=group_offload: offloads the same weights as memory.model_offload: choose one of them",
        on=CARD,
    ),
    case(
        "memory=model_offload|sequential_offload|group_offload compiler=inductor",
        "would move weights inside compiled code: choose ",
        on=CARD,
    ),
    # Streams follow an order of layers that tiles and caches change, and wait for nothing in a list of blocks.
    case(f"memory=[group_offload,vae_tiling] {LARGE}", f"set {NO_STREAM}", on=CARD),
    case(f"memory=[group_offload,vae_tiling] {LARGE}"),
    case(f"memory=[group_offload,tiny_vae] {BLOCKS}", f"set {NO_STREAM}", on=CARD),
    case(f"memory=[group_offload,tiny_vae] {BLOCKS} {NO_STREAM}", on=CARD),
    case("memory=[group_offload,tiny_vae]", on=CARD),
    case(
        f"memory=group_offload caching=deepcache|first_block|pyramid_attention {TEN}",
        f"changes with caching: set {NO_STREAM}",
        on=CARD,
    ),
    case(
        f"model=emoji_dit memory=group_offload caching=dbcache {TEN}",
        f"changes with caching: set {NO_STREAM}",
        on=CARD,
    ),
    case(f"memory=group_offload caching=deepcache {TEN} {NO_STREAM}", on=CARD),
    case("memory=group_offload caching=guidance_interval", on=CARD),
    # diffusers would not heed the number.
    case(TWO_BLOCKS, "need offload_type=block_level and use_stream=false"),
    case(
        f"{TWO_BLOCKS} {BLOCKS}",
        "need offload_type=block_level and use_stream=false",
        on=CARD,
    ),
    case(f"{TWO_BLOCKS} {BLOCKS} {NO_STREAM}", on=CARD),
    case(f"{TWO_BLOCKS} {BLOCKS}"),
    case(
        "memory=sequential_offload precision=autocast_fp16",
        "autocast would keep a copy of a layer",
        on=CARD,
    ),
    case(
        "memory=sequential_offload precision=autocast_fp16 grad_mode=inference_mode",
        on=CARD,
    ),
    case("memory=sequential_offload precision=fp16_autocast", on=CARD),
    case(
        "memory=group_offload lora=hotswap",
        "would restore the weights from before lora=hotswap: choose lora=loaded",
    ),
    case(
        "memory=group_offload layout=channels_last",
        "stores only contiguous weights: choose layout=contiguous",
    ),
    case("memory=group_offload layout=channels_last", on=CARD),
    case(
        "memory=group_offload precision=int8_torchao",
        "safetensors cannot store TorchAO's quantized weights",
    ),
    # diffusers casts the VAE in each call.
    case(
        f"{SDXL} precision=fp16 memory=sequential_offload|group_offload",
        "fp16_vae_fix or bf16",
        on=CARD,
    ),
    case(
        f"{SDXL} precision=fp16_vae_fp32|fp16_vae_fix|bf16 memory=sequential_offload|group_offload",
        on=CARD,
    ),
    case(f"{SDXL} precision=fp16 memory=model_offload", on=CARD),
]

PRECISION = [
    case("precision=int8_torchao|int8_sdnq", on=card(8, 0)),
    case("precision=fp8_torchao|fp8_sdnq", on=card(8, 9)),
    case(
        "precision=fp8_torchao|fp8_sdnq",
        "; precision.activations=false quantizes only weights",
    ),
    case("precision=fp8_torchao|fp8_sdnq precision.activations=false"),
    case("precision=fp8_torchao", "needs compute capability 8.9", on=card(8, 0)),
    case(
        "precision=int8_sdnq",
        "capability",
        "choose precision.others=float16",
        on=card(7, 0),
    ),
    case("precision=int8_torchao precision.others=float16", on=card(7, 5)),
    case(
        "precision=fp8_torchao precision.others=float16|float32",
        "choose precision.others=bfloat16",
        on=CARD,
    ),
    case(
        "precision=fp8_torchao precision.others=float16 precision.activations=false",
        on=CARD,
    ),
    case("precision=fp8_sdnq precision.others=float16", on=CARD),
    case(
        "precision=int8_torchao|int8_sdnq memory=layerwise_casting",
        "would cast the quantized weights",
    ),
    case(
        "precision=int8_torchao|int8_sdnq grad_mode=enabled",
        "a quantized weight does not support autograd",
    ),
    case(
        "precision=int8_torchao|int8_sdnq lora=hotswap",
        "another LoRA cannot replace quantized weights",
    ),
    case(
        "precision=int8_sdnq lora=loaded", "choose lora=fused or precision=int8_torchao"
    ),
    case(
        "precision=uint4_sdnq precision.activations=true",
        "set precision.activations=false",
    ),
    case(
        "memory=[quantized_text_encoders,precomputed_embeddings]",
        "removes the text encoders: choose one of them",
    ),
    case(
        "memory=quantized_text_encoders lora=loaded",
        "SDNQ replaces the layers that a LoRA wraps",
    ),
    case(
        "memory=quantized_text_encoders compiler=inductor compiler.targets=[text_encoder]",
        "cannot be in a graph: choose compiler.targets=[denoiser,decoder]",
    ),
    case("memory=quantized_text_encoders compiler=trace"),
    case(
        "precision=int8_sdnq layout=channels_last",
        "without a layout: choose layout=contiguous",
    ),
    case("precision=int8_sdnq layout=channels_last precision.convolutions=false"),
    case("precision=int8_torchao layout=channels_last"),
    case(
        "precision=int8_torchao compiler=regional",
        "cannot compile TorchAO's layers on a CPU",
    ),
    case("precision=int8_torchao compiler=regional", on=CARD),
    case("precision=int8_torchao compiler=inductor"),
    case(
        "precision=int8_torchao compiler=cuda_graphs",
        "read inputs on the host unless compiled",
        on=CARD,
    ),
    case(
        "precision=int8_torchao compiler=cuda_graphs precision.activations=false",
        on=CARD,
    ),
    case(
        "precision=int8_torchao compiler=cuda_graphs compiler.targets=[decoder]",
        on=CARD,
    ),
    case("precision=fp8_torchao|int8_sdnq compiler=cuda_graphs", on=CARD),
    case(
        "precision=fp16_vae_fp32 memory=tiny_vae", "memory=tiny_vae replaces this VAE"
    ),
    case("precision=fp16_vae_fp32 precision.weights=float32", "choose precision=fp32"),
    case(
        "precision=fp16_vae_fp32 precision.autocast=float16",
        "choose precision.autocast=null",
    ),
    case(FIXED),
    case("precision=fp16_vae_fix", "and the model is not SDXL"),
    case(f"{FIXED} memory=tiny_vae", "memory=tiny_vae replaces this VAE"),
    case(f"{FIXED} precision.path=/nowhere", "/nowhere/config.json"),
]

ENVIRONMENT = [
    case(
        f"environment={ON_CUDA} compiler=inductor", "needs a CUDA device; this runs on"
    ),
    case(f"environment={ON_CUDA} compiler=inductor", on=CARD),
    case("environment=[cudnn_benchmark,expandable_segments]", on=CARD),
    case(
        "environment=inductor_freezing|coordinate_descent compiler=eager|trace|aot",
        "does not read this setting of Inductor: choose compiler=inductor",
        on=CARD,
    ),
    case(
        "environment=inductor_freezing compiler=inductor grad_mode=enabled",
        "with gradients cannot be",
        on=CARD,
    ),
    case(
        "environment=inductor_freezing compiler=inductor lora=hotswap",
        "would not change with the LoRA",
        on=CARD,
    ),
    case(
        "environment=inductor_freezing compiler=inductor memory=group_offload",
        "memory.group_offload moves or packs weights",
        "its hooks would move weights",
        on=CARD,
    ),
]

COMPILERS = [
    case(
        f"compiler={INDUCTORS} attention=math",
        "choose attention=vanilla, or another compiler",
    ),
    case(f"compiler={INDUCTORS} attention=vanilla"),
    case(
        "compiler=aot attention=sliced|sliced_max",
        "nothing would show the slices: choose compiler=inductor",
    ),
    case(
        "compiler=inductor_dynamic attention=sliced|sliced_max",
        "compiled anew: choose compiler=inductor",
    ),
    case("compiler=inductor attention=sliced|sliced_max"),
    case(
        "compiler=inductor_dynamic grad_mode=enabled",
        "autograd records for any shape: choose grad_mode=no_grad",
    ),
    case("compiler=inductor grad_mode=enabled"),
    case(
        "compiler=trace|onnxruntime|openvino precision=autocast_fp16 attention=math grad_mode=enabled",
        "selects its own attention kernel: choose attention=default",
        "does not support autograd (grad_mode=enabled): choose grad_mode=no_grad or inference_mode",
        "runs without autocast: choose precision=fp16",
    ),
    case(
        "compiler=trace|aot|onnxruntime|openvino lora=hotswap",
        "lora=hotswap would draw wrong images: choose ",
    ),
    case("compiler=trace|aot lora=loaded|fused"),
    case("compiler=inductor lora=hotswap"),
    case(
        "compiler=onnxruntime|openvino precision=bf16",
        "through NumPy, which has no bfloat16: choose precision=fp32",
    ),
    case("compiler=onnxruntime|openvino", "choose hardware=cpu", on=CARD),
    case(
        "compiler=inductor|cuda_graphs compiler.targets=[]",
        "name at least one of text_encoder, denoiser",
        on=CARD,
    ),
    case(
        "compiler=cuda_graphs memory=precomputed_embeddings",
        "removes the text encoder",
        on=CARD,
    ),
    case(
        "compiler=cuda_graphs compiler.targets=[denoiser] memory=precomputed_embeddings",
        on=CARD,
    ),
    case(
        f"{SDXL} compiler=cuda_graphs precision=fp16",
        "in each call, which moves its weights",
        on=CARD,
    ),
    case(
        f"{SDXL} compiler=cuda_graphs precision=int8_sdnq precision.others=float16",
        "moves its weights",
        on=CARD,
    ),
    case(
        f"{SDXL} compiler=cuda_graphs precision=fp16 compiler.targets=[denoiser]",
        on=CARD,
    ),
    case(
        f"{SDXL} compiler=cuda_graphs precision=bf16|fp16_vae_fp32|fp16_vae_fix",
        on=CARD,
    ),
    case(f"{SDXL} compiler=cuda_graphs precision=fp16 memory=tiny_vae", on=CARD),
    case(
        f"{SDXL} {REPLAYED} precision=fp16 compiler.targets=[denoiser,decoder]",
        "moves its weights",
        on=CARD,
    ),
    case(f"{SDXL} {REPLAYED} precision=fp16", on=CARD),
    case(
        f"{REPLAYED} grad_mode=enabled",
        "a CUDA graph does not support autograd",
        on=CARD,
    ),
    case(
        "compiler=whole_step scheduler=dpmpp_2m|plms|unipc",
        "is not a sum of latents and prediction: choose ",
    ),
    case(
        "compiler=whole_step +scheduler.options.clip_sample=true",
        "DDIMScheduler has clip_sample=true, which makes",
    ),
    case(
        "compiler=whole_step +scheduler.options.thresholding=true",
        "has thresholding=true, which makes the step",
    ),
    case(f"{BY_DEEPSPEED} precision=fp16", on=CARD),
    case(
        f"{BY_DEEPSPEED} precision=bf16",
        "only in float16: choose precision=fp16",
        on=CARD,
    ),
    case(
        f"{BY_DEEPSPEED} precision=fp16 attention=vanilla",
        "choose attention=default",
        on=CARD,
    ),
    case(
        f"{BY_DEEPSPEED} precision=fp16 workload.size=768",
        "images of up to 512 pixels",
        on=CARD,
    ),
    case(f"{BY_DEEPSPEED} precision=fp16 model=sdxl", "not with SDXL", on=CARD),
    case(
        f"{BY_DEEPSPEED} precision=fp16 grad_mode=enabled",
        "choose grad_mode=no_grad",
        on=CARD,
    ),
    case(
        "compiler=deepspeed precision=fp16",
        "multiples of 64 latents, and this size",
        on=CARD,
    ),
]

ATTENTION = [
    case("attention=xformers", on=CARD),
    case("attention=xformers", "needs a CUDA device"),
    case(
        "attention=xformers",
        "no float32 operator for this card: choose precision=fp16 or bf16",
        on=card(10, 0),
    ),
    case("attention=xformers precision=bf16", on=card(12, 0)),
    case("attention=xformers", on=card(xformers=True)),
    case(
        "attention=xformers",
        "this build of xFormers is for another version",
        on=card(xformers=False),
    ),
    case(
        "attention=sliced attention.slice_size=5",
        "a layer of this model has only 4 heads; choose at most 4",
    ),
    case("attention=sliced attention.slice_size=4"),
    case(f"{SDXL} attention=sliced attention.slice_size=10"),
    case("attention=fused_qkv lora=loaded", "would ignore the LoRA: choose lora=fused"),
    case(DEEPSPEED, on=CARD),
    case(f"{DEEPSPEED} workload.size=768", on=CARD),
    case(f"{DEEPSPEED} model=sdxl|sd21_base", on=CARD),
    case(
        f"{DEEPSPEED} model=sd21_base workload.size=768",
        "layers of 144 latents",
        on=CARD,
    ),
    case(f"{DEEPSPEED} model=sd21", "its attention in float32", "144 latents", on=CARD),
    case(
        "attention=deepspeed precision=fp16",
        "and this size has layers of 16 latents",
        on=CARD,
    ),
    case(f"{DEEPSPEED} precision=fp32|fp16_autocast", "choose precision=fp16", on=CARD),
    case(f"{DEEPSPEED} compiler=inductor", "choose compiler=eager", on=CARD),
    case(f"{DEEPSPEED} grad_mode=enabled", "does not support autograd", on=CARD),
    case(
        f"{DEEPSPEED} caching=pyramid_attention {TEN}",
        "which attention=deepspeed replaces",
        on=CARD,
    ),
    case(f"{DEEPSPEED} caching=tome", on=CARD),
    case(
        f"{DEEPSPEED} caching=tome caching.ratio=0.3",
        "leaves 2868 of 4096 in some layers",
        on=CARD,
    ),
    # Heads of 160 channels, of which cuDNN takes 128, more on Hopper, or as many as were probed.
    *(
        case(
            f"{SD15} precision=fp16 attention=cudnn",
            "this model has heads of 160: choose attention=default",
            on=on,
        )
        for on in (
            card(8),
            card(8, 9, cudnn_head_dimension=128),
            card(cudnn_head_dimension=128),
            card(10),
            card(12),
        )
    ),
    *(
        case(f"{SD15} precision=fp16 attention=cudnn", on=on)
        for on in (CARD, card(cudnn_head_dimension=160))
    ),
    case("precision=fp16 attention=cudnn", on=card(8)),
    case(f"{SDXL} precision=fp16 attention=cudnn", on=card(8)),
    case("model=sd21 model.weights=random precision=fp16 attention=cudnn", on=card(8)),
    # Layers of 8-bit weights compute attention in the type of the others.
    case(
        "precision=int8_torchao precision.others=float32 attention=flash",
        "the flash kernel needs float16 or bfloat16",
        on=card(8),
    ),
    case("precision=int8_torchao precision.others=float16 attention=flash", on=card(8)),
    case(
        "precision=tf32 attention=flash",
        "precision=tf32: ",
        "attention=flash: ",
        "attention=flash: ",
        on=card(7, 5),
    ),
    case(
        "precision=bf16 attention=cudnn",
        "precision=bf16: ",
        "attention=cudnn: ",
        on=card(7, 5),
    ),
    case("precision=fp16 attention=mem_efficient compiler=inductor", on=card(7, 5)),
    case("precision=fp32_ieee", "precision=fp32_ieee: ", on=card(7, 5)),
    case(
        "compiler=inductor attention=mem_efficient",
        "compiler=inductor: ",
        on=card(6, 1),
    ),
    case(
        "precision=fp16 attention=mem_efficient",
        "attention=mem_efficient: ",
        on=card(3, 7),
    ),
    case("attention=flash", "attention=flash: ", on=card(8)),
    case("attention=cudnn precision=tf32", "attention=cudnn: ", on=card(8)),
    case("attention=flash precision=autocast_fp16", on=card(8)),
    case(
        "attention=cudnn precision=bf16 compiler=inductor layout=channels_last", on=CARD
    ),
    case("precision=tf32 attention=mem_efficient", on=CARD),
]


PATCH = [
    case("patch=function", "names the functions"),
    case("patch=/nowhere/mine.py:f", "cannot be read"),
    case(f"patch=[{__file__}:case,{__file__}:CARD]", "defines no function CARD"),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages are there."""
    monkeypatch.setattr("sdopt.options.declarations.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("overrides", "device", "reasons"),
    chain(
        *CACHING,
        *MEMORY,
        *OFFLOAD,
        *PRECISION,
        *ENVIRONMENT,
        *COMPILERS,
        *ATTENTION,
        *PATCH,
    ),
)
def test_each_is_named(
    variant: Compose, overrides: list[str], device: Device, reasons: list[str]
) -> None:
    found = variant(*overrides).conflicts(device)
    assert len(found) == len(reasons), found
    for said, reason in zip(found, reasons, strict=True):
        assert reason in said


def test_unknown_targets(variant: Compose) -> None:
    for option in ("inductor", "cuda_graphs"):
        with pytest.raises(
            Exception, match="Input should be 'text_encoder', 'denoiser' or 'decoder'"
        ):
            variant(f"compiler={option}", "compiler.targets=[unet]")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the packaged model."""
    return Path(shutil.copytree(PACKAGED / "emoji", tmp_path / "model"))


_NO_PIECES = "diffusers' AsymmetricAutoencoderKL does not support it"


@pytest.mark.parametrize(
    ("part", "changes", "option", "reason"),
    [
        (
            "vae",
            {"_class_name": "AsymmetricAutoencoderKL"},
            "memory=vae_slicing",
            _NO_PIECES,
        ),
        (
            "vae",
            {"_class_name": "AsymmetricAutoencoderKL"},
            "memory=vae_tiling",
            _NO_PIECES,
        ),
        (
            "unet",
            {"attention_head_dim": 1},
            "attention=sliced",
            "only one head, which cannot be halved",
        ),
        (
            "unet",
            {"mid_block_type": None},
            f"caching=deepcache caching.branch=3 {TEN}",
            "has the branches 0 to 2",
        ),
    ],
)
def test_parts_that_an_option_cannot_change(
    variant: Compose,
    model: Path,
    part: str,
    changes: dict[str, Any],
    option: str,
    reason: str,
) -> None:
    edit(model / part / "config.json", **changes)
    chosen = variant(
        "model=folder", f"model.path={model}", *option.split(), *TWO.split(), LARGE
    )
    [found] = chosen.conflicts(CPU)
    assert reason in found


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("memory=tiny_vae", "memory.tiny_vae"),
        (f"precision=fp16_vae_fix {SDXL}", "precision"),
    ],
)
def test_a_vae_of_ones_own_that_cannot_be_loaded(
    variant: Compose, tmp_path: Path, option: str, key: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    chosen = variant(*option.split(), f"{key}.path={tmp_path}")
    [found] = chosen.conflicts(CPU)
    assert (
        f"{key}.path={tmp_path}: no network can be made of its configuration" in found
    )
    with pytest.raises(UsageError, match=f"{key}: {tmp_path}.*: no such file"):
        chosen.files(fetch=False)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("unet", "is of class UNet2DConditionModel, and must be an AutoencoderKL"),
        (
            "vae",
            "is for another model: it has latent_channels=8, and the model's own VAE latent_channels=4",
        ),
    ],
)
def test_a_fixed_vae_of_another_model(variant: Compose, part: str, said: str) -> None:
    found = variant(
        *FIXED.split(), f"precision.path={PACKAGED / 'emoji' / part}"
    ).conflicts(CPU)
    assert f"{PACKAGED / 'emoji' / part}: {said}" in found[0]


def test_a_whole_step_of_a_model_that_clips(variant: Compose, model: Path) -> None:
    config = model / "scheduler" / "scheduler_config.json"
    config.write_text(
        config.read_text().replace('"clip_sample": false', '"clip_sample": true')
    )
    chosen = ("compiler=whole_step", "model=folder", f"model.path={model}")
    [found] = variant(*chosen).conflicts(CPU)
    assert "DDIMScheduler has clip_sample=true" in found
    assert (
        variant(
            *chosen, "scheduler=ddim", "+scheduler.options.clip_sample=false"
        ).conflicts(CPU)
        == []
    )
    assert variant(*chosen, "scheduler=euler").conflicts(CPU) == []


@pytest.mark.parametrize("device", [CPU, card(cuda=None)])
def test_miopen_is_part_of_rocm(
    variant: Compose, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    chosen = variant("environment=miopen_find", "environment.miopen_find.mode=NORMAL")
    [found] = chosen.conflicts(device)
    assert "needs an AMD GPU and a ROCm build of PyTorch" in found
    monkeypatch.setattr("torch.version.hip", "7.1")
    assert bool(chosen.conflicts(device)) == (device is CPU)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_need_the_allocator_of_pytorch(
    variant: Compose, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "backend:cudaMallocAsync")
    [found] = variant("environment=expandable_segments").conflicts(CARD)
    assert f"{name}=backend:cudaMallocAsync chooses CUDA's own allocator" in found


def test_packages_count_where_a_variant_runs(
    variant: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdopt.options.declarations.find_spec", lambda name: None)
    assert (
        variant("attention=xformers").conflicts(CARD) == []
    )  # a card that is planned for
    [found] = variant("attention=xformers").conflicts(card(8, 0, known=True))
    assert found == "attention=xformers: needs xformers: pip install 'sdopt[xformers]'"


@pytest.mark.parametrize(
    ("installed", "works"),
    [("0.10.0+cu124", False), ("0.18.0.dev1", True), (None, True)],
)
def test_packages_that_are_too_old(
    variant: Compose,
    monkeypatch: pytest.MonkeyPatch,
    installed: str | None,
    works: bool,
) -> None:
    """The second is a build of last night; the third has modules, but no name."""

    def version(_name: str) -> str:
        if installed is None:
            raise PackageNotFoundError
        return installed

    def refused() -> bool:
        raise ImportError(f"Found version {installed}")

    monkeypatch.setattr(
        "sdopt.options.declarations.requires",
        lambda _: ["torch", 'torchao>=0.18; extra == "torchao"'],
    )
    monkeypatch.setattr("sdopt.options.declarations.version", version)
    monkeypatch.setattr("peft.import_utils.is_torchao_available", refused)
    outdated.cache_clear()
    found = [
        *variant("precision=int8_torchao").conflicts(CPU),
        *variant("lora=fused").conflicts(CPU),
    ]
    outdated.cache_clear()
    way = "pip install 'sdopt[torchao]'"
    wanted = [
        f"precision=int8_torchao: needs torchao>=0.18 instead of {installed}: {way}",
        f"lora=fused: peft loads no LoRA here (Found version {installed}): {way}, or pip uninstall torchao",
    ]
    assert found == ([] if works else wanted)
