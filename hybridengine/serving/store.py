"""Sessions, models, samplers, requests and checkpoints of a server, in a database that a restart reads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import sqlalchemy
from sqlalchemy import JSON, BigInteger, ForeignKey, LargeBinary, UniqueConstraint, event, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from sqlalchemy.orm import Session as Transaction

from hybridengine.errors import ConfigError, RequestError
from hybridengine.serving.tinker_wire import same_body

QUEUED, DONE, FAILED = "queued", "done", "failed"
WAITING, LIVE, POISONED, ENDED = "waiting", "live", "poisoned", "ended"
CHANGES = ("create_model", "forward_backward", "optim_step", "load_weights")
"""Kinds of requests that change weights, gradients or optimizer, and so are carried out again after a restart."""
STEPS = ("optim_step", "load_weights")
"""Those after which a model's weights are others."""
NEW_WEIGHTS = ("create_model", *STEPS)
"""Those that change the weights on the ranks."""
KEPT = "kept"
"""Kind of a checkpoint that the server has made for samplers of a step that is over."""


class Base(DeclarativeBase):
    type_annotation_map: ClassVar = {
        dict[str, Any]: JSON,
        bytes: LargeBinary,
        int: BigInteger,  # copies of a sampler number their requests from n * 10**9, n up to 10**9
    }


class ClientSession(Base):
    """A client's session; it is over when it has ended or its heartbeats have stopped."""

    __tablename__ = "sessions"
    id: Mapped[str] = mapped_column(primary_key=True)
    client: Mapped[dict[str, Any]]
    """What the client says about itself: tags, metadata, SDK version."""
    created_s: Mapped[float] = mapped_column(default=time.time)
    heartbeat_s: Mapped[float] = mapped_column(default=time.time)
    ended: Mapped[bool] = mapped_column(default=False)


class Model(Base):
    """A model in training, or one that waits for the ranks."""

    __tablename__ = "models"
    id: Mapped[str] = mapped_column(primary_key=True)
    """`{session}:train:{model_seq_id}`, as clients expect it."""
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    model_seq_id: Mapped[int]
    base_model: Mapped[str]
    seq_id: Mapped[int] = mapped_column(default=-1)
    """Last request that was carried out; 0 creates the model."""
    step: Mapped[int] = mapped_column(default=0)
    """Number of times that the weights have changed: optimizer steps and loads."""
    lora_rank: Mapped[int] = mapped_column(default=0)
    """Rank of its adapters; 0 if all weights are trained."""
    gradients: Mapped[bool] = mapped_column(default=False)
    """True if gradients wait for their optimizer step."""
    state: Mapped[str] = mapped_column(default=LIVE)
    reason: Mapped[str | None]
    """Why the model is no longer live."""
    created_s: Mapped[float] = mapped_column(default=time.time)

    @property
    def gone(self) -> str:
        """Return the error message for clients of a model that is no longer live."""
        held = "did not get the ranks" if self.seq_id < 0 else "no longer holds the ranks"
        word = "was stopped" if self.state == POISONED else held
        return f"model {self.id} {word}: {self.reason}; create another training client, from a checkpoint if there is one"


class Sampler(Base):
    """A sampling session: which weights its requests want."""

    __tablename__ = "samplers"
    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    base_model: Mapped[str]
    model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id"))
    """Model whose weights are meant; None for the base model."""
    step: Mapped[int | None]
    """Step of the model whose weights are meant; None for its newest."""
    checkpoint: Mapped[str | None]
    """Path of the checkpoint whose weights are meant, for clients."""
    folder: Mapped[str | None]
    """Folder of that checkpoint: its path may get another one. With no checkpoint, that of the kept weights."""


class Request(Base):
    """A request that is carried out by the ranks; its id is `{owner}:{seq_id}`, so that a retry finds it.

    A prompt without a session has an id of its own, so that none is taken for a retry of another.
    """

    __tablename__ = "requests"
    __table_args__ = (UniqueConstraint("owner", "seq_id"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    """Id of a model or of a sampler; of a prompt without a session, its own."""
    seq_id: Mapped[int]
    kind: Mapped[str]
    body: Mapped[bytes]
    state: Mapped[str] = mapped_column(default=QUEUED, index=True)
    result: Mapped[bytes | None]
    """None too once the result of a request that is done has been removed."""
    error: Mapped[str | None]
    category: Mapped[str | None]
    """Whose error it is: "user" or "server"."""
    created_s: Mapped[float] = mapped_column(default=time.time)
    done_s: Mapped[float | None]
    folder: Mapped[str | None]
    """Folder of the checkpoint that `load_weights` has loaded, for a restart: its path may get another one."""


class Checkpoint(Base):
    """Saved weights, of the kind "training" (with optimizer), "sampler" or `KEPT`, which clients do not see."""

    __tablename__ = "checkpoints"
    folder: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(index=True)
    """`tinker://{model}/weights/{name}` or `tinker://{model}/sampler_weights/{name}`."""
    gone: Mapped[bool] = mapped_column(default=False)
    """True once it is deleted, replaced or expired: clients no longer see it, but a restart may need its folder."""
    kind: Mapped[str]
    model_id: Mapped[str] = mapped_column(ForeignKey("models.id"), index=True)
    base_model: Mapped[str]
    lora_rank: Mapped[int] = mapped_column(default=0)
    seq_id: Mapped[int]
    """Request of the model that made it."""
    step: Mapped[int]
    resumable: Mapped[bool]
    """True if no gradients waited for their step, so that the model can be resumed from here."""
    created_s: Mapped[float] = mapped_column(default=time.time)
    expires_s: Mapped[float | None]


class Lease(Base):
    """Which server uses the database (`lease.py`); at most one row."""

    KEY: ClassVar = "server"
    __tablename__ = "leases"
    key: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    """Random id of the server."""
    host: Mapped[str]
    pid: Mapped[int]
    renewed_s: Mapped[float]


@dataclass(frozen=True)
class Replay:
    """How a restart restores a model."""

    checkpoint: Checkpoint | None
    """Where to begin; None for the base model."""
    again: Sequence[Request]
    """Requests that were done after it and change the model, in their order; their results are there."""


Row = TypeVar("Row", bound=Base)


class Store:
    """The database at an SQLAlchemy URL, such as `sqlite:///server.db`; rows that it returns are detached.

    Guarantees: one thread writes at a time; what `transaction` has written survives a crash of the process.
    Raises: ConfigError for a database of another version, whose tables lack columns.
    """

    def __init__(self, url: str) -> None:
        self._engine = sqlalchemy.create_engine(url)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _configure_sqlite)
        self._check_columns()
        Base.metadata.create_all(self._engine)
        self._transactions = sessionmaker(self._engine, expire_on_commit=False)
        self._writer = threading.Lock()
        self.trouble: str | None = None
        """Why the last transaction failed; None if it did not."""

    def _check_columns(self) -> None:
        inspector = sqlalchemy.inspect(self._engine)
        missing = [
            f"{table.name}.{name}"
            for table in Base.metadata.sorted_tables
            if inspector.has_table(table.name)
            for name in {*table.columns.keys()}
            - {found["name"] for found in inspector.get_columns(table.name)}
        ]
        if missing:
            self.close()
            url = self._engine.url.render_as_string(hide_password=True)
            raise ConfigError(
                f"the database {url} has no columns {', '.join(sorted(missing))}: another version of the server has made"
                " it; choose another run.name or serve.database, or delete it"
            )

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Commit what the body adds and changes, or nothing if it raises."""
        try:
            with self._writer, self._transactions.begin() as transaction:
                yield transaction
        except OperationalError as error:
            self.trouble = f"the database cannot be written ({error.orig}); look for a full disk"
            raise
        self.trouble = None

    def add(self, *rows: Base) -> None:
        """Insert rows in one transaction."""
        with self.transaction() as transaction:
            transaction.add_all(rows)

    def find(self, table: type[Row], key: str) -> Row | None:
        """Return the row with this primary key, or None."""
        with self._transactions() as transaction:
            return transaction.get(table, key)

    def get(self, table: type[Row], key: str) -> Row:
        """Return the row with this primary key; raise RequestError if there is none."""
        row = self.find(table, key)
        if row is None:
            name = {"ClientSession": "session"}.get(table.__name__, table.__name__.lower())
            raise RequestError(f"{name} {key!r} does not exist on this server; create it first")
        return row

    def accepted(self, request: Request) -> bool:
        """Return True for a retry; raise RequestError for another request, and if the result has been removed."""
        known = self.find(Request, request.id)
        if known is None:
            return False
        what = f"seq_id={request.seq_id} of {request.owner}"
        if known.kind != request.kind:
            raise RequestError(
                f"{what} is a request of the kind {known.kind}, and now of {request.kind}; give each request a seq_id of"
                " its own"
            )
        if known.state == DONE and known.result is None:
            raise RequestError(
                f"request {request.id} is done and its result has been removed, and it is not carried out again; fetch"
                " results sooner, and continue with a new request"
            )
        if known.body and not same_body(known.kind, known.body, request.body):
            raise RequestError(
                f"{what} is a request of the kind {known.kind} with other contents; give each request a seq_id of its own"
            )
        return True

    def session(self, session_id: str) -> ClientSession:
        """Return a session; raise RequestError if there is none or it has ended."""
        session = self.get(ClientSession, session_id)
        if session.ended:
            raise RequestError(f"session {session_id} has ended; create another ServiceClient")
        return session

    def update(self, table: type[Base], key: str, **values: Any) -> None:
        """Set columns of a row."""
        with self.transaction() as transaction:
            row = transaction.get_one(table, key)
            for name, value in values.items():
                setattr(row, name, value)

    def all(self, query: sqlalchemy.Select[Row]) -> Sequence[Row]:
        """Return the rows of a query."""
        with self._transactions() as transaction:
            return transaction.scalars(query).all()

    def models(self, state: str) -> Sequence[Model]:
        """Return the models in a state, oldest first."""
        return self.all(select(Model).where(Model.state == state).order_by(Model.created_s))

    def queued(self) -> Sequence[Request]:
        """Return the requests that were accepted and are not done, each owner's in order."""
        return self.all(
            select(Request).where(Request.state == QUEUED).order_by(Request.owner, Request.seq_id)
        )

    def checkpoints(self, model_id: str) -> Sequence[Checkpoint]:
        """Return the checkpoints of a model that clients see, oldest first."""
        return self.all(
            select(Checkpoint).where(Checkpoint.model_id == model_id, *_seen()).order_by(Checkpoint.created_s)
        )

    def checkpoint(self, path: str) -> Checkpoint | None:
        """Return the checkpoint that clients see at a path."""
        return next(iter(self.all(select(Checkpoint).where(Checkpoint.path == path, *_seen()))), None)

    def keep(self, checkpoint: Checkpoint, num_kept: int) -> None:
        """Add weights of a step for its samplers; those of all but the `num_kept` newest steps of the model are gone."""
        frozen = _frozen(checkpoint.model_id, checkpoint.step)
        of_model = select(Checkpoint).where(
            Checkpoint.kind == KEPT, Checkpoint.model_id == checkpoint.model_id
        )
        with self.transaction() as transaction:
            transaction.merge(checkpoint)
            transaction.flush()
            transaction.execute(sqlalchemy.update(Sampler).where(*frozen).values(folder=checkpoint.folder))
            for old in transaction.scalars(of_model.order_by(Checkpoint.step.desc()).offset(num_kept)):
                old.gone = True

    def has_samplers(self, model: Model) -> bool:
        """Return whether a sampler is frozen at a model's step without a checkpoint of its weights."""
        return bool(self.all(select(Sampler).where(*_frozen(model.id, model.step)).limit(1)))

    def replay(self, model_id: str) -> Replay:
        """Return how a restart restores what the ranks held after the last request of a model that was carried out."""
        base = self._restart_point(model_id)
        return Replay(
            base,
            self.all(
                select(Request)
                .where(Request.owner == model_id, Request.state == DONE, Request.kind.in_(CHANGES))
                .where(Request.seq_id > (-1 if base is None else base.seq_id))
                .order_by(Request.seq_id)
            ),
        )

    def _restart_point(self, model_id: str) -> Checkpoint | None:
        resumable = (Checkpoint.model_id == model_id, Checkpoint.kind == "training", Checkpoint.resumable)
        newest_first = select(Checkpoint).where(*resumable).order_by(Checkpoint.seq_id.desc())
        return next(iter(self.all(newest_first.limit(1))), None)

    def prune(self, before_s: float) -> Sequence[Checkpoint]:
        """Remove results and bodies of requests done before that time, and checkpoints that are gone; return the latter.

        Weights that were kept before that time for samplers of a model that is no longer live are gone as well.

        Guarantees: what a restart needs of live models stays.
        """
        live = [model.id for model in self.models(LIVE)]
        bases = {model_id: self._restart_point(model_id) for model_id in live}
        needed = sqlalchemy.or_(
            sqlalchemy.false(),
            *(
                sqlalchemy.and_(Request.owner == key, Request.seq_id > (base.seq_id if base else -1))
                for key, base in bases.items()
            ),
        )
        with self.transaction() as transaction:
            old = (Request.state != QUEUED, Request.done_s < before_s)
            with_result, with_body = Request.result.is_not(None), Request.body != b""
            transaction.execute(sqlalchemy.update(Request).where(*old, with_result).values(result=None))
            transaction.execute(sqlalchemy.update(Request).where(*old, with_body, ~needed).values(body=b""))
            expired = Checkpoint.expires_s < time.time()
            unused = sqlalchemy.and_(
                Checkpoint.kind == KEPT,
                Checkpoint.model_id.not_in(live),
                Checkpoint.created_s < before_s,
            )
            transaction.execute(sqlalchemy.update(Checkpoint).where(expired | unused).values(gone=True))
            loaded = transaction.scalars(select(Request.folder).where(needed, Request.folder.is_not(None)))
            kept = {*loaded, *(base.folder for base in bases.values() if base)}
            gone = transaction.scalars(select(Checkpoint).where(Checkpoint.gone)).all()
            removed = [each for each in gone if each.folder not in kept]
            for each in removed:
                transaction.delete(each)
        return removed


def _frozen(model_id: str, step: int) -> tuple[sqlalchemy.ColumnElement[bool], ...]:
    """Return the conditions for samplers that are frozen at a step whose weights are not saved."""
    return Sampler.model_id == model_id, Sampler.step == step, Sampler.folder.is_(None)


def _seen() -> tuple[sqlalchemy.ColumnElement[bool], ...]:
    """Return the conditions under which clients see a checkpoint."""
    expires_s = Checkpoint.expires_s
    return ~Checkpoint.gone, Checkpoint.kind != KEPT, expires_s.is_(None) | (expires_s > time.time())


def hide(path: str) -> sqlalchemy.Update:
    """Return the statement after which clients no longer see the checkpoint at a path."""
    return sqlalchemy.update(Checkpoint).where(Checkpoint.path == path).values(gone=True)


def _configure_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "busy_timeout=30000",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
