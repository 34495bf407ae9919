"""Process groups and everything that talks through them; the only floor that knows torch.distributed."""
