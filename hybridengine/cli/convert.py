"""`hybridengine convert`: convert between checkpoints of Hugging Face and of runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hybridengine.cli.options import DTYPES, byte_size
from hybridengine.config.run_config import TRAINED
from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.files import writing
from hybridengine.formatting import format_bytes

VALUE_ROLES = tuple(role for role in TRAINED if role != "actor")
"""Roles whose model has a score head in place of the language model head."""
DESCRIPTION = """Convert a checkpoint of a run to a Hugging Face checkpoint, or the other way round.

SOURCE says which: a folder with manifest.json (runs/NAME/checkpoints/step-00000020) becomes safetensors with an index,
beside the configuration, tokenizer and model card that the run began with; a folder with config.json becomes a
checkpoint that `hybridengine train CONFIG resume=DESTINATION` begins from, with any sizes. Tensors are read and written
one at a time."""
EPILOG = """examples:
  hybridengine convert runs/arithmetic/checkpoints/step-00000020 exported
  hybridengine convert runs/ppo/checkpoints/step-00000020 exported-critic --role critic
  hybridengine convert models/Qwen2.5-7B start --dtype bfloat16"""


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("source", metavar="SOURCE", type=Path, help="checkpoint of a run, or of Hugging Face")
    option("destination", metavar="DESTINATION", type=Path, help="folder to write; must not exist")
    option("--role", choices=TRAINED, default="actor", help="whose weights (default actor)")
    option("--dtype", choices=DTYPES, help="of the weights (default: that of SOURCE)")
    option("--max-file", type=byte_size, metavar="BYTES", help="size of a safetensors file (default 4GiB)")
    option("--companions", type=Path, metavar="FOLDER", help="where config.json and the tokenizer are")


def run(options: argparse.Namespace) -> int:
    source, out = options.source, options.destination
    if os.path.lexists(out):  # includes broken links
        raise ConfigError(f"DESTINATION {out} exists; name a folder that does not, so that nothing is lost")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"DESTINATION {out}: there is no folder {out.resolve().parent}; make it first")
    try:
        out.mkdir()
        out.rmdir()
    except OSError as error:
        raise ConfigError(
            f"DESTINATION {out} cannot be made ({error.strerror}); name a folder that can be"
        ) from None
    from hybridengine.checkpoints.folders import MANIFEST

    if (source / MANIFEST).is_file():
        return _export(options)
    if (source / "config.json").is_file():
        return _import(options)
    raise ConfigError(
        f"SOURCE {source} has neither {MANIFEST} nor config.json; name a checkpoint of a run, such as"
        " runs/NAME/checkpoints/step-00000020, or a Hugging Face checkpoint folder"
    )


def _export(options: argparse.Namespace) -> int:
    from hybridengine.checkpoints.conversion import default_companions, export_role, role_folder
    from hybridengine.checkpoints.folders import checkpoint_at
    from hybridengine.models.checkpoint_files import ADAPTER_CONFIG

    checkpoint = checkpoint_at(options.source)
    try:
        checkpoint.check()
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be used: {error}; name another one") from None
    role_folder(checkpoint, options.role)
    companions = options.companions or default_companions(checkpoint)
    if companions is None or not (companions / "config.json").is_file():
        given = f"--companions {options.companions}"
        where = given if options.companions else "the folder that the run began with"
        raise ConfigError(
            f"{where} has no config.json; give --companions with the model's configuration and tokenizer"
        )
    with _writing(options.destination, f"{options.role} of step {checkpoint.step}") as progress:
        export_role(
            checkpoint,
            options.role,
            options.destination,
            dtype=options.dtype,
            max_file_bytes=options.max_file or 4 * 2**30,
            companions=companions,
            progress=progress,
        )
    is_peft = (options.destination / ADAPTER_CONFIG).is_file()
    kind = "PEFT folder" if is_peft else f"Hugging Face checkpoint, companions from {companions}"
    _tell(options.destination, kind)
    return 0


def _import(options: argparse.Namespace) -> int:
    if options.max_file or options.companions:
        raise ConfigError(
            f"--max-file and --companions are for checkpoints of runs, and SOURCE {options.source} is a Hugging Face"
            " checkpoint; leave them out"
        )
    from hybridengine.checkpoints.conversion import import_model
    from hybridengine.models.checkpoint_files import check_checkpoint, tensors_of

    shape = check_checkpoint(options.source)
    if bool(shape.num_labels) != (options.role in VALUE_ROLES):
        has, needs = ("a score head", "none") if shape.num_labels else ("no score head", "one")
        raise ConfigError(
            f"SOURCE {options.source} has {has}, and --role {options.role} needs {needs}; name the role that the model"
            f" is for ({', '.join(VALUE_ROLES)}: a score head; actor: no score head)"
        )
    stored = {tensor.dtype for tensor in tensors_of(options.source).values()}
    dtype = options.dtype or ("float32" if stored == {"F32"} else "bfloat16")
    with _writing(options.destination, "weights") as progress:
        import_model(options.source, options.destination, dtype=dtype, role=options.role, progress=progress)
    _tell(
        options.destination, f"checkpoint in {dtype}; begin a run from it with resume={options.destination}"
    )
    return 0


@contextmanager
def _writing(folder: Path, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the bytes written so far and in total; disk errors name the folder."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar, writing(folder):
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _tell(folder: Path, what: str) -> None:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"written: {folder} ({format_bytes(size)}), a {what}")
