"""Finds what keeps two results of a study from being compared: other devices, models, work, versions or choices."""

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from sdopt.quality.metrics import reference_of
from sdopt.record.choices import NONE, PATCH, PLAIN, without_folders
from sdopt.record.records import Environment, StudyResult, VariantResult
from sdopt.schema import AMOUNT, CHOICES, WORK
from sdopt.scratch import CACHES

WAIVERS = ("versions", "sdopt", "options")
"""Differences that may be waived by name: `versions` of torch, diffusers and the like
and variables that change how these compute, the code of `sdopt`, and the
choices of variants of the same name (`options`), including the keys of these options."""

_OF_OPTIONS = ("contents of options", "contents of parts")
"""The code of a user's own options, and the files that options read: what they are is a choice of the variant."""

_CHOSEN = (*CHOICES, *AMOUNT)
"""Beginnings of the keys of the work that a variant chooses."""

_OF_IMAGES = "contents of images"
"""What other programs made: images are what is compared, prompt by prompt."""

Difference = tuple[str, str]
"""One reason why two results are not comparable, and the name of the waiver that allows it, "" if none does."""

_Side = Mapping[str, Any]
"""The values of settings in one result, by name."""

_Values = dict[str, tuple[Any, Any]]
"""The values of settings in the later and in the earlier result, by name."""

_LOADED_BY = {
    "deepspeed": ("deepspeed",),
    "onnxruntime": ("onnxruntime",),
    "onnxscript": ("onnxruntime",),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt",),
    "torch-tensorrt": ("tensorrt",),
    "torch-blade": ("blade",),
    "sdnq": ("sdnq", "quantized"),
    "torchao": ("torchao", "quantized"),
    "tomesd": ("tome",),
    "xformers": ("xformers",),
}
"""Words of the options that load a package; a study without such an option is the same with any version of it."""


def differences(later: StudyResult, earlier: StudyResult) -> list[Difference]:
    """Returns what keeps two results from being compared: other devices, models, workloads, versions or choices."""
    return [
        *_of_results(later, earlier),
        *_of_code(later, earlier),
        *_of_choices(later, earlier),
        *_of_inputs(later, earlier),
    ]


def _against(name: str, now: object, then: object) -> str:
    return f"{name}: {now} against {then}"


def _changed(now: _Side, then: _Side) -> _Values:
    """Returns what differs, by name; None stands for what one side has not."""
    nothing = dict.fromkeys(sorted({*now, *then}))
    return changed_in_both({**nothing, **now}, {**nothing, **then})


def changed_in_both(now: _Side, then: _Side) -> _Values:
    """Returns what differs, of what both sides have, by name."""
    changed: _Values = {}
    for name, value in now.items():
        earlier = then.get(name, value)
        if value != earlier:
            changed[name] = (value, earlier)
    return changed


def _of_results(later: StudyResult, earlier: StudyResult) -> Iterator[Difference]:
    now = later.environment
    then = earlier.environment
    settings: _Values = {
        "device": (now.device.get("name"), then.device.get("name")),
        "cpu": (now.cpu.get("name"), then.cpu.get("name")),
        **_sizes_of_cards(now.device, then.device),
        **changed_in_both(_settings(now), _settings(then)),
        "baseline": (later.baseline, earlier.baseline),
        **_work(later, earlier, later.baseline_variant, earlier.baseline_variant),
        # Which images distances such as CMMD are to, their names do not say.
        "quality.reference": (
            reference_of(later.config.quality, later.config.model),
            reference_of(earlier.config.quality, earlier.config.model),
        ),
        **_contents(later.feature_digests, earlier.feature_digests),
    }
    for name, (value, earlier_value) in settings.items():
        if value != earlier_value:
            yield _against(name, value, earlier_value), ""


PLACES = {
    "model.path": "model",
    "model.base": "model",
    "model.tokenizer": "model",
    "model.factory": "model",
    "task.image": "image",
    "task.mask": "mask",
    "workload.latents": "latents",
    "patch.functions": "options",
    "lora.path": "parts",
}
"""Keys that name files of the user's own, and the recorded digest of their contents."""


def _without_moves(changed: _Values, now: _Side, then: _Side) -> _Values:
    """Returns what differs but for files of the same name in another folder, whose contents both sides know."""
    kept: _Values = {}
    for key, (value, earlier) in changed.items():
        digest = PLACES.get(key)
        known = digest in now and digest in then
        if not known or _file_names(value) != _file_names(earlier):
            kept[key] = (value, earlier)
    return kept


def _file_names(value: Any) -> list[str]:
    places = value if isinstance(value, list) else [value]
    return [Path(str(place)).name for place in places]


def _work(
    later: StudyResult | VariantResult,
    earlier: StudyResult | VariantResult,
    now: VariantResult,
    then: VariantResult,
) -> _Values:
    """Returns the keys of the work that differ, by what is known of the inputs of two variants."""
    changed = later.config.differing(earlier.config, WORK)
    return _without_moves(changed, now.inputs, then.inputs)


_OF_CARDS = (
    "power_limit_w",
    "max_sm_clock_mhz",
    "mig_slice",
    "ecc",
    "pcie_generation",
    "pcie_lanes",
)
"""Settings of a card by which the same option gains more or less."""


def _settings(environment: Environment) -> dict[str, Any]:
    """Returns settings of a device that change what options gain, as far as they are recorded."""
    device = environment.device
    gpu = environment.gpu
    cpu = environment.cpu
    settings: dict[str, Any] = {}
    if device.get("type") == "cuda":  # an RTX 3080 has several numbers of them
        cores = device.get("attributes", {}).get("multiprocessors")
        if cores is not None:
            settings["device.multiprocessors"] = cores
    for name in _OF_CARDS:
        if name in gpu:
            settings[f"gpu.{name}"] = gpu[name]
    if device.get("type") == "cpu":
        settings["cpu.cores"] = cpu.get("cores")
        settings["cpu.capability"] = cpu.get("capability")
        if "threads" in cpu:
            settings["cpu.threads"] = cpu["threads"]
    return settings


_NEARLY = 0.05
"""Share by which the memory of one card differs: a driver keeps some of it."""


def _sizes_of_cards(now: _Side, then: _Side) -> _Values:
    """Returns the memory of two cards where it differs: an RTX 3060 has 8 or 12 GB."""
    if not now.get("type") == then.get("type") == "cuda":
        return {}
    here: float = now.get("memory_total_gib", 0.0)
    there: float = then.get("memory_total_gib", here)
    if not here or math.isclose(here, there, rel_tol=_NEARLY):
        return {}
    return {"device.memory_total_gib": (round(here, 1), round(there, 1))}


_OF_DEVICES = ("driver", "cuda")
"""What computes on a device beside PyTorch, whose version does not tell it."""


def device_software(environment: Environment) -> dict[str, Any]:
    """Returns the driver and the libraries of a device, as far as they are recorded."""
    device = environment.device
    recorded = {**device, **device.get("attributes", {})}
    software = {}
    for name in _OF_DEVICES:
        if recorded.get(name) is not None:
            software[f"device.{name}"] = recorded[name]
    return software


def changed_variables(now: Environment, then: Environment) -> _Values:
    """Returns the environment variables that change how libraries compute, and differ; None where one is not set."""
    changed = _changed(now.variables, then.variables)
    for name in CACHES:
        changed.pop(name, None)
    return changed


def _of_code(later: StudyResult, earlier: StudyResult) -> Iterator[Difference]:
    now = later.environment
    then = earlier.environment
    packages = _changed(now.packages, then.packages)
    for name, versions in packages.items():
        if _counts(name, later, earlier):
            yield _against(name, *versions), "versions"
    minor, _, _ = now.python.rpartition(".")
    earlier_minor, _, _ = then.python.rpartition(".")
    if minor != earlier_minor:
        yield _against("python", now.python, then.python), "versions"
    changed = changed_variables(now, then)
    changed |= changed_in_both(device_software(now), device_software(then))
    for name, values in changed.items():
        yield _against(name, *values), "versions"
    same_version = now.sdopt == then.sdopt
    same_code = same_version and not now.sdopt_dirty
    if now.code and then.code:
        same_code = now.code == then.code
    if same_code:
        return
    line = _against("sdopt", now.sdopt, then.sdopt)
    if same_version:
        line = f"sdopt: other code of the same version, {now.sdopt}"
    yield line, "sdopt"


def _counts(package: str, later: StudyResult, earlier: StudyResult) -> bool:
    """Returns whether a package may have changed a result: code of the user's own may load any."""
    if package not in _LOADED_BY:
        return True
    models = (later.config.model, earlier.config.model)
    if any(model.factory for model in models):
        return True
    words = _LOADED_BY[package]
    for variant in (*later.variants, *earlier.variants):
        chosen = str(variant.choices)
        if PATCH in variant.choices or any(word in chosen for word in words):
            return True
    return False


def _of_choices(later: StudyResult, earlier: StudyResult) -> Iterator[Difference]:
    everywhere = {variant.name for variant, _ in in_both(later, earlier)}
    changed = changed_choices(later, earlier)
    for change, names in changed.items():
        # Speed-ups are relative to the baseline, so a change of it can only be waived if all variants changed alike.
        waivable = later.baseline not in names or everywhere <= {*names}
        waiver = "options" if waivable else ""
        yield f"{change} ({', '.join(names)})", waiver


def changed_choices(
    later: StudyResult,
    earlier: StudyResult,
) -> dict[str, list[str]]:
    """Returns the choices that differ between variants of the same name, such as `caching.interval: 5 against 3`.

    Each has the names of the variants in which it differs. Differences between the studies as a whole are left out.
    """
    of_study = later.config.differing(earlier.config, WORK)
    changed: dict[str, list[str]] = {}
    for now, then in in_both(later, earlier):
        for key, values in _choices(now, then).items():
            if key not in of_study and key != "hardware.price_per_hour":
                names = changed.setdefault(_against(key, *values), [])
                names.append(now.name)
    return changed


def _choices(now: VariantResult, then: VariantResult) -> _Values:
    """Returns what two variants choose otherwise: of the work, of options, and of their code and files."""
    choices: _Values = {}
    settings = now.config.differing(then.config, (*WORK, "hardware"))
    for key, values in settings.items():
        if key.startswith(_CHOSEN):
            choices[key] = values
    choices |= _options(now, then)
    contents = _contents(now.inputs, then.inputs)
    for key in _OF_OPTIONS:
        if key in contents:
            choices[key] = contents[key]
    return choices


def _options(now: VariantResult, then: VariantResult) -> _Values:
    """Returns the options and keys of options in which two variants differ, by full name, with both values."""
    axes = (*now.choices, *then.choices)
    groups = {axis.partition(".")[0] for axis in axes}
    groups -= {*WORK}
    # An axis that one of them has not is of another version of sdopt: its default, which changes nothing.
    plain = {axis: PLAIN.get(axis, NONE) for axis in axes}
    later = plain | now.config.flat() | without_folders(now.choices)
    earlier = plain | then.config.flat() | without_folders(then.choices)
    options: _Values = {}
    # A key that only one side has comes from another version of sdopt; another option shows among the choices.
    changed = changed_in_both(later, earlier)
    for key, values in _without_moves(changed, now.inputs, then.inputs).items():
        group, _, _ = key.partition(".")
        # The location of an option's class is sdopt's code, which is compared as such.
        if group in groups and not key.endswith("_target_"):
            options[key] = values
    return options


def _of_inputs(later: StudyResult, earlier: StudyResult) -> Iterator[Difference]:
    """Yields the work and the inputs in which variants of the same name differ, with the names of these variants."""
    of_study = later.config.differing(earlier.config, WORK)
    changed: dict[str, list[str]] = {}
    for now, then in in_both(later, earlier):
        for change in _inputs(now, then, of_study):
            names = changed.setdefault(change, [])
            names.append(now.name)
    for change, names in changed.items():
        yield f"{change} ({', '.join(names)})", ""


def _inputs(
    now: VariantResult,
    then: VariantResult,
    of_study: Collection[str],
) -> Iterator[str]:
    """Yields in what the work and the inputs of two variants differ, beyond what the whole study does.

    Inputs are weights, prompts, start images and noise; and prompts and seeds of the images, which every result has.
    """
    for key, values in _work(now, then, now, then).items():
        if key not in of_study and not key.startswith(_CHOSEN):
            yield _against(key, *values)
    contents = _contents(now.inputs, then.inputs)
    for key, values in contents.items():
        if key not in (*_OF_OPTIONS, _OF_IMAGES):
            yield _against(key, *values)
    for image, earlier in zip(now.images, then.images, strict=False):
        same_prompt = image.prompt == earlier.prompt
        if not same_prompt or image.seed != earlier.seed:
            yield "images: drawn from other prompts or seeds"
            return


def in_both(
    later: StudyResult,
    earlier: StudyResult,
) -> Iterator[tuple[VariantResult, VariantResult]]:
    """Yields the variants that both results have, the repeated baseline among them."""
    before = {variant.name: variant for variant in earlier.variants}
    for variant in later.variants:
        if variant.name in before:
            yield variant, before[variant.name]


def _contents(now: _Side, then: _Side) -> _Values:
    """Returns the contents that differ, of those of which both digests are known, with the first digits of both."""
    contents: _Values = {}
    digests = changed_in_both(now, then)
    for name, (later, earlier) in digests.items():
        contents[f"contents of {name}"] = (later[:12], earlier[:12])
    return contents
