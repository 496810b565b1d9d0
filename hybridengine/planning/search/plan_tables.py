"""Text of plans: a table of the best ones, sizes and timeline of the best, and a comparison with the second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridengine.formatting import aligned, format_bytes, format_seconds
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.search.plan import Bar, Plan, PoolPlan, idle_shares, phases

BAR_WIDTH = 60
COLUMNS = {work: work.name.lower() for work in (Work.SWITCH, Work.GENERATE, Work.INFER, Work.UPDATE)}
"""Heading of the seconds of each kind of calls."""
SHOWN_SHARE = 0.005
"""Share of the step below which differences of phases are omitted."""
LETTERS = {Work.SWITCH: "s", Work.GENERATE: "g", Work.INFER: "i", Work.UPDATE: "U", Work.HOST: "h"}


def plan_lines(plans: Sequence[Plan], num_devices: int) -> list[str]:
    """Return the table of plans, sizes and timeline of the best one, and its comparison with the second."""
    best = plans[0]
    used = sum(pool.num_ranks for pool in best.pools)
    rest = f", on {used} of {num_devices} devices: none with more is faster" if used < num_devices else ""
    lines = ["", *plan_table(plans), "", f"sizes of plan 1{rest}", *role_table(best), "", *timeline(best)]
    if len(plans) > 1:
        lines += ["", *comparison_lines(plans[1], best)]
    return lines


def pool_text(pool: PoolPlan) -> str:
    """Return the models and ranks of a pool as text: "actor+critic on 64"."""
    return f"{'+'.join(option.model for option in pool.options)} on {pool.num_ranks}"


def plan_table(plans: Sequence[Plan]) -> list[str]:
    """Return the lines of a table with the best plan of each placement."""
    rows = [["plan", "step", *COLUMNS.values(), "received", "left", "models on devices"]]
    for number, plan in enumerate(plans, start=1):
        engine = plan.option("actor").engine
        works = [sum(bar.seconds for bar in plan.bars if bar.call.work is work) for work in COLUMNS]
        received = format_bytes(engine.switch.received_bytes) if engine else "-"
        left = format_bytes(plan.headroom_bytes)
        pools = ", ".join(map(pool_text, plan.pools))
        rows.append([str(number), *map(format_seconds, [plan.step_s, *works]), received, left, pools])
    return [
        *aligned(rows),
        "(seconds of each kind are sums of calls, which overlap where pools work at the same time; received: by a rank in"
        " the switch to generation; left: memory of the fullest device, beside the"
        " process_bytes of the cluster file; KV caches take what they can use)",
    ]


def role_table(plan: Plan) -> list[str]:
    """Return the lines of a table with every model's sizes."""
    rows = [["model", "devices", "p-t-d", "p_g-t_g", "its calls", "KV cache"]]
    for pool in plan.pools:
        for option in pool.options:
            engine = option.engine
            sizes = [str(pool.num_ranks), str(option.sizes), str(engine.sizes) if engine else ""]
            kv_cache = format_bytes(pool.kv_bytes) if engine else ""
            rows.append([f"  {option.model}", *sizes, format_seconds(sum(option.least_seconds)), kv_cache])
    return aligned(rows)


def timeline(plan: Plan) -> list[str]:
    """Return the timeline of each pool as a row of letters."""
    shares = idle_shares(plan)
    width = max(len(pool_text(pool)) for pool in plan.pools)
    lines = [
        f"timeline of plan 1, {format_seconds(plan.step_s)}: s switch, g generate, i infer, U update, h neither, . idle"
    ]
    for place, pool in enumerate(plan.pools):
        letters = ["."] * BAR_WIDTH
        for bar in (bar for bar in plan.bars if bar.pool == place):
            first, last = (round(moment / plan.step_s * BAR_WIDTH) for moment in (bar.begin_s, bar.end_s))
            letters[first:last] = LETTERS[bar.call.work] * (last - first)
        lines.append(f"  {pool_text(pool):<{width}} |{''.join(letters)}| {shares[place]:.0%} idle")
    return lines


def longest_path(bars: Sequence[Bar]) -> list[Bar]:
    """Return the calls on the longest path of the iteration, in order: each begins when the previous one ends."""
    path = [max(bars, key=lambda bar: bar.end_s)]
    while path[-1].begin_s > 0:
        last = path[-1]
        ended = [bar for bar in bars[: bars.index(last)] if bar.end_s == last.begin_s]
        reads = [bars[place] for place in last.call.reads]
        path.append(
            next((bar for bar in reversed(ended) if bar.pool == last.pool or bar in reads), ended[-1])
        )
    return path[::-1]


def comparison_lines(other: Plan, best: Plan) -> Iterator[str]:
    """Yield lines that explain why `other` is slower, by phases on the longest paths, the largest difference first."""
    yield f"plan 2 takes {format_seconds(other.step_s - best.step_s)} longer; on its longest path"
    own, there = (phases(longest_path(plan.bars)) for plan in (other, best))
    seconds = {phase: own.get(phase, 0.0) - there.get(phase, 0.0) for phase in own | there}
    for phase in sorted(seconds, key=lambda phase: -abs(seconds[phase])):
        if abs(seconds[phase]) >= SHOWN_SHARE * best.step_s:
            word = "more" if seconds[phase] > 0 else "less"
            ways = [
                _sizes(plan, phase) if phase in path else "beside something longer"
                for plan, path in ((other, own), (best, there))
            ]
            yield f"  {format_seconds(abs(seconds[phase])):>9} {word} of {phase}: {ways[0]}; plan 1: {ways[1]}"


def _sizes(plan: Plan, phase: str) -> str:
    """Return the sizes and ranks of the first model that works in a phase: "1-8-8 on 64"."""
    role = next(bar.call.role for bar in plan.bars if bar.call.phase == phase)
    for pool in plan.pools:
        for option in pool.options:
            if option.model == role:
                sizes = option.engine.sizes if phase == "generate" and option.engine else option.sizes
                return f"{sizes} on {pool.num_ranks}"
    return "no model"
