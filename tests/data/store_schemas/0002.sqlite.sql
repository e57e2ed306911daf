CREATE TABLE runs (
    id TEXT NOT NULL,
    output TEXT NOT NULL,
    name TEXT,
    state TEXT NOT NULL,
    started_at DOUBLE NOT NULL,
    ended_at DOUBLE,
    config TEXT,
    provenance TEXT,
    CONSTRAINT pk_runs PRIMARY KEY (id)
);
CREATE TABLE texts (
    hash TEXT NOT NULL,
    body BLOB NOT NULL,
    CONSTRAINT pk_texts PRIMARY KEY (hash)
);
CREATE TABLE writes (
    writer TEXT NOT NULL,
    number INTEGER NOT NULL,
    at DOUBLE NOT NULL,
    CONSTRAINT pk_writes PRIMARY KEY (writer)
);
CREATE TABLE engines (
    run_id TEXT NOT NULL,
    label TEXT NOT NULL,
    url TEXT NOT NULL,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    capacity INTEGER NOT NULL,
    running INTEGER DEFAULT 0 NOT NULL,
    waiting INTEGER DEFAULT 0 NOT NULL,
    seen_at DOUBLE NOT NULL,
    details TEXT,
    CONSTRAINT pk_engines PRIMARY KEY (run_id, label),
    CONSTRAINT fk_engines_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE parts (
    run_id TEXT NOT NULL,
    part INTEGER NOT NULL,
    from_step INTEGER NOT NULL,
    started_at DOUBLE NOT NULL,
    ended_at DOUBLE,
    host TEXT,
    pid INTEGER,
    config TEXT,
    CONSTRAINT pk_parts PRIMARY KEY (run_id, part),
    CONSTRAINT fk_parts_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE samplers (
    id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    state TEXT NOT NULL,
    running INTEGER DEFAULT 0 NOT NULL,
    started_at DOUBLE NOT NULL,
    seen_at DOUBLE NOT NULL,
    details TEXT,
    CONSTRAINT pk_samplers PRIMARY KEY (id),
    CONSTRAINT fk_samplers_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE INDEX ix_samplers_run_id_seen_at ON samplers (run_id, seen_at);
CREATE TABLE steps (
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    part INTEGER NOT NULL,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    metrics TEXT,
    denominators TEXT,
    gradient TEXT,
    details TEXT,
    started_at DOUBLE NOT NULL,
    ended_at DOUBLE,
    CONSTRAINT pk_steps PRIMARY KEY (run_id, step, part),
    CONSTRAINT fk_steps_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE tasks (
    run_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    kind TEXT NOT NULL,
    domain TEXT NOT NULL,
    task_id TEXT NOT NULL,
    split TEXT,
    size INTEGER NOT NULL,
    state TEXT NOT NULL,
    priority DOUBLE DEFAULT 0 NOT NULL,
    part INTEGER DEFAULT 1 NOT NULL,
    version INTEGER,
    made_at DOUBLE NOT NULL,
    ended_at DOUBLE,
    taken_step INTEGER,
    details TEXT,
    CONSTRAINT pk_tasks PRIMARY KEY (run_id, round, ordinal),
    CONSTRAINT fk_tasks_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE INDEX ix_tasks_run_id_state_round_ordinal ON tasks (run_id, state, round, ordinal);
CREATE TABLE trajectories (
    id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    part INTEGER NOT NULL,
    round INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    domain TEXT NOT NULL,
    task_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    scored BOOLEAN NOT NULL,
    reward DOUBLE NOT NULL,
    success BOOLEAN NOT NULL,
    passing BOOLEAN NOT NULL,
    error TEXT,
    attempts INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    turn_rewards TEXT NOT NULL,
    segments INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    version_low INTEGER,
    version_high INTEGER,
    messages BLOB,
    metrics TEXT NOT NULL,
    details TEXT NOT NULL,
    sampling TEXT,
    sampler TEXT,
    started_at DOUBLE,
    ended_at DOUBLE NOT NULL,
    seconds DOUBLE DEFAULT 0 NOT NULL,
    pruned TEXT,
    CONSTRAINT pk_trajectories PRIMARY KEY (id),
    CONSTRAINT uq_trajectories_run_id_part_round_ordinal_sample_attempt UNIQUE (run_id, part, round, ordinal, sample, attempt),
    CONSTRAINT fk_trajectories_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE INDEX ix_trajectories_run_id_domain_task_id ON trajectories (run_id, domain, task_id);
CREATE INDEX ix_trajectories_run_id_ended_at_id ON trajectories (run_id, ended_at, id);
CREATE INDEX ix_trajectories_run_id_reward_id ON trajectories (run_id, reward, id);
CREATE INDEX ix_trajectories_run_id_round_ordinal_sample ON trajectories (run_id, round, ordinal, sample);
CREATE INDEX ix_trajectories_run_id_seconds_id ON trajectories (run_id, seconds, id);
CREATE INDEX ix_trajectories_run_id_success_reward ON trajectories (run_id, success, reward);
CREATE INDEX ix_trajectories_run_id_tokens_id ON trajectories (run_id, tokens, id);
CREATE INDEX ix_trajectories_run_id_turns_id ON trajectories (run_id, turns, id);
CREATE TABLE versions (
    run_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    part INTEGER NOT NULL,
    synced_at DOUBLE NOT NULL,
    checkpoint TEXT,
    metrics TEXT,
    CONSTRAINT pk_versions PRIMARY KEY (run_id, version, part),
    CONSTRAINT fk_versions_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE episodes (
    run_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    state TEXT NOT NULL,
    sampler TEXT,
    lease TEXT,
    lease_until DOUBLE,
    attempts INTEGER DEFAULT 0 NOT NULL,
    trajectory_id TEXT,
    details TEXT,
    CONSTRAINT pk_episodes PRIMARY KEY (run_id, round, ordinal, sample),
    CONSTRAINT fk_episodes_tasks FOREIGN KEY(run_id, round, ordinal) REFERENCES tasks (run_id, round, ordinal)
);
CREATE INDEX ix_episodes_run_id_state_lease_until ON episodes (run_id, state, lease_until);
CREATE INDEX ix_episodes_run_id_state_round_ordinal_sample ON episodes (run_id, state, round, ordinal, sample);
CREATE INDEX ix_episodes_sampler ON episodes (sampler);
CREATE TABLE requests (
    id INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    part INTEGER NOT NULL,
    round INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    role TEXT NOT NULL,
    number INTEGER NOT NULL,
    trajectory_id TEXT,
    turn INTEGER,
    endpoint TEXT,
    model TEXT,
    started_at DOUBLE NOT NULL,
    seconds DOUBLE,
    waited DOUBLE,
    version INTEGER,
    prompt_tokens INTEGER,
    cached_tokens INTEGER,
    completion_tokens INTEGER,
    segment INTEGER,
    token_start INTEGER,
    token_end INTEGER,
    follows INTEGER,
    kept INTEGER,
    messages TEXT,
    tools TEXT,
    reply TEXT,
    finish TEXT,
    sampling TEXT,
    error TEXT,
    CONSTRAINT pk_requests PRIMARY KEY (id),
    CONSTRAINT uq_requests_run_id_part_round_ordinal_sample_attempt_role_number UNIQUE (run_id, part, round, ordinal, sample, attempt, role, number),
    CONSTRAINT fk_requests_run_id FOREIGN KEY(run_id) REFERENCES runs (id),
    CONSTRAINT fk_requests_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
CREATE INDEX ix_requests_run_id_role_started_at ON requests (run_id, role, started_at);
CREATE INDEX ix_requests_trajectory_id ON requests (trajectory_id);
CREATE TABLE scores (
    trajectory_id TEXT NOT NULL,
    scorer TEXT NOT NULL,
    value DOUBLE,
    details TEXT,
    CONSTRAINT pk_scores PRIMARY KEY (trajectory_id, scorer),
    CONSTRAINT fk_scores_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
CREATE TABLE segments (
    trajectory_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    arrays BLOB,
    experts BLOB,
    CONSTRAINT pk_segments PRIMARY KEY (trajectory_id, number),
    CONSTRAINT fk_segments_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
CREATE TABLE tool_calls (
    id INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    part INTEGER NOT NULL,
    round INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    trajectory_id TEXT,
    turn INTEGER NOT NULL,
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    arguments TEXT,
    result TEXT,
    error TEXT,
    reward DOUBLE,
    by_user BOOLEAN DEFAULT false NOT NULL,
    started_at DOUBLE NOT NULL,
    seconds DOUBLE,
    CONSTRAINT pk_tool_calls PRIMARY KEY (id),
    CONSTRAINT uq_tool_calls_run_id_part_round_ordinal_sample_attempt_number UNIQUE (run_id, part, round, ordinal, sample, attempt, number),
    CONSTRAINT fk_tool_calls_run_id FOREIGN KEY(run_id) REFERENCES runs (id),
    CONSTRAINT fk_tool_calls_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
CREATE INDEX ix_tool_calls_run_id_name ON tool_calls (run_id, name);
CREATE INDEX ix_tool_calls_trajectory_id ON tool_calls (trajectory_id);
CREATE TABLE uses (
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    part INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    trajectory_id TEXT NOT NULL,
    segment INTEGER NOT NULL,
    minibatch INTEGER DEFAULT 0 NOT NULL,
    position INTEGER DEFAULT 0 NOT NULL,
    source TEXT,
    tokens INTEGER NOT NULL,
    arrays BLOB,
    CONSTRAINT pk_uses PRIMARY KEY (run_id, step, part, epoch, trajectory_id, segment),
    CONSTRAINT fk_uses_steps FOREIGN KEY(run_id, step, part) REFERENCES steps (run_id, step, part)
);
CREATE INDEX ix_uses_trajectory_id_step ON uses (trajectory_id, step);
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
