-- name: run_by_id
SELECT {run} FROM run WHERE id = ?;

-- name: glance
SELECT status, cancel_requested FROM run WHERE id = ?;

-- name: unfinished
SELECT {run} FROM run INDEXED BY run_open WHERE finished_at IS NULL ORDER BY created_at, id;

-- name: head
SELECT run, {head} FROM run WHERE id = ?;

-- name: open_run
SELECT id FROM run INDEXED BY run_open
WHERE finished_at IS NULL AND pipeline = ? AND tenant = ? LIMIT 1;

-- name: insert_run
INSERT INTO run ({head}, id, created_at, pipeline, tenant, trace_id, fingerprint, retry_of, trigger,
    config, errors, alerts, abandoned_items, summary)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_config
INSERT INTO config (run, config) VALUES (?, ?);

-- name: update_head
UPDATE run SET ({head}) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE run = ?;

-- name: update_progress
-- What changes while a run stays in its status: nothing that an index would have to follow.
UPDATE run SET
    version = ?, cancel_requested = ?, cancel_effective = ?, current_stage = ?, lease_until = ?,
    progress_at = ?
WHERE run = ?;

-- name: set_errors
UPDATE run SET errors = ? WHERE run = ?;

-- name: set_summary
UPDATE run SET summary = ? WHERE run = ?;

-- name: set_alerts
UPDATE run SET alerts = ? WHERE run = ?;

-- name: set_abandoned_items
UPDATE run SET abandoned_items = ? WHERE run = ?;

-- name: set_fingerprint
UPDATE run SET fingerprint = ? WHERE run = ?;

-- name: put_stage
REPLACE INTO stage (run, name, place, status, record) VALUES (?, ?, ?, ?, ?);

-- name: lot
SELECT lot FROM lot WHERE run = ? AND stage = ?;

-- name: lot_of_job
SELECT lot FROM run JOIN lot USING (run) WHERE run.id = ? AND stage = ?;

-- name: insert_lot
INSERT INTO lot (run, stage) VALUES (?, ?);

-- name: list_item
INSERT INTO item (
    outcome, fan, attempts, reused, duration_ms, finished_at, error_class, error_code, error,
    output, place, lot, key, input
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (lot, key) DO NOTHING;

-- name: end_item
UPDATE item SET
    outcome = ?, fan = ?, attempts = ?, reused = ?, duration_ms = ?, finished_at = ?,
    error_class = ?, error_code = ?, error = ?, output = ?
WHERE place = ?;

-- name: items
SELECT {item} FROM item WHERE place > ? AND place < ? ORDER BY place LIMIT ?;

-- name: some_items
SELECT {item} FROM item
WHERE place > ? AND place < ? AND outcome IN (SELECT value FROM json_each(?))
ORDER BY place LIMIT ?;

-- name: troubled_items
SELECT {item} FROM item INDEXED BY item_trouble
WHERE place > ? AND place < ? AND ({troubled_item})
    AND outcome IN (SELECT value FROM json_each(?))
ORDER BY place LIMIT ?;

-- name: items_by_key
SELECT {item} FROM item WHERE lot = ? AND key IN (SELECT value FROM json_each(?)) ORDER BY place;

-- name: last_place
SELECT max(place) FROM item WHERE place > ? AND place < ?;

-- name: fan
SELECT ifnull(sum(fan), 0) FROM item WHERE place > ? AND place < ? AND outcome = 'ok';

-- name: forget_stage
DELETE FROM item WHERE place > ? AND place < ?;

-- name: append_event
INSERT INTO event (run, at, kind, data) VALUES (?, ?, ?, ?);

-- name: events
SELECT id, at, kind, data FROM event INDEXED BY event_run
WHERE run = (SELECT run FROM run WHERE id = ?) AND id > ? ORDER BY id LIMIT ?;

-- name: breaker
SELECT record FROM breaker WHERE name = ?;

-- name: breakers
SELECT record FROM breaker ORDER BY name;

-- name: first_breaker
INSERT INTO breaker (name, version, record) VALUES (?, 0, ?) ON CONFLICT (name) DO NOTHING;

-- name: next_breaker
UPDATE breaker SET version = version + 1, record = ? WHERE name = ? AND version = ?;

-- name: declare
INSERT INTO declared (name, info) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET info = excluded.info;

-- name: declaration
SELECT info FROM declared WHERE name = ?;

-- name: declared
SELECT info FROM declared ORDER BY name;

-- name: remember
INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: recall
SELECT value FROM fact WHERE name = ?;

-- name: pointers
SELECT input FROM item INDEXED BY item_input WHERE input >= 'blob:' AND input < 'blob;'
UNION
SELECT output FROM item INDEXED BY item_output WHERE output >= 'blob:' AND output < 'blob;';

-- name: doom
-- What ended before a time began before it, so the walk stops where runs are younger.
INSERT INTO doomed (run)
SELECT run FROM run INDEXED BY run_created
WHERE created_at < ?1 AND finished_at < ?1 ORDER BY created_at LIMIT ?2;

-- name: forget_runs
DELETE FROM run WHERE run IN (SELECT run FROM doomed);

-- name: forget_stages
DELETE FROM stage WHERE run IN (SELECT run FROM doomed);

-- name: forget_configs
DELETE FROM config WHERE run IN (SELECT run FROM doomed);

-- name: any_doomed
SELECT run, (SELECT min(lot) FROM lot WHERE lot.run = doomed.run) FROM doomed LIMIT 1;

-- name: forget_items
DELETE FROM item WHERE place IN (SELECT place FROM item WHERE place > ? AND place < ? LIMIT ?);

-- name: forget_lot
DELETE FROM lot WHERE lot = ?;

-- name: forget_events
DELETE FROM event WHERE id IN (
    SELECT id FROM event INDEXED BY event_run
    WHERE run = ? AND id < (SELECT max(id) FROM event) LIMIT ?
);

-- name: undoom
DELETE FROM doomed WHERE run = ?;

-- name: refers
SELECT EXISTS (
    SELECT 1 FROM item INDEXED BY item_output
    JOIN lot USING (lot) JOIN run USING (run)
    WHERE output = ?1 AND output >= 'blob:' AND output < 'blob;' AND tenant = ?2
) OR EXISTS (
    SELECT 1 FROM item INDEXED BY item_input
    JOIN lot USING (lot) JOIN run USING (run)
    WHERE input = ?1 AND input >= 'blob:' AND input < 'blob;' AND tenant = ?2
);
