"""Plans as text: a table of the best ones, the sizes and the timeline of the best, and why the next one lost."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.cli.figure_tables import aligned
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.planning.comparison import Comparison, compare, idle_shares
from hybridengine.planning.dataflows import Work
from hybridengine.planning.iteration import Bar
from hybridengine.planning.plan import Plan, PoolPlan

BAR_WIDTH = 60
COLUMNS: dict[str, tuple[Work, ...]] = {
    "switch": (Work.SWITCH,),
    "generate": (Work.GENERATE,),
    "infer": (Work.INFER,),
    "update": (Work.UPDATE,),
}
LETTERS = {Work.SWITCH: "s", Work.GENERATE: "g", Work.INFER: "i", Work.UPDATE: "U", Work.HOST: "h"}


def plan_lines(plans: Sequence[Plan], num_devices: int) -> list[str]:
    """Everything that a person wants to see of plans on so many devices, best first."""
    best = plans[0]
    used = sum(pool.num_ranks for pool in best.pools)
    rest = (
        f", on {used} of {num_devices} devices: none with more that was tried is faster"
        if used < num_devices
        else ""
    )
    lines = ["", *plan_table(plans), "", f"sizes of plan 1{rest}", *role_table(best), "", *timeline(best)]
    if len(plans) > 1:
        lines += ["", *comparison_lines(compare(plans[1], best))]
    return lines


def pool_text(pool: PoolPlan) -> str:
    """Models and ranks of a pool: "actor+critic on 64"."""
    return f"{'+'.join(option.model for option in pool.options)} on {pool.num_ranks}"


def work_seconds(plan: Plan, works: tuple[Work, ...]) -> float:
    """Seconds of all calls of some kinds, whether they overlap or not."""
    return sum(bar.seconds for bar in plan.bars if bar.call.work in works)


def plan_table(plans: Sequence[Plan]) -> list[str]:
    """The best plan of each placement."""
    rows = [["plan", "step", *COLUMNS, "received", "left", "models on devices"]]
    for number, plan in enumerate(plans, start=1):
        engine = plan.option("actor").engine
        assert engine is not None, "an actor generates"
        rows.append(
            [
                str(number),
                format_seconds(plan.step_s),
                *(format_seconds(work_seconds(plan, works)) for works in COLUMNS.values()),
                format_bytes(engine.switch.received_bytes),
                format_bytes(plan.headroom_bytes),
                ", ".join(map(pool_text, plan.pools)),
            ]
        )
    return [
        *aligned(rows),
        "(seconds of each kind are sums of calls, which overlap where pools work at the same time; received: by a rank in"
        " the switch to generation; left: memory of the fullest device, beside the"
        " process_bytes of the cluster file; KV caches take what they can use)",
    ]


def role_table(plan: Plan) -> list[str]:
    """Sizes of every model of a plan."""
    rows = [["model", "devices", "p-t-d", "p_g-t_g", "its calls", "KV cache"]]
    for pool in plan.pools:
        for option in pool.options:
            engine = option.engine
            rows.append(
                [
                    f"  {option.model}",
                    str(pool.num_ranks),
                    str(option.sizes),
                    str(engine.sizes) if engine else "",
                    format_seconds(sum(option.least_seconds)),
                    format_bytes(pool.kv_bytes) if engine else "",
                ]
            )
    return aligned(rows)


def timeline(plan: Plan) -> list[str]:
    """What each pool does when, as a row of letters."""
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
    """Why the runner-up is slower."""
    lines = [f"plan 2 takes {format_seconds(found.seconds)} longer; on its longest path"]
    for one in found.differences:
        word = "more" if one.seconds > 0 else "less"
        text = f"  {format_seconds(abs(one.seconds)):>9} {word} of {one.phase}"
        if one.own and one.best:
            text += f": {one.own}, plan 1 has {one.best}" if one.own != one.best else ""
        elif one.own:
            text += f": {one.own}, which plan 1 does beside something longer"
        else:
            text += f": beside something longer, plan 1 waits for it ({one.best})"
        lines.append(text)
    return lines
