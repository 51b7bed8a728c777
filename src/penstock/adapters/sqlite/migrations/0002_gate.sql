-- The gate: verdicts, holds, unique keys, schedules, who asked; counters and an audit log.
-- What stands in braces is filled in from penstock.lifecycles.canonical.

-- NULL but for jobs that passed a rule, so that others pay next to nothing.
ALTER TABLE job ADD COLUMN verdict BLOB;
ALTER TABLE job ADD COLUMN hold BLOB;
-- 1 while it waits for people's approval.
ALTER TABLE job ADD COLUMN parked INTEGER CHECK (parked IS NULL OR state = {scheduled});
ALTER TABLE job ADD COLUMN unique_key TEXT;
ALTER TABLE job ADD COLUMN principal TEXT;
ALTER TABLE job ADD COLUMN schedule TEXT;

-- One index on the state for all: what is open, what is in trouble, one tenant's or all.
DROP INDEX job_unfinished;
DROP INDEX job_trouble;
CREATE INDEX job_state ON job (state, tenant);
CREATE INDEX job_topic ON job (topic, tenant);
-- Each of these is paid for only by the jobs that are in it.
CREATE INDEX job_dead ON job (tenant) WHERE state IN ({dead}) AND successor IS NULL;
CREATE INDEX job_parked ON job (tenant) WHERE parked IS NOT NULL;
CREATE INDEX job_schedule ON job (schedule, tenant) WHERE schedule IS NOT NULL;
CREATE INDEX job_unique ON job (tenant, unique_key) WHERE unique_key IS NOT NULL;
CREATE INDEX job_unique_open ON job (tenant, unique_key)
    WHERE unique_key IS NOT NULL AND state < {first_final};
CREATE INDEX job_input ON job (input_blob, tenant) WHERE input_blob IS NOT NULL;
CREATE INDEX job_result ON job (result_blob, tenant) WHERE result_blob IS NOT NULL;

-- How many jobs there are, changed in the commit that changes them.
CREATE TABLE tally (
    state  INTEGER NOT NULL REFERENCES state (code),
    tenant TEXT NOT NULL,
    count  INTEGER NOT NULL,
    PRIMARY KEY (state, tenant)
) STRICT, WITHOUT ROWID;
INSERT INTO tally (state, tenant, count) SELECT state, tenant, count(*) FROM job GROUP BY 1, 2;

-- The highest number ever given, kept when what had it is pruned: none is given twice.
CREATE TABLE mark (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE audit (
    n         INTEGER PRIMARY KEY AUTOINCREMENT,
    at        REAL NOT NULL,
    principal TEXT NOT NULL,
    action    TEXT NOT NULL,
    subject   TEXT NOT NULL,
    tenant    TEXT,
    detail    TEXT NOT NULL,
    outcome   TEXT NOT NULL
) STRICT;

CREATE TRIGGER audit_append_only BEFORE UPDATE ON audit
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;

CREATE TRIGGER audit_kept BEFORE DELETE ON audit
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;
