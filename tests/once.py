"""What each test would make anew in its process, and what one process of the tests makes once for all of them.

Workers, and commands in processes of their own, make it themselves.
"""

import copy
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from sdopt.pipelines.loading import load_pipeline
from sdopt.schema import Model, Scheduler, Task, Tracking
from sdopt.study.state import StudyRun
from sdopt.tracking import runs, store
from sdopt.tracking.store import connect


@pytest.fixture(scope="session", autouse=True)
def counted_once() -> Iterator[None]:
    """Counts the operations of the same work once for all studies of this process."""
    counts: dict[str, float | None] = {}

    def begin(_run: StudyRun, _own: dict[str, float | None]) -> None:
        for work in [work for work, count in counts.items() if count is None]:
            del counts[work]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StudyRun, "operations", property(lambda _: counts, begin), raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def loaded_once() -> Iterator[None]:
    """Reads the packaged pipeline once for all that load it in this process: each gets a copy of it as it was."""
    kept: dict[str, DiffusionPipeline] = {}

    def load(
        model: Model, scheduler: Scheduler, task: Task, device: str, arguments: dict[str, Any], on_host: bool
    ) -> DiffusionPipeline:
        given = (model, scheduler, task, device, arguments, on_host)
        if model.weights != "packaged" or any(not isinstance(value, torch.dtype) for value in arguments.values()):
            return load_pipeline(*given)
        if (key := repr(given)) not in kept:
            kept[key] = load_pipeline(*given)
        shared = {id(kept[key].tokenizer): kept[key].tokenizer}  # nobody changes it
        return copy.deepcopy(kept[key], shared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdopt.assembly.load_pipeline", load)
        yield


@pytest.fixture(scope="session", autouse=True)
def migrated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the tables of one database of MLflow, in seconds; further new ones of this process begin as its copies."""
    made = tmp_path_factory.mktemp("mlflow") / "new.db"

    def begun(tracking: Tracking) -> Any:
        file = Path(tracking.uri.removeprefix("sqlite:///"))
        new = tracking.uri.startswith("sqlite:///") and not file.exists()
        if new and made.is_file():
            with suppress(OSError):  # the real one says so
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(made, file)
        client = connect(tracking)
        if new and not made.is_file():
            shutil.copyfile(file, made)
        return client

    with pytest.MonkeyPatch.context() as patch:
        for module in (store, runs):
            patch.setattr(module, "connect", begun)
        yield
