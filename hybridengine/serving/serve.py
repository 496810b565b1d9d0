"""A server of the Tinker API on the actor of a run's configuration."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from functools import partial
from pathlib import Path

from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from hybridengine.checkpoints.hf_files import check_weights
from hybridengine.checkpoints.run_lock import run_lock
from hybridengine.config import RunConfig
from hybridengine.config.sections import ServeSection
from hybridengine.controller.call_log import call_log
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.errors import ConfigError, raise_all
from hybridengine.files import writing
from hybridengine.models.checkpoint_files import copy_companions
from hybridengine.serving.call_file import CallFile
from hybridengine.serving.engine_ranks import PARTS, EngineRanks
from hybridengine.serving.http_server import HttpServer
from hybridengine.serving.lease import leased
from hybridengine.serving.rank_groups import RankGroups
from hybridengine.serving.ranks import ModelFacts
from hybridengine.serving.room import Limits, Room
from hybridengine.serving.store import Store
from hybridengine.serving.tinker_app import create_app
from hybridengine.training.dry_run import cost_of, layout_lines
from hybridengine.training.files import keep_config, stop_token_ids, vocabulary_problems, write_tokenizer
from hybridengine.training.run import local_problems

ANSWERING_S = 10.0
"""Seconds for which a server that ends by itself answers why."""


def serve(config: RunConfig) -> None:
    """Start the actor's ranks and serve clients until SIGTERM or SIGINT."""
    console, started = Console(), time.perf_counter()

    def say(text: str) -> None:
        line = f"[{time.perf_counter() - started:6.1f}s] {text}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    section = config.serve
    raise_all(local_problems(config))
    config.run_folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ends:
        ends.enter_context(run_lock(config.run_folder, lambda text: say(f"warning: {text}")))
        shape = check_weights(config.model_folder)
        write_tokenizer(config)
        tokenizer = load_tokenizer(config.tokenizer_folder, pad_with_eos=True)
        raise_all(
            vocabulary_problems(config, tokenizer, f"the model {config.model_folder}", shape.vocab_size)
        )
        end_tokens = stop_token_ids(config.model_folder, tokenizer, shape.vocab_size)
        with writing(config.companions_folder):
            copy_companions(config.model_folder, config.tokenizer_folder, config.companions_folder)
        keep_config(config)
        # Before the ranks start, which takes minutes; calls are refused until the server listens.
        bound = ends.enter_context(_bound(section.host, section.port))
        key = _api_key(section, config.run_folder)
        call_log().observer = _call_file(section.calls_file)
        groups = ends.enter_context(contextlib.closing(RankGroups(config, end_tokens)))
        facts = ModelFacts(
            name=section.model_name or str(config.model_folder),
            tokenizer=str(config.tokenizer_folder),
            vocabulary_size=len(tokenizer),
            context_tokens=config.max_tokens,
            architecture=shape.family,
            max_lora_rank=config.actor.lora.rank,
            lora_parts=tuple({PARTS[module] for module in config.actor.lora.modules}),
        )
        room = Room(
            EngineRanks(groups, facts),
            ends.enter_context(contextlib.closing(_store(section, config.run_folder))),
            config.run_folder / "checkpoints",
            Limits(turn_s=section.wait_s),
            places=config.num_loaded_adapters or 1,
            kept_steps=section.kept_steps,
            newest=section.newest_sampler,
            max_restarts=config.faults.max_restarts,
        )
        ends.enter_context(leased(room.store, room.fail))
        for line in layout_lines(config, cost_of(config)):
            say(line)
        say(f"starting {config.num_ranks} ranks: Megatron-core and vLLM in each process")
        groups.start()
        say(f"serving {facts.name} at http://{section.host}:{section.port}")
        say(
            f"clients: TINKER_BASE_URL=http://{section.host}:{section.port} TINKER_API_KEY={_shown(section, key)}"
        )
        say(
            f"or OPENAI_BASE_URL=http://{section.host}:{section.port}/v1 OPENAI_API_KEY={_shown(section, key)}"
        )
        app = create_app(room, key, tokenizer=tokenizer)
        ending = partial(say, "ending, once the ranks have carried out their present call")
        server = HttpServer(room, app, section.host, section.port, ending)
        room.at_failure = threading.Timer(ANSWERING_S, setattr, (server, "should_exit", True)).start
        if room.failure is None:
            server.run([bound])
        if room.failure is not None:
            raise room.failure


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; raise ConfigError if it cannot be."""
    bound = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except OSError as error:
        if bound is not None:
            bound.close()
        raise ConfigError(
            f"serve.host={host} and serve.port={port} cannot be served at ({error.strerror}); choose another port"
        ) from None


def _store(section: ServeSection, folder: Path) -> Store:
    url = f"sqlite:///{folder.resolve() / 'server.db'}"
    if section.database is not None:
        url = section.database.get_secret_value()
    try:
        return Store(url)
    except (SQLAlchemyError, ImportError) as error:  # the latter for a driver that is not installed
        raise ConfigError(
            f"serve.database cannot be opened ({type(error).__name__}: {str(error).splitlines()[0]}); give an SQLAlchemy"
            " URL such as sqlite:////folder/server.db, and install the package of its driver"
        ) from None


def _call_file(path: str | None) -> CallFile:
    try:
        return CallFile(path)
    except OSError as error:
        raise ConfigError(
            f"serve.calls_file={path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None


def _api_key(section: ServeSection, folder: Path) -> str:
    """Return the configured key, or else a random one that is kept with the run, for clients that wait for a restart."""
    if section.api_key is not None:
        return section.api_key.get_secret_value()
    file = folder / "api_key"
    if not file.exists():
        partial = file.with_name("api_key.partial")
        with writing(file):
            partial.unlink(missing_ok=True)
            partial.touch(mode=0o600)
            partial.write_text(f"tml-{secrets.token_urlsafe(24)}")
            partial.rename(file)
    key = file.read_text()
    if not key.startswith("tml-"):
        raise ConfigError(
            f"{file} has a key of {len(key)} characters that does not begin with tml-, as the Tinker SDK demands; delete"
            " the file for another random key, or set serve.api_key"
        )
    return key


def _shown(section: ServeSection, key: str) -> str:
    """Return the key as it is printed: a random one, which nobody knows yet, in full."""
    return key if section.api_key is None else "..."
