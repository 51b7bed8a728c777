-- name: acquire
INSERT INTO {schema}.owner AS old (shard, epoch, holder, "until", address)
VALUES ($1, 1, $2, clock_timestamp() + make_interval(secs => $3), $4)
ON CONFLICT (shard) DO UPDATE SET epoch = old.epoch + 1, holder = excluded.holder,
    "until" = excluded."until", address = excluded.address
WHERE old."until" < clock_timestamp() OR starts_with(old.holder, $5::text)
RETURNING epoch;

-- name: holder
SELECT coalesce(nullif(address, ''), regexp_replace(holder, '^.* |:[^:]*$', '', 'g'))
FROM {schema}.owner WHERE shard = $1;

-- name: owner
SELECT holder, epoch, "until" > clock_timestamp() AS owns, "until" = '-infinity' AS released
FROM {schema}.owner WHERE shard = $1;

-- name: renew_entry
INSERT INTO {schema}.engine VALUES ($1, $2, $3, $4, $5, $6, $7, clock_timestamp())
ON CONFLICT (holder) DO UPDATE SET links = excluded.links, http = excluded.http,
    seen = excluded.seen;

-- name: remove_entry
DELETE FROM {schema}.engine
WHERE holder = $1 OR seen < clock_timestamp() - interval '1 hour';

-- name: engines
SELECT holder, name, machine, links, http, token, version, extract(epoch FROM seen)::float8
FROM {schema}.engine
WHERE seen > clock_timestamp() - interval '10 seconds' ORDER BY holder;

-- name: renew
UPDATE {schema}.owner SET "until" = clock_timestamp() + make_interval(secs => $4)
WHERE shard = $1 AND epoch = $2 AND holder = $3 RETURNING epoch;

-- name: release
UPDATE {schema}.owner SET "until" = '-infinity' WHERE shard = $1 AND epoch = $2 AND holder = $3;

-- name: fence
UPDATE {schema}.owner SET epoch = epoch + 1 WHERE shard = $1 AND holder = $2 RETURNING epoch;

-- name: write_commit
SELECT {schema}.write_commit($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16);

-- name: compact_counts
SELECT {schema}.compact_counts($1, $2, $3);

-- name: count_up
INSERT INTO {schema}.tally SELECT * FROM unnest($1::{schema}.count_row[]);

-- name: has_page
SELECT EXISTS (SELECT 1 FROM {schema}.journal WHERE page = $1);

-- name: highest
SELECT name, value FROM {schema}.highest();

-- name: replayed
SELECT coalesce((SELECT value FROM {schema}.mark WHERE name = 'replayed'), 0);

-- name: open_jobs
SELECT {job} FROM {schema}.job ORDER BY seq;

-- name: jobs_by_id
SELECT {job} FROM {schema}.job WHERE job_id = ANY ($1::text[])
UNION ALL
SELECT {job} FROM {schema}.done WHERE job_id = ANY ($1::text[]);

-- name: jobs_by_seq
SELECT {job} FROM {schema}.job WHERE seq = ANY ($1::bigint[])
UNION ALL
SELECT {job} FROM {schema}.done WHERE seq = ANY ($1::bigint[]);

-- name: jobs_by_key
SELECT {job} FROM unnest($1::text[], $2::text[]) AS asked (of_tenant, key)
CROSS JOIN LATERAL (
    SELECT * FROM {schema}.job WHERE tenant = of_tenant AND idempotency_key = key
    UNION ALL
    SELECT * FROM {schema}.done WHERE tenant = of_tenant AND idempotency_key = key
) AS found;

-- name: jobs_by_unique
SELECT {job} FROM unnest($1::text[], $2::text[]) AS asked (of_tenant, key)
CROSS JOIN LATERAL (
    SELECT * FROM (
        SELECT * FROM {schema}.job WHERE tenant = of_tenant AND unique_key = key
        UNION ALL
        SELECT * FROM {schema}.done WHERE tenant = of_tenant AND unique_key = key
    ) AS every ORDER BY seq DESC LIMIT 1
) AS found;

-- name: names
SELECT seq, job_id, tenant, topic FROM {schema}.job WHERE seq = ANY ($1::bigint[])
UNION ALL
SELECT seq, job_id, tenant, topic FROM {schema}.done WHERE seq = ANY ($1::bigint[]);

-- name: page
SELECT strides FROM {schema}.journal WHERE page = $1;

-- name: pages
SELECT page, strides FROM {schema}.journal WHERE page = ANY ($1::bigint[]) ORDER BY page;

-- name: pages_after
SELECT page, strides FROM {schema}.journal WHERE page > $1 ORDER BY page;

-- name: some_pages_after
SELECT page, strides FROM {schema}.journal WHERE page > $1 ORDER BY page LIMIT 50;

-- name: followed
SELECT coalesce((SELECT value FROM {schema}.mark WHERE name = 'replayed'), 0),
    coalesce((SELECT epoch FROM {schema}.owner WHERE shard = 0), 0);

-- name: open_by_seq
SELECT {job} FROM {schema}.job WHERE seq = ANY ($1::bigint[]);

-- name: count_open
SELECT tenant, topic, state, count(*) FROM {schema}.job
WHERE seq <> ALL ($1::bigint[]) GROUP BY tenant, topic, state;

-- name: counts
SELECT tenant, state, sum(count)::bigint FROM {schema}.tally
GROUP BY tenant, state HAVING sum(count) <> 0;

-- name: count_jobs
SELECT tenant, CASE WHEN successor IS NULL THEN state ELSE 0 END, count(*)
FROM {schema}.done GROUP BY 1, 2;

-- name: read_log
SELECT attempt, at, level, text, n FROM {schema}.log_line
WHERE job = (
    SELECT seq FROM {schema}.job WHERE job_id = $1
    UNION ALL
    SELECT seq FROM {schema}.done WHERE job_id = $1
    LIMIT 1
) AND n > $2 ORDER BY n LIMIT $3;

-- name: read_steps
SELECT body FROM {schema}.step
WHERE job = (
    SELECT seq FROM {schema}.job WHERE job_id = $1
    UNION ALL
    SELECT seq FROM {schema}.done WHERE job_id = $1
    LIMIT 1
) AND ($2::text IS NULL OR name = $2) AND (name, n) > ($3::text COLLATE "C", $4::bigint)
AND ($5::text[] IS NULL OR outcome = ANY ($5))
ORDER BY name, n LIMIT $6;

-- name: count_steps
SELECT name, outcome, count(*), sum(length(body))::bigint FROM {schema}.step
WHERE job = (
    SELECT seq FROM {schema}.job WHERE job_id = $1
    UNION ALL
    SELECT seq FROM {schema}.done WHERE job_id = $1
    LIMIT 1
) GROUP BY name, outcome ORDER BY name, outcome;

-- name: count_children
SELECT state, count(*) FROM (
    SELECT seq, state, tenant, successor FROM {schema}.job WHERE child_of = $1
    UNION ALL
    SELECT seq, state, tenant, successor FROM {schema}.done WHERE child_of = $1
) AS child
WHERE successor IS NULL AND ($2::text IS NULL OR tenant = $2) AND seq <> ALL ($3::bigint[])
GROUP BY state;

-- name: facts
SELECT name, value FROM {schema}.fact WHERE starts_with(name, $1) ORDER BY name;

-- name: pointers
SELECT input_blob FROM {schema}.job WHERE input_blob IS NOT NULL
UNION
SELECT input_blob FROM {schema}.done WHERE input_blob IS NOT NULL
UNION
SELECT result_blob FROM {schema}.done WHERE result_blob IS NOT NULL
UNION
SELECT input_blob FROM {schema}.step WHERE input_blob IS NOT NULL
UNION
SELECT output_blob FROM {schema}.step WHERE output_blob IS NOT NULL;

-- name: refers
-- A blob is the same under each of its media types; "<" follows ";".
SELECT EXISTS (
    SELECT 1 FROM {schema}.job
    WHERE input_blob ~>=~ $2 AND input_blob ~<~ ($2 || '<') AND tenant = $1
) OR EXISTS (
    SELECT 1 FROM {schema}.done
    WHERE input_blob ~>=~ $2 AND input_blob ~<~ ($2 || '<') AND tenant = $1
) OR EXISTS (
    SELECT 1 FROM {schema}.done
    WHERE result_blob ~>=~ $2 AND result_blob ~<~ ($2 || '<') AND tenant = $1
) OR EXISTS (
    SELECT 1 FROM {schema}.step
    WHERE (input_blob ~>=~ $2 AND input_blob ~<~ ($2 || '<')
        OR output_blob ~>=~ $2 AND output_blob ~<~ ($2 || '<'))
    AND EXISTS (
        SELECT 1 FROM {schema}.job WHERE seq = job AND tenant = $1
        UNION ALL
        SELECT 1 FROM {schema}.done WHERE seq = job AND tenant = $1
    )
);

-- name: oldest
SELECT * FROM (
    (SELECT seq, job_id, successor, finished_at, accepted_at FROM {schema}.job
    WHERE seq > $1 ORDER BY seq LIMIT $2)
    UNION ALL
    (SELECT seq, job_id, successor, finished_at, accepted_at FROM {schema}.done
    WHERE seq > $1 ORDER BY seq LIMIT $2)
) AS every ORDER BY seq LIMIT $2;

-- name: prune
SELECT tenant, state, successor, record, steps, lines
FROM {schema}.prune($1, $2, $3, $4::bigint[], $5);
