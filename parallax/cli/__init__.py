"""The `parallax` command: looks at schedules and checkpoints, without starting a run."""
