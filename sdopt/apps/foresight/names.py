"""Tells which data sheets a name may mean, as drivers, shops, clouds and people write the names of cards.

A name holds a model (`rtx 4060`), a kind (Ti, Super, laptop, PCIe), and perhaps a memory. One name may stand for cards
of several memories, which differ in what fits; a laptop's card shares the name of another one, and not its rates.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sdopt.hardware.cards import plain_name
from sdopt.schema import Sheet
from sdopt.text_files import first_match

_WORDLESS = re.compile(
    r"\b(?:nvidia|geforce|amd|ati|radeon|tesla|quadro(?! rtx)|corporation|gpu|graphics|card|generation|edition|with|"
    r"design|lite|hash|rate|graphic|hbm2e?|hbm3e?|gddr\d\w?|standard|[124]x)\b"
)

_KINDS = {
    # Of a desktop: less power.
    "maxq": r"(?:(?<=6000 )|(?<=6000 pro ))(?:blackwell )?max ?q|max ?q(?= workstation)",
    "server": r"(?<=6000 )(?:blackwell )?server",
    "laptop": r"laptop|mobile|notebook|max ?[qp]",
    "ti": "ti",
    "xt": "xt",
    "xtx": "xtx",
    "gre": "gre",
    "d": "d",
    "super": "super|s",
    "ada": "ada",
    "pro": r"pro|(?<=\d000 )blackwell",
    "pcie": "pcie?",
    "nvl": "nvl",
    "sxm": r"sxm\d?",
    "sff": "sff",
    "3e": "3e",  # an H20 with more and faster memory
    "quadro": "quadro(?= rtx)",  # of Turing: an RTX 4000 without it is a later card
}

_LAPTOPS = re.compile(
    r"\b(?!.*\b(?:desktop|tower)\b)(?:legion(?! t\d)|zephyrus|razer blade|"
    r"blade(?= 1[4-8])|katana|victus|loq|helios|thinkpad|zbook|"
    r"xps(?= 1[3-7])|omen(?= 1[5-7])|tuf(?= (?:gaming )?[af]1[5-7])|strix(?= (?:scar|g1[5-8]))|framework(?= 1\d)|"
    r"triton|stealth|raider|vector|cyborg|crosshair|ideapad|vivobook|zenbook|studiobook|surface|inspiron|latitude|"
    r"aspire|pavilion|alienware(?= [mx]?1[4-8])|aorus(?= 1[5-7])|aero(?= 1[4-7])|nitro(?= [5v]|1[4-8])|"
    r"precision(?= (?:5[4-7]|7[5-7])\d0)|(?:dell|gigabyte)(?= g\d)|"
    r"gram|yoga|galaxy book\d?(?: ultra)?|xmg(?! trinity)|clevo|sager(?: np)?|mechrevo|rog flow|spectre|envy(?= 1[3-7])|"
    r"msi (?:pulse|sword|bravo|creator)|swift (?:x|go)\b|predator(?= 1[4-8])|proart(?= p))"
    r"(?: (?:pro|slim|neo|gaming|scar|\d{4}(?= (?:quadro )?rtx)))*(?: ?[a-z]?\d{1,2}[a-z]?(?![a-z0-9]| ?gb?\b))?(?: hx\b)?"
)
"""Laptops whose names people give with the card's: the card is that of a laptop."""

_MEMORY = re.compile(r"\b(\d{1,3})(?: ?g(?:i?b)?|(?<=[av] 100 \d\d))\b")

_OF_MACHINE = re.compile(r"\b\d{1,4} ?gi?b (?:of )?(?:(?:system|ddr\d) )?ram\b")
"""Memory beside the card's, as people write it: `RTX 4070, 64 GB RAM`."""

_MEBIBYTES = re.compile(r"\b(\d{4,6}) ?mi?b\b")
"""How nvidia-smi prints the memory of a card: `22528 MiB`."""

_ROUNDING = 0.15
"""Share by which the memory that a program sees may be below the one that is sold."""

_FORMS = frozenset(("pcie", "nvl", "sxm", "ada", "pro", "quadro", "maxq", "server"))
"""Kinds that people leave out where a model has several of them."""

_CLOUDS = {
    "g4dn": "t4",
    "g5": "a10g",
    "gr?6|g2 standard": "l4",
    "g6e": "l40s",
    "g7e|g4 standard": "rtx_pro_6000_server",
    "p3": "v100",
    "p3dn": "v100_32",
    r"nc\d*r?s v3": "v100_pcie",
    r"p4de|a2 ultragpu|nd\d*amsr a100": "a100_80",
    r"nc\d*ads a100": "a100_80_pcie",
    r"p4d|a2 (?:high|mega)gpu|nd\d*asr a100": "a100_40",
    r"p5|a3 (?:high|mega)gpu|nd\d*isr h100": "h100",
    r"nc\d*adi?s h100": "h100_nvl",
    r"p5en?|a3 ultragpu|nd\d*isr h200": "h200",
    "a4 highgpu|p6 b200": "b200",
    r"nc\d+\w* xl rtxpro6000\w*": "rtx_pro_6000_server",
    r"nv(?:36|72)\w* a10": "a10",
}
"""Machines of clouds (AWS, GCP, Azure), by how their names begin, and the card that they have."""

_RENTED = r"(?:(?:aws|amazon|ec2|sagemaker|ml\.?|gcp|google|azure|standard) ?)*(?:{})(?:[.]|$| (?!.*[rg]tx))"
"""Where a machine's name may stand: laptops have a G5 in theirs, too, and name a card."""

_TIMES = r"(?<=[a-z]\d|\d\d|\ds|\dg)x[1-8]\b"
"""How a cloud says at the end of a name how many cards a machine has: `l40sx4`."""

_SHARE = re.compile(
    r"\bmig\b|\b\dg\.\d+gb|-\d{1,2}[abcq]\b|(?<![a-z0-9])nv(?:6|12|18)[a-z]\w*?[ _]a10|"
    r"\b1/\d+\b|\b0\.\d+ ?(?:x|of)?(?= ?an? |[ x]*[a-z])|\b(?:half|third|quarter)\b|[½¼⅓]"
)
"""How a part of a card is named: a MIG instance, a vGPU (`A10-8Q`), a share in numbers or words, one of Azure's."""

_SHARES = (
    "is a part of a card (MIG, vGPU), which has less memory and fewer cores; plan the whole card for the time at best, "
    "and hold its GiB against those of the part"
)

OUT_OF_SCOPE = {
    r"^(?:apple ?)?m[1-9](?: |$)|apple|\bmac|\bmps\b|\bmetal\b": "Apple's GPUs are out of scope: hardware=cpu is a "
    "Mac's processor",
    r"\barc\b|\ba(?:310|380|580|750|770)m?\b|\bb5[78]0\b|\bintel\b|\biris\b|\bxe\b": "Intel's GPUs are out of scope",
    r"\btpu|trainium|inferentia|gaudi": "accelerators that are no GPUs are out of scope",
}
"""What sdopt neither runs on nor predicts."""


@dataclass(frozen=True)
class CardName:
    """The name of a card, taken apart.

    Attributes:
        model: letters and number, as in `rtx 4060`; "" if there is none.
        kinds: what else is in the name: `ti`, `laptop`, `pcie`.
        memory: GB in the name, if any.
    """

    model: str
    kinds: frozenset[str]
    memory: int | None = None

    @property
    def family(self) -> str:
        """The letters of the model, as in `rtx`."""
        return self.model.partition(" ")[0]

    @property
    def number(self) -> int:
        """The number of the model."""
        return int(re.sub(r"\D", "", self.model) or 0)


def parsed_name(text: str) -> CardName:
    """Takes the name of a card apart."""
    name = text.lower()
    bracketed = re.search(
        r"\[([a-z][^\]]*\d[^\]]*)\]", name
    )  # as lspci prints the name of a chip's card
    name = re.sub(r"[^a-z0-9.]+", " ", bracketed[1] if bracketed else name)
    name = _LAPTOPS.sub(" laptop ", _OF_MACHINE.sub(" ", name))
    name = re.sub(r"\bquadro (?=\d)", "fermi ", name)  # what came before the letters
    name = re.sub(r"\b\d{1,2}x ?(?=[a-z]+ ?\d)", "", name)  # 8xH100
    name = re.sub(rf"{_TIMES}|\b(?:dual|two|quad|four|eight) ", " ", name)
    name = re.sub(r"(?<=[a-z])(?=\d{3,4}(?!\d| ?gb))", " ", name)  # rtx4060
    name = re.sub(r"(\d{3,4} ?ti)(?=super\b|s\b)", r"\1 ", name)  # 4070tisuper, 4070tis
    name = re.sub(r"(\d{3,4} ?ti)(\d{1,3})(?: ?gb?)?\b", r"\1 \2gb", name)  # 4060ti16g
    name = re.sub(r"(?<=[a-z0-9])(?=laptop|notebook|mobile)", " ", name)
    name = re.sub(
        r"\b(\d{3,4})(ti|super|s|xtx?|gre|m|d|ada)\b", r"\1 \2", name
    )  # 4060ti
    of_amd = re.search(r"\b(?:amd|ati|radeon|xtx?|gre)\b", name) is not None
    name = _WORDLESS.sub(" ", name)
    memory = _gigabytes(name)
    name = " ".join(_MEMORY.sub(" ", _MEBIBYTES.sub(" ", name)).split())
    kinds = set()
    for kind, pattern in _KINDS.items():
        shorter = re.sub(rf"\b(?:{pattern})\b", " ", name)
        if shorter != name:
            kinds.add(kind)
        name = shorter
    model = re.search(
        r"\b([a-z]{1,5}) ?([a-z]?)(\d{1,5})( ?[a-z]?)\b", name
    ) or re.search(r"()()\b(\d{3,5})( m)?\b", name)
    if model is None:
        return CardName("", frozenset(kinds))
    suffix = (model[4] or "").strip()
    if suffix == "m":
        kinds.add("laptop")
    suffix = suffix.replace("m", "")
    # "RTX A4000" is the A4000.
    letters = model[2] or model[1] or _usual_family(int(model[3]), of_amd)
    return CardName(f"{letters} {model[3]}{suffix}", frozenset(kinds), memory)


def _gigabytes(name: str) -> int | None:
    """Returns the memory in a name; what a driver prints goes before what is in its name, as in `GH200 480GB`."""
    if printed := _MEBIBYTES.search(name):
        return math.ceil(int(printed[1]) / 1024)
    memory = _MEMORY.search(name)
    return int(memory[1]) if memory else None


def _usual_family(number: int, of_amd: bool) -> str:
    """Returns the letters of a card of which only the number is given, as in `1660 super`, `7900 xtx` and `3090`."""
    if of_amd:
        return "rx"
    return "gtx" if number < 2000 else "rtx"


def names_of(option: str, sheet: Sheet) -> list[CardName]:
    """Returns the names of a sheet's card, taken apart: of its option, its own and those of the driver."""
    plain = re.sub(r"_(?:\d{2}|\d{1,2}gb)$", "", option).replace("_", " ")
    return [parsed_name(name) for name in (plain, sheet.name, *sheet.device_names)]


_OF_A_CHIP = re.compile(
    r"(?:\[|\b(?=radeon|geforce))(\w+)([^\]]*\d[^\]]*/[^\]]*)", re.IGNORECASE
)
"""How lspci prints the cards that have a chip: `[Radeon RX 6800/6800 XT / 6900 XT]`; neofetch without brackets."""


def cards_named(text: str, sheets: Mapping[str, Sheet]) -> list[str]:
    """Returns the options whose card a name means; several where it says neither the memory nor the form."""
    if text in sheets:
        return [text, *siblings(text, sheets)]
    if _SHARE.search(text.lower()) or _names_several(text):
        return []
    if listed := _OF_A_CHIP.search(text):
        maker, cards = listed[1], dict[str, None]()
        for name in f"{maker}{listed[2]}".split("/"):
            cards |= dict.fromkeys(cards_named(f"{maker} {name}", sheets))
        return [*cards]
    exact = [
        option
        for option, sheet in sheets.items()
        if _spaced(plain_name(text))
        in map(_spaced, map(plain_name, sheet.device_names))
    ]
    if exact:
        return exact
    rented = [
        card
        for pattern, card in _CLOUDS.items()
        if re.match(_RENTED.format(pattern), _spaced(text))
    ]
    if rented:
        return rented[-1:]
    asked = parsed_name(text)
    same = []
    for option, sheet in sheets.items():
        if any(_is_meant(asked, name) for name in names_of(option, sheet)):
            same.append(option)
    if asked.memory is not None:
        same = [option for option in same if has_memory(sheets[option], asked.memory)]
    return same


_MODELS = re.compile(
    r"(?:\b(?:rtx|gtx|rx|or|and|vs) ?(\d{3,4})|(?:^|[/+&]) ?([abhltv]\d{1,3}|[1-5]0[5-9]0))(?!\d| ?mi?b)"
)


def _names_several(text: str) -> bool:
    """Returns whether a name tells of unlike cards, as in `RTX 3090 or 4070 Ti`; cards of one chip are no such."""
    numbers = set(map("".join, _MODELS.findall(text.lower())))
    return len(numbers) > 1 and not _OF_A_CHIP.search(text)


def of_other_memory(text: str, sheets: Mapping[str, Sheet]) -> str:
    """Returns the card of a name that says a memory, as it is sold with another one; "" without one."""
    asked = parsed_name(text)
    if asked.memory is None:
        return ""
    for option, sheet in sheets.items():
        if any(_is_meant(asked, name) for name in names_of(option, sheet)):
            return option
    return ""


def _spaced(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", " ", text.lower()).strip()


def _is_meant(asked: CardName, name: CardName) -> bool:
    """Returns whether a card's name is the one asked for; a name without a form (PCIe, SXM) means each form."""
    kinds = name.kinds if asked.kinds & _FORMS else name.kinds - _FORMS
    return bool(asked.model) and asked.model == name.model and asked.kinds == kinds


_AGAIN = (2000, 4000, 4500, 5000, 6000)
"""Numbers of NVIDIA's cards for workstations that came again with later generations."""


def generation_assumed(text: str, sheet: Sheet) -> str:
    """Returns why a name may mean another card than a sheet's; "" if it says the generation, or there is one alone."""
    asked, own = parsed_name(text), parsed_name(sheet.name)
    if asked.kinds & _FORMS or asked.number != own.number or own.family != "rtx":
        return ""
    if own.number not in _AGAIN:
        return ""
    return "cards of other generations have this number (Quadro RTX, Ada, RTX PRO), with another memory and other rates"


def has_memory(sheet: Sheet, gigabytes: float) -> bool:
    """Returns whether a card has the memory that it is sold with, of which a program sees a little less."""
    return 1 - _ROUNDING <= sheet.memory_gib / gigabytes <= 1.01


def siblings(option: str, sheets: Mapping[str, Sheet]) -> list[str]:
    """Returns the other cards to which the driver gives the same name; none for an option that says its memory."""
    if re.search(r"_\d+(?:gb)?$", option):
        return []
    names = {plain_name(name) for name in sheets[option].device_names}
    same = []
    for other, sheet in sheets.items():
        if other != option and names & {
            plain_name(name) for name in sheet.device_names
        }:
            same.append(other)
    return same


def other_forms(option: str, sheets: Mapping[str, Sheet]) -> list[str]:
    """Returns cards of the same model and another form or memory, which have a name of their own."""
    own = _models_of(option, sheets[option])
    others = []
    for other, sheet in sheets.items():
        if other != option and own & _models_of(other, sheet):
            others.append(other)
    return others


def _models_of(option: str, sheet: Sheet) -> set[tuple[str, frozenset[str]]]:
    """Returns the models and kinds that a sheet's names tell, without forms; cards such as a TITAN have no number."""
    names = names_of(option, sheet)
    return {(name.model, name.kinds - _FORMS) for name in names if name.model}


def nearest_cards(text: str, sheets: Mapping[str, Sheet]) -> list[str]:
    """Returns the three options whose cards are nearest by model and kind; none of another memory than the one named."""
    asked = parsed_name(text)
    if not asked.model:
        return []
    ranked = []
    for option, sheet in sheets.items():
        if asked.memory is not None and not has_memory(sheet, asked.memory):
            continue
        far = min(_distance(asked, name) for name in names_of(option, sheet))
        if far[0] == 0:
            ranked.append((far, option))
    return [option for _, option in sorted(ranked)[:3]]


def _distance(asked: CardName, name: CardName) -> tuple[int, int, int]:
    """Returns how far a card is from the one asked for: in family, kind of machine and model, and then Ti and Super.

    The last two digits of a GeForce tell more of a card than the generation before them. A number that begins as the
    one asked for is near: a digit may have been left out; and so is one of the same kind with two digits exchanged.
    """
    family = int(asked.family != name.family)
    laptop = int(("laptop" in asked.kinds) != ("laptop" in name.kinds))
    (generation, tier), (other, others_tier) = _tier(asked), _tier(name)
    far = abs(tier - others_tier) + abs(generation - other)
    if asked.kinds == name.kinds and _exchanged(str(asked.number), str(name.number)):
        far = 1
    if str(name.number).startswith(str(asked.number)):
        far = 0
    return (
        family,
        far + 10_000 * laptop,
        2 * len(asked.kinds ^ name.kinds) + int(asked.model != name.model),
    )


def _exchanged(asked: str, number: str) -> bool:
    """Returns whether a number is another one with two neighbouring digits exchanged."""
    for place in range(1, len(asked)):
        turned = (
            asked[: place - 1] + asked[place] + asked[place - 1] + asked[place + 1 :]
        )
        if turned == number != asked:
            return True
    return False


def _tier(name: CardName) -> tuple[int, int]:
    """Returns a card's generation, and how high it is within that; Radeons count otherwise since the RX 5000."""
    if name.family != "rx":
        return divmod(name.number, 100)
    if name.number < 1000:
        return (
            name.number // 100,
            name.number % 100 - 20,
        )  # an RX 580 was what an RX 5600 is later
    return name.number // 1000, name.number % 1000 // 10


_BANDWIDTHS = {
    "rtx3060_ti": ("GDDR6X", 608),
    "rtx4070": ("GDDR6", 480),
    "gtx1650": ("GDDR6", 192),
}
"""Cards that are sold with another kind of memory under the same name, and its rate in GB/s by NVIDIA's product pages."""


def other_memory_kind(option: str, sheet: Sheet) -> str:
    """Returns in words with which other kind of memory a card is sold; "" if there is one kind."""
    if option not in _BANDWIDTHS:
        return ""
    kind, rate = _BANDWIDTHS[option]
    return (
        f"{option} has {sheet.bandwidth_gb_s:g} GB/s; one of the same name with {kind} has {rate}: "
        f"hardware.sheet.bandwidth_gb_s={rate}"
    )


_SEVERAL = re.compile(
    r"\b(?:[2-9]|1\d) ?x ?(?=nvidia|geforce|tesla|amd|radeon|[rg]tx|rx|(?:mi|[abhlptv]) ?\d|\d{4})|\bx ?[2-9]\b"
    rf"|\b(?:two|dual|four|quad|eight|nvlink|sli)\b|{_TIMES.replace('[1-8]', '[2-8]')}"
)

_OUTSIDE = re.compile(r"\be ?gpu\b|\bexternal\b|\bthunderbolt\b|\busb ?4\b|\boculink\b")


def remarks_on_name(text: str) -> list[str]:
    """Returns what a name says beyond its card, and a data sheet does not have."""
    spaced = re.sub(r"[^a-z0-9.]+", " ", text.lower())
    remarks = []
    if _SEVERAL.search(spaced):
        remarks.append("a call runs on one card: memory and time are those of one")
    if _OUTSIDE.search(spaced):
        remarks.append(
            "the card's link is slower than in a slot, which what is offloaded waits for: "
            "hardware.sheet.pcie_gb_s=3 for Thunderbolt"
        )
    return remarks


_SOLD = (
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    11,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    72,
    80,
    94,
    96,
    128,
    141,
    192,
    256,
    288,
)


def sold_memory(sheet: Sheet) -> int:
    """Returns the GB that a card is sold with: a program sees a little less."""
    return next(
        (size for size in _SOLD if size >= sheet.memory_gib), round(sheet.memory_gib)
    )


def why_out_of_scope(text: str) -> str:
    """Returns why no card of a name is described; "" if one may be."""
    if _SHARE.search(text.lower()):
        return _SHARES
    if _names_several(text):
        return "names several cards; separate them by commas, as in 'plan.hardware=[t4,l4]'"
    plain = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    return first_match(OUT_OF_SCOPE, plain)
