from pathlib import Path

import pytest
from tests.acceptance.test_bad_input import *  # noqa: F403  (its tests and fixtures)
from tests.support.acceptance.bad_jobs import app
from tests.support.on_servers import Servers

import penstock


def test_a_foreign_database_is_refused(  # type: ignore[no-redef]  # instead of SQLite's
    servers: Servers, tmp_path: Path
) -> None:
    servers.database.sql(
        f"CREATE SCHEMA {servers.schema}; CREATE TABLE {servers.schema}.job (x int)"
    )
    with pytest.raises(penstock.PenstockError, match="not one of Penstock's"), app.run(tmp_path):
        pass


def test_a_corrupt_database_is_refused(  # type: ignore[no-redef]  # instead of SQLite's
    servers: Servers, tmp_path: Path
) -> None:
    with app.run(tmp_path):
        pass
    servers.database.sql(f"DROP TABLE {servers.schema}.journal")
    with pytest.raises(penstock.PenstockError, match="not one of Penstock's"), app.run(tmp_path):
        pass
