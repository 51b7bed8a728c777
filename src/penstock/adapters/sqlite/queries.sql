-- name: insert_plain
INSERT INTO job (seq, job_id, tenant, topic, state, accepted_at, page, request)
VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_full
INSERT INTO job (
    seq, job_id, tenant, topic, state, accepted_at, page, request, finished_at, record,
    idempotency_key, unique_key, parent_job_id, child_of, first_try, workflow_id, step_index,
    schedule, input_blob, parked, successor, result_blob
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: update_plain
UPDATE job SET state = ?, finished_at = ?, record = ? WHERE seq = ?;

-- name: update_full
UPDATE job SET state = ?, finished_at = ?, record = ?, parked = ?, successor = ?, result_blob = ?
WHERE seq = ?;

-- name: append_journal
INSERT INTO journal (page, strides) VALUES (?, ?);

-- name: write_step
INSERT OR REPLACE INTO step (job, name, n, outcome, input_blob, output_blob, body)
VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: count_up
INSERT INTO tally (state, tenant, count) VALUES (?, ?, ?)
ON CONFLICT (state, tenant) DO UPDATE SET count = count + excluded.count;

-- name: tidy_counts
DELETE FROM tally WHERE count = 0;

-- name: list_tenants
INSERT INTO job_by_tenant (tenant, seq)
SELECT tenant, seq FROM job WHERE seq > ?1 AND seq <= ?2 ORDER BY tenant, seq;

-- name: list_topics
INSERT INTO job_by_topic (topic, seq)
SELECT topic, seq FROM job WHERE seq > ?1 AND seq <= ?2 ORDER BY topic, seq;

-- name: append_log
INSERT INTO log_line (job, n, attempt, at, level, text) VALUES (?, ?, ?, ?, ?, ?);

-- name: last_line
SELECT seq, (SELECT ifnull(max(n), 0) FROM log_line WHERE job = seq) FROM job WHERE job_id = ?;

-- name: append_audit
INSERT INTO audit (at, principal, action, subject, tenant, detail, outcome)
VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: remember
INSERT INTO fact (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: forget
DELETE FROM fact WHERE name = ?;

-- name: mark
SELECT ifnull((SELECT value FROM mark WHERE name = ?), 0);

-- name: set_mark
INSERT INTO mark (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: last_seq
SELECT max(
    ifnull((SELECT max(seq) FROM job), 0), ifnull((SELECT value FROM mark WHERE name = 'seq'), 0)
);

-- name: last_page
SELECT max(
    ifnull((SELECT max(page) FROM journal), 0),
    ifnull((SELECT value FROM mark WHERE name = 'page'), 0)
);

-- name: open_jobs
SELECT {job} FROM job INDEXED BY job_open WHERE state < {first_final} ORDER BY seq;

-- name: job_by_id
SELECT {job} FROM job WHERE job_id = ?;

-- name: job_by_seq
SELECT {job} FROM job WHERE seq = ?;

-- name: job_by_key
SELECT {job} FROM job WHERE tenant = ? AND idempotency_key = ?;

-- name: job_by_unique
SELECT {job} FROM job WHERE tenant = ? AND unique_key = ? ORDER BY seq DESC LIMIT 1;

-- name: names
SELECT seq, job_id, tenant, topic FROM job WHERE seq = ?;

-- name: page
SELECT page, strides FROM journal WHERE page = ?;

-- name: pages_after
SELECT page, strides FROM journal WHERE page > ? ORDER BY page;

-- name: counts
SELECT tenant, state, count FROM tally WHERE count <> 0;

-- name: count_jobs
SELECT tenant, iif(successor IS NULL, state, 0), count(*)
FROM job WHERE state >= {first_final} GROUP BY 1, 2;

-- name: read_log
SELECT l.attempt, l.at, l.level, l.text, l.n
FROM log_line AS l JOIN job AS j ON j.seq = l.job
WHERE j.job_id = ? AND l.n > ? ORDER BY l.n LIMIT ?;

-- name: read_steps
SELECT body FROM step
WHERE job = (SELECT seq FROM job WHERE job_id = ?1) AND (name, n) > (?2, ?3)
AND (?5 IS NULL OR outcome IN (SELECT value FROM json_each(?5)))
ORDER BY name, n LIMIT ?4;

-- name: read_steps_named
SELECT body FROM step
WHERE job = (SELECT seq FROM job WHERE job_id = ?1) AND name = ?2 AND n > ?3
AND (?5 IS NULL OR outcome IN (SELECT value FROM json_each(?5)))
ORDER BY n LIMIT ?4;

-- name: count_steps
SELECT name, outcome, count(*), sum(length(body)) FROM step
WHERE job = (SELECT seq FROM job WHERE job_id = ?)
GROUP BY name, outcome ORDER BY name, outcome;

-- name: count_children
SELECT state, count(*) FROM job INDEXED BY job_child
WHERE child_of = ?1 AND successor IS NULL AND ifnull(tenant = ?2, 1)
AND seq NOT IN (SELECT value FROM json_each(?3))
GROUP BY state;

-- name: facts
SELECT name, value FROM fact WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 AND name < ?2
ORDER BY name;

-- name: pointers
SELECT input_blob FROM job WHERE input_blob IS NOT NULL
UNION
SELECT result_blob FROM job WHERE result_blob IS NOT NULL
UNION
SELECT input_blob FROM step WHERE input_blob IS NOT NULL
UNION
SELECT output_blob FROM step WHERE output_blob IS NOT NULL;

-- name: refers
SELECT EXISTS (
    SELECT 1 FROM job WHERE input_blob >= ?2 AND input_blob < ?3 AND tenant = ?1
) OR EXISTS (
    SELECT 1 FROM job WHERE result_blob >= ?2 AND result_blob < ?3 AND tenant = ?1
) OR EXISTS (
    SELECT 1 FROM step CROSS JOIN job ON seq = job
    WHERE step.input_blob >= ?2 AND step.input_blob < ?3 AND tenant = ?1
) OR EXISTS (
    SELECT 1 FROM step CROSS JOIN job ON seq = job
    WHERE output_blob >= ?2 AND output_blob < ?3 AND tenant = ?1
);

-- name: oldest
SELECT seq, job_id, successor, finished_at, accepted_at FROM job ORDER BY seq;

-- name: to_prune
SELECT tenant, topic, state, successor, record FROM job WHERE seq = ?;

-- name: prune_job
DELETE FROM job WHERE seq = ?;

-- name: prune_steps
DELETE FROM step
WHERE job = ?1 AND (name, n) IN (SELECT name, n FROM step WHERE job = ?1 LIMIT ?2);

-- name: prune_log
DELETE FROM log_line WHERE job = ?;

-- name: prune_tenant
DELETE FROM job_by_tenant WHERE tenant = ? AND seq = ?;

-- name: prune_topic
DELETE FROM job_by_topic WHERE topic = ? AND seq = ?;

-- name: prune_journal
DELETE FROM journal WHERE page < ifnull((SELECT page FROM job ORDER BY seq LIMIT 1), ?);
