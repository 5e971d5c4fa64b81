"""``LinearRecurrence``: linear attention, state space models, delta rules and gated vectors as one recurrence."""
