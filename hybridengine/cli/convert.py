"""`hybridengine convert`: between Hugging Face checkpoints and those of runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hybridengine.cli.options import once
from hybridengine.config.run_config import TRAINED
from hybridengine.config.values import parse_bytes
from hybridengine.errors import ConfigError
from hybridengine.metrics.formatting import format_bytes
from hybridengine.writing import writing

DTYPES = ("float32", "bfloat16")
VALUE_ROLES = tuple(role for role in TRAINED if role != "actor")
"""Those with a score head in place of the language model's."""
EXPORT_OPTIONS = {"max_file": "--max-file", "companions": "--companions"}
DESCRIPTION = """Convert a checkpoint of a run to a Hugging Face checkpoint, or the other way round.

SOURCE says which: a folder with manifest.json (runs/NAME/checkpoints/step-00000020) becomes safetensors with an index,
beside the configuration, tokenizer and model card that the run began with; a folder with config.json becomes a
checkpoint that `hybridengine train CONFIG resume=DESTINATION` begins from, with any sizes. Tensors are read and written
one at a time."""
EPILOG = """examples:
  hybridengine convert runs/arithmetic/checkpoints/step-00000020 exported
  hybridengine convert runs/ppo/checkpoints/step-00000020 exported-critic --role critic
  hybridengine convert models/Qwen2.5-7B start --dtype bfloat16"""


def add_convert_command(subparsers: Any) -> None:
    """Add `convert` to the commands of `hybridengine`."""
    parser = subparsers.add_parser(
        "convert",
        help="turn a run's checkpoint into Hugging Face safetensors, or the other way round",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="checkpoint of a run, or of Hugging Face")
    parser.add_argument(
        "destination", metavar="DESTINATION", type=Path, help="folder to write; must not exist"
    )
    option = once(parser)
    option(
        "--role", default="actor", metavar="ROLE", help=f"whose weights: {', '.join(TRAINED)} (default actor)"
    )
    option("--dtype", metavar="TYPE", help=f"of the weights: {' or '.join(DTYPES)} (default: that of SOURCE)")
    option("--max-file", default="4GiB", metavar="BYTES", help="size of a safetensors file (default 4GiB)")
    option("--companions", type=Path, metavar="FOLDER", help="where config.json and the tokenizer are")
    parser.set_defaults(run=run_convert)


def run_convert(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    source, out = options.source, options.destination
    if os.path.lexists(out):  # also a link to nothing
        raise ConfigError(f"DESTINATION {out} exists; name a folder that does not, so that nothing is lost")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"DESTINATION {out}: there is no folder {out.resolve().parent}; make it first")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r} does not exist; choose from {', '.join(DTYPES)}")
    if options.role not in TRAINED:
        raise ConfigError(
            f"--role {options.role!r} is none that is trained; choose from {', '.join(TRAINED)}"
        )
    most = parse_bytes("--max-file", options.max_file)
    from hybridengine.checkpoints.folders import MANIFEST

    if (source / MANIFEST).is_file():
        return _export(options, most)
    if (source / "config.json").is_file():
        return _import(options)
    raise ConfigError(
        f"SOURCE {source} has neither {MANIFEST} nor config.json; name a checkpoint of a run, such as"
        " runs/NAME/checkpoints/step-00000020, or a Hugging Face checkpoint folder"
    )


def _export(options: argparse.Namespace, most: int) -> int:
    from hybridengine.checkpoints.conversion import default_companions, export_role
    from hybridengine.checkpoints.folders import checkpoint_at

    checkpoint = checkpoint_at(options.source)
    checkpoint.check()
    companions = options.companions or default_companions(checkpoint)
    if companions is None or not (companions / "config.json").is_file():
        where = (
            f"--companions {options.companions}"
            if options.companions
            else "the folder that the run began with"
        )
        raise ConfigError(
            f"{where} has no config.json; give --companions with the model's configuration and tokenizer"
        )
    with _bar() as bar, writing(options.destination):
        task = bar.add_task(f"{options.role} of step {checkpoint.step}", total=None)
        export_role(
            checkpoint,
            options.role,
            options.destination,
            dtype=options.dtype,
            max_file_bytes=most,
            companions=companions,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _tell(options.destination, f"Hugging Face checkpoint, companions from {companions}")
    return 0


def _import(options: argparse.Namespace) -> int:
    given = vars(options).get("given_options", set())
    for name, option in EXPORT_OPTIONS.items():
        if name in given:
            raise ConfigError(
                f"{option} is for checkpoints of runs, and SOURCE {options.source} is a Hugging Face checkpoint; leave it"
                " out"
            )
    from hybridengine.checkpoint_files import check_checkpoint, tensors_of
    from hybridengine.checkpoints.conversion import import_model

    shape = check_checkpoint(options.source)
    if bool(shape.num_labels) != (options.role in VALUE_ROLES):
        has, needs = ("a score head", "none") if shape.num_labels else ("none", "one")
        raise ConfigError(
            f"SOURCE {options.source} has {has}, and --role {options.role} needs {needs}: name the role that the model"
            f" is for ({', '.join(VALUE_ROLES)}: a score head; actor: none)"
        )
    stored = {tensor.dtype for tensor in tensors_of(options.source).values()}
    dtype = options.dtype or ("float32" if stored == {"F32"} else "bfloat16")
    with _bar() as bar, writing(options.destination):
        task = bar.add_task("weights", total=None)
        import_model(
            options.source,
            options.destination,
            dtype=dtype,
            role=options.role,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _tell(
        options.destination, f"checkpoint in {dtype}; begin a run from it with resume={options.destination}"
    )
    return 0


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _tell(folder: Path, what: str) -> None:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"written: {folder} ({format_bytes(size)}), a {what}")
