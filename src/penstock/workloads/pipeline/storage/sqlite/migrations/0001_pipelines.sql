-- Runs of pipelines, their stages, items and events; breakers; what can be started.
-- What stands in braces is filled in from penstock.lifecycles.pipeline and penstock.core.stages,
-- as one of several words: 'x = a OR x = b', because IN makes a table for every row it checks.

CREATE TABLE run (
    run              INTEGER PRIMARY KEY AUTOINCREMENT,
    id               TEXT NOT NULL UNIQUE,
    status           TEXT NOT NULL CHECK ({status}),
    fence            INTEGER NOT NULL CHECK (fence >= 0),
    version          INTEGER NOT NULL CHECK (version >= 1),
    cancel_requested INTEGER NOT NULL CHECK (cancel_requested IN (0, 1)),
    cancel_effective INTEGER CHECK (cancel_effective IN (0, 1)),
    current_stage    TEXT,
    started_at       REAL,
    finished_at      REAL,
    lease_until      REAL,
    progress_at      REAL,
    owner            TEXT NOT NULL,
    resumes          INTEGER NOT NULL CHECK (resumes >= 0),
    created_at       REAL NOT NULL,
    pipeline         TEXT NOT NULL,
    tenant           TEXT NOT NULL,
    trace_id         TEXT NOT NULL,
    fingerprint      TEXT NOT NULL,
    retry_of         TEXT,
    trigger          TEXT NOT NULL,
    -- NULL where it is long: then it is in `config`, so that a move does not write it again.
    config           TEXT,
    errors           TEXT,
    alerts           TEXT,
    abandoned_items  TEXT,
    summary          TEXT,
    CHECK ((finished_at IS NOT NULL) = ({final}))
) STRICT;

CREATE INDEX run_created ON run (created_at, id);
CREATE INDEX run_pipeline ON run (pipeline, created_at, id);
CREATE INDEX run_tenant ON run (tenant, created_at, id);
-- Each of these is paid for only by the runs that are in it.
CREATE INDEX run_open ON run (pipeline, tenant) WHERE finished_at IS NULL;
CREATE INDEX run_trouble ON run (created_at, id) WHERE {trouble};
CREATE INDEX run_retry ON run (retry_of, created_at, id) WHERE retry_of IS NOT NULL;

CREATE TABLE config (
    run    INTEGER PRIMARY KEY,
    config TEXT NOT NULL
) STRICT;

CREATE TABLE stage (
    run    INTEGER NOT NULL,
    name   TEXT NOT NULL,
    place  INTEGER NOT NULL,
    status TEXT NOT NULL CHECK ({stage_status}),
    record TEXT NOT NULL,
    PRIMARY KEY (run, name)
) STRICT, WITHOUT ROWID;

-- All items of one stage of one run; it has a number, never given twice.
CREATE TABLE lot (
    lot   INTEGER PRIMARY KEY AUTOINCREMENT,
    run   INTEGER NOT NULL,
    stage TEXT NOT NULL,
    UNIQUE (run, stage)
) STRICT;

-- `place` is the number of the lot in its upper half and `seq` in its lower, so that a stage
-- lies in one piece and in order. What can be long comes last: counting does not read it.
CREATE TABLE item (
    place       INTEGER PRIMARY KEY,
    lot         INTEGER NOT NULL CHECK (place >> 32 = lot),
    outcome     TEXT NOT NULL CHECK ({outcome}),
    fan         INTEGER NOT NULL CHECK (fan >= 0),
    attempts    INTEGER NOT NULL CHECK (attempts >= 0),
    reused      INTEGER NOT NULL,
    duration_ms REAL NOT NULL,
    finished_at REAL,
    error_class TEXT,
    error_code  TEXT NOT NULL,
    key         TEXT NOT NULL,
    error       TEXT NOT NULL,
    input       TEXT NOT NULL,
    output      TEXT NOT NULL,
    UNIQUE (lot, key)
) STRICT;

-- Rare outcomes can afford an index; so can what is too large for its row.
CREATE INDEX item_trouble ON item (place) WHERE {troubled_item};
CREATE INDEX item_input ON item (input) WHERE input >= 'blob:' AND input < 'blob;';
CREATE INDEX item_output ON item (output) WHERE output >= 'blob:' AND output < 'blob;';

-- The newest is never removed, so that no number is given twice.
CREATE TABLE event (
    id   INTEGER PRIMARY KEY,
    run  INTEGER NOT NULL,
    at   REAL NOT NULL,
    kind TEXT NOT NULL CHECK ({event_kind}),
    data TEXT NOT NULL
) STRICT;

CREATE INDEX event_run ON event (run);

-- Runs that are forgotten already, whose items and events are still being removed.
CREATE TABLE doomed (
    run INTEGER PRIMARY KEY
) STRICT;

CREATE TABLE breaker (
    name    TEXT PRIMARY KEY,
    version INTEGER NOT NULL CHECK (version >= 0),
    record  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE declared (
    name TEXT PRIMARY KEY,
    info TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE fact (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT, WITHOUT ROWID;
