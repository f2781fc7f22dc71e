"""Shows a diagnosis as tables for the terminal, and as a data sheet."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sdopt.apps.doctor.diagnosis import Diagnosis
from sdopt.apps.doctor.options import OptionReport
from sdopt.config.groups import default_options
from sdopt.errors import UnavailableError, UsageError
from sdopt.hardware.ceilings import COPY, Ceiling
from sdopt.hardware.device import Device
from sdopt.hardware.faults import faults_of
from sdopt.schema import Sheet

_BRIEF = ("device", "CUDA devices", "CPU", "disk", "known fault", "workers")
"""What a brief diagnosis says of the machine."""


def brief_tables(found: Diagnosis) -> Group:
    """Returns what a user needs to begin: the machine, its rates, and which options run, a line for each group."""
    plain = default_options()
    ways = [each for each in found.options if each.option != plain.get(each.group)]
    runs = sum(report.runs and not report.reasons for report in ways)
    needing = sum(report.runs for report in ways) - runs
    more = f", {needing} more if something is added" if needing else ""
    start = f"{runs} of {len(ways)} optimizations run here{more}. Start with: sdopt optimize MODEL, which tries them"
    parts: list[Any] = [Text(start, style="bold"), _machine_table(found, _BRIEF)]
    if found.ceilings:
        parts.append(_ceilings_table(found))
    details = "sdopt doctor --all says what each option needs or why it does not run, and lists packages and tools."
    return Group(*parts, _groups_table(found), Text(f"  {details}"))


def tables(found: Diagnosis) -> Group:
    """Returns the whole diagnosis for a terminal."""
    start = "start here: sdopt optimize MODEL tries what runs here; the tables below say what that is, and why not"
    parts: list[Any] = [Text(start, style="bold"), _machine_table(found)]
    if found.ceilings:
        parts.append(_ceilings_table(found))
    return Group(*parts, _options_table(found))


def _groups_table(found: Diagnosis) -> Table:
    """Returns a row for each group: its options that run, those that need something more, and those that do not."""
    table = _table(f"options on {escape(found.device.name)}")
    table.show_header = True
    for heading in ("group", "run", "run if something is added", "do not run"):
        table.add_column(heading, overflow="fold")
    groups: dict[str, list[OptionReport]] = {}
    for report in found.options:
        groups.setdefault(report.group, []).append(report)
    for group, reports in groups.items():
        run = [
            report.option for report in reports if report.runs and not report.reasons
        ]
        needing = [
            report.option for report in reports if report.runs and report.reasons
        ]
        refused = [report.option for report in reports if not report.runs]
        table.add_row(
            group, *(escape(", ".join(names)) for names in (run, needing, refused))
        )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=bool(headings),
    )
    for heading in headings:
        table.add_column(heading)
    return table


def _machine_table(found: Diagnosis, wanted: Sequence[str] = ()) -> Table:
    table = _table("this machine")
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, text in _facts(found):
        if wanted and heading not in wanted and not heading.startswith("cuda:"):
            continue
        table.add_row(heading, escape(text))
    return table


def _facts(found: Diagnosis) -> Iterator[tuple[str, str]]:
    device, host = found.device, found.host
    where = (
        " (from its data sheet; this machine does not have it)" if found.planned else ""
    )
    yield "device", f"{_card(device) if device.is_cuda else device.name}{where}"
    for card in found.cards:
        yield f"cuda:{card.index}", _card(card)
    if not found.cards:
        built = (
            ""
            if torch.backends.cuda.is_built()
            else "; this PyTorch is built without CUDA"
        )
        yield "CUDA devices", f"none{built}"
    free, total = f"{host.memory_free_gib:.1f}", f"{host.memory_total_gib:.1f}"
    cores, units = host.attributes["cores"], host.attributes["capability"]
    yield "CPU", f"{host.name}, {cores} core(s), {units}; {free} of {total} GiB free"
    yield (
        "disk",
        ", ".join(
            f"{free:.0f} GiB free in {folder}"
            for folder, free in found.disk_free_gib.items()
        ),
    )
    yield "system", f"{found.platform}; Python {found.python}; sdopt {found.sdopt}"
    yield (
        "packages",
        ", ".join(f"{name} {number}" for name, number in found.packages.items()),
    )
    for fault in faults_of(device.name, found.sheet):
        yield "known fault", fault
    if found.missing:
        yield (
            "not installed",
            ", ".join(f"{name} ({how})" for name, how in found.missing.items()),
        )
    yield (
        "tools",
        ", ".join(f"{tool} {number}" for tool, number in found.tools.items() if number)
        or "none",
    )
    absent = [tool for tool, number in found.tools.items() if number is None]
    if absent:
        yield "not found", ", ".join(absent)
    if found.planned:
        return
    slow = (
        ""
        if found.start_method == "forkserver"
        else ": each worker imports PyTorch again, which takes seconds"
    )
    yield "workers", f"started by {found.start_method}{slow}"


def _card(card: Device) -> str:
    if card.capability is None:
        return card.name
    capability = ".".join(map(str, card.capability))
    memory = (
        f", {card.memory_free_gib:.1f} of {card.memory_total_gib:.1f} GiB free"
        if card.memory_total_gib
        else ""
    )
    driver = (
        f", driver {card.driver}, CUDA {card.attributes.get('cuda')}"
        if card.driver
        else ""
    )
    return f"{card.name}, compute capability {capability}{memory}{driver}"


def _ceilings_table(found: Diagnosis) -> Group:
    table = _table(f"ceilings of {escape(found.device.name)}", "", "reached", "samples")
    if found.sheet is not None:
        table.add_column("of the data sheet")
    for ceiling in (ceiling for ceiling in found.ceilings if not ceiling.failure):
        size = (
            f"{ceiling.size // 2**20} MiB"
            if ceiling.kind == COPY
            else f"{ceiling.size}²"
        )
        low, high = (f"{1000 * pick(ceiling.samples_s):.3g}" for pick in (min, max))
        listed = _listed(found.sheet, ceiling)
        table.add_row(
            f"copy of {size}"
            if ceiling.kind == COPY
            else f"{ceiling.kind} product, {size}",
            _rate(ceiling),
            f"{len(ceiling.samples_s)}: {low} to {high} ms",
            *(
                []
                if found.sheet is None
                else [
                    f"{100 * ceiling.rate / listed:.0f} % of {listed:g}"
                    if listed
                    else ""
                ]
            ),
        )
    note = "Medians; a ceiling moves with clocks, power, and whatever else the machine does."
    failed = [
        Text(f"  {ceiling.kind}: not measured: {ceiling.failure}")
        for ceiling in found.ceilings
        if ceiling.failure
    ]
    disturbed = []
    if found.disturbance:
        too_low = f"  too low: {found.disturbance}; measure again on an idle machine"
        disturbed.append(Text(too_low, "yellow"))
    return Group(table, *failed, *disturbed, Text(f"  {note}", "dim"))


def _rate(ceiling: Ceiling) -> str:
    """Formats a rate with three digits, below one TFLOP/s in GFLOP/s."""
    value, unit = ceiling.rate, ceiling.unit
    if value < 1 and unit.startswith("T"):
        value, unit = 1000 * value, "G" + unit[1:]
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _listed(sheet: Sheet | None, ceiling: Ceiling) -> float | None:
    if sheet is None:
        return None
    return sheet.bandwidth_gb_s if ceiling.kind == COPY else sheet.peak(ceiling.kind)


def _options_table(found: Diagnosis) -> Table:
    table = _table(f"options on {escape(found.device.name)}", "group", "option", "runs")
    table.add_column("why not, or what it needs", overflow="fold")
    before = ""
    for report in found.options:
        text = "; ".join([*report.reasons, *([report.remedy] if report.remedy else [])])
        runs = (
            Text("no", "red")
            if not report.runs
            else Text("if", "yellow")
            if text
            else Text("yes", "green")
        )
        table.add_row(
            report.group if report.group != before else "",
            escape(report.option),
            runs,
            escape(text),
        )
        before = report.group
    return table


def sheet_yaml(found: Diagnosis) -> str:
    """Returns the measured peak rates as an option of the group `hardware`, as a reference for runs."""
    device = found.device
    measured = [ceiling for ceiling in found.ceilings if not ceiling.failure]
    rates = {ceiling.kind: float(f"{ceiling.rate:.4g}") for ceiling in measured}
    if found.disturbance:
        raise UnavailableError(
            f"--save: the rates are too low, because {found.disturbance}; measure again on an idle machine"
        )
    if COPY not in rates:
        raise UsageError(
            "--save: cannot write a data sheet without the memory bandwidth, whose measurement (the copy) failed"
        )
    copy = rates.pop(COPY)  # read and written
    cores = device.capability is not None and device.capability >= (7, 0)
    vector = {kind: rate for kind, rate in rates.items() if not cores or kind == "fp32"}
    today = datetime.now(UTC).date().isoformat()
    sheet = {
        "name": f"{device.name} (measured)",
        "device_names": [device.name],
        "memory_gib": round(device.memory_total_gib, 2),
        "bandwidth_gb_s": copy,
        "compute_capability": float("{}.{}".format(*device.capability))
        if device.capability
        else None,
        "vector": vector,
        "tensor": {kind: rate for kind, rate in rates.items() if kind not in vector},
        "sources": [
            f"sdopt doctor, {today}: medians of {len(measured[0].samples_s)} samples"
        ],
    }
    head = f"# {device.name}: ceilings that sdopt doctor measured on {today}, with PyTorch {torch.__version__}\n"
    option = {"defaults": ["auto"], "device": device.type, "sheet": sheet}
    return head + str(
        yaml.safe_dump(
            option, sort_keys=False, default_flow_style=None, allow_unicode=True
        )
    )
