"""Price of an exact bound on staleness: tokens that are masked under `token`, and waiting under `response`.

Without a cluster's seconds, time is relative: the unit is a step of an engine whose slots are all in use, the trainer
takes exactly what full engines generate, and new weights arrive at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from hybridengine.config import RunConfig, model_shape
from hybridengine.formatting import table
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.simulation.simulation import Bound, Outcome, Setting, simulate_asynchronous

SHOWN = 8
"""Largest eta in the table of prices."""
NEGLIGIBLE = 0.02
"""Share of masked tokens, or of lost speed, that counts as free."""
MOST_RESPONSES, MOST_STEPS = 10_240, 40
"""Most responses and steps of a simulated run, and MOST_ROWS of a batch: larger batches and pools are scaled down."""
MOST_ROWS = 256
LONE_STEP = 0.5
"""Assumed duration of a step with one response, relative to one with all slots in use."""
ASSUMED_MEAN, ASSUMED_VARIATION = 0.2, 0.8
"""Assumed lengths: a lognormal distribution with this mean, relative to the longest response, and variation."""


@dataclass(frozen=True)
class Price:
    """Cost of one bound, in the second half of simulated runs: the first is slow, whatever the bound."""

    max_staleness: int
    token_speed: float
    """Tokens per second under `token`, masked ones included, relative to a run without a bound."""
    masked_share: float
    """Share of the tokens that `token` masks."""
    response_speed: float
    waiting_share: float
    """Share of the time in which the trainer waits under `response`."""

    @property
    def is_free(self) -> bool:
        """True if neither bound costs more than `NEGLIGIBLE`."""
        slowest = min(self.token_speed, self.response_speed)
        return self.masked_share <= NEGLIGIBLE and slowest >= 1 - NEGLIGIBLE


def bound_prices(setting: Setting, etas: Iterable[int] = range(SHOWN + 1)) -> list[Price]:
    """Return the prices of bounds in runs of `setting`."""
    unbounded = _settled(replace(setting, max_staleness=math.inf, bound="token"))
    found = []
    for eta in etas:
        token, response = (
            _settled(replace(setting, max_staleness=float(eta), bound=bound)) for bound in get_args(Bound)
        )
        speeds = [one.tokens_per_s / unbounded.tokens_per_s for one in (token, response)]
        found.append(Price(eta, speeds[0], token.masked_share, speeds[1], response.train_idle_share))
    return found


def _settled(setting: Setting) -> Outcome:
    """Return the second half of a run as a run of its own, with the queue and the engines' idle time of the whole."""
    whole = simulate_asynchronous(setting)
    half = len(whole.step_ends) // 2
    begin = [0.0, *whole.step_ends][half]
    kept = replace(
        whole, step_ages=whole.step_ages[half:], step_ends=[end - begin for end in whole.step_ends[half:]]
    )
    prompts = setting.batch_size * setting.prompt_tokens * len(kept.step_ends)
    return replace(kept, train_busy_s=setting.train_token_s * (kept.tokens + prompts))


def largest_lag(prices: Sequence[Price]) -> int | None:
    """Return the smallest eta from which on both bounds are free; None if they are not within `prices`."""
    costly = [price.max_staleness for price in prices if not price.is_free]
    lag = max(costly, default=-1) + 1
    return lag if lag <= prices[-1].max_staleness else None


def longest_span(setting: Setting, max_staleness: float) -> float:
    """Return the iterations that pass while engines with all the responses that the gate admits make the longest one.

    Source: PipelineRL, arXiv 2509.19128, appendix A: g_max = H·I·L / (mean·B).
    """
    slots = min(setting.num_engines * setting.max_running, (max_staleness + 1) * setting.batch_size)
    return slots * setting.lengths.max_tokens / (setting.lengths.mean * setting.batch_size)


def late_line(span: float, max_staleness: float, bound: Bound, longest: float | None = None) -> str | None:
    """Return a warning if `token` cannot keep the first tokens of the longest responses, which take `span` iterations.

    At 0, a batch has all responses that are begun, so that no token is older. `longest` is their span if the bound admits
    as many responses as engines have slots, if that is more.
    """
    if bound != "token" or not max_staleness or math.floor(span) <= max_staleness:
        return None
    return (
        f"warning: the longest responses take {span:.1f} iterations, and staleness.max_versions={max_staleness:g} with"
        f" bound=token masks tokens that are older, so that their beginnings are never trained; choose at least"
        f" {math.floor(longest or span)}, or staleness.bound=response, or fewer slots (rollout.max_num_seqs)"
    )


def relative_setting(config: RunConfig) -> Setting:
    """Return the setting of an asynchronous run in relative time, with assumed lengths."""
    longest = config.rollout.max_response_tokens
    lengths = Lengths.of(
        f"lognormal:mean={max(1.0, ASSUMED_MEAN * longest):g},cv={ASSUMED_VARIATION}", longest
    )
    num_engines, running = len(config.engines), _max_running(config, lengths)
    samples, groups = config.rollout.samples_per_prompt, config.data.batch_size
    scale = max(1.0, config.rows_per_step / MOST_ROWS)
    groups = max(1, round(groups / scale))
    slots = max(num_engines, round(num_engines * running * groups / config.data.batch_size))
    num_engines = min(num_engines, max(1, slots // 8))
    running = max(1, round(slots / num_engines))
    return Setting(
        num_steps=min(MOST_STEPS, max(4 * SHOWN // 3, MOST_RESPONSES // (groups * samples))),
        batch_size=groups * samples,
        num_engines=num_engines,
        max_running=running,
        prompt_tokens=0.0,
        lengths=lengths,
        step_s=lambda count, tokens: LONE_STEP + (1 - LONE_STEP) * count / running,
        prefill_s=0.0,
        train_token_s=1 / (num_engines * running),
        update_s=0.0,
        samples_per_prompt=samples,
        seed=config.run.seed,
    )


def _max_running(config: RunConfig, lengths: Lengths) -> int:
    """Return the responses that an engine runs at once, limited by its slots and its KV cache."""
    gen, rollout = config.generation.parallel, config.rollout
    token_bytes = model_shape(config).kv_token_bytes(
        gen.pp_size, gen.pp_size, gen.tp_size, config.model.dtype
    )
    row_bytes = token_bytes * (rollout.max_prompt_tokens + lengths.mean_position)
    return max(1, min(rollout.max_num_seqs, int(rollout.kv_cache_bytes / row_bytes)))


def bound_warning(config: RunConfig) -> str | None:
    """Return a warning if the bound masks the beginnings of the longest responses in `relative_setting`."""
    setting, eta = relative_setting(config), config.staleness.max_versions
    spans = [longest_span(setting, bound) for bound in (eta, math.inf)]
    return late_line(spans[0], eta, config.staleness.bound, spans[1])


def price_lines(config: RunConfig) -> Iterator[str]:
    """Yield the table of prices for an asynchronous run, with the configured bound marked."""
    setting, chosen = relative_setting(config), config.staleness
    prices = bound_prices(setting, sorted({*range(SHOWN + 1), chosen.max_versions}))
    rows = []
    for price in prices:
        is_chosen = price.max_staleness == chosen.max_versions
        rows.append(
            {
                "eta": price.max_staleness,
                "token_share": price.token_speed,
                "masked_share": price.masked_share,
                "response_share": price.response_speed,
                "waiting_share": price.waiting_share,
                "mark": f"configured, {chosen.bound}" if is_chosen else "",
            }
        )
    slots = len(config.engines) * _max_running(config, setting.lengths)
    yield (
        f"price of the bound on staleness ({config.rows_per_step} responses an iteration, {slots} slots; simulated in"
        " relative time: no cluster file is read, the trainer is as fast as full engines, lengths are assumed to be"
        f" {setting.lengths}; `hybridengine simulate` takes seconds and lengths)"
    )
    yield from (f"  {line}" for line in table(rows, COLUMNS))
    if (lag := largest_lag(prices)) is not None:
        yield (
            f"both bounds are free (at most {NEGLIGIBLE:.0%} masked or slower) from staleness.max_versions={lag} on, if"
            " the trainer is as fast as full engines"
        )
    else:
        span = longest_span(setting, math.inf)
        yield f"neither bound is free up to {SHOWN}: the longest responses take {span:.1f} iterations of full engines"
    if warning := bound_warning(config):
        yield warning


COLUMNS = {
    "eta": "max_versions",
    "token_share": "token: speed",
    "masked_share": "masked",
    "response_share": "response: speed",
    "waiting_share": "trainer waits",
    "mark": "",
}
