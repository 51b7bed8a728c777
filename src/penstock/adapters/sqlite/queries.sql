-- name: insert_job
INSERT INTO job (
    seq, job_id, topic, tenant, state, version, attempt, accepted_at, updated_at, worker_id, pool,
    dispatched_at, started_at, finished_at, cancel_requested, successor, result_blob, result,
    idempotency_key, parent_job_id, workflow_id, step_index, input_blob, request, principal
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_full
INSERT INTO job (
    seq, job_id, topic, tenant, state, version, attempt, accepted_at, updated_at, worker_id, pool,
    dispatched_at, started_at, finished_at, cancel_requested, successor, result_blob, result,
    idempotency_key, parent_job_id, workflow_id, step_index, input_blob, request, principal,
    verdict, hold, parked, unique_key, schedule
) VALUES (
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
);

-- name: update_job
UPDATE job SET
    state = ?, version = ?, attempt = ?, updated_at = ?, worker_id = ?, pool = ?,
    dispatched_at = ?, started_at = ?, finished_at = ?, cancel_requested = ?, successor = ?,
    result_blob = ?, result = ?
WHERE seq = ?;

-- name: update_gated
UPDATE job SET
    state = ?, version = ?, attempt = ?, updated_at = ?, worker_id = ?, pool = ?,
    dispatched_at = ?, started_at = ?, finished_at = ?, cancel_requested = ?, successor = ?,
    result_blob = ?, result = ?, verdict = ?, hold = ?, parked = ?
WHERE seq = ?;

-- name: append_journal
INSERT INTO journal (id, job, n, path, attempt, actor, at, reason, worker_id)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: job_by_id
SELECT {job} FROM job WHERE job_id = ?;

-- name: job_by_key
SELECT {job} FROM job WHERE tenant = ? AND idempotency_key = ?;

-- name: job_by_unique
SELECT {job} FROM job INDEXED BY job_unique
WHERE tenant = ? AND unique_key = ? ORDER BY seq DESC LIMIT 1;

-- name: open_by_unique
SELECT {job} FROM job INDEXED BY job_unique_open
WHERE tenant = ? AND unique_key = ? AND state < {first_final} ORDER BY seq DESC;

-- name: jobs_by_seq
SELECT {job} FROM job WHERE seq IN (SELECT value FROM json_each(?));

-- name: jobs_unfinished
SELECT {job} FROM job
WHERE seq IN (SELECT seq FROM job INDEXED BY job_state WHERE state < {first_final}) ORDER BY seq;

-- name: last_seq
SELECT max(
    ifnull((SELECT max(seq) FROM job), 0),
    ifnull((SELECT max(job) FROM journal), 0),
    ifnull((SELECT value FROM mark WHERE name = 'seq'), 0)
);

-- name: last_row
SELECT max(
    ifnull((SELECT max(id) FROM journal), 0),
    ifnull((SELECT value FROM mark WHERE name = 'journal'), 0)
);

-- name: raise_mark
INSERT INTO mark (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value);

-- name: journal_of_job
SELECT n, path, attempt, actor, at, reason, worker_id
FROM journal WHERE job = ? ORDER BY id;

-- name: newest_row
SELECT id, path FROM journal ORDER BY id DESC LIMIT 1;

-- name: events
SELECT journal.id, tenant, topic, job_id, n, path, journal.attempt, actor, at, reason,
    journal.worker_id
FROM journal CROSS JOIN job ON job.seq = journal.job
WHERE id >= ? ORDER BY id LIMIT ?;

-- name: whole_journal
SELECT job, n, path, attempt, actor, at, reason, worker_id
FROM journal ORDER BY job, id;

-- name: all_jobs
SELECT {job} FROM job ORDER BY seq;

-- name: paths
SELECT code, before, events, after FROM path;

-- name: tally
SELECT tenant, state, count FROM tally;

-- name: count_up
INSERT INTO tally (state, tenant, count) VALUES (?, ?, ?)
ON CONFLICT (state, tenant) DO UPDATE SET count = count + excluded.count;

-- name: tidy_tally
DELETE FROM tally WHERE count = 0;

-- name: append_log
INSERT INTO log_line (job, n, attempt, at, level, text) VALUES (?, ?, ?, ?, ?, ?);

-- name: last_log
SELECT ifnull(max(n), 0) FROM log_line WHERE job = ?;

-- name: read_log
SELECT l.attempt, l.at, l.level, l.text, l.n
FROM log_line AS l JOIN job AS j ON j.seq = l.job
WHERE j.job_id = ? AND l.n > ? ORDER BY l.n LIMIT ?;

-- name: prunable
SELECT seq, job_id, successor, finished_at, accepted_at FROM job ORDER BY seq;

-- name: prune_journal
DELETE FROM journal WHERE job = ?;

-- name: prune_log
DELETE FROM log_line WHERE job = ?;

-- name: prune_job
DELETE FROM job WHERE seq = ?;

-- name: prune_count
SELECT state, tenant, count(*) FROM job WHERE seq IN (SELECT value FROM json_each(?)) GROUP BY 1, 2;

-- name: pointers
SELECT input_blob FROM job WHERE input_blob IS NOT NULL
UNION
SELECT result_blob FROM job WHERE result_blob IS NOT NULL;

-- name: remember
INSERT INTO fact (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: recall
SELECT value FROM fact WHERE name = ?;

-- name: recall_all
SELECT name, value FROM fact WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 AND name < ?2
ORDER BY name;

-- name: forget
DELETE FROM fact WHERE name = ?;

-- name: refers
SELECT EXISTS (
    SELECT 1 FROM job INDEXED BY job_input
    WHERE input_blob >= ?2 AND input_blob < ?3 AND tenant = ?1
) OR EXISTS (
    SELECT 1 FROM job INDEXED BY job_result
    WHERE result_blob >= ?2 AND result_blob < ?3 AND tenant = ?1
);

-- name: append_audit
INSERT INTO audit (at, principal, action, subject, tenant, detail, outcome)
VALUES (?, ?, ?, ?, ?, ?, ?);
