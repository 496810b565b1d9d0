"""`hybridengine bench serve` on a real server with a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.cli.main import main

pytestmark = pytest.mark.timeout(900)


def test_samples_together_take_one_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "serve.json"
    sizes = ["--samples", "8", "--response-tokens", "4", "--repetitions", "2"]
    code = main(["bench", "serve", "configs/bench-small.yaml", *sizes, "--json", str(report)])
    _, err = capsys.readouterr()
    assert code == 0, err
    found = json.loads(report.read_text())
    assert found["switches_of_samples_together"] == found["switches_of_step"] == 1
    calls = {kind: figures["num_calls"] for kind, figures in found["kinds"].items()}
    # a switch, the samples and the switch back; the prompt's log-probs besides
    assert calls["asample"] == calls["samples together"] == 3
    assert calls["compute_logprobs"] == 4
    assert calls["forward_backward"] == calls["optim_step"] == 1
    assert calls["step"] == 5
    for figures in found["kinds"].values():
        for sample in figures["samples"]:
            assert 0 < sample["ranks_s"] < sample["sdk_s"]
    assert 0 < found["server_share_of_step"] < 1
