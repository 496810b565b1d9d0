"""An engine on ranks of its own that samples what the clients of a server ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensordict import TensorDict, TensorDictBase

from hybridengine.backends.engine import SamplingSettings
from hybridengine.config import RunConfig
from hybridengine.rows.protocols import PROTO_3D, RankContext, register
from workers.generation import EngineWorker
from workers.responses import SAMPLE_COLUMNS, sample_rows


class ClientEngine(EngineWorker):
    """One rank of an engine with the run's tokenizer, for stop strings."""

    def __init__(self, context: RankContext, run: RunConfig, folder: str | Path) -> None:
        super().__init__(context, run, folder, tokenizer=str(run.tokenizer_folder))

    @register(PROTO_3D, SAMPLE_COLUMNS, returns_rows=True)
    def sample(self, prompts: TensorDictBase, sampling: Sequence[SamplingSettings]) -> TensorDict:
        """Return a response to each prompt (`sample_rows`)."""
        return sample_rows(self._engine, prompts, sampling)
