"""The `gnnplan-serve` command."""

import argparse
import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from api.app import create_app


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of the service."""
    parser = argparse.ArgumentParser(
        prog="gnnplan-serve", description="REST service that plans multi-GPU GNN training."
    )
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to bind")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--data-dir", type=Path, default=Path("gnnplan-data"), help="database and plans"
    )
    return parser.parse_args(argv)


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; exit code 2 for an address that is not loopback."""
    options = parse(argv)
    if not is_loopback(options.host):
        # There are no API keys yet, so nobody but this machine may plan on it.
        sys.stderr.write(
            f"gnnplan-serve: expected a loopback address (127.0.0.1, ::1, localhost), found "
            f"{options.host!r}; put an authenticating proxy in front of the service\n"
        )
        return 2
    uvicorn.run(
        create_app(options.data_dir.resolve()),
        host=options.host,
        port=options.port,
        log_level="info",
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
