"""Peak FLOP/s: dense, of the device that is meant, or nothing."""

import pytest

from lightning_ckpt.hardware import FORMATS, PEAKS, peak_flops

TERA = 10**12


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA A30", 165),
        ("NVIDIA A10", 125),
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX A5000", 111.1),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 3090", 71),
        ("GeForce RTX 3090", 71),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_half_precision_is_the_dense_figure(name: str, half: float) -> None:
    """Names that others' tables miss, or give the sparse or a neighbour's figure, have their own dense one."""
    assert peak_flops(name)["bf16"] == pytest.approx(half * TERA)
    assert peak_flops(name)["fp16"] == pytest.approx(half * TERA)


@pytest.mark.parametrize("name", ["Tesla T4", "Tesla V100-SXM2-32GB", "Tesla V100-PCIE-16GB"])
def test_a_device_without_bf16_has_no_bf16_peak(name: str) -> None:
    """fp16 is known for these and bf16 is not computed in hardware: no figure, not another format's."""
    assert "fp16" in peak_flops(name)
    assert "bf16" not in peak_flops(name)
    assert "tf32" not in peak_flops(name)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 4070",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A10G",
        "NVIDIA H20",
        "NVIDIA L400",
        "AMD Instinct MI300A",
        "NVIDIA",
        "",
        "cpu",
    ],
)
def test_another_device_gets_nothing(name: str) -> None:
    """A name that only contains a known one belongs to another device, whose peak is not known."""
    assert peak_flops(name) == {}


def test_no_format_is_faster_than_a_narrower_one() -> None:
    """fp32 <= tf32 <= half precision on each device: a sparse or misplaced figure would break the order."""
    for row in PEAKS:
        rates = [rate for rate in (row.fp32, row.tf32, row.fp16) if rate is not None]
        assert rates == sorted(rates), row
        assert row.tf32 is None or row.fp16 is None or row.tf32 <= 0.51 * row.fp16


def test_each_row_has_a_source_and_a_figure() -> None:
    """A figure nobody can look up is left out."""
    for row in PEAKS:
        assert len(row.source) > 10
        assert any(getattr(row, known) for known in FORMATS)
