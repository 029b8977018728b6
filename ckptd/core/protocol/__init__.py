"""How daemons agree about one job: what happened (events), what daemons tell each other (messages), what the shell shall do
(instructions), the state machine between them (machine/), which snapshots could be restored, and the job's life."""
