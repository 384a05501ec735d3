"""The site that `make docs` builds: whole, without a warning, and without a word to another host."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import lightning_ckpt
from chromium import PROGRAM, visit

ROOT = Path(__file__).parents[1]
BUILD = """
import socket

def refuse(self, address, *rest):
    raise RuntimeError(f"the build asked for {address}")

socket.socket.connect = socket.socket.connect_ex = refuse
from mkdocs.__main__ import cli
cli()
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Page(HTMLParser):
    """What a page names, leads to and loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attributes}
        self.names.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_no_link_is_broken(pages: dict[Path, Page]) -> None:
    """Every link within the site leads to a file of it, and to a place on its page where it names one."""
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are those of a server's root
            continue
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            names = pages[target].names if target in pages else {parts.fragment}
            if not parts.scheme and not (target.is_file() and unquote(parts.fragment) in {"", *names}):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_every_page_is_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    """From the front page each is one click away."""
    front = site / "index.html"
    reached = {(site / unquote(urlsplit(link).path)).resolve() for link in pages[front].links}
    assert {path.name for path in set(pages) - reached - {front, site / "404.html"}} == set()
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), ROOT / "CHANGELOG.md"]
    assert len(pages) == len(sources) + 1  # and the page of errors


def test_pages_load_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    """No script, style, font or picture comes from another host."""
    assert {load for page in pages.values() for load in page.loads if "//" in load} == set()


@pytest.mark.skipif(PROGRAM is None, reason="needs a Chromium")
def test_a_browser_shows_it_by_day_and_by_night(site: Path, tmp_path: Path) -> None:
    """From a folder, without a request to a host, and with every picture, in the reader's colours."""
    questions = {
        "pictures": "[...document.images].every(image => image.complete && image.naturalWidth > 0)",
        "scheme": "document.body.dataset.mdColorScheme",
    }
    for dark, scheme in ((False, "default"), (True, "slate")):
        seen = visit(site / "how-it-works.html", tmp_path / scheme, questions, dark=dark)
        assert seen.answers == {"pictures": True, "scheme": scheme}
        assert [request for request in seen.requests if not request.startswith(("file:", "data:"))] == []


def test_the_reference_has_every_public_name_and_no_other(site: Path, pages: dict[Path, Page]) -> None:
    """In the order of `__all__`, each with its arguments."""
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    names = [line.split(".")[-1] for line in text.splitlines() if line.startswith(":::")]
    assert names == lightning_ckpt.__all__
    assert {f"lightning_ckpt.{name}" for name in names} <= pages[site / "reference.html"].names
