"""What runs in a worker."""
