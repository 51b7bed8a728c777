"""Shards: parts of one database, each with jobs of its own tenants and one owner.

A tenant's name decides its shard for good, so the number of shards never changes. The function
`_in_shard` of the PostgreSQL inbox must agree with `shard_of`.
"""

from __future__ import annotations

from hashlib import sha256
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from msgspec import Struct

from penstock.core.errors import WrongShard


class Shard(Struct, frozen=True):
    """One of them; by default the only one."""

    number: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count}"

    def check(self, tenant: str | None) -> None:
        """Raises WrongShard for a tenant of another shard."""
        if self.count == 1 or tenant is None:
            return
        if (right := shard_of(tenant, self.count)) != self.number:
            raise WrongShard(
                "tenant",
                f"{tenant!r} is in shard {right}, and this is {self}",
                hint=f"connect to the addresses of shard {right}",
                shard=right,
            )


def shard_of(tenant: str, count: int) -> int:
    return int.from_bytes(sha256(tenant.encode()).digest()[:2]) % count


def shard_url(url: str, number: int) -> str:
    """Where the tables of a shard are: shard 0 has the schema of the database's URL, each other one
    has that name with its number."""
    if not number:
        return url
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    options["schema"] = f"{options.get('schema', 'penstock')}_{number}"
    return urlunsplit(parts._replace(query=urlencode(options)))
