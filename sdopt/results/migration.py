"""Migrates a result of an earlier version of sdopt to the present schema."""

from dataclasses import fields
from typing import Any

from sdopt.errors import UsageError
from sdopt.results.configuration import RecordedConfig
from sdopt.results.records import SCHEMA_VERSION
from sdopt.results.verdicts import Payoff

_SECTIONS = {field.name for field in fields(RecordedConfig)}


def migrated(document: Any) -> Any:
    """Returns a parsed `result.json` in the present schema; content that is not a result is left to validation.

    Version 1 kept the configuration flat, with the options' axes among the sections; version 2 called a session a
    sitting. Keys that a section has no more are dropped when it is typed, and new keys take their defaults. Rulings of
    earlier versions say only in their reason whether an option pays, and their code for `attention=default` turned on
    another attention.

    Raises:
        UsageError: a later version of sdopt wrote it.
    """
    if not isinstance(document, dict):
        return document
    version = document.get("schema_version", 1)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UsageError(f"written by a later sdopt (schema {version}, this reads {SCHEMA_VERSION}); update it")
    _add_payoffs(document.get("judgements"))
    for variant in _objects(document.get("variants")):
        _correct_code(variant.get("snippets"))
        for measurement in _objects(variant.get("measurements")):
            _rename(measurement, "sitting", "session")
    _rename(document, "sittings", "sessions")
    if version == 1:
        variants = document.get("variants")
        if isinstance(variants, list):
            variants = [_with_sections(variant) for variant in variants]
        document = {**_with_sections(document), "variants": variants}
    return {**document, "schema_version": SCHEMA_VERSION} if version in (1, 2) else document


def _rename(owner: dict[str, Any], old: str, new: str) -> None:
    if old in owner:
        owner[new] = owner.pop(old)


def _add_payoffs(judgements: Any) -> None:
    found = [judgement.get("rulings") for judgement in _objects(judgements)]
    for ruling in (ruling for rulings in found for ruling in _objects(rulings)):
        if "payoff" not in ruling:
            word = str(ruling.get("reason")).partition(":")[0]
            ruling["payoff"] = word if word in {*Payoff} else None


_WRONG = ["pipe.unet.set_default_attn_processor()"]
"""Sets AttnProcessor on a UNet, which is `attention=vanilla`."""

_RIGHT = [
    "from diffusers.models.attention_processor import AttnProcessor2_0",
    "pipe.unet.set_attn_processor(AttnProcessor2_0())",
]


def _correct_code(snippets: Any) -> None:
    if isinstance(snippets, dict) and snippets.get("attention") == _WRONG:
        snippets["attention"] = list(_RIGHT)


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _with_sections(owner: Any) -> Any:
    return {**owner, "config": _sectioned(owner.get("config"))} if isinstance(owner, dict) else owner


def _sectioned(config: Any) -> Any:
    """Moves the keys of a flat configuration that are not sections below `options`; makes a single objective a list."""
    if not isinstance(config, dict):
        return config
    objective = config.get("objective", [])
    return {
        **{key: value for key, value in config.items() if key in _SECTIONS},
        "options": {key: value for key, value in config.items() if key not in _SECTIONS},
        "objective": [objective] if isinstance(objective, str) else objective,
    }
