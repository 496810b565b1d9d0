"""Program that runs one step of TRL's GRPOTrainer per request. Runs in TRL's environment, without this project's modules.

Its argument is the file descriptor of a `Connection`. The first message has the settings; the answer means that TRL is
ready. Each further message requests a step, and the answer has its figures. It ends when the connection closes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


def digit_share(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return the share of digits among each response's characters: a reward of negligible cost."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in responses]


class Clock:
    """Seconds by phase, and tokens, of the current step.

    Args:
        now: returns the time, after all work that the device has been given.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.phases: dict[str, float] = {}
        self.tokens = 0

    def around(self, owner: Any, method: str, phase: str, count: Callable[..., int]) -> None:
        """Time a method as `phase`, and count tokens with `count`, which gets its first argument and its result."""
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self.now()
            result = function(*args, **kwargs)
            self.phases[phase] = self.phases.get(phase, 0.0) + self.now() - begin
            self.tokens += count(args[0], result)
            return result

        setattr(owner, method, timed)

    def take(self) -> dict[str, Any]:
        """Return the figures of the step, and reset them for the next one."""
        generate, rollout = (self.phases.get(phase, 0.0) for phase in ("generate", "rollout"))
        phases = {"generate": generate, "reference and rewards": rollout - generate}
        taken = {"phases": phases, "tokens": self.tokens}
        self.phases, self.tokens = {}, 0
        return taken


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of GRPOConfig; the end token cannot be sampled before a response has all its tokens."""
    rows, samples = settings["rows_per_batch"], settings["samples_per_prompt"]
    return {
        "output_dir": settings["folder"],
        "use_cpu": settings["on_cpu"],
        "bf16": settings["precision"] == "autocast",
        "model_init_kwargs": {"dtype": "bfloat16" if settings["precision"] == "weights" else "float32"},
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": len(settings["prompts"][0]) * samples // rows,
        "num_generations": samples,
        "max_completion_length": settings["response_tokens"],
        "generation_kwargs": {"min_new_tokens": settings["response_tokens"]},
        "temperature": 1.0,
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "beta": settings["kl_coef"],
        "loss_type": "dapo",
        "scale_rewards": "group",
        "num_iterations": 1,
        "max_steps": len(settings["prompts"]),
        "shuffle_dataset": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def main(channel: Connection) -> None:
    try:
        build_trainer(channel.recv(), channel).train()
    except EOFError:
        pass
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def build_trainer(settings: dict[str, Any], channel: Connection) -> Any:
    """Return a GRPOTrainer that reports when it is ready, and answers each message with a step's figures."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(settings["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [text for step in settings["prompts"] for text in step]
    found = tokenizer(text=texts)["input_ids"]
    wanted = [tokens for step in settings["prompt_tokens"] for tokens in step]
    if found != wanted:
        raise ValueError(
            "TRL's tokenizer makes other tokens of the prompts; name a tokenizer that adds none of its own"
        )

    def now() -> float:
        if not settings["on_cpu"]:
            torch.cuda.synchronize()
        return time.perf_counter()

    clock = Clock(now)

    class Turns(TrainerCallback):
        begin = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            channel.send({"torch": torch.__version__})

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            channel.recv()
            clock.take()
            self.begin = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = now() - self.begin
            taken = clock.take()
            taken["phases"]["update"] = seconds - sum(taken["phases"].values())
            channel.send({"seconds": seconds, **taken})

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return digit_share(completions, prompts)

    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=GRPOConfig(**arguments(settings)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )

    def num_tokens(prompts: Sequence[Sequence[int]], result: Sequence[Any]) -> int:
        return sum(map(len, prompts)) + sum(map(len, result[0]))

    clock.around(trainer, "_generate_and_score_completions", "rollout", lambda *_: 0)
    clock.around(trainer, "_generate_single_turn", "generate", num_tokens)
    return trainer


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
