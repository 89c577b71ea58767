-- The ledger of privagrad in PostgreSQL 14 or newer. Execute it as the owner of the ledger, as one
-- transaction; executing it again changes nothing, and restores tables' rights if they were changed.

SELECT pg_catalog.pg_advisory_xact_lock(7512369);
SET LOCAL search_path = pg_catalog, pg_temp;

DO $do$
DECLARE
    version integer;
    strange text;
BEGIN
    IF current_setting('server_version_num')::integer < 140000 THEN
        RAISE EXCEPTION 'Expected PostgreSQL 14 or newer, found %', current_setting('server_version')
            USING ERRCODE = 'PV001';
    END IF;
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'Expected a database with the encoding UTF8, found %: create one with '
            'CREATE DATABASE ledger ENCODING UTF8 TEMPLATE template0',
            current_setting('server_encoding') USING ERRCODE = 'PV001';
    END IF;
    -- What others have put there before must not become the ledger.
    SELECT pg_get_userbyid(nspowner) INTO strange FROM pg_namespace
        WHERE nspname = 'privagrad' AND pg_get_userbyid(nspowner) <> current_user;
    IF strange IS NULL THEN
        SELECT pg_get_userbyid(owner) INTO strange FROM (
            SELECT relnamespace, relowner FROM pg_class
            UNION ALL SELECT pronamespace, proowner FROM pg_proc
        ) AS found (namespace, owner)
        WHERE namespace = (SELECT oid FROM pg_namespace WHERE nspname = 'privagrad')
            AND pg_get_userbyid(owner) <> current_user LIMIT 1;
    END IF;
    IF strange IS NOT NULL THEN
        RAISE EXCEPTION 'Expected no schema privagrad or one of %, found things of % in it: connect '
            'as the owner of the ledger', current_user, strange USING ERRCODE = 'PV001';
    END IF;
    IF to_regclass('privagrad.about') IS NOT NULL THEN
        EXECUTE 'SELECT version FROM privagrad.about' INTO version;
        IF version > 1 THEN
            RAISE EXCEPTION 'Expected a ledger of version 1 or older, found version %: a newer '
                'privagrad made it. Upgrade this one', version USING ERRCODE = 'PV001';
        END IF;
    END IF;
END
$do$;

-- Who may do what. Users are members of these roles.
DO $do$
DECLARE
    role name;
    known pg_roles;
BEGIN
    FOREACH role IN ARRAY ARRAY['privagrad_reader', 'privagrad_opener', 'privagrad_spender',
                                'privagrad_releaser'] LOOP
        SELECT * INTO known FROM pg_roles WHERE rolname = role;
        IF NOT FOUND THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', role);
        ELSIF known.rolcanlogin OR known.rolsuper OR known.rolbypassrls OR known.rolcreaterole THEN
            RAISE EXCEPTION 'Expected that the role % is for groups only, found one that may log '
                'in, create roles or pass by row-level security', role USING ERRCODE = 'PV001';
        END IF;
        IF role <> 'privagrad_reader' AND NOT EXISTS (
            SELECT FROM pg_auth_members WHERE member = role::regrole
                AND roleid = 'privagrad_reader'::regrole
        ) THEN
            EXECUTE format('GRANT privagrad_reader TO %I', role);
        END IF;
    END LOOP;
END
$do$;

CREATE SCHEMA IF NOT EXISTS privagrad;

CREATE TABLE IF NOT EXISTS privagrad.about (
    version integer NOT NULL,
    ledger uuid NOT NULL DEFAULT gen_random_uuid(),
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row)
);
INSERT INTO privagrad.about (version) VALUES (1) ON CONFLICT DO NOTHING;

CREATE TABLE IF NOT EXISTS privagrad.datasets (
    name text COLLATE "C" PRIMARY KEY CHECK (btrim(name) <> ''),
    at text COLLATE "C" NOT NULL
        DEFAULT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"'),
    "user" text COLLATE "C" NOT NULL DEFAULT session_user,
    epsilon double precision NOT NULL CHECK (epsilon > 0 AND epsilon < 'Infinity'),
    delta double precision NOT NULL CHECK (delta > 0 AND delta < 1),
    fingerprint text COLLATE "C"
);
CREATE TABLE IF NOT EXISTS privagrad.history (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at text COLLATE "C" NOT NULL
        DEFAULT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"'),
    "user" text COLLATE "C" NOT NULL DEFAULT session_user,
    dataset text COLLATE "C" NOT NULL REFERENCES privagrad.datasets (name),
    run text COLLATE "C" NOT NULL CHECK (length(run) BETWEEN 1 AND 200),
    state text COLLATE "C" NOT NULL CHECK (state IN ('reserved', 'finished', 'released')),
    note text COLLATE "C" NOT NULL,
    events text COLLATE "C" NOT NULL,
    UNIQUE (run, state)
);
CREATE INDEX IF NOT EXISTS history_of_dataset ON privagrad.history (dataset, number);
CREATE TABLE IF NOT EXISTS privagrad.contents (
    run text COLLATE "C" PRIMARY KEY,
    fingerprint text COLLATE "C" NOT NULL
);
CREATE INDEX IF NOT EXISTS contents_of_fingerprint ON privagrad.contents (fingerprint);
CREATE TABLE IF NOT EXISTS privagrad.moves (
    id uuid PRIMARY KEY,
    at text COLLATE "C" NOT NULL
        DEFAULT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"'),
    "user" text COLLATE "C" NOT NULL DEFAULT session_user,
    source text COLLATE "C" NOT NULL
);

CREATE OR REPLACE FUNCTION privagrad.refuse_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only' USING ERRCODE = 'PV001';
END
$function$;

-- The events of an entry as a list; an error where they are not what privagrad writes.
CREATE OR REPLACE FUNCTION privagrad.events_of(told text) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    found jsonb := told::jsonb;
    events json := told;  -- as it is written: 5e1 is not how a count is written
    event json;
BEGIN
    IF jsonb_typeof(found) = 'object' THEN
        events := events->'events';
    END IF;
    IF jsonb_typeof(found) = 'object' AND found->'version' IN ('1', '2', '3') THEN
        found := found->'events';
    END IF;
    IF jsonb_typeof(found) IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION 'Expected a list of events, found something else' USING ERRCODE = 'PV001';
    END IF;
    FOR event IN SELECT value FROM json_array_elements(events) LOOP
        IF json_typeof(event) <> 'object'
            OR COALESCE(event->>'kind', 'GaussianEvent')
                NOT IN ('GaussianEvent', 'ObjectiveEvent', 'SelectEvent')
            OR (event->'count')::text !~ '^[1-9][0-9]{0,17}$' THEN
            RAISE EXCEPTION 'Expected an event as privagrad writes it, found another'
                USING ERRCODE = 'PV001';
        END IF;
    END LOOP;
    RETURN found;
END
$function$;

-- Whether a run reports every release that it reserved.
CREATE OR REPLACE FUNCTION privagrad.covers(made text, reserved text) RETURNS boolean
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $function$
    WITH wanted AS (
        SELECT value - 'count' AS event, sum(COALESCE((value->>'count')::numeric, 1)) AS times
        FROM jsonb_array_elements(privagrad.events_of(reserved)) GROUP BY 1
    ), told AS (
        SELECT value - 'count' AS event, sum(COALESCE((value->>'count')::numeric, 1)) AS times
        FROM jsonb_array_elements(privagrad.events_of(made)) GROUP BY 1
    )
    SELECT NOT EXISTS (
        SELECT FROM wanted LEFT JOIN told USING (event)
        WHERE COALESCE(told.times, 0) < wanted.times
    )
$function$;

-- Data sets that were opened for a content, or have a run on it that is charged.
CREATE OR REPLACE FUNCTION privagrad.owners(content text) RETURNS SETOF text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $function$
    SELECT name FROM privagrad.datasets WHERE fingerprint = content
    UNION
    SELECT last.dataset FROM privagrad.contents
    CROSS JOIN LATERAL (
        SELECT dataset, events FROM privagrad.history
        WHERE history.run = contents.run ORDER BY number DESC LIMIT 1
    ) AS last
    WHERE contents.fingerprint = content AND privagrad.events_of(last.events) <> '[]'
$function$;

-- The owner could change every rule: none of those about users is for it. `move_in` acts for it.
CREATE OR REPLACE FUNCTION privagrad.acts_for_owner() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $function$
    SELECT current_user = pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'privagrad'
$function$;

CREATE OR REPLACE FUNCTION privagrad.may_release() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $function$
    SELECT privagrad.acts_for_owner() OR pg_has_role(current_user, 'privagrad_releaser', 'MEMBER')
$function$;

CREATE OR REPLACE FUNCTION privagrad.require_serializable() RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $function$
BEGIN
    IF current_setting('transaction_isolation') <> 'serializable' THEN
        RAISE EXCEPTION 'Expected a SERIALIZABLE transaction, found %',
            current_setting('transaction_isolation') USING ERRCODE = 'PV001';
    END IF;
END
$function$;

CREATE OR REPLACE FUNCTION privagrad.check_dataset() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    owner text;
BEGIN
    PERFORM privagrad.require_serializable();
    SELECT * INTO owner FROM privagrad.owners(NEW.fingerprint) LIMIT 1;
    -- Budgets that are moved here share a content where they did before.
    IF owner IS NOT NULL AND NOT privagrad.acts_for_owner() THEN
        RAISE EXCEPTION 'Expected content without a budget, found that % was opened for it or has '
            'paid for it', quote_literal(owner) USING ERRCODE = 'PV001';
    END IF;
    RETURN NEW;
END
$function$;

CREATE OR REPLACE FUNCTION privagrad.check_entry() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    begun privagrad.history;
    last text;
BEGIN
    PERFORM privagrad.require_serializable();
    PERFORM privagrad.events_of(NEW.events);
    SELECT * INTO begun FROM privagrad.history WHERE run = NEW.run AND state = 'reserved';
    SELECT state INTO last FROM privagrad.history WHERE run = NEW.run ORDER BY number DESC LIMIT 1;
    IF NEW.state = 'reserved' THEN
        IF last IS NOT NULL THEN
            RAISE EXCEPTION 'Expected a new run, found % reserved before', NEW.run
                USING ERRCODE = 'PV001';
        END IF;
        RETURN NEW;
    END IF;
    IF begun.run IS NULL OR begun.dataset <> NEW.dataset THEN
        RAISE EXCEPTION 'Expected a run that % has reserved for, found no such reservation of %',
            quote_literal(NEW.dataset), NEW.run USING ERRCODE = 'PV001';
    END IF;
    IF last = 'finished' OR (NEW.state = 'released' AND last <> 'reserved') THEN
        RAISE EXCEPTION 'Expected a run that is not over, found % %', NEW.run, last
            USING ERRCODE = 'PV001';
    END IF;
    IF NEW.state = 'released' THEN
        IF privagrad.events_of(NEW.events) <> '[]' OR btrim(NEW.note) = '' THEN
            RAISE EXCEPTION 'Expected a reason and no events of a run that is given back'
                USING ERRCODE = 'PV001';
        END IF;
    ELSIF NOT privagrad.may_release() THEN
        IF begun."user" <> session_user THEN
            RAISE EXCEPTION 'Expected that % finishes run %, which reserved it, found %: others need '
                'the role privagrad_releaser', quote_ident(begun."user"), NEW.run,
                quote_ident(session_user) USING ERRCODE = 'PV001';
        END IF;
        IF last = 'reserved' AND NOT privagrad.covers(NEW.events, begun.events) THEN
            RAISE EXCEPTION 'Expected all events that run % has reserved, found fewer: giving back a '
                'part of them needs the role privagrad_releaser. The run stays charged for '
                'everything it reserved', NEW.run USING ERRCODE = 'PV001';
        END IF;
    END IF;
    RETURN NEW;
END
$function$;

CREATE OR REPLACE FUNCTION privagrad.check_content() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    begun privagrad.history;
    owner text;
BEGIN
    PERFORM privagrad.require_serializable();
    IF privagrad.acts_for_owner() THEN
        RETURN NEW;
    END IF;
    SELECT * INTO begun FROM privagrad.history WHERE run = NEW.run AND state = 'reserved';
    IF begun.run IS NULL OR begun."user" <> session_user
        OR EXISTS (SELECT FROM privagrad.history WHERE run = NEW.run AND state <> 'reserved') THEN
        RAISE EXCEPTION 'Expected a run that is reserved now, by %, found %',
            quote_ident(session_user), NEW.run USING ERRCODE = 'PV001';
    END IF;
    SELECT name INTO owner FROM privagrad.owners(NEW.fingerprint) AS other (name)
        WHERE name <> begun.dataset LIMIT 1;
    IF owner IS NOT NULL THEN
        RAISE EXCEPTION 'Expected the only budget for this content, found % beside %',
            quote_literal(begun.dataset), quote_literal(owner) USING ERRCODE = 'PV001';
    END IF;
    RETURN NEW;
END
$function$;

-- Budgets of a file with all that happened to them, as new ones; `at` and `user` as they are there.
CREATE OR REPLACE FUNCTION privagrad.move_in(
    id uuid, source text, budgets json, entries json, bound json
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    item json;
    content text;
BEGIN
    PERFORM privagrad.require_serializable();
    FOR content IN
        SELECT value->>'fingerprint' FROM json_array_elements(budgets)
        UNION SELECT value->>'fingerprint' FROM json_array_elements(bound)
    LOOP
        IF EXISTS (SELECT FROM privagrad.owners(content)) THEN
            RAISE EXCEPTION 'Expected content without a budget on the server, found % with one',
                content USING ERRCODE = 'PV001';
        END IF;
    END LOOP;
    FOR item IN SELECT value FROM json_array_elements(entries) LOOP
        IF item->>'dataset' NOT IN (SELECT value->>'name' FROM json_array_elements(budgets)) THEN
            RAISE EXCEPTION 'Expected entries of the budgets that are moved, found one of %',
                quote_literal(item->>'dataset') USING ERRCODE = 'PV001';
        END IF;
    END LOOP;
    FOR item IN SELECT value FROM json_array_elements(bound) LOOP
        IF item->>'run' NOT IN (SELECT value->>'run' FROM json_array_elements(entries)) THEN
            RAISE EXCEPTION 'Expected contents of runs that are moved, found one of %',
                quote_literal(item->>'run') USING ERRCODE = 'PV001';
        END IF;
    END LOOP;
    INSERT INTO privagrad.moves (id, source) VALUES (id, source);
    INSERT INTO privagrad.datasets (name, at, "user", epsilon, delta, fingerprint)
        SELECT value->>'name', value->>'at', value->>'user', (value->>'epsilon')::float8,
            (value->>'delta')::float8, value->>'fingerprint' FROM json_array_elements(budgets);
    FOR item IN SELECT value FROM json_array_elements(entries) LOOP
        INSERT INTO privagrad.history (at, "user", dataset, run, state, note, events) VALUES (
            item->>'at', item->>'user', item->>'dataset', item->>'run', item->>'state',
            item->>'note', item->>'events');
    END LOOP;
    INSERT INTO privagrad.contents (run, fingerprint)
        SELECT value->>'run', value->>'fingerprint' FROM json_array_elements(bound);
END
$function$;

-- Triggers, also for the owner and for replication.
DO $do$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['datasets', 'history', 'contents', 'moves'] LOOP
        EXECUTE format('CREATE OR REPLACE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE '
            'ON privagrad.%I FOR EACH STATEMENT EXECUTE FUNCTION privagrad.refuse_change()', name);
        EXECUTE format('ALTER TABLE privagrad.%I ENABLE ALWAYS TRIGGER append_only', name);
    END LOOP;
END
$do$;
CREATE OR REPLACE TRIGGER checked BEFORE INSERT ON privagrad.datasets
    FOR EACH ROW EXECUTE FUNCTION privagrad.check_dataset();
CREATE OR REPLACE TRIGGER checked BEFORE INSERT ON privagrad.history
    FOR EACH ROW EXECUTE FUNCTION privagrad.check_entry();
CREATE OR REPLACE TRIGGER checked BEFORE INSERT ON privagrad.contents
    FOR EACH ROW EXECUTE FUNCTION privagrad.check_content();
ALTER TABLE privagrad.datasets ENABLE ALWAYS TRIGGER checked;
ALTER TABLE privagrad.history ENABLE ALWAYS TRIGGER checked;
ALTER TABLE privagrad.contents ENABLE ALWAYS TRIGGER checked;

-- Which states of a run a role may write.
ALTER TABLE privagrad.history ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS reading ON privagrad.history;
DROP POLICY IF EXISTS spending ON privagrad.history;
DROP POLICY IF EXISTS releasing ON privagrad.history;
CREATE POLICY reading ON privagrad.history FOR SELECT TO privagrad_reader USING (true);
CREATE POLICY spending ON privagrad.history FOR INSERT TO privagrad_spender
    WITH CHECK (state IN ('reserved', 'finished'));
CREATE POLICY releasing ON privagrad.history FOR INSERT TO privagrad_releaser
    WITH CHECK (state = 'released');

-- Rights: columns `number`, `at` and `user` are the server's, nobody changes or deletes.
DO $do$
DECLARE
    grantee text;
    kind text;
BEGIN
    FOR grantee IN
        SELECT DISTINCT CASE acl.grantee WHEN 0 THEN 'PUBLIC'
            ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM (
            SELECT COALESCE(nspacl, acldefault('n', nspowner)) FROM pg_namespace
                WHERE nspname = 'privagrad'
            UNION ALL SELECT relacl FROM pg_class WHERE relnamespace = 'privagrad'::regnamespace
            UNION ALL SELECT attacl FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
                WHERE relnamespace = 'privagrad'::regnamespace
            UNION ALL SELECT COALESCE(proacl, acldefault('f', proowner)) FROM pg_proc
                WHERE pronamespace = 'privagrad'::regnamespace
        ) AS rights (acls)
        CROSS JOIN LATERAL aclexplode(acls) AS acl
        WHERE acl.grantee <> (SELECT nspowner FROM pg_namespace WHERE nspname = 'privagrad')
    LOOP
        EXECUTE format('REVOKE ALL ON SCHEMA privagrad FROM %s', grantee);
        FOREACH kind IN ARRAY ARRAY['TABLES', 'SEQUENCES', 'FUNCTIONS'] LOOP
            EXECUTE format('REVOKE ALL ON ALL %s IN SCHEMA privagrad FROM %s', kind, grantee);
        END LOOP;
    END LOOP;
END
$do$;
GRANT USAGE ON SCHEMA privagrad TO privagrad_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA privagrad TO privagrad_reader;
GRANT EXECUTE ON FUNCTION privagrad.events_of, privagrad.covers, privagrad.owners,
    privagrad.acts_for_owner, privagrad.may_release, privagrad.require_serializable
    TO privagrad_reader;
GRANT INSERT (name, epsilon, delta, fingerprint) ON privagrad.datasets TO privagrad_opener;
GRANT EXECUTE ON FUNCTION privagrad.move_in TO privagrad_opener;
GRANT INSERT (dataset, run, state, note, events) ON privagrad.history
    TO privagrad_spender, privagrad_releaser;
GRANT INSERT (run, fingerprint) ON privagrad.contents TO privagrad_spender;
