"""`penstock keys`: API keys."""

from __future__ import annotations

import time

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo
from penstock.cli.words import moment, span
from penstock.ports.engine_api import KeyRole, KeyView, NewKey

ROLE = click.Choice([role.value for role in KeyRole])
_STYLES = {"valid": "green", "expired": "yellow", "revoked": "red"}


@click.group(cls=Commands)
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command()
@click.argument("name")
@click.option(
    "--role",
    "roles",
    type=ROLE,
    multiple=True,
    required=True,
    help="A role of the key; may be repeated.",
)
@click.option("--tenant", help="Bind the key to this tenant; else it can access all tenants.")
@click.option("--expires", type=DURATION, help="How long it is valid; else until revoked.")
@as_json
@placed
@click.pass_obj
def create(
    place: Place,
    name: str,
    roles: tuple[str, ...],
    tenant: str | None,
    expires: float | None,
    json: bool,
) -> None:
    """Create a key; prints its token once.

    NAME is the principal that jobs, approvals and the audit log will show.
    """
    new = run(_create(place, name, tuple(KeyRole(role) for role in roles), tenant, expires))
    if json:
        print_json(msgspec.to_builtins(new))
        return
    echo(new.token)
    key = new.key
    limits = [f"for tenant {key.tenant}" if key.tenant else "for every tenant"]
    if key.expires_at is not None:
        limits.append(f"until {moment(key.expires_at, time.time())}")
    said = f"key {key.key_id} of {key.name}: {', '.join(key.roles)}, {', '.join(limits)}"
    echo(f"penstock: {said}", err=True)
    echo("  Keep the token above now: only its hash is stored, it is not shown again.", err=True)


async def _create(
    place: Place, name: str, roles: tuple[KeyRole, ...], tenant: str | None, expires: float | None
) -> NewKey:
    async with api_at(place) as api:
        return await api.keys.create(name, roles, tenant=tenant, expires_in=expires)


@keys.command("list")
@as_json
@placed
@click.pass_obj
def list_keys(place: Place, json: bool) -> None:
    """List the keys, including revoked and expired ones."""
    found = run(_list(place))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no keys; make one with 'penstock keys create NAME --role submit'", err=True)
    else:
        emit(_listing(found, time.time()))


async def _list(place: Place) -> list[KeyView]:
    async with api_at(place) as api:
        return await api.keys.list()


def _listing(found: list[KeyView], now: float) -> Listing:
    from rich.text import Text

    listing = Listing(
        *("ID", "NAME", "STATUS", "ROLES", "TENANT", "MADE", "EXPIRES"),
        flexible=("NAME", "ROLES", "TENANT"),
        right=("MADE",),
    )
    for key in found:
        status = _status(key, now)
        left = "" if key.expires_at is None or status != "valid" else key.expires_at - now
        listing.add(
            key.key_id,
            key.name,
            Text(status, _STYLES[status]),
            ", ".join(key.roles),
            "every" if key.tenant is None else key.tenant,
            f"{span(now - key.created_at)} ago",
            left if isinstance(left, str) else f"in {span(left)}",
        )
    return listing


def _status(key: KeyView, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "valid"


@keys.command()
@click.argument("key", metavar="ID")
@as_json
@placed
@click.pass_obj
def revoke(place: Place, key: str, json: bool) -> None:
    """Revoke a key immediately.

    By its id, or by its name if only one valid key has it.
    """
    view = run(_revoke(place, key))
    if json:
        print_json(msgspec.to_builtins(view))
    else:
        echo(f"{view.key_id} ({view.name}) revoked")


async def _revoke(place: Place, key: str) -> KeyView:
    async with api_at(place) as api:
        return await api.keys.revoke(key)
