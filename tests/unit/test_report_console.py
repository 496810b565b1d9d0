"""The text of a run: step lines and the final table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hybridengine.report.console import step_line, summary_table
from hybridengine.report.step_rows import Row
from tests.unit.report_runs import ASYNCHRONOUS

MIB = 2**20


def _row(step: int, **changes: float | None) -> Row:
    row: Row = {
        "step": step,
        "reward/mean": 0.4125,
        "kl/mean": 0.00312,
        "time/switch_to_generate_s": 0.034,
        "time/generate_s": 1.2,
        "time/switch_to_train_s": 0.021,
        "time/reference_log_probs_s": 0.5,
        "time/update_critic_s": 0.9,
        "time/update_actor_s": 12.31,
        "time/step_s": 15.0,
        "throughput/tokens_per_s": 811.6,
        "switch/received_bytes": 3 * MIB,
        "switch/peak_weight_bytes": 5 * MIB,
        "switch/redundant_bytes": 0,
        "rollout/log_prob_abs_diff_max": 2e-6,
    }
    return row | {key.replace("__", "/"): value for key, value in changes.items()}


def _rows() -> list[Row]:
    return [
        {"step": 0, "eval/exact_match": 0.315},
        _row(1, time__generate_s=1.0),
        _row(2, time__generate_s=2.0, eval__exact_match=0.5, switch__peak_weight_bytes=7.5 * MIB),
        _row(3, time__generate_s=1.5, eval__exact_match=0.78, rollout__log_prob_abs_diff_max=3.14e-6),
    ]


def test_step_line_says_everything_once() -> None:
    assert step_line(_row(3, eval__exact_match=0.615), num_steps=40) == (
        "step  3/40  reward 0.412  kl 0.0031  eval 61.5%"
        "  | to-gen 34ms  generate 1.20s  to-train 21ms  reference-log-probs 0.50s  critic 0.90s  actor 12.3s"
        "  step 15.0s  812 tok/s"
    )


def test_step_line_leaves_out_what_is_missing_and_shows_what_is_not_finite() -> None:
    assert step_line({"step": 0, "eval/exact_match": 0.25}, num_steps=5) == "step 0/5  eval 25.0%"
    evaluated = {"step": 0, "eval/score_mean": 1.0, "eval/dropped_share": 0.625}
    assert step_line(evaluated, num_steps=5) == "step 0/5  eval 1.000 (62.5% without a score)"
    assert step_line(evaluated | {"eval/dropped_share": 0.0}, num_steps=5) == "step 0/5  eval 1.000"
    row: Row = {"step": 2, "reward/mean": None, "time/generate_s": None}
    assert step_line(row, num_steps=5) == "step 2/5  reward nan  | generate nan"


def test_the_line_of_an_asynchronous_step_has_its_queue_the_ages_of_tokens_and_idle_pools() -> None:
    row = {"step": 3, "reward/mean": 0.5, **ASYNCHRONOUS, "time/step_s": 2.0}
    assert step_line(row, num_steps=5) == (
        "step 3/5  reward 0.500  queue 96 complete, 40 unfinished  age 0.81, at most 2, 1.2% masked"
        "  idle engines 30%, main 12%  | step 2.00s"
    )
    several_pools: Row = {"step": 3, "reward/mean": 0.5, "idle/main_share": 0.1, "idle/scorers_share": 0.9}
    assert step_line(several_pools, num_steps=5) == "step 3/5  reward 0.500"


def _table_cells(rows: list[Row], encoding: str = "utf-8") -> tuple[str, dict[str, list[str]]]:
    """Return the printed table, and its rows: name -> the cells to the right."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=stream, width=80).print(summary_table(rows))
    text = raw.getvalue().decode(encoding)
    cells = [
        [cell for cell in line.strip("| ").replace("|", "  ").split("  ") if cell.strip()]
        for line in text.splitlines()
    ]
    return text, {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells if row}


def test_final_table() -> None:
    text, cells = _table_cells(_rows())
    assert "Run of 3 steps" in text
    assert "\x1b" not in text
    assert cells["exact match before"] == ["31.5%"]
    assert cells["exact match after"] == ["78.0%"]
    assert cells["gain"] == ["+46.5 points"]
    assert cells["time: generate"] == ["4.50 s", "1.50 s"]
    assert cells["time: switch to generate"] == ["0.10 s", "34 ms"]
    assert cells["time: update actor"] == ["36.9 s", "12.3 s"]
    assert cells["time: step"] == ["45.0 s", "15.0 s"]
    assert [name for name in cells if name.startswith("time: ")] == [
        f"time: {phase}"
        for phase in (
            "switch to generate",
            "generate",
            "switch to train",
            "reference log probs",
            "update critic",
            "update actor",
            "step",
        )
    ]
    assert cells["received bytes"] == ["9.0 MiB", "3.0 MiB"]
    assert cells["peak weight bytes, max"] == ["7.5 MiB"]
    assert cells["redundant bytes, max"] == ["0 B"]
    assert cells["log-prob difference, max"] == ["3.14e-06"]


def test_a_repeated_step_counts_once() -> None:
    text, cells = _table_cells([_row(1, time__generate_s=100.0), _row(1, time__generate_s=2.0), _row(2)])
    assert "Run of 2 steps" in text
    assert cells["time: generate"] == ["3.20 s", "1.60 s"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_final_table_does_not_hide_what_was_not_finite(place: int) -> None:
    rows = [_row(1), _row(2), _row(3)]
    rows[place]["rollout/log_prob_abs_diff_max"] = None
    rows[place]["switch/received_bytes"] = None
    cells = _table_cells(rows)[1]
    assert cells["log-prob difference, max"] == ["nan"]
    assert cells["received bytes"] == ["nan", "nan"]


def test_final_table_of_no_rows() -> None:
    text, cells = _table_cells([])
    assert "Run of 0 steps" in text
    assert cells["redundant bytes, max"] == ["-"]


def test_final_table_of_a_run_without_evaluation_or_switch() -> None:
    _, cells = _table_cells([{"step": 1, "time/step_s": 2.0}])
    assert not {"exact match before", "exact match after", "gain"} & set(cells)
    assert cells["received bytes"] == ["-", "-"]
    assert cells["log-prob difference, max"] == ["-"]


def test_final_table_on_an_ascii_terminal() -> None:
    text, cells = _table_cells(_rows(), encoding="ascii")
    assert text.isascii()
    assert cells["received bytes"] == ["9.0 MiB", "3.0 MiB"]


def test_without_a_full_score_the_held_out_score_is_shown() -> None:
    rows: list[Row] = [{"step": 0, "eval/score_mean": 0.25}, {"step": 1, "eval/score_mean": 0.5}]
    assert step_line(rows[0], 1) == "step 0/1  eval 0.250"
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(rows))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "held-out score before" in text and "0.250" in text and "0.500" in text
    assert "exact match" not in text
