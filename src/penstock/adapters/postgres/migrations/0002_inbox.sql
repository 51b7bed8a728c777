-- Jobs that were submitted with SQL, in the transaction of whoever submitted them. The engine takes
-- them from here: what is rolled back is never seen.
CREATE TABLE {schema}.inbox (
    n       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id  text NOT NULL,
    topic   text NOT NULL,
    tenant  text NOT NULL,
    input   bytea,
    options jsonb NOT NULL,
    by_user text NOT NULL DEFAULT session_user,
    problem text
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX inbox_waiting ON {schema}.inbox (n) WHERE problem IS NULL;

-- SELECT {schema}.submit('job.email.send', '{"to": "ann"}') answers the job's id.
-- `options` are fields of a JobRequest, as '{"timeout": 30, "labels": {"a": "b"}}'.
CREATE FUNCTION {schema}.submit(
    topic text, input jsonb DEFAULT NULL, job_id text DEFAULT NULL,
    tenant text DEFAULT 'default', options jsonb DEFAULT '{}'
) RETURNS text LANGUAGE sql AS $$
    SELECT pg_notify('{schema}_inbox', '');
    INSERT INTO {schema}.inbox (job_id, topic, tenant, input, options) VALUES (
        coalesce(job_id, 'sql-' || gen_random_uuid()), topic, tenant,
        convert_to(input::text, 'UTF8'), options
    ) RETURNING job_id;
$$;
