"""The `gnnplan-serve` command: serve, or make, list and revoke API keys."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from uvicorn import Config, Server

from gnnplan.api.app import create_app
from gnnplan.api.connections import ConnectionLimits, Connections, limit_to_files, protocol_of
from gnnplan.api.jobs.ray import ClusterUnreachableError, RayJobs, check_address
from gnnplan.api.security import SCOPES, create_key
from gnnplan.api.service.context import LOOPBACK_HOSTS, Service, ServiceSettings
from gnnplan.api.storage.storage import Storage
from gnnplan.api.telemetry import log_json
from gnnplan.runtime.comm.route import is_loopback
from gnnplan.runtime.errors import InputError

GRACE_SECONDS = 3
"""Seconds between the order to stop and the end of open streams of events."""
EXECUTORS = ("local", "ray")
DEFAULTS: dict[str, Any] = {"port": 8000} | {f.name: f.default for f in fields(ServiceSettings)}
NUMBERS: dict[str, tuple[float, float, str | None]] = {
    "port": (0, 65535, None),
    "retention_days": (0, 1e6, "of ended jobs"),
    "planning_workers": (1, 256, "planning jobs at once"),
    "max_body_bytes": (1, 10**12, None),
    "reads_per_second": (1e-3, 1e9, "of a client or key"),
    "writes_per_second": (1e-3, 1e9, "of a client or key"),
    "max_connections": (16, 10**6, "at once, in all"),
    "max_connections_of_client": (1, 10**6, "at once, of one address"),
    "header_seconds": (0.1, 3600, "longest wait for a request's headers"),
    "body_seconds": (0.1, 86400, "longest wait for a request's body, and for reads of its answer"),
}
"""Least and largest value of options that are numbers, and their help."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line of the service."""
    parser = argparse.ArgumentParser(
        prog="gnnplan-serve", description="REST service that plans multi-GPU GNN training."
    )
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("gnnplan-data"), help="database, plans and logs")
    add("--database-url", help="postgresql://USER@HOST/NAME; default: SQLite in the data folder")
    add("--host", default="127.0.0.1", help="address to bind; others than loopback need a key")
    add(
        "--graph-root",
        type=Path,
        action="append",
        help="folder whose datasets requests may name, repeatable; default: the current folder",
    )
    add(
        "--allow-model",
        action="append",
        default=[],
        help="module or module:factory that requests may name as a model, repeatable",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        help="name that clients call this service by, repeatable, * for any; needs a key",
    )
    for name, (_, _, words) in NUMBERS.items():
        kind = int if isinstance(DEFAULTS[name], int) else float
        add(_flag(name), type=kind, default=DEFAULTS[name], help=words)
    add(
        "--executor",
        choices=EXECUTORS,
        default="local",
        help="where runs train: on this machine, or on the Ray cluster at --address",
    )
    add(
        "--address",
        help="dashboard of a Ray cluster, such as http://head:8265, with --executor ray",
    )
    _add_keys(parser)
    return parser.parse_args(argv)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add_keys(parser: argparse.ArgumentParser) -> None:
    command = parser.add_subparsers(dest="command").add_parser("keys", help="API keys")
    keys = command.add_subparsers(dest="verb", required=True)
    create = keys.add_parser("create", help="make a key and print it, once")
    create.add_argument("--name", default="key", help="whose it is")
    create.add_argument(
        "--scope", action="append", choices=SCOPES, help="repeatable; default: read"
    )
    keys.add_parser("list", help="all keys, without the keys themselves")
    keys.add_parser("revoke", help="make a key useless").add_argument("id")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return exit code 2 where the input is wrong."""
    options = parse(argv)
    try:
        if options.command == "keys":
            return run_keys(options)
        return serve(options)
    except InputError as error:
        sys.stderr.write(f"gnnplan-serve: {error}\n")
        return 2


def run_keys(options: argparse.Namespace) -> int:
    """Make, list or revoke keys in the service's database."""
    storage = Storage(options.data_dir.resolve(), options.database_url)
    try:
        if options.verb == "create":
            row, text = create_key(storage.access, options.name, options.scope or ["read"])
            sys.stderr.write(f"key {row.id} ({row.scopes}); it is not shown again:\n")
            sys.stdout.write(f"{text}\n")
        elif options.verb == "list":
            for row in storage.access.list_keys():
                made = time.strftime("%Y-%m-%d", time.gmtime(row.created_seconds))
                state = "valid" if row.revoked_seconds is None else "revoked"
                sys.stdout.write(f"{row.id}  {row.name}  {row.scopes}  {made}  {state}\n")
        elif not storage.access.revoke(options.id):
            raise InputError(f"expected the id of a key, found {options.id!r}; see keys list")
    finally:
        storage.close()
    return 0


def serve(options: argparse.Namespace) -> int:
    """Run the service until it is interrupted."""
    app = create_app(settings_of(options))
    service: Service = app.state.service
    try:
        check_start(service, options.host)
    except InputError:
        service.close()
        raise
    log_json()
    sys.stderr.write(json.dumps({"message": f"http://{options.host}:{options.port}"}) + "\n")
    server_of(app, service.settings, options.host, options.port).run()
    return 0


def server_of(app: FastAPI, settings: ServiceSettings, host: str, port: int) -> Server:
    """Make the server of an application, with limited connections."""
    guard = Connections(connection_limits(settings))
    return Server(
        Config(
            app,
            host=host,
            port=port,
            http=protocol_of(guard),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


def connection_limits(settings: ServiceSettings) -> ConnectionLimits:
    """Return the limits of connections, reduced to the open files that are allowed."""
    most = limit_to_files(settings.max_connections)
    return ConnectionLimits(
        most=most,
        most_of_client=min(settings.max_connections_of_client, max(1, most * 3 // 4)),
        header_seconds=settings.header_seconds,
        body_seconds=settings.body_seconds,
    )


def check_start(service: Service, host: str) -> None:
    """Refuse to start a service that anybody could use, or whose data folder is in use; hold it."""
    if service.settings.require_key and not service.storage.access.has_keys():
        names = [host, *(n for n in service.settings.allowed_hosts if n not in LOOPBACK_HOSTS)]
        others = ", ".join(dict.fromkeys(n for n in names if not is_loopback(n)))
        raise InputError(
            f"expected loopback addresses (127.0.0.1, ::1, localhost) alone or a key, found "
            f"{others} and no key; make one with `gnnplan-serve keys create --scope admin`"
        )
    service.lanes.hold()
    if service.settings.ray_address is not None:
        say_whether_ray_answers(service.settings.ray_address)


def say_whether_ray_answers(address: str) -> None:
    """Print a line if no Ray cluster answers; planning works without one."""
    cluster = RayJobs(address)
    try:
        cluster.ray_version()
    except ClusterUnreachableError as error:
        sys.stderr.write(f"gnnplan-serve: {error}; runs fail until one answers\n")
    finally:
        cluster.close()


def settings_of(options: argparse.Namespace) -> ServiceSettings:
    """Return the settings of a command line."""
    _check_numbers(options)
    roots = [Path(root).resolve() for root in options.graph_root or [Path.cwd()]]
    for root in roots:
        if not root.is_dir():
            raise InputError(f"--graph-root: expected a folder, found {str(root)!r}")
    return ServiceSettings(
        data_dir=options.data_dir.resolve(),
        database_url=options.database_url,
        graph_roots=tuple(roots),
        allowed_models=tuple(options.allow_model),
        # Another name than this machine's own is what a proxy brings others by.
        require_key=not all(map(is_loopback, (options.host, *options.allow_host))),
        allowed_hosts=(*LOOPBACK_HOSTS, options.host, *options.allow_host),
        **{name: getattr(options, name) for name in NUMBERS if name != "port"},
        ray_address=_ray_address(options),
    )


def _check_numbers(options: argparse.Namespace) -> None:
    for name, (least, most, _) in NUMBERS.items():
        value = getattr(options, name)
        if not least <= value <= most:
            raise InputError(f"{_flag(name)}: expected {least:g} to {most:g}, found {value:g}")


def _ray_address(options: argparse.Namespace) -> str | None:
    if options.executor == "local":
        if options.address is not None:
            raise InputError("--address: expected it with --executor ray alone")
        return None
    if options.address is None:
        raise InputError(
            "--executor ray: expected --address with the dashboard of a Ray cluster, such as "
            "http://head:8265, found none"
        )
    return check_address(options.address)


if __name__ == "__main__":
    raise SystemExit(main())
