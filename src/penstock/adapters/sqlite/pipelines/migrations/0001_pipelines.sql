-- Runs of pipelines, their stages, items and events; breakers; what can be started.
-- What stands in braces is filled in from penstock.lifecycles.pipeline and penstock.core.stages.

CREATE TABLE run (
    run              INTEGER PRIMARY KEY AUTOINCREMENT,
    id               TEXT NOT NULL UNIQUE,
    status           TEXT NOT NULL CHECK (status IN ({statuses})),
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
    CHECK ((finished_at IS NOT NULL) = (status IN ({final})))
) STRICT;

CREATE INDEX run_created ON run (created_at, id);
CREATE INDEX run_pipeline ON run (pipeline, created_at, id);
CREATE INDEX run_tenant ON run (tenant, created_at, id);
-- Each of these is paid for only by the runs that are in it.
CREATE INDEX run_open ON run (pipeline, tenant) WHERE finished_at IS NULL;
CREATE INDEX run_trouble ON run (created_at, id) WHERE status IN ({trouble});
CREATE INDEX run_retry ON run (retry_of, created_at, id) WHERE retry_of IS NOT NULL;

CREATE TABLE config (
    run    INTEGER PRIMARY KEY,
    config TEXT NOT NULL
) STRICT;

CREATE TABLE stage (
    run    INTEGER NOT NULL,
    name   TEXT NOT NULL,
    place  INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ({stage_statuses})),
    record TEXT NOT NULL,
    PRIMARY KEY (run, name)
) STRICT, WITHOUT ROWID;

-- In the order of its stage. What can be long comes last, so that counting does not read it.
CREATE TABLE item (
    run         INTEGER NOT NULL,
    stage       TEXT NOT NULL,
    seq         INTEGER NOT NULL CHECK (seq >= 0),
    outcome     TEXT NOT NULL CHECK (outcome IN ({outcomes})),
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
    PRIMARY KEY (run, stage, seq),
    UNIQUE (run, stage, key)
) STRICT, WITHOUT ROWID;

-- Rare outcomes can afford an index; so can what is too large for its row.
CREATE INDEX item_trouble ON item (run, stage, seq) WHERE outcome IN ({troubled_items});
CREATE INDEX item_input ON item (input) WHERE input >= 'blob:' AND input < 'blob;';
CREATE INDEX item_output ON item (output) WHERE output >= 'blob:' AND output < 'blob;';

CREATE TABLE event (
    id   INTEGER PRIMARY KEY AUTOINCREMENT,
    run  INTEGER NOT NULL,
    at   REAL NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ({event_kinds})),
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
