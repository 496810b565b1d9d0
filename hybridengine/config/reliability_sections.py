"""Sections of a run configuration for limits of waiting, checkpoints, restarts and guards."""

from __future__ import annotations

from hybridengine.config.values import Count, CountOrZero, PathText, Positive, Seconds, Section

COLLECTIVE_SHARE = 2.0
"""Limit of a collective, in limits of a call: ranks that wait for a hung one would else fail first, and be blamed."""


class TimeoutSection(Section):
    """Limits of waiting, in seconds."""

    start_s: Seconds = 600.0
    """Until all workers have started."""
    call_s: Seconds = 1800.0
    """Until every rank has answered one call."""
    save_s: Seconds = 1800.0
    """Until a checkpoint is written, from when the run has to wait for it."""

    @property
    def collective_s(self) -> float:
        """Until a collective gives up by itself: later than its call, whose end names who is missing."""
        return COLLECTIVE_SHARE * self.call_s


class CheckpointSection(Section):
    """Checkpoints, from which a run can be resumed."""

    every: CountOrZero = 10
    """Iterations between two checkpoints; the last iteration is saved too. 0 saves nothing."""
    keep: Count = 2
    """The newest ones stay."""
    best: PathText | None = "eval/score_mean"
    """Metric whose checkpoint with the highest value stays as well; left empty, none does."""


class FaultSection(Section):
    """Restarts after ranks have failed."""

    max_restarts: CountOrZero = 3
    """Times that a run starts its ranks again and resumes from its last checkpoint."""


class GuardSection(Section):
    """Limits that end a run before it trains on nonsense."""

    skipped_steps: CountOrZero = 10
    """Optimizer steps on end whose gradient may not be finite; each is skipped, and counted in ROLE/skipped_steps."""
    log_prob_drift: Positive | None = 0.5
    """Largest distance of the log-probs of engine and trainer, as a mean over the response tokens of a replica; left
    empty, there is no limit. In bfloat16 a few hundredths are usual."""
