"""What runs in the trainer: the host, the keeper's process, a channel per worker."""
