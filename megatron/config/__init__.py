"""The run's configuration: flags, one dataclass per concern, and the checks between them. Standard library only."""
