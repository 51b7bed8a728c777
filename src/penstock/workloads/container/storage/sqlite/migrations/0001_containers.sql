-- Container jobs of one worker.
-- What stands in braces is filled in from penstock.lifecycles.container and
-- penstock.core.containers, as one of several words: 'x = a OR x = b'.

CREATE TABLE job (
    seq           INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id        TEXT NOT NULL UNIQUE,
    state         TEXT NOT NULL CHECK ({state}),
    rank          INTEGER NOT NULL CHECK ({rank}),
    created_at    REAL NOT NULL,
    started_at    REAL,
    finished_at   REAL,
    exit_code     INTEGER,
    error_code    TEXT,
    error_message TEXT,
    error_field   TEXT,
    image         TEXT NOT NULL,
    image_id      TEXT NOT NULL,
    container     TEXT NOT NULL,
    engine        TEXT NOT NULL,
    memory_mb     REAL NOT NULL,
    cpus          REAL NOT NULL,
    key           TEXT NOT NULL,
    -- Bytes of the body.
    size          INTEGER NOT NULL CHECK (size >= 0),
    labels        TEXT,
    -- What is known only when it has ended.
    ending        TEXT,
    CHECK ((finished_at IS NOT NULL) = ({final})),
    CHECK (started_at IS NULL OR NOT ({initial})),
    CHECK (started_at IS NOT NULL OR NOT ({started})),
    CHECK ((error_code IS NULL) = (error_message IS NULL)),
    CHECK ((error_code IS NULL) = (error_field IS NULL))
) STRICT;

-- Each partial one is paid for only by the jobs that are in it.
CREATE INDEX job_queue ON job (rank, seq) WHERE {initial};
CREATE INDEX job_finished ON job (finished_at, seq) WHERE finished_at IS NOT NULL;
CREATE INDEX job_state ON job (state, seq);
CREATE INDEX job_image ON job (image, seq);
CREATE INDEX job_error ON job (error_code, seq) WHERE error_code IS NOT NULL;
CREATE UNIQUE INDEX job_key ON job (key) WHERE key <> '';

-- Apart, so that listing jobs does not read it, nor a move write it again.
CREATE TABLE body (
    seq  INTEGER PRIMARY KEY REFERENCES job ON DELETE CASCADE,
    body BLOB NOT NULL
) STRICT;

CREATE TABLE label (
    seq   INTEGER NOT NULL REFERENCES job ON DELETE CASCADE,
    name  TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (seq, name)
) STRICT, WITHOUT ROWID;

CREATE INDEX label_value ON label (name, value, seq);

CREATE TRIGGER job_begins BEFORE INSERT ON job WHEN NOT ({new_initial})
BEGIN SELECT RAISE(ABORT, 'a job does not begin in this state'); END;

CREATE TRIGGER job_moves BEFORE UPDATE OF state ON job
WHEN old.state <> new.state AND NOT ({moves})
BEGIN SELECT RAISE(ABORT, 'the lifecycle has no such move'); END;

CREATE TABLE tally (
    state TEXT PRIMARY KEY CHECK ({state}),
    count INTEGER NOT NULL CHECK (count >= 0)
) STRICT, WITHOUT ROWID;

INSERT INTO tally (state, count) VALUES {none};

CREATE TRIGGER job_added AFTER INSERT ON job
BEGIN UPDATE tally SET count = count + 1 WHERE state = new.state; END;

CREATE TRIGGER job_moved AFTER UPDATE OF state ON job WHEN old.state <> new.state
BEGIN
    UPDATE tally SET count = count - 1 WHERE state = old.state;
    UPDATE tally SET count = count + 1 WHERE state = new.state;
END;

CREATE TRIGGER job_removed AFTER DELETE ON job
BEGIN UPDATE tally SET count = count - 1 WHERE state = old.state; END;
