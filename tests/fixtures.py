"""Studies and sweeps that several tests look at, measured once, and what tests compose and load."""

import fcntl
import gc
import os
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from hydra import initialize_config_dir
from PIL import Image

from sdopt.config.composer import HydraComposer
from sdopt.config.models import with_own_options
from sdopt.config.paths import CONF, options_of
from sdopt.hardware.device import Device
from sdopt.hardware.probe import probe_device
from sdopt.record.records import StudyResult
from sdopt.reference import MODEL
from sdopt.variant import Variant
from sdopt.worker import forkserver
from sdopt.worker.host import PipelineHost
from sdopt.worker.operations import tflop_per_image
from sdopt.worker.process import WorkerProcess
from tests.command import SMALL, SMOKE, Finished, sdopt
from tests.fakes import fake_workers
from tests.forked import fork_the_server, forked_apart, started_anew  # noqa: F401
from tests.once import (  # noqa: F401 (of every test)
    asked_here,
    composed_once,
    copied,
    counted_alone,
    loaded_once,
    migrated_once,
    read_once,
)

CPU = probe_device("cpu")

# MLflow would start a thread when it is imported, and a process that has threads is not to be forked.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# What each process that is forked, and each quality pass, would otherwise import by itself.
forkserver.PRELOADED += [
    "runners.run",
    "sdopt.launching",
    "mlflow.store.tracking.sqlalchemy_store",
    "tests.forked",
    "torchmetrics.image",
    "torchmetrics.multimodal",
]


if find_spec("sqlalchemy"):  # a machine with a GPU may have no MLflow
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    @event.listens_for(Engine, "connect")
    def _unsynced(connection: object, _record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")


# No test survives the machine: neither this process nor those that are forked from it wait until the disk has a file.
os.fsync = lambda _handle: None  # type: ignore[assignment]

# Now, because a process that has computed something is not to be forked: a test module may do so when it is imported.
fork_the_server()


UNFREEZE = gc.unfreeze


def pytest_collection_finish() -> None:
    """What was imported is no garbage: to look through it takes half a second each time."""
    gc.collect()
    gc.freeze()
    # A measurement ends with it: all of PyTorch would be looked through from then on.
    gc.unfreeze = lambda: None


def pytest_runtest_logfinish() -> None:
    """What lives on after a test is looked through no more; many commands and options collect garbage by themselves."""
    if gc.get_count()[2] > 20:  # some 100,000 new objects
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that needs a card on a machine without one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Studies of others on this machine are none of the tests' concern."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


Composers = type[HydraComposer]


@pytest.fixture
def composer() -> Iterator[Composers]:
    """Makes composers, as inside a Hydra job: `composer(["precision=bf16"])`."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield HydraComposer


Compose = Callable[..., Variant]


@cache
def _smallest() -> HydraComposer:
    return HydraComposer([*SMOKE, "workload.size=null"])


Tiny = Callable[..., Variant]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a tiny pipeline of a diffusion transformer, which is saved once."""
    from tests.pipelines.tiny import saved

    root = tmp_path_factory.mktemp("tiny")

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else saved(name, root / name)

    return folder


@pytest.fixture
def variant_of(composer: Composers, tiny_folder: Callable[[str], Path]) -> Tiny:
    """Returns a variant of a tiny pipeline: images of 64×64 pixels, in three steps; or of a file of a user's own."""

    def make(model: str | Path, *overrides: str) -> Variant:
        path = model if isinstance(model, Path) else tiny_folder(model)
        words = [
            *SMOKE,
            f"model={path}",
            "workload.size=64",
            "workload.steps=3",
            *overrides,
        ]
        return composer(with_own_options(words, options_of("model"))).variant(None)

    return make


@pytest.fixture
def variant(composer: Composers) -> Compose:
    """A variant of one step, at the model's own size: `variant("precision=bf16")`."""
    return lambda *overrides: _smallest().variant(None, overrides)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Overrides by task, with an image and a mask of their own: a disc on a gradient, and its right half."""
    folder = tmp_path_factory.mktemp("inputs")
    y, x = np.mgrid[0:96, 0:96]
    picture = np.stack([x * 2, y * 2, np.full_like(x, 90)], axis=-1)
    picture[(x - 48) ** 2 + (y - 48) ** 2 < 900] = (250, 200, 30)
    Image.fromarray(picture.astype(np.uint8)).save(folder / "image.png")
    Image.fromarray(np.where(x > 48, 255, 0).astype(np.uint8)).save(folder / "mask.png")
    image, mask = (
        f"task.image={folder / 'image.png'}",
        f"task.mask={folder / 'mask.png'}",
    )
    return {
        "txt2img": ["task=txt2img"],
        "img2img": ["task=img2img", image],
        "inpaint": ["task=inpaint", image, mask],
    }


Load = Callable[..., PipelineHost]

_SMALL_IMAGES = "workload.size=32"


@pytest.fixture
def session(variant: Compose) -> Load:
    """The worker's side of a variant, in this process, with the packaged pipeline loaded afresh, on small images."""

    def load(*overrides: str, device: Device = CPU) -> PipelineHost:
        session = PipelineHost(variant(_SMALL_IMAGES, *overrides), device)
        session.prepare()
        return session

    return load


def require_runnable(variant: Variant, device: Device) -> None:
    """Skips the test where the device cannot run the variant: a card's limit is no defect."""
    if found := variant.conflicts(device):
        pytest.skip("; ".join(found))


@pytest.fixture
def on_cuda(variant: Compose, session: Load) -> Load:
    """As `session`, on this machine's card; skips the test where it cannot run the variant."""

    def load(*overrides: str) -> PipelineHost:
        device = probe_device("cuda")
        require_runnable(variant(_SMALL_IMAGES, *overrides), device)
        return session(*overrides, device=device)

    return load


def once(
    factory: pytest.TempPathFactory, name: str, command: Callable[[Path], Finished]
) -> Finished:
    """What a command left in a folder of its own; the first of pytest-xdist's processes that asks runs it for all."""
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    cwd, kept = place / "cwd", place / "finished.pickle"
    cwd.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            kept.write_bytes(pickle.dumps(command(cwd)))
    found: Finished = pickle.loads(kept.read_bytes())
    return found


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A study with enough processes for intervals: the baseline, bfloat16, batches of four, and one that cannot run."""
    variants = """{
        baseline: [],
        bfloat16: ["precision=bf16"],
        batches of four: ["workload.batch_size=4"],
        TensorFloat-32: ["precision=tf32"]
    }"""
    protocol = ("replicates=3", "rounds=6", "warmup=1", "stage_calls=1")
    arguments = (
        *(
            "run",
            "study=explicit",
            "study.name=shared",
            f"study.variants={' '.join(variants.split())}",
            *SMALL,
        ),
        *(f"protocol.{override}" for override in protocol),
        *(
            "workload.steps=2",
            "workload.size=32",
            "workload.prompt_count=4",
            "quality.prompt_count=4",
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sdopt.experiment.WorkerProcess", WorkerProcess
        )  # real ones, whoever asks for it first
        return once(
            tmp_path_factory, "finished", lambda cwd: sdopt(cwd, *arguments, pages=True)
        )


@pytest.fixture
def result(finished: Finished) -> StudyResult:
    """The result of the finished study, read anew: a test may change it."""
    return finished.result


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep of fake workers: the baseline itself, one more, one that cannot run; logged where MLflow is installed."""
    tracking = ["tracking=mlflow"] if find_spec("mlflow") else []
    arguments = ("run", "-m", *SMOKE, *tracking, "attention=default,math,cudnn")
    with fake_workers():
        return once(tmp_path_factory, "sweep", lambda cwd: sdopt(cwd, *arguments))


@pytest.fixture(scope="session")
def sweep_folder(sweep: Finished) -> Path:
    [path] = (sweep.cwd / "outputs" / "sweeps").glob("*/*/multirun.yaml")
    return path.parent


operations_of = tflop_per_image


@cache
def _packaged_pipe() -> StableDiffusionPipeline:
    pipe: StableDiffusionPipeline = StableDiffusionPipeline.from_pretrained(MODEL)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def packaged_pipe() -> StableDiffusionPipeline:
    """The packaged model as a program loads it; a copy of what was loaded once."""
    pipe: StableDiffusionPipeline = copied(_packaged_pipe())
    return pipe
