"""The step of `sdk_calls.losses` on ranks that are driven in process: `python step_on_ranks.py CONFIG FOLDER`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np

from hybridengine.config import load_config
from hybridengine.models.shapes import ModelShape
from hybridengine.serving.engine_ranks import EngineRanks
from hybridengine.serving.rank_groups import RankGroups
from hybridengine.serving.ranks import LossRow, ModelFacts
from tests.clients import sdk_calls


def main(file: str, folder: Path) -> None:
    """Write log-probs of each loss and the stepped weights into `folder`."""
    config = load_config(file, serves=True)
    shape = ModelShape.from_folder(config.model_folder)
    facts = ModelFacts("model", str(config.tokenizer_folder), shape.vocab_size, config.max_tokens)
    with contextlib.closing(RankGroups(config, (3,))) as groups:
        groups.start()
        ranks = EngineRanks(groups, facts)
        ranks.begin_model()
        found = {}
        for loss in sdk_calls.LOSSES:
            rows = [
                LossRow(
                    np.array(datum.model_input.to_ints()),
                    {name: column.to_numpy() for name, column in datum.loss_fn_inputs.items()},
                )
                for datum in sdk_calls.data_of(loss)
            ]
            passed = ranks.forward_backward(rows, loss, {}, backward=True)
            found |= {f"{loss}-{number}": row["logprobs"] for number, row in enumerate(passed.outputs)}
        ranks.optim_step(sdk_calls.ADAM)
        groups.actor.export_model(str(folder / "stepped"), str(config.model_folder)).wait()
    np.savez(folder / "passed.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
