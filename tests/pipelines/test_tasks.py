"""Image-to-image and inpainting, with one text encoder and with two; initial noise from files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sdopt.config.composer import HydraComposer
from sdopt.errors import UsageError
from sdopt.measure.stages import observed
from sdopt.pipelines.prompts import read_latents
from sdopt.pipelines.tasks import inputs_of, remarks_on
from sdopt.record.records import Status
from sdopt.schema import Model, Task, Workload
from sdopt.worker.draws import timed_draw
from sdopt.worker.host import PipelineHost
from tests.command import SMOKE, sdopt
from tests.fixtures import Compose, Load, operations_of
from tests.pipelines.test_models import small_xl  # noqa: F401

Inputs = dict[str, list[str]]
FIRST = [
    "img2img",
    pytest.param("inpaint", marks=pytest.mark.slow),
]  # which draw their noise alike


@pytest.fixture(params=["emoji", pytest.param("xl", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> list[str]:
    """The reference model, and one with SDXL's pipeline."""
    if request.param == "emoji":
        return []
    folder = request.getfixturevalue("small_xl")
    return ["model=folder", f"model.path={folder}", "model.size=64"]


def images(session: PipelineHost, folder: Path, batches: int = 1) -> list[np.ndarray]:
    folder.mkdir(parents=True)
    records = [
        record
        for batch in range(batches)
        for record in session.generate(
            batch, timed_draw(session._variant), folder
        ).records
    ]
    return [
        np.asarray(Image.open(folder / record.path)).astype(float) for record in records
    ]


def calls_of(session: PipelineHost) -> dict[str, int]:
    seen: list[str] = []
    with observed(session._pipe, seen.append, lambda stage, output: None):
        session._call()
    return {stage: seen.count(stage) for stage in seen}


class TestTasks:
    def test_run_their_stages_and_count_their_operations(
        self, session: Load, inputs: Inputs, model: list[str], variant: Compose
    ) -> None:
        text = operations_of(session(*model)._pipe, variant(*model, "workload.steps=2"))
        assert text["vae_encoder"] == 0
        for task, encoded in (("img2img", 1), ("inpaint", 2)):
            overrides = [*model, *inputs[task], "workload.steps=4", "task.strength=0.5"]
            loaded = session(*overrides)
            assert {
                "vae_encoder": encoded,
                "denoiser": 2,
                "vae_decoder": 1,
            }.items() <= calls_of(loaded).items()
            samples = loaded.time_stages().stages_s
            assert set(samples) >= {
                "text_encoder",
                "vae_encoder",
                "denoiser_step",
                "vae_decoder",
            }
            assert len(samples["denoiser_step"]) == 2
            assert samples["vae_encoder"][0] > 0
            whole = operations_of(loaded._pipe, variant(*overrides))
            assert whole["denoiser"] == pytest.approx(text["denoiser"])
            assert whole["vae_encoder"] > 0
            assert (whole["text_encoder"], whole["vae_decoder"]) == (
                text["text_encoder"],
                text["vae_decoder"],
            )

    @pytest.mark.parametrize("task", FIRST)
    def test_noise_is_an_images_own_whatever_the_batch(
        self, session: Load, inputs: Inputs, model: list[str], task: str, tmp_path: Path
    ) -> None:
        common = [
            *model,
            *inputs[task],
            "workload.steps=3",
            "task.strength=0.7",
            "workload.prompt_count=2",
        ]
        alone = images(session(*common), tmp_path / "alone", batches=2)
        together = images(
            session(*common, "workload.batch_size=2"), tmp_path / "together"
        )
        assert len(alone) == len(together) == 2
        for one, two in zip(alone, together, strict=True):
            assert np.abs(one - two).mean() < 1
        assert np.abs(alone[0] - alone[1]).mean() > 3

    def test_image_to_image_begins_with_the_image(
        self, session: Load, inputs: Inputs, tmp_path: Path
    ) -> None:
        """The less strength, the nearer to the input."""
        distance = []
        for strength in (0.1, 1):
            loaded = session(
                *inputs["img2img"],
                "workload.steps=10",
                "workload.guidance_scale=1",
                f"task.strength={strength}",
            )
            given = np.asarray(loaded._inputs[0]["image"][0]).astype(float)
            [made] = images(loaded, tmp_path / str(strength))
            distance.append(np.abs(made - given).mean())
        assert distance[0] < 0.6 * distance[1]

    def test_inpainting_keeps_what_is_not_masked(
        self, session: Load, inputs: Inputs, tmp_path: Path
    ) -> None:
        loaded = session(*inputs["inpaint"], "workload.steps=10", "workload.size=64")
        given = np.asarray(loaded._inputs[0]["image"][0]).astype(float)
        [made] = images(loaded, tmp_path / "made")
        change = np.abs(made - given).mean(axis=(0, 2))
        # The mask's right half; the autoencoder's reach blurs its edge.
        assert change[:24].mean() < 20 < change[40:].mean()

    def test_what_draws_noise_in_diffusers_is_put_back(
        self, session: Load, inputs: Inputs
    ) -> None:
        from diffusers.models.autoencoders import vae
        from diffusers.utils.torch_utils import randn_tensor

        session(*inputs["img2img"], "task.strength=1")._call()
        assert vae.randn_tensor is randn_tensor


class TestConfiguration:
    @pytest.mark.parametrize(
        ("task", "overrides", "said"),
        [
            (
                "img2img",
                ["task.image=/no/where.png"],
                "task.image=/no/where.png: cannot be read as an image",
            ),
            (
                "img2img",
                ["task.strength=0"],
                "task.strength=0: Input should be greater than 0",
            ),
            (
                "img2img",
                ["task.strength=0.3"],
                "task.strength=0.3: leaves no step of workload.steps=2 to run",
            ),
            (
                "img2img",
                ["task.mask=x.png"],
                "task.mask=x.png: task=img2img takes no mask",
            ),
            (
                "txt2img",
                ["task.image=x.png"],
                "task.image=x.png: task=txt2img takes no image",
            ),
            (
                "txt2img",
                ["task.strength=0.5"],
                "task.strength=0.5: task=txt2img starts from pure noise",
            ),
            (
                "inpaint",
                ["task.kind=outpaint"],
                "task.kind=outpaint: Input should be 'txt2img'",
            ),
        ],
    )
    def test_mistakes(
        self,
        composer: type[HydraComposer],
        inputs: Inputs,
        task: str,
        overrides: list[str],
        said: str,
    ) -> None:
        with pytest.raises(UsageError) as caught:
            composer(["workload.steps=2", *inputs[task], *overrides])
        assert caught.value.problems[0].startswith(said)

    @pytest.mark.parametrize(
        ("drawn", "said"),
        [
            (lambda mask: mask, "replaces nothing: its largest value is 0 of 255"),
            (
                lambda mask: mask.paste(127, (0, 0, 32, 32)),
                "replaces nothing: its largest value is 127 of 255",
            ),
            (
                lambda mask: mask.paste(255, (5, 5, 6, 6)),
                "replaces nothing at 64×64: its largest value is ",
            ),  # a dot
            (
                lambda mask: mask.putalpha(
                    Image.new("L", mask.size, 255).point(lambda _: 128)
                ),
                "transparent",
            ),
        ],
    )
    def test_of_a_mask_that_replaces_nothing(
        self,
        composer: type[HydraComposer],
        drawn: Callable[[Image.Image], object],
        said: str,
        tmp_path: Path,
    ) -> None:
        mask = Image.new("L", (512, 512))
        drawn(mask)
        mask.save(tmp_path / "mask.png")
        given = [
            "task=inpaint",
            "task.image=packaged",
            f"task.mask={tmp_path / 'mask.png'}",
            "workload.size=64",
        ]
        with pytest.raises(UsageError, match=r"^task\.mask=") as caught:
            composer(given)
        assert said in caught.value.problems[0]

    def test_remarks_on_what_is_used_otherwise_than_one_may_think(
        self, tmp_path: Path
    ) -> None:
        Image.new("RGB", (90, 60)).save(tmp_path / "image.png")
        mask = Image.new("L", (30, 50), 255)
        mask.paste(140, (0, 0, 30, 10))
        mask.save(tmp_path / "mask.png")
        task = Task("inpaint", str(tmp_path / "image.png"), str(tmp_path / "mask.png"))
        found = remarks_on(task, Model(), Workload(size=64))
        assert [remark.partition(": ")[2][:30] for remark in found] == [
            "its 90×60 pixels are stretched",
            "is of one colour everywhere",
            "20 % of it are grey: diffusers",
            "is white everywhere: the whole",
            "is of another shape than the i",
        ]
        packaged = Task("inpaint", "packaged", "packaged")
        assert remarks_on(packaged, Model(), Workload()) == []

    def test_of_a_model_without_images_of_its_own(
        self, composer: type[HydraComposer]
    ) -> None:
        with pytest.raises(UsageError) as caught:
            composer(["model=sd15", "model.weights=random", "task=inpaint"])
        assert [problem.partition(":")[0] for problem in caught.value.problems] == [
            "task.image",
            "task.mask",
        ]

    def test_any_model_may_start_from_the_packaged_image(
        self, composer: type[HydraComposer]
    ) -> None:
        inputs = ["task=inpaint", "task.image=packaged", "task.mask=packaged"]
        task = composer(["model=sd15", "model.weights=random", *inputs]).current.task
        made = inputs_of(task, Model(name="sd15", weights="random"), 64, 2)
        assert [image.size for image in (*made["image"], *made["mask_image"])] == [
            (64, 64)
        ] * 4

    def test_is_the_baseline_s_too_and_no_part_of_the_name(
        self, composer: type[HydraComposer], inputs: Inputs
    ) -> None:
        job = composer(
            [
                *inputs["img2img"],
                "task.strength=0.5",
                "attention=sliced",
                "attention.slice_size=2",
            ]
        )
        plan = job.current.study.plan(job)
        assert plan.baseline.task == plan.variants[1].task
        assert plan.variants[1].name == "attention=sliced(slice_size=2)"
        assert plan.edges[0].credit == "attention=sliced(slice_size=2)"

    def test_of_another_task_is_other_work(
        self, composer: type[HydraComposer], inputs: Inputs
    ) -> None:
        job = composer([])
        assert job.variant("other", inputs["img2img"]).other_work(job.variant("plain"))


@pytest.mark.slow
def test_sdxl_is_studied_as_the_others_are(tmp_path: Path, small_xl: Path) -> None:  # noqa: F811
    finished = sdopt(
        tmp_path,
        *("run", *SMOKE, "model=folder", f"model.path={small_xl}", "study=explicit"),
        "study.variants={base: [], half: ['precision=fp16'], sliced: ['attention=sliced'], g: ['grad_mode=enabled']}",
    )
    assert finished.code == 0, finished.err
    rows: Any = finished.result.variants
    assert [row.status for row in rows] == [Status.OK] * 5, [row.reason for row in rows]
    assert rows[0].tflop_per_image > 0


SHAPE = (8, 8, 8)
"""Of the packaged model's latents, at its own size."""
OWN = "workload.size=null"


def saved(folder: Path, latents: object, name: str = "latents.pt") -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file({"latents": latents}, path)
    else:
        torch.save(latents, path)
    return path


def test_one_latent_serves_all_images(tmp_path: Path, session: Load) -> None:
    latent = torch.randn(1, *SHAPE)
    path = saved(tmp_path, latent, "latents.safetensors")
    made = session(
        OWN,
        f"workload.latents={path}",
        "workload.batch_size=2",
        "workload.prompt_count=3",
    )
    for number in range(2):
        drawn = made._prompts_and_noise(number, timed_draw(made._variant))["latents"]
        torch.testing.assert_close(drawn, latent.expand(2, -1, -1, -1))


def test_each_image_has_its_own(tmp_path: Path, session: Load) -> None:
    """Images of a prompt stand together; the last batch of three prompts in twos is filled up with the first."""
    latents = torch.randn(7, *SHAPE)
    path = saved(tmp_path, latents)
    work = (
        "workload.images_per_prompt=2",
        "workload.prompt_count=3",
        "workload.batch_size=2",
    )
    made = session(OWN, f"workload.latents={path}", *work)
    for number, images in enumerate(([0, 1, 2, 3], [4, 5, 0, 1])):
        drawn = made._prompts_and_noise(number, timed_draw(made._variant))["latents"]
        torch.testing.assert_close(drawn, latents[images])


def test_given_latents_make_the_image(tmp_path: Path, session: Load) -> None:
    noise = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0))
    drawn, given = (
        session(OWN),
        session(OWN, f"workload.latents={saved(tmp_path, noise)}"),
    )
    images = [
        made._call(
            inputs=made._prompts_and_noise(0, timed_draw(made._variant)),
            output_type="pt",
        ).images
        for made in (drawn, given)
    ]
    torch.testing.assert_close(images[0], images[1])


@pytest.mark.parametrize(
    ("latents", "said"),
    [
        (
            torch.randn(1, 4, 128, 128),
            "holds latents of 4×128×128; this model and size need 8×8×8",
        ),
        (
            torch.randn(2, *SHAPE),
            "holds 2 latents; give one for all images, or one for each of at least 3",
        ),
        (
            torch.randn(*SHAPE),
            r"must be floats \(n, channels, height / 8, width / 8\), not torch\.float32 \(8, 8, 8\)",
        ),
        (torch.zeros(1, *SHAPE, dtype=torch.int64), "must be floats"),
        (torch.zeros(0, *SHAPE), "must be floats"),
        (torch.full((1, *SHAPE), float("nan")), "some values are NaN or infinite"),
        (
            14.6 * torch.randn((1, *SHAPE)),
            "their standard deviation is .*; give noise, before a scheduler has scaled it",
        ),
        (torch.zeros(1, *SHAPE), "their standard deviation is 0; give noise"),
        ([torch.randn(1, *SHAPE)] * 3, "must hold one tensor, and holds 3 values"),
        (torch.full((1, *SHAPE), torch.inf), "some values are NaN or infinite"),
        (
            {"a": torch.zeros(1), "b": torch.zeros(1)},
            "must hold one tensor, and holds 2 values",
        ),
        ([1, 2], "must hold one tensor"),
        (
            Path("anything but a tensor"),
            r"cannot be read as tensors \(it is damaged, or holds other",
        ),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, variant: Compose, latents: object, said: str
) -> None:
    path = saved(tmp_path, latents)
    with pytest.raises(UsageError, match=rf"workload\.latents={path}: {said}"):
        variant(f"workload.latents={path}", "workload.prompt_count=3")


@pytest.mark.parametrize("name", ["latents.pt", "latents.safetensors", "latents.npy"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    said = (
        "give a .safetensors or a .pt file"
        if name.endswith("npy")
        else "cannot be read as tensors"
    )
    with pytest.raises(UsageError, match=said):
        read_latents(str(tmp_path / name))
    for content in (
        b"",
        b"a",
        b"\x08" + b"\0" * 7 + b'{"a": 1}',
        b"PK\x03\x04" + b"\0" * 40,
        b"no tensors here",
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=said):
            read_latents(str(tmp_path / name))


def test_the_size_of_the_workload_counts(tmp_path: Path, variant: Compose) -> None:
    path = saved(tmp_path, torch.randn(1, 8, 16, 16))
    assert variant(
        f"workload.latents={path}", "workload.size=128"
    ).workload.latents == str(path)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (
            "workload.seed=3",
            r"workload\.seed=3: has no effect on noise that workload\.latents gives",
        ),
        ("task=img2img", r"workload\.latents=.*: task=img2img starts from its image"),
    ],
)
def test_what_does_not_go_with_given_latents(
    tmp_path: Path, variant: Compose, beside: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        variant(f"workload.latents={saved(tmp_path, torch.randn(1, *SHAPE))}", beside)
