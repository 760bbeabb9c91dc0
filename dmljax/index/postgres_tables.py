"""The tables of an index in PostgreSQL: address, generations, locks, and errors in one line."""

import contextlib
import json
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import Connection, errors, sql

from dmljax.index import inputs
from dmljax.index.errors import Damaged, InvalidInput, Locked, Superseded, Unavailable
from dmljax.index.filters import Condition, kind
from dmljax.index.inputs import Settings

_FORMAT = 1
_CONNECT_SECONDS = 10
_TABLES = """
create table {settings} (
    only_row boolean primary key default true check (only_row),
    model text not null, dimension integer not null, similarity text not null,
    version bigint not null, items bigint not null, graph jsonb
);
create table {items} (
    row bigint generated always as identity primary key, id text collate "C" not null unique,
    metadata jsonb not null, vector vector({dimension}) not null
);
create table {fields} (name text primary key);
"""
POINTER = """
create table {pointer} (
    only_row boolean primary key default true check (only_row),
    format integer not null, generation integer not null
);
insert into {pointer} (format, generation) values ({format}, 1);
"""


class Address:
    """Where the index is: the server, and the name of its table."""

    def __init__(self, url: str):
        parts = urllib.parse.urlsplit(url)
        # Other words stay as they are: libpq reads %20, but not +, as a space.
        words = [word for word in parts.query.split("&") if word]
        tables = [word.partition("=")[2] for word in words if word.startswith("table=")]
        self.table = tables[-1] if tables else "dmljax"
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", self.table):
            raise InvalidInput(
                f"table={inputs.shorten(self.table)}: use up to 40 lower-case letters, digits and _"
            )
        query = "&".join(word for word in words if not word.startswith("table="))
        self.url = urllib.parse.urlunsplit(parts._replace(query=query))
        host = parts.netloc.rpartition("@")[2]
        self.place = f"postgresql://{host}{parts.path}?table={self.table}"

    def sql(self, text: str, generation: int = 0, dimension: int = 0) -> sql.Composed:
        """A statement in which {pointer}, {settings}, {items} and so on become quoted names."""
        suffixes = "settings", "items", "fields", "graph"
        names = {x: sql.Identifier(f"{self.table}_{generation}_{x}") for x in suffixes}
        names["pointer"] = sql.Identifier(self.table)
        numbers = {"dimension": sql.Literal(dimension), "format": sql.Literal(_FORMAT)}
        return sql.SQL(text).format(**names, **numbers)

    @contextlib.contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection for the block. Errors of the server are one line."""
        with one_line_errors(self.place), contextlib.closing(self.connect()) as connection:
            yield connection

    def connect(self) -> Connection:
        connection = psycopg.connect(
            self.url,
            autocommit=True,
            connect_timeout=_CONNECT_SECONDS,
            application_name="dmljax index",
        )
        connection.execute("set client_encoding = 'UTF8'")
        return connection


def table_exists(connection: Connection, table: str) -> bool:
    row = connection.execute("select to_regclass(%s)", (f'"{table}"',)).fetchone()
    return row is not None and row[0] is not None


def require_extension(connection: Connection, address: Address) -> None:
    if connection.execute("select 1 from pg_extension where extname = 'vector'").fetchone():
        return
    try:
        connection.execute("create extension if not exists vector")
    except errors.InsufficientPrivilege:
        raise Unavailable(
            f"{address.place}: the extension pgvector is missing in this database, and the role "
            "may not create it: let an administrator run CREATE EXTENSION vector"
        ) from None
    except (errors.UndefinedFile, errors.FeatureNotSupported):
        raise Unavailable(
            f"{address.place}: this server has no pgvector: install it there "
            "(github.com/pgvector/pgvector)"
        ) from None


def current_generation(connection: Connection, address: Address) -> int:
    """The number of the generation that counts."""
    if not table_exists(connection, address.table):
        raise FileNotFoundError(f"{address.place} does not exist: it is no index of dmljax")
    try:
        row = connection.execute(address.sql("select format, generation from {pointer}")).fetchone()
    except errors.UndefinedColumn:
        row = None
    if row is None:
        raise InvalidInput(f"{address.place} is a table, but no index of dmljax: choose ?table=")
    inputs.check_format(row[0], _FORMAT, address.place)
    return row[1]


def create_generation(
    connection: Connection, address: Address, generation: int, settings: Settings
) -> None:
    connection.execute(address.sql(_TABLES, generation, settings.dimension))
    statement = "insert into {settings} values (true, %s, %s, %s, 0, 0)"
    connection.execute(address.sql(statement, generation), settings)


def drop_generation(connection: Connection, address: Address, generation: int) -> bool:
    """Deletes the tables of a generation, if they exist; readers of them are told."""
    present = table_exists(connection, f"{address.table}_{generation}_settings")
    if present:
        connection.execute(address.sql("drop table {settings}, {items}, {fields}", generation))
    return present


def drop_generations(connection: Connection, address: Address, *, before: int) -> None:
    """Deletes the generations before the present one."""
    while before > 1 and drop_generation(connection, address, before - 1):
        before -= 1


def lock(connection: Connection, address: Address, *, exclusive: bool) -> None:
    """Writers share a lock until they close; `reindex` holds it exclusively."""
    key = (f"dmljax index {address.table}",)
    function = "pg_try_advisory_lock" + ("" if exclusive else "_shared")
    for _ in range(10):
        row = connection.execute(f"select {function}(hashtextextended(%s, 0))", key).fetchone()
        if row is not None and row[0]:
            return
        # The session of a writer that was closed or killed a moment ago may not have ended yet.
        connection.execute("select pg_sleep(0.05)")
    row = connection.execute(
        "select a.pid, coalesce(a.client_hostname, host(a.client_addr), 'the server') "
        "from pg_locks l join pg_stat_activity a using (pid) where l.locktype = 'advisory' "
        "and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended(%s, 0) "
        "and a.pid <> pg_backend_pid()",
        key,
    ).fetchone()
    owner = f"the session {row[0]} from {row[1]}" if row else "another session"
    raise Locked(f"{address.place} is being written by {owner}: wait for it, or end it")


@contextlib.contextmanager
def one_line_errors(place: str) -> Iterator[None]:
    """Turns errors of the server into `Unavailable`, `Superseded` or `Damaged`, in one line."""
    try:
        yield
    except psycopg.Error as error:
        text = error.diag.message_primary or str(error)
        text = " ".join(text.split())[:300]
        if isinstance(error, errors.InsufficientPrivilege):
            text = f"the role lacks rights ({text}): let the owner of the tables grant them"
        elif isinstance(error, errors.QueryCanceled):
            text = f"the call took too long ({text}). It changed nothing"
        elif isinstance(error, errors.UndefinedTable):
            raise Superseded(f"{place}: tables are gone ({text}): open the index again") from None
        elif isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
            raise Damaged(f"{place}: {text}. Restore the database from a backup") from error
        elif isinstance(error, errors.ReadOnlySqlTransaction):
            text = f"the server only takes reads ({text})"
        elif isinstance(error, psycopg.OperationalError):
            text = f"the server cannot be reached ({text})"
        raise Unavailable(f"{place}: {text}") from error


def condition_sql(conditions: list[Condition]) -> tuple[str, list[Any]]:
    """The text after `where`, and its parameters: no text of a caller is part of the SQL."""
    terms, parameters = ["true"], []
    for field, operator, values in conditions:
        if operator == "=":
            texts = [json.dumps(value) for value in values if value is not None]
            term = "metadata -> %s::text = any(%s::text[]::jsonb[])"
            parameters += [field, texts]
            if None in values:
                term += " or coalesce(jsonb_typeof(metadata -> %s::text), 'null') = 'null'"
                parameters.append(field)
        elif kind(values[0]) == "text":
            term = "jsonb_typeof(metadata -> %s::text) = 'string' and "
            term += f'(metadata ->> %s::text) collate "C" {operator} %s::text'
            parameters += [field, field, values[0]]
        else:
            term = "jsonb_typeof(metadata -> %s::text) = 'number' and "
            term += f"metadata -> %s::text {operator} %s::text::jsonb"
            parameters += [field, field, json.dumps(values[0])]
        terms.append(f"({term})")
    return " and ".join(terms), parameters
