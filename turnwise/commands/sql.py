"""`turnwise sql QUERY`: DuckDB's answer about the rows of the runs."""

from __future__ import annotations

from argparse import Namespace

from flows.look.sql import asked
from flows.report import emit
from flows.workspace import find_home, open_workspace


def sql(args: Namespace) -> int:
    """turnwise sql QUERY"""
    found = asked(args.query, open_workspace(find_home(args.home)), args.of)
    emit(found.to_pylist()) if args.json else print(found.to_pandas().to_string(index=False))
    return 0
