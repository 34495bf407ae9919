"""Where the wall time of a run went: events, their append-only file, and the account drawn from it."""
