"""`hybridengine bench serve` on a real server with a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.cli.main import main

pytestmark = pytest.mark.timeout(900)


def test_samples_together_take_one_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "serve.json"
    sizes = ["--samples", "8", "--response-tokens", "4", "--repetitions", "4"]
    code = main(["bench", "serve", "configs/bench-small.yaml", *sizes, "--json", str(report)])
    _, err = capsys.readouterr()
    assert code == 0, err
    found = json.loads(report.read_text())
    # On a busy machine, samples of one round may come too far apart to be drawn together; some round has them together.
    fewest = {
        kind: (min(one["num_switches"] for one in samples), min(one["num_calls"] for one in samples))
        for kind, figures in found["kinds"].items()
        for samples in [figures["samples"]]
    }
    # a switch, the samples and the switch back; the prompt's log-probs besides
    assert fewest["asample"] == fewest["samples together"] == (1, 3)
    assert fewest["compute_logprobs"] == (1, 4)
    assert fewest["forward_backward"] == (0, 1)
    # weights are checked and saved for the sampler before the step
    assert fewest["optim_step"] == (0, 3)
    assert fewest["step"] == (1, 7)
    for figures in found["kinds"].values():
        for sample in figures["samples"]:
            assert 0 < sample["ranks_s"] < sample["sdk_s"]
    assert 0 < found["server_share_of_step"] < 1
