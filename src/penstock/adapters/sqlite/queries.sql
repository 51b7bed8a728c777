-- name: insert_job
INSERT INTO job (
    seq, job_id, topic, tenant, state, version, attempt, accepted_at, updated_at, worker_id, pool,
    dispatched_at, started_at, finished_at, cancel_requested, successor, result_blob, result,
    idempotency_key, parent_job_id, workflow_id, step_index, input_blob, request
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: update_job
UPDATE job SET
    state = ?, version = ?, attempt = ?, updated_at = ?, worker_id = ?, pool = ?,
    dispatched_at = ?, started_at = ?, finished_at = ?, cancel_requested = ?, successor = ?,
    result_blob = ?, result = ?
WHERE seq = ?;

-- name: append_journal
INSERT INTO journal (job, n, path, attempt, actor, at, reason, worker_id)
VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: job_by_id
SELECT {job} FROM job WHERE job_id = ?;

-- name: job_by_key
SELECT {job} FROM job WHERE tenant = ? AND idempotency_key = ?;

-- name: jobs_by_seq
SELECT {job} FROM job WHERE seq IN (SELECT value FROM json_each(?));

-- name: jobs_unfinished
SELECT {job} FROM job INDEXED BY job_unfinished WHERE state < {first_final} ORDER BY seq;

-- name: last_seq
SELECT max(ifnull((SELECT max(seq) FROM job), 0), ifnull((SELECT max(job) FROM journal), 0));

-- name: journal_of_job
SELECT n, path, attempt, actor, at, reason, worker_id
FROM journal WHERE job = ? ORDER BY id;

-- name: whole_journal
SELECT job, n, path, attempt, actor, at, reason, worker_id
FROM journal ORDER BY job, id;

-- name: all_jobs
SELECT {job} FROM job ORDER BY seq;

-- name: paths
SELECT code, before, events, after FROM path;

-- name: tally
SELECT state, count(*) FROM job GROUP BY state;

-- name: append_log
INSERT INTO log_line (job, n, attempt, at, level, text) VALUES (?, ?, ?, ?, ?, ?);

-- name: last_log
SELECT ifnull(max(n), 0) FROM log_line WHERE job = ?;

-- name: read_log
SELECT l.attempt, l.at, l.level, l.text, l.n
FROM log_line AS l JOIN job AS j ON j.seq = l.job
WHERE j.job_id = ? AND l.n > ? ORDER BY l.n LIMIT ?;

-- name: prunable
SELECT seq, finished_at, accepted_at FROM job ORDER BY seq;

-- name: prune_journal
DELETE FROM journal WHERE job = ?;

-- name: prune_log
DELETE FROM log_line WHERE job = ?;

-- name: prune_job
DELETE FROM job WHERE seq = ?;

-- name: pointers
SELECT input_blob FROM job WHERE input_blob IS NOT NULL
UNION
SELECT result_blob FROM job WHERE result_blob IS NOT NULL;

-- name: remember
INSERT INTO fact (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: recall
SELECT value FROM fact WHERE name = ?;
