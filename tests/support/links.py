"""Look for broken links in a folder of HTML files: ``python -m tests.support.links``.

Links to other hosts are left alone: a machine that builds the API reference may have no
network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit


class _Page(HTMLParser):
    """The links of a page, and the anchors to which one can link."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value for name, value in attrs if value}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])


def broken_links(folder: Path) -> list[str]:
    """Return "PAGE: LINK" for each link to a page or an anchor that is not there."""
    pages = {path.resolve(): _Page(path) for path in folder.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme:
                continue
            name, anchor = urldefrag(link)
            target = (path.parent / unquote(name)).resolve() if name else path
            found = pages.get(target)
            if found is None or unquote(anchor) not in found.anchors:
                broken.append(f"{path.relative_to(folder.resolve())}: {link}")
    return broken


def main(folder: str) -> int:
    """Print broken links and how many pages there are; return the exit status."""
    pages = list(Path(folder).rglob("*.html"))
    broken = broken_links(Path(folder))
    sys.stdout.write("".join(f"broken link in {each}\n" for each in broken))
    sys.stdout.write(f"{len(pages)} pages, {len(broken)} broken links\n")
    return int(bool(broken) or not pages)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
