"""A run on a small checkpoint, which tests of the command line change until it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.cli.main import main

ROWS = [{"prompt": f"{number} + 2 =", "answer": str(number + 2)} for number in range(16)]


class Reached(BaseException):
    """The command got as far as starting processes."""


class Bench:
    """A run that is valid until a test changes it, and the commands that start it."""

    def __init__(self, folder: Path, checkpoint: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capture = folder, capture
        self.data = folder / "train.jsonl"
        self.write_rows(ROWS)
        self.config = folder / "run.yaml"
        self.sections: dict[str, Any] = {
            "run": {"steps": 2, "folder": str(folder / "runs")},
            "cluster": {"ranks_per_node": [4]},
            "model": {"path": str(checkpoint)},
            "data": {"train_file": str(self.data), "batch_size": 8},
            "actor": {"parallel": "2-2-1", "generate": "1-1"},
            "critic": {"parallel": "1-2-2"},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 8},
        }

    def write_rows(self, rows: list[Any]) -> None:
        self.data.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        )

    def train(self, *overrides: str) -> tuple[int, str]:
        """Run `hybridengine train` and return (exit code, stderr)."""
        self.config.write_text(yaml.safe_dump(self.sections))
        self._capture.readouterr()
        code = main(["train", str(self.config), *overrides])
        return code, self._capture.readouterr().err

    def refusal(self, *overrides: str) -> str:
        """Return the single message with which the run is refused; asserts exit code 2 and that nothing is written."""
        before = sorted(self.folder.rglob("*"))
        code, message = self.train(*overrides)
        assert code == 2, message
        assert message.startswith("hybridengine: ")
        assert message.count("hybridengine: ") == 1
        assert "Traceback" not in message
        assert [path for path in sorted(self.folder.rglob("*")) if path != self.config] == [
            path for path in before if path != self.config
        ]
        return message


def copy_checkpoint(bench: Bench, checkpoint: Path) -> Path:
    """Return a copy that the run uses."""
    copy = bench.folder / "model"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    bench.sections["model"]["path"] = str(copy)
    return copy
