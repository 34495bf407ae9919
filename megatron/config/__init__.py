"""The run's configuration: flags, one dataclass per concern, and the checks between them. Standard library only."""

from megatron.config.flags import ConfigError, flag
from megatron.config.run import RunConfig, parse, parse_or_exit

__all__ = ["ConfigError", "RunConfig", "flag", "parse", "parse_or_exit"]
