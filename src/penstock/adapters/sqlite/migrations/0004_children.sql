-- Children of a job, and the tries of a job. Jobs of before have neither.
ALTER TABLE job ADD COLUMN child_of TEXT;
ALTER TABLE job ADD COLUMN first_try TEXT;

CREATE INDEX job_child ON job (child_of) WHERE child_of IS NOT NULL;
CREATE INDEX job_try ON job (first_try) WHERE first_try IS NOT NULL;
