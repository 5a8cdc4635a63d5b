"""A PostgreSQL of Debian's packages on a port of its own, for tests."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bulk_pipeline_tests.dev import free_port


def find_program(name: str) -> str | None:
    """Where a program of the server is; Debian keeps them off the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    path = os.pathsep.join([os.environ["PATH"], *map(str, folders)])
    return shutil.which(name, path=path)


@contextmanager
def run_postgres() -> Iterator[dict[str, str]]:
    """Start a server; yields the environment of examples/postgres/dagster.yaml."""
    # The server refuses to run as root.
    user = "postgres" if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        password = Path(folder) / "password"
        password.write_text("a password")
        if user:
            shutil.chown(folder, user)
            shutil.chown(password, user)
        port = free_port()

        def call(program: str, *arguments: str) -> None:
            command = [find_program(program) or program, *arguments]
            environment = {**os.environ, "PGPASSWORD": "a password", "LC_ALL": "C.UTF-8"}
            subprocess.run(command, user=user, env=environment, cwd=folder, check=True)

        data, log = f"{folder}/data", f"{folder}/log"
        secrets = ["--username=dagster", f"--pwfile={password}", "--auth=scram-sha-256"]
        call("initdb", "--pgdata", data, "--no-sync", *secrets)
        options = f"-p {port} -h 127.0.0.1 -k {folder} -c fsync=off"
        call("pg_ctl", "--pgdata", data, "--wait", "--log", log, "--options", options, "start")
        try:
            call("createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "dagster", "dagster")
            yield {
                "DAGSTER_PG_HOST": "127.0.0.1",
                "DAGSTER_PG_PORT": str(port),
                "DAGSTER_PG_USER": "dagster",
                "DAGSTER_PG_PASSWORD": "a password",
                "DAGSTER_PG_DB": "dagster",
            }
        finally:
            call("pg_ctl", "--pgdata", data, "--mode", "immediate", "stop")
