"""The README's table of documentation, which lists the pages of the site."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ON_THE_SITE = {"reference/configuration.md", "reference/api.md"}
"""Pages that are made when the site is built."""


def test_the_readme_lists_every_page_of_the_site() -> None:
    pages = re.findall(
        r"- ((?:tutorials|how-to|explanation|reference)/\S+\.md)", (ROOT / "mkdocs.yml").read_text()
    )
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("## Documentation") : readme.index("## Commands")]
    linked = {page.partition("#")[0] for page in re.findall(r"\(docs/([^)]+)\)", table)}
    assert len(pages) > 30
    assert set(pages) - ON_THE_SITE == linked - {"decisions/README.md"}
