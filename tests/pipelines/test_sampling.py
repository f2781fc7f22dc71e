"""How a model wants to be sampled: its own scheduler and the marks in its file are kept, or the choice is refused."""

import copy
import multiprocessing
import shutil
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from diffusers.schedulers import AysSchedules
from safetensors.torch import load_file, save_file

from sdopt.config.composer import HydraComposer
from sdopt.config.groups import data_sheets
from sdopt.errors import ConflictError, UsageError
from sdopt.library.planning import plan_for
from sdopt.pipelines import sampling
from sdopt.pipelines.catalog import PACKAGED
from sdopt.pipelines.family import family_named
from sdopt.pipelines.loading import (
    clip_skip_of,
    name_of,
    part_config,
    sampling_problems,
    sampling_remarks,
)
from sdopt.pipelines.lora_checks import misfits
from sdopt.pipelines.sampling import (
    answers_to,
    few_steps,
    late_start,
    marks_in,
    scheduler_like,
    scheduler_settings,
    unread_by,
    unseeded,
    unsuited,
)
from sdopt.preparation import check_sampling, remarks_on_variants
from sdopt.schema import Model, Scheduler
from sdopt.worker.machine import planned_machine
from tests.fixtures import CPU, Compose, Composers
from tests.pipelines.loaded import load
from tests.pipelines.single_file import edit
from tests.pipelines.test_weights import single  # noqa: F401

EMOJI = PACKAGED / "emoji"
DDIM = Scheduler()
PLMS = Scheduler("PNDMScheduler", {"skip_prk_steps": True})
EULER = Scheduler("EulerDiscreteScheduler")
LCM = Scheduler("LCMScheduler")
EDM = "EDMDPMSolverMultistepScheduler"


def own(**values: Any) -> dict[str, Any]:
    """The configuration of a model's own scheduler, as Stable Diffusion has it but for the given values."""
    levels = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
    }
    return {
        "_class_name": "PNDMScheduler",
        **levels,
        "prediction_type": "epsilon",
        **values,
    }


@pytest.mark.parametrize(
    ("values", "scheduler", "said"),
    [
        (
            {"_class_name": EDM},
            DDIM,
            f"has other noise levels than the model's own {EDM}",
        ),
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler"},
            DDIM,
            "choose scheduler=flow_euler",
        ),
        (
            {"_class_name": "SomebodysScheduler"},
            DDIM,
            "SomebodysScheduler, which diffusers does not have",
        ),
        (
            {},
            Scheduler(EDM),
            "cannot have the noise levels of the model's own PNDMScheduler",
        ),
        ({"rescale_betas_zero_snr": True}, PLMS, "has no rescale_betas_zero_snr"),
        (
            {"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
            DDIM,
            "choose scheduler=unipc",
        ),
        (
            {"prediction_type": "flow_prediction"},
            EULER,
            "cannot sample prediction_type=flow_prediction",
        ),
        (
            {"timestep_type": "continuous", "prediction_type": "v_prediction"},
            DDIM,
            "has no timestep_type",
        ),
        (
            {"prediction_type": "sample"},
            PLMS,
            "prediction_type=sample in workload.steps=20 (ValueError: ",
        ),
        ({}, Scheduler("DDIMInverseScheduler"), "its timesteps rise"),
        (
            {},
            Scheduler("CogVideoXDPMScheduler"),
            "cannot sample prediction_type=epsilon",
        ),
    ],
)
def test_what_would_draw_other_images_is_refused(
    values: dict[str, Any], scheduler: Scheduler, said: str
) -> None:
    [found] = unsuited(own(**values), scheduler)
    assert found.startswith(f"scheduler.class_name={scheduler.class_name}: ")
    assert said in found


@pytest.mark.parametrize(
    ("values", "scheduler"),
    [
        (
            {
                "prediction_type": "v_prediction",
                "rescale_betas_zero_snr": True,
                "timestep_spacing": "trailing",
            },
            DDIM,
        ),
        ({"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True}, EULER),
        ({}, LCM),
        ({"_class_name": "LCMScheduler"}, DDIM),
        ({"_class_name": EDM, "prediction_type": "epsilon"}, Scheduler(EDM)),
        ({"prediction_type": "odd"}, Scheduler(options={"prediction_type": "epsilon"})),
        ({"prediction_type": "sample"}, DDIM),
        (
            {"prediction_type": "sample"},
            Scheduler(
                "PNDMScheduler", {"prediction_type": "epsilon", "skip_prk_steps": True}
            ),
        ),
    ],
)
def test_what_is_kept_or_chosen_passes(
    values: dict[str, Any], scheduler: Scheduler
) -> None:
    assert not unsuited(own(**values), scheduler)


def test_a_number_of_steps_that_a_scheduler_cannot_take_is_refused() -> None:
    runge_kutta = Scheduler("PNDMScheduler")
    assert not unsuited(own(), runge_kutta)
    [found] = unsuited(own(), runge_kutta, steps=3)
    assert "in workload.steps=3 (ValueError" in found
    [found] = unsuited(own(), Scheduler(), steps=1001)
    assert found.startswith(
        "workload.steps=1001: DDIMScheduler cannot sample in so many (ValueError"
    )
    [found] = unsuited(
        own(), Scheduler("EulerDiscreteScheduler", {"timestep_spacing": "even"})
    )
    assert found.startswith(
        "scheduler.options.timestep_spacing=even: EulerDiscreteScheduler cannot sample with it (Val"
    )


def test_a_scheduler_whose_noise_has_no_seed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(
        self: Any, output: Any, timestep: Any, latents: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return (latents + torch.randn(latents.shape),)

    monkeypatch.setattr(EulerDiscreteScheduler, "step", step)
    [found] = unsuited(own(clip_sample_range=2.0), EULER)
    assert "EulerDiscreteScheduler: draws noise without a seed" in found


@pytest.mark.parametrize(
    ("names", "metadata", "marks"),
    [
        ([], {}, {}),
        (["v_pred"], {}, {"prediction_type": "v_prediction"}),
        (
            ["v_pred", "ztsnr"],
            {},
            {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
        ),
        ([], {"modelspec.prediction_type": "v"}, {"prediction_type": "v_prediction"}),
        ([], {"modelspec.prediction_type": "epsilon"}, {"prediction_type": "epsilon"}),
        (
            [],
            {"modelspec.architecture": "stable-diffusion-v2-768-v"},
            {"prediction_type": "v_prediction"},
        ),
        ([], {"ss_v_parameterization": "True"}, {"prediction_type": "v_prediction"}),
        ([], {"ss_zero_terminal_snr": "True"}, {"rescale_betas_zero_snr": True}),
        ([], {"ss_zero_terminal_snr": "False"}, {}),
        (
            ["v_pred"],
            {"modelspec.prediction_type": "epsilon"},
            {"prediction_type": "epsilon and v_prediction"},
        ),
        (["edm_mean"], {}, {"_class_name": "EDM (edm_mean)"}),
    ],
)
def test_marks_of_a_file(
    tmp_path: Path, names: list[str], metadata: dict[str, str], marks: dict[str, Any]
) -> None:
    file = tmp_path / "marked.safetensors"
    save_file(
        {"a": torch.zeros(1), **{name: torch.zeros(0) for name in names}},
        file,
        metadata,
    )
    assert marks_in(file) == marks


@pytest.fixture(scope="module")
def marked(single: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:  # noqa: F811
    """The reference model in one file that asks for noise prediction with zero terminal signal-to-noise ratio."""
    path = tmp_path_factory.mktemp("marked") / "emoji.safetensors"
    save_file(
        load_file(single) | {"ztsnr": torch.zeros(0)},
        path,
        {"modelspec.prediction_type": "epsilon"},
    )
    return Model(weights="path", path=str(path))


def test_marks_are_taken_over_and_said(marked: Model) -> None:
    pipe = load(marked)
    wanted = DDIMScheduler.from_pretrained(
        EMOJI,
        subfolder="scheduler",
        prediction_type="epsilon",
        rescale_betas_zero_snr=True,
    )
    assert torch.equal(pipe.scheduler.alphas_cumprod, wanted.alphas_cumprod)
    assert pipe.scheduler.config.prediction_type == "epsilon"
    [remark] = sampling_remarks(marked, DDIM)
    assert (
        "is marked to be sampled with prediction_type=epsilon, rescale_betas_zero_snr=true"
        in remark
    )
    assert "has no rescale_betas_zero_snr" in sampling_problems(marked, PLMS)[0]


@pytest.mark.parametrize(
    "line",
    [
        'parameterization: "v"',
        "  parameterization: v  # or v",
        "parameterization: eps",
        "",
    ],
)
def test_a_configuration_beside_a_file_is_a_mark(tmp_path: Path, line: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    file.with_suffix(".yaml").write_text(
        f"model:\n  params:\n    linear_start: 0.00085\n{line}\n"
    )
    assert ("prediction_type" in marks_in(file)) == line.endswith(("v", '"v"'))


def test_a_file_that_is_named_as_of_another_family_is_refused(tmp_path: Path) -> None:
    """Both have the same tensors, and one predicts velocity; 2.1-base was trained for 875,000 steps."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1), "global_step": torch.tensor(875_000)}, file)
    [problem] = sampling_problems(Model("sd21", "path", str(file)), DDIM)
    assert "is of model=sd21_base" in problem
    assert not sampling_problems(Model("sd21_base", "path", str(file)), DDIM)
    assert not sampling_problems(
        Model("sd21", "path", str(file)),
        Scheduler(options={"prediction_type": "epsilon"}),
    )
    save_file({"a": torch.zeros(1)}, file)
    assert not sampling_problems(Model("sd21", "path", str(file)), DDIM)


@pytest.mark.parametrize(
    "name",
    [
        "mix_vPred10.safetensors",
        "noobVpredMix.safetensors",
        "a-vpredv1.safetensors",
        "v_prediction.safetensors",
    ],
)
def test_a_name_that_says_velocity_is_not_passed_over(
    tmp_path: Path, name: str
) -> None:
    model = Model("sd15", "path", str(tmp_path / name))
    save_file({"a": torch.zeros(1)}, tmp_path / name)
    [problem] = sampling_problems(model, DDIM)
    assert "+scheduler.options.prediction_type=v_prediction or epsilon" in problem
    for kind in ("epsilon", "v_prediction"):
        assert not sampling_problems(
            model, Scheduler(options={"prediction_type": kind})
        )
    other = tmp_path / f"other-{name}"
    save_file({"a": torch.zeros(1), "v_pred": torch.zeros(0)}, other)
    assert not sampling_problems(Model("sd15", "path", str(other)), DDIM)


def test_the_working_folder_names_no_packaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "v-pred").mkdir()
    monkeypatch.chdir(folder)
    assert not sampling_problems(Model(), DDIM)
    file = Path(shutil.copytree(EMOJI, folder / "model")).parent
    assert name_of(Model(weights="path", path=".")) == file.name


FEW = """sdxlTurbo_v1 dreamshaperXL_lightningDPMSDE dreamshaper_8LCM lcm-lora-sdv1-5 sd_xl_turbo_1.0 dmd2_sdxl_4step
    Hyper-SD15-8steps-lora realvisxlV40_v40LightningBakedvae pcm_sd15 flux1-schnell sana_sprint_1.6B
    qwen-image-4step chroma1_flash my_zit_v2 Hyper-FLUX.1-dev realisticVisionV60B1_v51HyperVAE.safetensors
    Juggernaut_X_RunDiffusion_Hyper.safetensors Juggernaut-X-Hyper RealisticVision_V5.1_HYPER.safetensors
    mix_hyper_v2 perflow-sd15-dreamshaper Nitro-1-SD Qwen-Rapid-AIO-v9 qwen_image_distill_full_fp8"""


PLAIN = """sd_v1-5 hyperrealism lcmania juggernautXL_v9 calcm z-image-de-turbo steps_of_rome 20000steps
    my_lora_28steps sprinter hyper_realistic_v2.safetensors HyperRealism.safetensors hyper-detail nitrogen"""


@pytest.mark.parametrize(
    ("names", "told"),
    [(FEW, True), (PLAIN, False)],
)
def test_a_name_that_says_few_steps_is_told(names: str, told: bool) -> None:
    for name in names.split():
        assert (
            "here is workload.steps=25 and workload.guidance_scale=7.5"
            in str(few_steps(name, 25, 7.5))
        ) == told
        assert few_steps(name, 4, 1) is None


def test_clip_skip_is_taken_over_and_said(marked: Model, tmp_path: Path) -> None:
    def saying(layer: str, tensors: dict[str, torch.Tensor]) -> Model:
        file = tmp_path / f"layer_{layer}.safetensors"
        save_file(tensors, file, {"modelspec.encoder_layer": layer})
        return Model(weights="path", path=str(file))

    skipping = saying("2", load_file(str(marked.path)))
    pipes = [load(model) for model in (marked, skipping)]
    ids = (
        pipes[0]
        .tokenizer(["a red apple"], padding="max_length", return_tensors="pt")
        .input_ids
    )
    whole = pipes[0].text_encoder(ids, output_hidden_states=True).hidden_states[-2]
    norm = getattr(
        pipes[0].text_encoder, "text_model", pipes[0].text_encoder
    ).final_layer_norm
    assert torch.equal(pipes[1].text_encoder(ids)[0], norm(whole))
    assert "(clip skip)" in sampling_remarks(skipping, DDIM)[-1]
    assert not sampling_problems(skipping, DDIM)
    for layer in ("0", "4", "last"):
        assert (
            "modelspec.encoder_layer"
            in sampling_problems(saying(layer, {"a": torch.zeros(1)}), DDIM)[0]
        )
    for layer, said in (("1", 0), ("2", 0), ("3", 1)):
        count, problems = clip_skip_of(
            replace(saying(layer, {"a": torch.zeros(1)}), name="sdxl")
        )
        assert (count, len(problems)) == (0, said)


def test_a_lora_of_all_layers_goes_with_clip_skip(
    marked: Model, tmp_path: Path
) -> None:
    """Trainers write one of all layers; that of a layer that is left out has no effect."""
    file, lora = tmp_path / "skips.safetensors", tmp_path / "lora.safetensors"
    save_file(load_file(str(marked.path)), file, {"modelspec.encoder_layer": "2"})
    matrices = {"lora_down": torch.ones(2, 144), "lora_up": torch.ones(144, 2)}
    pairs = product(range(3), ("q", "k", "v", "out"), matrices)
    names = [
        f"lora_te_text_model_encoder_layers_{n}_self_attn_{part}_proj.{name}"
        for n, part, name in pairs
    ]
    save_file(
        {f"{name}.weight": matrices[name.rpartition(".")[2]].clone() for name in names},
        lora,
    )
    assert misfits(lora, Model(weights="path", path=str(file))) == []


@pytest.mark.parametrize(
    ("name", "spacing", "steps", "said"),
    [
        ("EulerDiscreteScheduler", "leading", 1001, "all its timesteps are 1"),
        ("DPMSolverMultistepScheduler", "leading", 1000, "all its timesteps are 1"),
        ("UniPCMultistepScheduler", "leading", 1000, "all its timesteps are 1"),
        ("EulerDiscreteScheduler", "trailing", 2000, "goes on to timestep -1"),
        ("DPMSolverMultistepScheduler", "trailing", 2000, "goes on to timestep -1"),
    ],
)
@pytest.mark.walk(2)
def test_more_steps_than_a_model_has_timesteps_leave_noise(
    name: str, spacing: str, steps: int, said: str
) -> None:
    """Only few schedulers of diffusers check the number."""
    chosen = Scheduler(name, {"timestep_spacing": spacing})
    [found] = unsuited(own(steps_offset=1), chosen, steps)
    assert said in found
    assert not unsuited(own(steps_offset=1), chosen, 900)


@pytest.mark.parametrize(
    ("name", "spacing", "first"),
    [
        ("DDIMScheduler", "leading", 1),
        ("DDIMScheduler", "linspace", 0),
        ("EulerDiscreteScheduler", "linspace", 0),
        ("DDIMScheduler", "trailing", None),
        ("EulerDiscreteScheduler", "trailing", None),
        ("DPMSolverMultistepScheduler", "linspace", None),
        ("LCMScheduler", "leading", None),
    ],
)
def test_one_step_that_begins_at_the_last_timestep_is_said(
    name: str, spacing: str, first: int | None
) -> None:
    """Most schedulers space one step so, and then images are the noise that they start from."""
    values, chosen = own(steps_offset=1), Scheduler(name, {"timestep_spacing": spacing})
    found = late_start(values, chosen, steps=1)
    assert bool(found) == (first is not None)
    assert not late_start(values, chosen, steps=2)
    assert all(f"begins one step at timestep {first} of 1000" in each for each in found)
    answers = answers_to([(values, chosen, 1)])
    assert found in answers.values()


def test_an_option_overrides_a_mark(marked: Model) -> None:
    chosen = Scheduler(
        options={"prediction_type": "v_prediction", "rescale_betas_zero_snr": False}
    )
    pipe = load(marked, chosen)
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert not pipe.scheduler.config.rescale_betas_zero_snr
    assert not sampling_remarks(marked, chosen)


@pytest.mark.parametrize(
    ("name", "values", "options", "outside"),
    [
        ("DDIMScheduler", {}, {"steps_offset": -1}, "-1"),
        ("EulerDiscreteScheduler", {}, {"steps_offset": 500}, "1460"),
        ("EulerDiscreteScheduler", {}, {"steps_offset": -1}, "-1"),
        (
            "FlowMatchEulerDiscreteScheduler",
            {"_class_name": "FlowMatchEulerDiscreteScheduler"},
            {"shift": -3},
            "-",
        ),
    ],
)
def test_timesteps_that_no_model_has_are_refused(
    name: str, values: dict[str, Any], options: dict[str, Any], outside: str
) -> None:
    spaced = {} if values else {"timestep_spacing": "leading"}
    chosen = Scheduler(name, {**options, **spaced})
    [found] = unsuited(own(**values), chosen, 25)
    assert f"goes on to timestep {outside}" in found
    assert not unsuited(own(**values), Scheduler(name, spaced), 25)


def test_other_levels_of_noise_than_those_of_training_are_said(marked: Model) -> None:
    said = sampling_remarks(marked, Scheduler(options={"beta_schedule": "linear"}))
    assert any("scheduler.options.beta_schedule=linear" in line for line in said)
    kept = Scheduler(options={"beta_schedule": "scaled_linear"})
    assert not any("trained with" in line for line in sampling_remarks(marked, kept))


FLOW: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}

FLOWS = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@pytest.mark.parametrize(
    "name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"]
)
@pytest.mark.parametrize("key", FLOWS)
def test_a_flow_needs_both_settings_of_a_scheduler_for_levels_too(
    name: str, key: str
) -> None:
    """With one of them alone images are noise, or hundreds of times too bright."""
    chosen = Scheduler(name, FLOWS)
    assert unsuited(FLOW, chosen) == []
    others = {other: FLOWS[other] for other in FLOWS if other != key}
    [found] = unsuited(FLOW, replace(chosen, options=others))
    assert f"set +scheduler.options.{key}={str(FLOWS[key]).lower()}" in found
    contrary = {**FLOWS, "prediction_type": "epsilon"}
    assert unsuited(FLOW, replace(chosen, options=contrary))


@pytest.mark.parametrize(
    ("by_size", "options"),
    [(True, {"shift": 1.5}), (False, {"max_shift": 2.0}), (False, {"base_shift": 2.0})],
)
def test_a_shift_that_changes_nothing_is_refused(
    by_size: bool, options: dict[str, Any]
) -> None:
    chosen = Scheduler(FLOW["_class_name"], options)
    own_scheduler = {**FLOW, "use_dynamic_shifting": by_size}
    [found] = unsuited(own_scheduler, chosen)
    assert "has no effect" in found
    other = {**options, "use_dynamic_shifting": not by_size}
    assert unsuited(own_scheduler, replace(chosen, options=other)) == []
    assert unsuited({**FLOW, "use_dynamic_shifting": not by_size}, chosen) == []


@pytest.mark.parametrize(
    ("family", "key", "idle"),
    [
        ("Flux2KleinPipeline", "base_shift", True),
        ("Flux2Pipeline", "max_shift", True),
        ("CogView4Pipeline", "max_image_seq_len", True),
        ("CogView4Pipeline", "max_shift", False),
        ("FluxPipeline", "base_shift", False),
    ],
)
def test_a_shift_that_a_pipeline_computes_without_the_scheduler_is_refused(
    family: str, key: str, idle: bool
) -> None:
    own_scheduler = {**FLOW, "use_dynamic_shifting": True, key: 1.0}
    for value, told in ((2.0, idle), (1.0, False)):
        chosen = Scheduler(FLOW["_class_name"], {key: value})
        found = unread_by(family_named(family), own_scheduler, chosen)
        assert ["has no effect" in line for line in found] == [True] * told


@pytest.mark.parametrize(
    ("family", "scheduler", "options", "refused"),
    [
        ("FluxPipeline", "FlowMatchEuler", {"stochastic_sampling": True}, True),
        ("FluxPipeline", "FlowMatchEuler", {"stochastic_sampling": False}, False),
        ("SanaPipeline", "FlowMatchEuler", {"stochastic_sampling": True}, False),
        (
            "StableDiffusion3Pipeline",
            "DPMSolverMultistep",
            {"algorithm_type": "sde-dpmsolver++"},
            True,
        ),
        (
            "FluxPipeline",
            "FlowMatchEuler",
            {"algorithm_type": "sde-dpmsolver++"},
            False,
        ),
    ],
)
def test_noise_of_steps_that_no_seed_decides_is_refused(
    family: str, scheduler: str, options: dict[str, Any], refused: bool
) -> None:
    """Each call would draw another image of the same noise."""
    chosen = Scheduler(f"{scheduler}Scheduler", options)
    found = unseeded(family_named(family), FLOW, chosen)
    assert ["without a seed" in line for line in found] == [True] * refused
    assert (
        unseeded(family_named(family), FLOW | options, replace(chosen, options={}))
        == found
    )


def test_a_distilled_model_with_another_scheduler_is_said(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EMOJI, tmp_path / "model"))
    edit(folder / "model_index.json", scheduler=["diffusers", "LCMScheduler"])
    model = Model(weights="path", path=str(folder))
    assert "its own scheduler is LCMScheduler" in sampling_remarks(model, DDIM)[0]
    assert not sampling_remarks(model, LCM)


@pytest.mark.parametrize(
    ("name", "kept", "other"), [("sd15", "ays", "ays_xl"), ("sdxl", "ays_xl", "ays")]
)
def test_timesteps_for_another_family_are_said(
    variant: Compose, name: str, kept: str, other: str
) -> None:
    model = Model(name=name, weights="random")
    assert not sampling_remarks(model, variant(f"scheduler={kept}").scheduler)
    assert (
        f"scheduler={kept} has its own"
        in sampling_remarks(model, variant(f"scheduler={other}").scheduler)[0]
    )


def test_a_program_s_own_pipeline_keeps_its_family() -> None:
    from diffusers import EDMEulerScheduler

    pipe = load(Model())
    pipe.scheduler = EDMEulerScheduler()
    with pytest.raises(
        ConflictError,
        match="has other noise levels than the model's own EDMEulerScheduler",
    ):
        plan_for(pipe, {"scheduler": "ddim"}, (), (), None)


@pytest.mark.parametrize("own", [EulerDiscreteScheduler, DDIMScheduler])
@pytest.mark.parametrize(
    ("options", "clips"), [({}, False), ({"clip_sample": True}, True)]
)
def test_a_model_that_says_nothing_of_clipping_is_not_clipped(
    own: Any, options: dict[str, Any], clips: bool
) -> None:
    made = scheduler_like(own.from_config({}), Scheduler(options=options))
    assert made.config.clip_sample is clips
    said = scheduler_settings({"_class_name": own.__name__}, Scheduler(), {})
    assert said == {"clip_sample": False}


def test_the_scheduler_is_the_one_that_the_index_names(tmp_path: Path) -> None:
    """As diffusers loads it: a program that was written for the other one drew other images."""
    (tmp_path / "scheduler").mkdir()
    for file in ("model_index.json", "scheduler/scheduler_config.json"):
        shutil.copy(EMOJI / file, tmp_path / file)
    edit(tmp_path / "model_index.json", scheduler=["diffusers", "PNDMScheduler"])
    config = part_config(Model("it", "path", str(tmp_path)), "scheduler")
    assert config is not None
    assert config["_class_name"] == "PNDMScheduler"


def test_align_your_steps_is_diffusers_own(composer: type[HydraComposer]) -> None:
    for option, family in (("ays", "StableDiffusion"), ("ays_xl", "StableDiffusionXL")):
        chosen = composer([f"scheduler={option}"]).current.scheduler
        assert chosen.timesteps == AysSchedules[f"{family}Timesteps"]


def test_given_timesteps_are_those_that_run(composer: type[HydraComposer]) -> None:
    chosen = composer(["scheduler=ays"]).current.scheduler
    made = scheduler_like(
        DDIMScheduler.from_pretrained(EMOJI, subfolder="scheduler"), chosen
    )
    assert type(made).__name__ == "DPMSolverMultistepScheduler"
    for scheduler in (made, copy.deepcopy(made)):
        scheduler.set_timesteps(10, device="cpu")
        assert scheduler.timesteps.tolist() == chosen.timesteps
        scheduler.set_timesteps(4)
        few = scheduler.timesteps.tolist()
        assert (few[0], few[-1], len(few)) == (999, 24, 4)
        assert few == sorted(few, reverse=True)
    assert made.timesteps.tolist() == few
    scheduler.set_timesteps(10)
    assert len(made.timesteps) == 4, "a copy has its own"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["scheduler.timesteps=[999,500]"],
            "scheduler.timesteps: DDIMScheduler takes none; choose scheduler=ays",
        ),
        (
            ["scheduler=ays", "scheduler.timesteps=[500,999]"],
            "must be two or more, falling, from 999 to 0",
        ),
        (
            ["scheduler=ays", "scheduler.timesteps=[1000,2]"],
            "must be two or more, falling, from 999 to 0",
        ),
        (
            ["+scheduler.options.clip_sample=no"],
            "scheduler.options.clip_sample=no: must be true or false",
        ),
        (
            ["+scheduler.options.steps_offset=one"],
            "scheduler.options.steps_offset=one: must be a number",
        ),
        (["scheduler=euler_a"], "scheduler=euler_a: "),
        pytest.param(
            ["scheduler.class_name=DPMSolverSDEScheduler"],
            "scheduler.class_name=DPMSolverSDEScheduler: needs torchsde: pip install torchsde",
            marks=pytest.mark.skipif(
                find_spec("torchsde") is not None, reason="torchsde is there"
            ),
        ),
    ],
)
def test_what_cannot_be_is_refused(
    composer: type[HydraComposer], overrides: list[str], said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        composer(overrides)
    assert said in " ".join(raised.value.problems)


def test_more_steps_than_fit_between_the_given_ones_are_a_conflict(
    variant: Compose,
) -> None:
    assert variant("scheduler=ays", "workload.steps=100").conflicts(CPU) == []
    [found] = variant("scheduler=ays", "workload.steps=101").conflicts(CPU)
    assert found == "workload.steps=101: at most 100 fit between scheduler.timesteps"


def test_what_spoils_images_is_said_of_what_is_served_too(variant: Compose) -> None:
    """Of half precision on a card that computes it wrongly, and of one step of a model that spaces it so."""
    sheet = next(
        sheet for name, sheet in data_sheets().items() if name.startswith("gtx16")
    )
    said = remarks_on_variants([variant("precision=fp16")], planned_machine(sheet))
    assert any("GTX 16" in one for one in said)
    one_step = variant("model=sd15", "model.weights=random", "workload.steps=1")
    said = remarks_on_variants([one_step], planned_machine(sheet))
    assert any("begins one step at timestep" in one for one in said)


def test_what_is_found_of_a_scheduler_is_kept_for_later_commands(
    composer: Composers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else each dry run would import diffusers, to find the same again."""
    variant, asked = composer([]).variant(None), list[Any]()

    def answered(_context: Any, _function: Any, questions: Any, what: str) -> Any:
        asked.append(what)
        return {sampling._key(*question): ["found"] for question in questions}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sdopt.preparation.in_process", answered)
    for _ in range(2):
        monkeypatch.setattr(sampling, "_found", {})
        check_sampling([variant], multiprocessing.get_context("spawn"))
        [found] = sampling._found.values()
        assert found == ["found"]
    assert asked == ["the scheduler"]
