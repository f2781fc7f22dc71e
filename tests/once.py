"""What each test would make anew in its process, and what one process of the tests makes once for all of them.

Workers, and commands in processes of their own, make it themselves.
"""

import copy
import os
import pickle
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.utils import JobRuntime
from omegaconf import OmegaConf

from sdopt import experiment
from sdopt.config.compositions import PACKAGED
from sdopt.config.overrides import parsed_override
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.pipelines.factory import describe
from sdopt.quality import evaluation
from sdopt.schema import Tracking
from sdopt.study import plan
from sdopt.tracking import store
from sdopt.tracking.client import file_of
from sdopt.worker import machine
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine


@pytest.fixture(scope="session", autouse=True)
def asked_here() -> Iterator[None]:
    """Asks in this process what a command asks processes of their own, and for the machine once.

    What runs a user's code stays apart. Commands in processes of their own ask as users' do.
    """
    machines: dict[tuple[str, str], Machine] = {}

    def ask(
        context: StartContext, function: Callable[..., Any], *arguments: Any, what: str
    ) -> Any:
        return (
            in_process(context, function, *arguments, what=what)
            if function is describe
            else function(*arguments)
        )

    def ask_machine(
        context: StartContext, probe: Callable[..., Machine], wanted: str, what: str
    ) -> Machine:
        key = context.get_start_method(), wanted
        if key not in machines:
            machines[key] = in_process(context, probe, wanted, what=what)
        return copy.deepcopy(machines[key])

    def evaluate(
        _context: StartContext,
        function: Callable[..., Any],
        *arguments: Any,
        note: Callable[..., Any],
    ) -> Any:
        threads = torch.get_num_threads()
        try:
            return function(*pickle.loads(pickle.dumps(arguments)), note=note)
        finally:
            torch.set_num_threads(threads)

    with pytest.MonkeyPatch.context() as patch:
        for module in (experiment, plan):
            patch.setattr(module, "in_process", ask)
        patch.setattr(machine, "in_process", ask_machine)
        patch.setattr(evaluation, "call_apart", evaluate)
        yield


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Composes the same overrides once in this process: Hydra does so three times for a command that ran before."""
    kept: dict[tuple[object, ...], bytes] = {}
    compose = ConfigLoaderImpl.load_configuration

    def load(
        loader: ConfigLoaderImpl,
        config_name: str | None,
        overrides: list[str],
        *given: Any,
        **named: Any,
    ) -> Any:
        folder = [
            override
            for override in overrides
            if override.startswith(("hydra.run.dir=", "hydra.sweep.dir="))
        ]
        others = [override for override in overrides if override not in folder]
        sources = {str(source.path) for source in loader.get_search_path().get_path()}
        if not sources <= PACKAGED or not all(map(_is_plain, others)):
            return compose(loader, config_name, overrides, *given, **named)
        key = config_name, *others
        if key not in kept:
            kept[key] = pickle.dumps(
                compose(loader, config_name, others, *given, **named)
            )
        cfg = pickle.loads(kept[key])
        for override in folder:
            OmegaConf.update(
                cfg, override.partition("=")[0], parsed_override(override).value()
            )
            cfg.hydra.overrides.hydra.append(override)
        cfg.hydra.runtime.cwd = str(Path.cwd())
        cfg.hydra.job.name = JobRuntime().get("name")
        return cfg

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigLoaderImpl, "load_configuration", load)
        yield


def _is_plain(override: str) -> bool:
    """Returns whether an override has one value, is none of Hydra's own, and names no file that a test may change."""
    try:
        parsed = parsed_override(override)
    except UsageError:
        return False
    named = parsed.key_or_group in (
        "model",
        "patch",
    ) and f"{parsed.value()}" not in options_of(parsed.key_or_group)
    return not (named or parsed.is_sweep_override() or parsed.is_hydra_override())


@pytest.fixture(scope="session", autouse=True)
def read_once() -> Iterator[None]:
    """Reads each YAML file once in this process: Hydra reads dozens of them, twice for each command."""
    kept: dict[tuple[int, int, int], Any] = {}
    load = OmegaConf.load

    def read(file: Any) -> Any:
        try:
            found = (
                os.fstat(file.fileno())
                if hasattr(file, "fileno")
                else Path(file).stat()
            )
        except OSError:
            return load(file)
        key = found.st_dev, found.st_ino, found.st_mtime_ns
        if key not in kept:
            kept[key] = load(file)
        return copy.deepcopy(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(read))
        yield


@pytest.fixture(scope="session", autouse=True)
def migrated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the tables of one database of MLflow, in seconds; further new ones of this process begin as its copies."""
    made, ask = tmp_path_factory.mktemp("mlflow") / "new.db", store._Process.ask

    def begun(process: Any, tracking: Tracking, *request: Any) -> Any:
        file = file_of(tracking)
        new = file is not None and not file.exists()
        if file is not None and new and made.is_file():
            with suppress(OSError):  # the real one says so
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(made, file)
        answer = ask(process, tracking, *request)
        if file is not None and new and not made.is_file() and file.is_file():
            shutil.copyfile(file, made)
            with closing(sqlite3.connect(made)) as copy, copy:
                for table in (
                    "runs",
                    "experiments",
                    "metrics",
                    "latest_metrics",
                    "params",
                    "tags",
                    "experiment_tags",
                ):
                    copy.execute(f"DELETE FROM {table}")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._Process, "ask", begun)
        yield
