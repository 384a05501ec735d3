"""The page of a comparison: what it shows, that it needs nothing else, and how a browser sees it."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from chromium import PROGRAM, Visit, visit
from lightning_ckpt.cli._measurement import Comparison, Measurement, StepMemory
from lightning_ckpt.cli._page import page
from lightning_ckpt.cli._svg import Box, Scale, place_label
from lightning_ckpt.cli._words import finding

MIB = 2**20


def measurement(policy: str, milliseconds: float, mib: int, digest: str = "a") -> Measurement:
    static = {"parameters": 8 * MIB, "optimizer state": 16 * MIB, "gradients": 8 * MIB}
    curve = [(0.0, 32 * MIB), (0.2, mib * MIB // 2), (0.4, mib * MIB), (0.9, 32 * MIB)]
    memory = StepMemory(
        peak=mib * MIB,
        causes=static | {"activations": (mib - 32) * MIB},
        curve=curve,
        phases=[0.4, 0.9, 1.0],
    )
    return Measurement(
        policy=policy,
        blocks=4,
        seconds=[milliseconds / 1000 * factor for factor in (0.98, 1.0, 1.02)],
        samples=8,
        elements=1024,
        memory=memory,
        loss=1.0,
        digests={"loss": "b", "gradient of weight": digest},
        device="CPU, x86_64, 2 threads",
        on_host=True,
        versions={"torch": "2.13.0"},
    )


PLAIN, FULL, HALF = measurement("none", 200, 120), measurement("full", 260, 48), measurement("full:every=2", 230, 84)
WASTEFUL = measurement("selective", 300, 100)
COMPARISON = Comparison(target="models.py:make", seed=0, measured=(PLAIN, FULL, HALF, WASTEFUL), failed={})


def pictures(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]


def said(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter("text")]


def test_the_frontier_leaves_out_what_another_policy_beats() -> None:
    """Slower and larger than another one is nothing to choose."""
    assert [one.policy for one in COMPARISON.frontier()] == ["none", "full:every=2", "full"]


def test_only_policies_that_were_measured_are_spoken_of() -> None:
    """Where some failed, the others are; where all did, nothing is claimed but the plain peak."""
    some = replace(COMPARISON, failed={"auto": "no"})
    assert finding(some).endswith("bit for bit, with every policy that could be measured.")
    none = replace(some, measured=(PLAIN,))
    assert finding(none) == "No policy could be measured beside plain training, whose peak is 120 MiB."
    assert finding(replace(none, failed={})) == ("Nothing was measured beside plain training, whose peak is 120 MiB.")
    worse = replace(some, measured=(PLAIN, measurement("full", 260, 140)))
    assert finding(worse).startswith("No policy that could be measured needs less memory than plain training, 120 MiB.")


def test_every_picture_names_its_policies_and_units() -> None:
    """Points and bars are labelled where they are; axes say what they count in."""
    scatter, bars, *steps = pictures(page(COMPARISON))
    names = {"none", "full", "full:every=2", "selective"}
    assert names | {"step time, ms", "MiB"} <= set(said(scatter))
    assert names | {"parameters", "optimizer state", "gradients", "peak memory, MiB", "120 MiB"} <= set(said(bars))
    assert [said(step)[0] for step in steps] != []
    assert all({"time, ms", "MiB", "forward", "backward"} <= set(said(step)) for step in steps)
    assert [name for step in steps for name in said(step) if name in names] == [m.policy for m in COMPARISON.measured]


def test_a_policy_has_one_colour_everywhere() -> None:
    """The label of a policy has the same colour in every picture, and no two policies share one."""
    inks: dict[str, set[str | None]] = {}
    for picture in pictures(page(COMPARISON)):
        for element in picture.iter("text"):
            if element.get("class") == "name":
                inks.setdefault(element.text or "", set()).add(element.get("fill"))
    assert all(len(ink) == 1 for ink in inks.values())
    assert len(set.union(*inks.values())) == 4


def test_the_bars_are_as_long_as_their_bytes() -> None:
    """Of two bars the ratio of lengths is that of the peaks, within the gaps between their parts."""
    bars = pictures(page(COMPARISON))[1]
    lengths = [float(bar.get("width", 0)) for bar in bars.iter("rect") if bar.find("title") is not None]
    plain, full = sum(lengths[:4]), sum(lengths[4:8])
    assert full / plain == pytest.approx(48 / 120, rel=0.02)


def test_the_lead_says_what_it_found() -> None:
    """The lowest peak, what it costs, and whether training is the same."""
    lead = re.search(r'<p class="lead">(.*?)</p>', page(COMPARISON))
    assert lead is not None
    assert lead[1] == (
        "&quot;full&quot; lowers the peak from 120 MiB to 48 MiB, 40.0% of plain training&#x27;s, for 1.30 times its "
        "step time. Loss and gradients of the first step, 2 tensors, are those of plain training, bit for bit, with "
        "every policy."
    )


def test_what_differs_and_what_failed_is_on_the_page() -> None:
    """Neither is left out of a page that is passed on."""
    different = measurement("full", 260, 48, digest="c")
    text = page(replace(COMPARISON, measured=(PLAIN, different), failed={"selective": "out of memory: 2 GiB"}))
    assert "first step differs from plain training&#x27;s in its gradient of weight" in text
    assert "<td>no, 1</td>" in text
    assert "<b>selective</b>: out of memory: 2 GiB" in text


def test_without_plain_training_or_any_measurement_there_is_a_page() -> None:
    """Where memory ran out, what there is is shown."""
    assert len(pictures(page(replace(COMPARISON, measured=(FULL,), failed={"none": "out of memory"})))) == 3
    assert pictures(page(replace(COMPARISON, measured=(), failed={"none": "out of memory"}))) == []


def test_a_device_without_a_curve_has_its_peak() -> None:
    """Where the allocator tells no events, the picture says so."""
    bare = replace(FULL, memory=replace(FULL.memory, curve=[]))
    steps = pictures(page(replace(COMPARISON, measured=(PLAIN, bare))))[2:]
    assert "peak only" in said(steps[1])


def test_names_are_text_and_no_markup() -> None:
    """A target's name can't put anything into the page."""
    text = page(replace(COMPARISON, target="<script>alert(1)</script>"))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_it_refers_to_nothing_outside() -> None:
    """No address, no file, no script; the page forbids its own requests."""
    text = page(COMPARISON)
    assert re.findall(r"https?:|//|\bsrc=|\bhref=|url\(|@import|<script|<link", text) == []
    assert "default-src 'none'" in text


def test_marks_are_round_numbers_that_hold_every_value() -> None:
    """Steps of 1, 2 or 5 times a power of ten, from zero to at least the largest value."""
    for most in (0.0007, 0.9, 1.0, 3.3, 47, 4096.5):
        scale = Scale(most=most, start=0, end=100)
        labels = [float(label) for _, label in scale.marks()]
        assert labels[0] == 0
        assert labels[-1] >= most
        assert float(f"{labels[1]:e}".split("e")[0]) in (1, 2, 5)
        assert scale(0) == 0
        assert scale(labels[-1]) == pytest.approx(100)


def test_labels_of_near_points_do_not_overlap() -> None:
    """Three points in one place have their labels apart, and inside the frame."""
    within, taken = Box(0, 0, 400, 200), [Box(190, 90, 210, 110)]
    for name in ("none", "full:every=2", "selective"):
        place_label(name, 200, 100, within, taken)
    assert not any(one.overlaps(other) for one in taken for other in taken if one is not other)
    assert all(within.left <= box.left and box.right <= within.right and within.top <= box.top for box in taken)


INK = "getComputedStyle(document.body).color"
PAPER = "getComputedStyle(document.body).backgroundColor"
VISIBLE = """[...document.querySelectorAll('svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    const drawn = [...svg.querySelectorAll('path, circle, rect')].filter(e => e.getBoundingClientRect().width > 0);
    return [box.width, box.height, drawn.length];
})"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> list[Visit]:
    """The page as a browser shows it, by day and by night."""
    if PROGRAM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(page(COMPARISON), encoding="utf-8")
    questions = {"ink": INK, "paper": PAPER, "visible": VISIBLE, "overflow": OVERFLOW}
    return [visit(folder / "page.html", folder / f"profile{dark}", questions, dark=dark) for dark in (False, True)]


@pytest.mark.slow
def test_a_browser_finds_nothing_to_complain_about(visits: list[Visit]) -> None:
    """The console is empty."""
    assert [one.said for one in visits] == [[], []]


@pytest.mark.slow
def test_no_request_leaves_the_page(visits: list[Visit]) -> None:
    """The page itself is all that a browser asks for."""
    assert all(len(one.requests) == 1 and one.requests[0].startswith("file:") for one in visits)


@pytest.mark.slow
def test_every_picture_is_drawn(visits: list[Visit]) -> None:
    """Two pictures and one for each policy, each with an extent and shapes in it; nothing is wider than the page."""
    for one in visits:
        assert len(one.answers["visible"]) == 6
        assert all(width > 200 and height > 80 and drawn >= 2 for width, height, drawn in one.answers["visible"])
        assert one.answers["overflow"] == 0


@pytest.mark.slow
def test_it_is_light_by_day_and_dark_by_night(visits: list[Visit]) -> None:
    """The reader's own setting decides."""
    day, night = ([sum(map(int, re.findall(r"\d+", one.answers[part]))) for part in ("ink", "paper")] for one in visits)
    assert day[0] < day[1]
    assert night[0] > night[1]
