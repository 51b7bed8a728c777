-- Jobs, their append-only log, what they wrote, and small facts of the engine.
-- What stands in braces is filled in from penstock.lifecycles.canonical.
--
-- States and paths are small numbers that point into two tables of names: a check against
-- a list of words costs more than the write it guards. The views `jobs` and `history` show
-- the words. A path is what one move does: one step mostly, or several that happen at once.

CREATE TABLE state (
    code INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
) STRICT;
INSERT INTO state (code, name) VALUES {states};

CREATE TABLE path (
    code   INTEGER PRIMARY KEY,
    before TEXT,
    events TEXT NOT NULL,
    after  TEXT NOT NULL,
    UNIQUE (before, events)
) STRICT;

CREATE TABLE job (
    seq              INTEGER PRIMARY KEY,
    job_id           TEXT NOT NULL UNIQUE,
    topic            TEXT NOT NULL,
    tenant           TEXT NOT NULL,
    state            INTEGER NOT NULL CHECK (state BETWEEN 1 AND {last_state}),
    version          INTEGER NOT NULL CHECK (version >= 1),
    attempt          INTEGER NOT NULL CHECK (attempt >= 0),
    accepted_at      REAL NOT NULL,
    updated_at       REAL NOT NULL CHECK (updated_at >= accepted_at),
    worker_id        TEXT,
    pool             TEXT,
    dispatched_at    REAL,
    started_at       REAL,
    finished_at      REAL,
    cancel_requested INTEGER NOT NULL CHECK (cancel_requested IN (0, 1)),
    idempotency_key  TEXT,
    parent_job_id    TEXT,
    workflow_id      TEXT,
    step_index       INTEGER,
    successor        TEXT,
    input_blob       TEXT,
    result_blob      TEXT,
    request          BLOB NOT NULL,
    result           BLOB,
    CHECK ((finished_at IS NOT NULL) = (state >= {first_final})),
    CHECK (state NOT IN ({held}) OR attempt >= 1)
) STRICT;

-- Only what is open, so that a start costs what is open and not what was ever done.
CREATE INDEX job_unfinished ON job (seq) WHERE state < {first_final};
-- Endings that somebody may have to look at are rare: they can afford an index.
CREATE INDEX job_trouble ON job (state, seq) WHERE state > {succeeded};
CREATE UNIQUE INDEX job_key ON job (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX job_parent ON job (parent_job_id) WHERE parent_job_id IS NOT NULL;
CREATE INDEX job_workflow ON job (workflow_id, step_index) WHERE workflow_id IS NOT NULL;

CREATE TABLE journal (
    id        INTEGER PRIMARY KEY,
    job       INTEGER NOT NULL,
    n         INTEGER NOT NULL CHECK (n >= 1),
    path      INTEGER NOT NULL REFERENCES path (code),
    attempt   INTEGER NOT NULL,
    actor     TEXT NOT NULL,
    at        REAL NOT NULL,
    reason    TEXT NOT NULL,
    worker_id TEXT
) STRICT;

CREATE INDEX journal_job ON journal (job);

CREATE TRIGGER journal_append_only BEFORE UPDATE ON journal
BEGIN
    SELECT RAISE(ABORT, 'the log is append-only');
END;

CREATE TABLE log_line (
    job     INTEGER NOT NULL,
    n       INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    at      REAL NOT NULL,
    level   TEXT NOT NULL,
    text    TEXT NOT NULL,
    PRIMARY KEY (job, n)
) STRICT, WITHOUT ROWID;

CREATE TABLE fact (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE VIEW jobs AS
SELECT job.seq, job_id, topic, tenant, state.name AS state, version, attempt, worker_id, pool,
    datetime(accepted_at, 'unixepoch') AS accepted, datetime(finished_at, 'unixepoch') AS finished
FROM job JOIN state ON state.code = job.state;

CREATE VIEW history AS
SELECT job.job_id, n, path.before, path.events, path.after, journal.attempt, actor,
    datetime(at, 'unixepoch') AS at, reason, journal.worker_id
FROM journal JOIN path ON path.code = journal.path JOIN job ON job.seq = journal.job
ORDER BY journal.id;
