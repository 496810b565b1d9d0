"""Dynamic sampling: prompts whose responses all have the same score, and so no advantage, are dropped for others.

Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from hybridengine.drivers.dataflow import DrawnBatch, draw_round
from hybridengine.drivers.roles import Roles, Sampling, State

MORE_PROMPTS = "more_prompts"
"""Key of the number of prompts drawn beyond one batch for each iteration, in the state of a dataflow."""


def draw_informative(roles: Roles, sampling: Sampling, state: State, max_rounds: int) -> DrawnBatch:
    """Return responses with their scores to `sampling.num_prompts` prompts, of different scores as far as there are any.

    Each of at most `max_rounds` rounds draws as many prompts as are wanted; those without a place in the batch are used
    up as well. After the last round, prompts of equal scores fill the batch.
    """
    from hybridengine.algorithms.group_advantages import has_equal_scores

    wanted, samples = sampling.num_prompts, sampling.samples_per_prompt
    before = int(state.get(MORE_PROMPTS, 0))
    rounds, scored, equal, means = list[DrawnBatch](), [], list[bool](), list[float]()
    while len(rounds) < max_rounds and equal.count(False) < wanted:
        one = draw_round(roles, sampling, before + len(rounds) * wanted, len(rounds))
        scores = roles.reward.compute_scores(one.rollout)
        judged = scores.get("scores", "dropped")
        groups = zip(judged["scores"].split(samples), judged["dropped"].split(samples), strict=True)
        equal += [has_equal_scores(*group) for group in groups]
        means += judged["scores"][~judged["dropped"]].tolist()
        rounds, scored = [*rounds, one], [*scored, scores]
    state[MORE_PROMPTS] = before + (len(rounds) - 1) * wanted
    chosen = sorted(sorted(range(len(equal)), key=equal.__getitem__)[:wanted])
    rows = [prompt * samples + sample for prompt in chosen for sample in range(samples)]
    first, *others = (one.rollout for one in rounds)
    first_scores, *other_scores = scored
    return DrawnBatch(
        first.concat(*others)[rows],
        [report for one in rounds for report in one.to_generate],
        [report for one in rounds for report in one.to_train],
        first_scores.concat(*other_scores)[rows],
        {
            "rollout/rounds": float(len(rounds)),
            "rollout/equal_groups": float(sum(equal)),
            "rollout/drawn_reward_mean": sum(means) / max(1, len(means)),
        },
    )
