"""Plans a study: its result before anything is measured, the machine and its software, and the disk space needed."""

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from sdopt.about import CHECKOUT, __version__
from sdopt.contract import Contract
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.device import Device
from sdopt.options.base import loading_arguments
from sdopt.pipelines.components import count_weights
from sdopt.record.choices import as_choice, option_name
from sdopt.record.comparisons import Comparison, ShapeRatios
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import (
    Environment,
    Promise,
    Status,
    StudyResult,
    VariantResult,
    now,
)
from sdopt.schema import WORK, Edge, Gate, Model, Protocol
from sdopt.scratch import CACHES, named_caches
from sdopt.study.designs import CONTROL, Design, Plan
from sdopt.study.fingerprint import code, inputs_of, of_model
from sdopt.variant import Variant
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine

_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CACHE_DIT_ATTN_BACKEND",
    "CACHE_DIT_EPILOGUE_PROLOGUE_FUSION",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "CUDNN_FRONTEND_ATTN_DISABLED",
    "DIFFUSERS_ATTN_BACKEND",
    "DIFFUSERS_GGUF_CUDA_KERNELS",
    "DISABLE_ADDMM_CUDA_LT",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE",
    "FLASH_ATTENTION_TRITON_AMD_ENABLE",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "HSA_OVERRIDE_GFX_VERSION",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "LD_PRELOAD",
    "LRU_CACHE_CAPACITY",
    "MIOPEN_FIND_ENFORCE",
    "MIOPEN_FIND_MODE",
    "MKL_CBWR",
    "MKL_DISABLE_FAST_MM",
    "MKL_DOMAIN_NUM_THREADS",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_THREADING_LAYER",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "OMP_THREAD_LIMIT",
    "OMP_WAIT_POLICY",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "OPENBLAS_NUM_THREADS",
    "PYTHONDEVMODE",
    "PYTHONMALLOC",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_MIOPEN_SUGGEST_NHWC",
    "PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING",
    "ROCBLAS_USE_HIPBLASLT",
    "SDNQ_ALLOW_FP8_MM",
    "SDNQ_DTYPE",
    "SDNQ_INFERENCE_CONTEXT",
    "SDNQ_TRITON_MM_USE_FP16_ACCUM",
    "SDNQ_USE_CONTIGUOUS_MM",
    "SDNQ_USE_TENSORWISE_FP8_MM",
    "SDNQ_USE_TRITON_MM",
    "THP_MEM_ALLOC_ENABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
    "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_LINEAR_FLATTEN_3D",
    "TORCH_MKLDNN_MATMUL_MIN_DIM",
    "TORCH_MKLDNN_MATMUL_MIN_SIZE",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "TORCH_ROCM_FA_PREFER_CK",
    "TRITON_F32_DEFAULT",
)
"""Environment variables that change how CUDA, libraries of processors, diffusers, PyTorch and Python compute or start."""

_BEGINNINGS = (
    *("TORCHINDUCTOR_", "TORCHDYNAMO_"),
    *("GLIBC_TUNABLES", "MALLOC_", "TCMALLOC_"),
)
"""How the names of those begin that change what compilers make, or how memory is allocated."""

_CUDNN_9 = 90000

_PACKAGES = (
    *("torch", "diffusers", "transformers", "accelerate", "numpy", "triton"),
    *(
        "deepspeed",
        "onnxruntime",
        "onnxscript",
        "openvino",
        "tensorrt",
        "torch-blade",
        "torch-tensorrt",
    ),
    *(
        "bitsandbytes",
        "cache-dit",
        "flash-attn",
        "gguf",
        "kernels",
        "peft",
        "sageattention",
        "sdnq",
        "tomesd",
        "torchao",
        "xformers",
    ),
)
"""Distributions whose code decides how images are computed; a study is not continued with another version."""

_LOGS_BYTES = 4 * 2**20


def unused_options(
    design: Design, plan: Plan, chosen: Sequence[str], changed: Mapping[str, Any]
) -> list[str]:
    """Returns remarks on what a job chose and no variant of a plan has, since its design begins without any option.

    `chosen` are its options, as `Composer.chosen` lists them, and `changed` the keys of options that it set.
    """
    if not design.drops_choices:
        return []
    used: set[str] = set()
    idle = dict(changed)
    for variant in plan.variants:
        for axis, option in variant.choices.items():
            used.add(as_choice(axis, option_name(option)))
        for key, value in variant.changed.items():
            if key in idle and idle[key] == value:
                del idle[key]
    unused = [option for option in chosen if option not in used]
    unused += [f"{key}={value}" for key, value in idle.items()]
    return [
        f"{option}: no variant has it, since this design adds study.options to a baseline without any; "
        "study=explicit keeps what the command chooses"
        for option in unused
    ]


def refused(plan: Plan, device: Device) -> list[str]:
    """Returns the conflicts of all candidates if none of them can run on `device`; empty if one can.

    Also empty if there are no candidates, or if the baseline itself cannot run, which `plan_result` reports.
    """
    baseline, *candidates = [variant.conflicts(device) for variant in plan.variants]
    return [] if baseline or not all(candidates) else list(chain(*candidates))


_PAIRED = tuple(
    f"workload.{key}"
    for key in ("seed", "prompts", "prompt_start", "prompt_count", "latents")
)
"""Keys that decide from which prompt and noise each image is made, and so which images may be compared."""


def require_same_task(plan: Plan) -> None:
    """Raises UsageError if two variants that are to be compared make images of other sizes, or from other inputs.

    The ratio of their times would read like a gain, and the distance of their images like a loss. How many images a
    call makes, and in how many steps, may differ.
    """
    by_name = {variant.name: variant for variant in plan.variants}
    problems = []
    for edge in plan.edges:
        candidate, reference = (
            by_name[edge.candidate].config,
            by_name[edge.reference].config,
        )
        tasks = candidate.differing(reference, ["task"])
        sizes = candidate.shapes[0].size, reference.shapes[0].size
        if sizes[0] != sizes[1]:
            tasks["workload.size"] = sizes
        for key, (mine, other) in tasks.items():
            what = f"variant '{edge.candidate}': {key} is {mine}, and {other} in '{edge.reference}'"
            ways = f"`-m {key}={other},{mine}` makes a study of each"
            if key == "workload.size":
                ways = f"workload.size=[{other},{mine}] times all variants at both, and {ways}"
            problems.append(
                f"{what}: another task, so that no speed-up could be told; {ways}"
            )
        for key, (mine, other) in candidate.differing(reference, ["workload"]).items():
            if key in _PAIRED:
                problems.append(
                    f"variant '{edge.candidate}': {key} is {mine}, and {other} in '{edge.reference}': images of other "
                    f"prompts or noise, which cannot be compared; `-m {key}=…` makes a study of each"
                )
    if problems:
        raise UsageError(problems)


def require_judged(plan: Plan, gate: Gate) -> None:
    """Raises UsageError if a gate is to judge, and nothing differs from the baseline: it would pass with no verdict."""
    if gate.judges and not gate.report_only and not plan.edges:
        raise UsageError(
            f"gate={gate.name}: nothing differs from the baseline, so that there is nothing to judge. The model, the "
            "scheduler and the workload are those of both sides: say what the baseline has, as in "
            "study.baseline=[scheduler:ddim]; or measure without a verdict, with gate=report_only"
        )


def plan_result(
    plan: Plan,
    name: str,
    design: str,
    config: RecordedConfig,
    machine: Machine,
    command: list[str],
) -> StudyResult:
    """Returns the result of a study before anything is measured: what will be run, compared and skipped, and why.

    What it records of the work is the baseline's, which may choose another than the command does.

    Raises:
        ConflictError: the baseline cannot run here, so that there is nothing to compare with.
    """
    variants = []
    of_baseline = {
        section: getattr(plan.baseline.config, section)
        for section in (*WORK, "hardware")
    }
    config = replace(config, **of_baseline)
    model = cache(of_model)
    for variant in plan.variants:
        conflicts = variant.conflicts(machine.device)
        variants.append(
            _row(variant, variant.name, "variant", conflicts, machine.device)
        )
        if not conflicts:
            variants[-1].reason = "; ".join(variant.slow_here(machine.device))
        variants[-1].inputs = inputs_of(variant, model)
        if variant.other_work(plan.baseline):
            # Another scheduler or number of steps changes the images, and no option's contract covers that.
            variants[-1].contract = Contract.LOSSY
        if conflicts and variant is plan.baseline:
            raise ConflictError(
                [
                    f"the baseline '{variant.name}' cannot run: {reason}"
                    for reason in conflicts
                ]
            )
    variants.append(_row(plan.baseline, CONTROL, "control", [], machine.device))
    variants[-1].inputs = variants[0].inputs
    comparisons = []
    for edge in (*plan.edges, Edge(CONTROL, plan.baseline.name, "nothing")):
        shapes = [ShapeRatios() for _ in config.shapes]
        compared = Comparison(edge.candidate, edge.reference, edge.credit, shapes)
        comparisons.append(compared)
    return StudyResult(
        name=name,
        design=design,
        started=now(),
        environment=describe_environment(machine, command, config.hardware.threads),
        config=config,
        variants=variants,
        comparisons=comparisons,
        baseline=plan.baseline.name,
    )


def runnable_of(plan: Plan, result: StudyResult) -> list[Variant]:
    """Returns the variants that the plan did not skip."""
    skipped = {row.name for row in result.variants if row.status is Status.SKIPPED}
    return [variant for variant in plan.variants if variant.name not in skipped]


def warmup_calls(variants: Sequence[Variant], protocol: Protocol) -> int:
    """Returns how many calls follow the first one before the rounds, for all variants alike.

    They are `protocol.warmup`, or more if an option still records graphs in some of them: one more call then follows.
    """
    recording = 0
    for variant in variants:
        for option in variant.optimizations.values():
            recording = max(recording, option.recording_calls)
    return max(protocol.warmup, 1 + recording if recording else 0)


def _row(
    variant: Variant, name: str, role: str, conflicts: list[str], device: Device
) -> VariantResult:
    return VariantResult(
        name=name,
        role=role,
        choices=dict(variant.choices),
        overrides=list(variant.overrides),
        config=variant.config,
        contract=variant.contract_on(device),
        promises={
            axis: Promise(
                option.contract_on(device),
                sorted(option.claimed()),
                by_image=option.saves_operations is None,
            )
            for axis, option in variant.optimizations.items()
        },
        status=Status.SKIPPED if conflicts else Status.PENDING,
        # Every report puts the name before the reason.
        reason="; ".join(reason.removeprefix(f"{name}: ") for reason in conflicts),
    )


def require_room(
    plan: Plan,
    result: StudyResult,
    folder: Path,
    machine: Machine,
    context: StartContext,
) -> None:
    """Checks that the disks have space for the files of a study.

    The folder of the run receives logs, and images of at most their raw size. The temporary folder receives the data
    that options keep on disk while their process lives; in blocks, one process lives at a time.

    Raises:
        UsageError: has one line for each folder whose disk lacks space.
    """
    variants = [*runnable_of(plan, result), plan.baseline]
    images = sum(
        len(v.pictured) * v.workload.images_per_prompt * v.size**2 * 3 for v in variants
    )
    problems = _shortage(
        folder, images + _LOGS_BYTES, "choose another folder with hydra.run.dir=…"
    )
    count = cache(
        lambda model: in_process(
            context, count_weights, model, what=f"model={model.name}"
        )
    )
    sizes = [_kept_on_disk(variant, machine.device, count) for variant in variants]
    if any(sizes):
        blocks = result.config.protocol.schedule == "blocks"
        together = max(sizes) if blocks else sum(sizes) * result.config.replicates
        other = (
            ""
            if blocks
            else ", or measure one process at a time with protocol.schedule=blocks"
        )
        problems += _shortage(
            Path(tempfile.gettempdir()),
            together,
            f"name another folder with TMPDIR=…{other}",
        )
    if problems:
        raise UsageError(problems)


def _kept_on_disk(
    variant: Variant, device: Device, count: Callable[[Model], int]
) -> int:
    """Returns the bytes that the options of a variant keep on disk in each of its processes."""
    dtype = loading_arguments(option for _, option in variant.applied).get("dtype")
    width = 4 if dtype is None else dtype.itemsize
    context = variant.context(device)
    return sum(
        option.disk_bytes(context, lambda: count(variant.model) * width)
        for option in variant.optimizations.values()
    )


def _shortage(folder: Path, needed: int, way_out: str) -> list[str]:
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return []
    space = f"{free / 2**20:.0f} MiB are free there, and up to {needed / 2**20:.0f} MiB are needed"
    return [f"{folder}: {space}; make room, or {way_out}"]


def describe_environment(
    machine: Machine, command: list[str], threads: int | None = None
) -> Environment:
    """Returns versions, the commit of a checkout, and the machine that a first worker found.

    Without `threads`, which are `hardware.threads`, those that PyTorch chooses on a processor are a part of it.
    """
    commit, dirty = _checkout(CHECKOUT)
    cpu = dict(machine.cpu)
    if threads or machine.device.is_cuda:
        cpu.pop("threads", None)
    caches = named_caches()
    more = {name for name in os.environ if name.startswith(_BEGINNINGS)}
    changing = sorted({*_VARIABLES, *more} - {*CACHES})
    kept = (
        f"{name}={path}: first calls may find kernels there that earlier processes compiled"
        for name, path in caches.items()
    )
    return Environment(
        sdopt_version=__version__,
        sdopt_commit=commit,
        sdopt_dirty=dirty,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: version for name in _PACKAGES if (version := _version(name))}
        | _cudnn(machine.device),
        device=asdict(machine.device),
        cpu=cpu,
        start_method="forkserver" if machine.preloaded else "spawn",
        command=command,
        code=code(),
        sheet=machine.sheet,
        gpu=machine.gpu,
        variables={name: os.environ[name] for name in changing if name in os.environ}
        | caches,
        host=platform.node(),
        warnings=[*machine.warnings, *kept],
    )


def _cudnn(device: Device) -> dict[str, str]:
    """Returns cuDNN's version, which is not always that of a package; nothing on a CPU."""
    number = device.attributes.get("cudnn")
    if number is None:
        return {}
    # As cudnnGetVersion encodes it: with version 9 the major number moved one digit up.
    major, rest = divmod(number, 10000 if number >= _CUDNN_9 else 1000)
    return {"cudnn": f"{major}.{rest // 100}.{rest % 100}"}


def _version(package: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed.

    A development state keeps its version while its code changes: if it was installed from a repository, the commit
    belongs to it.
    """
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return None
    commit = _commit_of(found)
    if not commit:
        return found.version
    return f"{found.version}{'.' if '+' in found.version else '+'}g{commit[:9]}"


def _commit_of(installed: Distribution) -> str:
    """Returns the commit of a repository that was installed, or whose checkout is used as it is; "" if none is told."""
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            folder = Path(url2pathname(urlparse(origin["url"]).path))
            return _checkout(folder)[0] or ""
        return str(origin.get("vcs_info", {}).get("commit_id", ""))
    except (OSError, ValueError, LookupError, AttributeError):
        return ""


def _checkout(folder: Path) -> tuple[str | None, bool | None]:
    """Returns the commit of sdopt's checkout, and whether files differ from it; (None, None) for an installed wheel."""
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None, None
    git = ["git", "-C", str(folder)]
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        return None, None
    status = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    return head.stdout.strip(), bool(status.stdout.strip())
