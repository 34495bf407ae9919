"""What tests share: ranks as threads or processes, and tiny models."""
