"""The budgets on docs/how-to/cluster.md, which are those that the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/cluster.md").read_text()


@pytest.mark.parametrize("name", ["qwen2.5-7b-8gpu", "llama3-70b-16nodes"])
def test_the_page_shows_what_a_dry_run_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    part = PAGE[PAGE.index(f"hybridengine train configs/{name}.yaml --dry-run") :]
    (shown,) = [block for block in part.split("```")[:5] if block.startswith("\nmodel: ")]
    assert main(["train", str(ROOT / "configs" / f"{name}.yaml"), "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in shown.strip().splitlines() if line not in ("", "...")]
    assert len(lines) > 10
    assert [line for line in lines if line not in printed] == []
