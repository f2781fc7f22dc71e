"""Composes `conf/` as Hydra does, but without Hydra's own settings, and reads each file once."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_search_path import ConfigSearchPath, SearchPathElement
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sdopt.config.overrides import group_of
from sdopt.config.paths import CONF, CONFIG_NAME

_HYDRA = "hydra"

_PACKAGED = {"pkg://hydra.conf", str(CONF), "structured://"}
"""The search path of a command without groups of the user's own."""


def loader_of(searchpath: Sequence[str]) -> "Loader":
    """Returns the loader for the search path of the running Hydra job, extended by the user's own folders.

    Args:
        searchpath: overrides of `hydra.searchpath`, which hold the user's own groups.
    """
    path = GlobalHydra.instance().config_loader().get_search_path()
    sources = tuple((str(source.provider), str(source.path)) for source in path.get_path())
    # Packaged files do not change while a program runs.
    if not searchpath and {where.removeprefix("file://") for _, where in sources} <= _PACKAGED:
        return _shared(sources)
    return Loader(path, searchpath)


@cache
def _shared(sources: tuple[tuple[str, str], ...]) -> "Loader":
    path = ConfigSearchPathImpl()
    path.config_search_path = [SearchPathElement(*source) for source in sources]
    return Loader(path)


_all_choices = defaults_list._create_interpolation_map


def _choices_if_needed(overrides: Any, defaults: list[InputDefault], self_added: bool) -> DictConfig | None:
    """Returns the choices that a defaults list may refer to, as in `${model}`; None if it refers to none.

    Hydra 1.3 makes this dictionary for every file, which takes two thirds of the time to compose a configuration.
    """
    refers = any(default.is_interpolation() for default in defaults if not default.is_self())
    return _all_choices(overrides, defaults, self_added) if refers else None


defaults_list._create_interpolation_map = _choices_if_needed  # type: ignore[assignment]


class Loader(ConfigLoaderImpl):
    """Composes configurations.

    Uses Hydra's own loader, so that a variant is composed by the rules of the job. `hydra.compose` would read every
    file again for each variant, and merge a third of them into Hydra's own settings, which a variant does not have.

    Args:
        path: where Hydra looks for files.
        searchpath: overrides of `hydra.searchpath`, which add to it.
    """

    def __init__(self, path: ConfigSearchPath, searchpath: Sequence[str] = ()) -> None:
        super().__init__(path)
        self._searchpath = list(searchpath)
        self._lists: dict[tuple[str | None, tuple[str, ...]], defaults_list.DefaultsList] = {}
        self._embedded: dict[tuple[str, str | None], ConfigResult] = {}

    def merged_files(self, overrides: Sequence[str], config_name: str | None = CONFIG_NAME) -> list[ResultDefault]:
        """Returns the files that Hydra merges, in that order, and where it puts each.

        Raises:
            HydraException: a text is no override, or names a file or a group that does not exist.
        """
        with _as_composition_error():
            return self._defaults_list(config_name, _parsed(overrides)).defaults

    def options(self, group: str) -> list[str]:
        """Lists the options of a group on the search path; none if there is no such group."""
        return self._files.get_group_options(group, ObjectType.CONFIG)

    def compose(
        self, overrides: Sequence[str], config_name: str | None = CONFIG_NAME
    ) -> tuple[DictConfig, dict[str, Any]]:
        """Composes a configuration; returns it without Hydra's own node, and the option chosen in each group.

        Raises:
            HydraException: the overrides cannot be composed.
        """
        parsed = _parsed(overrides)
        with _as_composition_error():
            self.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
            found = self._defaults_list(config_name, parsed)
            # Hydra's own groups are needed only if an override sets them.
            with_hydra = any(override.is_hydra_override() for override in parsed)
            files = [file for file in found.defaults if with_hydra or group_of(str(file.config_path)) != _HYDRA]
            cfg = self._compose_config_from_defaults_list(files, self._files)
            OmegaConf.set_struct(cfg, True)
            self._apply_overrides_to_config(found.config_overrides, cfg)
        OmegaConf.set_struct(cfg, None)
        with open_dict(cfg):
            cfg.pop(_HYDRA, None)
        return cfg, dict(found.overrides.known_choices)

    @cached_property
    def _files(self) -> CachingConfigRepository:
        return self._parse_overrides_and_create_caching_repo(CONFIG_NAME, self._searchpath)[1]

    def _defaults_list(self, config_name: str | None, overrides: list[Override]) -> defaults_list.DefaultsList:
        key = config_name, tuple(str(override.input_line) for override in overrides)
        if key not in self._lists:
            self._lists[key] = defaults_list.create_defaults_list(
                self._files, config_name, overrides, prepend_hydra=True, skip_missing=False
            )
        return self._lists[key]

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        """Returns a file where it belongs in the configuration: a copy, because what is merged takes its nodes."""
        key = str(default.config_path), default.package
        if key not in self._embedded:
            self._embedded[key] = super()._load_single_config(default, repo)
        found = self._embedded[key]
        return replace(found, config=copy.deepcopy(found.config))


def _parsed(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(overrides))


@contextmanager
def _as_composition_error() -> Iterator[None]:
    """Raises errors of OmegaConf as Hydra does."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise ConfigCompositionException from error
