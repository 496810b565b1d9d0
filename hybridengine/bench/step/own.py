"""This project's side of `hybridengine bench step`: ranks under Ray that run one GRPO iteration on request."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hybridengine.backends.vllm import environment
from hybridengine.backends.vllm.environment import CACHE_BLOCK_TOKENS
from hybridengine.bench.step.spec import CONTROLLER, OwnWay, StepSpec, StepTime
from hybridengine.config import RunConfig, load_config
from hybridengine.controller.call_log import call_log
from hybridengine.data.datasets import PromptDataset, rows_after
from hybridengine.drivers.roles import Sampling, State
from hybridengine.errors import ConfigError
from hybridengine.files import read_object
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.report import keys
from hybridengine.training.files import claim_run, prepare_files
from hybridengine.training.iterations import call_metrics
from hybridengine.training.launch import RunPools

SPARE_BLOCKS = 8


@dataclass(frozen=True)
class StepFiles:
    """Files and prompts that both sides read."""

    model: Path
    """Checkpoint without an end token."""
    tokenizer: Path
    train_file: Path
    prompts: PromptDataset
    texts: Sequence[str]
    """Prompts as text that encodes to the same tokens."""

    def step_rows(self, num_prompts: int, step: int) -> list[int]:
        """Return the rows of the prompts of a step, counted from 1, as the run's workers choose them."""
        return rows_after(len(self.prompts), num_prompts, 0, (step - 1) * num_prompts)


def prepare_step(config_file: str, spec: StepSpec, folder: Path) -> StepFiles:
    """Return the model and prompts of a configuration, built if it says so; the model is a copy without end tokens."""
    config, _ = claim_run(load_config(config_file, [f"run.folder={folder}", "run.name=files", "warmup=null"]))
    read = prepare_files(config)
    if len(read.prompts) < spec.num_prompts:
        raise ConfigError(
            f"--prompts {spec.num_prompts} is more than the {len(read.prompts)} prompts of {config_file}; choose fewer"
        )
    endless = folder / "endless"
    endless.mkdir(parents=True)
    for file in config.model_folder.iterdir():
        if file.name in ("config.json", "generation_config.json"):
            described = read_object(file)
            described["eos_token_id"] = None  # if omitted, the architecture's default applies
            (endless / file.name).write_text(json.dumps(described, indent=2))
        elif file.is_file():
            (endless / file.name).symlink_to(file.resolve())
    return StepFiles(
        model=endless,
        tokenizer=config.tokenizer_folder,
        train_file=config.train_file.absolute(),
        prompts=read.prompts,
        texts=read.tokenizer.batch_decode(read.prompts.tokens),
    )


def run_config(spec: StepSpec, way: OwnWay, files: StepFiles, folder: Path) -> RunConfig:
    """Return the configuration of a run that does the steps of `spec` in the given way."""
    longest = max(map(len, files.prompts.tokens))
    shape = ModelShape.from_folder(files.model)
    rows = -(-spec.num_rows // (way.train.num_ranks // way.gen.num_ranks))
    blocks = rows * -(-(longest + spec.response_tokens) // CACHE_BLOCK_TOKENS) + SPARE_BLOCKS
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[spec.dtype]
    micro_batch = {"micro_batch_tokens": way.rows_per_micro_batch * (longest + spec.response_tokens)}
    sections = {
        "run": {"name": "own", "folder": str(folder), "steps": spec.num_steps},
        "cluster": {"ranks_per_node": [way.train.num_ranks]},
        "model": {"path": str(files.model), "tokenizer": str(files.tokenizer), "dtype": spec.dtype},
        "data": {"batch_size": spec.num_prompts, "train_file": str(files.train_file)},
        "actor": {
            "parallel": str(way.train),
            "generate": str(way.gen),
            "kl_loss_coef": spec.kl_coef,
            "optimizer": {"lr": spec.lr},
            **micro_batch,
        },
        "reference": micro_batch,
        "reward": {
            "function": "hybridengine.bench.step.trl_process:digit_share",
            "rows_per_call": spec.num_rows,
        },
        "rollout": {
            "max_prompt_tokens": longest,
            "max_response_tokens": spec.response_tokens,
            "samples_per_prompt": spec.samples_per_prompt,
            "max_num_seqs": max(2, spec.num_rows // way.train.dp_size),
            "kv_cache_bytes": blocks * CACHE_BLOCK_TOKENS * token_bytes // way.gen.num_ranks,
        },
        "algorithm": {"name": "grpo_from_engine"},
        "timeouts": {"start_s": spec.timeout_s, "call_s": spec.timeout_s},
    }
    file = folder / "own.yaml"
    file.write_text(json.dumps(sections))  # JSON is YAML
    return load_config(file)


@contextlib.contextmanager
def own_steps(
    spec: StepSpec, way: OwnWay, files: StepFiles, folder: Path, say: Callable[[str], None]
) -> Iterator[Callable[[int], StepTime]]:
    """Start the ranks of a run and yield a function that does the step of a given number; end the ranks on exit."""
    say(f"starting our ranks: {way}")
    config = run_config(spec, way, files, folder)
    threads = mock.patch.dict(environment.ON_CPU, OMP_NUM_THREADS=str(way.threads_per_rank))
    with threads, RunPools(config) as pools:
        pools.start()
        actor = pools.start_model("actor", folder=config.model_folder, stop_token_ids=())
        actor.start_training()
        roles = pools.start_roles(actor)
        pools.wait()
        state, log = State(), call_log()

        def step(number: int) -> StepTime:
            """Carry out one iteration, from prompts to updated weights."""
            samples = config.rollout.samples_per_prompt
            sampling = Sampling(number, config.data.batch_size, samples, number * config.rows_per_step)
            log.take_records()
            begin = time.time()
            metrics = config.algorithm.step(roles, sampling, state)
            pools.wait()
            seconds = time.time() - begin
            took = call_metrics(log.take_records(), 0, begin, begin + seconds)
            phases = {CONTROLLER: took.pop(keys.OVERHEAD_S)} | {
                name.removeprefix("time/").removesuffix("_s"): value
                for name, value in took.items()
                if name.startswith("time/")
            }
            return StepTime(seconds, int(metrics["rollout/tokens"]), phases)

        yield step
