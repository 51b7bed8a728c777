"""`penstock audit`: the audit log."""

from __future__ import annotations

import time

import click
import msgspec

from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import as_json, limited
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo
from penstock.cli.words import moment
from penstock.ports.store import AuditEntry, AuditQuery


@click.command()
@click.option("--who", metavar="NAME", help="By this principal.")
@click.option("--action", metavar="GLOB", help="Such as job.cancel or key.*.")
@click.option("--subject", metavar="JOB|NAME", help="With this subject.")
@click.option("--tenant", help="By keys of this tenant.")
@limited(50)
@click.option("--before", type=int, metavar="N", help="Older than this: the next page.")
@as_json
@placed
@click.pass_obj
def audit(
    place: Place,
    who: str | None,
    action: str | None,
    subject: str | None,
    tenant: str | None,
    limit: int,
    before: int | None,
    json: bool,
) -> None:
    """Show the audit log: who did what, newest first.

    Also what they were not let do.
    """
    query = AuditQuery(
        principal=who, action=action, subject=subject, tenant=tenant, before=before, limit=limit
    )
    found = run(_read(place, query))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no such entries", err=True)
    else:
        emit(_listing(found, time.time()))
        if len(found) == limit:
            echo(f"there may be more: --before {found[-1].n}", err=True)


async def _read(place: Place, query: AuditQuery) -> list[AuditEntry]:
    async with api_at(place) as api:
        return await api.audit.read(query)


def _listing(found: list[AuditEntry], now: float) -> Listing:
    from rich.text import Text

    listing = Listing(
        *("TIME", "WHO", "ACTION", "SUBJECT", "OUTCOME", "DETAIL"),
        flexible=("WHO", "SUBJECT", "DETAIL"),
    )
    for entry in found:
        listing.add(
            moment(entry.at, now),
            entry.principal,
            entry.action,
            entry.subject,
            Text(entry.outcome, "" if entry.outcome == "done" else "red"),
            entry.detail,
        )
    return listing
