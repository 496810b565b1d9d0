"""What a run leaves behind and shows while it goes on: metrics, a timeline, samples, a line per step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import yaml
from rich.console import Console
from tensordict import TensorDictBase

from hybridengine.config import RunConfig
from hybridengine.controller.exchange import CallRecord
from hybridengine.data.rewards import Decoder, reward_texts
from hybridengine.drivers.step_metrics import PHASES
from hybridengine.metrics.console import RunConsole
from hybridengine.metrics.recorder import MetricsRecorder
from hybridengine.metrics.report.run_record import CONFIG_FILE, SAMPLES_FOLDER
from hybridengine.metrics.timeline import TIMELINE_FILE, Span, TimelineWriter

BARS = {
    "generate": "generate",
    "switch_to_generate": "switch",
    "switch_to_train": "switch",
    "log_probs": "log-probs",
    "ref_log_probs": "log-probs",
    "values": "values",
    "cost_values": "values",
    "scores": "scores",
    "costs": "scores",
    "update_actor": "updates",
    "update_critic": "updates",
    "update_cost_critic": "updates",
}
"""Phase of an iteration -> what its bars in the timeline count as."""


class RunOutput:
    """Writes into the run's folder, and to the terminal; a context manager.

    Args:
        nodes: address of every rank's node.
    """

    def __init__(self, config: RunConfig, nodes: Sequence[str], tokenizer: Decoder, console: Console) -> None:
        folder = config.run_folder
        self._nodes, self._tokenizer = nodes, tokenizer
        self._samples = folder / SAMPLES_FOLDER
        self._console = RunConsole(config.run.steps, console)
        (folder / CONFIG_FILE).write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        self._recorder = MetricsRecorder(folder)
        self._timeline = TimelineWriter(folder / TIMELINE_FILE)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and print the row of a step; step 0 is the state before training."""
        self._console.print_step(self._recorder.record(step, metrics))

    def draw(self, step: int, records: Sequence[CallRecord]) -> None:
        """Add what the ranks did in a step to the timeline."""
        self._timeline.write([span for record in records for span in self._spans(step, record)])

    def show_samples(self, step: int, rows: TensorDictBase) -> None:
        """Keep responses of an evaluation: rows with tokens, lengths, `answers` and `scores`."""
        texts = reward_texts(rows, self._tokenizer, ["prompts", "responses", "answers"])
        self._samples.mkdir(exist_ok=True)
        lines = [
            json.dumps(
                {"step": step, "prompt": prompt, "response": response, "answer": answer, "score": score}
            )
            for prompt, response, answer, score in zip(
                texts["prompts"], texts["responses"], texts["answers"], rows["scores"].tolist(), strict=True
            )
        ]
        with Path(self._samples / "evaluation.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def _spans(self, step: int, record: CallRecord) -> list[Span]:
        phase = BARS.get(PHASES.get(str(record), ""), "other")
        spans = []
        for rank, (begin, end) in record.spans.items():
            node, fetched = self._nodes[rank], record.fetch_seconds.get(rank, 0.0)
            spans.append(Span(str(record), phase, rank, node, record.role, begin, end, step=step))
            if fetched:
                spans.append(
                    Span(
                        "fetch rows", "transfers", rank, node, record.role, begin, begin + fetched, step=step
                    )
                )
        return spans

    def __enter__(self) -> RunOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.close()
        self._timeline.close()
