"""The test suite; mirrors megatron/."""
