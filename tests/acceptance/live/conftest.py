"""The acceptance tests once more, with PostgreSQL as the store and NATS as the bus."""

from tests.support.on_servers import (  # noqa: F401  (fixtures)
    _engines_of_the_module,
    _engines_of_the_test,
    servers,
)
