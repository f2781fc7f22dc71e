"""Derives what a study's MLflow runs hold from its `result.json`."""

import getpass
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # PyYAML has none

from sdopt.analysis.answer import answer_of
from sdopt.analysis.disturbance import count_rounds
from sdopt.analysis.figures import Figures, figures_of, floor_range
from sdopt.analysis.measures import with_shape
from sdopt.report.markdown import markdown_table
from sdopt.report.verdicts import verdict_markdown
from sdopt.results.configuration import RecordedConfig
from sdopt.results.files import to_json
from sdopt.results.folders import inside
from sdopt.results.records import StudyResult, VariantResult
from sdopt.results.verdicts import Verdict
from sdopt.tracking.client import NOTE, ROLE, STUDY, VARIANT, Picture, Run

_NOTE_LIMIT = 8000

_TAG_LIMIT = 5000


def time_of(moment: str | None, fallback: str) -> int:
    """Returns a recorded time in milliseconds since 1970, as MLflow needs it."""
    return int(1000 * datetime.fromisoformat(moment or fallback).timestamp())


def note_of(text: str) -> str:
    """Returns a note, cut to the length that MLflow accepts."""
    if len(text) <= _NOTE_LIMIT:
        return text
    return text[: _NOTE_LIMIT - 60].rsplit("\n", 1)[0] + "\n\n… cut here: the tables among the artifacts are whole."


def newest_note(result: StudyResult, name: str) -> str:
    """Returns the note of an experiment: the answer of its newest study, above the leaderboard."""
    return note_of(f"**{name}:** {answer_of(result).sentence}\n\nStudies have notes with all verdicts and figures.")


def common_tags(result: StudyResult, config: RecordedConfig) -> dict[str, str]:
    """Returns the common tags of a study's run and its variants' runs: work, machine, software and user."""
    environment = result.environment
    versions = {"sdopt": environment.sdopt_version, **environment.packages}
    return {
        **{key: str(value)[:_TAG_LIMIT] for key, value in (result.config.tracking.tags or {}).items()},
        STUDY: result.id,
        "study": result.name,
        **{name: str(value) for name, value in study_parameters(config).items()},
        "device": str(environment.device["name"]),
        **{name: versions[name] for name in ("torch", "diffusers", "sdopt") if name in versions},
        "mlflow.user": _user(),
        "mlflow.source.name": " ".join(environment.command)[:_TAG_LIMIT],
        "mlflow.source.type": "LOCAL",
        **({"mlflow.source.git.commit": environment.sdopt_commit} if environment.sdopt_commit else {}),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return "unknown"


def study_tags(result: StudyResult) -> dict[str, str]:
    """Returns the tags of a study's run; its note begins with the answer."""
    counts, floors = count_rounds(result), floor_range(result)
    environment = result.environment
    disturbed = any(session.disturbed_by for session in result.sessions) or bool(counts and counts.undecided)
    return common_tags(result, result.config) | {
        ROLE: "study",
        "sdopt.design": result.design,
        "sdopt.status": result.status,
        "sdopt.commit": (environment.sdopt_commit or "none") + ("+dirty" if environment.sdopt_dirty else ""),
        "sdopt.sessions": str(len(result.sessions)),
        "sdopt.disturbed": str(disturbed).lower(),
        # No metrics: MLflow would draw a chart of each above the pictures.
        **({"sdopt.floor": " to ".join(dict.fromkeys(f"{end:.4f}" for end in floors))} if floors else {}),
        **({"sdopt.rounds": f"{counts.timed} timed, {counts.disturbed} disturbed"} if counts else {}),
        **judged_tags(result),
    }


def judged_tags(result: StudyResult) -> dict[str, str]:
    """Returns the tags of a study's run that change when a gate judges later."""
    verdicts = [verdict_markdown(result, result.judgements)] if result.judgements else []
    own = [f"{result.config.tracking.note}\n"] if result.config.tracking.note else []
    answer = answer_of(result).sentence
    return {
        NOTE: note_of("\n".join([*own, markdown_table(result), *verdicts])),
        "answer": answer[:_TAG_LIMIT],
        **({"gate": result.gate} if result.judgements else {}),
    }


def variant_run(result: StudyResult, variant: VariantResult, folder: Path, images: bool) -> Run:
    """Returns the run of a variant; of its images only those of the first prompts, to look at.

    Raises:
        UsageError: the result names an image that is not in its folder.
    """
    started, ended = time_of(result.started, result.started), time_of(result.finished, result.started)
    several = len(result.shapes) > 1
    # If there is one shape, a variant's may differ from the study's.
    shapes = result.shapes if several else variant.config.shapes[:1]
    views = [(shape, variant.at(index)) for index, shape in enumerate(shapes)]
    metrics = [(name, value, 0) for name, value in logged_metrics(result, variant).items()]
    for shape, at in views:
        name = with_shape("latency/round_s", shape.name if several else "")
        for replicate, samples in at.samples.items():
            own = name + (f"/process_{replicate}" if len(at.samples) > 1 else "")
            metrics += [(own, seconds, step) for step, seconds in enumerate(samples, 1)]
    files = [(record, inside(folder, record.path)) for record in variant.images] if images else []
    shown = variant.config.workload.prompt_count * variant.config.workload.images_per_prompt
    pictures = [
        Picture(f"{record.prompt_index:02d} {_image_key(record.prompt)}", file, record.image_index)
        for record, file in files[:shown]
        if file.is_file()  # a record may be kept without its images
    ]
    evidence = [
        {
            "replicate": m.replicate,
            "session": m.session,
            **({"shape": shape.name} if several else {}),
            "axis": e.axis,
            "option": e.option,
            "engaged": e.engaged,
            **e.facts,
        }
        for shape, at in views
        for m in at.measurements
        for e in m.shapes[0].evidence
    ]
    # MLflow lists the latest run first, and variants are measured side by side: the baseline comes first.
    rank = len(result.variants) - [row.name for row in result.variants].index(variant.name)
    return Run(
        name=variant.name,
        tags=variant_tags(result, variant),
        status="FINISHED" if variant.status.measured else "FAILED",
        started=started + rank,
        ended=ended,
        parameters=variant_parameters(result, variant),
        metrics=metrics,
        files={"evidence.json": json.dumps({"evidence": evidence}, indent=2).encode()} if evidence else {},
        pictures=pictures,
    )


def _image_key(prompt: str) -> str:
    return re.sub(r"[^A-Za-z0-9 _-]+", " ", prompt).strip()[:60]


def variant_tags(result: StudyResult, variant: VariantResult) -> dict[str, str]:
    """Returns the tags of a variant's run."""
    return {
        **verdict_tags(result, variant),  # MLflow's columns are in this order
        **common_tags(result, variant.config),
        **variant.choices,
        ROLE: variant.role,
        VARIANT: variant.name,
        "status": str(variant.status),
        "contract": variant.contract,
        **({NOTE: note_of(variant.reason)} if variant.reason else {}),
    }


def verdict_tags(result: StudyResult, variant: VariantResult) -> dict[str, str]:
    """Returns the tags of a variant's run with the verdict of each of its comparisons."""
    answers = [option for option in answer_of(result).options if option.variant == variant.name]
    verdicts = [f"{j.verdict} against {j.reference}" for j in result.judgements if j.candidate == variant.name]
    verdict_texts = [f"{option.worth}: {option.because}" for option in answers]
    beside = [f" (against {option.reference})" if len(answers) > 1 else "" for option in answers]
    tags = {
        "answer": "; ".join(map(str.__add__, verdict_texts, beside))[:_TAG_LIMIT],
        "worth": "; ".join(dict.fromkeys(str(option.worth) for option in answers)),
    }
    return {
        **(tags if answers else {}),
        **({"verdict": "; ".join(verdicts), "gate": result.gate} if verdicts else {}),
    }


def study_parameters(config: RecordedConfig) -> dict[str, Any]:
    """Returns only a few parameters, because MLflow prints all of them above each image; `config.yaml` has the rest."""
    sizes, batches = (dict.fromkeys(getattr(shape, key) for shape in config.shapes) for key in ("size", "batch_size"))
    return {
        "model": config.model.name,
        "size": ", ".join(map(str, sizes)),
        "steps": config.workload.steps,
        "batch": ", ".join(map(str, batches)),
    }


def variant_parameters(result: StudyResult, variant: VariantResult) -> dict[str, Any]:
    """Returns the choices and keys in which variants of the study differ, with this variant's values."""
    others = [other for other in result.variants if other is not variant]
    choices = {
        axis: option
        for axis, option in variant.choices.items()
        if any(other.choices.get(axis) != option for other in others)
    }
    named = tuple(f"{axis}." for axis in variant.choices)
    keys = [_flat(other.config).items() for other in result.variants]
    own = {
        key: value
        for key, value in _flat(variant.config).items()
        if not f"{key}.".startswith(named) and any((key, value) not in other for other in keys)
    }
    return choices | own


def _flat(config: RecordedConfig) -> dict[str, Any]:
    """Returns a configuration by full names, without the study's own keys, which are the same in all its variants."""
    return {key: value for key, value in config.flat().items() if key.partition(".")[0] != "study"}


def config_yaml(result: StudyResult) -> str:
    """Returns the whole configuration of a study as YAML, with the versions of the software."""
    document = json.loads(to_json(result))
    sections = document["config"] | {"packages": document["environment"]["packages"]}
    return str(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True))


def logged_metrics(result: StudyResult, variant: VariantResult) -> dict[str, float]:
    """Returns every figure of a variant by its flat name; figures of further comparisons are named by the reference.

    The run is the variant's, so `gate/passed` says whether it passed in all of its comparisons.
    """
    first, *others = [row for row in figures_of(result) if row.variant is variant]
    verdicts = [row.verdict for row in (first, *others) if row.verdict is not None]
    figures = first.flat
    if "gate/passed" in figures:
        figures["gate/passed"] = float(all(verdict is Verdict.PASS for verdict in verdicts))
    return figures | {
        f"{name}/against {_plain(row.reference)}": value
        for row in others
        for name, value in _of_comparison(row).items()
    }


def _of_comparison(row: Figures) -> dict[str, float]:
    distances = {f"quality/{name}" for name in (row.comparison.quality if row.comparison else {})}
    return {name: value for name, value in row.flat.items() if name in distances or name.startswith(tuple(row.ratios))}


def _plain(name: str) -> str:
    """Returns a name with only the characters that MLflow allows in names of metrics."""
    return re.sub(r"[^\w .-]+", " ", name).strip()


def run_name(result: StudyResult, folder_name: str) -> str:
    """Returns the name of a study's run; in a sweep, the job's number and what the job measured.

    The run of a variant has the variant's name.
    """
    if not folder_name.isdecimal():
        return f"{result.name} {folder_name}"
    return f"{folder_name}: {', '.join(row.name for row in result.candidates) or result.baseline}"
