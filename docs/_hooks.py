"""How the site is made of more than docs: the changelog, what was measured, the examples.

Pages link these as a reader of the repository does, `../benchmarks/results/...`. Each file is carried into the site
under its own path, and the links follow. In the navigation a pattern stands for the pages that are named nowhere else.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
CARRIED = ("CHANGELOG.md", "benchmarks/README.md", "benchmarks/results/*.*", "examples/*.py")


def carried() -> list[str]:
    """Return the files from beside docs, by their paths in the repository."""
    return [path.relative_to(ROOT).as_posix() for pattern in CARRIED for path in sorted(ROOT.glob(pattern))]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages in the place of patterns."""
    docs = Path(config.docs_dir)
    pages = [path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.md"))]
    pages += [name for name in carried() if name.endswith(".md")]
    config.nav = _filled(config.nav, [page for page in pages if page not in set(_named(config.nav))])
    return config


def _named(items: list[Any]) -> list[str]:
    """The pages and patterns of a part of the navigation: pages, and sections, which have lists of their own."""
    return [name for item in items for name in ([item] if isinstance(item, str) else _named(*item.values()))]


def _filled(items: list[Any], rest: list[str]) -> list[Any]:
    filled: list[Any] = []
    for item in items:
        if isinstance(item, dict):
            filled.append({title: _filled(part, rest) for title, part in item.items()})
        elif "*" in item:
            pattern = re.escape(item).replace(r"\*", "[^/]*")
            filled += [page for page in rest if re.fullmatch(pattern, page)]
        else:
            filled.append(item)
    return filled


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Carry the files from beside docs into the site."""
    for name in carried():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs lead to what was carried; one to anything else is a broken link, and said to be one."""
    return markdown if page.file.src_uri in carried() else markdown.replace("](../", "](")
