"""Finds what keeps two results of a study from being compared: other devices, models, work, versions or choices."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from sdopt.quality.metrics import reference_of
from sdopt.record.choices import NONE, PATCH, PLAIN
from sdopt.record.records import Environment, StudyResult, VariantResult
from sdopt.schema import AMOUNT, CHOICES, WORK
from sdopt.scratch import CACHES

WAIVERS = ("versions", "sdopt", "options")
"""Differences that may be waived by name: `versions` of torch, diffusers and the like
and variables that change how these compute, the code of `sdopt`, and the
choices of variants of the same name (`options`), including the keys of these options."""

_OF_OPTIONS = ("contents of options", "contents of parts")
"""The code of a user's own options, and the files that options read: what they are is a choice of the variant."""


_OF_IMAGES = "contents of images"
"""What other programs made: images are what is compared, prompt by prompt."""


Difference = tuple[str, str]
"""One reason why two results are not comparable, and the name of the waiver that allows it, "" if none does."""


_Values = Mapping[str, tuple[Any, Any]]
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


def _of_results(later: StudyResult, earlier: StudyResult) -> Iterator[Difference]:
    now = later.environment
    then = earlier.environment
    settings: _Values = {
        "device": (now.device.get("name"), then.device.get("name")),
        "cpu": (now.cpu.get("name"), then.cpu.get("name")),
        **_machine_settings(now, then),
        "baseline": (later.baseline, earlier.baseline),
        **later.config.differing(earlier.config, WORK),
        "quality.reference": (_reference_of(later), _reference_of(earlier)),
        **_contents(later.feature_digests, earlier.feature_digests),
    }
    for name, values in settings.items():
        if values[0] != values[1]:
            yield _against(name, *values), ""


def _reference_of(result: StudyResult) -> str:
    """Returns the set of images that distances such as CMMD are to, which their names do not say."""
    return reference_of(result.config.quality, result.config.model)


_OF_CARDS = (
    "power_limit_w",
    "max_sm_clock_mhz",
    "mig_slice",
    "ecc",
    "pcie_generation",
    "pcie_lanes",
)
"""Settings of a card by which the same option gains more or less."""


def _machine_settings(now: Environment, then: Environment) -> _Values:
    """Returns settings of the two devices that change what options gain, as far as both are recorded."""
    settings: dict[str, tuple[Any, Any]] = {}
    if now.device.get("type") == then.device.get("type") == "cuda":
        settings |= _sizes_of_cards(now.device, then.device)
    for name in _OF_CARDS:
        if name in now.gpu and name in then.gpu:
            settings[f"gpu.{name}"] = (now.gpu[name], then.gpu[name])
    if now.device.get("type") == then.device.get("type") == "cpu":
        for name in ("cores", "capability"):
            settings[f"cpu.{name}"] = (now.cpu.get(name), then.cpu.get(name))
        if "threads" in now.cpu and "threads" in then.cpu:
            settings["cpu.threads"] = (now.cpu["threads"], then.cpu["threads"])
    return settings


_NEARLY = 0.05
"""Share by which the memory of one card differs: a driver keeps some of it."""


def _sizes_of_cards(now: Mapping[str, Any], then: Mapping[str, Any]) -> _Values:
    """Returns in what two cards of one name differ: an RTX 3060 has 8 or 12 GB, and an RTX 3080 other cores, too."""
    sizes: dict[str, tuple[Any, Any]] = {}
    here: float = now.get("memory_total_gib", 0.0)
    there: float = then.get("memory_total_gib", here)
    if here and not math.isclose(here, there, rel_tol=_NEARLY):
        sizes["device.memory_total_gib"] = (round(here, 1), round(there, 1))
    cores = [
        device.get("attributes", {}).get("multiprocessors") for device in (now, then)
    ]
    if None not in cores:
        sizes["device.multiprocessors"] = (cores[0], cores[1])
    return sizes


_OF_DEVICES = ("driver", "cuda")
"""What computes on a device beside PyTorch, whose version does not tell it."""


def device_software(environment: Environment) -> dict[str, Any]:
    """Returns the driver and the libraries of a device, as far as they are recorded."""
    device = environment.device
    recorded = {**device, **device.get("attributes", {})}
    return {
        f"device.{name}": recorded[name]
        for name in _OF_DEVICES
        if recorded.get(name) is not None
    }


def _changed_software(now: Environment, then: Environment) -> _Values:
    """Returns what `device_software` says otherwise of two devices, as far as both are recorded."""
    earlier = device_software(then)
    changed: dict[str, tuple[Any, Any]] = {}
    for name, value in device_software(now).items():
        if value != earlier.get(name, value):
            changed[name] = (value, earlier[name])
    return changed


def changed_variables(now: Environment, then: Environment) -> _Values:
    """Returns the environment variables that change how libraries compute, and differ; None where one is not set."""
    changed: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*now.variables, *then.variables} - {*CACHES}):
        values = (now.variables.get(name), then.variables.get(name))
        if values[0] != values[1]:
            changed[name] = values
    return changed


def _of_code(later: StudyResult, earlier: StudyResult) -> Iterator[Difference]:
    now = later.environment
    then = earlier.environment
    for name in sorted({*now.packages, *then.packages}):
        versions = (now.packages.get(name), then.packages.get(name))
        if versions[0] != versions[1] and _counts(name, later, earlier):
            yield _against(name, *versions), "versions"
    if now.python.rpartition(".")[0] != then.python.rpartition(".")[0]:
        yield _against("python", now.python, then.python), "versions"
    changed = {**changed_variables(now, then), **_changed_software(now, then)}
    for name, values in changed.items():
        yield _against(name, *values), "versions"
    same = now.sdopt == then.sdopt and not now.sdopt_dirty
    if now.code and then.code:
        same = now.code == then.code
    if not same:
        line = _against("sdopt", now.sdopt, then.sdopt)
        if now.sdopt == then.sdopt:
            line = f"sdopt: other code of the same version, {now.sdopt}"
        yield line, "sdopt"


def _counts(package: str, later: StudyResult, earlier: StudyResult) -> bool:
    """Returns whether a package may have changed a result: code of the user's own may load any."""
    if package not in _LOADED_BY:
        return True
    if later.config.model.factory or earlier.config.model.factory:
        return True
    options: list[tuple[str, str]] = []
    for variant in (*later.variants, *earlier.variants):
        options += variant.choices.items()
    for axis, option in options:
        if axis == PATCH:
            return True
        if any(word in f"{axis} {option}" for word in _LOADED_BY[package]):
            return True
    return False


def _of_choices(later: StudyResult, earlier: StudyResult) -> Iterator[Difference]:
    everywhere = {variant.name for variant, _ in in_both(later, earlier)}
    for change, names in changed_choices(later, earlier).items():
        # Speed-ups are relative to the baseline, so a change of it can only be waived if all variants changed alike.
        waivable = later.baseline not in names or everywhere <= {*names}
        waiver = "options" if waivable else ""
        yield f"{change} ({', '.join(names)})", waiver


def changed_choices(later: StudyResult, earlier: StudyResult) -> dict[str, list[str]]:
    """Returns the choices that differ between variants of the same name, such as `caching.interval: 5 against 3`.

    Each has the names of the variants in which it differs. Differences between the studies as a whole are left out.
    """
    of_study = later.config.differing(earlier.config, WORK)
    changed: dict[str, list[str]] = {}
    for now, then in in_both(later, earlier):
        for key, values in _choices(now, then).items():
            if key not in of_study and key != "hardware.price_per_hour":
                changed.setdefault(_against(key, *values), []).append(now.name)
    return changed


def _choices(now: VariantResult, then: VariantResult) -> _Values:
    """Returns what two variants choose otherwise: of the work, of options, and of their code and files."""
    choices: dict[str, tuple[Any, Any]] = {}
    settings = now.config.differing(then.config, (*WORK, "hardware"))
    for key, values in settings.items():
        if key.startswith((*CHOICES, *AMOUNT)):
            choices[key] = values
    choices |= _options(now, then)
    for key, values in _contents(now.inputs, then.inputs).items():
        if key in _OF_OPTIONS:
            choices[key] = values
    return choices


def _options(now: VariantResult, then: VariantResult) -> _Values:
    """Returns the options and keys of options in which two variants differ, by full name, with both values."""
    axes = (*now.choices, *then.choices)
    groups = {axis.partition(".")[0] for axis in axes} - {*WORK}
    # An axis that one of them has not is of another version of sdopt: its default, which changes nothing.
    plain = {axis: PLAIN.get(axis, NONE) for axis in axes}
    later = plain | now.config.flat() | now.choices
    earlier = plain | then.config.flat() | then.choices
    options = {}
    for key, value in later.items():
        # The location of an option's class is sdopt's code, which is compared as such. A key that only one side has
        # comes from another version of sdopt; another option shows among the choices.
        if key.endswith("_target_") or key not in earlier:
            continue
        if key.partition(".")[0] in groups and value != earlier[key]:
            options[key] = (value, earlier[key])
    return options


def _of_inputs(later: StudyResult, earlier: StudyResult) -> Iterator[Difference]:
    """Yields the work and the inputs in which variants of the same name differ, with the names of these variants."""
    of_study = later.config.differing(earlier.config, WORK)
    changed: dict[str, list[str]] = {}
    for now, then in in_both(later, earlier):
        for change in _inputs(now, then, of_study):
            changed.setdefault(change, []).append(now.name)
    for change, names in changed.items():
        yield f"{change} ({', '.join(names)})", ""


def _inputs(
    now: VariantResult,
    then: VariantResult,
    of_study: _Values,
) -> Iterator[str]:
    """Yields in what the work and the inputs of two variants differ, beyond what the whole study does.

    Inputs are weights, prompts, start images and noise; and prompts and seeds of the images, which every result has.
    """
    for key, values in now.config.differing(then.config, WORK).items():
        if key not in of_study and not key.startswith((*CHOICES, *AMOUNT)):
            yield _against(key, *values)
    for key, values in _contents(now.inputs, then.inputs).items():
        if key not in (*_OF_OPTIONS, _OF_IMAGES):
            yield _against(key, *values)
    for image, earlier in zip(now.images, then.images, strict=False):
        if (image.prompt, image.seed) != (earlier.prompt, earlier.seed):
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


def _contents(now: Mapping[str, str], then: Mapping[str, str]) -> _Values:
    """Returns the contents that differ, of those of which both digests are known, with the first digits of both."""
    contents = {}
    for name, digest in now.items():
        if then.get(name, digest) != digest:
            contents[f"contents of {name}"] = (digest[:12], then[name][:12])
    return contents
