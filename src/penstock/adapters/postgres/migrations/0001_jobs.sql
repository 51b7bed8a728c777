-- Open jobs in a small hot table, ended jobs in partitions by number; docs/decisions has why.
-- What stands in braces is filled in: the schema, and the rules of the lifecycle.

CREATE TABLE {schema}.owner (
    shard  integer PRIMARY KEY,
    epoch  bigint NOT NULL,
    holder text NOT NULL,
    "until" timestamptz NOT NULL,
    address text NOT NULL
);

CREATE TABLE {schema}.mark (
    name  text PRIMARY KEY,
    value bigint NOT NULL
);

CREATE TYPE {schema}.job_row AS (
    seq             bigint,
    job_id          text,
    tenant          text,
    topic           text,
    state           smallint,
    accepted_at     float8,
    page            bigint,
    request         bytea,
    finished_at     float8,
    record          bytea,
    idempotency_key text,
    unique_key      text,
    parent_job_id   text,
    child_of        text,
    first_try       text,
    workflow_id     text,
    step_index      integer,
    schedule        text,
    input_blob      text,
    parked          smallint,
    successor       text,
    result_blob     text
);

-- What a move changes of a row.
CREATE TYPE {schema}.change_row AS (
    state       smallint,
    finished_at float8,
    record      bytea,
    parked      smallint,
    successor   text,
    result_blob text,
    seq         bigint
);

CREATE TABLE {schema}.job (
    seq             bigint PRIMARY KEY,
    job_id          text NOT NULL UNIQUE,
    tenant          text NOT NULL,
    topic           text NOT NULL,
    state           smallint NOT NULL CHECK (state > 0 AND state < {first_final}),
    accepted_at     float8 NOT NULL,
    page            bigint NOT NULL,
    request         bytea NOT NULL,
    finished_at     float8,
    record          bytea,
    idempotency_key text,
    unique_key      text,
    parent_job_id   text,
    child_of        text,
    first_try       text,
    workflow_id     text,
    step_index      integer,
    schedule        text,
    input_blob      text,
    parked          smallint,
    successor       text,
    result_blob     text
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

CREATE UNIQUE INDEX job_key ON {schema}.job (idempotency_key, tenant)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX job_unique ON {schema}.job (unique_key, tenant, seq) WHERE unique_key IS NOT NULL;
CREATE INDEX job_parent ON {schema}.job (parent_job_id, seq) WHERE parent_job_id IS NOT NULL;
CREATE INDEX job_child ON {schema}.job (child_of, seq) WHERE child_of IS NOT NULL;
CREATE INDEX job_try ON {schema}.job (first_try, seq) WHERE first_try IS NOT NULL;
CREATE INDEX job_workflow ON {schema}.job (workflow_id, step_index, seq)
    WHERE workflow_id IS NOT NULL;
CREATE INDEX job_schedule ON {schema}.job (schedule, seq) WHERE schedule IS NOT NULL;
CREATE INDEX job_parked ON {schema}.job (seq) WHERE parked IS NOT NULL;
CREATE INDEX job_input ON {schema}.job (input_blob text_pattern_ops) WHERE input_blob IS NOT NULL;

-- Ended jobs. A partition has a range of numbers, so pages in their order read few partitions, and
-- those whose jobs are all forgotten are dropped.
CREATE TABLE {schema}.done (
    seq             bigint NOT NULL,
    job_id          text NOT NULL,
    tenant          text NOT NULL,
    topic           text NOT NULL,
    state           smallint NOT NULL CHECK (state >= {first_final} AND state <= {last_state}),
    accepted_at     float8 NOT NULL,
    page            bigint NOT NULL,
    request         bytea NOT NULL,
    finished_at     float8 NOT NULL,
    record          bytea,
    idempotency_key text,
    unique_key      text,
    parent_job_id   text,
    child_of        text,
    first_try       text,
    workflow_id     text,
    step_index      integer,
    schedule        text,
    input_blob      text,
    parked          smallint,
    successor       text,
    result_blob     text,
    PRIMARY KEY (seq)
) PARTITION BY RANGE (seq);

CREATE INDEX done_id ON {schema}.done (job_id);
CREATE INDEX done_tenant ON {schema}.done (tenant, seq);
CREATE INDEX done_topic ON {schema}.done (topic, seq);
CREATE INDEX done_trouble ON {schema}.done (state, seq) WHERE state > {succeeded};
CREATE INDEX done_trouble_tenant ON {schema}.done (tenant, state, seq) WHERE state > {succeeded};
CREATE INDEX done_key ON {schema}.done (idempotency_key, tenant)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX done_unique ON {schema}.done (unique_key, tenant, seq) WHERE unique_key IS NOT NULL;
CREATE INDEX done_parent ON {schema}.done (parent_job_id, seq) WHERE parent_job_id IS NOT NULL;
CREATE INDEX done_child ON {schema}.done (child_of, seq) WHERE child_of IS NOT NULL;
CREATE INDEX done_try ON {schema}.done (first_try, seq) WHERE first_try IS NOT NULL;
CREATE INDEX done_workflow ON {schema}.done (workflow_id, step_index, seq)
    WHERE workflow_id IS NOT NULL;
CREATE INDEX done_schedule ON {schema}.done (schedule, seq) WHERE schedule IS NOT NULL;
CREATE INDEX done_input ON {schema}.done (input_blob text_pattern_ops)
    WHERE input_blob IS NOT NULL;
CREATE INDEX done_result ON {schema}.done (result_blob text_pattern_ops)
    WHERE result_blob IS NOT NULL;

CREATE VIEW {schema}.jobs AS
SELECT seq, job_id, tenant, topic, name AS state, to_timestamp(accepted_at) AS accepted,
    to_timestamp(finished_at) AS finished
FROM (
    SELECT seq, job_id, tenant, topic, state, accepted_at, finished_at FROM {schema}.job
    UNION ALL
    SELECT seq, job_id, tenant, topic, state, accepted_at, finished_at FROM {schema}.done
) AS every JOIN (VALUES {states}) AS known (code, name) ON code = state;

-- Strides as penstock.core.journal encodes them. Append-only.
CREATE TABLE {schema}.journal (
    page    bigint PRIMARY KEY,
    strides bytea NOT NULL
);

CREATE TYPE {schema}.step_row AS (
    job         bigint,
    name        text,
    n           bigint,
    outcome     text,
    input_blob  text,
    output_blob text,
    body        bytea
);

CREATE TABLE {schema}.step (
    job         bigint NOT NULL,
    name        text COLLATE "C" NOT NULL,
    n           bigint NOT NULL,
    outcome     text COLLATE "C" NOT NULL,
    input_blob  text,
    output_blob text,
    body        bytea NOT NULL,
    PRIMARY KEY (job, name, n)
);

CREATE INDEX step_input ON {schema}.step (input_blob text_pattern_ops)
    WHERE input_blob IS NOT NULL;
CREATE INDEX step_output ON {schema}.step (output_blob text_pattern_ops)
    WHERE output_blob IS NOT NULL;

CREATE TYPE {schema}.log_row AS (
    job_id  text,
    attempt integer,
    at      float8,
    level   text,
    text    bytea
);

CREATE TABLE {schema}.log_line (
    job     bigint NOT NULL,
    n       integer NOT NULL,
    attempt integer NOT NULL,
    at      float8 NOT NULL,
    level   text NOT NULL,
    text    bytea NOT NULL,
    PRIMARY KEY (job, n)
);

-- Counts of ended jobs. A commit adds rows and updates none: an updated row would grow a chain of
-- dead versions under a long transaction. `compact_counts` folds them.
CREATE TYPE {schema}.count_row AS (state smallint, tenant text, count bigint);

CREATE TABLE {schema}.tally (
    state  smallint NOT NULL,
    tenant text NOT NULL,
    count  bigint NOT NULL
);

CREATE TYPE {schema}.audit_row AS (
    principal text,
    action    text,
    subject   text,
    tenant    text,
    entry     bytea
);

-- What can be searched for is in columns; `entry` is the whole.
CREATE TABLE {schema}.audit (
    n         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    principal text NOT NULL,
    action    text COLLATE "C" NOT NULL,
    subject   text NOT NULL,
    tenant    text,
    entry     bytea NOT NULL
);

CREATE TYPE {schema}.fact_row AS (name text, value bytea);

CREATE TABLE {schema}.fact (
    name  text COLLATE "C" PRIMARY KEY,
    value bytea NOT NULL
);

CREATE FUNCTION {schema}.append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the log is append-only';
END $$;

CREATE TRIGGER journal_append_only BEFORE UPDATE ON {schema}.journal
    FOR EACH ROW EXECUTE FUNCTION {schema}.append_only();
CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE ON {schema}.audit
    FOR EACH ROW EXECUTE FUNCTION {schema}.append_only();

-- Raises PS001 unless this engine owns the store. The lock is held until the transaction ends, so
-- a takeover waits for the commits under way, and no later one of the old owner passes.
CREATE FUNCTION {schema}.check_owner(of_shard integer, of_epoch bigint, of_holder text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM {schema}.owner
    WHERE shard = of_shard AND epoch = of_epoch AND holder = of_holder FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'another engine owns the store now' USING ERRCODE = 'PS001';
    END IF;
END $$;

-- One commit in one statement, so that it needs one round trip and can't be left half-way.
CREATE FUNCTION {schema}.write_commit(
    of_shard integer, of_epoch bigint, of_holder text,
    pages bigint[], strides bytea[],
    accepted {schema}.job_row[], accepted_ended {schema}.job_row[],
    changed {schema}.change_row[], ended {schema}.change_row[],
    steps {schema}.step_row[], counts {schema}.count_row[],
    lines {schema}.log_row[], max_lines integer,
    audits {schema}.audit_row[], facts {schema}.fact_row[], replayed bigint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    moved bigint;
BEGIN
    PERFORM {schema}.check_owner(of_shard, of_epoch, of_holder);
    IF pages IS NOT NULL THEN
        INSERT INTO {schema}.journal (page, strides) SELECT * FROM unnest(pages, strides);
    END IF;
    IF accepted IS NOT NULL THEN
        INSERT INTO {schema}.job SELECT * FROM unnest(accepted);
    END IF;
    IF changed IS NOT NULL THEN
        UPDATE {schema}.job AS old SET state = new.state, record = new.record,
            parked = new.parked, successor = new.successor, result_blob = new.result_blob
        FROM unnest(changed) AS new WHERE old.seq = new.seq;
    END IF;
    IF accepted_ended IS NOT NULL THEN
        INSERT INTO {schema}.done SELECT * FROM unnest(accepted_ended);
    END IF;
    IF ended IS NOT NULL THEN
        WITH old AS (
            DELETE FROM {schema}.job WHERE seq IN (SELECT seq FROM unnest(ended)) RETURNING *
        )
        INSERT INTO {schema}.done SELECT
            old.seq, old.job_id, old.tenant, old.topic, new.state, old.accepted_at,
            old.page, old.request, new.finished_at, new.record, old.idempotency_key,
            old.unique_key, old.parent_job_id, old.child_of, old.first_try,
            old.workflow_id, old.step_index, old.schedule, old.input_blob,
            new.parked, new.successor, new.result_blob
        FROM old JOIN unnest(ended) AS new ON new.seq = old.seq;
        GET DIAGNOSTICS moved = ROW_COUNT;
        IF moved < cardinality(ended) THEN -- some had ended before, and are only noted on
            UPDATE {schema}.done AS old SET state = new.state, record = new.record,
                successor = new.successor, result_blob = new.result_blob
            FROM unnest(ended) AS new WHERE old.seq = new.seq;
        END IF;
    END IF;
    IF steps IS NOT NULL THEN
        INSERT INTO {schema}.step SELECT * FROM unnest(steps)
        ON CONFLICT (job, name, n) DO UPDATE SET outcome = excluded.outcome,
            input_blob = excluded.input_blob, output_blob = excluded.output_blob,
            body = excluded.body;
    END IF;
    IF counts IS NOT NULL THEN
        INSERT INTO {schema}.tally SELECT * FROM unnest(counts);
    END IF;
    IF lines IS NOT NULL THEN
        INSERT INTO {schema}.log_line
        SELECT seq, at_n, attempt, at, CASE WHEN at_n < max_lines THEN level ELSE 'warning' END,
            CASE WHEN at_n < max_lines THEN text
            ELSE convert_to('cut off: a job may write ' || max_lines || ' lines', 'UTF8') END
        FROM (
            SELECT known.seq, new.*, row_number() OVER (PARTITION BY known.seq ORDER BY place)
                + (SELECT coalesce(max(n), 0) FROM {schema}.log_line WHERE job = known.seq) AS at_n
            FROM unnest(lines) WITH ORDINALITY AS new (job_id, attempt, at, level, text, place)
            JOIN (
                SELECT seq, job_id FROM {schema}.job
                WHERE job_id IN (SELECT job_id FROM unnest(lines))
                UNION ALL
                SELECT seq, job_id FROM {schema}.done
                WHERE job_id IN (SELECT job_id FROM unnest(lines))
            ) AS known USING (job_id)
        ) AS numbered WHERE at_n <= max_lines;
    END IF;
    IF audits IS NOT NULL THEN
        INSERT INTO {schema}.audit (principal, action, subject, tenant, entry)
        SELECT * FROM unnest(audits);
    END IF;
    IF facts IS NOT NULL THEN
        DELETE FROM {schema}.fact WHERE name IN (
            SELECT name FROM unnest(facts) WHERE value IS NULL
        );
        INSERT INTO {schema}.fact SELECT * FROM unnest(facts) AS new WHERE new.value IS NOT NULL
        ON CONFLICT (name) DO UPDATE SET value = excluded.value;
    END IF;
    IF replayed IS NOT NULL THEN
        INSERT INTO {schema}.mark VALUES ('replayed', replayed)
        ON CONFLICT (name) DO UPDATE SET value = excluded.value;
    END IF;
END $$;

CREATE FUNCTION {schema}.compact_counts(of_shard integer, of_epoch bigint, of_holder text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM {schema}.check_owner(of_shard, of_epoch, of_holder);
    WITH old AS (DELETE FROM {schema}.tally RETURNING *)
    INSERT INTO {schema}.tally
    SELECT state, tenant, sum(count) FROM old GROUP BY state, tenant HAVING sum(count) <> 0;
END $$;

-- Forgets these ended jobs with all that belongs to them. Of the steps it removes `max_steps` at
-- most; jobs with steps left stay. Answers one row a job that is gone, and the numbers of steps
-- and of lines in a last row without a tenant.
CREATE FUNCTION {schema}.prune(
    of_shard integer, of_epoch bigint, of_holder text, seqs bigint[], max_steps integer
) RETURNS TABLE (tenant text, state smallint, successor text, record bytea, steps bigint,
    lines bigint) LANGUAGE plpgsql AS $$
DECLARE
    gone bigint[];
    removed bigint;
    removed_lines bigint;
BEGIN
    PERFORM {schema}.check_owner(of_shard, of_epoch, of_holder);
    INSERT INTO {schema}.mark
    SELECT * FROM {schema}.highest()
    ON CONFLICT ON CONSTRAINT mark_pkey DO UPDATE SET value = excluded.value;
    DELETE FROM {schema}.step AS old USING (
        SELECT s.job, s.name, s.n FROM {schema}.step AS s WHERE s.job = ANY (seqs)
        ORDER BY s.job, s.name, s.n LIMIT max_steps
    ) AS few WHERE old.job = few.job AND old.name = few.name AND old.n = few.n;
    GET DIAGNOSTICS removed = ROW_COUNT;
    SELECT array_agg(seq) INTO gone FROM unnest(seqs) AS seq
    WHERE removed < max_steps OR NOT EXISTS (SELECT 1 FROM {schema}.step WHERE job = seq);
    DELETE FROM {schema}.log_line WHERE job = ANY (gone);
    GET DIAGNOSTICS removed_lines = ROW_COUNT;
    RETURN QUERY DELETE FROM {schema}.done AS old WHERE old.seq = ANY (gone)
        RETURNING old.tenant, old.state, old.successor, old.record, 0::bigint, 0::bigint;
    DELETE FROM {schema}.journal WHERE page < coalesce(
        (SELECT least(
            (SELECT page FROM {schema}.job ORDER BY seq LIMIT 1),
            (SELECT page FROM {schema}.done ORDER BY seq LIMIT 1)
        )),
        (SELECT value + 1 FROM {schema}.mark WHERE name = 'page')
    );
    RETURN QUERY SELECT NULL, 0::smallint, NULL, NULL::bytea, removed, removed_lines;
END $$;

-- The highest numbers ever given, though what had them may be forgotten.
CREATE FUNCTION {schema}.highest() RETURNS TABLE (name text, value bigint) LANGUAGE sql AS $$
    SELECT 'seq', greatest(
        (SELECT max(seq) FROM {schema}.job), (SELECT max(seq) FROM {schema}.done),
        (SELECT value FROM {schema}.mark WHERE mark.name = 'seq'), 0
    )
    UNION ALL
    SELECT 'page', greatest(
        (SELECT max(page) FROM {schema}.journal),
        (SELECT value FROM {schema}.mark WHERE mark.name = 'page'), 0
    )
$$;
