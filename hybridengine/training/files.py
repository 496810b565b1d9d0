"""Files that a run needs before its processes start: models, task data, rows and configuration."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import yaml
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hybridengine.backends.vllm.structures import check_structure
from hybridengine.checkpoints.hf_files import check_weights
from hybridengine.config import RunConfig, holder_shape, model_holders
from hybridengine.config.algorithm import Algorithm
from hybridengine.config.judge_section import JudgeSection
from hybridengine.config.reward_sections import scorer_key
from hybridengine.config.run_config import PATH_KEYS, reward_sections
from hybridengine.config.values import Section
from hybridengine.data.chat import Chat
from hybridengine.data.datasets import EPISODE_ROWS, PromptDataset
from hybridengine.data.images import image_reader
from hybridengine.data.judging import check_judge
from hybridengine.data.responses import ResponseDataset
from hybridengine.data.rewards import check_reward_functions
from hybridengine.data.tasks import write_arithmetic_files
from hybridengine.data.tokenizer import (
    build_arithmetic_tokenizer,
    check_same_tokens,
    load_tokenizer,
    token_id,
)
from hybridengine.environments.files import write_environment_files
from hybridengine.episodes.processes import check_episode
from hybridengine.errors import CheckpointError, ConfigError, DataError, raise_all, shown
from hybridengine.files import read_object, writing
from hybridengine.models.checkpoint_files import CHAT_TEMPLATE_FILE, copy_companions
from hybridengine.models.shapes import ModelShape
from hybridengine.report.step_rows import CONFIG_FILE

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class RunFiles:
    """Contents of the run's files."""

    tokenizer: PreTrainedTokenizerBase
    training: PromptDataset | ResponseDataset
    held_out: PromptDataset | ResponseDataset | None
    demonstrations: ResponseDataset | None
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response (`stop_token_ids`)."""

    @property
    def prompts(self) -> PromptDataset:
        """Training prompts of an algorithm that generates."""
        assert isinstance(self.training, PromptDataset), "the algorithm reads responses"
        return self.training

    def data_lines(self, config: RunConfig) -> list[str]:
        """Return lines about the rows with responses, and how often an offline algorithm reads them.

        For episodes, return a warning if the chat template lets no message follow a turn: whether their function adds any
        is not known before it runs.
        """
        if config.algorithm.generates:
            try:
                if config.rollout.episode is not None:
                    Chat(self.tokenizer).message_tokens([{"role": "user", "content": "?"}], ())
            except DataError as error:
                return [f"warning: client.add cannot add messages: {error}"]
            return []
        steps, batch_size = config.run.steps, config.data.batch_size
        epochs = steps * batch_size / len(self.training)
        lines = [f"data: {self.training}; {steps} steps of {batch_size} read {epochs:.3g} epochs"]
        return lines + ([f"held-out data: {self.held_out}"] if self.held_out is not None else [])


def claim_run(config: RunConfig) -> tuple[RunConfig, bool]:
    """Return `config` with absolute paths and a folder of its own, and True if this call created the folder.

    If the name is taken, the folder is NAME-2, NAME-3, ... A run with resume=auto keeps its existing folder. Raises
    ConfigError if the folder cannot be created.
    """
    config = _with_absolute_paths(config)
    name, number = config.run.name, 1
    while True:
        try:
            config.run_folder.mkdir(parents=True)
            return config, True
        except FileExistsError:
            if config.resume == "auto" and config.run_folder.is_dir():
                return config, False
            number += 1
            run = config.run.model_copy(update={"name": f"{name}-{number}"})
            config = config.model_copy(update={"run": run})
        except OSError as error:
            raise ConfigError(
                f"run.folder={config.run.folder} cannot be written to ({error.strerror}); name a folder that can be"
            ) from None


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    def resolve(key: str, value: Any) -> Any:
        if key in PATH_KEYS and isinstance(value, str):
            return str(Path(value).resolve())
        if isinstance(value, dict):
            return {name: resolve(name, one) for name, one in value.items()}
        if isinstance(value, Section) and not isinstance(value, Algorithm):  # whose options are its own
            changed = {name: new for name, one in value if (new := resolve(name, one)) is not one}
            return value.model_copy(update=changed)
        return value

    config = resolve("", config)
    if config.resume in ("auto", "never"):
        return config
    return config.model_copy(update={"resume": str(Path(config.resume).resolve())})


def prepare_files(config: RunConfig) -> RunFiles:
    """Build the run's model and data, read and check all files, and write the configuration into the run's folder.

    Raises:
        ConfigError, CheckpointError, DataError: a file is missing or invalid.
    """
    disable_progress_bar()
    problems = list[str]()
    for name, section in reward_sections(config).items():
        if section.are_called:
            _attempt(problems, check_reward_functions, name, section, config.timeouts.start_s)
        for term, judge in section.judges.items():
            key, folder = scorer_key(name, term), Path(section.scorers[term].path or "")
            _attempt(problems, check_whole_judge, key, judge, folder, config.timeouts.start_s)
    if config.rollout.episode is not None:
        _attempt(problems, check_episode, config.rollout.episode, config.timeouts.start_s)
    # The configuration is written last; if it exists, a resumed run keeps its original files.
    if not (config.run_folder / CONFIG_FILE).is_file():
        if config.model.build is not None:
            build_model(config)
        elif config.model.gguf is not None:
            convert_gguf(config)
        if config.data.task is not None:
            _attempt(problems, write_arithmetic_files, config.data_folder, config.data.task)
        elif config.data.environment is not None:
            _attempt(problems, write_environment_files, config)
            raise_all(problems, DataError)  # its files are missing otherwise
        write_tokenizer(config)
    shape = _attempt(problems, check_weights, config.model_folder)
    tokenizer = _attempt(problems, load_tokenizer, config.tokenizer_folder, pad_with_eos=True)
    if shape is None or tokenizer is None:
        raise_all(problems, DataError)
    assert shape is not None and tokenizer is not None, "raise_all has raised otherwise"
    own = [holder for holder in model_holders(config) if holder.path is not None]
    sizes = {f"{holder.key}.path={holder.path}": holder_shape(config, holder).vocab_size for holder in own}
    for model, vocab_size in {f"the actor's model {config.model_folder}": shape.vocab_size, **sizes}.items():
        problems += vocabulary_problems(config, tokenizer, model, vocab_size)
    if (teacher := config.teacher.path) is not None and "teacher" in config.algorithm.roles:
        named = f"the actor ({config.tokenizer_folder})", f"teacher.path={teacher}"
        _attempt(problems, check_same_tokens, tokenizer, teacher, *named)
    files = _read_rows(config, tokenizer, shape.vocab_size, problems)
    raise_all(problems, DataError)
    # Copied now, because the folders of models may be moved during a long run.
    with writing(config.companions_folder):
        copy_companions(config.model_folder, config.tokenizer_folder, config.companions_folder)
    if not (config.run_folder / CONFIG_FILE).is_file():
        keep_config(config)
    return files


def write_tokenizer(config: RunConfig) -> None:
    """Write the tokenizer with the template of `model.chat_template` into the run's folder, if there is one."""
    if config.model.chat_template is not None:
        given, folder = config.given_tokenizer_folder, config.tokenizer_folder
        with writing(folder):
            copy_companions(
                given, given, folder
            )  # with config.json, which tells transformers the tokenizer's class
            shutil.copyfile(config.model.chat_template, folder / CHAT_TEMPLATE_FILE)


def keep_config(config: RunConfig) -> None:
    """Write the configuration atomically into the run's folder; a resumed run reads it."""
    new = config.run_folder / f".{CONFIG_FILE}"
    with writing(new):
        new.write_text(config_text(config))
        new.replace(config.run_folder / CONFIG_FILE)


def config_text(config: RunConfig) -> str:
    """Return the configuration as YAML, without secrets."""
    return yaml.safe_dump(config.described(), sort_keys=False)


def _attempt(problems: list[str], check: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
    """Return the result of `check`; if it fails, add its problems to `problems` and return None."""
    try:
        return check(*arguments, **named)
    except (ConfigError, CheckpointError, DataError) as error:
        problems += error.problems or [str(error)]
        return None


def _read_rows(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, problems: list[str]
) -> RunFiles:
    """Return the rows of the run's data and its demonstrations; record errors in `problems`."""
    algorithm, data = config.algorithm, config.data

    reader = _attempt(problems, image_reader, config)

    def read(file: Path) -> PromptDataset | ResponseDataset:
        if algorithm.generates:
            column = EPISODE_ROWS if config.rollout.episode is not None else None
            return PromptDataset(file, tokenizer, config.rollout.max_prompt_tokens, column, reader)
        kind = algorithm.rows_kind
        return ResponseDataset(file, tokenizer, kind, data.max_tokens, data.too_long, reader=reader)

    training = _attempt(problems, read, config.train_file)
    held_out = demonstrations = None
    if config.eval_file:
        held_out = _attempt(problems, read, config.eval_file)
    if config.demonstrations_file:
        limit = (
            "rollout.max_prompt_tokens + max_response_tokens" if algorithm.generates else "data.max_tokens"
        )
        demonstrations = _attempt(
            problems,
            ResponseDataset,
            config.demonstrations_file,
            tokenizer,
            "demonstrations",
            config.max_tokens,
            seed=config.run.seed,
            limit=limit,
            reader=reader,
        )
    if training is None:
        raise_all(problems, DataError)
    assert training is not None, "raise_all has raised otherwise"
    if len(training) < data.batch_size:
        kind = algorithm.rows_kind
        problems.append(
            f"{config.train_file} has {len(training)} {kind}, data.batch_size={data.batch_size} wants more in"
            f" each step; lower it or add {kind}"
        )
    stops = _attempt(problems, stop_token_ids, config.model_folder, tokenizer, vocab_size)
    if stops is not None and (structure := config.rollout.structure) is not None:
        _attempt(problems, check_structure, structure, config.tokenizer_folder, vocab_size, stops)
    return RunFiles(tokenizer, training, held_out, demonstrations, stops or ())


def vocabulary_problems(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, model: str, vocab_size: int
) -> list[str]:
    """Return an error text if the tokenizer has tokens that a model does not know."""
    if len(tokenizer) <= vocab_size:
        return []
    return [
        f"{model} has vocab_size={vocab_size}, the actor's tokenizer ({config.tokenizer_folder}) has {len(tokenizer)}"
        " tokens; all models read the same tokens: name one that was trained with this tokenizer"
    ]


def stop_token_ids(
    model_folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[int, ...]:
    """Return the tokens that end a response.

    These are the end tokens of the tokenizer and of the checkpoint's generation_config.json, as in transformers, and the
    one with which the chat template ends a turn, which demonstrations teach.

    Raises CheckpointError if transformers, and so vLLM, rejects that file or config.json, or an end token is invalid.
    """
    from transformers import AutoConfig, GenerationConfig

    for name, kind, remedy in (
        ("config.json", AutoConfig, ""),
        ("generation_config.json", GenerationConfig, ", or remove it"),
    ):
        tokens = list[int]()  # the last file takes precedence
        if not (model_folder / name).exists():
            continue
        try:
            read = kind.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False)
            found = getattr(read, "eos_token_id", None)
            tokens = found if isinstance(found, list) else [] if found is None else [found]
            if wrong := [token for token in tokens if type(token) is not int or not 0 <= token < vocab_size]:
                raise ValueError(
                    f"eos_token_id has {shown(wrong[0])}, which is not a token from 0 to {vocab_size - 1}"
                )
        except Exception as error:  # the class depends on the invalid value
            raise CheckpointError(
                f"{model_folder / name} is not accepted by transformers ({' '.join(str(error).split())}); restore the"
                f" model's original file{remedy}"
            ) from None
    return tuple(dict.fromkeys([token_id(tokenizer, "eos"), *tokens, Chat(tokenizer).turn_end[-1]]))


def judge_stops(folder: Path) -> tuple[int, ...]:
    """Return the end tokens of a judge's verdicts (`stop_token_ids`)."""
    tokenizer = load_tokenizer(folder, pad_with_eos=True)
    return stop_token_ids(folder, tokenizer, ModelShape.from_folder(folder).vocab_size)


def check_whole_judge(key: str, judge: JudgeSection, folder: Path, timeout_s: float) -> None:
    """Raise an error of a judge's files, template, parser or form of verdicts; `key` is its scorer's."""
    shape = check_weights(folder)
    tokenizer = check_judge(f"{key}.judge", judge, folder, timeout_s).tokenizer
    if len(tokenizer) > shape.vocab_size:
        raise CheckpointError(
            f"{key}.path={folder} has vocab_size={shape.vocab_size}, and its tokenizer {len(tokenizer)} tokens; restore"
            " the tokenizer that the model was trained with"
        )
    if judge.structure is not None:
        named = f"{key}.judge.structure"
        check_structure(judge.structure, folder, shape.vocab_size, judge_stops(folder), named)


def build_model(config: RunConfig) -> None:
    """Write a small model with random weights, and its tokenizer, as a Hugging Face checkpoint."""
    import torch

    assert config.model.build is not None, "called for models to build"
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        model = _new_model(config.model.build.hf_config())
    tokenizer = build_arithmetic_tokenizer()
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(config.model_folder)
    tokenizer.save_pretrained(config.model_folder)


def _new_model(described: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(_transformers_config(described))


def _transformers_config(described: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**{key: value for key, value in described.items() if key != "architectures"})


def convert_gguf(config: RunConfig) -> None:
    """Write a GGUF file as a Hugging Face checkpoint; raise ConfigError if the packages that read GGUF are missing."""
    file = config.model.gguf_file
    assert file is not None and config.model.hf_config is not None, "checked with the configuration"
    if (config.model_folder / "model.safetensors").exists():
        return
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"model.gguf needs {error.name}; install hybridengine[smollm2]") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    described = read_object(config.model.hf_config)
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=_transformers_config(described), trust_remote_code=False
    )
    # A new model holds the weights as plain tensors, without the attributes that reading a GGUF file adds.
    model = _new_model(described)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(config.model_folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    tokenizer.save_pretrained(config.model_folder)
