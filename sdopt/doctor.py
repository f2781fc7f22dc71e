"""What this machine is, how fast it can be at best, and which options run on it, or what they would need."""

import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Protocol

import torch
from packaging.requirements import Requirement
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import sdopt
from sdopt.errors import UsageError
from sdopt.hardware import emulated, planned_device
from sdopt.measure.ceilings import COPY, Ceiling
from sdopt.measure.device import Device, probe_device
from sdopt.optimizations.base import Optimization
from sdopt.schema import Sheet
from sdopt.variant import Variant
from sdopt.worker import Machine

_TOOLS = ("gcc", "g++", "clang++", "nvcc", "ninja", "nvidia-smi")
_BESIDES = ("triton", "torchao")  # found beside what sdopt asks for


class Composer(Protocol):
    def variant(self, name: str | None, overrides: Sequence[str] = (), plain: bool = False) -> Variant: ...


@dataclass
class OptionReport:
    """Whether one option runs on a device."""

    group: str
    option: str
    runs: bool
    reasons: list[str] = field(default_factory=list)
    """Why not; or, where it runs, what else must be chosen with it."""
    remedy: str = ""
    """The cards that it runs on, where this one is the reason."""


@dataclass
class Diagnosis:
    """Everything that the doctor found."""

    device: Device
    host: Device
    """The CPU, with the machine's memory."""
    cards: list[Device]
    planned: bool
    """Whether the device is a data sheet's, and not here."""
    start_method: str
    packages: dict[str, str]
    missing: dict[str, str]
    """Packages that are not installed, with the extra that brings them."""
    tools: dict[str, str | None]
    disk_free_gib: dict[str, float]
    sheet: Sheet | None
    options: list[OptionReport]
    ceilings: list[Ceiling] = field(default_factory=list)
    python: str = platform.python_version()
    platform: str = platform.platform()
    sdopt: str = sdopt.__version__


def list_cards() -> list[Device]:
    """Every CUDA device; belongs in a process of its own."""
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            found.append(probe_device(f"cuda:{index}"))
        except UsageError:  # this build of PyTorch has no kernels for it
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            found.append(Device("cuda", index, f"{name} (no kernels for it in this PyTorch)", capability))
    return found


def diagnose(
    machine: Machine, cards: list[Device], planned: bool, options: list[OptionReport], ceilings: list[Ceiling]
) -> Diagnosis:
    """Adds to what was asked of the device what the host can tell."""
    packages, missing = _packages()
    here, temporary = Path.cwd(), Path(tempfile.gettempdir())
    return Diagnosis(
        device=machine.device,
        host=probe_device("cpu"),
        cards=cards,
        planned=planned,
        start_method="forkserver" if machine.preloaded else "spawn",
        packages=packages,
        missing=missing,
        tools={tool: _tool_version(tool) for tool in _TOOLS},
        disk_free_gib={str(folder): shutil.disk_usage(folder).free / 2**30 for folder in (here, temporary)},
        sheet=machine.sheet,
        options=options,
        ceilings=ceilings,
    )


def _packages() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of what sdopt needs, and the extra that brings each optional package that is not here."""
    try:
        wanted = [Requirement(line) for line in requires("sdopt") or []]
    except PackageNotFoundError:  # run from a checkout that is not installed
        wanted = [Requirement(name) for name in ("torch", "diffusers", "transformers", "hydra-core", "mlflow")]
    installed: dict[str, str] = {}
    missing: dict[str, str] = {}
    for requirement in wanted + [Requirement(name) for name in _BESIDES]:
        extra = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
        if extra and extra[1] == "dev":
            continue
        try:
            installed[requirement.name] = version(requirement.name)
        except PackageNotFoundError:
            if requirement.name not in _BESIDES:
                missing[requirement.name] = f"pip install 'sdopt[{extra[1]}]'" if extra else "pip install sdopt"
    return installed, missing


def _tool_version(tool: str) -> str | None:
    if shutil.which(tool) is None:
        return None
    try:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)*", next((line for line in said.splitlines() if "release" in line), said))
    return found[0] if found else "version unknown"


# ------------------------------------------------------------------------------------------------------------- options


def check_options(
    composer: Composer, options: Iterable[tuple[str, str]], device: Device, sheets: Mapping[str, Sheet]
) -> list[OptionReport]:
    """Each option on the composed configuration: whether it runs on the device, and what it would need.

    Args:
        options: (group, option) pairs.
        sheets: the cards that an option may be tried on where the device is what it lacks.
    """
    made: dict[tuple[str, str], Variant | list[str]] = {}
    for group, option in options:
        made[group, option] = _composed(composer, group, option)
    variants = {key: variant for key, variant in made.items() if isinstance(variant, Variant)}
    reports = []
    for (group, option), variant in made.items():
        if isinstance(variant, Variant):
            reports.append(_check(group, option, variant, variants, device, sheets))
        else:
            reports.append(OptionReport(group, option, False, variant))
    return reports


def _composed(composer: Composer, group: str, option: str) -> Variant | list[str]:
    try:
        return composer.variant(option, [f"{group}={option}"])
    except UsageError as error:
        if not any("+" in problem for problem in error.problems):
            return [problem.removeprefix(f"variant '{option}': ") for problem in error.problems]
    try:
        return composer.variant(option, [f"+{group}={option}"])
    except UsageError as error:
        return [problem.removeprefix(f"variant '{option}': ") for problem in error.problems]


def _check(
    group: str,
    option: str,
    variant: Variant,
    variants: Mapping[tuple[str, str], Variant],
    device: Device,
    sheets: Mapping[str, Sheet],
) -> OptionReport:
    runs, reasons = _on(device, group, variant, variants)
    if runs:
        return OptionReport(group, option, True, reasons)
    able = [name for name, sheet in sheets.items() if _on(planned_device(sheet), group, variant, variants)[0]]
    return OptionReport(group, option, False, reasons, _cards(able, sheets))


def _on(
    device: Device, group: str, variant: Variant, variants: Mapping[tuple[str, str], Variant]
) -> tuple[bool, list[str]]:
    """Whether it runs on a device, by itself or beside one other option; else what is in its way by itself."""
    alone = _conflicts(variant, variant.optimizations, group, device)
    workload = [
        need for axis in _axes(variant, group) for need in variant.optimizations[axis].engages(variant.context(device))
    ]
    if not alone:
        return True, workload
    for (other_group, other_option), other in variants.items():
        if other_group == group:
            continue
        both = {**variant.optimizations, **{axis: other.optimizations[axis] for axis in _axes(other, other_group)}}
        if not _conflicts(variant, both, group, device) and not _conflicts(variant, both, other_group, device):
            return True, [f"together with {other_group}={other_option}", *workload]
    return False, alone


def _axes(variant: Variant, group: str) -> list[str]:
    return [axis for axis in variant.optimizations if axis.partition(".")[0] == group]


def _conflicts(variant: Variant, chosen: Mapping[str, Optimization], group: str, device: Device) -> list[str]:
    ctx = replace(variant, optimizations=chosen).context(emulated(device, variant.hardware))
    axes = [axis for axis in chosen if axis.partition(".")[0] == group]
    return [reason for axis in axes for reason in chosen[axis].conflicts(ctx)]


def _cards(able: Sequence[str], sheets: Mapping[str, Sheet]) -> str:
    """The cards as a compute capability from which on all of them are able, where there is one."""
    if not able:
        return ""
    ordered = sorted(able, key=lambda name: sheets[name].capability or (0, 0))
    lowest = sheets[ordered[0]].capability or (0, 0)
    every = all(name in able for name, sheet in sheets.items() if (sheet.capability or (0, 0)) >= lowest)
    if not every or len(able) < 4:
        return f"runs on {', '.join(ordered)}"
    return f"runs on cards of compute capability {'.'.join(map(str, lowest))} or later ({', '.join(ordered[:3])}, …)"


# --------------------------------------------------------------------------------------------------------------- tables


def tables(found: Diagnosis, width: int) -> Group:
    """All of it, for a terminal of that many columns."""
    parts: list[Any] = [_machine_table(found)]
    if found.ceilings:
        parts.append(_ceilings_table(found))
    return Group(*parts, *_options_table(found, width))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=bool(headings))
    for heading in headings:
        table.add_column(heading)
    return table


def _machine_table(found: Diagnosis) -> Table:
    table = _table("this machine")
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, text in _facts(found):
        table.add_row(heading, escape(text))
    return table


def _facts(found: Diagnosis) -> Iterator[tuple[str, str]]:
    device, host = found.device, found.host
    where = " (from its data sheet: it is not here)" if found.planned else ""
    yield "device", f"{_card(device) if device.is_cuda else device.name}{where}"
    for card in found.cards:
        yield f"cuda:{card.index}", _card(card)
    if not found.cards:
        built = "" if torch.backends.cuda.is_built() else "; this PyTorch is built without CUDA"
        yield "CUDA devices", f"none{built}"
    yield (
        "CPU",
        f"{host.name}, {host.attributes['cores']} core(s), {host.attributes['capability']}; "
        f"{host.memory_free_gib:.1f} of {host.memory_total_gib:.1f} GiB free",
    )
    yield "disk", ", ".join(f"{free:.0f} GiB free in {folder}" for folder, free in found.disk_free_gib.items())
    yield "system", f"{found.platform}; Python {found.python}; sdopt {found.sdopt}"
    yield "packages", ", ".join(f"{name} {number}" for name, number in found.packages.items())
    if found.missing:
        yield "not installed", ", ".join(f"{name} ({how})" for name, how in found.missing.items())
    yield "tools", ", ".join(f"{tool} {number}" for tool, number in found.tools.items() if number) or "none"
    absent = [tool for tool, number in found.tools.items() if number is None]
    if absent:
        yield "not found", ", ".join(absent)
    if found.planned:
        return
    slow = "" if found.start_method == "forkserver" else ": each worker imports PyTorch anew, in seconds"
    yield "workers", f"started by {found.start_method}{slow}"


def _card(card: Device) -> str:
    capability = ".".join(map(str, card.capability or ()))
    memory = f", {card.memory_free_gib:.1f} of {card.memory_total_gib:.1f} GiB free" if card.memory_total_gib else ""
    driver = f", driver {card.driver}, CUDA {card.attributes.get('cuda')}" if card.driver else ""
    return f"{card.name}, compute capability {capability}{memory}{driver}"


def _ceilings_table(found: Diagnosis) -> Group:
    table = _table(f"ceilings of {escape(found.device.name)}", "", "reached", "samples")
    if found.sheet is not None:
        table.add_column("of the data sheet")
    for ceiling in found.ceilings:
        size = f"{ceiling.size // 2**20} MiB" if ceiling.kind == COPY else f"{ceiling.size}²"
        low, high = (f"{1000 * pick(ceiling.samples_s):.3g}" for pick in (min, max))
        listed = _listed(found.sheet, ceiling)
        table.add_row(
            f"copy of {size}" if ceiling.kind == COPY else f"{ceiling.kind} product, {size}",
            _rate(ceiling),
            f"{len(ceiling.samples_s)}: {low} to {high} ms",
            *([] if found.sheet is None else [f"{100 * ceiling.rate / listed:.0f} % of {listed:g}" if listed else ""]),
        )
    note = "Medians; a ceiling moves with clocks, power, and whatever else the machine does."
    return Group(table, Text(f"  {note}", "dim"))


def _rate(ceiling: Ceiling) -> str:
    """Three digits: of a CPU's products in GFLOP/s."""
    value, unit = ceiling.rate, ceiling.unit
    if value < 1 and unit.startswith("T"):
        value, unit = 1000 * value, "G" + unit[1:]
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _listed(sheet: Sheet | None, ceiling: Ceiling) -> float | None:
    if sheet is None:
        return None
    return sheet.bandwidth_gb_s if ceiling.kind == COPY else sheet.peak(ceiling.kind)


def _options_table(found: Diagnosis, width: int) -> list[Table | Text]:
    """Groups with their options; where the terminal is narrow, what is to be said of one goes below the table."""
    table = _table(f"options on {escape(found.device.name)}", "group", "option", "runs")
    wide = width >= 110
    if wide:
        table.add_column("why not, and what would change it", overflow="fold")
    before, below = "", []
    for report in found.options:
        said = "; ".join([*report.reasons, *([report.remedy] if report.remedy else [])])
        runs = Text("yes", "green") if report.runs else Text("no", "red")
        group = report.group if report.group != before else ""
        before = report.group
        table.add_row(group, escape(report.option), runs, *([escape(said)] if wide else []))
        if said:
            below.append(Text(f"  {report.group}={report.option}: {said}"))
    return [table] if wide else [table, *below]


# -------------------------------------------------------------------------------------------------------- as data sheet


def sheet_yaml(found: Diagnosis) -> str:
    """The ceilings as an option of the group `hardware`, to hold what is achieved against."""
    device = found.device
    rates = {ceiling.kind: ceiling.rate for ceiling in found.ceilings}
    copy = rates.pop(COPY)
    cores = device.capability is not None and device.capability >= (7, 0)
    vector = {kind: rate for kind, rate in rates.items() if not cores or kind == "fp32"}
    tensor = {kind: rate for kind, rate in rates.items() if kind not in vector}
    today = datetime.now(UTC).date().isoformat()
    capability = f"{device.capability[0]}.{device.capability[1]}" if device.capability else "null"

    def mapping(values: Mapping[str, float]) -> str:
        return "{" + ", ".join(f"{kind}: {value:.4g}" for kind, value in values.items()) + "}"

    return "\n".join(
        [
            f"# {device.name}: ceilings that sdopt doctor measured on {today}, with PyTorch {torch.__version__}",
            "defaults: [auto]",
            f"device: {device.type}",
            "sheet:",
            f'  name: "{device.name} (measured)"',
            f'  device_names: ["{device.name}"]',
            f"  memory_gib: {device.memory_total_gib:.2f}",
            f"  bandwidth_gb_s: {copy:.4g}  # of a copy, read and written",
            f"  compute_capability: {capability}",
            f"  vector: {mapping(vector)}",
            f"  tensor: {mapping(tensor)}",
            f'  sources: ["sdopt doctor, {today}: medians of {len(found.ceilings[0].samples_s)} samples"]',
            "",
        ]
    )
