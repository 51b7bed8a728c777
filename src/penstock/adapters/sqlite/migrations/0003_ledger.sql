-- The ledger: slim rows, a journal of pages, late lists. docs/decisions/0027-ledger-layout.md
-- says which question each index answers.
-- What stands in braces is filled in from penstock.lifecycles.canonical.
-- penstock.adapters.sqlite.schema copies what is in old_job and old_journal, and drops them.

DROP VIEW jobs;
DROP VIEW history;
DROP TRIGGER journal_append_only;
DROP INDEX job_state;
DROP INDEX job_topic;
DROP INDEX job_key;
DROP INDEX job_parent;
DROP INDEX job_workflow;
DROP INDEX job_dead;
DROP INDEX job_parked;
DROP INDEX job_schedule;
DROP INDEX job_unique;
DROP INDEX job_unique_open;
DROP INDEX job_input;
DROP INDEX job_result;
DROP INDEX journal_job;
ALTER TABLE job RENAME TO old_job;
ALTER TABLE journal RENAME TO old_journal;

CREATE TABLE job (
    seq             INTEGER PRIMARY KEY,
    job_id          TEXT NOT NULL UNIQUE,
    tenant          TEXT NOT NULL,
    topic           TEXT NOT NULL,
    state           INTEGER NOT NULL,
    accepted_at     REAL NOT NULL,
    finished_at     REAL,
    page            INTEGER NOT NULL,
    -- NULL in most jobs, and there only to be looked for:
    idempotency_key TEXT,
    unique_key      TEXT,
    parent_job_id   TEXT,
    workflow_id     TEXT,
    step_index      INTEGER,
    schedule        TEXT,
    parked          INTEGER,
    successor       TEXT,
    input_blob      TEXT,
    result_blob     TEXT,
    request         BLOB NOT NULL,
    record          BLOB
) STRICT;

CREATE INDEX job_open ON job (seq) WHERE state < {first_final};
CREATE INDEX job_trouble ON job (state, successor IS NULL) WHERE state > {succeeded};
CREATE INDEX job_trouble_tenant ON job (tenant, state, successor IS NULL)
    WHERE state > {succeeded};
CREATE UNIQUE INDEX job_key ON job (idempotency_key, tenant) WHERE idempotency_key IS NOT NULL;
CREATE INDEX job_unique ON job (unique_key, tenant) WHERE unique_key IS NOT NULL;
CREATE INDEX job_parent ON job (parent_job_id) WHERE parent_job_id IS NOT NULL;
CREATE INDEX job_workflow ON job (workflow_id, step_index) WHERE workflow_id IS NOT NULL;
CREATE INDEX job_schedule ON job (schedule) WHERE schedule IS NOT NULL;
CREATE INDEX job_parked ON job (seq) WHERE parked IS NOT NULL;
CREATE INDEX job_input ON job (input_blob, tenant) WHERE input_blob IS NOT NULL;
CREATE INDEX job_result ON job (result_blob, tenant) WHERE result_blob IS NOT NULL;

-- Late lists: jobs up to the mark 'listed', filled a few thousand at a time.
CREATE TABLE job_by_tenant (
    tenant TEXT NOT NULL,
    seq    INTEGER NOT NULL,
    PRIMARY KEY (tenant, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE job_by_topic (
    topic TEXT NOT NULL,
    seq   INTEGER NOT NULL,
    PRIMARY KEY (topic, seq)
) STRICT, WITHOUT ROWID;

-- Strides as penstock.core.journal encodes them.
CREATE TABLE journal (
    page    INTEGER PRIMARY KEY,
    strides BLOB NOT NULL
) STRICT;

CREATE TRIGGER journal_append_only BEFORE UPDATE ON journal
BEGIN
    SELECT RAISE(ABORT, 'the log is append-only');
END;

-- Checkpointed rows of a job.
CREATE TABLE step (
    job         INTEGER NOT NULL,
    name        TEXT NOT NULL,
    n           INTEGER NOT NULL,
    outcome     TEXT NOT NULL,
    input_blob  TEXT,
    output_blob TEXT,
    body        BLOB NOT NULL,
    PRIMARY KEY (job, name, n)
) STRICT, WITHOUT ROWID;

CREATE INDEX step_input ON step (input_blob) WHERE input_blob IS NOT NULL;
CREATE INDEX step_output ON step (output_blob) WHERE output_blob IS NOT NULL;

-- Counts of ended jobs only: open ones are counted in memory.
DELETE FROM tally WHERE state < {first_final};

CREATE VIEW jobs AS
SELECT job.seq, job_id, topic, tenant, state.name AS state,
    datetime(accepted_at, 'unixepoch') AS accepted, datetime(finished_at, 'unixepoch') AS finished
FROM job JOIN state ON state.code = job.state;
