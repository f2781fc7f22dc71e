"""The program that an answer ends with, run as it is: its image is the one that sdopt makes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sdopt.assembly import Assembly
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from sdopt.pipelines.loading import load_pipeline
from sdopt.record.records import StudyResult
from sdopt.report.program import _loading, _tokenizers, program_of
from sdopt.schema import Model, Scheduler, Task
from sdopt.study.plan import plan_result
from sdopt.worker.machine import Machine
from tests.fixtures import CPU, Composers
from tests.options.test_lora import kohya
from tests.pipelines.single_file import edit, original_layout

EMOJI = PACKAGED / "emoji"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model in a single file, marked as such files are, and a LoRA by kohya's names."""
    folder = tmp_path_factory.mktemp("from the web")
    original_layout(
        load_pipeline(Model(), Scheduler(), Task(), "cpu", {"dtype": torch.float32}), folder / "dream.safetensors"
    )
    save_file(kohya(), folder / "style.safetensors")
    save_file(load_file(folder / "dream.safetensors"), folder / "skips.safetensors", {"modelspec.encoder_layer": "2"})
    code = "from diffusers import DiffusionPipeline\nfrom sdopt.reference import MODEL\n"
    (folder / "mine.py").write_text(code + "def make():\n    return DiffusionPipeline.from_pretrained(MODEL)\n")
    # As a program leaves it that has put in a scheduler of its own, which clips nothing and does not say so.
    own = Path(shutil.copytree(EMOJI, folder / "own")) / "scheduler" / "scheduler_config.json"
    config = {key: value for key, value in json.loads(own.read_text()).items() if key != "clip_sample"}
    own.write_text(json.dumps(config | {"_class_name": "DPMSolverMultistepScheduler"}))
    edit(folder / "own" / "model_index.json", scheduler=["diffusers", "DPMSolverMultistepScheduler"])
    return folder


def planned(composer: Composers, *overrides: str, steps: int = 3) -> tuple[StudyResult, Any]:
    """A study that is planned and not measured, and its variant."""
    made = composer(
        [*overrides, f"workload.steps={steps}", "workload.prompts=[a red apple]", "workload.prompt_count=1"]
    )
    plan = made.current.study.plan(made)
    return plan_result(
        plan, "mine", "pair", made.current.recorded, Machine(CPU, CPU.attributes, preloaded=True, bad_fork=False), []
    ), plan.variants[1]


@pytest.mark.parametrize("model", ["dream.safetensors", "skips.safetensors", "mine.py:make", "own"])
def test_makes_the_image_that_sdopt_makes(
    composer: Composers, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    chosen = [f"model={files / model}", "workload.size=64", "lora=loaded", f"lora.path='{files / 'style.safetensors'}'"]
    result, variant = planned(composer, *chosen, "precision=bf16", "layout=channels_last", "grad_mode=inference_mode")
    program = program_of(result, result.candidates[0])
    seeded = program.replace("(prompt, ", "(prompt, generator=torch.manual_seed(7), ")
    assert "import sdopt" not in program, "all of it is diffusers' own"
    assert ("run_path" in program) == (model == "mine.py:make")
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    exec(compile(seeded, "optimized.py", "exec"), {})
    torch.set_num_threads(before)
    found = np.asarray(Image.open(tmp_path / "image.png"))
    assembly = Assembly.load(variant, "cpu")
    settings: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": variant.guidance_scale}
    with assembly.entered(), torch.no_grad():
        made = assembly.pipe("a lighthouse on a rocky coast at dusk", generator=torch.manual_seed(7), **settings)
    assert np.array_equal(found, np.asarray(made.images[0]))


def test_names_the_revision_and_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdopt.report.program.folder_of", lambda _: EMOJI)
    model = Model(weights="hub", hub_id="a/b", revision="v2", variant="fp16")
    assert {"    revision='v2',", "    variant='fp16',"} <= set(_loading(model, "StableDiffusionPipeline", ""))


@pytest.mark.parametrize(("steps", "given"), [(10, "timesteps=[999, 850, "), (6, "timesteps=spread([999, 850, ")])
def test_keeps_the_timesteps_of_a_scheduler_and_leaves_to_sdopt_what_diffusers_does_not_have(
    composer: Composers, steps: int, given: str
) -> None:
    result, _ = planned(composer, "scheduler=ays", "precision=bf16", "caching=deepcache", steps=steps)
    program = program_of(result, result.candidates[0])
    compile(program, "optimized.py", "exec")
    assert given in program
    assert "num_inference_steps" not in program
    assert ("import spread" in program) == ("spread(" in given)
    assert 'sdopt.optimize(pipe, caching="deepcache")' in program
    assert "dtype=torch.bfloat16" in program


def test_a_published_file_is_given_clips_vocabulary() -> None:
    """As its architecture pads prompts; the packaged model's has its own."""
    for name, count in (("sd15", 1), ("sdxl", 2)):
        model = Model(name, "path", str(ARCHITECTURES / name / "model_index.json"))  # any file
        found = dict(_tokenizers(model))
        assert len(found) == count
        for loaded in found.values():
            made: Any = eval(loaded, {"CLIPTokenizer": __import__("transformers").CLIPTokenizer})
            assert made("a cat").input_ids == [49406, 320, 2368, 49407]
