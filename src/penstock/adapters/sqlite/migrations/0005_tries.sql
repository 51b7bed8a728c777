-- A job and its retries are counted as one: tries that were retried get a row of their own.
INSERT INTO state (code, name) VALUES (0, 'RETRIED');

INSERT INTO tally (state, tenant, count)
SELECT 0, tenant, count(*) FROM job
WHERE state > {succeeded} AND successor IS NOT NULL GROUP BY tenant;

UPDATE tally SET count = count - (
    SELECT count(*) FROM job
    WHERE job.state > {succeeded} AND job.state = tally.state AND job.tenant = tally.tenant
    AND job.successor IS NOT NULL
) WHERE state > {succeeded};
