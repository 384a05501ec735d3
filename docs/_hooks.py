"""How the site is made of more than docs: the changelog, what was measured, and every file that a page links.

Pages link files beside docs as a reader of the repository does, `../benchmarks/results/...`. Each is carried into the
site under its own path, and the links follow. In the navigation a pattern stands for the pages that are named nowhere
else.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent


@cache
def carried() -> list[str]:
    """Return the files from beside docs, by their paths in the repository."""
    found = {ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md", *(ROOT / "benchmarks/results").glob("*.*")}
    for page in DOCS.glob("*.md"):
        found |= {ROOT / name for name in re.findall(r"\]\(\.\./([^)#]+)", page.read_text(encoding="utf-8"))}
    return sorted(path.relative_to(ROOT).as_posix() for path in found if path.is_file())


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages in the place of patterns."""
    pages = sorted(path.name for path in DOCS.glob("*.md"))
    pages += [name for name in carried() if name.endswith(".md")]
    named = set(_named(config.nav))
    config.nav = _filled(config.nav, [page for page in pages if page not in named])
    return config


def _named(part: Any) -> list[str]:
    """The pages and patterns of a part of the navigation: a page, a section with its title, or a list of these."""
    if isinstance(part, str):
        return [part]
    return [name for inner in (part.values() if isinstance(part, dict) else part) for name in _named(inner)]


def _filled(part: Any, rest: list[str]) -> Any:
    if isinstance(part, dict):
        return {title: _filled(inner, rest) for title, inner in part.items()}
    if isinstance(part, list):
        return [page for inner in part for page in _spread(inner, rest)]
    return part


def _spread(part: Any, rest: list[str]) -> list[Any]:
    if not isinstance(part, str) or "*" not in part:
        return [_filled(part, rest)]
    pattern = re.escape(part).replace(r"\*", "[^/]*")
    return [page for page in rest if re.fullmatch(pattern, page)]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Carry the files from beside docs into the site."""
    for name in carried():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs lead to what was carried; one to anything else is a broken link, and said to be one."""
    return markdown if page.file.src_uri in carried() else markdown.replace("](../", "](")
