"""Links of the documents lead to files and headings that there are, and every page can be reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in pages.links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in pages.anchors(path)):
            broken.append(link)
    assert broken == []


def test_every_page_and_picture_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in pages.PAGES for link in pages.links(page)
    }
    pictures = (pages.ROOT / "docs").rglob("*.png")
    missing = [pages.name(path) for path in {*pages.PAGES[1:], *pictures} - linked]
    assert sorted(missing) == []
