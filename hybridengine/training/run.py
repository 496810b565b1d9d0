"""Training run: files, processes, warm-up, dataflow and console output."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayError
from rich.console import Console

from hybridengine.checkpoints.folders import Checkpoint, checkpoints_in
from hybridengine.checkpoints.making import name_written, settle_checkpoints
from hybridengine.checkpoints.peft_files import PeftFolder
from hybridengine.checkpoints.run_lock import run_lock
from hybridengine.config import RunConfig, model_shape
from hybridengine.config.run_config import ranks_key
from hybridengine.config.sections import WarmupSection
from hybridengine.controller.call_log import call_log
from hybridengine.controller.failures import failure_signature, is_passing, is_unforeseen
from hybridengine.controller.json_logs import json_logs
from hybridengine.controller.metrics import metrics_targets
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.data.responses import ResponseDataset
from hybridengine.doctor.diagnosis import Diagnosis, diagnose
from hybridengine.drivers.dataflow import check_functions
from hybridengine.errors import HybridEngineError, OutputError, WorkerError, raise_all, shown
from hybridengine.formatting import format_bytes
from hybridengine.machine import total_bytes
from hybridengine.planning.budget import HOST_BYTES
from hybridengine.planning.simulation.bound_prices import bound_warning
from hybridengine.redaction import without_secrets
from hybridengine.report.console import summary_table
from hybridengine.report.step_rows import read_rows
from hybridengine.report.trackers import Trackers, missing_trackers
from hybridengine.rollouts.order import read_order
from hybridengine.training.dry_run import cost_of, layout_lines
from hybridengine.training.files import RunFiles, claim_run, keep_config, prepare_files
from hybridengine.training.folder_watch import watched_folder
from hybridengine.training.iterations import iterate
from hybridengine.training.launch import RunPools
from hybridengine.training.output import RunConsole, RunOutput, run_trackers, where_to_look
from hybridengine.training.resuming import (
    as_typed,
    check_final,
    check_models,
    check_responses,
    check_settled,
    checkpoint_of,
    final_folder,
    kept_config,
    note_final,
    resume_command,
    steps_done,
)
from hybridengine.training.saving import Progress, RunSaver, changes_since, load_roles
from hybridengine.training.stopping import StopRequest

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> None:
    """Carry out a run, or the remaining steps of a resumed run, and print or log its progress."""
    stop = StopRequest(saves=bool(config.checkpoint.every))
    console, started = RunConsole(stop), time.perf_counter()
    as_json = config.run.log_format == "json"

    def say(text: str) -> None:
        if as_json:
            logger.info(without_secrets(text))
            return
        line = f"[{time.perf_counter() - started:6.1f}s] {without_secrets(text)}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with json_logs(config.run.name) if as_json else contextlib.nullcontext():
        raise_all([*local_problems(config), *missing_trackers(config.run.trackers)])
        check_functions(config.algorithm)
        with watched_folder(config.run_folder, config.timeouts.save_s, say):
            _train(config, console, say, stop)


def _train(config: RunConfig, console: Console, say: Callable[[str], None], stop: StopRequest) -> None:
    config, is_made_here = claim_run(config)
    say(f"run {as_typed(config.run_folder)}: {config.run.steps} steps of {config.rows_per_step} sequences")
    with contextlib.ExitStack() as ends:
        ends.enter_context(stop.interruptible())
        # Locked first: a command that does not get the lock must not touch the folder.
        ends.enter_context(run_lock(config.run_folder, lambda text: say(f"warning: {text}")))
        with _nothing_left_behind(config, is_made_here), contextlib.ExitStack() as begun:
            kept = kept_config(config)
            check_settled(config, kept)
            if (done := steps_done(config)) >= config.run.steps:
                say(f"all {done} steps are done, and nothing is left to do; raise run.steps for more")
                return
            config, checkpoint = checkpoint_of(config, kept.get("resume"), say)
            check_final(config, checkpoint, say)
            files = prepare_files(config)
            if checkpoint is None and config.actor.lora.path is not None:
                PeftFolder(Path(config.actor.lora.path), model_shape(config))  # refused before ranks start
            if checkpoint is not None:
                check_models(config, checkpoint)
                if config.engines:
                    check_responses(config, checkpoint, files.prompts)
                for change in changes_since(config, checkpoint):
                    say(f"  {change}")
            for line in [*files.data_lines(config), *layout_lines(config, cost_of(config))]:
                say(line)
            if config.generation.replay is not None:
                read_order(Path(config.generation.replay))
            if config.engines and (warning := bound_warning(config)):
                say(f"{warning} (if the trainer is as fast as full engines; --dry-run prints all prices)")
            trackers = begun.enter_context(run_trackers(config))
            pools = RunPools(config)
            ends.push(begun.pop_all())
        run = _Run(config, files, trackers, console, say, stop)
        run.carry_out(pools, checkpoint)
    if stop.asked:
        is_saved = bool(config.checkpoint.every)
        say(
            f"stopped; {resume_command(config) if is_saved else 'nothing is saved, because checkpoint.every=0'}"
        )
        return
    if config.run.log_format != "json":
        console.print(summary_table(read_rows(config.run_folder)))
    say(where_to_look(as_typed(config.run_folder)))


@dataclass
class _Run:
    """Executes a run whose files are prepared."""

    config: RunConfig
    files: RunFiles
    trackers: Trackers
    console: Console
    say: Callable[[str], None]
    stop: StopRequest
    has_started: bool = False
    """True once the ranks are ready and the steps begin."""

    def carry_out(self, pools: RunPools, checkpoint: Checkpoint | None) -> None:
        """Carry out all iterations; after a failure that may pass, resume from the newest checkpoint on new ranks."""
        restarts, last, first = 0, "", checkpoint
        while True:
            progress = Progress.at(checkpoint, self.config.checkpoint.best)
            try:
                with pools:
                    self._attempt(pools, progress, checkpoint)
                return
            except OutputError:
                self._say_what_is_left(progress)
                raise
            except (WorkerError, RayError) as error:
                seen = f"{progress.step} {failure_signature(error)}"
                most = self.config.faults.max_restarts
                failure, is_lasting = self._explained(error, pools)
                in_vain = is_lasting or restarts >= most or seen == last
                if self.stop.heard or not is_passing(error) or in_vain:
                    self._say_what_is_left(progress)
                    if failure is error:
                        raise
                    raise failure from error
                restarts, last = restarts + 1, seen
                self.say(f"failed {self._place(progress)}: {failure}")
                self.say(f"starting the ranks again ({restarts} of at most {most} times)")
            checkpoint = settle_checkpoints(self.config.run_folder, self.say) or first
            self.say(f"resuming after step {checkpoint.step if checkpoint else 0}")
            pools = self._pools_after(failure)

    def _explained(self, error: Exception, pools: RunPools) -> tuple[Exception, bool]:
        """Return an error of ranks on several nodes with what is wrong with these and the links between them, and whether
        that makes it pointless to start the ranks again."""
        nodes = pools.used_nodes
        if self.stop.heard or not is_passing(error) or is_unforeseen(error) or len(nodes) == 1:
            return error, False
        self.say("examining the nodes, and the links between them")
        try:
            found = diagnose(str(self.config.run_folder), nodes)
        except (HybridEngineError, RayError) as reason:  # the error itself is still reported
            found = Diagnosis([f"the nodes could not be examined: {reason}"], False)
        listing = "".join(f"\n  {one}" for one in found.texts)
        return WorkerError(f"{error}\nfound on the nodes:{listing}") if listing else error, found.is_lasting

    def _say_what_is_left(self, progress: Progress) -> None:
        """Print where the run failed and how to resume it."""
        with contextlib.suppress(OSError):
            name_written(self.config.run_folder, self.say)
        found = checkpoints_in(self.config.run_folder)
        resume = f"{resume_command(self.config)} after step {found[0].step}" if found else ""
        left = resume or "nothing has been saved"
        self.say(f"failed {self._place(progress)}; {left}")

    def _place(self, progress: Progress) -> str:
        """Return the step of a failure as text."""
        if progress.step >= self.config.run.steps:
            return "after the last step"
        return f"{'in' if self.has_started else 'while it started, before'} step {progress.step + 1}"

    def _pools_after(self, failure: Exception) -> RunPools:
        """Return new pools with reserved nodes, or raise a WorkerError with both errors."""
        try:
            with contextlib.ExitStack() as begun:
                pools = begun.enter_context(RunPools(self.config))
                if not self._warms_up_base:  # on ranks of its own, before these
                    pools.reserve()
                begun.pop_all()
                return pools
        except (HybridEngineError, RayError, KeyError) as error:  # KeyError: a node has just left
            raise WorkerError(f"{failure}\nthe run could not start again: {error}") from failure

    def _attempt(self, pools: RunPools, progress: Progress, checkpoint: Checkpoint | None) -> None:
        """Start the processes and carry out the run until it ends or fails."""
        config, say, self.has_started = self.config, self.say, False
        if self._warms_up_base:
            self._warm_up_base(config.without_adapters())
        loads = "Megatron-core and vLLM" if config.algorithm.generates else "Megatron-core"
        say(f"starting {config.num_ranks} ranks: {loads} in each process (about a minute on a CPU)")
        pools.start()
        warmed_up = config.start_folder.is_dir()
        start = config.start_folder if warmed_up else config.model_folder
        actor = pools.start_actor(start, self.files.stop_token_ids)
        say(f"actor ready{': one copy of the weights, two layouts' * config.algorithm.generates}")
        if config.warmup is not None and self.files.demonstrations is not None and not warmed_up:
            self._warm_up(actor, config.warmup, self.files.demonstrations)
        actor.start_training()
        engines = pools.start_engines(stop_token_ids=self.files.stop_token_ids)
        roles = pools.start_roles(actor, engines, say)
        if checkpoint is not None:
            load_roles(checkpoint, config, roles)
            say(f"state of step {checkpoint.step} loaded")
        if others := [role for role in config.algorithm.roles if role != "actor"]:
            say(f"{', '.join(others)} ready")
        if engines:
            roles.generation.go_on(
                progress.step, checkpoint.folder if checkpoint and checkpoint.step else None
            )
        call_log().take_records()  # discard those of a failed attempt
        with (
            metrics_targets(config.run_folder),
            RunOutput(config, pools.nodes, self.files.tokenizer, self.console, self.trackers) as output,
        ):
            saver = RunSaver(config, roles, progress, say)
            keep_config(config)
            self.has_started = True
            with self.stop.listening():
                iterate(config, pools, roles, self.files, output, progress, saver, self.stop)
                if self.stop.asked and config.checkpoint.every and saver.saved_step < progress.step:
                    raise OutputError(f"step {progress.step}, after which the run ends, could not be saved")
                if not self.stop.asked:
                    final = final_folder(config)
                    with self.stop.too_late():
                        actor.export_model(str(final), str(config.companions_folder)).wait()
                        note_final(config, progress.step)
                    say(f"trained model saved: {as_typed(final)}")

    @property
    def _warms_up_base(self) -> bool:
        """True if all weights are still to be trained on demonstrations before adapters begin."""
        config = self.config
        begins = config.actor.lora.rank > 0 and not config.start_folder.is_dir()
        return begins and config.warmup is not None and self.files.demonstrations is not None

    def _warm_up_base(self, config: RunConfig) -> None:
        """Train all weights on demonstrations, on ranks of their own: adapters are trained afterwards, on top of them."""
        assert config.warmup is not None and self.files.demonstrations is not None, "asked before"
        self.say(f"starting {config.num_ranks} ranks: all weights are warmed up before the adapters begin")
        with RunPools(config) as pools:
            pools.start()
            actor = pools.start_actor(config.model_folder, self.files.stop_token_ids)
            self._warm_up(actor, config.warmup, self.files.demonstrations)

    def _warm_up(self, actor: WorkerGroup, settings: WarmupSection, demonstrations: ResponseDataset) -> None:
        """Train the actor on demonstrations, and save it."""
        actor.start_supervised(settings.lr, settings.steps)
        every = max(1, settings.steps // 10)
        for step in range(1, settings.steps + 1):
            update = actor.warm_up(demonstrations.batch(step - 1, settings.batch_size))
            loss = update.get()[0]["actor/sft_loss"]
            if step % every == 0 or step == settings.steps:
                self.say(f"warm-up {step}/{settings.steps}: loss {loss:.3f}")
        config = self.config
        actor.export_model(str(config.start_folder), str(config.companions_folder)).wait()
        self.say(f"warmed-up model saved: {as_typed(config.start_folder)}")


def local_problems(config: RunConfig) -> list[str]:
    """Return the reasons why the run does not fit on this machine; none if it joins a cluster."""
    if config.cluster.address is not None or os.environ.get("RAY_ADDRESS"):
        return []
    problems = [
        f"{ranks_key(name)}={shown(pool.ranks_per_node)} needs {len(pool.ranks_per_node)} nodes, and this machine is one;"
        " give one number, or join a cluster with cluster.address"
        for name, pool in config.pools.items()
        if len(pool.ranks_per_node) > 1
    ]
    if problems:
        return problems
    memory = total_bytes()
    room = max(1, memory // HOST_BYTES)
    if config.num_ranks > room:
        return [
            f"the {config.num_ranks} ranks of the run are more than this machine has room for: {room} ranks, at"
            f" {format_bytes(HOST_BYTES)} of its {format_bytes(memory)} for each rank's process; choose fewer ranks and"
            " smaller sizes, or join a cluster with cluster.address"
        ]
    return []


@contextlib.contextmanager
def _nothing_left_behind(config: RunConfig, is_made_here: bool) -> Iterator[None]:
    """Remove the folder of a run that fails before it starts, unless it already existed, and an empty run.folder."""
    try:
        yield
    except HybridEngineError:
        if is_made_here:
            shutil.rmtree(config.run_folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                config.run_folder.parent.rmdir()
        raise
