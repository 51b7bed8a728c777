-- name: by_id
SELECT {job} FROM job WHERE job_id = ?;

-- name: by_id_with_body
SELECT {job}, {body} FROM job WHERE job_id = ?2;

-- name: by_key
SELECT {job}, {body} FROM job INDEXED BY job_key WHERE key = ?2 AND key <> '';

-- name: body
SELECT body FROM body WHERE seq = ?;

-- name: taken
SELECT job_id FROM job WHERE job_id = ?;

-- name: key_taken
SELECT job_id FROM job INDEXED BY job_key WHERE key = ? AND key <> '';

-- name: queued
SELECT count FROM tally WHERE {initial};

-- name: insert
INSERT INTO job (
    job_id, state, rank, created_at, exit_code, error_code, error_message, error_field, image,
    image_id, container, engine, memory_mb, cpus, key, size, labels, ending
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_body
INSERT INTO body (seq, body) VALUES (?, ?);

-- name: insert_label
INSERT INTO label (seq, name, value) VALUES (?, ?, ?);

-- name: move
UPDATE job SET
    state = ?, started_at = ?, finished_at = ?, exit_code = ?, error_code = ?, error_message = ?,
    error_field = ?, image_id = ?, container = ?, engine = ?, ending = ?
WHERE seq = ?;

-- name: set_place
-- What changes while a job stays in its state: nothing that an index would have to follow.
UPDATE job SET container = ?, engine = ? WHERE seq = ?;

-- name: running
SELECT {job} FROM job INDEXED BY job_state WHERE {running} ORDER BY seq;

-- name: waiting
SELECT {job} FROM job INDEXED BY job_queue WHERE {initial} ORDER BY rank, seq;

-- name: tally
SELECT state, count FROM tally;

-- name: oldest
SELECT seq, job_id, finished_at, size FROM job INDEXED BY job_finished
WHERE finished_at IS NOT NULL ORDER BY finished_at, seq LIMIT ?;

-- name: forget
DELETE FROM job WHERE seq = ?;
