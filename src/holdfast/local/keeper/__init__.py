"""What runs in the keeper: it forks, watches, limits and reaps the workers."""
