from penstock.core.errors import Misconfigured

try:
    import asyncpg  # noqa: F401  (only whether it is there)
except ImportError as error:
    raise Misconfigured(
        "PostgreSQL needs the package asyncpg", hint="pip install 'penstock[postgres]'"
    ) from error
