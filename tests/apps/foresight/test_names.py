"""Names of cards, as drivers, shops, clouds and people write them, mean the right data sheets; faults have reports."""

import pytest

from sdopt.apps.foresight.cards import asked_for, why_unknown
from sdopt.apps.foresight.names import (
    cards_named,
    nearest_cards,
    other_forms,
    other_memory_kind,
    parsed_name,
    sold_memory,
    why_out_of_scope,
)
from sdopt.config.groups import data_sheets
from sdopt.hardware.faults import (
    FAULTS,
    builds_of,
    faults_of,
    without_arithmetic,
    without_kernels,
)

SHEETS = data_sheets()

MEANT = {
    "NVIDIA GeForce RTX 4060 Ti": ["rtx4060_ti", "rtx4060_ti_8gb"],
    "rtx4060_ti": ["rtx4060_ti", "rtx4060_ti_8gb"],
    "rtx4060_ti_8gb": ["rtx4060_ti_8gb"],
    "RTX 4060Ti 16 GB": ["rtx4060_ti"],
    "4060ti": ["rtx4060_ti", "rtx4060_ti_8gb"],
    "RTX 3060 8GB": ["rtx3060_8gb"],
    "3080 12gb": ["rtx3080_12gb"],
    "GeForce RTX 3060 Laptop GPU": ["rtx3060_laptop"],
    "NVIDIA GeForce RTX 3080 Laptop GPU": ["rtx3080_laptop", "rtx3080_laptop_8gb"],
    "rtx3070m": ["rtx3070_laptop"],
    "4090m": ["rtx4090_laptop"],
    "RTX 3070 Max-P": ["rtx3070_laptop"],
    "GeForce RTX 2070 with Max-Q Design": [],
    "1660 super": ["gtx1660_super"],
    "1660ti": ["gtx1660_ti"],
    "1060 3gb": ["gtx1060_3gb"],
    "rtx4070tisuper": ["rtx4070_ti_super"],
    "4060Ti16G": ["rtx4060_ti"],
    "7900 XTX": ["rx7900_xtx"],
    "6700 xt": ["rx6700_xt"],
    "RTX 2060 Super": ["rtx2060_super"],
    "rtx4070s": ["rtx4070_super"],
    "RTX 4090 D": ["rtx4090_d"],
    "1x RTX 4090": ["rtx4090"],
    "gtx 1060": ["gtx1060", "gtx1060_3gb"],
    "rtx_a4000": ["a4000"],
    "NVIDIA RTX A2000": ["a2000_6gb"],
    "RTX A2000 12GB": ["a2000"],
    "RTX A6000": ["a6000"],
    "RTX 6000 Ada": ["rtx6000_ada"],
    "Quadro RTX 6000": ["quadro_rtx6000"],
    "RTX 6000": [
        "rtx6000_ada",
        "rtx_pro_6000",
        "rtx_pro_6000_server",
        "rtx_pro_6000_maxq",
        "quadro_rtx6000",
    ],
    "Tesla T4": ["t4"],
    "nvidia-tesla-t4": ["t4"],
    "A100": ["a100_40", "a100_40_pcie", "a100_80", "a100_80_pcie"],
    "NVIDIA A100-PCIE-40GB": ["a100_40_pcie"],
    "NVIDIA Corporation GA100 [A100 PCIe 40GB]": ["a100_40_pcie"],
    "NVIDIA A100-SXM4-40GB": ["a100_40"],
    "H20": ["h20"],
    "NVIDIA H20-3e": [],
    "nvidia-a100-80gb": ["a100_80", "a100_80_pcie"],
    "Tesla V100-SXM2-32GB": ["v100_32"],
    "H100 NVL": ["h100_nvl"],
    "NVIDIA H100 80GB HBM3": ["h100"],
    "L40S": ["l40s"],
    "l40": ["l40"],
    "a10g": ["a10g"],
    "MI300X": ["mi300x"],
    "rx 7900xtx": ["rx7900_xtx"],
    "AMD Radeon RX 9060 XT": ["rx9060_xt", "rx9060_xt_8gb"],
    "TITAN X (Pascal)": ["titan_x_pascal"],
    "NVIDIA Titan X Pascal": ["titan_x_pascal"],
    "Legion 5 RTX 3070": ["rtx3070_laptop"],
    "Lenovo Legion Pro 7i RTX 4090": ["rtx4090_laptop"],
    "Legion Tower 5 RTX 3070": [],
    "ROG Zephyrus G14 4060": ["rtx4060_laptop"],
    "ROG Strix RTX 3070": ["rtx3070"],
    "Framework Laptop 16 RTX 5070": ["rtx5070_laptop"],
    "Predator Triton 500 RTX 3080": ["rtx3080_laptop", "rtx3080_laptop_8gb"],
    "MSI Vector 16 HX RTX 4070": ["rtx4070_laptop"],
    "MSI Cyborg 15 RTX 4060": ["rtx4060_laptop"],
    "IdeaPad Gaming 3 RTX 3050": ["rtx3050_laptop"],
    "Dell Inspiron Desktop RTX 3060 Ti": ["rtx3060_ti"],
    "Dell Precision 7680 RTX 5000 Ada": [],
    "Dell Precision 7920 RTX A6000": ["a6000"],
    "Alienware m18 RTX 4090": ["rtx4090_laptop"],
    "AORUS GeForce RTX 3060 Ti Elite 8G": ["rtx3060_ti"],
    "Sapphire Nitro+ RX 7900 XTX": ["rx7900_xtx"],
    "Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]": [
        "rx6800",
        "rx6800_xt",
        "rx6900_xt",
    ],
    "Navi 22 [Radeon RX 6700/6700 XT/6750 XT / 6800M/6850M XT]": [
        "rx6700_xt",
        "rx6750_xt",
    ],
    "GA104M [GeForce RTX 3070 Mobile / Max-Q]": ["rtx3070_laptop"],
    "RTX6000Ada": ["rtx6000_ada"],
    "VGA compatible controller: NVIDIA Corporation GA106 [GeForce RTX 3060 Lite Hash Rate] (rev a1)": [
        "rtx3060",
        "rtx3060_8gb",
    ],
    "Quadro RTX 4000": [],
    "Quadro RTX 5000": [],
    "Quadro RTX 8000": ["rtx8000"],
    "NVIDIA RTX 4000 Ada Generation": ["rtx4000_ada"],
    "NVIDIA RTX 4000 SFF Ada Generation": [],
    "A100-SXM4-80GB MIG 1g.10gb": [],
    "NVIDIA A10-8Q": [],
    "GRID T4-8Q": [],
    "Standard_NV6ads_A10_v5": [],
    "Standard_NV36ads_A10_v5": ["a10"],
    "g4dn.xlarge": ["t4"],
    "g5.2xlarge": ["a10g"],
    "p4d.24xlarge": ["a100_40"],
    "a2-highgpu-1g": ["a100_40"],
    "a2-megagpu-16g": ["a100_40"],
    "p6-b200.48xlarge": ["b200"],
    "8xH100 SXM": ["h100"],
    "2xT4": ["t4"],
    "RTX 6000 Blackwell": ["rtx_pro_6000"],
    "RTX PRO 6000 Blackwell Server Edition": ["rtx_pro_6000_server"],
    "RTX PRO 6000 96GB Max-Q": ["rtx_pro_6000_maxq"],
    "RTX 6000 Pro Max-Q": ["rtx_pro_6000_maxq"],
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": ["rtx_pro_6000_maxq"],
    "g7e.2xlarge": ["rtx_pro_6000_server"],
    "p3dn.24xlarge": ["v100_32"],
    "p5en.48xlarge": ["h200"],
    "ml.g6e.4xlarge": ["l40s"],
    "AWS g5.xlarge": ["a10g"],
    "Standard_NC6s_v3": ["v100_pcie"],
    "Dell G5 15 RTX 2060": [],
    "Gigabyte G5 RTX 4060": ["rtx4060_laptop"],
    "HP ZBook 15 G5": [],
    "ThinkStation P5 RTX A4000": [],
    "A100 40": ["a100_40", "a100_40_pcie"],
    "A100-80": ["a100_80", "a100_80_pcie"],
    "g2-standard-4": ["l4"],
    "Standard_NC4as_T4_v3": ["t4"],
    "Standard_NC24ads_A100_v4": ["a100_80_pcie"],
    "Standard_ND96amsr_A100_v4": ["a100_80"],
    "Standard_NC40ads_H100_v5": ["h100_nvl"],
    "Standard_ND96isr_H200_v5": ["h200"],
    "Standard_NC128lds_xl_RTXPRO6000BSE_v6": ["rtx_pro_6000_server"],
    "dual 4090": ["rtx4090"],
    "nvidia-l4x1": ["l4"],
    "l40sx4": ["l40s"],
    "a10gx2": ["a10g"],
    "RX 7900 XTX": ["rx7900_xtx"],
    "4070 TiS": ["rtx4070_ti_super"],
    "RTX4060Laptop": ["rtx4060_laptop"],
    "RTX 3090 (eGPU)": ["rtx3090"],
    "g5.12xlarge": ["a10g"],
    "half an A10": [],
    "1/3 A10": [],
    "0.5 T4": [],
    "rtx4060_ti_12gb": [],
    "rtx3060ti2": [],
    "RTX4060Ti16": ["rtx4060_ti"],
    "rtx5070 laptop": ["rtx5070_laptop"],
    "5060 laptop": ["rtx5060_laptop"],
    "RTX 5070 Ti Laptop": ["rtx5070_ti_laptop"],
    "RTX 5050": ["rtx5050"],
    "NVIDIA RTX PRO 5000 Blackwell": ["rtx_pro_5000", "rtx_pro_5000_72gb"],
    "RTX PRO 5000 72GB": ["rtx_pro_5000_72gb"],
    "RTX PRO 5000 Blackwell Laptop": [],
    "RTX PRO 4000 Blackwell": ["rtx_pro_4000"],
    "RTX PRO 4000 Blackwell SFF Edition": ["rtx_pro_4000_sff"],
    "RTX 4000": ["rtx4000_ada", "rtx_pro_4000"],
    "NVIDIA B300 SXM6 AC": ["b300"],
    "NVIDIA GB10": ["gb10"],
    "DGX Spark": ["gb10"],
    "Jetson AGX Orin 64GB": ["jetson_agx_orin_64"],
    "Jetson Orin Nano": ["jetson_orin_nano_8"],
    "Jetson AGX Thor": ["jetson_thor"],
    "Ryzen AI Max+ 395": ["strix_halo"],
    "AMD Radeon 8060S": ["strix_halo"],
    "GTX 1650 Ti": [],
    "NVIDIA GeForce RTX 2080 Ti, 22528 MiB": [],
    "NVIDIA GeForce RTX 4090 D, 49140 MiB": [],
    "RTX 3080 20480MiB": [],
    "RTX 3080, 10240 MiB": ["rtx3080"],
    "RTX 4070 with 64GB RAM": ["rtx4070"],
    "32GB of system RAM, RTX 3060 12GB": ["rtx3060"],
    "3090 24GB VRAM": ["rtx3090"],
    "01:00.0 VGA compatible controller [0300]: NVIDIA Corporation AD104 [GeForce RTX 4070 SUPER] [10de:2783]": [
        "rtx4070_super"
    ],
    "AMD ATI Radeon RX 6800/6800 XT / 6900 XT": ["rx6800", "rx6800_xt", "rx6900_xt"],
    "NVIDIA GeForce RTX 4090/PCIe/SSE2": ["rtx4090"],
    "Quadro 4000": [],
    "Quadro RTX 6000/8000": ["quadro_rtx6000"],
    "Clevo RTX 3080": ["rtx3080_laptop", "rtx3080_laptop_8gb"],
    "XMG Neo 16 RTX 4090": ["rtx4090_laptop"],
    "LG Gram 17 RTX 3050": ["rtx3050_laptop"],
    "MSI Pulse 15 4070": ["rtx4070_laptop"],
    "Sapphire Pulse RX 7600": ["rx7600"],
    "Lenovo Yoga Pro 9i RTX 4060": ["rtx4060_laptop"],
    "Galaxy Book4 Ultra RTX 4070": ["rtx4070_laptop"],
    "ROG Flow X16 4070": ["rtx4070_laptop"],
    "Acer Swift X 14 RTX 4060": ["rtx4060_laptop"],
    "XFX Swift RX 9070 XT": ["rx9070_xt"],
    "Predator 18 RTX 5090": ["rtx5090_laptop"],
    "ASUS ProArt P16 RTX 4070": ["rtx4070_laptop"],
    "gpu": [],
    "banana": [],
}


@pytest.mark.parametrize("written", MEANT)
def test_a_name_means_its_cards_and_no_others(written: str) -> None:
    assert cards_named(written, SHEETS) == MEANT[written]


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("rtx4060_ti_12gb", "rtx4070_ti"),
        ("rtx4050 laptop", "rtx3050_laptop"),
        ("GeForce RTX 2070 with Max-Q Design", "rtx3070_laptop"),
        ("GTX 1650 Ti", "gtx1650"),
        ("rx6700", "rx6700_xt"),
        ("gtx1050ti", "gtx1650"),
        ("L40S", "l40s"),
        ("rtx306", "rtx3060"),
        ("rtx3600", "rtx3060"),
        ("rtx4050", "rtx3050"),
        ("rtx 40", "rtx4060"),
        ("h10", "h100"),
        ("RX 580", "rx6600"),
        ("RX 5700 XT", "rx6700_xt"),
        ("AMD 780M", "rx7600"),
        ("980 Ti", "gtx1080_ti"),
    ],
)
def test_the_nearest_card_is_of_the_same_kind(written: str, nearest: str) -> None:
    assert nearest_cards(written, SHEETS)[0] == nearest


@pytest.mark.parametrize(
    ("name", "told"), [("RTX 2000", True), ("RTX 4000 Ada", False), ("rtx3090", False)]
)
def test_a_number_of_several_generations_is_said(name: str, told: bool) -> None:
    _, notes = asked_for([name])
    assert (
        any("cards of other generations have this number" in note for note in notes)
        == told
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("2x RTX 3090", "one card"),
        ("2x3090", "one card"),
        ("RTX 3090 NVLink", "one card"),
        ("Kaggle T4 x2", "one card"),
        ("8xH100", "one card"),
        ("l40sx4", "one card"),
        ("l4x1", ""),
        ("RTX 3090 eGPU", "pcie_gb_s=3"),
        ("1x RTX 4090", ""),
        ("g5.2xlarge", ""),
        ("RX 7900 XTX", ""),
        ("MSI GeForce RTX 4060 Ti VENTUS 2X BLACK 16G OC", ""),
    ],
)
def test_several_cards_and_a_slow_link_are_said(name: str, said: str) -> None:
    notes = " ".join(asked_for([name])[1])
    assert said in notes
    assert bool(said) == (name in notes)


def test_another_kind_of_memory_under_one_name_is_said() -> None:
    assert "608" in other_memory_kind("rtx3060_ti", SHEETS["rtx3060_ti"])
    for option, sheet in SHEETS.items():
        said = other_memory_kind(option, sheet)
        assert f"{sheet.bandwidth_gb_s:g} GB/s" in said or not said


def test_no_card_of_another_memory_is_near() -> None:
    assert all(
        sold_memory(SHEETS[card]) == 12
        for card in nearest_cards("rtx4060_ti_12gb", SHEETS)
    )
    assert nearest_cards("banana", SHEETS) == []


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("RTX 4090 48GB", "hardware=rtx4090 hardware.sheet.memory_gib=47.0"),
        ("RTX 2080 Ti 22GB", "hardware=rtx2080_ti hardware.sheet.memory_gib=21.6"),
        ("RTX 5070 Super 18GB", "hardware=rtx4090 hardware.sheet.memory_gib=7.6"),
    ],
)
def test_a_card_with_more_memory_is_the_same_card(name: str, changed: str) -> None:
    assert why_unknown(name).endswith(f"as in {changed}")


def test_each_sheet_is_meant_by_its_own_names() -> None:
    for option, sheet in SHEETS.items():
        for name in (option, *sheet.device_names):
            assert option in cards_named(name, SHEETS), (option, name)


def test_each_sheet_is_meant_by_its_name_and_memory_as_a_driver_prints_them() -> None:
    for option, sheet in SHEETS.items():
        for name in sheet.device_names:
            printed = f"{name}, {1024 * sheet.memory_gib:.0f} MiB"
            numbered = parsed_name(name).model
            assert not numbered or option in cards_named(printed, SHEETS), printed


def test_other_forms_are_of_one_model() -> None:
    assert other_forms("h100", SHEETS) == ["h100_nvl", "h100_pcie"]
    assert "a2000_6gb" in other_forms("a2000", SHEETS)
    assert other_forms("rtx3060", SHEETS) == ["rtx3060_8gb"]
    assert other_forms("titan_rtx", SHEETS) == []


@pytest.mark.parametrize(
    "name",
    [
        "A100-SXM4-80GB MIG 1g.10gb",
        "H100 MIG 3g.40gb",
        "GRID T4-8Q",
        "NV12ads A10 v5",
        "1/2 A10",
        "half an A10",
        "0.25 A100",
    ],
)
def test_a_part_of_a_card_is_not_the_card(name: str) -> None:
    assert "part of a card" in why_out_of_scope(name)


@pytest.mark.parametrize(
    "name",
    ["RTX 3090 + RTX 3060", "RTX 3090 or 4070 Ti", "3090/4090", "t4/l4", "A10 & A100"],
)
def test_a_name_of_several_cards_is_not_the_first_of_them(name: str) -> None:
    assert cards_named(name, SHEETS) == []
    assert why_unknown(name).endswith("'plan.hardware=[t4,l4]'")


@pytest.mark.parametrize("name", ["RTX 2070/8192MiB", "A100/80GB", "RTX 3060 / 12 GB"])
def test_memory_beside_a_card_is_no_second_card(name: str) -> None:
    assert cards_named(name, SHEETS)


@pytest.mark.parametrize("name", ["m1", "Apple M2 Max", "mps", "Arc A770", "TPU v3"])
def test_what_is_out_of_scope_is_said(name: str) -> None:
    assert "out of scope" in why_out_of_scope(name)


def test_no_card_with_a_sheet_is_out_of_scope() -> None:
    for option, sheet in SHEETS.items():
        assert not any(why_out_of_scope(name) for name in (option, sheet.name))


def test_faults_are_those_of_the_die_in_the_types_that_have_them() -> None:
    for card in ("gtx1660", "gtx1660_ti", "gtx1660_super", "gtx1650", "gtx1650_super"):
        assert "black" in faults_of(SHEETS[card].name, SHEETS[card], ["float16"])[0]
        assert faults_of(SHEETS[card].name, SHEETS[card], ["bfloat16"]) == []
    for named in ("NVIDIA T550 Laptop GPU", "NVIDIA GeForce MX550"):
        assert "black" in faults_of(named, None)[0]
    for card in ("rtx2060", "rtx3060", "p100", "t4", "rx7900_xtx"):
        assert faults_of(SHEETS[card].name, SHEETS[card]) == [], card
    assert "gfx1151" in faults_of(SHEETS["strix_halo"].name, SHEETS["strix_halo"])[0]
    assert "gfx1151" in faults_of("AMD Radeon 8050S Graphics", None)[0]
    assert faults_of(SHEETS["rx6900_xt"].name, SHEETS["rx6900_xt"], ["float16"]) == []
    assert faults_of("NVIDIA GeForce RTX 2060", None) == []


def test_each_fault_has_reports_and_no_card_two_of_one_kind() -> None:
    assert all(fault.sources and fault.says for fault in FAULTS)
    kinds = [(chip, fault.types) for fault in FAULTS for chip in fault.chips]
    assert len(kinds) == len({*kinds})


def test_bfloat16_is_slow_where_a_die_has_no_instructions_for_it() -> None:
    for option, sheet in SHEETS.items():
        said = " ".join(faults_of(sheet.name, sheet, ["bfloat16"]))
        slow = sheet.architecture == "rdna2"
        assert ("no instructions" in said) == slow, option
        assert bool(without_arithmetic(sheet, ["bfloat16", "float32"])) == slow, option
        assert without_arithmetic(sheet, ["float16", "float32"]) == ""


@pytest.mark.parametrize(
    ("card", "torch", "runs", "usual"),
    [
        ("rtx5090", (2, 6), False, True),
        ("rtx5090", (2, 7), True, True),
        ("b200", (2, 4), False, True),
        ("gb10", (2, 7), True, True),
        ("jetson_thor", (2, 8), False, False),
        ("jetson_thor", (2, 9), True, False),
        ("gtx1080", (2, 7), True, True),
        ("gtx1080", (2, 8), True, False),
        ("v100", (2, 10), True, True),
        ("v100", (2, 11), True, False),
        ("t4", (2, 13), True, True),
        ("h100", (2, 13), True, True),
        ("rx7900_xtx", (2, 4), True, True),
    ],
)
def test_a_pytorch_without_kernels_for_a_card_is_known(
    card: str, torch: tuple[int, int], runs: bool, usual: bool
) -> None:
    assert (without_kernels(SHEETS[card], torch) == "") == runs
    assert (builds_of(SHEETS[card], torch) == "") == usual
