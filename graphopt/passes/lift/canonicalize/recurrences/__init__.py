"""Recurrences by meaning: a `Scan` or `Loop` whose step is a linear recurrence becomes ``LinearRecurrence``.

What a step computes is found out by running it, as for norms (:mod:`.meaning`): its body is cut out and run on states
of one row each, which tells what it does to a state, and which of its values are keys, values, queries, decays and
betas. What does not depend on the state is computed for all tokens at once in front of the new node
(:mod:`.sequences`). Then both run on random tokens and must agree.
"""
