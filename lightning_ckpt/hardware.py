"""Peak FLOP/s of devices by name: dense figures only, each with its source, None when unknown.

A wrong MFU is worse than none. So a name is matched whole (a laptop part, a MIG slice or a `SUPER` is another device
than the one whose name it contains), figures that vendors give with structured sparsity are halved, and half precision
is the rate with 32-bit accumulation, which is what PyTorch's matrix products use.
"""

import re
from dataclasses import dataclass

TERA = 10**12


@dataclass(frozen=True)
class Peak:
    """Dense peak rates of one device.

    Args:
        names: regular expression of the whole device name, less a leading vendor.
        source: the document the figures are taken from.
        bf16, fp16, tf32, fp32: TFLOP/s of matrix products in that format; None where the device has no such unit, or
            where the document leaves a doubt.
    """

    names: str
    source: str
    bf16: float | None = None
    fp16: float | None = None
    tf32: float | None = None
    fp32: float | None = None


def _half(names: str, half: float, tf32: float | None, fp32: float | None, source: str) -> Peak:
    """A device that runs bf16 and fp16 at one rate."""
    return Peak(names, source, bf16=half, fp16=half, tf32=tf32, fp32=fp32)


_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, V2.1"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, V2.1"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, V1.1"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet and Hopper architecture whitepaper"
_HALVED = "; figures with sparsity halved"

PEAKS: tuple[Peak, ...] = (
    _half("GB200", 2500, 1250, None, "NVIDIA GB200 NVL72 datasheet, by GPU" + _HALVED),
    _half("B200", 2250, 1125, None, "NVIDIA HGX B200 datasheet, by GPU" + _HALVED),
    _half(r"GH200 (480GB|120GB|144GB HBM3e)", 989.4, 494.7, 66.9, "NVIDIA GH200 Grace Hopper Superchip datasheet"),
    _half("H200", 989.4, 494.7, 66.9, "NVIDIA H200 Tensor Core GPU datasheet" + _HALVED),
    _half("H200 NVL", 835.5, 417.5, 60, "NVIDIA H200 Tensor Core GPU datasheet" + _HALVED),
    _half("H100 80GB HBM3", 989.4, 494.7, 66.9, _H100),
    _half("H100 PCIe", 756, 378, 51.2, _H100),
    _half("H100 NVL", 835.5, 417.5, 60, _H100 + _HALVED),
    _half(r"A[18]00-(SXM4|PCI[Ee])-[48]0GB|A[18]00 80GB PCIe", 312, 156, 19.5, "NVIDIA A100 and A800 datasheets"),
    _half("A30", 165, 82, 10.3, "NVIDIA A30 datasheet"),
    _half("A10", 125, 62.5, 31.2, "NVIDIA A10 datasheet"),
    _half("A40", 149.7, 74.8, 37.4, "NVIDIA A40 datasheet"),
    _half("A2", 18, 9, 4.5, "NVIDIA A2 datasheet"),
    _half("L4", 121, 60, 30.3, "NVIDIA L4 datasheet" + _HALVED),
    _half("L40", 181.05, 90.5, 90.5, "NVIDIA L40 datasheet"),
    _half("L40S", 362.05, 183, 91.6, "NVIDIA L40S datasheet"),
    Peak("Tesla T4", "NVIDIA T4 datasheet", fp16=65, fp32=8.1),
    Peak(r"Tesla V100-SXM2-(16|32)GB", "NVIDIA V100 datasheet", fp16=125, fp32=15.7),
    Peak(r"Tesla V100-PCIE-(16|32)GB", "NVIDIA V100 datasheet", fp16=112, fp32=14),
    Peak("Tesla V100S-PCIE-32GB", "NVIDIA V100 datasheet", fp16=130, fp32=16.4),
    _half("RTX 6000 Ada Generation", 364.2, 182.1, 91.1, "NVIDIA RTX 6000 Ada Generation datasheet" + _HALVED),
    _half("RTX A6000", 154.8, 77.4, 38.7, _GA102),
    _half("RTX A5000", 111.1, 55.6, 27.8, "NVIDIA RTX A5000 datasheet" + _HALVED),
    _half("RTX A4000", 76.7, 38.3, 19.2, "NVIDIA RTX A4000 datasheet" + _HALVED),
    _half("GeForce RTX 5090", 209.5, 104.8, 104.8, _RTX_BLACKWELL),
    _half("GeForce RTX 5080", 112.6, 56.3, 56.3, _RTX_BLACKWELL),
    _half("GeForce RTX 4090", 165.2, 82.6, 82.6, _ADA),
    _half("GeForce RTX 4080", 97.5, 48.7, 48.7, _ADA),
    _half("GeForce RTX 4070 Ti", 80.2, 40.1, 40.1, _ADA),
    _half("GeForce RTX 3090", 71, 35.6, 35.6, _GA102),
    _half("GeForce RTX 3070", 40.6, 20.3, 20.3, _GA102),
    _half("AMD Instinct MI300X", 1307.4, None, 163.4, "AMD Instinct MI300X data sheet"),
    _half("AMD Instinct MI325X", 1307.4, None, 163.4, "AMD Instinct MI325X data sheet"),
    _half("AMD Instinct MI250X", 191.5, None, None, "AMD Instinct MI200 series data sheet, by die: PyTorch sees two"),
    _half("AMD Instinct MI210", 181, None, None, "AMD Instinct MI210 data sheet"),
    Peak("AMD Instinct MI100", "AMD Instinct MI100 data sheet", bf16=92.3, fp16=184.6),
)

FORMATS = ("bf16", "fp16", "tf32", "fp32")


def peak_flops(device_name: str) -> dict[str, float]:
    """Return a device's dense peak, in FLOP/s, by format; empty when the device is unknown.

    Args:
        device_name: as the driver gives it, such as `"NVIDIA H200"` or `"NVIDIA A100-SXM4-80GB"`.

    >>> peak_flops("NVIDIA H200")["bf16"]
    989400000000000.0
    >>> peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU")
    {}
    """
    name = device_name.strip().removeprefix("NVIDIA ")
    for row in PEAKS:
        if re.fullmatch(row.names, name):
            rates = {known: getattr(row, known) for known in FORMATS}
            return {known: rate * TERA for known, rate in rates.items() if rate is not None}
    return {}
