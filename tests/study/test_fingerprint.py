"""What a study is measured with: digests of files, of which any change gives another, versions and variables."""

import importlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sdopt.about import __version__ as sdopt_version
from sdopt.gate.differences import changed_variables
from sdopt.hardware.device import Device
from sdopt.options.lora import Loaded
from sdopt.options.memory import PrecomputedEmbeddings
from sdopt.pipelines.catalog import PACKAGED
from sdopt.schema import Model
from sdopt.scratch import CACHES
from sdopt.study.fingerprint import inputs_of, of_model, own_files
from sdopt.study.plan import _PACKAGES, _checkout, _version, describe_environment
from sdopt.study.resume import other_surroundings
from sdopt.worker.machine import Machine
from tests import sabotage
from tests.fixtures import Compose
from tests.sabotage import Harmless
from tests.test_architecture import ROOT, imports_of

COMMIT = "1234567890abcdef1234567890abcdef12345678"


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ("", "1.0.dev0"),
        ('{"url": "https://host/made.whl", "archive_info": {}}', "1.0.dev0"),
        (
            f'{{"url": "https://host/made", "vcs_info": {{"commit_id": "{COMMIT}"}}}}',
            "1.0.dev0+g123456789",
        ),
    ],
)
def test_a_development_state_has_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str, told: str
) -> None:
    """Diffusers from its repository is `0.43.0.dev0` for weeks, whatever its code does."""
    installed = tmp_path / "made-1.0.dev0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: made\nVersion: 1.0.dev0\n")
    (installed / "direct_url.json").write_text(origin)
    monkeypatch.syspath_prepend(tmp_path)
    assert _version("made") == told


def test_a_checkout_that_is_used_as_it_is_has_its_commit() -> None:
    commit, _ = _checkout(ROOT)
    expected = f"{sdopt_version}+g{commit[:9]}" if commit else sdopt_version
    assert _version("sdopt") == expected


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before | after if before.get(name) != after.get(name)}


def test_of_a_model_are_its_weights_and_settings(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(PACKAGED / "emoji", folder)
    model = Model("folder", "path", str(folder))
    first = of_model(model)
    assert of_model(model) == first == of_model(Model())
    (folder / "README.md").write_text("says nothing of the images")
    assert of_model(model) == first
    weights = next(folder.glob("unet/*.safetensors"))
    content = weights.read_bytes()
    for place in (
        -1,
        len(content) // 3,
        5_000_000,
    ):  # of the same size, and of the same time
        before = weights.stat()
        weights.write_bytes(
            content[:place] + bytes([content[place] ^ 1]) + content[place:][1:]
        )
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert of_model(model) != first, place
        weights.write_bytes(content)
        assert of_model(model) == first
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    assert of_model(model) != first


def test_of_a_model_are_parts_that_lie_elsewhere(tmp_path: Path) -> None:
    """Several pipelines may share a part by a link."""
    folder, shared = tmp_path / "model", tmp_path / "shared"
    shutil.copytree(PACKAGED / "emoji", folder)
    (folder / "unet").rename(shared)
    (folder / "unet").symlink_to(shared, target_is_directory=True)
    model = Model("folder", "path", str(folder))
    first = of_model(model)
    assert first == of_model(Model())
    weights = next(shared.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert of_model(model) != first


def test_of_a_file_is_what_lies_beside_it(tmp_path: Path) -> None:
    model, peft = tmp_path / "model.safetensors", tmp_path / "adapter_model.safetensors"
    for file in (model, peft):
        save_file({"model.diffusion_model.x": torch.zeros(2, 2)}, file)
    lora = Loaded(path=str(peft))

    def found() -> tuple[str, list[Path]]:
        return of_model(Model("sd15", "path", str(model))), lora.files(
            Model(), fetch=False
        )

    digest, files = found()
    model.with_suffix(".yaml").write_text("parameterization: v")
    beside = tmp_path / "adapter_config.json"
    beside.write_text('{"lora_alpha": 8}')
    now, more = found()
    assert now != digest
    assert more == [*files, beside]


def test_of_a_model_that_is_not_fetched_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert of_model(Model("sd15", "hub", hub_id="nobody/nothing")) == "not fetched"


def test_of_a_variant_are_the_files_it_begins_with(
    variant: Compose, tmp_path: Path
) -> None:
    prompts, image, latents = (
        tmp_path / "prompts.txt",
        tmp_path / "image.png",
        tmp_path / "latents.pt",
    )

    def write(prompt: str, colour: str, noise: float) -> dict[str, str]:
        prompts.write_text(prompt)
        Image.new("RGB", (64, 64), colour).save(image)
        torch.save(noise * torch.linspace(-2, 2, 512).reshape(1, 8, 8, 8), latents)
        overrides = [
            f"workload.prompts={prompts}",
            "task=img2img",
            "task.strength=1",
            f"task.image={image}",
        ]
        begun = inputs_of(variant(*overrides), of_model)
        return begun | inputs_of(
            variant(f"workload.latents={latents}", f"workload.prompts={prompts}"),
            of_model,
        )

    first = write("red apple", "red", 1.0)
    assert set(first) == {"model", "prompts", "image", "latents"}
    assert write("red apple", "red", 1.0) == first
    assert changed(first, write("green apple", "red", 1.0)) == {"prompts"}
    assert changed(first, write("red apple", "green", 1.0)) == {"image"}
    assert changed(first, write("red apple", "red", -1.0)) == {"latents"}


OPTION = """
from dataclasses import dataclass
from {package}.bases import Base

@dataclass(frozen=True)
class Mine(Base):
    def load_kwargs(self):
        from {package} import late
        return late.NOTHING
"""


def test_of_an_option_are_its_bases_and_all_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"own_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / package
    folder.mkdir()
    files = {
        "__init__": "",
        "option": OPTION.format(package=package),
        "bases": "import torch\nfrom sdopt.options import Optimization\nfrom .helpers import number\n"
        "class Base(Optimization):\n    pass\n",
        "helpers": "number = 1\n",
        "late": "NOTHING = {}\n",
        "stranger": "",
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    option = importlib.import_module(f"{package}.option").Mine
    assert {file.stem for file in own_files([option])} == files.keys() - {"stranger"}
    assert Path(sabotage.__file__) in own_files([Harmless])
    assert own_files([PrecomputedEmbeddings]) == []


def test_of_a_function_of_a_file_are_what_it_imports_from_beside_it(
    tmp_path: Path,
) -> None:
    files = {
        "patch": "import json\nfrom scales_of_mine import SCALE\nimport tools_of_mine.more\n"
        "def weaker(pipe):\n    pass\n",
        "scales_of_mine": "SCALE = 0.9\n",
        "tools_of_mine/__init__": "",
        "tools_of_mine/more": "",
        "stranger": "",
    }
    (tmp_path / "tools_of_mine").mkdir()
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = own_files([], [tmp_path / "patch.py"])
    expected = {tmp_path / f"{name}.py" for name in files} - {tmp_path / "stranger.py"}
    assert {*found} == expected


def test_of_a_users_own_option_there_is_a_digest(variant: Compose) -> None:
    plain = variant()
    assert "options" not in inputs_of(plain, of_model)
    assert "options" in inputs_of(
        replace(plain, optimizations={"own": Harmless()}), of_model
    )


MACHINE = Machine(
    Device("cuda", name="a card", attributes={"cudnn": 91002}),
    {},
    preloaded=True,
    bad_fork=False,
)


@pytest.mark.parametrize(
    ("number", "version"), [(91002, "9.10.2"), (92200, "9.22.0"), (8907, "8.9.7")]
)
def test_cudnn_is_recorded_beside_the_packages(number: int, version: str) -> None:
    machine = replace(MACHINE, device=Device("cuda", attributes={"cudnn": number}))
    assert describe_environment(machine, []).packages["cudnn"] == version


def test_every_package_that_an_option_imports_is_recorded() -> None:
    imported = {
        module.partition(".")[0].replace("_", "-")
        for path in (ROOT / "sdopt" / "options").rglob("*.py")
        for _, module in imports_of(path.relative_to(ROOT), path.read_text())
    }
    # The last four only read files and versions, and check values.
    besides = {
        "sdopt",
        "typing-extensions",
        "huggingface-hub",
        "safetensors",
        "packaging",
        "pydantic",
    }
    found = (
        imported
        - {name.replace("_", "-") for name in sys.stdlib_module_names}
        - besides
    )
    assert {"torch", "sdnq", "tomesd"} <= found
    assert found <= set(_PACKAGES)


@pytest.mark.parametrize("name", CACHES)
def test_the_folder_of_a_cache_is_recorded_and_said(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "/scratch/1")
    environment = describe_environment(MACHINE, [])
    assert environment.variables[name] == "/scratch/1"
    assert any(f"{name}=/scratch/1" in warning for warning in environment.warnings)


@pytest.mark.parametrize(("threads", "told"), [(None, {"threads": 3}), (2, {})])
def test_threads_that_pytorch_chooses_are_recorded(
    threads: int | None, told: dict[str, int]
) -> None:
    """OMP_NUM_THREADS decides, which Slurm and containers set, where hardware.threads does not."""
    machine = replace(MACHINE, device=Device("cpu"), cpu={"threads": 3})
    assert describe_environment(machine, [], threads).cpu == told
    assert describe_environment(replace(MACHINE, cpu={"threads": 3}), []).cpu == {}


@pytest.mark.parametrize(
    "name",
    [
        "DIFFUSERS_ATTN_BACKEND",
        "FLASH_ATTENTION_TRITON_AMD_ENABLE",
        "GLIBC_TUNABLES",
        "HSA_OVERRIDE_GFX_VERSION",
        "MALLOC_CONF",
        "MALLOC_MMAP_THRESHOLD_",
        "MIOPEN_FIND_ENFORCE",
        "MIOPEN_FIND_MODE",
        "OMP_THREAD_LIMIT",
        "SDNQ_TRITON_MM_USE_FP16_ACCUM",
        "TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "OPENBLAS_NUM_THREADS",
        "PYTHONMALLOC",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_MIOPEN_SUGGEST_NHWC",
        "PYTORCH_TUNABLEOP_ENABLED",
        "PYTORCH_TUNABLEOP_TUNING",
        "ROCBLAS_USE_HIPBLASLT",
        "TORCHINDUCTOR_FREEZING",
        "TORCH_BLAS_PREFER_HIPBLASLT",
        "TORCH_CUDNN_V8_API_DISABLED",
        "TORCH_MKLDNN_MATMUL_MIN_SIZE",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
        "TRITON_F32_DEFAULT",
    ],
)
def test_what_changes_how_is_computed_is_recorded_and_compared(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study that is resumed in another shell would mix two kinds of arithmetic."""
    monkeypatch.delenv(name, raising=False)
    before = describe_environment(MACHINE, [])
    monkeypatch.setenv(name, "1")
    now = describe_environment(MACHINE, [])
    assert now.variables == before.variables | {name: "1"}
    assert changed_variables(now, before) == {name: ("1", None)}
    assert any(name in said for said in other_surroundings(before, now))
