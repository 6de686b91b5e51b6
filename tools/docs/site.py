"""What makes a site of these pages: the README is its front, and order is by use.

A link out of ``docs/`` leads into the repository, which the site is no part of: its text stays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

CHECKOUT = Path(__file__).resolve().parents[2]
ORDER = ("index.md", "how-to", "reference", "architecture.md", "decisions")
_SHIM = "https://unpkg.com/iframe-worker/shim"  # without it no search in a folder
_FOREIGN = re.compile(r"""<(?:script|img|iframe)[^>]+src="?https?://[^"> ]+""")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    text = (CHECKOUT / "README.md").read_text("utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = Path(page.file.src_uri).parent

    def kept(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, sharp, anchor = target.partition("#")
        if path and (CHECKOUT / "docs" / here / path).resolve() == CHECKOUT / "README.md":
            front = "../" * len(here.parts) + "index.md"
            return f"{mark}[{text}]({front}{sharp}{anchor})"
        inside = re.match(r"^[a-z]+:", target) or not path or _is_page(here / path)
        return match[0] if inside else text

    return _LINK.sub(kept, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Have the page ask no other site: what the theme would fetch lies beside it.

    Raises:
        PluginError: something is asked of another site, so a reader without a network lacks it.
    """
    output = output.replace(_SHIM, get_relative_url("iframe-worker.js", page.url))
    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.url} asks another site: {found[0]}")
    return output


def _is_page(path: Path) -> bool:
    there = (CHECKOUT / "docs" / path).resolve()
    in_docs = there.is_relative_to(CHECKOUT / "docs") and there.is_file()
    return in_docs or path.as_posix() == "index.md"


def on_nav(nav: Any, **_: Any) -> Any:
    """Put what people do first."""
    nav.items.sort(key=lambda item: ORDER.index(_name(item)))
    return nav


def _name(item: Any) -> str:
    if item.is_section:
        first = next(child for child in item.children if child.is_page)
        return str(Path(first.file.src_uri).parts[0])
    return str(item.file.src_uri)
