"""`sdopt optimize`: the search that a user of one model means, and its answer as a program that runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from sdopt.config.overrides import key_of
from sdopt.config.paths import whole_path
from sdopt.errors import UsageError
from sdopt.record.choices import quoted
from sdopt.record.files import write_atomically
from sdopt.search.record import PAGE, TABLES, SearchRecord, load_line

PICTURE, PROGRAM = "before_after.png", "optimized.py"

_TRIED = {
    "precision": "fp32,tf32,bf16,fp16,int8_sdnq,int8_torchao,fp8_torchao",
    "attention": "default,flash,cudnn,xformers,fused_qkv",
    "layout": "contiguous,channels_last",
    "caching": "none,deepcache,spectrum,first_block,taylorseer,magcache,dbcache,pyramid_attention,tome,guidance_interval",
    "compiler": "eager,regional,inductor,whole_step,cuda_graphs,openvino,onnxruntime",
}
"""The options that may make a call faster, by group; what cannot run on a machine is left out, with the reason."""

_SAVING = {
    "precision": f"{_TRIED['precision']},nf4_bitsandbytes,uint4_sdnq",
    "memory": "vae_slicing,vae_tiling,layerwise_casting,sequential_guidance,quantized_text_encoders,"
    "text_encoder_offload,group_offload,model_offload,sequential_offload",
}
"""Options that save memory and make no call faster besides: they are tried where there is a limit."""

_ADAPTERS = {"lora": "loaded,fused"}

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600}


def optimize_overrides(
    model: str,
    lora: str | None,
    memory_gib: float | None,
    budget: str | None,
    given: Sequence[str],
) -> list[str]:
    """Returns the overrides of `sdopt search` that ask what makes a model faster on this machine.

    Args:
        model: a file, a folder, a repository of the hub, or the name of an option of the group.
        lora: a file, a folder or a repository with a LoRA, which all variants have.
        memory_gib: a limit for the peak memory, in GiB.
        budget: how long to search, as in `30m`.
        given: further overrides, which win.

    Raises:
        UsageError: the budget is no time, the LoRA is not there, or two models are named.
    """
    tried = (
        _TRIED
        | (_SAVING if memory_gib is not None else {})
        | (_ADAPTERS if lora else {})
    )
    named = {key_of(override): override for override in given}
    if "search.groups" in named and "search.options" not in named:
        tried = {
            group: options
            for group, options in tried.items()
            if group in named["search.groups"]
        }
    overrides = [*_chosen(model, named), f"search.title={_title(model)}"]
    overrides += ["gate.spare_memory=1"]  # what fits does: a limit of less is --memory
    overrides += [f"search.groups=[{','.join(tried)}]"]
    overrides += [
        f"search.options={{{','.join(f'{group}:[{options}]' for group, options in tried.items())}}}"
    ]
    if lora:
        overrides += ["lora=loaded", f"lora.path={quoted(_place(lora))}"]
    if memory_gib is not None:
        overrides.append(f"search.memory_gib={memory_gib}")
    if budget is not None:
        overrides.append(f"search.budget_s={_seconds(budget)}")
    # A path need not be quoted as Hydra's grammar wants it.
    return [
        *(
            override
            for override in overrides
            if override.partition("=")[0] not in named
        ),
        *given,
    ]


def _chosen(model: str, own: Mapping[str, str]) -> list[str]:
    """Returns the override that chooses a model; a file or a folder is that of the model that `model=…` names beside it.

    Raises:
        UsageError: both are names.
    """
    beside = own.get("model")
    if beside is None:
        return [f"model={model}"]
    if Path(model).expanduser().exists() and "model.path" not in own:
        return [f"model.path={quoted(str(whole_path(model)))}"]
    raise UsageError(f"{beside}: names a second model beside {model}: leave out one")


def _title(model: str) -> str:
    """Returns the name of the search: that of the file, the folder or the repository."""
    name = Path(model).name
    if Path(name).suffix in (".safetensors", ".gguf"):
        name = Path(name).stem
    return re.sub(r"[^\w.-]+", "_", name).strip("_.-") or "model"


def _place(lora: str) -> str:
    path = whole_path(lora)
    if path.exists():
        return str(path)
    if path.suffix == ".safetensors" or lora.count("/") != 1:
        raise UsageError(f"--lora {lora}: there is no such file or folder")
    return lora


def _seconds(budget: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", budget.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"--budget {budget}: give a time, as in 90s, 30m or 2h")
    return max(1, round(float(match[1]) * _UNITS[match[2]]))


def hand_out(record: SearchRecord) -> None:
    """Writes the picture of before and after, and the winner as a program, into the folder of a search.

    Where everything that was judged failed, the picture shows what the first of it does to the images.

    Raises:
        OSError: a file cannot be written.
    """
    # What draws is large, and a search that was answered before has its files.
    from sdopt.record.files import read_result
    from sdopt.report.contact_sheet import comparison_sheet
    from sdopt.report.program import program_of
    from sdopt.report.summary import summary_of

    folder = Path(record.folder)
    for name in (PICTURE, PROGRAM):
        (folder / name).unlink(missing_ok=True)
    best = record.best
    shown = best or record.first_judged
    if shown is None:
        return
    judged = read_result(folder / shown.study)
    two = replace(
        judged,
        variants=[
            row for row in judged.variants if row.name in (judged.baseline, shown.name)
        ],
        comparisons=[
            edge for edge in judged.comparisons if edge.candidate == shown.name
        ],
    )
    if sheet := comparison_sheet(summary_of(two), folder / shown.study, prompts=4):
        write_atomically(folder / PICTURE, sheet)
    if best and (program := program_of(judged.variant(best.name))):
        if not record.winner:
            program = f"# It is not shown to be better than the baseline: {folder / TABLES} has the reasons.\n{program}"
        write_atomically(folder / PROGRAM, program.encode())


def answer_of_optimize(record: SearchRecord) -> RenderableType:
    """Returns the answer: a sentence, where the picture of before and after is, and the winner as a program."""
    folder = Path(record.folder)
    best = record.best
    everything = Text(f"Everything that was tried: {folder / PAGE}")
    parts: list[RenderableType] = [Text(f"\n{record.sentence}", style="bold")]
    parts += [Text(f"! {remark}") for remark in record.remarks]
    if (folder / PICTURE).is_file():
        parts.append(Text(f"Before and after: {folder / PICTURE}"))
    if best is None:
        parts += [
            Text(f"  {entry.name}: {entry.because}", style="dim")
            for entry in record.entries
            if entry.judged
        ]
        return Group(*parts, everything)
    program = folder / PROGRAM
    if program.is_file():
        lines = program.read_text(encoding="utf-8")
        parts.append(Text(f"As a program: {program}. {record.program_run}\n"))
        parts.append(Text(lines, no_wrap=True, overflow="ignore"))
    else:
        if record.lines:  # of a model that only sdopt can load
            parts.append(Text("In a pipeline `pipe` of diffusers:"))
            parts.append(Padding(Text("\n".join(record.lines)), (0, 0, 0, 4)))
        parts.append(Text(record.program_run))
        if record.loads:
            parts.append(Text("As it was measured:"))
            parts.append(Padding(Text(load_line(record, best.name)), (0, 0, 0, 4)))
    return Group(*parts, everything)
