"""Text of plans: a table of the best ones, sizes and timeline of the best, and a comparison with the second."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.formatting import aligned, format_bytes, format_seconds
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.search.comparison import Comparison, compare, idle_shares
from hybridengine.planning.search.iteration import Bar
from hybridengine.planning.search.plan import Plan, PoolPlan

BAR_WIDTH = 60
COLUMNS = {work: work.name.lower() for work in (Work.SWITCH, Work.GENERATE, Work.INFER, Work.UPDATE)}
"""Heading of the seconds of each kind of calls."""
LETTERS = {Work.SWITCH: "s", Work.GENERATE: "g", Work.INFER: "i", Work.UPDATE: "U", Work.HOST: "h"}


def plan_lines(plans: Sequence[Plan], num_devices: int) -> list[str]:
    """Return the table of plans, sizes and timeline of the best one, and its comparison with the second."""
    best = plans[0]
    used = sum(pool.num_ranks for pool in best.pools)
    rest = f", on {used} of {num_devices} devices: none with more is faster" if used < num_devices else ""
    lines = ["", *plan_table(plans), "", f"sizes of plan 1{rest}", *role_table(best), "", *timeline(best)]
    if len(plans) > 1:
        lines += ["", *comparison_lines(compare(plans[1], best))]
    return lines


def pool_text(pool: PoolPlan) -> str:
    """Return the models and ranks of a pool as text: "actor+critic on 64"."""
    return f"{'+'.join(option.model for option in pool.options)} on {pool.num_ranks}"


def plan_table(plans: Sequence[Plan]) -> list[str]:
    """Return the lines of a table with the best plan of each placement."""
    rows = [["plan", "step", *COLUMNS.values(), "received", "left", "models on devices"]]
    for number, plan in enumerate(plans, start=1):
        engine = plan.option("actor").engine
        assert engine is not None, "an actor generates"
        works = [sum(bar.seconds for bar in plan.bars if bar.call.work is work) for work in COLUMNS]
        received, left = format_bytes(engine.switch.received_bytes), format_bytes(plan.headroom_bytes)
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
            row = [
                f"  {option.model}",
                str(pool.num_ranks),
                str(option.sizes),
                str(engine.sizes) if engine else "",
            ]
            kv_cache = format_bytes(pool.kv_bytes) if engine else ""
            rows.append([*row, format_seconds(sum(option.least_seconds)), kv_cache])
    return aligned(rows)


def timeline(plan: Plan) -> list[str]:
    """Return the timeline of each pool as a row of letters."""
    shares = idle_shares(plan)
    width = max(len(pool_text(pool)) for pool in plan.pools)
    lines = [
        f"timeline of plan 1, {format_seconds(plan.step_s)}: s switch, g generate, i infer, U update, h neither, . idle"
    ]
    for place, pool in enumerate(plan.pools):
        bars = [bar for bar in plan.bars if bar.pool == place]
        lines.append(f"  {pool_text(pool):<{width}} |{_letters(bars, plan.step_s)}| {shares[place]:.0%} idle")
    return lines


def _letters(bars: Sequence[Bar], step_s: float) -> str:
    found = ["."] * BAR_WIDTH
    for bar in bars:
        first, last = (round(moment / step_s * BAR_WIDTH) for moment in (bar.begin_s, bar.end_s))
        for place in range(first, min(last, BAR_WIDTH)):
            found[place] = LETTERS[bar.call.work]
    return "".join(found)


def comparison_lines(found: Comparison) -> list[str]:
    """Return lines that explain why the second plan is slower, by phases on the longest paths."""
    lines = [f"plan 2 takes {format_seconds(found.seconds)} longer; on its longest path"]
    beside = "beside something longer"
    for one in found.differences:
        word = "more" if one.seconds > 0 else "less"
        ways = f"{one.own or beside}; plan 1: {one.best or beside}"
        lines.append(f"  {format_seconds(abs(one.seconds)):>9} {word} of {one.phase}: {ways}")
    return lines
