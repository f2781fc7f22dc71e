"""The program of a variant, run as it is handed out: its image is the one that a worker made, in plain diffusers."""

import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from PIL import Image
from safetensors.torch import load_file, save_file

from sdopt.config.groups import optimization_options
from sdopt.config.paths import CONF
from sdopt.hardware.device import Device
from sdopt.library.process import ProcessChanges
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from sdopt.pipelines.factory import describe, remember
from sdopt.pipelines.loading import load_pipeline
from sdopt.programs.code import Unwritable, function_code, literal
from sdopt.programs.loading import from_files, tokenizers_of
from sdopt.programs.running import compared, image_of
from sdopt.programs.writer import Written, written
from sdopt.record.choices import quoted
from sdopt.record.programs import Program
from sdopt.reference import LORAS
from sdopt.schema import Model, Scheduler, Task
from sdopt.variant import Variant
from sdopt.worker.draws import draw_of
from sdopt.worker.host import PipelineHost
from tests.command import SMOKE
from tests.fixtures import CPU, Composers
from tests.options.test_lora import kohya
from tests.pipelines.single_file import edit, original_layout

EMOJI = PACKAGED / "emoji"

SMALL = [
    *SMOKE,
    "workload.size=64",
    "workload.steps=3",
    "workload.prompts=[a red apple,a blue fish]",
]
SMALL += ["quality.prompt_count=2"]

SAME, SAME_IN_HALF = 1e-6, 3.05e-5
"""Mean squared differences that rounding explains, as gates have them."""


def of(composer: Composers, *overrides: str, config: Sequence[str] = ()) -> Variant:
    return composer([*SMALL, *overrides], config).variant("it")


def made(variant: Variant, folder: Path) -> tuple[Written, Program]:
    """What a worker makes of a variant, what its program makes, and how far apart they are."""
    changes, quiet = ProcessChanges(), StringIO()
    with changes.noted(), redirect_stderr(quiet), redirect_stdout(quiet):
        host = PipelineHost(variant, CPU)
        host.prepare()
        host.generate(0, draw_of(variant), folder)
    changes.put_back()
    del host
    found = written(variant, CPU)
    # A program composes its options by itself.
    hydra = GlobalHydra.get_state()
    GlobalHydra.instance().clear()
    try:
        with changes.noted(), redirect_stderr(quiet), redirect_stdout(quiet):
            pixels = image_of(found.text)
    finally:
        GlobalHydra.set_state(hydra)
        changes.put_back()
    limit = SAME if "torch.float32" in found.text else SAME_IN_HALF
    return found, compared(
        Program(found.text, found.lines), pixels, folder / "0000_00.png", limit
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model in files of other kinds, a LoRA by kohya's names, pictures and prompts."""
    folder = tmp_path_factory.mktemp("aus dem Netz größer")
    original_layout(
        load_pipeline(Model(), Scheduler(), Task(), "cpu", {"dtype": torch.float32}),
        folder / "dream.safetensors",
    )
    save_file(kohya(), folder / "style.safetensors")
    save_file(
        load_file(folder / "dream.safetensors"),
        folder / "skips.safetensors",
        {"modelspec.encoder_layer": "2"},
    )
    code = (
        "from diffusers import DiffusionPipeline\nfrom sdopt.reference import MODEL\n"
    )
    (folder / "mine.py").write_text(
        code + "def make():\n    return DiffusionPipeline.from_pretrained(MODEL)\n"
    )
    # A name that a package has already, and what lies beside it.
    (folder / "helper_of_mine.py").write_text("SCALE = 0.9\n")
    patch = "from helper_of_mine import SCALE\ndef weaker(pipe):\n    pipe.unet.conv_out.weight.data *= SCALE\n"
    patch += "def freer(pipe):\n    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)\n"
    (folder / "diffusers.py").write_text(patch)
    # As a program leaves it that has put in a scheduler of its own, which clips nothing and does not say so.
    own = (
        Path(shutil.copytree(EMOJI, folder / "own"))
        / "scheduler"
        / "scheduler_config.json"
    )
    config = {
        key: value
        for key, value in json.loads(own.read_text()).items()
        if key != "clip_sample"
    }
    own.write_text(json.dumps(config | {"_class_name": "DPMSolverMultistepScheduler"}))
    edit(
        folder / "own" / "model_index.json",
        scheduler=["diffusers", "DPMSolverMultistepScheduler"],
    )
    # Saved in half precision, which transformers keeps where nothing is said.
    half = load_pipeline(Model(), Scheduler(), Task(), "cpu", {"dtype": torch.float16})
    half.save_pretrained(folder / "half", safe_serialization=True)
    half.save_pretrained(folder / "varied", safe_serialization=True, variant="fp16")
    save_file({"noise": torch.randn((1, 8, 8, 8))}, folder / "noise.safetensors")
    (folder / "prompts.csv").write_text(
        'prompt,negative_prompt\n"it\'s ""big"", a \\ cat","blurry, grey"\na blue fish,red\n'
    )
    y, x = np.mgrid[0:48, 0:96]
    picture = Image.fromarray(
        np.stack([x * 2, y * 4, 255 - x * 2], axis=-1).astype(np.uint8)
    )
    picture.save(folder / "plain.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    picture.save(folder / "turned.jpg", exif=turned)
    Image.fromarray(np.where(x > 48, 255, 0).astype(np.uint8)).save(folder / "mask.png")
    return folder


SITUATIONS = {
    "a single file with a LoRA by other names": "model={files}/dream.safetensors lora=loaded lora.path={files}/style.safetensors precision=bf16 grad_mode=inference_mode",  # noqa: E501
    "a file that says clip skip": "model={files}/skips.safetensors layout=channels_last",
    "a function's pipeline": "model={files}/mine.py:make precision=bf16",
    "a model whose scheduler says nothing of clipping": "model={files}/own scheduler=ddim",
    "weights in half precision, used in single": "model={files}/half precision=fp32 attention=vanilla",
    "negative prompts, quotes and a backslash": "workload.prompts={files}/prompts.csv attention=vanilla",
    "a negative prompt for all": "workload.negative_prompt={quoted} caching=deepcache caching.interval=2",
    "joined projections and a fused LoRA": "attention=fused_qkv lora=fused",
    "two options of diffusers, the later one first": f"attention=fused_qkv lora=fused lora.path={LORAS} lora.weight_name=fxemoji.safetensors lora.scale=0.7",  # noqa: E501
    "a function of a file with the name of a package": "patch={files}/diffusers.py:weaker caching=deepcache",
    "FreeU by a function": "patch={files}/diffusers.py:freer precision=bf16",
    "weights of a variant": "model={files}/varied model.variant=fp16 precision=bf16 workload.size=64",
    "noise from a file": "workload.latents={files}/noise.safetensors workload.batch_size=2 precision=bf16",
    "a small decoder": "memory=[tiny_vae] attention=math layout=channels_last",
    "a LoRA in separate layers, scaled": "lora=loaded lora.scale=-0.4 attention=math",
    "steps left out": "caching=guidance_interval workload.steps=10",
    "a function before what compiles": "patch={files}/diffusers.py:weaker memory=[vae_tiling] workload.size=128",
    "a picture": "task=img2img task.image={files}/plain.png task.strength=0.7",
    "a picture that lies on its side, in half precision": "task=img2img task.image={files}/turned.jpg task.strength=0.7 precision=bf16",  # noqa: E501
    "a picture with a mask": "task=inpaint task.image={files}/plain.png task.mask={files}/mask.png caching=deepcache",
    "noise at each step": "scheduler.class_name=EulerAncestralDiscreteScheduler precision=bf16",
    "timesteps of a scheduler": "scheduler=ays",
    "a batch of several images each": "workload.batch_size=2 workload.images_per_prompt=2 memory=[vae_slicing]",
    "another seed, guidance and size": "workload.seed=12345 workload.guidance_scale=3.25 workload.size=72",
    "no guidance": "workload.guidance_scale=1 attention=vanilla",
    "embeddings in advance": "memory=[precomputed_embeddings] workload.negative_prompt=grey",
    "a key of a default": "layout.memory_format=channels_last grad_mode.mode=inference_mode",
    "tiles of a size": "workload.size=128 memory=[vae_tiling,vae_slicing] memory.vae_tiling.tile_size=64 workload.batch_size=2",  # noqa: E501
    "random weights": "model=emoji model.weights=random attention=vanilla",
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.walk(4)
def test_draws_what_was_measured(
    composer: Composers, files: Path, tmp_path: Path, situation: str
) -> None:
    words = [_word(word, files) for word in SITUATIONS[situation].split(" ")]
    for word in words:
        if ":make" in word:
            model = composer([*SMALL, word]).current.model
            remember(model, describe(model, Task()))
    variant = of(composer, *words)
    assert not variant.conflicts(CPU)
    found, program = made(variant, tmp_path)
    assert program.draws, f"{program.reason}\n{found.text}"


def _word(word: str, files: Path) -> str:
    """A word of a situation as an override; what names a file, or has a quote, is a text in Hydra's quotes."""
    key, _, value = word.partition("=")
    value = value.replace("{files}", str(files)).replace(
        "{quoted}", 'it\'s "grey", \\ or so'
    )
    return f"{key}={quoted(value)}" if "{" in word else word


@pytest.mark.slow
def test_an_option_and_a_key_of_ones_own(
    composer: Composers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is imported from the working folder, where a program does not look by itself."""
    code = (
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from sdopt.options import Contract, Finding, Optimization, Stage, denoiser_of\n"
        "@dataclass(frozen=True)\nclass Scaled(Optimization):\n    stage: ClassVar[Stage] = Stage.ATTENTION\n"
        "    contract: ClassVar[Contract] = Contract.LOSSY\n    factor: float = 1.0\n"
        "    def apply(self, pipe):\n        denoiser_of(pipe).conv_in.weight.data *= self.factor\n"
        "        return lambda trace: Finding(True, 'scaled')\n"
    )
    (tmp_path / "options_of_mine.py").write_text(code)
    groups = tmp_path / "my groups"
    (groups / "attention").mkdir(parents=True)
    (groups / "attention" / "scaled.yaml").write_text(
        "_target_: options_of_mine.Scaled\nfactor: 0.5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = [f"hydra.searchpath=['file://{groups}']"]
    variant = of(composer, "attention=scaled", "attention.factor=0.7", config=own)
    found, program = made(variant, tmp_path / "images")
    assert program.draws, f"{program.reason}\n{found.text}"
    assert f"sys.path.append({literal(str(tmp_path))})" in found.lines
    assert f'"attention.factor=0.7", config_dir={literal(str(groups))}' in found.text


def test_an_option_left_out_is_seen(composer: Composers, tmp_path: Path) -> None:
    """The red path: each of these was lost once, and nothing but the image says so."""
    variant = of(
        composer,
        "caching=deepcache",
        "caching.interval=5",
        "workload.steps=6",
        "workload.negative_prompt=red",
    )
    found, program = made(variant, tmp_path)
    assert program.draws, program.reason
    for lost in ('"caching.interval=5", ', "negative_prompt=negative_prompt, "):
        assert lost in found.text
        hydra = GlobalHydra.get_state()
        GlobalHydra.instance().clear()
        try:
            pixels = image_of(found.text.replace(lost, ""))
        finally:
            GlobalHydra.set_state(hydra)
        assert not compared(program, pixels, tmp_path / "0000_00.png", SAME).draws, lost


@pytest.mark.parametrize("option", ["model_offload", "sequential_offload"])
def test_weights_are_moved_to_the_card_that_was_measured(
    composer: Composers, option: str
) -> None:
    variant = of(composer, f"memory=[{option}]")
    first, second = (
        written(variant, Device("cuda", index)).setup.lines for index in (0, 1)
    )
    assert any(line.endswith("_cpu_offload()") for line in first)
    assert any(line.endswith('_cpu_offload(device="cuda:1")') for line in second)


def _options() -> list[str]:
    return [f"{group}={option}" for group, option in optimization_options()]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["txt2img", "img2img", "inpaint"])
@pytest.mark.parametrize("option", _options())
def test_every_option_with_every_task(
    composer: Composers, tmp_path: Path, option: str, task: str
) -> None:
    torch._dynamo.reset()
    strength = [] if task == "txt2img" else ["task.strength=0.75"]
    for more in (
        [],
        ["workload.steps=10"],
        ["workload.batch_size=2", "workload.size=96"],
    ):
        variant = of(composer, option, f"task={task}", *strength, *more)
        if not variant.conflicts(CPU):
            break
    else:
        pytest.skip("; ".join(variant.conflicts(CPU)))
    found, program = made(variant, tmp_path)
    assert program.draws or option in NOT_OUTSIDE, f"{program.reason}\n{found.text}"


NOT_OUTSIDE: tuple[str, ...] = ()
"""Options that only a worker can use, so that no code is shown for them."""

SCHEDULERS = [path.stem for path in sorted((CONF / "scheduler").glob("*.yaml"))]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("own", ["emoji", "own"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_with_models_that_say_more_or_less(
    composer: Composers,
    files: Path,
    tmp_path: Path,
    scheduler: str,
    own: str,
    precision: str,
) -> None:
    model = "emoji" if own == "emoji" else quoted(str(files / own))
    variant = of(
        composer,
        f"scheduler={scheduler}",
        f"model={model}",
        f"precision={precision}",
        "workload.steps=4",
    )
    if conflicts := variant.conflicts(CPU):
        pytest.skip("; ".join(conflicts))
    found, program = made(variant, tmp_path)
    assert program.draws, f"{program.reason}\n{found.text}"


ORDERED = (
    "lora=fused",
    "caching=deepcache",
    "attention=fused_qkv",
    "layout=channels_last",
    "grad_mode=inference_mode",
)
"""One option of each stage, in the order in which a worker applies them."""


@pytest.mark.slow
@pytest.mark.parametrize("first", ORDERED)
@pytest.mark.parametrize("second", ORDERED)
def test_pairs_of_other_stages(
    composer: Composers, tmp_path: Path, first: str, second: str
) -> None:
    if ORDERED.index(first) <= ORDERED.index(second):
        pytest.skip("the other pair is the same")
    found, program = made(of(composer, first, second), tmp_path)
    assert program.draws, f"{program.reason}\n{found.text}"


def test_a_function_between_options_that_only_sdopt_has(
    composer: Composers, files: Path
) -> None:
    chosen = (
        "caching=deepcache",
        _word("patch={files}/diffusers.py:weaker", files),
        "compiler=trace",
    )
    variant = of(composer, *chosen)
    with pytest.raises(Unwritable, match="between options"):
        written(variant, CPU)


def test_takes_no_more_threads_than_the_cores_that_were_measured_with(
    composer: Composers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch takes one for each core of a machine, of which a container may have two."""
    variant = of(composer)
    free = replace(variant, hardware=replace(variant.hardware, threads=None))
    assert "set_num_threads" not in written(free, CPU).text
    monkeypatch.setattr("torch.get_num_threads", lambda: 1000)
    assert "torch.set_num_threads(" in written(free, CPU).text
    # What was chosen is also in the lines for a pipeline that is there.
    assert "set_num_threads" not in "".join(written(variant, CPU).lines)
    two = replace(variant, hardware=replace(variant.hardware, threads=2))
    assert "torch.set_num_threads(2)" in written(two, CPU).lines


@pytest.mark.parametrize(
    ("model", "line"), [("half", "pipe.to(torch.float32)"), ("own", "")]
)
def test_lines_cast_what_is_stored_in_half_precision(
    composer: Composers, files: Path, model: str, line: str
) -> None:
    """As diffusers loads it, its text encoder is in half precision, and its denoiser is not."""
    variant = of(composer, _word(f"model={{files}}/{model}", files), "precision=fp32")
    found = written(variant, CPU)
    casts = [each for each in found.lines if ".to(" in each]
    assert casts == ([line] if line else [])
    assert "pipe.to(" not in found.text


def test_no_image_no_program(composer: Composers) -> None:
    with pytest.raises(Unwritable, match="no image"):
        written(of(composer, "attention=vanilla", "quality.prompt_count=null"), CPU)


def test_all_of_diffusers_or_one_call_of_sdopt(composer: Composers) -> None:
    plain = written(
        of(composer, "precision=bf16", "attention=vanilla", "grad_mode=inference_mode"),
        CPU,
    )
    assert "sdopt" not in plain.text.replace(str(EMOJI), "")
    assert "pipe.to(torch.bfloat16)" in plain.lines
    assert "pipe.to(" not in plain.text, (
        "it is loaded so, and a cast makes diffusers warn"
    )
    assert plain.lines[-2:][0] == "with torch.inference_mode():"
    both = written(
        of(composer, "precision=bf16", "attention=vanilla", "caching=deepcache"), CPU
    )
    assert (
        'sdopt.optimize(pipe, caching="deepcache", attention="vanilla")' in both.lines
    )


def test_a_pipeline_of_ones_own_leaves_out_the_layers_that_a_file_says(
    composer: Composers, files: Path
) -> None:
    """Diffusers loads all of them, so that the lines for a pipeline would draw other images without this."""
    found = written(of(composer, _word("model={files}/skips.safetensors", files)), CPU)
    assert any(
        line.startswith("encoder.layers = encoder.layers[:-1]") for line in found.lines
    )


def test_names_the_revision_and_the_variant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = Path(shutil.copytree(EMOJI, tmp_path / "snapshots" / "0a1b2c"))
    monkeypatch.setattr("sdopt.programs.loading.folder_of", lambda _: snapshot)
    model = Model(weights="hub", hub_id="a/b", revision="v2", variant="fp16")
    lines = from_files(model, Task(), "float16").lines
    assert {
        '    revision="0a1b2c",',
        '    variant="fp16",',
        "    dtype=torch.float16,",
    } <= set(lines)


def test_a_published_file_is_given_a_vocabulary(tmp_path: Path) -> None:
    """As its architecture pads prompts; the packaged model's has its own, unless another is named."""
    for name, count in (("sd15", 1), ("sdxl", 2)):
        model = Model(
            name, "path", str(ARCHITECTURES / name / "model_index.json")
        )  # any file
        found = dict(tokenizers_of(model))
        assert len(found) == count
        for loaded in found.values():
            tokenizer: Any = eval(
                loaded, {"CLIPTokenizer": __import__("transformers").CLIPTokenizer}
            )
            assert tokenizer("a cat").input_ids == [49406, 320, 2368, 49407]
    own = Model(
        "emoji", "path", str(EMOJI / "model_index.json"), tokenizer=str(tmp_path)
    )
    assert str(tmp_path) in dict(tokenizers_of(own))["tokenizer"]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        'with "quotes"',
        "it's",
        "both ' and \"",
        "a \\ b",
        "two\nlines",
        "größer",
    ],
)
def test_any_text_is_python(text: str) -> None:
    assert eval(literal(text)) == text
    assert eval(literal([text, 1, None])) == [text, 1, None]


@pytest.mark.parametrize("name", ["my-file", "json", "größe_1", "torch", "class"])
def test_a_function_of_a_file_of_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("def make():\n    return 7\n")
    code = function_code(f"{tmp_path / name}.py:make", "found = {}()")
    names: dict[str, Any] = {}
    exec("\n".join([*code.imports, *code.lines]), names)
    assert names["found"] == 7
