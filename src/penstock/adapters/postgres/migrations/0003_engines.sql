-- The engines that use this database: the owner and those that stand by. Each renews its own row.
CREATE TABLE {schema}.engine (
    holder  text PRIMARY KEY,
    name    text NOT NULL,
    machine text NOT NULL,
    links   text[] NOT NULL,
    http    text NOT NULL,
    token   text NOT NULL,
    version text NOT NULL,
    seen    timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
