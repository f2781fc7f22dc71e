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
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
    IConfigRepository,
)
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import flag_override

from sdopt import experiment
from sdopt.config.compositions import PACKAGED
from sdopt.config.paths import options_of
from sdopt.measure import processes
from sdopt.pipelines import loading
from sdopt.pipelines.factory import describe
from sdopt.quality import evaluation
from sdopt.schema import Model, Task, Tracking
from sdopt.study import plan
from sdopt.tracking import store
from sdopt.tracking.client import file_of
from sdopt.worker import machine
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine
from tests.command import servers


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
def read_once() -> Iterator[None]:
    """Reads each packaged file of the configuration, and parses each override, once in this process."""
    read: dict[str, bytes] = {}
    parsed: dict[str, Override] = {}
    read_file = ConfigRepository.load_config
    parse = OverridesParser.parse_rule
    map_choices = defaults_list._create_interpolation_map

    def read_it(repo: ConfigRepository, config_path: str) -> Any:
        if not _is_packaged(repo):
            return read_file(repo, config_path)
        if config_path not in read:
            read[config_path] = pickle.dumps(read_file(repo, config_path))
        return pickle.loads(read[config_path])

    def parse_once(parser: OverridesParser, text: str, rule: str) -> Any:
        if rule != "override":
            return parse(parser, text, rule)
        if text not in parsed:
            parsed[text] = parse(parser, text, rule)
        return copy.copy(parsed[text])

    def share_sources(
        repo: CachingConfigRepository, delegate: IConfigRepository
    ) -> None:
        """Hydra copies them deeply, so that no other list of them is begun in the same repository."""
        repo.delegate, repo.cache = copy.copy(delegate), {}

    def map_what_is_asked(
        overrides: Overrides, files: list[InputDefault], self_added: bool
    ) -> Any:
        """For each file, Hydra lists all choices so far, which only a file with a name made of others asks for."""
        if any(file.is_interpolation() for file in files):
            return map_choices(overrides, files, self_added)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", read_it)
        patch.setattr(OverridesParser, "parse_rule", parse_once)
        patch.setattr(CachingConfigRepository, "__init__", share_sources)
        patch.setattr(defaults_list, "_create_interpolation_map", map_what_is_asked)
        yield


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Merges the files of the same choices once in this process; only what sets keys is then done for each composition.

    Three quarters of Hydra's time are these files, and a test composes some choices dozens of times with other keys.
    Hydra's own files, which come first in each composition, are merged once for all choices.
    """
    lists: dict[tuple[object, ...], DefaultsList] = {}
    merged: dict[tuple[object, ...], bytes] = {}
    list_defaults = defaults_list.create_defaults_list
    merge = ConfigLoaderImpl._compose_config_from_defaults_list

    def list_once(
        repo: IConfigRepository,
        config_name: str | None,
        overrides_list: list[Override],
        **how: bool,
    ) -> DefaultsList:
        if not _is_packaged(repo) or any(map(_names_a_file, overrides_list)):
            return list_defaults(repo, config_name, overrides_list, **how)
        choices = [o for o in overrides_list if "." not in o.key_or_group or o.package]
        key = config_name, *how.items(), *(choice.input_line for choice in choices)
        if key not in lists:
            lists[key] = list_defaults(repo, config_name, choices, **how)
        of_choices = lists[key]
        chosen = {
            choice.input_line
            for choice in choices
            if choice not in of_choices.config_overrides
        }
        # Values that a sweep goes through are set job by job.
        keys = [
            o
            for o in overrides_list
            if o.input_line not in chosen and not o.is_sweep_override()
        ]
        return replace(of_choices, config_overrides=keys)

    def merge_once(
        loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> Any:
        if not _is_packaged(repo):
            return merge(loader, defaults, repo)
        key = tuple((file.config_path, file.package) for file in defaults)
        if key not in merged:
            merged[key] = pickle.dumps(merge_anew(loader, defaults, repo, key))
        return pickle.loads(merged[key])

    def merge_anew(
        loader: ConfigLoaderImpl,
        defaults: list[ResultDefault],
        repo: IConfigRepository,
        key: tuple[object, ...],
    ) -> Any:
        of_hydra = sum(1 for _ in takewhile(_is_of_hydra, defaults))
        begun = key[:of_hydra]
        if begun not in merged:
            merged[begun] = pickle.dumps(merge(loader, defaults[:of_hydra], repo))
        cfg = pickle.loads(merged[begun])
        with flag_override(cfg, "no_deepcopy_set_nodes", True):
            cfg.merge_with(merge(loader, defaults[of_hydra:], repo))
        return cfg

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_loader_impl, "create_defaults_list", list_once)
        patch.setattr(
            ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once
        )
        yield


def _is_of_hydra(file: ResultDefault) -> bool:
    return (file.config_path or "").startswith("hydra/")


def _is_packaged(repo: IConfigRepository) -> bool:
    return {source.full_path() for source in repo.get_sources()} <= PACKAGED


def _names_a_file(override: Override) -> bool:
    """Returns whether it chooses a file that a test may change."""
    group = override.key_or_group
    return group in ("model", "patch") and f"{override.value()}" not in options_of(
        group
    )


@pytest.fixture(scope="session", autouse=True)
def loaded_once() -> Iterator[None]:
    """Loads a packaged pipeline once in each type and for each task, and copies it for whoever loads it again."""
    load = loading._from_files
    kept: dict[str, Any] = {}

    def load_once(
        model: Model, task: Task, load_kwargs: dict[str, Any], device: str
    ) -> Any:
        if model.weights != "packaged" or load_kwargs.keys() - {"dtype"}:
            return load(model, task, load_kwargs, device)
        key = f"{model} {task.kind} {load_kwargs}"
        if key not in kept:
            kept[key] = load(model, task, load_kwargs, device)
        return copied(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_from_files", load_once)
        yield


def copied(pipe: Any) -> Any:
    """A copy of a pipeline, which shares its tokenizers."""
    shared = {
        id(part): part
        for role, part in pipe.components.items()
        if role.startswith("tokenizer")
    }
    return copy.deepcopy(pipe, shared)


@pytest.fixture(scope="session", autouse=True)
def counted_alone() -> Iterator[None]:
    """Leaves the server that workers are forked from out of what a worker in this process is said to hold.

    The kernel looks at all of its pages to count them, in each call.
    """
    started_by = processes.started_by

    def started_by_test(pid: int) -> list[int]:
        return [child for child in started_by(pid) if child not in servers()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "started_by", started_by_test)
        yield


@pytest.fixture(scope="session", autouse=True)
def migrated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the tables of one database of MLflow, in seconds; further new ones of all processes begin as its copies."""
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "mlflow.db"
    ask = store._Process.ask

    def asked(process: Any, tracking: Tracking, *request: Any) -> Any:
        file = file_of(tracking)
        new = file is not None and not file.exists()
        if file is not None and new and made.is_file():
            with suppress(OSError):  # the real one says so
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(made, file)
        answer = ask(process, tracking, *request)
        if file is not None and new and not made.is_file() and file.is_file():
            begun = made.with_name(f"mlflow.{os.getpid()}")
            shutil.copyfile(file, begun)
            with closing(sqlite3.connect(begun)) as copy, copy:
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
            begun.replace(made)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._Process, "ask", asked)
        yield
