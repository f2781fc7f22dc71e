"""The latency model: what a call takes, from operation counts, a data sheet and the class of the software.

A call is a fixed part, one per image, its steps and the decoder. A pass of a network takes as long as its kernels on
the device, or as launching them on the host, whichever is longer:

    device = convolutions + products + attention + bytes of matrix operators + other bytes + unpacking + kernels · gap
    pass   = (device⁴ + (kernels · launch)⁴)^¼

Each of these parts is work ÷ rate of the data sheet × exp(a sum of coefficients): its logarithm is linear in the
coefficients, which makes gradients exact and the fit a matter of a second. Every coefficient has a prior, so that what
the figures do not tell stays at what is plausible, and a new generation gets the average of the others.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdopt.apps.foresight.software import EIGHT_BITS, Software
from sdopt.schema import Sheet

Array = NDArray[np.float64]

COEFFICIENTS = Path(__file__).parent / "coefficients.json"

GENERATIONS = (
    "pascal", "volta", "turing", "turing_gtx", "ampere", "ada", "hopper", "blackwell", "rdna2", "rdna3", "rdna4",
)  # fmt: skip

_STACKED = ("GP100", "GV100", "GA100", "GH100", "GB100", "GB110")
"""Chips with stacked memory, which reach less of their large peaks."""

_LAUNCHES = {
    "eager_1": 10e-6,
    "eager_2": 20e-6,
    "eager_3": 32e-6,
    "compiled": 4e-6,
    "graphs": 1e-6,
    "engine": 1e-6,
    "a1111": 12e-6,
    "sdnext": 12e-6,
    "sdnext_diffusers": 9e-6,
    "other": 12e-6,
    "comfy": 9e-6,
}
"""Seconds to launch a kernel, by class of software."""

_FIXED = {
    "library_1": 0.3,
    "library_2": 0.05,
    "library_3": 0.06,
    "web": 0.3,
    "engine": 0.02,
}
"""Seconds of a call beside its networks: Python, text encoders, images; by application and age of PyTorch."""

UNSEEN = ("launch_eager_3", "fixed_library_3")
"""What no figure of UNets tells: PyTorch since 2.4. The centres are an operator's Python, dispatch and launch, as they
were with 2.0 to 2.3 (an H200's hosts took 37 to 53 µs with 2.11), and the Python of a pipeline's call. Their deviations
widen the intervals."""

_CLASSES = (
    "a1111", "sdnext", "sdnext_diffusers", "other", "comfy", "eager", "compiled",
    "tensorrt", "aitemplate", "oneflow", "stable_fast", "blocks_eager", "blocks_compiled",
)  # fmt: skip

_BLOCKS = {
    # The shares of the peak that products of thousands of tokens and attention reach on an A100, and how they grow with
    # the power per peak rate: what holds them down is power, and rates that a maker halves are reached nearly whole.
    "blocks_gemm": (math.log(0.7), 0.05),
    "blocks_gemm_power": (0.2, 0.05),
    "blocks_attn": (math.log(0.7), 0.1),
    "blocks_attn_power": (0.7, 0.1),
    "blocks_decoder": (0.0, 0.2),
    # Long kernels hide gaps between them, and the bytes of products behind arithmetic.
    "blocks_gap": (-1.0, 0.5),
    "blocks_matrix": (-0.7, 0.5),
    # What eight bits reach of their own, doubled peak, beside what sixteen reach of theirs.
    "blocks_fp8": (-0.2, 0.2),
    "blocks_int8": (-0.2, 0.2),
    # Bytes of norms, shifts and rotations, many of which are float32; and what a compiler leaves of them.
    "blocks_between": (0.2, 0.3),
    # Stacked memory is further from its peak there, and has no large cache before it.
    "blocks_between_stacked": (0.3, 0.2),
    "blocks_fused": (-1.0, 0.4),
    # Bytes that pass for each stored weight: it is read, written in the type of the product, and read again.
    "unpack_eager": (math.log(8.0), 0.5),
    "unpack_compiled": (math.log(2.0), 0.5),
    # Bytes that pass for each number of a product whose inputs are quantized without a compiler: some 33 for each input,
    # which is read for its scale, and then as float32 to be divided, clamped and stored.
    "quantize_eager": (math.log(8.0), 0.5),
}
"""Mean and deviation of the coefficients of diffusion transformers, which share all others with UNets."""


def _priors() -> dict[str, tuple[float, float]]:
    """Returns mean and standard deviation of each coefficient before any figure is seen."""
    log = math.log
    priors = {
        # Shares of the peak rate; `tensor` is what tensor cores reach less, or more, than that.
        "conv": (log(0.4), 0.5),
        "gemm": (log(0.45), 0.2),
        "attn": (log(0.3), 0.3),
        "tensor": (0.0, 1.0),
        "vector_conv": (log(0.6), 0.25),
        "vector_gemm": (log(0.85), 0.1),
        "bandwidth": (log(0.75), 0.2),
        "large": (0.0, 0.1),
        "split": (0.0, 0.3),
        "decoder": (0.0, 0.3),
        "gap": (log(3e-6), 0.4),
        "image_web": (log(0.05), 0.5),
        "image_library": (log(0.02), 0.5),
    }
    for name, seconds in _FIXED.items():
        priors[f"fixed_{name}"] = (log(seconds), 0.5)
    for name in GENERATIONS:
        priors[f"generation_{name}"] = (0.0, 0.15)
    for name, seconds in _LAUNCHES.items():
        priors[f"launch_{name}"] = (log(seconds), 0.3)
    priors["launch_eager_3"] = (log(_LAUNCHES["eager_3"]), 0.4)
    # Classes were measured by few publishers each: most of what sets them apart are the publishers.
    for name in _CLASSES:
        priors[f"class_{name}"] = (0.0, 0.04 if "blocks" in name else 0.1)
    return priors | _BLOCKS


PRIORS = _priors()
NAMES = tuple(PRIORS)
_INDEX = {name: index for index, name in enumerate(NAMES)}
_MEAN, _DEVIATION = np.array(list(PRIORS.values())).T

OF_TRANSFORMERS = np.array(
    [name in _BLOCKS or name.startswith("class_blocks") for name in NAMES]
)
"""Which coefficients are of diffusion transformers alone: they are fitted after all others, which then stay."""

PARTS = (
    "convolutions",
    "products",
    "attention",
    "matrix bytes",
    "other bytes",
    "unpacking",
    "kernels",
    "launches",
)
"""The parts of a pass; the last one is the host's."""

_COUNT = 2 * len(PARTS) + 2
"""Parts of a call: those of the denoiser, those of the decoder, the fixed part, and that of each image."""

_MATRIX_SHARE = 0.7
"""Bytes of matrix operators that are not hidden behind their arithmetic."""

_FUSED_SHARE = 0.5
"""Bytes of other operators that are left when a compiler fuses them."""

_GRAPH_GAP = 0.25
"""Gaps between kernels that are left in a recorded graph, where the device starts them: 1 to 2 µs."""

_RESCALED = 0.5
"""Bytes that pass for each number of a product whose outputs are scaled, to those for each weight that is unpacked."""

_UNPACKING_KERNELS = 1.8
"""Kernels of a pass without a compiler, to those without unpacking weights or quantizing inputs for each product."""

_VECTOR_SHARE = 0.6
"""Share of the peak rate that cards without tensor cores reach."""

_STACKED_LOSS = 0.3
"""How the share of the peak falls with the peak of chips with stacked memory, as a power."""

_POWER_GAIN = 0.1
"""How the rate grows with the power per peak rate, as a power."""

Terms = dict[str, float]
"""How often a logarithm has each coefficient."""

Part = tuple[float, Terms]
"""The logarithm of the seconds of a part of a call, without its coefficients and with them."""


@dataclass
class Costs:
    """What passes of a network cost: operations in FLOP, by class of operator, and what else takes time or memory."""

    convolutions: float = 0.0
    products: float = 0.0
    """Matrix products, those of attention without a fused kernel included."""
    attention: float = 0.0
    """Attention in a fused kernel."""
    moved: float = 0.0
    """Numbers that kernels read and write, weights included; times the size of the type they are bytes."""
    between: float = 0.0
    """Part of `moved`: that of kernels that only move or map numbers, which a compiler may fuse."""
    kernels: float = 0.0
    stored: float = 0.0
    """Part of `moved`: weights, where they are counted apart."""
    peak: float = 0.0
    """Most bytes that were alive together, without parameters."""
    filling: float = 0.0
    """Operations that kernels of tensor cores do besides `attention`: heads filled with zeros, and the softmax.

    They count for transformers alone: with them, UNets that are left out are predicted no better."""

    def times(self, factor: float) -> "Costs":
        """Returns the costs of several passes, one after the other."""
        scaled = {name: factor * value for name, value in vars(self).items()}
        scaled["peak"] = self.peak
        return Costs(**scaled)


def added(first: Costs, second: Costs) -> Costs:
    """Returns the costs of two passes, one after the other."""
    sums = {}
    for name, value in vars(first).items():
        sums[name] = value + getattr(second, name)
    sums["peak"] = max(first.peak, second.peak)
    return Costs(**sums)


def averaged(passes: Sequence[tuple[int, Costs]]) -> Costs:
    """Returns the mean costs of passes, of which some number each costs the same, and the largest peak."""
    counts = np.array([count for count, _ in passes])
    shares = counts / counts.sum()
    costs = [pass_costs for _, pass_costs in passes]
    means = shares @ np.array([list(vars(each).values()) for each in costs])
    peak = max(each.peak for each in costs)
    return replace(Costs(*map(float, means)), peak=peak)


@dataclass(frozen=True)
class Case:
    """One call on one card: everything that the model needs to know.

    Attributes:
        denoiser: costs of one step.
        decoder: costs of decoding all images of the call.
        part: what the time is of: `call`, `step`, `image`, `unet` or `vae`.
        decodes_in_float32: whether the decoder runs in float32, whatever the precision.
    """

    sheet: Sheet
    software: Software
    denoiser: Costs
    decoder: Costs
    steps: int
    images: int
    part: str = "call"
    decodes_in_float32: bool = False

    @property
    def operations(self) -> float:
        """FLOP of one step."""
        step = self.denoiser
        return step.convolutions + step.products + step.attention


def generation_of(sheet: Sheet) -> str:
    """Returns the architecture whose coefficients a card shares."""
    # TU11x has no tensor cores, and half precision overflows on it: programs compute in float32.
    if sheet.architecture == "turing" and sheet.tensor.fp16 is None:
        return "turing_gtx"
    return str(sheet.architecture)


@dataclass
class RateTable:
    """Cases as arrays: the logarithm of each part is `base + design @ coefficients`."""

    base: Array
    design: Array
    weights: Array
    """How often each sum counts: steps, decoders, fixed parts, parts of an image."""

    @classmethod
    def of(cls, cases: Sequence[Case]) -> "RateTable":
        """Lays out cases."""
        base = np.zeros((_COUNT, len(cases)))
        design = np.zeros((_COUNT, len(cases), len(NAMES)))
        weights = np.zeros((4, len(cases)))
        for column, case in enumerate(cases):
            for row, (value, terms) in enumerate(_parts(case)):
                base[row, column] = value
                for name, factor in terms.items():
                    design[row, column, _INDEX[name]] += factor
            weights[:, column] = _weights(case)
        return cls(base, design, weights)

    def take(self, chosen: NDArray[Any]) -> "RateTable":
        """Returns some of the cases."""
        return RateTable(
            self.base[:, chosen],
            self.design[:, chosen],
            self.weights[:, chosen],
        )

    def parts(self, coefficients: Array) -> Array:
        """Returns the seconds of each part (rows) of each case (columns)."""
        logs = self.base + self.design @ coefficients
        return np.asarray(np.exp(logs))

    def log_seconds(self, coefficients: Array) -> Array:
        """Returns the logarithm of the time of each case."""
        total, _, _ = self.sums(self.parts(coefficients))
        return np.log(total)

    def sums(self, parts: Array) -> tuple[Array, Array, Array]:
        """Returns the seconds of each case, of a step of it, and of its decoder."""
        size = len(PARTS)
        step = _longer(parts[:size])
        decoder = _longer(parts[size : 2 * size])
        fixed, image = parts[-2:]
        total = self.weights[0] * step + self.weights[1] * decoder
        total = total + self.weights[2] * fixed + self.weights[3] * image
        return total, step, decoder

    def gradient(self, coefficients: Array) -> tuple[Array, Array]:
        """Returns the logarithm of the time of each case, and its derivatives by coefficients (columns)."""
        parts = self.parts(coefficients)
        total, step, decoder = self.sums(parts)
        slope = np.empty_like(parts)
        size = len(PARTS)
        for start, weight, whole in (
            (0, self.weights[0], step),
            (size, self.weights[1], decoder),
        ):
            host = start + size - 1
            on_device = slice(start, host)
            device = parts[on_device].sum(0)
            of_device = weight * (device / whole) ** 3
            of_host = weight * (parts[host] / whole) ** 3
            slope[on_device] = of_device * parts[on_device]
            slope[host] = of_host * parts[host]
        slope[-2:] = self.weights[2:] * parts[-2:]
        return np.log(total), np.einsum("kn,knp->np", slope / total, self.design)

    def untold(self, coefficients: Array) -> Array:
        """Returns the deviation (log) of the time of each case by what no figure tells (`UNSEEN`)."""
        _, slope = self.gradient(coefficients)
        chosen = [_INDEX[name] for name in UNSEEN]
        deviations = slope[:, chosen] * _DEVIATION[chosen]
        return np.asarray(np.sqrt((deviations**2).sum(1)))


def _longer(parts: Array) -> Array:
    """Returns the time of passes: of their kernels, or of launching these; near equality somewhat more than either."""
    kernels = parts[:-1].sum(0)
    launches = parts[-1]
    longer: Array = (kernels**4 + launches**4) ** 0.25
    return longer


def _weights(case: Case) -> tuple[float, float, float, float]:
    if case.part == "call":
        return case.steps, 1.0, 1.0, 1.0
    # In a stream, the fixed part of a call is hidden behind the next one.
    if case.part == "image":
        share = 1 / case.images
        return case.steps / case.images, share, 0.0, share
    if case.part in ("step", "unet"):
        return 1.0, 0.0, 0.0, 0.0
    return 0.0, 1.0, 0.0, 0.0


def _parts(case: Case) -> list[Part]:
    software = case.software
    parts = _pass(case, case.denoiser, decodes=False)
    parts += _pass(case, case.decoder, decodes=True)
    parts.append((0.0, {f"fixed_{software.fixed}": 1.0}))
    if software.application == "engine":
        return [*parts, _NOTHING]
    kind = "library" if software.is_library else software.application
    parts.append((math.log(case.images), {f"image_{kind}": 1.0}))
    return parts


_NOTHING: Part = (-30.0, {})
"""A part that takes no time."""


def _pass(case: Case, costs: Costs, decodes: bool) -> list[Part]:
    sheet = case.sheet
    software = case.software
    full = decodes and case.decodes_in_float32
    convolution, product = software.types
    if full and software.is_library:
        convolution = "tf32"
        product = "fp32"
    if decodes and software.is_transformer and not full:
        convolution = product = "fp16"  # the denoiser's weights alone are quantized
    attention = "fp16" if software.is_transformer and product in EIGHT_BITS else product
    shared: Terms = {f"class_{software.name}": -1.0}
    if decodes:
        shared["decoder"] = 1.0
    if software.is_transformer and decodes:
        shared["blocks_decoder"] = 1.0
    attended = costs.attention
    if software.is_transformer and _has_cores(sheet, attention):
        attended += costs.filling
    parts: list[Part] = []
    for amount, name, kind in (
        (costs.convolutions, "conv", convolution),
        (costs.products, "gemm", product),
        (attended, "attn", attention),
    ):
        rate, terms = _rate(sheet, name, kind, doubled=not software.is_transformer)
        rate *= _power(sheet)
        if software.is_transformer and name != "conv" and _has_cores(sheet, kind):
            rate, terms = _rate_of_tokens(sheet, name, kind)
        seconds = max(amount, 1.0) / (rate * 1e12)
        terms |= shared
        if software.is_transformer and kind in EIGHT_BITS:
            terms[f"blocks_{kind}"] = 1.0
        slower = {key: -factor for key, factor in terms.items()}
        parts.append((math.log(seconds), slower))
    blocks = software.is_transformer and not decodes
    parts += _bytes_moved(case, costs, decodes)
    parts += _launched(software, costs, blocks)
    return parts


def _bytes_moved(case: Case, costs: Costs, decodes: bool) -> list[Part]:
    """Returns what the bytes of a pass take: of matrix operators, of others, and of unpacking weights."""
    sheet = case.sheet
    software = case.software
    blocks = software.is_transformer and not decodes
    a_byte = 1 / (sheet.bandwidth_gb_s * 1e9)
    seconds = (4 if decodes and case.decodes_in_float32 else software.bytes) * a_byte
    # Stacked memory is as far from its peak in kernels that unpack as in others.
    stacked: Terms = {}
    if sheet.chip in _STACKED:
        stacked["blocks_between_stacked"] = 1.0
    products: Terms = {"bandwidth": -1.0, f"class_{software.name}": 0.5}
    others = dict(products)
    if software.split:
        others["split"] = 1.0
    if blocks:
        products["blocks_matrix"] = 1.0
        others |= {"blocks_between": 1.0, **stacked}
    if blocks and software.compiled:
        others["blocks_fused"] = 1.0
    of_products = costs.moved - costs.between
    within = math.log(max(of_products, 1.0) * seconds * _MATRIX_SHARE)
    share = _FUSED_SHARE if software.compiled else 1.0
    between = math.log(max(costs.between, 1.0) * seconds * share)
    unpacking = _NOTHING
    unpacked: Terms = {"bandwidth": -1.0, **stacked}
    if blocks and software.stored:
        unpacked[f"unpack_{'compiled' if software.compiled else 'eager'}"] = 1.0
        numbers = costs.stored
        if software.rescaled:
            numbers += _RESCALED * of_products
        unpacking = (math.log(max(numbers, 1.0) * a_byte), unpacked)
    elif blocks and software.types[1] in EIGHT_BITS and not software.compiled:
        unpacked["quantize_eager"] = 1.0
        unpacking = (math.log(max(of_products, 1.0) * a_byte), unpacked)
    return [(within, products), (between, others), unpacking]


def _launched(
    software: Software,
    costs: Costs,
    blocks: bool,
) -> list[Part]:
    unpacks = software.stored or software.types[1] in EIGHT_BITS
    more = _UNPACKING_KERNELS if blocks and unpacks and not software.compiled else 1.0
    kernels = math.log(max(costs.kernels * more, 1.0))
    gap = kernels
    if software.graphs:
        gap += math.log(_GRAPH_GAP)
    between: Terms = {"gap": 1.0}
    if blocks:
        between["blocks_gap"] = 1.0
    launched: Terms = {f"launch_{software.launcher}": 1.0}
    return [(gap, between), (kernels, launched)]


def _rate(
    sheet: Sheet,
    name: str,
    kind: str,
    doubled: bool,
) -> tuple[float, Terms]:
    """Returns the rate (TFLOP/s) that a class of operator may reach in a type, and the coefficients of its share.

    Args:
        sheet: of the card.
        name: of the class of operator.
        kind: the type.
        doubled: whether a card that accumulates in float16 at twice the rate does so.
    """
    generation = generation_of(sheet)
    own: Terms = {f"generation_{generation}": 1.0}
    cores = sheet.tensor
    half = cores.fp16
    vector = float(sheet.vector.fp32 or 1.0)
    if half is None:
        # Half precision is slow or overflows on these: programs compute in float32.
        # PyTorch adds up in float32, for which a P100's units for pairs of halves are of no use.
        slow = generation in ("pascal", "turing_gtx")
        whole = kind in ("fp32", "tf32") or slow or sheet.vector.fp16 is None
        if not whole:
            vector = float(sheet.vector.fp16 or 1.0)
        return _VECTOR_SHARE * vector, own
    if kind == "fp32" or (kind == "tf32" and cores.tf32 is None):
        return vector, {"vector_conv" if name == "conv" else "vector_gemm": 1.0}
    # GeForce accumulates in float16 at twice the rate. In TF32, too, it does more than its peak by others says.
    peak = (sheet.half_accumulation if doubled else None) or half
    terms = own | {"tensor": 1.0, name: 1.0}
    share = 1.0
    if sheet.chip in _STACKED:
        share = (peak / 312) ** -_STACKED_LOSS
    else:
        terms["large"] = -math.log(peak / 150)
    if kind in EIGHT_BITS:
        return share * _peak_of_eight_bits(sheet, kind, half), terms
    if kind == "tf32" and cores.tf32:
        return share * (float(cores.tf32) * peak / half), terms
    return share * float(peak), terms


def _peak_of_eight_bits(sheet: Sheet, kind: str, half: float) -> float:
    """Returns the peak rate (TFLOP/s) in a type of 8 bits; that of half precision for a card without one."""
    return float(sheet.peak(kind) or sheet.peak("int8") or half)


def _has_cores(sheet: Sheet, kind: str) -> bool:
    """Returns whether products of a type run on tensor cores of the card."""
    return sheet.tensor.fp16 is not None and kind not in ("fp32", "tf32")


def _rate_of_tokens(sheet: Sheet, name: str, kind: str) -> tuple[float, Terms]:
    """Returns the peak rate (TFLOP/s) of products or attention of a transformer, and the coefficients of their share."""
    half = float(sheet.tensor.fp16 or 1.0)
    peak = half
    if kind in EIGHT_BITS:
        peak = _peak_of_eight_bits(sheet, kind, half)
    watts = float(sheet.power_w or _WATTS * half) / half
    is_desktop = sheet.half_accumulation is not None and "Laptop" not in sheet.name
    if is_desktop:
        peak *= _BOOST
    terms: Terms = {
        f"generation_{generation_of(sheet)}": 1.0,
        f"blocks_{name}": 1.0,
        f"blocks_{name}_power": math.log(min(watts, _ENOUGH_WATTS) / _WATTS),
    }
    return peak, terms


_WATTS = 1.28
"""Watts per TFLOP/s in half precision of an A100, at which `blocks_gemm` and `blocks_attn` are shares of the peak."""

_BOOST = 1.08
"""How far GeForce cards of desktops clock above the boost of their data sheets, to which the peak rates are stated."""

_ENOUGH_WATTS = 2.4
"""Watts per TFLOP/s from which on products are held down by nothing but their own rate."""

_USUAL_POWER = {
    "pascal": 20.6, "volta": 19.1, "turing": 18.9, "turing_gtx": 19.9, "ampere": 8.6, "ada": 6.2, "hopper": 9.8,
    "blackwell": 6.3, "rdna2": 15.5, "rdna3": 6.8, "rdna4": 6.2,
}  # fmt: skip
"""Median watts per TFLOP/s in float32 of a generation's data sheets: below it, power may hold the clocks down."""


def _power(sheet: Sheet) -> float:
    usual = _USUAL_POWER.get(generation_of(sheet))
    if not (sheet.power_w and sheet.vector.fp32 and usual):
        return 1.0
    return float((sheet.power_w / sheet.vector.fp32 / usual) ** _POWER_GAIN)


BOTH = " | "
"""Stands between a chip and a publisher."""

_SCALE = 0.2
"""Residual (log) from which on a figure counts less: somewhat more than what two publishers of one figure differ by."""


def fit(
    table: RateTable,
    seconds: Array,
    start: Array | None = None,
    most: int = 40,
    shared: Array | None = None,
) -> Array:
    """Fits the coefficients: Student's t with two degrees of freedom, their priors, and Gauss-Newton steps.

    Args:
        table: the cases.
        seconds: what each took.
        start: from where to search.
        most: steps of the search.
        shared: coefficients of which only those of transformers are fitted, and all others stay.
    """
    if shared is None:
        free = ~OF_TRANSFORMERS
        mean = _MEAN
        values = mean.copy() if start is None else start.copy()
    else:
        free = OF_TRANSFORMERS
        mean = np.where(OF_TRANSFORMERS, _MEAN, shared)
        values = mean.copy()
    wanted = np.log(seconds)
    for _ in range(most if len(seconds) else 0):
        predicted, slope = table.gradient(values)
        slope = slope[:, free]
        left = wanted - predicted
        spread = _SCALE**2 + left[:, None] ** 2 / 2
        weighed = slope / spread
        variances = _DEVIATION[free] ** 2
        curvature = weighed.T @ slope + np.diag(1 / variances)
        pull = weighed.T @ left + (mean - values)[free] / variances
        step = np.linalg.solve(curvature, pull)
        largest = float(np.abs(step).max())
        values[free] += step * min(1.0, 0.7 / largest)
        if largest < 2e-3:
            break
    return values


@dataclass(frozen=True)
class Coefficients:
    """Fitted coefficients, those without parts of the figures, and what the figures say of errors.

    Attributes:
        all: fitted to all figures.
        without: by `chip`, `generation`, `publisher` or `both`, the coefficients without the figures of each.
        cards: number of figures of UNets by card.
        blocks: number of figures of transformers by card.
        publishers: number of publishers of figures by family of transformers.
        widths: factors (log) of the half-width of an 80 % interval, by class; see `fitting.labels`.
    """

    all: Array
    without: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    cards: Mapping[str, int] = field(default_factory=dict)
    widths: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, int] = field(default_factory=dict)
    publishers: Mapping[str, int] = field(default_factory=dict)

    def cards_of(self, software: Software) -> Mapping[str, int]:
        """Returns the number of figures by card that tell of a software."""
        return self.blocks if software.is_transformer else self.cards

    def left_out(self, by: str, value: str) -> Array:
        """Returns the coefficients without the figures of a chip, a generation or a publisher, or of two of them.

        `both` leaves out all figures of the chip, and all of the publisher, where there are any.
        """
        values = self.without.get(by, {}).get(value)
        if values is None and by == "both":
            chip, publisher = value.split(BOTH)
            of_publisher = self.without.get("publisher", {}).get(publisher)
            values = self.without.get("chip", {}).get(chip, of_publisher)
        return self.all if values is None else values


@cache
def coefficients() -> Coefficients:
    """Returns the packaged coefficients."""
    content = json.loads(COEFFICIENTS.read_text(encoding="utf-8"))
    names = content["names"]
    order = [names.index(name) for name in NAMES]

    def vector(values: list[float]) -> Array:
        return np.array(values)[order]

    without = {}
    for by, folds in content["without"].items():
        without[by] = {name: vector(values) for name, values in folds.items()}
    return Coefficients(
        vector(content["all"]),
        without,
        content["cards"],
        content["widths"],
        content["blocks"],
        content["publishers"],
    )
