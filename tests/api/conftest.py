"""A service on a folder of its own, and a PostgreSQL server of its own where there is one."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from gnnplan.runtime.graph.dataset import Graph
from tests.support.service import make_client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A running service without keys."""
    with make_client(tmp_path_factory.mktemp("service")) as client:
        yield client


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache folder of every service that plans: a profile that one has timed is there for all."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def planner(
    small_graph: Graph, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """A running service whose root holds the small graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(cache))
        roots = (small_graph.path.parent,)
        with make_client(tmp_path_factory.mktemp("planner"), graph_roots=roots) as client:
            yield client


def _postgres_tool(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of a server that is started for the tests alone, on a socket in a temporary folder."""
    initdb, pg_ctl = _postgres_tool("initdb"), _postgres_tool("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("no PostgreSQL (Debian: apt-get install postgresql)")
    # Not below pytest's own folder: every pytest that starts closes that one to other users.
    folder = Path(tempfile.mkdtemp(prefix="gnnplan-pg-"))
    user: dict = {}
    if os.getuid() == 0:
        # PostgreSQL refuses to run as root.
        user = {"user": "nobody", "group": "nogroup"}
        folder.chmod(0o755)
        shutil.chown(folder, "nobody", "nogroup")
    data = folder / "data"

    def call(*words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True, cwd="/", **user, check=False)
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"PostgreSQL does not start here: {done.stderr.strip()[-300:]}")

    call(initdb, "-D", str(data), "-U", "gnnplan", "-A", "trust", "-N")
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    call(
        pg_ctl,
        "-D",
        str(data),
        "-w",
        "-t",
        "300",
        "-l",
        str(folder / "log"),
        "-o",
        options,
        "start",
    )
    try:
        yield f"postgresql://gnnplan@/postgres?host={folder}"
    finally:
        call(pg_ctl, "-D", str(data), "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)
