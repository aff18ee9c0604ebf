"""What trainer, keeper and workers say to each other."""
