"""`hybridengine bench dispatch` on real ranks, with a small batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.bench.dispatch_spec import ROW_BYTES
from hybridengine.cli.main import main

NUM_ROWS = 300


def test_a_small_batch_both_ways(
    ray_cluster: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1-2-2 has rows 0 to 149 on rank 0 and the others on rank 2; at 2-2-1 each of 4 ranks takes all 300."""
    options = ["--from", "1-2-2", "--to", "2-2-1", "--bytes", str(NUM_ROWS * ROW_BYTES)]
    options += ["--repetitions", "2", "--json", str(tmp_path / "out.json")]
    assert main(["bench", "dispatch", *options]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["num_rows"] == NUM_ROWS
    assert found["controller_payload_bytes"] == 0
    assert found["received_bytes"] == (2 * 150 + 2 * 300) * ROW_BYTES
    # Fetched once, and sent to each of the consumer's ranks.
    assert found["through_controller_payload_bytes"] == (1 + 4) * NUM_ROWS * ROW_BYTES
    assert len(found["samples_direct_s"]) == 2
    assert 0 < found["empty_call_s"] < 5
    assert "an empty call to 4 ranks takes" in capsys.readouterr().out
