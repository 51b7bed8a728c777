"""`penstock audit`: the audit log."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from penstock.cli.engine import EngineRef
from penstock.cli.formats import Whole, moment
from penstock.cli.groups import command
from penstock.cli.options import before, limited, options
from penstock.cli.output import Form, Row, print_list, styled
from penstock.ports.store import AuditEntry, AuditQuery


@command()
@options(
    """
    --who NAME as principal  By this principal.
    --action GLOB            Such as job.cancel or key.*.
    --subject JOB|NAME       With this subject.
    --tenant TENANT          By keys of this tenant.
    """
)
@limited(50)
@before
def audit(engine: EngineRef, /, form: Form, **said: Any) -> None:
    """Show the audit log: who did what, newest first.

    Includes refused actions.
    """
    query = AuditQuery(**said)
    found = engine.ask(lambda api: api.audit.read(query))
    more = f"--before {found[-1].n}" if len(found) == query.limit else ""
    row = partial(audit_row, now=time.time())
    print_list(form, found, row, empty="no such entries", name=lambda one: one.subject, more=more)


def audit_row(entry: AuditEntry, now: float) -> Row:
    return {
        "TIME": moment(entry.at, now),
        "WHO": entry.principal,
        "ACTION": Whole(entry.action),
        "SUBJECT": entry.subject,
        "OUTCOME": styled("" if entry.outcome == "done" else "refused", entry.outcome),
        "DETAIL": entry.detail,
    }
