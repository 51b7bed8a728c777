"""Hooks of MkDocs, which build the documentation site: see mkdocs.yml and `make docs`.

The pages are those of docs/, those that are made from the code (`tools/reference_pages.py`), and
the front pages of the repository. The navigation is what docs/index.md lists. Diagrams are drawn
when the site is built, so a reader's browser loads nothing from elsewhere.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import mermaidx
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from tools.reference_pages import PAGES

ROOT = Path(__file__).resolve().parents[1]
FRONT = {
    "README.md": "overview.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the repository's root, and what they are called in the site."""
DIAGRAMS = ROOT / "build" / "diagrams"
"""Those that were drawn before: drawing one takes seconds."""

_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
_FENCED = re.compile(r"(^ *```.*?^ *```[ ]*$)", re.M | re.S)
_MARK = re.compile(r"^<!-- (?:file: .*|background|not run: .*) -->\n", re.M)


def slug(text: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"<.*?>", "", text).lower()).replace(" ", separator)


# -- hooks of MkDocs ------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    config.nav = [{"Penstock": ["index.md", "overview.md"]}, *_navigation(index)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    for name, target in FRONT.items():
        files.append(File.generated(config, target, content=(ROOT / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = _MARK.sub("", markdown)
    markdown = _MERMAID.sub(lambda found: _drawn(found[1], page, config, files), markdown)
    origins = {target: name for name, target in FRONT.items()}
    source = origins.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _FENCED.split(markdown)
    parts[::2] = [
        _LINK.sub(lambda found: _relinked(found, source, page.file.src_uri), part)
        for part in parts[::2]
    ]
    return "".join(parts)


# -- what they need -------------------------------------------------------------------------


def _navigation(index: str) -> Iterator[dict[str, Any]]:
    """The sections of the index and the pages that each links to, in its order."""
    for section in index.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        targets = [found["target"] for found in _LINK.finditer(text)]
        pages: list[Any] = [_in_site(posixpath.normpath(f"docs/{target}")) for target in targets]
        if title == "Understand":
            pages += [FRONT["CONTRIBUTING.md"], FRONT["CHANGELOG.md"]]
        if "decisions/index.md" in pages:
            decisions = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
            place = pages.index("decisions/index.md")
            names = ["index.md", *(one.name for one in decisions)]
            pages[place] = {"Decisions": [f"decisions/{name}" for name in names]}
        yield {title: pages}


def _in_site(path: str) -> str:
    """Where a file of the repository is in the site; empty if it is not there."""
    inside = path.removeprefix("docs/") if path.startswith("docs/") else ""
    return FRONT.get(path, inside)


def _relinked(found: re.Match[str], source: str, page: str) -> str:
    """A link between files of the repository as one between pages; else its text alone."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"]))
    target = _in_site(path)
    if not target:
        return found["text"].strip("![]")
    relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
    return f"{found['text']}({relative}{found['anchor'] or ''})"


def _drawn(diagram: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = sha256(diagram.encode()).hexdigest()[:16] + ".svg"
    kept = DIAGRAMS / name
    if not kept.exists():
        DIAGRAMS.mkdir(parents=True, exist_ok=True)
        mermaidx.render(diagram).save(str(kept))
    uri = f"images/diagrams/{name}"
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, content=kept.read_bytes()))
    # The page is docs/PATH here, and the front pages lie in the root: either way, up to the root.
    depth = page.file.src_uri.count("/")
    return f"![diagram]({'../' * depth}{uri})"
