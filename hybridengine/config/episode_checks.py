"""Rules of responses of several turns, and of rewards that their functions return."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.config.algorithm import Conflict, ServedAlgorithm
from hybridengine.config.environment_section import EPISODE_FUNCTION
from hybridengine.config.episode_section import TAKEN_METRICS
from hybridengine.config.reward_sections import scorer_key
from hybridengine.config.run_config import RunConfig, reward_sections


def episode_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the violated rules of `rollout.episode`."""
    rewards = [
        scorer_key(name, term)
        for name, section in reward_sections(config).items()
        for term in section.episodes
    ]
    if config.rollout.episode is None:
        for key in rewards:
            yield Conflict(
                f"{key}.kind=episode is the reward that rollout.episode.function returns, and the run has no"
                f" rollout.episode; add it, or choose {key}.kind=function",
                (f"{key}.kind", "rollout.episode"),
            )
        return
    yield from _environment_conflicts(config, rewards)
    for name in config.rollout.episode.metrics:
        if name in TAKEN_METRICS:
            yield Conflict(
                f"rollout.episode.metrics has {name}, and episode/{name} is a column of every episode; give the metric"
                " another name",
                ("rollout.episode.metrics",),
            )
    if config.generation.replay is not None:
        yield Conflict(
            f"generation.replay={config.generation.replay} repeats a run bit by bit, and what functions of"
            " rollout.episode do between turns takes time that differs; leave one of them out",
            ("generation.replay", "rollout.episode"),
        )
    elif isinstance(config.algorithm, ServedAlgorithm):
        yield Conflict(
            "rollout.episode is not read by a server, whose clients draw turn by turn; leave it out",
            ("rollout.episode",),
        )


def _environment_conflicts(config: RunConfig, rewards: list[str]) -> Iterator[Conflict]:
    """Yield the violated rules of environments, and of where functions run."""
    episode, environment = config.rollout.episode, config.data.environment
    assert episode is not None, "called for runs with episodes"
    if environment is None and episode.function in (None, EPISODE_FUNCTION):
        yield Conflict(
            "rollout.episode.function is missing, and there is no data.environment that has one; name a function, or an"
            " environment",
            ("rollout.episode.function", "data.environment"),
        )
    elif environment is not None and episode.function != EPISODE_FUNCTION:
        yield Conflict(
            f"rollout.episode.function={episode.function} is not called, since"
            f" data.environment.name={environment.name} has its own; leave one of them out",
            ("rollout.episode.function", "data.environment"),
        )
    if environment is not None and not rewards:
        yield Conflict(
            f"data.environment.name={environment.name} gives the reward of its rows, which nothing reads; add"
            " reward.kind=episode, or a term of this kind",
            ("reward.kind", "data.environment"),
        )
    if episode.addresses and episode.key_file is None:
        yield Conflict(
            f"rollout.episode.addresses={', '.join(episode.addresses)} needs the key of these hosts; name its file in"
            " rollout.episode.key_file",
            ("rollout.episode.addresses", "rollout.episode.key_file"),
        )
    if episode.addresses and episode.python is not None:
        yield Conflict(
            f"rollout.episode.python={episode.python} is not used, since rollout.episode.addresses names other hosts;"
            " start `hybridengine episodes serve` there with this key",
            ("rollout.episode.addresses", "rollout.episode.python"),
        )
