"""`hybridengine reshard bench` on real ranks of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.bench.reshard.spec import MethodName
from hybridengine.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def test_the_command_writes_figures_and_a_picture(
    ray_cluster: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--model", str(tmp_path), "--train", "1-2-1", "--gen", "1-1", "--repetitions", "1"]
    outputs = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png")]
    assert main(["reshard", "bench", *options, *outputs]) == 0
    assert "weights of every method are right" in capsys.readouterr().err
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [entry["method"] for entry in report["results"]] == [method.value for method in MethodName]
    micro_dp = report["results"][0]
    assert micro_dp["received_bytes_over_formula"] == pytest.approx(1.0, abs=0.02)
    assert micro_dp["redundant_bytes_max"] == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
