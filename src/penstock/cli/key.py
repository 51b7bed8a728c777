"""`penstock key`: API keys. `penstock dashboard`: a link that signs a browser in."""

from __future__ import annotations

import time

import click

from penstock.cli.formats import Whole, moment, span
from penstock.cli.groups import Commands, command
from penstock.cli.nouns import Noun
from penstock.cli.options import options
from penstock.cli.output import Row, echo, print_done, print_json, styled, validity, warn
from penstock.core.errors import NotFound, Unavailable
from penstock.ports.engine_api import EngineApi, KeyRole, KeyView


@click.group(cls=Commands)
def key() -> None:
    """Create, list, show and delete API keys."""


@key.command()
@options(
    """
    --role ROLE!... as roles  A role of the key; may be repeated.
    --tenant TENANT           Bind the key to this tenant; else it can access all tenants.
    --expires DURATION        How long it is valid; else until it is deleted.
    """,
    roles=click.Choice([role.value for role in KeyRole]),
)
async def create(
    api: EngineApi,
    name: str,
    roles: tuple[str, ...],
    tenant: str | None,
    expires: float | None,
    json: bool,
) -> None:
    """Create a key; prints its token once.

    NAME is the principal that jobs, approvals and the audit log will show.
    """
    wanted = tuple(map(KeyRole, roles))
    new = await api.keys.create(name, wanted, tenant=tenant, expires_in=expires)
    if json:
        print_json(new)
        return
    echo(new.token)
    made = new.key
    limits = [f"for tenant {made.tenant}" if made.tenant else "for every tenant"]
    if made.expires_at is not None:
        limits.append(f"until {moment(made.expires_at, time.time())}")
    warn(
        f"key {made.key_id} of {made.name}: {', '.join(made.roles)}, {', '.join(limits)}",
        "Keep the token above now: only its hash is stored, it is not shown again.",
    )


def key_row(one: KeyView, now: float) -> Row:
    status, expires = validity(one.revoked_at, one.expires_at, now)
    return {
        "ID": Whole(one.key_id),
        "NAME": one.name,
        "STATUS": styled(status),
        "ROLES": ", ".join(one.roles),
        "TENANT": "every" if one.tenant is None else one.tenant,
        "AGE": span(now - one.created_at),
        "EXPIRES": expires,
    }


async def _get(api: EngineApi, name: str) -> KeyView:
    found = [one for one in await api.keys.list() if name in (one.key_id, one.name)]
    if not found:
        raise NotFound(f"no key {name!r}", hint="'penstock key list' lists them")
    return found[-1]


KEYS = Noun(
    key,
    key_row,
    lambda api: api.keys.list(),
    "no keys; create one with 'penstock key create NAME --role submit'",
)
KEYS.list("List the keys, including revoked and expired ones.")
KEYS.show("Show a key, by its id or name; never its token.", _get)
KEYS.act(
    "delete",
    """Revoke a key immediately.

    By its id, or by its name if only one valid key has it. 'key list' still shows it, as revoked.
    """,
    lambda api, name: api.keys.revoke(name),
    lambda view: f"{view.key_id} ({view.name}) revoked",
)


@command()
async def dashboard(api: EngineApi, json: bool) -> None:
    """Print a link that signs a browser in.

    The link works once, within ten minutes, and has the rights of the key that made it.
    """
    link = await api.keys.create_link()
    if not link.url:
        raise Unavailable(
            "the engine does not serve HTTP", hint="start it with 'penstock up --http HOST:PORT'"
        )
    print_done(json, link, link.url)
